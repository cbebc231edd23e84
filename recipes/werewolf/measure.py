"""Trains the wolves, and plays held-out games before and after: the wolves' win rate, with intervals.

    python recipes/werewolf/measure.py [--limit 240 110] [--games 192] [--set a.b=c] [--json FILE]

Before and after are the same deals with the same seeds. The three parts (evaluation, training, evaluation) are commands
of their own, so that each can be stopped in time: training after the step at hand, with a checkpoint; of evaluations
those games count then that were played both before and after, which favours short ones (`cut` says so). Where the
configuration has players by rule of thumb (gateway.outside.scripted), their server is started on the port it names.

Each figure is [value, low, high] with a 95 % interval over games; of fewer than six games there is none.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from strop.config import Config, load
from strop.monitor.statistics import Score, compare, scores
from strop.store import open_store
from strop.types import Rollout

HERE = Path(__file__).parent
GRACE = 60.0
"""Seconds for the step at hand, once there are no more."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, default=HERE / "gpu.toml")
    parser.add_argument("--folder", type=Path, default=Path("runs/werewolf-wolves"), help="a folder that is not there")
    parser.add_argument(
        "--limit", type=float, nargs=2, default=(240.0, 110.0), metavar=("TRAINING", "EVALUATION"),
        help="seconds that training and each evaluation may take, starting included (default: 240 110)",
    )  # fmt: skip
    parser.add_argument("--games", type=int, help="held-out games (default: tasks_args.test)")
    parser.add_argument("--set", action="append", default=[], metavar="a.b=c", help="any setting of the run")
    parser.add_argument("--json", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    if arguments.folder.exists():
        sys.exit(f"{arguments.folder} is there already. Fix: choose another --folder")
    sets = arguments.set + ([f"tasks_args.test={arguments.games}"] if arguments.games else [])
    config = load(toml=arguments.config, sets=sets)
    before, run, after = (arguments.folder / name for name in ("before", "run", "after"))
    wanted = ["--config", arguments.config, *(f"--set={one}" for one in sets)]
    training, evaluation = arguments.limit
    with serve_opponent(config):
        parts = {
            "before": strop("eval", *wanted, "--split", "test", "--folder", before, limit=evaluation),
            "training": strop("train", *wanted, "--folder", run, limit=training),
            "after": strop("eval", run, "--split", "test", "--folder", after, limit=evaluation),
        }
    told = asyncio.run(measure(before, run, after)) | {
        "minutes": {name: minutes for name, (minutes, _) in parts.items()},
        "cut": [name for name, (_, cut) in parts.items() if cut],
    }
    print(json.dumps(told, indent=1))
    if arguments.json:
        arguments.json.write_text(json.dumps(told, indent=1) + "\n")


def strop(*arguments: object, limit: float) -> tuple[float, bool]:
    """Run a command for `limit` seconds at most: it is told to stop as by Ctrl-C, and again where it takes its time.
    Returns the minutes it took, and whether it was cut short."""
    print("strop", *arguments, file=sys.stderr, flush=True)
    began, cut = time.monotonic(), False
    command = [sys.executable, "-m", "strop.cli", *map(str, arguments), "--json"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        for seconds in (limit, GRACE, GRACE):
            try:
                process.wait(seconds)
                break
            except subprocess.TimeoutExpired:
                cut = True
                process.send_signal(signal.SIGINT)
        else:
            process.kill()
    if process.returncode and not cut:
        sys.exit(process.returncode)
    return round((time.monotonic() - began) / 60, 2), cut


@contextmanager
def serve_opponent(config: Config) -> Iterator[None]:
    """The players by rule of thumb, if there are any."""
    if (outside := config.gateway.outside.get("scripted")) is None:
        yield
        return
    command = [sys.executable, str(HERE / "scripted.py"), "--port", str(urlsplit(outside.url).port)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as server:
        assert server.stdout is not None
        if not server.stdout.readline():  # it says where it is once it is there
            sys.exit("the opponent's server did not start")
        try:
            yield
        finally:
            server.terminate()


async def measure(untrained: Path, run: Path, trained: Path) -> dict[str, Any]:
    before, after = [await read_games(folder / "1-trained") for folder in (untrained, trained)]
    both = sorted(after.keys() & before.keys())
    figures: dict[str, Any] = {}
    for name in ("wolves_win", "readable_wolves", "readable_village", "aim", "turns"):
        # What nobody could do in a game, for want of living wolves that voted, is in neither mean.
        told = [game for game in both if name in after[game] and name in before[game]]
        values = [{game: [side[game][name]] for game in told} for side in (before, after)]
        figures[name] = {
            "before": interval(scores(values[0])["mean@1"]),
            "after": interval(scores(values[1])["mean@1"]),
            "difference": interval(compare(values[1], values[0])["mean@1"]),
        } if told else None  # fmt: skip
    store = await open_store(run)
    try:
        steps = await store.steps()
        played = await store.stats()
    finally:
        await store.close()
    seconds = [round(step.metrics["timing_s/step"], 1) for step in steps]
    learnt = [int(step.metrics.get("agents/wolf/loss_tokens", 0)) for step in steps]  # 0: all wolves fared the same
    return {
        "games": len(both),
        **figures,
        "steps": len(steps),
        "step_seconds": seconds,
        "step_tokens": learnt,
        "training": played,
    }


async def read_games(folder: Path) -> dict[str, dict[str, float]]:
    """What came of every game that was played to its end."""
    store, found, last = await open_store(folder), dict[str, dict[str, float]](), None
    try:
        while page := await store.list(after=last):
            last = page[-1].id
            for rollout in page:
                if rollout.status == "succeeded":
                    turns = len(await store.turns(rollout.id))
                    found[rollout.task.id] = {**read_rewards(rollout), "turns": turns}
        return found
    finally:
        await store.close()


def read_rewards(rollout: Rollout) -> dict[str, float]:
    """Of a game: who won, and the means over its wolves, and over the village's players, of what each was given."""

    def mean(name: str, wolves: bool) -> float | None:
        values = [
            one.value
            for one in rollout.rewards
            if one.name == name and one.agent is not None and one.agent.startswith("wolf-") == wolves
        ]
        return sum(values) / len(values) if values else None

    told = {
        "wolves_win": rollout.reward("reward"),
        "readable_wolves": mean("format", wolves=True),
        "readable_village": mean("format", wolves=False),
        "aim": mean("aim", wolves=True),
    }
    return {name: value for name, value in told.items() if value is not None}


def interval(score: Score) -> list[float | None]:
    """A figure, and the ends of its 95 % interval."""
    return [None if value is None else round(value, 3) for value in (score.value, score.low, score.high)]


if __name__ == "__main__":
    main()
