"""Which checkpoint is the best, where only agents are rewarded; and one that is written while the run goes on."""

import asyncio
import errno
import io
import os
import shutil
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from strop import config as configs
from strop.errors import LearnerError
from strop.learner import checkpoint
from strop.models.checksums import verify
from strop.run.checkpoints import find_half, finish_checkpoint, finish_writing, keep_checkpoints, rank_steps
from strop.run.folder import RunFolder
from strop.run.loop import advance
from strop.run.resume import restore_parts
from strop.run.state import Run
from strop.store.sqlite import SqliteStore
from strop.types import Step
from tests.limits import stretch
from tests.unit.run.tiny_run import closed, collected, opened, resumed, write_model

DUEL = ["algorithm.rewards={reward=0, score=1}", "policies.left.model=strop/nano", "policies.right.model=strop/nano"]


def team(left: float, right: float, **more: float) -> dict[str, float]:
    """What a step measured in which two agents were trained, and a judge was not. Totals are all 0."""
    metrics = {"critic/rewards/mean": 0.0, "reward/reward": left}
    for role, score, tokens in (("left", left, 9.0), ("right", right, 9.0), ("judge", 5 * (1 - left), 0.0)):
        metrics |= {f"agents/{role}/reward/score": score, f"agents/{role}/loss_tokens": tokens}
    return metrics | {name.replace("__", "/"): value for name, value in more.items()}


def order(*steps: Mapping[str, float], scores: Mapping[int, Mapping[str, float]] | None = None) -> list[int]:
    """The numbers of a run's steps from worst to best."""
    made = [
        Step(lineage=1, number=number, rollouts=[], metrics=dict(metrics), checkpoint=f"step-{number}", time=0.0)
        for number, metrics in enumerate(steps, 1)
    ]
    evaluated = {(step, "test"): dict(means) for step, means in (scores or {}).items()}
    run: Any = SimpleNamespace(config=configs.load(sets=DUEL), steps=made, scores=evaluated)
    return [step.number for step in rank_steps(run, made)]


def test_in_training_by_what_the_trained_agents_got() -> None:
    """The weights of a step sample the next one."""
    assert order(team(0.1, 0.1), team(0.6, 0.7), team(0.2, 0.2), team(0.2, 0.3)) == [2, 3, 4, 1]
    quiet = team(0.6, 0.7, agents__left__loss_tokens=0.0, agents__right__loss_tokens=0.0)  # both solved it, say
    assert order(team(0.1, 0.1), quiet, team(0.2, 0.2), team(0.2, 0.3)) == [2, 3, 4, 1]


def test_by_an_evaluation_of_the_trained_agents() -> None:
    def scored(left: float, right: float) -> dict[str, float]:
        return {"reward": left, "agents/left/reward/score": left, "agents/right/reward/score": right}

    steps = [team(0.5, 0.5)] * 3
    assert order(*steps, scores={1: scored(0.3, 0.9), 2: scored(0.9, 0.2), 3: scored(0.4, 0.4)}) == [3, 2, 1]


def test_what_one_gains_and_the_other_loses_leaves_the_newest() -> None:
    assert order(team(0.75, 0.25), team(0.25, 0.75), team(0.5, 0.5)) == [1, 2, 3]
    even = {step: {"agents/left/reward/score": step / 4, "agents/right/reward/score": 1 - step / 4} for step in (1, 2)}
    assert order(team(0.5, 0.5), team(0.5, 0.5), scores=even) == [1, 2]
    three = {1: (1 / 3, 1 / 3, 1 / 3), 2: (1 / 6, 4 / 6, 1 / 6)}  # the second sum is 1 but for a rounding
    rounded = {
        step: {f"agents/{k}/reward/score": score for k, score in enumerate(scores)} for step, scores in three.items()
    }
    assert order(team(0.5, 0.5), team(0.5, 0.5), scores=rounded) == [1, 2]


