"""Strop's store, as the lap of `lap.py` asks it: the SQLite store in this process, or the client of `strop serve`.

A single verb carries a list of one; over HTTP that is one request per thing, as it is for the peer.
"""

from __future__ import annotations

import itertools
import secrets
import tempfile
import time
from collections.abc import Sequence
from typing import Any

from lap import LOGPROBS, PROMPT_IDS, REPORT, RESPONSE_IDS, TASK, Side, answer

from strop.store.base import Store
from strop.store.sqlite import SqliteStore
from strop.types import Event, Lease, Reward, Rollout, Task, Turn

try:
    from strop.store.remote import HttpStore
except ImportError:  # an older checkout that this one is compared with
    from strop.store.http.client import HttpStore  # pyright: ignore

LEASE = 600.0


class Strop(Side):
    """Ids begin with the lap's own name, since a served store outlives laps, and are counted, since the warm-up and the
    lap share a store: what is enqueued twice would be there once."""

    def __init__(self, store: Store, folder: tempfile.TemporaryDirectory[str] | None = None) -> None:
        self.store = store
        self._folder = folder
        self._name = secrets.token_hex(4)
        self._count = itertools.count()

    def made_rollout(self, number: int) -> Rollout:
        task = Task(id=f"task-{number}", data=TASK | {"number": number})
        group = f"{self._name}-{next(self._count):07}"
        return Rollout(id=f"{group}.0", group=group, member=0, task=task, created=1.0)

    def made_event(self, leased: Lease) -> Event:
        attempt = leased.attempt
        return Event(rollout=attempt.rollout, attempt=attempt.number, kind="reward", data=REPORT, time=1.0)

    def made_turn(self, leased: Lease) -> Turn:
        attempt = leased.attempt
        return Turn(
            id=f"{attempt.rollout}/{attempt.number}/{next(self._count)}",
            rollout=attempt.rollout,
            attempt=attempt.number,
            prompt_ids=PROMPT_IDS,
            response_ids=RESPONSE_IDS,
            logprobs=LOGPROBS,
            versions=[(0, "1.0")],
            finish="stop",
            started=1.0,
            ended=2.0,
        )

    async def enqueue(self, rollout: Rollout) -> None:
        await self.store.enqueue([rollout])

    async def lease(self, runner: str) -> Lease:
        (leased,) = await self.store.lease(runner, seconds=LEASE)
        return leased

    async def add_event(self, event: Event) -> None:
        await self.store.add_events([event])

    async def add_turn(self, turn: Turn) -> None:
        await self.store.add_turns([turn])

    async def finish(self, leased: Lease) -> None:
        attempt = leased.attempt
        await self.store.finish(attempt.rollout, attempt.number, rewards=[Reward(name="speed", value=0.5)])

    async def list(self, limit: int) -> int:
        return len(await self.store.list(limit=limit))

    async def enqueue_many(self, rollouts: Sequence[Any]) -> None:
        await self.store.enqueue(rollouts)

    async def lease_many(self, count: int) -> Sequence[Any]:
        return await self.store.lease("runner-0", seconds=LEASE, count=count)

    async def add_events(self, events: Sequence[Any]) -> None:
        await self.store.add_events(events)

    async def add_turns(self, turns: Sequence[Any]) -> None:
        await self.store.add_turns(turns)

    async def close(self) -> None:
        await self.store.close()
        if self._folder is not None:
            self._folder.cleanup()


async def _open(order: dict[str, Any]) -> Side:
    """Over HTTP where the order names a URL, else a fresh file in the folder it names."""
    if "url" in order:
        return Strop(await HttpStore.open(order["url"], order["key"]))
    folder = tempfile.TemporaryDirectory(dir=order["folder"], prefix=f"lap-{time.time_ns()}-")
    return Strop(await SqliteStore.open(f"{folder.name}/store.sqlite", order["synchronous"]), folder)


if __name__ == "__main__":
    answer(_open)
