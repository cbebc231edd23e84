"""The demo as it ships, killed -9 again and again, and run with other numbers of agents: always the same bits.

It takes the time of several demos. STROP_KILL_SEED picks other moments than the default ones.
"""

import json
import os
import random
from pathlib import Path

import pytest

from tests import runs

pytestmark = [pytest.mark.fault, pytest.mark.slow, pytest.mark.timeout(1500)]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole") / "demo"
    runs.finish(runs.demo(folder), timeout=600)
    return folder


def test_killed_at_ten_random_moments(whole: Path, tmp_path: Path) -> None:
    """Each a while after a further tenth of the steps is there, which it may be already when the run is resumed."""
    made = json.loads((whole / "summary.json").read_text())
    draw, steps = random.Random(int(os.environ.get("STROP_KILL_SEED", "0"))), len(runs.story(whole).steps)
    delays = [draw.uniform(0, made["seconds"] / 12) for _ in range(10)]
    print("killed", [f"{delay:.1f} s" for delay in delays], "after each tenth of", steps, "steps")
    folder, command = tmp_path / "demo", runs.demo(tmp_path / "demo")
    for number, delay in enumerate(delays):
        there = runs.committed(folder, step=number * (steps - 2) // 10) if number else (folder / "config.json").exists
        assert runs.kill_when(command, runs.later(there, delay))
        command = runs.strop("train", "--resume", folder, "--json")
    runs.finish(runs.strop("train", "--resume", folder, "--json"), timeout=600)
    runs.same(whole, folder)
    assert runs.metrics(folder) == runs.metrics(whole)
    ours, theirs = (json.loads((place / "summary.json").read_text()) for place in (folder, whole))
    assert ours["scores"] == theirs["scores"]
    assert ours["max_logprob_diff"] < 1e-4


def test_four_agents_at_once(whole: Path, tmp_path: Path) -> None:
    runs.finish(runs.demo(tmp_path / "demo", "runner.workers=4"), timeout=1400)
    runs.same(whole, tmp_path / "demo")


def test_one_agent_at_a_time(whole: Path, tmp_path: Path) -> None:
    """Nothing is sampled beside it, so it takes many times as long: its first steps."""
    runs.finish(runs.demo(tmp_path / "demo", "runner.workers=1", "loop.steps=4", "loop.eval_splits=[]"), timeout=1400)
    one, all = runs.story(tmp_path / "demo"), runs.story(whole)
    assert one.tokens().items() <= all.tokens().items()
    assert len(one.tokens()) > 4 * 64
    assert [step.digest for step in one.steps] == [step.digest for step in all.steps[:4]]
