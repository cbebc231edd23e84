"""The loop over a store alone: no engine, no learner, no agents. What they would have said is written by hand."""

from __future__ import annotations

import re
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from strop import config as configs
from strop.algorithms.grpo import GRPO
from strop.config import MAIN, Config
from strop.errors import LearnerError
from strop.monitor.console import Silent
from strop.run.collect import collect
from strop.run.folder import RunFolder
from strop.run.gateway import choose_sampling
from strop.run.health import Collapse
from strop.run.notes import explain_skipped, note_trouble, stop_collapsed
from strop.run.state import Run, TrainedPolicy
from strop.store.base import Store
from strop.store.sqlite import SqliteStore
from strop.types import Policy, Reward, Rollout, Step, Task, Turn, version

TASKS = [Task(id=f"{split}-{n}", split=split) for n in range(4) for split in ("train", "test", "long")]


def run_over(store: Store, config: Config) -> Run:
    """A run of which only the store is there."""
    nothing: dict[str, Any] = dict.fromkeys(("folder", "gateway", "pool", "writers", "engines", "learners"))
    nobody: dict[str, Any] = dict.fromkeys(("learner", "engine", "publisher"))
    policies = {MAIN: TrainedPolicy(name=MAIN, config=config, algorithm=GRPO(), **nobody)}
    return Run(config=config, tasks=TASKS, view=Silent(), store=store, policies=policies, **nothing)


@pytest.fixture
async def store(tmp_path: Path):
    opened = await SqliteStore.open(tmp_path / "store.sqlite")
    await opened.put_policy(Policy(name=MAIN, version=version(1, 0), model="m"))
    yield opened
    await opened.close()


async def answer(store: Store, by: dict[str, str]) -> None:
    """Have every queued rollout end with one turn, sampled by the version that `by` has for it (default: 1.0)."""
    while leases := await store.lease("w", count=10, seconds=60.0):
        for lease in leases:
            id, now = lease.rollout.id, time.time()
            turn = Turn(
                id=f"{id}/1/0",
                rollout=id,
                attempt=1,
                prompt_ids=[1],
                response_ids=[2, 3],
                logprobs=[-1.0, -1.0],
                versions=[(0, version(1, 0)), (1, by.get(id, version(1, 0)))],
                finish="stop",
                started=now,
                ended=now,
            )
            await store.add_turns([turn])
            await store.finish(id, 1, rewards=[Reward(value=1.0)])


def configured(*sets: str) -> Config:
    return configs.load(sets=["loop.groups=2", "loop.group_size=2", "loop.eval_splits=['test','long']", *sets])


async def test_at_staleness_0_only_what_the_present_weights_sampled_is_trained_on(store: Store) -> None:
    """One token of another version is enough; there is nothing that would correct for it."""
    run = run_over(store, configured())
    await store.enqueue(run.next_rollouts())
    await answer(store, {"g000001.1": "1.7"})
    with pytest.raises(AssertionError, match=r"sampled from .*1\.7.*the weights are \['1\.0'\]"):
        await collect(run)


async def test_what_the_present_weights_sampled_is_collected(store: Store) -> None:
    run = run_over(store, configured())
    await store.enqueue(run.next_rollouts())
    await answer(store, {})
    assert [sample.rollout.id for sample in (await collect(run)).samples] == [
        *("g000000.0", "g000000.1", "g000001.0", "g000001.1")
    ]


async def test_where_rollouts_may_lag_other_versions_are_welcome(store: Store) -> None:
    run = run_over(store, configured("loop.staleness=2"))
    await store.enqueue(run.next_rollouts(run.groups_ahead))
    await answer(store, {"g000001.1": "1.7"})
    assert len((await collect(run)).samples) == 4


def test_no_epoch_ever_takes_a_task_of_another_split() -> None:
    run = run_over(SimpleNamespace(), configured())  # type: ignore[arg-type]
    ahead = run.next_rollouts(12)  # three epochs of four tasks
    assert {rollout.task.split for rollout in ahead} == {"train"}
    assert len({rollout.task.id for rollout in ahead}) == 4
    for name, rollouts in run.evaluations(0, "1.0").items():
        assert {rollout.task.split for rollout in rollouts} == {name.removesuffix("-greedy")}


