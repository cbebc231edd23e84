"""The recipe coding-agent: repairs as tasks, and whole episodes of Claude Code and Codex, each in its container."""

import asyncio
import json
import shutil
import sys
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from strop import algorithms, config
from strop.cli import main
from strop.config import Config
from strop.engines.scripted import Scripted
from strop.imports import resolve
from strop.net.server import serve
from strop.run.gateway import make_gateway
from strop.run.learn import Learnt, assemble_batch, learn_all
from strop.run.prepare import prepare_policies
from strop.run.runtime import ServedPolicy, open_pool
from strop.run.state import PolicyLearner
from strop.store import open_store
from strop.store.base import Store
from strop.trajectory import Sample, check, pack
from strop.types import TERMINAL, Policy, Rollout, Step, Task, Turn
from tests.recipes.coding_model import CHECK, ISSUE, SUMMARY, play
from tests.recipes.trained import ROOT, needs, train
from tests.unit.run.tiny_run import Here

HERE = ROOT / "recipes" / "coding-agent"
tasks: Any = resolve(f"{HERE}/data.py:tasks", "tasks")
score: Any = resolve(f"{HERE}/reward.py:score", "agent")
make_model: Any = resolve(f"{HERE}/model.py:make", "agent")
repairs = sys.modules["repairs"]
needs_walls = pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed (make sandbox)")


@pytest.mark.parametrize("size", ["laptop", "gpu"])
def test_configs_are_whole(size: str) -> None:
    found = config.load(toml=HERE / f"{size}.toml")
    for agent in (found.agent, *found.agents.values()):
        assert (ROOT / found.runner.container.folder / agent.split()[1]).is_file()
    assert (found.runner.container.runtime, found.runner.container.writable) == ("bubblewrap", False)


def test_tasks() -> None:
    made = tasks()
    assert Counter(task.split for task in made) == {"train": 16, "test": 8}
    assert tasks() == made
    both = tasks(programs=["claude", "codex"])
    assert Counter(task.agent for task in both) == {"claude": 24, "codex": 24}
    assert len({task.id for task in both}) == 48


def test_what_is_tested_is_nowhere_that_an_agent_looks() -> None:
    """Neither in its task, but for the example that an issue may give, nor in the folder that its container shows."""
    seen = {path.name: path.read_text() for path in (HERE / "inside").rglob("*.py")}
    assert seen.keys() == {"agent.py"}
    for task in tasks():
        hidden = repairs.BY_NAME[task.data["package"]].hidden
        told = "\n".join([*task.data["files"].values(), task.data["issue"]])
        assert sum(call in told for call in hidden) <= 1, task.id
        assert not any(call in seen["agent.py"] for call in hidden)


@pytest.mark.parametrize("task", tasks(), ids=lambda task: task.id)
def test_a_bug_is_no_fault_of_the_known_tests(task: Task) -> None:
    """They pass before and after the repair: what is wrong the issue says."""
    package = repairs.BY_NAME[task.data["package"]]
    space: dict[str, Any] = {}
    exec(task.data["files"][f"{package.name}.py"], space)
    assert [repr(eval(call, space)) for call in package.known] == [package.result(call) for call in package.known]


@needs_walls
@pytest.mark.parametrize("package", repairs.PACKAGES, ids=lambda package: package.name)
def test_a_repair_is_worth_what_its_hidden_tests_say(package: Any) -> None:
    mine = [task for task in tasks() if task.data["package"] == package.name]
    name = f"{package.name}.py"
    for task in mine:
        broken = score(task, {"files": task.data["files"], "code": 0})
        assert 0 < broken["reward"] < 1, task.id
        assert (broken["fixed"], broken["answered"]) == (0.0, 1.0)
    right = score(mine[0], {"files": {name: package.source}, "code": 1})
    assert right == {"reward": 1.0, "fixed": 1.0, "answered": 0.0}


