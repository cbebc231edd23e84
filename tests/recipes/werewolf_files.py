"""The files of the recipe `werewolf` as its runners find them, and what its tests share."""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import ThreadingHTTPServer
from typing import Any

import msgspec

from strop import algorithms
from strop.config import load
from strop.imports import resolve
from strop.run.learn import assemble_batch
from strop.trajectory.batch import Sample
from strop.types import Event
from tests.recipes.trained import ROOT

RECIPE = ROOT / "recipes" / "werewolf"
sys.path.append(str(RECIPE))  # as a runner has it, so that the files find each other
game, words, reading, scripted, plays = map(importlib.import_module, ("game", "words", "reading", "scripted", "play"))
Ask, Reply, Rules = game.Ask, game.Reply, game.Rules


def of(file: str, name: str) -> Any:
    """From a file whose name other recipes have too."""
    return resolve(f"{RECIPE / file}:{name}", "tasks")


tasks, score = of("data.py", "tasks"), of("reward.py", "score")

AGENTS = ["wolf-1", "wolf-2", "wolf-3", "villager-1", "villager-2", "villager-3", "seer", "witch", "hunter"]
NAMES = dict(enumerate(AGENTS, 1))
ROLES = {seat: name.partition("-")[0] for seat, name in NAMES.items()}
TABLE = game.Table(1, ROLES, NAMES)
"""Wolves sit at 1, 2 and 3, villagers at 4, 5 and 6, then the seer (7), the witch (8) and the hunter (9)."""


def scenes(events: list[Event], scene: str) -> list[dict[str, Any]]:
    return [event.data for event in events if event.kind == "message" and event.data.get("scene") == scene]


@contextmanager
def opponent() -> Iterator[str]:
    """The player's server on a free port."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), scripted.Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/v1"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def credit(*samples: Sample, **settings: Any) -> Any:
    """A batch after credit by laptop.toml, with some settings changed."""
    config = load(toml=RECIPE / "laptop.toml", sets=["learner.token_budget=32768"])
    config = msgspec.structs.replace(
        config,
        algorithm=msgspec.structs.replace(config.algorithm, settings={**config.algorithm.settings, **settings}),
    )
    batch = assemble_batch(config, list(samples), "main")
    algorithms.make(config.algorithm, config.learner, config.policy).assign_credit(batch)
    return batch
