"""The store's verbs as requests ask for them: what each takes, does and gives, and at which address.

`VERBS` is the whole interface. Routes are made from it, and so is their description: a verb's docstring is what people
read about it there, the type of `given` is its body (GET: its question), and what it returns is its answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any, TypeVar, get_type_hints

import msgspec
from msgspec import Struct
from starlette.types import Receive

from strop.errors import Unavailable, UnknownId
from strop.net.asgi import ClientDisconnected, wait_for_disconnect
from strop.store.base import Store
from strop.store.http import wire
from strop.store.http.keys import AttemptKeys
from strop.types import Event, Lease, Policy, Rollout, Turn

T = TypeVar("T")
At = Mapping[str, str]
"""What stands in the address: `id`, and `n` for an attempt."""
Do = Callable[["Verbs", Any, At, Receive], Awaitable[Any]]


class Verb(Struct, frozen=True):
    method: str
    path: str
    do: Do

    @property
    def says(self) -> str:
        return " ".join((self.do.__doc__ or "").split())

    @property
    def takes(self) -> Any:
        return get_type_hints(self.do)["given"]

    @property
    def gives(self) -> Any:
        return get_type_hints(self.do)["return"]


VERBS: list[Verb] = []
F = TypeVar("F", bound=Do)


def served(method: str, path: str) -> Callable[[F], F]:
    def add(do: F) -> F:
        VERBS.append(Verb(method, path, do))
        return do

    return add


class Verbs:
    """What is done at every address. `given` is the body or the question, `at` what stands in the address."""

    def __init__(self, store: Store, attempts: AttemptKeys) -> None:
        self._store, self._attempts = store, attempts
        self._closing = asyncio.Event()

    def close(self) -> None:
        """End every request that waits for something to happen, and let none wait from now on."""
        self._closing.set()

    # -- rollouts ------------------------------------------------------------------------------------------------

    # First, since of the addresses that have to be matched it is the one asked for most.
    @served("POST", "/v1/rollouts/{id}/attempts/{n}/finish")
    async def finish(self, given: wire.FinishBody, at: At, receive: Receive) -> Rollout:
        """End an attempt. Without a cause it succeeded; with one its rollout fails, or is queued again as its retries
        say. 409 if the attempt is over, unless this very end of it was recorded before."""
        rollout, number = at["id"], _number(at)
        return await self._store.finish(rollout, number, rewards=given.rewards, cause=given.cause, detail=given.detail)

    @served("POST", "/v1/rollouts")
    async def enqueue(self, given: list[wire.NewRollout], at: At, receive: Receive) -> wire.Queued:
        """Queue rollouts. An id that is already there is left as it is."""
        return wire.Queued(await self._store.enqueue([new.rollout() for new in given]), len(given))

    @served("POST", "/v1/lease")
    async def lease(self, given: wire.LeaseBody, at: At, receive: Receive) -> list[Lease]:
        """Take up to `count` of the oldest queued rollouts that are due, and open an attempt on each, with its key."""
        work = self._store.lease(
            given.runner, seconds=given.seconds, count=given.count, wait=given.wait, token=given.token
        )
        leases = await self._poll(work, receive, None) if given.wait else await work
        for lease in leases:
            self._attempts.add(lease.attempt)
        return leases

    @served("POST", "/v1/begin")
    async def begin(self, given: wire.BeginBody, at: At, receive: Receive) -> Lease:
        """Queue a rollout and open an attempt on it at once, with its key: no other runner gets it."""
        lease = await self._store.begin(given.rollout.rollout(), given.runner, seconds=given.seconds)
        self._attempts.add(lease.attempt)
        return lease

    @served("POST", "/v1/heartbeat")
    async def heartbeat(self, given: wire.HeartbeatBody, at: At, receive: Receive) -> wire.Over:
        """Prolong leases. Tells which of them are over or unknown."""
        return wire.Over(await self._store.heartbeat(given.attempts, seconds=given.seconds))

    @served("POST", "/v1/cancel")
    async def cancel(self, given: wire.CancelBody, at: At, receive: Receive) -> wire.Done:
        """End rollouts that are not wanted any more. Those already ended stay as they are."""
        await self._store.cancel(given.rollouts, detail=given.detail, cause=given.cause)
        return wire.Done()

    @served("POST", "/v1/reclaim")
    async def reclaim(self, given: wire.ReclaimBody, at: At, receive: Receive) -> wire.Reclaimed:
        """End attempts whose lease has run out, or all that are running."""
        return wire.Reclaimed(await self._store.reclaim(everything=given.everything))

    # -- what happened in them -----------------------------------------------------------------------------------

    @served("POST", "/v1/turns")
    async def add_turns(self, given: list[wire.NewTurn], at: At, receive: Receive) -> wire.Recorded:
        """Record turns of running attempts: all of them or, if one is refused, none."""
        await self._store.add_turns(given)
        return wire.Recorded(len(given))

    @served("POST", "/v1/events")
    async def add_events(self, given: list[wire.NewEvent], at: At, receive: Receive) -> wire.Recorded:
        """Record events of running attempts, each id once."""
        await self._store.add_events(given)
        return wire.Recorded(len(given))

    @served("POST", "/v1/rewards")
    async def add_rewards(self, given: wire.RewardsBody, at: At, receive: Receive) -> wire.Done:
        """Give rewards to rollouts that have succeeded: all of them or, if one is refused, none."""
        await self._store.add_rewards(given.rewards)
        return wire.Done()

    # -- looking -------------------------------------------------------------------------------------------------

    @served("GET", "/v1/rollouts")
    async def rollouts(self, given: wire.Which, at: At, receive: Receive) -> list[Rollout]:
        """Rollouts in the order they were enqueued, a page at a time."""
        return await self._store.list(**msgspec.to_builtins(given))

    @served("GET", "/v1/rollouts/{id}")
    async def get(self, given: wire.Nothing, at: At, receive: Receive) -> Rollout:
        """One rollout."""
        return await self._store.get(at["id"])

    @served("GET", "/v1/rollouts/{id}/attempts")
    async def attempts(self, given: wire.Nothing, at: At, receive: Receive) -> list[wire.AttemptShown]:
        """A rollout's attempts, without their keys."""
        return [wire.AttemptShown.of(attempt) for attempt in await self._store.attempts(at["id"])]

    @served("POST", "/v1/attempt")
    async def attempt(self, given: wire.KeyBody, at: At, receive: Receive) -> wire.AttemptShown:
        """The attempt that a key opens. The key is in the body: addresses are written down in many places."""
        return wire.AttemptShown.of(await self._store.attempt(given.key))

    @served("GET", "/v1/rollouts/{id}/turns")
    async def turns(self, given: wire.OfAttempt, at: At, receive: Receive) -> list[Turn]:
        """Turns of one attempt of a rollout, in the order their requests began."""
        return await self._store.turns(at["id"], **msgspec.to_builtins(given))

    @served("GET", "/v1/rollouts/{id}/events")
    async def events(self, given: wire.OfAttempt, at: At, receive: Receive) -> list[Event]:
        """Events of one attempt of a rollout, in the order they were recorded."""
        return await self._store.events(at["id"], **msgspec.to_builtins(given))

    @served("GET", "/v1/changes")
    async def changes(self, given: wire.Since, at: At, receive: Receive) -> wire.Changes:
        """Rollouts whose status changed after `cursor`, waiting for the first if there is none yet."""
        work = self._store.wait(given.cursor, timeout=given.timeout)
        return wire.Changes(*(await self._poll(work, receive, (given.cursor, [])) if given.timeout else await work))

    @served("GET", "/v1/stats")
    async def stats(self, given: wire.Nothing, at: At, receive: Receive) -> dict[str, int]:
        """Counts: one per status, and turns, events, steps."""
        return await self._store.stats()

    # -- policies and steps --------------------------------------------------------------------------------------

    @served("GET", "/v1/policies")
    async def policies(self, given: wire.Nothing, at: At, receive: Receive) -> list[Policy]:
        """The policies, by name."""
        return await self._store.policies()

    @served("PUT", "/v1/policies")
    async def put_policy(self, given: wire.NewPolicy, at: At, receive: Receive) -> wire.Done:
        """Put a policy. One of the same name is replaced."""
        await self._store.put_policy(given)
        return wire.Done()

    @served("GET", "/v1/steps")
    async def steps(self, given: wire.WhichSteps, at: At, receive: Receive) -> list[wire.StepRecord]:
        """The steps of the present line, or all that ever were."""
        return [wire.StepRecord.of(step) for step in await self._store.steps(superseded=given.superseded)]

    @served("POST", "/v1/steps")
    async def commit_step(self, given: wire.StepBody, at: At, receive: Receive) -> wire.Done:
        """Commit a step: what it consumed, its metrics and the new version of every policy, all at once."""
        await self._store.commit_step(given.step.step())
        return wire.Done()

    @served("POST", "/v1/lineages")
    async def open_lineage(self, given: wire.LineageBody, at: At, receive: Receive) -> wire.Lineage:
        """Begin a new line after a step; later steps become superseded."""
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
                raise Unavailable("the server is closing: ask again")
            return nothing
        finally:
            for task in (working, gone, closing):
                task.cancel()


def _number(at: At) -> int:
    """The attempt in the address."""
    number = at["n"]
    if not (number.isascii() and number.isdigit() and len(number) < 10):
        raise UnknownId(f"there is no attempt {number[:20]!r} of rollout {at['id']!r}")
    return int(number)
