"""A run with everything real in it but its end: it is stopped behind the commit of its third step, before that is
published, and taken up again. What is done in which order is seen where the loop hands over to the other rooms."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import pytest

from strop import config as configs
from strop import demo
from strop.config import Config
from strop.learner.process import PolicyClient
from strop.models.checksums import SUMS
from strop.monitor.console import Silent
from strop.run.folder import RunFolder
from strop.run.loop import train
from strop.run.replay import retrain
from strop.store.sqlite import SqliteStore
from strop.weights.publisher import Publisher
from tests import runs
from tests.runs import Story

LAST = "1.3"


class Stopped(Exception):
    """As if the process were killed at that moment."""


def config(folder: Path) -> Config:
    sets = [
        *("loop.steps=4", "loop.groups=2", "loop.group_size=2", "loop.checkpoint_every=2", "loop.eval_greedy=false"),
        *("loop.eval_splits=['test']", "policy.train.temperature=0.9", "policy.eval.temperature=0.4"),
        *("algorithm.settings.kl=reward", "algorithm.settings.kl_target=0.1", "algorithm.settings.kl_horizon=10"),
        *("runner.workers=4", f"tasks={Path(__file__).parents[1] / 'small.py'}:tasks"),
    ]
    return configs.load(base=demo.config(), sets=sets, folder=str(folder))


@dataclass
class Seen:
    """What the loop asked of other rooms, in its order, and what stood on the disk at that moment."""

    calls: list[tuple[str, str]] = field(default_factory=list)
    whole_when_named: dict[str, bool] = field(default_factory=dict)
    steps_at_publish: dict[str, list[str]] = field(default_factory=dict)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("loop") / "run"


@pytest.fixture(scope="module")
async def seen(folder: Path) -> Seen:
    """The run up to its stop."""
    seen, patch = Seen(), pytest.MonkeyPatch()
    commit_step, publish, save = SqliteStore.commit_step, Publisher.publish, PolicyClient.begin_save
    name_checkpoint = SqliteStore.name_checkpoint

    async def seen_commit(self, step, tokens):
        seen.calls.append(("commit", step.version))
        assert step.checkpoint is None
        await commit_step(self, step, tokens)

    async def seen_name(self, lineage, number, checkpoint):
        seen.calls.append(("name", f"{lineage}.{number}"))
        seen.whole_when_named[checkpoint] = (folder / "checkpoints" / checkpoint / SUMS).is_file()
        await name_checkpoint(self, lineage, number, checkpoint)

    async def seen_publish(self, version):
        seen.calls.append(("publish", version))
        reader = await SqliteStore.open(folder / "store.sqlite")
        seen.steps_at_publish[version] = [step.version for step in await reader.steps()]
        await reader.close()
        if version == LAST:
            raise Stopped
        await publish(self, version)

    async def seen_save(self, folder, meta):
        seen.calls.append(("save", meta["version"]))
        await save(self, folder, meta)

    patch.setattr(SqliteStore, "commit_step", seen_commit)
    patch.setattr(Publisher, "publish", seen_publish)
    patch.setattr(PolicyClient, "begin_save", seen_save)
    patch.setattr(SqliteStore, "name_checkpoint", seen_name)
    with pytest.raises(Stopped):
        await train(config(folder), Silent())
    patch.undo()
    return seen


@pytest.fixture(scope="module")
async def told(seen: Seen, folder: Path) -> Story:
    return await runs.told(folder)


@pytest.fixture(scope="module")
async def resumed(told: Story, folder: Path) -> Story:
    """The same run, gone on with."""
    await train(configs.from_json((folder / "config.json").read_bytes()), Silent(), resume=True)
    return await runs.told(folder)


async def test_copy_then_commit_then_publish(seen: Seen) -> None:
    assert [call for call in seen.calls if call[0] != "name"] == [
        ("commit", "1.1"),
        ("publish", "1.1"),
        ("save", "1.2"),
        ("commit", "1.2"),
        ("publish", "1.2"),
        ("commit", LAST),
        ("publish", LAST),
    ]


async def test_what_a_step_names_is_on_the_disk_when_it_is_named(seen: Seen, told: Story) -> None:
    """Which is after the step was committed, and before the next checkpoint."""
    named = {step.version: step.checkpoint for step in told.steps}
    assert named == {"1.1": None, "1.2": "step-000002-1", LAST: None}
    assert seen.whole_when_named == {"step-000002-1": True}
    assert seen.calls.index(("commit", "1.2")) < seen.calls.index(("name", "1.2"))


async def test_engines_serve_only_what_is_committed(seen: Seen, told: Story) -> None:
    """A version that was served but not committed would have sampled rollouts that nothing can reproduce."""
    assert seen.steps_at_publish == {"1.1": ["1.1"], "1.2": ["1.1", "1.2"], LAST: ["1.1", "1.2", LAST]}
    assert [step.version for step in told.steps] == ["1.1", "1.2", LAST]  # though its publishing failed


async def test_only_tasks_of_the_training_split_are_trained_on(told: Story) -> None:
    split = {rollout.id: rollout.task.split for rollout in told.rollouts}
    trained = [id for step in told.steps for id in step.rollouts]
    assert {split[id] for id in trained} == {"train"}
    assert len(set(trained)) == 12
    assert {rollout.task.split for rollout in told.rollouts if rollout.mode == "eval"} == {"test"}


async def test_training_and_evaluation_sample_as_each_is_set(told: Story) -> None:
    drawn: dict[str, set[float]] = {}
    for rollout in told.rollouts:
        drawn.setdefault(rollout.mode, set()).update(turn.sampling.temperature for turn in told.turns[rollout.id])
    assert drawn == {"train": {0.9}, "eval": {0.4}}


async def test_a_replayed_step_has_the_adaptive_coefficient_that_it_had(told: Story, folder: Path) -> None:
    store = await SqliteStore.open(folder / "store.sqlite")
    made = await retrain(store, RunFolder.config(folder), 3, lambda _: None)
    await store.close()
    assert made.base == 2
    assert made.metrics["actor/kl_coef"][0] is not None
    assert made.differ == {}


async def test_the_adaptive_coefficient_goes_on_where_it_was(told: Story, resumed: Story) -> None:
    """The step behind the checkpoint is made again: with the coefficient it had, which no checkpoint holds."""
    before = [step.metrics["actor/kl_coef"] for step in told.steps]
    assert len(set(before)) == 3
    assert [step.version for step in resumed.steps] == ["1.1", "1.2", "2.3", "2.4"]
    assert [step.metrics["actor/kl_coef"] for step in resumed.steps[:3]] == before
    assert [step.digest for step in resumed.steps[:3]] == [step.digest for step in told.steps]
