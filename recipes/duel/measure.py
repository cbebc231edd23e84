"""Trains one side of the duel with several seeds and plays held-out games before and after, with intervals.

    python recipes/duel/measure.py [--seeds 0 1 2] [--folder runs/duel-seeds] [--json FILE]

Before and after are played with the same games and seeds, `strop eval --compare start`. Also told: what an answer that
is always given would score (it earns no point, so it can only draw where the other side has none either), and whether
the frozen side said the very same tokens after training as before it, with the same logprobs.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from strop.store import open_store

CONFIG = "recipes/duel/laptop.toml"
METRIC = "val-core/test/reward/mean@1"


def run(*arguments: object) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "strop.cli", *map(str, arguments)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        sys.exit(done.stderr)
    return json.loads(done.stdout)


async def read_games(folder: Path, agent: str) -> tuple[dict[int, Any], list[float]]:
    """What an agent said in every game, by the game's seed, and how many points it had."""
    store, said, points, after = await open_store(folder), dict[int, Any](), list[float](), None
    try:
        while page := await store.list(after=after):
            after = page[-1].id
            for rollout in page:
                turns = [turn for turn in await store.turns(rollout.id) if turn.agent == agent]
                said[rollout.seed] = [(turn.response_ids, turn.logprobs) for turn in turns]
                points += [one.value for one in rollout.rewards if (one.name, one.agent) == ("points", agent)]
        return said, points
    finally:
        await store.close()


def measure(seed: int, folder: Path) -> dict[str, Any]:
    trained = run("train", "--config", CONFIG, "--seed", seed, "--folder", folder / str(seed), "--json")
    place = folder / f"{seed}-eval"
    told = run("eval", trained["folder"], "--split", "test", "--compare", "start", "--folder", place, "--json")
    after, before = (one["scores"][METRIC] for one in told["evaluations"])
    said, points = asyncio.run(read_games(place / "1-trained", "right"))
    said_before, _ = asyncio.run(read_games(place / "2-trained", "right"))
    return {
        "seed": seed,
        "minutes": round(trained["seconds"] / 60, 1),
        "before": before,
        "after": after,
        "constant_answer": 0.5 * points.count(0.0) / len(points),
        "frozen_says_the_same": said == said_before,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--folder", type=Path, default=Path("runs/duel-seeds"))
    parser.add_argument("--json", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    found = []
    for seed in arguments.seeds:
        found.append(one := measure(seed, arguments.folder))
        print(json.dumps(one), flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
