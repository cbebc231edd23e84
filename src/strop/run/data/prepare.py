"""Before a run on stored data begins: read its sources, choose what is learnt from, and write that down as data.jsonl.

What is left out is counted under a reason, and said. Where nothing is left the run is refused, with the counts.
"""

from __future__ import annotations

import asyncio
import math
import tempfile
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from fnmatch import fnmatchcase
from hashlib import blake2b
from pathlib import Path
from typing import IO

import msgspec
import numpy as np
from msgspec.structs import replace

from strop import algorithms
from strop.algorithms.offline import Candidate, Item, Offline, is_unweighted, measure_reward
from strop.config import Config, LoopConfig, resolve_policies, trained_policies
from strop.errors import ConfigError
from strop.gateway.template import Renderer
from strop.models.names import prepare_folder
from strop.run.data.dataset import NAME, DataSample, DataSet, Header, write_dataset
from strop.run.data.rollouts import find_owner, read_run, refuse_other_vocabulary
from strop.run.data.transcripts import read_file
from strop.run.folder import RunFolder
from strop.trajectory import explain
from strop.types import Rollout, Turn

DEFAULT_STEPS = LoopConfig().steps
WORDS = {
    "unfinished": "not ended",
    "failed": "failed",
    "mode": "of modes that algorithm.settings.rollouts leaves out",
    "split": "of splits that algorithm.settings.splits leaves out",
    "held_out": "of tasks that this run is evaluated on (algorithm.settings.splits can name them)",
    "no_answer": "without an answer that carries loss",
    "min_reward": "below algorithm.settings.min_reward",
    "top": "beyond algorithm.settings.top of their task",
    "duplicate": "with the very tokens of another",
    "equal_pair": "with the very tokens of the one they are compared with",
    "mix": "from sources that algorithm.settings.mix has at 0",
    "never_taken": "that no step takes, with so few epochs",
}
"""Why stored rollouts are left out before a run begins, in words."""


@dataclass(frozen=True)
class OfflinePolicy:
    """The one policy of a run that learns from stored data, and its algorithm."""

    name: str
    config: Config
    algorithm: Offline


def find_offline(config: Config) -> OfflinePolicy | None:
    """The policy that learns from stored data; None where agents are at work for all of them. Raises `ConfigError`
    where there are both: a step is made of the same rollouts for all policies."""
    trained, found = trained_policies(config), list[OfflinePolicy]()
    for name, own in trained.items():
        if issubclass(algorithms.find(own.algorithm.name), Offline):
            algorithm = algorithms.make(own.algorithm, own.learner, own.policy)
            assert isinstance(algorithm, Offline)
            found.append(OfflinePolicy(name, own, algorithm))
    if found and len(trained) > 1:
        raise ConfigError(
            f"policies.{found[0].name} learns from stored data ({found[0].config.algorithm.name}), and then no other "
            f"policy is trained, but {', '.join(name for name in trained if name != found[0].name)} would be. Fix: set "
            "`frozen` of the others"
        )
    return found[0] if found else None


def needs_agents(config: Config) -> bool:
    """Whether a run cannot be made without an agent and tasks. One on stored data can: then nothing is evaluated."""
    return bool(config.agent or config.tasks) or find_offline(config) is None


def open_data(config: Config, folder: Path) -> DataSet | None:
    """The data set of the run in `folder`, where it learns from one."""
    found = find_offline(config) if config.loop.steps else None
    return make_dataset(config, found.algorithm, folder / NAME) if found else None


