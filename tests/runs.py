"""Whole runs from the outside: start them as a user would, kill them, and take their fingerprints."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from strop.store import open_store
from strop.store.sqlite import SqliteStore
from strop.types import Rollout, Step, Turn

SMALL = [
    *("loop.steps=4", "loop.groups=4", "loop.group_size=4", "loop.checkpoint_every=2", "loop.eval_splits=['test']"),
    "loop.eval_every=1",
    *("runner.workers=4", f"tasks={Path(__file__).parent / 'small.py'}:tasks"),
]
"""The demo, made small enough for a test."""


def strop(*arguments: str | Path) -> list[str]:
    return [sys.executable, "-m", "strop.cli", *map(str, arguments)]


def demo(folder: Path, *settings: str, seed: int = 0) -> list[str]:
    return strop("demo", "--folder", folder, "--seed", str(seed), "--json", *(f"--set={s}" for s in settings))


def finish(command: list[str], timeout: float = 280, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run a command that must succeed."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False, cwd=cwd)
    assert done.returncode == 0, done.stderr
    return done


def kill_when(command: list[str], ripe: Callable[[], bool], *, limit: float = 120) -> bool:
    """Start a command and kill -9 it once `ripe`; whether it was still running. Nothing of it may live on."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + limit
    while not ripe():
        assert time.monotonic() < deadline, "the moment never came"
        if process.poll() is not None:
            said = process.communicate()[1]
            assert process.returncode == 0, said
            return False
        time.sleep(0.005)
    family = descendants(process.pid)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    deadline = time.monotonic() + 10
    while left := [pid for pid in family if alive(pid)]:
        assert time.monotonic() < deadline, f"processes {left} outlived the run"
        time.sleep(0.05)
    return True


def disturb(
    command: list[str], ripe: Callable[[], bool], how: Callable[[list[int]], None], *, limit: float = 200
) -> subprocess.CompletedProcess[str]:
    """Run a command and, once `ripe`, do something to its processes."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + limit
    while not ripe():
        assert time.monotonic() < deadline, "the moment never came"
        assert process.poll() is None, "it ended before the moment came"
        time.sleep(0.005)
    how(descendants(process.pid))
    out, err = process.communicate(timeout=limit)
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def after(seconds: float) -> Callable[[], bool]:
    moment = time.monotonic() + seconds
    return lambda: time.monotonic() > moment


def later(ripe: Callable[[], bool], seconds: float) -> Callable[[], bool]:
    """So many seconds after another moment."""
    since: list[float] = []

    def is_later() -> bool:
        if not since and ripe():
            since.append(time.monotonic())
        return bool(since) and time.monotonic() - since[0] >= seconds

    return is_later


def committed(folder: Path, *, step: int, lineage: int | None = None) -> Callable[[], bool]:
    """Once a step of a lineage, or of any, is there."""

    def ripe() -> bool:
        try:
            with contextlib.closing(sqlite3.connect(f"file:{folder}/store.sqlite?mode=ro", uri=True)) as db:
                query = "SELECT 1 FROM steps WHERE lineage = coalesce(?, lineage) AND number = ?"
                return db.execute(query, (lineage, step)).fetchone() is not None
        except sqlite3.Error:
            return False  # not there yet

    return ripe


def named(folder: Path, *, lineage: int, step: int) -> Callable[[], bool]:
    """Once a step of a lineage names its checkpoint, which is whole then."""

    def ripe() -> bool:
        try:
            with contextlib.closing(sqlite3.connect(f"file:{folder}/store.sqlite?mode=ro", uri=True)) as db:
                query = "SELECT 1 FROM steps WHERE lineage = ? AND number = ? AND checkpoint IS NOT NULL"
                return db.execute(query, (lineage, step)).fetchone() is not None
        except sqlite3.Error:
            return False  # not there yet

    return ripe


def during_step(folder: Path, step: int, *, ended: int) -> Callable[[], bool]:
    """While a step is being collected: the one before it is committed, and `ended` of its rollouts have ended."""
    count = (
        "SELECT count(*) FROM rollouts WHERE mode = 'train' AND ended IS NOT NULL"
        " AND id NOT IN (SELECT rollout FROM consumed)"
    )

    def ripe() -> bool:
        try:
            with contextlib.closing(sqlite3.connect(f"file:{folder}/store.sqlite?mode=ro", uri=True)) as db:
                done = db.execute("SELECT max(number) FROM steps WHERE NOT superseded").fetchone()[0] or 0
                return done == step - 1 and db.execute(count).fetchone()[0] >= ended
        except sqlite3.Error:
            return False  # not there yet

    return ripe


def descendants(pid: int) -> list[int]:
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            parents[int(entry.name)] = int(fields[1])
    found: list[int] = []
    frontier = [pid]
    while frontier:
        frontier = [child for child, parent in parents.items() if parent in frontier]
        found += frontier
    return found


def alive(pid: int) -> bool:
    try:
        return (Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@dataclass
class Story:
    """All that a run recorded."""

    rollouts: list[Rollout]
    turns: dict[str, list[Turn]]
    steps: list[Step]
    history: list[Step]

    def tokens(self) -> dict[int, list[tuple[list[int], list[int], list[float]]]]:
        """What was sampled, by the rollout's seed, which names its place in the run whatever lineage it was in."""
        return {
            rollout.seed: [(turn.prompt_ids, turn.response_ids, turn.logprobs) for turn in self.turns[rollout.id]]
            for rollout in self.rollouts
            if rollout.status == "succeeded"
        }


def story(folder: Path, url: str = "") -> Story:
    """Of the store at `url`, or of the one in the run's folder."""
    return asyncio.run(told(folder, url))


async def told(folder: Path, url: str = "") -> Story:
    store = await (open_store(url) if url else SqliteStore.open(folder / "store.sqlite"))
    try:
        rollouts: list[Rollout] = []
        while page := await store.list(after=rollouts[-1].id if rollouts else None):
            rollouts += page
        turns = {rollout.id: await store.turns(rollout.id) for rollout in rollouts}
        return Story(rollouts, turns, await store.steps(), await store.steps(superseded=True))
    finally:
        await store.close()


def weights(folder: Path) -> str:
    """A hash of the last checkpoint's weights, byte for byte."""
    name = story(folder).steps[-1].checkpoint
    assert name is not None
    return hashlib.sha256((folder / "checkpoints" / name / "model.safetensors").read_bytes()).hexdigest()


def metrics(folder: Path) -> list[dict[str, float]]:
    """What a run measured, but for how long it took."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if not k.startswith(("timing_s/", "perf/"))} for line in lines]


def same(one: Path, other: Path) -> None:
    """Two runs sampled the same tokens and ended with the same weights, bit for bit."""
    mine, theirs = story(one), story(other)
    assert mine.tokens() == theirs.tokens()
    assert [step.digest for step in mine.steps] == [step.digest for step in theirs.steps]
    assert None not in [step.digest for step in mine.steps]
    assert weights(one) == weights(other)
