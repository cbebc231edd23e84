"""What a served store does at every address: a method for each verb of the table in `store/rpc.py`, by its name."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping
from typing import Any, TypeVar

import msgspec
from starlette.types import Receive

from strop.errors import StoreError, Unavailable, UnknownId
from strop.net.asgi import ClientDisconnected, wait_for_disconnect
from strop.store import wire
from strop.store.base import Store
from strop.store.server.keys import AttemptKeys
from strop.store.turn_deltas import TurnDelta, shrink
from strop.types import Event, Lease, Policy, Rollout, Turn

T = TypeVar("T")
At = Mapping[str, str]
"""What stands in the address: `id`, and `n` for an attempt."""
CLOSING = Unavailable("the server is closing. Fix: ask again")


class Handlers:
    """`given` is the body or the query, `at` what stands in the address."""

    def __init__(self, store: Store, attempts: AttemptKeys) -> None:
        self._store, self._attempts = store, attempts
        self._closing, self._why = asyncio.Event(), CLOSING

    def close(self, why: StoreError = CLOSING) -> None:
        """End every request that waits for something to happen, and let none wait from now on. `why` is what those are
        told that cannot be told that nothing happened."""
        if not self._closing.is_set():
            self._why = why
            self._closing.set()

    # -- rollouts ------------------------------------------------------------------------------------------------

    async def finish(self, given: wire.FinishBody, at: At, receive: Receive) -> Rollout:
        rollout, number = at["id"], _number(at)
        return await self._store.finish(rollout, number, rewards=given.rewards, cause=given.cause, detail=given.detail)

    async def enqueue(self, given: list[wire.NewRollout], at: At, receive: Receive) -> wire.Queued:
        return wire.Queued(await self._store.enqueue([new.rollout() for new in given]), len(given))

    async def lease(self, given: wire.LeaseBody, at: At, receive: Receive) -> list[Lease]:
        work = self._store.lease(
            given.runner,
            seconds=given.seconds,
            count=given.count,
            wait=given.wait,
            token=given.token,
            rollout=given.rollout,
        )
        leases = await self._poll(work, receive, None) if given.wait else await work
        for lease in leases:
            self._attempts.add(lease.attempt)
        return leases

    async def begin(self, given: wire.BeginBody, at: At, receive: Receive) -> Lease:
        lease = await self._store.begin(given.rollout.rollout(), given.runner, seconds=given.seconds)
        self._attempts.add(lease.attempt)
        return lease

    async def heartbeat(self, given: wire.HeartbeatBody, at: At, receive: Receive) -> wire.EndedAttempts:
        return wire.EndedAttempts(await self._store.heartbeat(given.attempts, seconds=given.seconds))

    async def cancel(self, given: wire.CancelBody, at: At, receive: Receive) -> wire.Done:
        await self._store.cancel(given.rollouts, detail=given.detail, cause=given.cause)
        return wire.Done()

    async def reclaim(self, given: wire.ReclaimBody, at: At, receive: Receive) -> wire.Reclaimed:
        return wire.Reclaimed(await self._store.reclaim(everything=given.everything))

    # -- what happened in them -----------------------------------------------------------------------------------

    async def add_turns(self, given: list[wire.NewTurn], at: At, receive: Receive) -> wire.RecordedCount:
        await self._store.add_turns(given)
        return wire.RecordedCount(len(given))

    async def add_events(self, given: list[wire.NewEvent], at: At, receive: Receive) -> wire.RecordedCount:
        await self._store.add_events(given)
        return wire.RecordedCount(len(given))

    async def add_rewards(self, given: wire.RewardsBody, at: At, receive: Receive) -> wire.Done:
        await self._store.add_rewards(given.rewards)
        return wire.Done()

    # -- reading -------------------------------------------------------------------------------------------------

    async def rollouts(self, given: wire.Which, at: At, receive: Receive) -> msgspec.Raw:
        return msgspec.Raw(await self._store.list_json(**msgspec.to_builtins(given)))

    async def get(self, given: wire.Nothing, at: At, receive: Receive) -> Rollout:
        return await self._store.get(at["id"])

    async def attempts(self, given: wire.Nothing, at: At, receive: Receive) -> list[wire.AttemptShown]:
        return [wire.AttemptShown.of(attempt) for attempt in await self._store.attempts(at["id"])]

    async def attempt(self, given: wire.KeyBody, at: At, receive: Receive) -> wire.AttemptShown:
        return wire.AttemptShown.of(await self._store.attempt(given.key))

    async def turns(self, given: wire.OfAttempt, at: At, receive: Receive) -> list[Turn]:
        return await self._store.turns(at["id"], **msgspec.to_builtins(given))

    async def turn_deltas(self, given: wire.OfAttempt, at: At, receive: Receive) -> list[TurnDelta]:
        return shrink(await self._store.turns(at["id"], **msgspec.to_builtins(given)))

    async def events(self, given: wire.OfAttempt, at: At, receive: Receive) -> list[Event]:
        return await self._store.events(at["id"], **msgspec.to_builtins(given))

    async def changes(self, given: wire.Since, at: At, receive: Receive) -> wire.Changes:
        work = self._store.wait(given.cursor, timeout=given.timeout)
        return wire.Changes(*(await self._poll(work, receive, (given.cursor, [])) if given.timeout else await work))

    async def stats(self, given: wire.Nothing, at: At, receive: Receive) -> dict[str, int]:
        return await self._store.stats()

    async def count_open(self, given: wire.Nothing, at: At, receive: Receive) -> dict[str, int]:
        return await self._store.count_open()

    # -- policies and steps --------------------------------------------------------------------------------------

    async def policies(self, given: wire.Nothing, at: At, receive: Receive) -> list[Policy]:
        return await self._store.policies()

    async def put_policy(self, given: wire.NewPolicy, at: At, receive: Receive) -> wire.Done:
        await self._store.put_policy(given)
        return wire.Done()

    async def steps(self, given: wire.WhichSteps, at: At, receive: Receive) -> list[wire.StepRecord]:
        return [wire.StepRecord.of(step) for step in await self._store.steps(superseded=given.superseded)]

    async def commit_step(self, given: wire.StepBody, at: At, receive: Receive) -> wire.Done:
        await self._store.commit_step(given.step.step(), given.tokens)
        return wire.Done()

    async def name_checkpoint(self, given: wire.CheckpointBody, at: At, receive: Receive) -> wire.Done:
        await self._store.name_checkpoint(given.lineage, given.number, given.checkpoint)
        return wire.Done()

    async def open_lineage(self, given: wire.LineageBody, at: At, receive: Receive) -> wire.Lineage:
        return wire.Lineage(await self._store.open_lineage(after=given.after))

    # ------------------------------------------------------------------------------------------------------------

    async def _poll(self, work: Coroutine[Any, Any, T], receive: Receive, nothing: T | None) -> T:
        """What `work` finds, unless the client goes away or the server closes: nothing may be taken for nobody. Where
        nobody can say that nothing was found, the client is told to ask again."""
        working = asyncio.create_task(work)
        gone = asyncio.create_task(wait_for_disconnect(receive))
        closing = asyncio.create_task(self._closing.wait())
        try:
            await asyncio.wait({working, gone, closing}, return_when=asyncio.FIRST_COMPLETED)
            if working.done():
                return working.result()
            if gone.done():
                raise ClientDisconnected
            if nothing is None:
                raise self._why
            return nothing
        finally:
            for task in (working, gone, closing):
                task.cancel()


def _number(at: At) -> int:
    """The attempt in the address."""
    number = at["n"]
    if not (number.isascii() and number.isdigit() and len(number) < 10):
        raise UnknownId(f"there is no attempt {number[:20]!r} of rollout {at['id']!r}. Fix: give its number")
    return int(number)