@needs_walls
@pytest.mark.parametrize(
    "source", ["", "while True: pass", "raise SystemExit", "print('[(1, 6)]')\ndef merge(x): pass"]
)
def test_what_is_no_repair_is_worth_nothing(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(score.__globals__, "SECONDS", 0.5)
    score.__globals__["_box"].cache_clear()
    (task,) = [task for task in tasks() if task.id == "intervals-0"]
    found = score(task, {"files": {"intervals.py": source, "other.py": "x"}, "code": 0})
    score.__globals__["_box"].cache_clear()
    assert found == {"reward": 0.0, "fixed": 0.0, "answered": 1.0}


# --- whole episodes ---------------------------------------------------------------------------------------------------


@asynccontextmanager
async def episodes(command: str, folder: Path, task: Task) -> AsyncIterator[tuple[Config, Store]]:
    """Two rollouts of the recipe's own command, container and reward, one after the other, with a scripted model; the
    first repairs the package."""
    sets = [f"agent={command}", f"reward={Path(__file__).parent}/coding_score.py:score", "policy.model=strop/nano"]
    sets += ["policy.train.max_tokens=2000", "runner.workers=1", "algorithm.rewards={fixed = 1.0}"]
    found = config.load(toml=HERE / "laptop.toml", sets=[*sets, "learner.token_budget=20480"])
    (prepared,) = await prepare_policies(found)
    bug = repairs.BY_NAME[task.data["package"]].bugs[int(task.id[-1])]
    model = play(bug.right, bug.wrong, task.data["package"])
    store = await open_store(folder)
    engine = Scripted(model, prepared.renderer, context=100_000, chunk=64)
    policy = ServedPolicy(prepared=prepared, engine=engine, learner=None, place=folder)
    gateway = make_gateway(found, store, [policy])
    server = await serve(gateway)
    pool = open_pool(found, found.runner, store, gateway, server.url, folder / "runners.log")
    try:
        await pool.start()
        made = [Rollout(id=f"g0.{n}", group="g0", member=n, task=task, created=0.0, retries={}) for n in (0, 1)]
        await store.enqueue(made)
        pool.work()
        cursor, ended = 0, set[str]()
        while len(ended) < len(made):
            cursor, changed = await store.wait(cursor, timeout=1.0)
            ended |= {one.id for one in changed if one.status in TERMINAL}
        yield found, store
    finally:
        await pool.close()
        await server.close()
        await store.close()


def check_exact(turns: list[Turn]) -> Counter[str | None]:
    """What was sampled stands in the prompts that go on from it. Returns how many turns branched, by reason."""
    known = {turn.id: turn for turn in turns}
    for turn in turns:
        assert len(turn.logprobs) == len(turn.response_ids) > 0
        if turn.parent is not None:
            assert turn.prompt_ids[: turn.shared] == known[turn.parent].ids[: turn.shared]
        if turn.parent is not None and turn.branch is None:
            assert turn.shared == len(known[turn.parent].ids)
    return Counter(turn.branch for turn in turns[1:])


def is_helper(turn: Turn) -> bool:
    return ISSUE not in json.dumps(turn.messages)


BRANCHES = {
    # The sub-agent, and what goes on from the summary. The summary itself goes on from the conversation.
    "claude": {"new_conversation": 1, "changed_system": 1},
    # The summary, asked for without tools; what goes on from it; the sub-agent, whose instructions begin alike.
    "codex": {"changed_tools": 1, "edited_history": 2},
}


@pytest.mark.frameworks
@needs("coding-agent")
@needs_walls
@pytest.mark.parametrize("program", ["claude", "codex"])
async def test_whole_episodes(program: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A sub-agent and a compaction are branches, and every sampled token is trained, or excluded under a counted
    reason."""
    (task,) = [task for task in tasks() if task.id == "intervals-0"]
    async with episodes(f"python3 agent.py {program} --lean --compact 10600", tmp_path, task) as (found, store):
        rollouts = [await store.get(f"g0.{member}") for member in (0, 1)]
        samples = [Sample(rollout, await store.turns(rollout.id)) for rollout in rollouts]
        assert [(one.status, one.reward("fixed"), one.reward("answered")) for one in rollouts] == [
            ("succeeded", 1.0, 1.0),
            ("succeeded", 0.0, 1.0),
        ], [(one.detail, await store.events(one.id)) for one in rollouts]
        for sample in samples:
            branches = check_exact(sample.turns)
            assert {reason: count for reason, count in branches.items() if reason} == BRANCHES[program]
            assert branches[None] >= 4
            summed_up = [turn for turn in sample.turns if SUMMARY in json.dumps(turn.answer)]
            helpers = [turn for turn in sample.turns if is_helper(turn)]
            assert (len(summed_up), len(helpers)) == (1, 2)
            assert CHECK in json.dumps(helpers[0].messages)

        batch = assemble_batch(found, samples, "main")
        check(pack(batch, found.learner.token_budget), batch)
        learnt = await learn(found, samples, tmp_path / "model")
        for sample in samples:
            first, *others = sample.turns
            assert learnt.tokens[sample.rollout.id] == {
                first.id: {"excluded:first_look": len(first.response_ids)},
                **{turn.id: {"trained": len(turn.response_ids)} for turn in others},
            }
        sampled = sum(len(turn.response_ids) for sample in samples for turn in sample.turns)
        excluded = sum(len(sample.turns[0].response_ids) for sample in samples)
        told = {name: value for name, value in learnt.metrics.items() if name.startswith("tokens/")}
        assert told == {
            "tokens/sampled": sampled,
            "tokens/trained": sampled - excluded,
            "tokens/left_out/excluded:first_look": excluded,
        }
        assert (learnt.metrics["actor/skipped"], learnt.dropped) == (0.0, {})
        assert learnt.metrics["actor/grad_norm"] > 0

        await store.put_policy(Policy(name="main", version="1.0", model="strop/nano"))
        step = Step(lineage=1, number=1, rollouts=learnt.rollouts, metrics=learnt.metrics, time=0.0)
        await store.commit_step(step, learnt.tokens)
        assert await asyncio.to_thread(main, ["rollouts", str(tmp_path), "g0.0"]) == 0
        shown, turns = capsys.readouterr().out, samples[0].turns
        count, left_out = sum(len(turn.response_ids) for turn in turns), len(turns[0].response_ids)
        assert f"{count} tokens sampled, {count - left_out} trained, {left_out} excluded:first_look\n" in shown
        assert shown.count(" · branch: ") == sum(BRANCHES[program].values())


async def learn(found: Config, samples: list[Sample], model: Path) -> Learnt:
    """A step of a real learner, with a small model of random weights."""
    make_model(model, num_hidden_layers=1, num_attention_heads=1, hidden_size=16)
    algorithm = algorithms.make(found.algorithm, found.learner, found.policy)
    learner: Any = Here(model, found)
    policy = PolicyLearner(name="main", config=found, algorithm=algorithm, learner=learner)
    return await learn_all({"main": policy}, samples, step=1, versions={"1.0"})


@pytest.mark.frameworks
@needs("coding-agent")
@needs_walls
@pytest.mark.parametrize("program", ["claude", "codex"])
def test_a_step_with_the_embedded_engine(program: str, tmp_path: Path) -> None:
    """The recipe's own run, whose model knows nothing: episodes end, and their tokens are trained as they were
    sampled."""
    make_model(tmp_path / "model")
    sets = [f"agent=python3 agent.py {program} --lean", f"policy.model={tmp_path}/model", "loop.steps=1"]
    sets += ["algorithm.settings.entropy_coef=0.01"]  # so that rewards which are all the same are trained on too
    trained = train("coding-agent", tmp_path, *sets, "loop.groups=1", "loop.group_size=2", "policy.train.max_tokens=24")
    assert len(trained.rollouts) == 2
    assert {rollout.status for rollout in trained.rollouts} == {"succeeded"}
    assert trained.changed()
    for rollout in trained.rollouts:
        assert set(check_exact(trained.turns(rollout))) <= {None}
        assert rollout.tokens == {turn.id: {"trained": len(turn.response_ids)} for turn in trained.turns(rollout)}
    (step,) = trained.story.steps
    assert step.metrics["tokens/trained"] == step.metrics["tokens/sampled"] > 0
    assert step.metrics["training/rollout_logprobs_diff_max"] < 1e-4