def test_a_mode_samples_as_it_is_set() -> None:
    config = configured("policy.train.max_tokens=11", "policy.eval.max_tokens=22", "policy.eval.temperature=0.5")
    drawn = {
        mode: choose_sampling(config, Rollout(id="r", group="r", member=0, task=Task(id="t"), mode=mode, created=0.0))
        for mode in ("train", "eval", "greedy")
    }
    assert {mode: s.max_tokens for mode, s in drawn.items()} == {"train": 11, "eval": 22, "greedy": 22}
    assert {mode: s.temperature for mode, s in drawn.items()} == {"train": 1.0, "eval": 0.5, "greedy": 0.0}


def stepped(number: int, reward: float, **more: Any) -> Step:
    """A step of 24 rollouts that all got the same."""
    metrics = {f"critic/rewards/{name}": reward for name in ("mean", "min", "max")}
    rollouts = [f"g{number}.{n}" for n in range(24)]
    return Step(lineage=1, number=number, rollouts=rollouts, metrics=metrics | {"actor/skipped": 1.0}, time=0.0, **more)


def test_what_a_collapse_says_to_type_has_a_lower_rate(tmp_path: Path) -> None:
    """With the rate it had, it would collapse again."""
    run = run_over(SimpleNamespace(), configured("learner.optim.lr=0.02"))  # type: ignore[arg-type]
    run.folder = RunFolder.create(tmp_path / "my run")
    run.steps += [stepped(1, 0.5, checkpoint="step-000001-1"), *(stepped(n, 0.0) for n in range(2, 8))]
    begin = "if agent and rewards are sound, lower learner.optim.lr (it was 0.02) and begin again: "
    none = f"(loop.checkpoint_every). Fix: {begin}type what began this run, with --lr 0.002 behind it; with"
    with pytest.raises(LearnerError, match=re.escape(none)):
        stop_collapsed(run, Collapse(3, "why"), 1.0)
    run.folder.checkpoint("step-000001-1").mkdir()
    from_it = f"{begin}strop train --from '{run.folder.path}:best' --lr 0.002; with"
    with pytest.raises(LearnerError, match=re.escape(from_it)):
        stop_collapsed(run, Collapse(3, "why"), 1.0)
    run.folder.close()


def test_a_run_is_told_what_its_steps_lack() -> None:
    told = list[str]()
    run = run_over(SimpleNamespace(), configured("learner.optim.lr=0.02", "loop.collapse_patience=6"))  # type: ignore[arg-type]
    run.view.note = told.append  # type: ignore[method-assign]
    dropped = {f"g7.{n}": "zero_variance" for n in range(24)}
    run.steps += [stepped(n, 0.0) for n in range(1, 7)]
    run.steps[0].metrics.update({"critic/rewards/max": 1.0, "critic/rewards/mean": 1 / 24})
    run.steps.append(last := stepped(7, 0.0, dropped=dropped))
    note_trouble(run, last)
    assert told[0].startswith("nothing earned since step 1: the learning rate may be too high (learner.optim.lr=0.02),")
    (said,) = told[1:]
    assert said == (
        "step 7 had nothing to train on: all rewards of the step are equal (mean 0.000): nothing to compare"
    )


def test_a_step_without_a_difference_tells_the_mean() -> None:
    """So that a task that is solved does not look like a fault."""
    alike = {f"g1.{n}": "zero_variance" for n in range(24)}
    solved = stepped(1, 1.0, dropped=alike)
    assert explain_skipped(solved) == "all rewards of the step are equal (mean 1.000): nothing to compare"
    solved.metrics.update({"critic/rewards/min": 0.0, "critic/rewards/mean": 0.75})
    assert explain_skipped(solved) == "all rewards within each group are equal (mean 0.750): nothing to compare"
    solved.dropped["g1.0"] = "empty"
    assert explain_skipped(solved) == (
        "23 rollouts in groups whose members all got the same reward: nothing to compare; 1 rollouts in which the "
        "model said nothing"
    )
