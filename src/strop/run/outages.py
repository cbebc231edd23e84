"""Agents are not to blame for a model that does not answer: while no engine of a policy can, that is written down with
every rollout that runs, so that one which runs out of time is run again.

Left out: which of a rollout's agents asks that policy. Rollouts that need another one only are told as well.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import suppress

from strop.engines.base import Engine
from strop.errors import StropError
from strop.runners.pool import ENGINE_DOWN
from strop.store.base import Ref, Store
from strop.types import Event

LOOK = 1.0
"""Seconds between two looks."""
SHORT = 3.0
"""Seconds of an outage that need not be told."""
MESSAGE = "no engine of a policy could answer"


async def tell_of_outages(engines: Sequence[Engine], store: Store) -> None:
    """Watch the engines of all policies until cancelled."""
    began: float | None = None
    told: set[Ref] = set()
    while True:
        await asyncio.sleep(LOOK)
        if all(engine.serving for engine in engines):
            began = None
            told.clear()
            continue
        began = began or time.monotonic()
        if time.monotonic() - began >= SHORT:
            with suppress(StropError):  # an attempt is over, or the store is what ends the run
                await _tell(store, told)


async def _tell(store: Store, told: set[Ref]) -> None:
    after = None
    while page := await store.list(status="running", after=after):
        after = page[-1].id
        for rollout in page:
            if (ref := (rollout.id, rollout.attempts)) not in told:
                told.add(ref)
                data = {"source": "run", "code": ENGINE_DOWN, "message": MESSAGE}
                event = Event(rollout=ref[0], attempt=ref[1], kind="error", data=data, time=time.time())
                await store.add_events([event])
