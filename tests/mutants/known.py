"""Small changes to the source that must not pass the tests: each breaks a law of docs/concepts/design.md.

A mutant replaces texts that occur once in their files. When the source changes so that one does not occur any more,
write the mutant anew, so that it breaks the same thing in the new code.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src"


@dataclass(frozen=True)
class Mutant:
    """`changes` are (file below src/strop, text in it, text instead); `tests` those of which one must fail."""

    name: str
    changes: tuple[tuple[str, str, str], ...]
    tests: str

    def apply(self, source: Path) -> None:
        """Change the files below `source`, a folder like src. Raises `ValueError` where a text is not there once."""
        for file, old, new in self.changes:
            path = source / "strop" / file
            text = path.read_text()
            if (count := text.count(old)) != 1:
                raise ValueError(
                    f"mutant {self.name!r}: {old!r} occurs {count} times in src/strop/{file}: "
                    "write it anew in tests/mutants/known.py"
                )
            path.write_text(text.replace(old, new))


def _one(name: str, file: str, old: str, new: str, tests: str) -> Mutant:
    return Mutant(name, ((file, old, new),), tests)


LOOP, RUN = "tests/integration/test_loop.py", "tests/unit/run/test_loop.py"
RANKS = "tests/parity/test_ranks.py -m 'not slow'"
CHECKPOINT, CHECKPOINTS = "tests/unit/learner/test_checkpoint.py", "tests/unit/run/test_checkpoints.py"
COMMIT = "    await run.store.commit_step(step, learnt.tokens)\n"
FOLLOW = "    if begun is not None:\n        follow_checkpoint(run, step, begun)\n"
PUBLISH = "    await publish(run, step)\n"
FINISH = "    await finish_parts(run, name)\n"
NAME = "    await run.store.name_checkpoint(step.lineage, step.number, name)\n"
SQLITE, STORE = "tests/unit/store/test_sqlite.py", "tests/unit/store/test_store.py -k sqlite"
GRPO, CREDIT = "tests/unit/algorithms/test_grpo.py", "tests/unit/algorithms/test_credit.py"
ASSEMBLE, TREE = "tests/unit/trajectory/test_assemble.py", "tests/unit/trajectory/test_token_tree.py"
CHAT = "tests/integration/gateway/test_chat_completions.py -k 'conversation or keys'"
RAW = "tests/integration/gateway/test_completions.py"
SESSION = "tests/unit/gateway/test_session.py"
ENGINE = "tests/parity/test_embedded_agreement.py -k 'version'"

COPIES, PREPARE = "tests/unit/run/data/test_copies.py", "tests/unit/run/data/test_prepare.py"

MUTANTS = (
    # -- grammars
    _one(
        "what a grammar forbade has a part in learning",
        "learner/learner.py",
        "self._masks = EntryMasks.of(batch, self.folder, find_head(self.model).out_features, self._masks)",
        "self._masks = None",
        "tests/e2e/test_prescribed.py",
    ),
    _one(
        "the masks of one batch are used for another",
        "learner/masks.py",
        "if before is not None and before._about == about and turns <= before._turns:",
        "if before is not None:",
        "tests/unit/learner/test_masks.py",
    ),
    _one(
        "what vLLM drew is not compared with its grammar",
        "engines/vllm/protocol.py",
        "await held.check(piece.ids)",
        "pass",
        "tests/unit/engines/test_vllm_grammars.py",
    ),
    _one(
        "requests wait for the grammars of others",
        "engines/embedded/core.py",
        "if coming and len(coming) == len(self.waiting) and not self.running:",
        "while not all(request.compiled.done() for request in coming if request.compiled):",
        "tests/unit/engines/test_matchers.py",
    ),
    _one(
        "a text that is forced may be spelt in one way alone",
        "models/grammar.py",
        "UNFORCED = '%llguidance {\"no_forcing\": true}'",
        "UNFORCED = '%llguidance {}'",
        "tests/unit/models/test_grammar.py",
    ),
    _one(
        "calls of strict tools may have any arguments",
        "gateway/prescribe.py",
        'one.get("parameters") or {}, one["name"] in request.strict)',
        'one.get("parameters") or {}, False)',
        "tests/unit/gateway/test_prescribe.py",
    ),
    # -- stored data
    _one(
        "stored data passes for what the present weights sampled",
        "run/data/copies.py",
        "versions=[(0, DATA)] if turn.response_ids else [],",
        "versions=turn.versions,",
        COPIES,
    ),
    _one(
        "a copy that was never finished is left to an agent",
        "run/data/copies.py",
        'if lease.rollout.mode == "train":',
        "if False:",
        COPIES,
    ),
    _one(
        "stored rollouts of held-out tasks are trained on",
        "run/data/rollouts.py",
        'return "held_out" if rollout.task.split in held_out else None',
        "return None",
        PREPARE,
    ),
    _one(
        "an answer of weight 0 carries loss",
        "algorithms/offline.py",
        'return turn.requested.get("weight") == 0',
        "return False",
        "tests/unit/algorithms/test_sft.py",
    ),
    # -- the loop
    _one(
        "evaluation tasks are trained on",
        "run/state.py",
        'tasks = [task for task in self.tasks if task.split == "train"]',
        "tasks = self.tasks",
        RUN,
    ),
    _one(
        "evaluation samples as training does",
        "run/gateway.py",
        "config.policy.eval.sampling()",
        "config.policy.train.sampling()",
        RUN,
    ),
    _one("published before it is committed", "run/loop.py", COMMIT + FOLLOW + PUBLISH, PUBLISH + COMMIT + FOLLOW, LOOP),
    _one("checkpoint named before it is whole", "run/checkpoints.py", FINISH + NAME, NAME + FINISH, CHECKPOINTS),
    _one(
        "checkpoint of weights that go on changing",
        "learner/learner.py",
        "copied = self._snapshots.copy((weights, state))",
        "copied = (weights, state)",
        CHECKPOINT,
    ),
    _one(
        "a micro-batch that a rank only repeats is trained on",
        "learner/learner.py",
        "((shares if own else 0) * loss).backward()",
        "(shares * loss).backward()",
        RANKS,
    ),
    _one(
        "gradients of ranks are averaged",
        "learner/sharding.py",
        "each.set_gradient_divide_factor(1.0)",
        "each.set_gradient_divide_factor(2.0)",
        RANKS,
    ),
    _one(
        "entries of a micro-batch over two ranks are mixed up",
        "learner/sequence_parallel.py",
        "where[each] = rank * most + np.arange(len(each))",
        "where[each] = rank * most + np.arange(len(each))[::-1]",
        RANKS,
    ),
    _one(
        "a checkpoint that is being written is pruned",
        "run/checkpoints.py",
        "[run.writing.name] if run.writing is not None else []",
        "[]",
        CHECKPOINTS,
    ),
    _one(
        "adaptive KL coefficient not restored",
        "run/resume.py",
        "policy.algorithm.resume(",
        "dict(",
        LOOP,
    ),
    _one("adaptive KL coefficient not restored by replay", "run/replay.py", "algorithm.resume(", "dict(", LOOP),
    _one("any version is trained on at staleness 0", "run/collect.py", "sampled_by <= set(run.versions)", "True", RUN),
    _one("checkpoint not fsynced", "files.py", "os.fsync(handle)", "pass", CHECKPOINT),
    # -- token law
    Mutant(
        "last sampled token dropped",
        (
            ("gateway/record.py", "response_ids=choice.ids,", "response_ids=choice.ids[:-1],"),
            ("gateway/record.py", "logprobs=choice.logprobs,", "logprobs=choice.logprobs[:-1],"),
        ),
        CHAT,
    ),
    _one(
        "sampled text tokenised again",
        "gateway/contexts.py",
        "        path = turn.ids\n",
        "        path = turn.prompt_ids + renderer.encode(renderer.decode(turn.response_ids))\n",
        SESSION,
    ),
    _one("an entry read one position late", "trajectory/token_tree.py", "len(rows) - 1  #", "len(rows)  #", TREE),
    _one(
        "logprobs belong to the token before",
        "trajectory/assemble.py",
        "        behaviour=behaviour,",
        "        behaviour=np.roll(behaviour, 1),",
        ASSEMBLE,
    ),
    _one(
        "the learner ignores the temperature",
        "learner/logprobs.py",
        "    logits = logits.to(temperature.dtype) / temperature[:, None]\n",
        "    logits = logits.to(temperature.dtype)\n",
        "tests/unit/learner/test_learner.py",
    ),
    _one(
        "the engine ignores the temperature",
        "engines/embedded/sampler.py",
        "torch.tensor([s.temperature or 1.0 for s in samplings]",
        "torch.tensor([1.0 for s in samplings]",
        "tests/unit/engines/test_embedded.py -k plain_forward_pass",
    ),
    # -- credit law
    _one(
        "baseline over turns, not rollouts",
        "algorithms/credit.py",
        "mean = (weight * value).sum() / rollouts",
        "mean = value.mean()",
        f"{GRPO} {CREDIT}",
    ),
    _one(
        "what an agent did not get is not held against it",
        "algorithms/credit.py",
        "if whole or batch.stand_in[s] is not None:",
        "if (whole and s in given) or batch.stand_in[s] is not None:",
        CREDIT,
    ),
    _one("deviation with ddof 0", "algorithms/credit.py", "/ (rollouts - 1)) + EPSILON", "/ rollouts) + EPSILON", GRPO),
    _one(
        "what may not train does",
        "trajectory/assemble.py",
        "np.array([reason is None for reason in skipped], bool)[turn]",
        "np.ones(count, bool)",
        ASSEMBLE,
    ),
    _one(
        "advantage on the turn before",
        "algorithms/grpo.py",
        "per_turn[batch.entries.turn]",
        "per_turn[np.maximum(batch.entries.turn - 1, 0)]",
        GRPO,
    ),
    _one(
        "dropped before the baseline",
        "trajectory/batch.py",
        "    def drop(self, sample: int, reason: str) -> None:\n",
        "    def drop(self, sample: int, reason: str) -> None:\n        self.counted[sample] = False\n",
        f"{GRPO} {CREDIT} tests/unit/algorithms/test_filters.py",
    ),
    # -- durability law
    _one(
        "a step without what it consumed",
        "store/transitions.py",
        'db.executemany("INSERT INTO consumed VALUES (?, ?, ?, ?, ?)", consumed)',
        "pass",
        STORE,
    ),
    _one("a rollout trained on twice", "store/transitions.py", "    if taken:\n", "    if False:\n", STORE),
    _one("attempts that are over may write", "store/transitions.py", "if row[0] is not None:", "if False:", STORE),
    _one("no write-ahead log", "store/sqlite.py", "journal_mode = WAL", "journal_mode = DELETE", SQLITE),
    _one("a new line supersedes nothing", "store/sql.py", "WHERE number > ?", "WHERE number > ? + 1000000", STORE),
    _one(
        "checksums are not compared",
        "models/checksums.py",
        "_sum(file) == noted",
        "bool(_sum(file))",
        "tests/unit/learner/test_damaged.py -k 'bit_flipped and model'",
    ),
    _one(
        "lost steps are not missed",
        "run/resume.py",
        "    if missing:\n",
        "    if False:\n",
        "tests/unit/run/test_resume.py -k missed",
    ),
    # -- gateway
    _one("a branch without its reason", "gateway/record.py", "branch=prompt.branch,", "branch=None,", RAW),
    _one("a turn without its parent", "gateway/record.py", "parent=prompt.parent,", "parent=None,", CHAT),
    _one(
        "any key opens an open session",
        "gateway/sessions.py",
        "if not is_opened_by(session.attempt, keys):",
        "if not keys:",
        CHAT,
    ),
    _one(
        "streams lose what is said last",
        "gateway/generate.py",
        "            pieces += self._end(chunk.finish)\n",
        "            self._end(chunk.finish)\n",
        CHAT,
    ),
    # -- weights
    _one(
        "a new version under the old name",
        "engines/embedded/core.py",
        "self.versions[policy] = version\n",
        "pass\n",
        ENGINE,
    ),
    _one(
        "weights loaded while gateway workers have answers in flight",
        "engines/remote.py",
        "asyncio.gather(self._idle.wait(), *(holder.wait_until_idle() for holder in self._holders))",
        "self._idle.wait()",
        "tests/integration/gateway/test_direct_line.py -k two_versions",
    ),
    _one(
        "requests for a server whose weights are being replaced",
        "engines/remote.py",
        "if not self._paused and not self._num_loads:",
        "if not self._paused:",
        "tests/unit/engines/test_vllm.py -k comes_back_during",
    ),
    Mutant(
        "what a replaced gateway worker sends is taken",
        tuple(
            ("gateway/worker_process.py", old, new)
            for old, new in (
                ("gone, self._replaced = self.gone.is_set(), True", "gone = self.gone.is_set()"),
                ("        self._tokens.cancel_all()\n        self.link.close()\n", ""),
            )
        ),
        "tests/integration/gateway/test_worker_addresses.py -k replaced_and_lives",
    ),
    _one(
        "old keys used with new weights",
        "engines/embedded/core.py",
        "        self.slots.forget_owner(self._owner(policy))\n",
        "",
        ENGINE,
    ),
    _one("sequences in flight keep old keys", "engines/embedded/core.py", "request.filled = 0", "pass", ENGINE),
    # -- token tree
    _one(
        "an entry laid out twice",
        "trajectory/token_tree.py",
        "            leaves.append([])\n",
        "            leaves.append([t])\n",
        TREE,
    ),
    _one(
        "positions count from the branch",
        "trajectory/token_tree.py",
        "np.arange(known, len(path)",
        "np.arange(0, new",
        TREE,
    ),
    _one(
        "a branch sees its sibling",
        "trajectory/token_tree.py",
        "self.where[known:], self.size",
        "self.where[known + 1 :], self.size",
        TREE,
    ),
    # -- prompts
    _one(
        "a call is sent before it is reserved",
        "run/prompts/ledger.py",
        "        self._write(CallRecord(call=call, attempt=attempt, key=key, tokens=tokens, cost=cost, time=time))\n",
        "        self._take(CallRecord(call=call, attempt=attempt, key=key, tokens=tokens, cost=cost, time=time))\n",
        "tests/unit/run/test_prompt_ledger.py",
    ),
    _one(
        "a call that was lost is not spent",
        "run/prompts/ledger.py",
        "        self.lost = len(self._open)\n",
        "        self.lost = len(self._open)\n        self.spent.calls -= self.lost\n",
        "tests/unit/run/test_prompt_ledger.py",
    ),
    _one(
        "a step ends in the middle",
        "run/prompts/session.py",
        "        self._aborted = True\n        raise OptimizationOver\n",
        "        raise OptimizationOver\n",
        "tests/e2e/test_prompts.py -k the_budget_of_calls",
    ),
    _one(
        "a prompt without its placeholder is tried",
        "algorithms/prompt_optimizer.py",
        "        elif find_missing(text, self.placeholders[name]):\n",
        "        elif False:\n",
        "tests/unit/algorithms/test_prompt_optimizer.py",
    ),
    _one(
        "a student moves away from its teacher",
        "algorithms/distill.py",
        "entries.advantage -= discount(",
        "entries.advantage += discount(",
        "tests/unit/algorithms/test_distill.py",
    ),
)