def test_where_whole_rollouts_are_rewarded_their_total_counts() -> None:
    """Also against steps and evaluations in which none of them happened to be."""
    low, high = ({"critic/rewards/mean": total, "reward/score": total} for total in (0.2, 0.8))
    assert order(low, team(0.0, 0.0, **high), team(0.9, 0.9, **low), team(0.9, 0.9)) == [3, 4, 2, 1]
    scores = {1: {"score": 0.5, "agents/left/reward/score": 0.0}, 2: {"agents/left/reward/score": 0.9}}
    assert order(low, high, scores=scores) == [2, 1]


def test_the_best_is_kept(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    folder, steps = RunFolder(tmp_path, io.BytesIO()), list[Step]()
    config = configs.load(sets=[*DUEL, "loop.keep_checkpoints=1"])
    run: Any = SimpleNamespace(config=config, folder=folder, steps=steps, scores={}, opponents=(), writing=None)
    for number, score in enumerate([0.1, 0.9, 0.2, 0.3], 1):
        folder.checkpoint(name := f"step-{number:06d}-1").mkdir()
        metrics = team(score, score)
        steps.append(Step(lineage=1, number=number, rollouts=[], metrics=metrics, checkpoint=name, time=0.0))
        keep_checkpoints(run)
    assert sorted(folder.checkpoints().values()) == [1, 4]
    assert RunFolder.best_checkpoint(tmp_path).name == "step-000001-1"


# -- written while the run goes on -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("tiny"))


class Gate(threading.Event):
    """While it is not set, half of a checkpoint is on the disk, and no more comes."""

    def __init__(self) -> None:
        super().__init__()
        self.reached = threading.Event()

    def clear(self) -> None:
        super().clear()
        self.reached.clear()

    async def wait_for_half(self) -> None:
        assert await asyncio.to_thread(self.reached.wait, stretch(10))


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    gate, write_sums = Gate(), checkpoint.write_sums

    def wait(*args: Any) -> None:
        gate.reached.set()
        gate.wait(stretch(10))  # a test that failed does not hang
        write_sums(*args)

    monkeypatch.setattr(checkpoint, "write_sums", wait)
    yield gate
    gate.set()


async def make_steps(run: Run, count: int) -> None:
    for _ in range(count):
        await advance(run, await collected(run))


async def named(run: Run) -> list[str | None]:
    stored = [step.checkpoint for step in await run.store.steps()]
    assert stored == [step.checkpoint for step in run.steps]
    return stored


async def test_a_step_names_its_checkpoint_once_that_is_whole(tmp_path: Path, model: Path, gate: Gate) -> None:
    """Steps are committed meanwhile; the next checkpoint waits for this one, and says for how long."""
    run = await opened(tmp_path / "run", model, "loop.checkpoint_every=2", "loop.steps=9")
    await make_steps(run, 3)
    assert await named(run) == [None, None, None]
    assert not run.folder.checkpoints()
    await gate.wait_for_half()
    assert find_half(run, "step-000002-1").is_dir()
    keep_checkpoints(run)
    fourth = asyncio.create_task(make_steps(run, 1))
    for _ in range(20):
        await asyncio.sleep(0.01)
    assert not fourth.done()
    assert len(await named(run)) == 3
    gate.set()
    await fourth
    assert (await named(run))[:3] == [None, "step-000002-1", None]
    assert run.steps[3].metrics["timing_s/save_checkpoint"] > 0.1
    verify(run.folder.checkpoint("step-000002-1"))
    await finish_checkpoint(run)
    assert await named(run) == [None, "step-000002-1", None, "step-000004-1"]
    digests = [step.digest for step in run.steps]
    for number in (2, 4):  # what it holds is what the weights were then
        await restore_parts(run, run.folder.checkpoint(f"step-00000{number}-1"))
        assert await run.policies["main"].learner.digest() == digests[number - 1]
    await closed(run)


async def test_a_run_that_is_killed_meanwhile_goes_back_to_the_one_before(
    tmp_path: Path, model: Path, gate: Gate
) -> None:
    run = await opened(tmp_path / "run", model, "loop.checkpoint_every=2", "loop.steps=9")
    gate.set()
    await make_steps(run, 3)
    await finish_checkpoint(run)
    gate.clear()
    await make_steps(run, 2)
    await gate.wait_for_half()
    killed = Path(shutil.copytree(run.folder.path, tmp_path / "killed"))  # as the files are in this moment
    digests = [str(step.digest) for step in run.steps]
    gate.set()
    await finish_checkpoint(run)
    await closed(run)
    assert (killed / "checkpoints" / ".step-000004-1.new" / "model.safetensors").is_file()
    again = ["1.1", "1.2", "2.3", "2.4", "2.5"]
    assert await resumed(killed, model) == (again, digests, [])
    assert not (killed / "checkpoints" / ".step-000004-1.new").exists()


async def test_one_that_was_whole_when_the_run_was_killed_is_found(tmp_path: Path, model: Path, monkeypatch) -> None:
    """A moment before the store would have known it."""
    run = await opened(tmp_path / "run", model, "loop.checkpoint_every=3", "loop.steps=9")
    whole, kept = asyncio.Event(), asyncio.Event()
    name_checkpoint = SqliteStore.name_checkpoint

    async def wait(self: SqliteStore, *args: Any) -> None:
        whole.set()
        await kept.wait()
        await name_checkpoint(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(SqliteStore, "name_checkpoint", wait)
        await make_steps(run, 4)
        await whole.wait()
        killed = Path(shutil.copytree(run.folder.path, tmp_path / "killed"))
        kept.set()
        await finish_checkpoint(run)
    digests = [str(step.digest) for step in run.steps]
    await closed(run)
    assert await resumed(killed, model) == (["1.1", "1.2", "1.3", "2.4"], digests, [])


async def test_what_kept_it_from_being_written_is_told_at_the_next_step(tmp_path: Path, model, monkeypatch) -> None:
    run = await opened(tmp_path / "run", model, "loop.checkpoint_every=2", "loop.steps=9")

    def refuse(*args: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    await make_steps(run, 1)
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "write_sums", refuse)
        await make_steps(run, 1)
        assert run.writing is not None
        await asyncio.wait([run.writing.named])
    with pytest.raises(
        LearnerError, match=r"step-000002-1 cannot be written: No space left on device\. Fix: free some"
    ):
        await make_steps(run, 1)
    assert await named(run) == [None, None]
    assert not list((run.folder.path / "checkpoints").iterdir())  # the next one needs the space
    await closed(run)


async def test_the_last_whole_one_stays_until_the_next_is(tmp_path: Path, model: Path, gate: Gate) -> None:
    run = await opened(tmp_path / "run", model, "loop.keep_checkpoints=1", "loop.steps=9")
    gate.set()
    await make_steps(run, 1)
    await finish_checkpoint(run)
    gate.clear()
    await make_steps(run, 1)
    keep_checkpoints(run)
    assert run.folder.checkpoints() == {"step-000001-1": 1}
    gate.set()
    await finish_checkpoint(run)
    run.scores |= {(1, "test"): {"reward": 0.1}, (2, "test"): {"reward": 0.9}}  # the best stays too
    keep_checkpoints(run)
    assert run.folder.checkpoints() == {"step-000002-1": 2}
    await closed(run)


async def test_whatever_else_goes_wrong_it_is_finished_first(tmp_path: Path, model: Path, gate: Gate) -> None:
    run, made = await opened(tmp_path / "run", model, "loop.steps=9"), asyncio.Event()

    async def fail() -> None:
        async with finish_writing(run):
            await make_steps(run, 1)
            made.set()
            raise ValueError("something else")

    failing = asyncio.create_task(fail())
    await made.wait()
    assert await named(run) == [None]
    gate.set()
    with pytest.raises(ValueError, match="something else"):
        await failing
    assert await named(run) == ["step-000001-1"]
    await closed(run)
