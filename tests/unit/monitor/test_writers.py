"""Writers beside metrics.jsonl: what is said before a run starts, and what happens when one fails."""

import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from strop import config as configs
from strop.cli import main
from strop.errors import ConfigError
from strop.monitor import writers
from strop.monitor.metrics import MetricsFile
from strop.monitor.trackers import Begin, Point, Tracker
from strop.types import Step


@pytest.mark.parametrize(
    ("name", "package"), [("tensorboard", "tensorboard"), ("wandb", "wandb"), ("mlflow", "mlflow-skinny")]
)
def test_a_library_that_is_missing_is_named_before_anything_begins(
    name: str, package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    setting = f'monitor.writers=["{name}"]'
    assert main(["demo", "--json", "--folder", str(tmp_path / "run"), "--set", setting]) == 2
    said = capsys.readouterr().err
    assert f"names {name}" in said
    assert f"pip install {package}, or leave it out" in said
    assert len(said.splitlines()) == 1
    assert not (tmp_path / "run").exists()


def test_a_writer_nobody_knows_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"monitor\.writers"):
        configs.load(sets=['monitor.writers=["tensorbored"]'])


class Moody(Tracker):
    """Takes nothing while `well` is not set."""

    def __init__(self, begin: Begin) -> None:
        self.where, self.id = "nowhere", begin.id or "first"
        self.begin, self.points, self.tries = begin, list[Point](), 0
        self.well, self.tried = threading.Event(), threading.Semaphore(0)
        self.closed: bool | None = None

    def write_past(self, points: Sequence[Point]) -> None:
        self.points = list(points)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        self.tried.release()
        if not self.well.is_set():
            raise ConnectionError("the server\nis away")
        self.points.append((step, metrics))

    def close(self, *, failed: bool) -> None:
        self.closed = failed


@pytest.fixture
def moody(monkeypatch: pytest.MonkeyPatch) -> list[Moody]:
    made: list[Moody] = []

    def make(begin: Begin) -> Moody:
        made.append(Moody(begin))
        return made[-1]

    monkeypatch.setitem(writers.KINDS, "tensorboard", make)
    monkeypatch.setattr(writers, "_library", lambda name: None)
    return made


CONFIG = configs.load(sets=['monitor.writers=["tensorboard"]', "seed=7"])
STEP = Step(lineage=1, number=1, rollouts=[], metrics={"actor/lr": 1.0}, time=0.0)


async def test_a_writer_that_fails_is_a_note_and_gets_everything_later(tmp_path: Path, moody: list[Moody]) -> None:
    notes: list[str] = []
    async with AsyncExitStack() as rooms:
        opened = await writers.Writers.open(rooms, CONFIG, tmp_path, notes.append)
        file = MetricsFile(tmp_path / "metrics.jsonl", [STEP], {(1, "test"): {"reward": 0.5}}, opened)
        (writer,) = moody
        for step in (2, 3):
            file.write(step, {"actor/lr": float(step)})
            assert writer.tried.acquire(timeout=5)
        writer.well.set()
        file.write(4, {"actor/lr": 4.0})
    assert [step for step, _ in writer.points] == [1, 1, 2, 3, 4]
    assert writer.points[1] == (1, {"val-core/test/reward/mean@1": 0.5})
    assert writer.closed is False
    assert writer.begin.settings["seed"] == 7
    assert [note for note in notes if "away" in note] == [
        "tensorboard took no metrics (ConnectionError: the server is away): they are tried again, and the run goes on"
    ]


async def test_what_is_never_delivered_is_said_and_a_run_that_fails_is_marked(
    tmp_path: Path, moody: list[Moody]
) -> None:
    notes: list[str] = []

    async def fall_over() -> None:
        async with AsyncExitStack() as rooms:
            opened = await writers.Writers.open(rooms, CONFIG, tmp_path, notes.append)
            opened.write(1, {"actor/lr": 1.0})
            raise RuntimeError("the run fell over")

    with pytest.raises(RuntimeError, match="the run fell over"):
        await fall_over()
    assert moody[0].closed is True
    assert notes[-1] == "tensorboard did not get every point; metrics.jsonl has them all"


async def test_a_writer_is_told_the_name_it_had(tmp_path: Path, moody: list[Moody]) -> None:
    for _ in range(2):
        async with AsyncExitStack() as rooms:
            await writers.Writers.open(rooms, CONFIG, tmp_path, lambda text: None)
    assert [writer.begin.id for writer in moody] == [None, "first"]
    assert moody[0].begin.name == tmp_path.name


async def test_a_writer_that_cannot_begin_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(begin: Begin) -> Tracker:
        raise PermissionError("log in first")

    monkeypatch.setitem(writers.KINDS, "tensorboard", refuse)
    monkeypatch.setattr(writers, "_library", lambda name: None)
    async with AsyncExitStack() as rooms:
        with pytest.raises(ConfigError, match="tensorboard could not begin: PermissionError: log in first"):
            await writers.Writers.open(rooms, CONFIG, tmp_path, lambda text: None)
