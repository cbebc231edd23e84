"""Sessions that are open: what one costs however many there are, and which of them go."""

from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from starlette.types import Scope

from strop.gateway.sessions import LOOKS, Sessions
from strop.store.sqlite import SqliteStore
from strop.types import Lease, Rollout, Task


def call(lease: Lease) -> Scope:
    key = f"Bearer {lease.attempt.key}".encode()
    return {"type": "http", "path": "/v1/chat/completions", "headers": [(b"authorization", key)]}


async def begin(store: SqliteStore, count: int) -> list[Lease]:
    made = [Rollout(id=f"r{n}", group=f"g{n}", member=0, task=Task(id="t"), created=0.0) for n in range(count)]
    await store.enqueue(made)
    return await store.lease("runner", seconds=600, count=count)


class Watched(OrderedDict[Any, Any]):
    """Counts what is looked at in a walk through it."""

    looks = 0

    def __iter__(self) -> Iterator[Any]:
        for key in super().__iter__():
            self.looks += 1
            yield key

    def items(self) -> Any:
        return ((key, self[key]) for key in self)


async def test_a_session_costs_the_same_however_many_are_open(tmp_path: Path) -> None:
    store = await SqliteStore.open(tmp_path / "store.sqlite")
    sessions = Sessions(store, 200)
    sessions._open = watched = Watched()
    leases = await begin(store, 300)
    for lease in leases:
        session = await sessions.at(lease.rollout.id, "1", call(lease))
        session.in_flight = 1  # nobody can go
    assert len(sessions) == 300
    assert watched.looks <= 100 * LOOKS
    watched.looks = 0
    for lease in leases:
        sessions.forget(lease.rollout.id)
    assert (len(sessions), watched.looks) == (0, 0)
    await store.close()


async def test_idle_sessions_go_and_those_at_work_stay(tmp_path: Path) -> None:
    store = await SqliteStore.open(tmp_path / "store.sqlite")
    sessions = Sessions(store, 3)
    one, two, three, four, five = await begin(store, 5)
    for lease in (one, two, three):
        await sessions.at(lease.rollout.id, "1", call(lease))
    sessions["r0", 1].in_flight = 1
    await sessions.at(four.rollout.id, "1", call(four))
    await sessions.at(five.rollout.id, "1", call(five))
    assert [("r" + str(n), 1) in sessions for n in range(5)] == [True, False, False, True, True]
    assert await sessions.by_key(call(one)) is sessions["r0", 1]
    await store.close()