def make_dataset(config: Config, algorithm: Offline, path: Path) -> DataSet:
    whole = config.loop.groups * config.loop.group_size
    size = algorithm.batch_size or max(1, whole // algorithm.item_size)
    data = DataSet(path, seed=config.seed, batch_size=size, epochs=algorithm.epochs)
    if algorithm.batch_size is None:  # an epoch is a step at least, however little data there is
        data.batch_size = min(size, max(1, int(data.epoch_size)))
    return data


async def prepare_data(config: Config, tell: Callable[[str], None]) -> Config:
    """Read what a new run learns from and write it into its folder. Returns the configuration with the steps that its
    epochs are. One whose agents are at work stays as it is."""
    policy, path = find_offline(config), Path(config.folder) / NAME
    if policy is None or not (config.loop.steps or policy.algorithm.epochs):
        return config
    if path.with_name("config.json").exists():  # the data of a run that is there, which is about to be refused
        return config
    refuse_contradictions(config, policy)
    if not needs_agents(config):
        config = replace(config, loop=replace(config.loop, eval_splits=()))
        tell("there is no agent and there are no tasks: nothing is evaluated")
    with tempfile.TemporaryFile() as spare:
        draft = Draft(spare)
        await read_sources(draft, config, policy)
        items = draft.choose(policy.algorithm)
        samples = sorted({line for item in items for line in item})
        lines = {line: n for n, line in enumerate(samples)}
        header = Header(
            sources=draft.sources,
            mix=[policy.algorithm.mix.get(source, 1.0) for source in draft.sources],
            items=[tuple(lines[line] for line in item) for item in items],
        )
        write_dataset(path, header, map(draft.read, samples))
    data = make_dataset(config, policy.algorithm, path)
    config = replace(config, loop=replace(config.loop, steps=count_steps(config, data)))
    tell(describe(draft, items, data, config.loop.steps))
    return config


class Draft:
    """What was read so far: candidates, each a line of `file`, and how many were left out, by reason."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._spans: list[tuple[int, int]] = []
        self.sources: list[str] = []
        self.candidates: list[Candidate] = []
        self.left_out: Counter[str] = Counter()

    def add(self, candidate: Candidate, sample: DataSample) -> None:
        line = msgspec.json.encode(sample)
        self._spans.append((self._file.tell(), len(line)))
        self._file.write(line)
        self.candidates.append(candidate)

    def read(self, line: int) -> bytes:
        start, size = self._spans[line]
        self._file.seek(start)
        return self._file.read(size)

    def choose(self, algorithm: Offline) -> list[Item]:
        """What is learnt from. Raises `ConfigError` where that is nothing."""
        num_read = len(self.candidates) + self.left_out.total()
        items, left = algorithm.choose(self.candidates)
        zero = {source for source in self.sources if algorithm.mix.get(source, 1.0) == 0}
        kept = [item for item in items if self.candidates[item[0]].source not in zero]
        left["mix"] += len({line for item in items for line in item} - {line for item in kept for line in item})
        self.left_out += left
        if not kept:
            there = f"{num_read} rollout{'s' * (num_read != 1)}"
            why = f": {explain_left_out(self.left_out)}" if self.left_out else ""
            raise ConfigError(
                f"there is nothing to learn from: of {there} in {', '.join(self.sources)} none is left{why}. Fix: "
                "name other runs or transcripts, or ask less of them"
            )
        size = math.fsum(algorithm.mix.get(self.candidates[item[0]].source, 1.0) for item in kept)
        if not round(size):
            raise ConfigError(
                f"algorithm.settings.mix leaves {size:.2g} {'pairs' if algorithm.item_size > 1 else 'rollouts'} to an "
                f"epoch, of {len(kept)}: it would be empty. Fix: raise it, or leave it out"
            )
        return kept


async def read_sources(draft: Draft, config: Config, policy: OfflinePolicy) -> None:
    """Every rollout and transcript that the algorithm names."""
    algorithm, own = policy.algorithm, policy.config
    model = await asyncio.to_thread(prepare_folder, own.policy)
    renderer = Renderer.from_folder(model, variables=own.policy.chat_template_kwargs, tools=own.policy.tools)
    policies = resolve_policies(config)
    draft.sources = [*algorithm.list_runs(), *algorithm.list_transcripts()]
    folders = find_folders(algorithm)
    vocabulary = renderer.tokenizer.get_vocab(with_added_tokens=True)
    for number, name in enumerate(draft.sources):
        if number < len(algorithm.list_runs()):
            source = read_run(
                folders[number],
                modes=algorithm.rollouts,
                splits=algorithm.splits,
                held_out=config.loop.eval_splits,
                left_out=draft.left_out,
            )
        else:
            source = _read_transcripts(name, renderer, policy)
        checked = set[str]()
        async with aclosing(source) as read:
            async for rollout, recorded in read:
                turns = [replace(turn, policy=find_owner(turn.agent, policies)) for turn in recorded]
                trained = [turn for turn in turns if carries_tokens(turn, policy)]
                if why := explain_skip(trained, own.learner.token_budget):
                    draft.left_out[why] += 1
                    continue
                if number < len(folders):
                    taken = {turn.id for turn in trained}
                    spoke = {turn.policy for turn in recorded if turn.id in taken}
                    await refuse_other_vocabulary(folders[number], spoke - checked, own, vocabulary)
                    checked |= spoke
                tokens = digest_turns(trained)
                reward = measure_reward(rollout, turns, algorithm.rewards, lambda agent: is_trained(agent, own))
                key = f"{number} {rollout.group} {rollout.task.id}"
                candidate = Candidate(source=name, task=rollout.task.id, key=key, reward=reward, tokens=tokens)
                draft.add(candidate, DataSample.of(number, rollout, turns))


def find_folders(algorithm: Offline) -> list[Path]:
    """The folders of the runs, all of which are there. Raises `PlaceError`."""
    folders = [Path(name).expanduser() for name in algorithm.list_runs()]
    for folder in folders:
        RunFolder.config(folder)
    return folders


async def _read_transcripts(
    name: str, renderer: Renderer, policy: OfflinePolicy
) -> AsyncGenerator[tuple[Rollout, list[Turn]]]:
    """Conversations as rollouts that ended."""
    own = policy.config.policy
    read = read_file(name, renderer, history=own.history, agent=_choose_agent(own.agents), policy=policy.name)
    for id, group, task, rewards, turns in read:
        yield (
            Rollout(id=id, group=group, member=0, task=task, status="succeeded", created=0.0, rewards=tuple(rewards)),
            turns,
        )
        await asyncio.sleep(0)


def _choose_agent(agents: Sequence[str]) -> str:
    """The name that speaks in transcripts."""
    plain = [name for name in agents if not any(sign in name for sign in "*?[")]
    if not plain:
        raise ConfigError("policy.agents has patterns only, and transcripts need a name. Fix: add one, such as main")
    return plain[0]


def is_trained(agent: str, config: Config) -> bool:
    return any(fnmatchcase(agent, pattern) for pattern in config.policy.agents)


def carries_tokens(turn: Turn, policy: OfflinePolicy) -> bool:
    """Whether a turn has tokens that a trained agent said."""
    ours = turn.policy == policy.name and is_trained(turn.agent, policy.config)
    return ours and bool(turn.prompt_ids and turn.response_ids)


def explain_skip(trained: Sequence[Turn], budget: int) -> str | None:
    """Why nothing of a rollout with these turns of trained agents would carry loss."""
    if all(turn.abandoned or is_unweighted(turn) for turn in trained):
        return "no_answer"
    return "over_budget" if any(len(turn.prompt_ids) + len(turn.response_ids) > budget for turn in trained) else None


def digest_turns(trained: Sequence[Turn]) -> bytes:
    """A digest of all that was seen and said in turns, and of which of them carry loss."""
    digest = blake2b(digest_size=16)
    for turn in trained:
        head = (len(turn.prompt_ids), len(turn.response_ids), turn.abandoned or is_unweighted(turn))
        digest.update(np.array([*head, *turn.prompt_ids, *turn.response_ids], np.int64).tobytes())
    return digest.digest()


# -- settings ----------------------------------------------------------------------------------------------------------


def refuse_contradictions(config: Config, policy: OfflinePolicy) -> None:
    """Settings that each make sense, but not together."""
    algorithm, loop, name = policy.algorithm, config.loop, policy.config.algorithm.name
    if not (sources := [*algorithm.list_runs(), *algorithm.list_transcripts()]):
        raise ConfigError(
            f"{name} learns from stored data, and none is named. Fix: set algorithm.settings.runs to the folder of a "
            "run, or algorithm.settings.transcripts to a file of conversations"
        )
    if twice := [source for source, n in Counter(sources).items() if n > 1]:
        raise ConfigError(
            f"{twice[0]} is named twice. Fix: name it once, and set algorithm.settings.mix to have it more"
        )
    if unknown := [source for source in algorithm.mix if source not in sources]:
        raise ConfigError(
            f"algorithm.settings.mix names {unknown[0]}, which is not among {', '.join(sources)}. Fix: name one of them"
        )
    given: Mapping[str, object] = {"loop.staleness": loop.staleness, "loop.max_groups": loop.max_groups}
    for setting, value in given.items():
        if value:
            raise ConfigError(
                f"{setting} is {value}, and {name} learns from stored data, which nobody samples. Fix: leave it out"
            )


def count_steps(config: Config, data: DataSet) -> int:
    """How many steps a run has: those of its epochs, or loop.steps. Raises `ConfigError` where these differ."""
    steps, given = data.num_steps, config.loop.steps
    if steps is None:
        return given
    if given not in (0, DEFAULT_STEPS, steps):
        raise ConfigError(
            f"algorithm.settings.epochs are {count_words(steps, 'step')} of {data.batch_size}, and loop.steps is "
            f"{given}. Fix: leave one of them out"
        )
    return steps


# -- words -------------------------------------------------------------------------------------------------------------


def describe(draft: Draft, items: Sequence[Item], data: DataSet, steps: int) -> str:
    """What a run learns from, in a sentence."""
    num = data.limit or steps * data.batch_size
    taken = [items[n] for n in data.find_taken(num)]
    lines, chosen = ({line for item in some for line in item} for some in (taken, items))
    left_out = draft.left_out + Counter(never_taken=len(chosen - lines))
    what = f"{len(lines)} of {len(lines) + left_out.total()} rollouts"
    pairs = f" in {count_words(len(taken), 'pair')}" if len(items[0]) > 1 else ""
    left = f"; left out: {explain_left_out(left_out)}" if left_out else ""
    epochs, in_steps = count_words(num / data.epoch_size, "epoch"), count_words(steps, "step")
    return f"learning from {what}{pairs}, {epochs} in {in_steps} of {data.batch_size}{left}"


def count_words(num: float, word: str) -> str:
    """So many of something.

    >>> count_words(1, "step"), count_words(128, "step"), count_words(0.5, "epoch")
    ('1 step', '128 steps', '0.5 epochs')
    """
    figure = str(num) if isinstance(num, int) else f"{num:.3g}"
    return f"{figure} {word}{'s' * (figure != '1')}"


def explain_left_out(left_out: Mapping[str, int]) -> str:
    ranked = sorted(left_out.items(), key=lambda item: -item[1])
    return ", ".join(f"{count} {WORDS.get(reason) or explain(reason)}" for reason, count in ranked if count)
