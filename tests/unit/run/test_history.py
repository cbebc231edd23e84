"""What a run came to, by the rewards that count; and which folders are runs at all."""

from pathlib import Path

import pytest

from strop.config import AlgorithmConfig, Config, LoopConfig
from strop.monitor import summary
from strop.monitor.metrics import MetricsFile, Scores
from strop.run.folder import RunFolder
from strop.run.history import find, read

WEIGHTS = {"correct": 1.0, "short": 0.5}
SCORES: Scores = {
    (0, "test"): {"correct": 0.25, "short": 0.5, "seen": 9.0},
    (2, "test"): {"correct": 0.75, "short": 1.0, "seen": 9.0},
    (2, "test-greedy"): {"correct": 1.0, "short": 0.0},
}


def config(steps: int = 2) -> Config:
    return Config(
        algorithm=AlgorithmConfig(rewards=WEIGHTS), loop=LoopConfig(steps=steps, eval_splits=("test",), eval_samples=3)
    )


def begun(folder: Path, steps: int = 2) -> RunFolder:
    run = RunFolder.create(folder)
    run.keep(config(steps))
    run.close()
    return run


def test_a_summary_is_of_the_rewards_that_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = {}

    def draw(
        path: Path, rewards: summary.Points, evaluated: dict[str, summary.Points], title: str, losses: summary.Points
    ) -> None:
        assert not losses
        drawn.update(evaluated)
        path.touch()

    monkeypatch.setattr(summary, "plot_rewards", draw)
    found = summary.summarize(config(), tmp_path, [], SCORES, seconds=1.0, done=True)
    assert (found.start, found.end, found.start_greedy, found.end_greedy) == (0.5, 1.25, 1.0, 1.0)
    assert drawn == {"test": [(0, 0.5), (2, 1.25)], "test-greedy": [(2, 1.0)]}
    assert found.after["test"] == SCORES[2, "test"]  # every reward is still there by itself


def test_where_none_of_them_was_given_there_is_no_total(tmp_path: Path) -> None:
    found = summary.summarize(config(), tmp_path, [], {(0, "test"): {"seen": 1.0}}, seconds=1.0, done=True)
    assert (found.start, found.end) == (None, None)


def test_a_run_is_listed_with_the_rewards_that_count(tmp_path: Path) -> None:
    run = begun(tmp_path / "run")
    MetricsFile(run.metrics, [], SCORES, samples=3)
    found = read(run.path)
    assert found.evaluated == [(0, 0.5), (2, 1.25)]
    assert (found.record.on, found.record.start, found.record.best, found.record.best_step) == ("test", 0.5, 1.25, 2)


def test_one_evaluation_has_no_end(tmp_path: Path) -> None:
    run = begun(tmp_path / "run")
    MetricsFile(run.metrics, [], {(0, "test"): SCORES[0, "test"]}, samples=3)
    found = read(run.path).record
    assert (found.start, found.end, found.best) == (0.5, None, 0.5)


def test_what_an_evaluation_leaves_is_no_run(tmp_path: Path) -> None:
    """It has no steps to resume. A run of no steps that was begun with `strop train` is summed up, and stays."""
    begun(tmp_path / "trained")
    begun(tmp_path / "eval" / "1-trained", steps=0)
    begun(tmp_path / "untrained", steps=0).path.joinpath("summary.json").write_text("{}")
    begun(tmp_path / "unreadable").path.joinpath("config.json").write_text('{"a setting": 1}')
    assert [path.name for path in find(tmp_path)] == ["trained", "unreadable", "untrained"]
    assert find(tmp_path / "eval") == []
    assert find(tmp_path / "eval" / "1-trained") == [tmp_path / "eval" / "1-trained"]  # it was asked for by name
