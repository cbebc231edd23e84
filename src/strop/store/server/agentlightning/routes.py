"""The addresses that clients of Agent Lightning 1.0 call, before the store that is served.

    POST   /api/rollouts                              queue rollouts; an id that is there already is left as it is
    GET    /api/rollouts?state_in=queuing&limit=50    those in some states
    GET    /api/rollouts/terminal?after=0             those that have ended since: `after` is what `next_after` said
    GET    /api/rollouts/{id}                         one, and its attempts
    PATCH  /api/rollouts/{id}                         take it (running), or end it (succeeded, failed)
    DELETE /api/rollouts/{id}                         end it if it has not ended; what happened stays
    GET    /api/rollouts/{id}/events?format=triplet   what its last attempt said, its model calls among it
    POST   /api/rollouts/{id}/attempt/{n}/events      say something: with the attempt's key, or the run's
    GET    /healthz

All want the run's key but the last two. A rollout that a client takes is leased to it for as long as its
`timeout_seconds` say. Left out, and refused with the reason: registering models and pausing the proxy, since a run
does both itself.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Awaitable, Callable, Mapping
from typing import Any
from urllib.parse import parse_qs

import msgspec
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from strop.errors import IllegalTransition, UnknownId
from strop.net.asgi import ByMethod, FixedResponse, Refusal, answer, check_depth, encode, read_body, refuse
from strop.store.base import Store
from strop.store.server.agentlightning.events import describe_event, describe_turn
from strop.store.server.agentlightning.records import (
    RUNNER,
    STATES,
    ForeignRollout,
    RolloutPatch,
    StatusPatch,
    describe_ended,
    describe_rollout,
    read_timeout,
)
from strop.store.server.keys import RunKey
from strop.types import TERMINAL, Rollout, Status

EVENTS = "/api/rollouts/{rollout}/attempt/{attempt}/events"
LIMIT, MOST = 500, 1000
"""Rollouts in an answer."""
DONE = {"GET": 200, "PATCH": 200, "POST": 201, "DELETE": 204}
REFUSED = {
    ("POST", "/api/models"): "the models of a run are its policies, and each step's weights reach their engines by "
    "themselves. Fix: leave it out; set policy.model, or gateway.outside for a model elsewhere",
    ("DELETE", "/api/models"): "the models of a run are its policies. Fix: leave it out",
    ("POST", "/proxy/pause"): "while weights change the gateway has calls wait. Fix: leave it out",
    ("POST", "/proxy/resume"): "while weights change the gateway has calls wait. Fix: leave it out",
    ("GET", "/proxy/state"): "the gateway is never paused. Fix: ask GET /health",
}

Asked = Mapping[str, list[str]]
Do = Callable[[str, Asked, Receive], Awaitable[Any]]


def read_number(text: str) -> int:
    """An attempt's number where an address has it as Agent Lightning counts; 0 where it is none.

    >>> read_number("0"), read_number("x")
    (1, 0)
    """
    return int(text) + 1 if text.isascii() and text.isdigit() and len(text) < 9 else 0


async def take(store: Store, rollout: str, number: int, runner: str = RUNNER) -> Rollout:
    """Open an attempt for whoever holds the run's key and runs the rollout itself, if it is queued and the attempt is
    its next one. Returns the rollout as it is now."""
    found = await store.get(rollout)
    if found.status == "queued" and found.attempts == number - 1:
        token = f"{RUNNER} {rollout} {number}"
        leases = await store.lease(runner, seconds=read_timeout(found), token=token, rollout=rollout)
        return leases[0].rollout if leases else await store.get(rollout)
    return found


def make_routes(store: Store, key: RunKey) -> list[Route]:
    foreign = _Foreign(store)

    def at(path: str, **do: Do) -> Route:
        refused = {method: _refuse(why) for (method, place), why in REFUSED.items() if place == path}
        methods = {method: _Endpoint(key, one, DONE[method]) for method, one in do.items()}
        return Route(path, ByMethod(methods | {name: _Endpoint(key, one) for name, one in refused.items()}))

    return [
        at("/api/rollouts", POST=foreign.enqueue, GET=foreign.list),
        at("/api/rollouts/terminal", GET=foreign.ended),
        at("/api/rollouts/{id}", GET=foreign.get, PATCH=foreign.change, DELETE=foreign.delete),
        at("/api/rollouts/{id}/events", GET=foreign.events),
        *(at(path) for path in ("/api/models", "/proxy/pause", "/proxy/resume", "/proxy/state")),
        Route("/healthz", ByMethod({"GET": FixedResponse({"status": "ok"})})),
    ]


class _Endpoint:
    def __init__(self, key: RunKey, do: Do, status: int = 200) -> None:
        self._key, self._do, self._status = key, do, status

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            self._key.check(scope["headers"])
            asked = parse_qs(scope["query_string"].decode("latin-1"))
            said = await self._do(scope.get("path_params", {}).get("id", ""), asked, receive)
            body = b"" if self._status == 204 else encode(said)
        except Exception as error:
            return await refuse(send, error)
        await answer(send, body, self._status)


def _refuse(why: str) -> Do:
    async def refused(id: str, asked: Asked, receive: Receive) -> Any:
        raise Refusal(why, 501, "NotServed", "not_served")

    return refused


class _Foreign:
    """What is done at each address."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def enqueue(self, id: str, asked: Asked, receive: Receive) -> Any:
        made = [given.rollout() for given in await _read(receive, list[ForeignRollout])]
        await self._store.enqueue(made)
        return [describe_rollout(await self._store.get(rollout.id), []) for rollout in made]

    async def list(self, id: str, asked: Asked, receive: Receive) -> Any:
        states, limit = asked.get("state_in", []), _number(asked, "limit", LIMIT)
        if odd := [state for state in states if state not in STATES.values()] or ([] if states else ["nothing"]):
            known = ", ".join(dict.fromkeys(STATES.values()))
            raise _unfit(f"state_in is {odd[0]!r}. Fix: give some of {known}")
        wanted: list[Status] = [status for status, state in STATES.items() if state in states]
        found = [await self._store.list(status=status, limit=min(limit, MOST)) for status in wanted]
        some = sorted(itertools.chain(*found), key=lambda rollout: rollout.created)[:limit]
        return [await self._describe(rollout) for rollout in some]

    async def ended(self, id: str, asked: Asked, receive: Receive) -> Any:
        cursor, changed = await self._store.wait(_number(asked, "after", 0), timeout=0.0)
        counts = await self._store.stats()
        return {
            "items": [describe_ended(rollout) for rollout in changed if rollout.status in TERMINAL],
            "next_after": cursor,
            "total_terminal": sum(counts[status] for status in TERMINAL),
        }

    async def get(self, id: str, asked: Asked, receive: Receive) -> Any:
        rollout = await self._store.get(id)
        attempts = [str(attempt.number - 1) for attempt in await self._store.attempts(id)]
        return {"rollout": await self._describe(rollout), "attempts": attempts}

    async def change(self, id: str, asked: Asked, receive: Receive) -> Any:
        patch = (await _read(receive, RolloutPatch)).status
        rollout = await self._store.get(id)
        if patch.state is not None:
            rollout = await self._move(rollout, patch)
        return await self._describe(rollout)

    async def _move(self, rollout: Rollout, patch: StatusPatch) -> Rollout:
        """Taking one that runs already changes nothing: its first call may have taken it."""
        if patch.state != "succeeded":  # what was never begun cannot have succeeded
            rollout = await take(self._store, rollout.id, rollout.attempts + 1, patch.k8s_job_name or RUNNER)
        if rollout.status != "running" or patch.state == "queuing":
            was = STATES[rollout.status]
            raise IllegalTransition(f"rollout {rollout.id!r} is {was} and cannot become {patch.state}")
        if patch.state == "running":
            return rollout
        cause, detail = (None, None) if patch.state == "succeeded" else ("agent_error", patch.error_message)
        return await self._store.finish(rollout.id, rollout.attempts, cause=cause, detail=detail)

    async def delete(self, id: str, asked: Asked, receive: Receive) -> None:
        with contextlib.suppress(UnknownId):
            await self._store.cancel([id], detail="deleted by a client")

    async def events(self, id: str, asked: Asked, receive: Receive) -> Any:
        await self._store.get(id)
        triplet = asked.get("format") == ["triplet"]
        said = [describe_event(event, triplet=triplet) for event in await self._store.events(id)]
        said += [describe_turn(turn, triplet=triplet) for turn in await self._last_turns(id)]
        wanted = asked.get("event_type")
        kept = [event for event in said if wanted is None or event["event_type"] in wanted]
        return sorted(kept, key=lambda event: event["timestamp"])

    async def _last_turns(self, id: str) -> Any:
        attempts = await self._store.attempts(id)
        return await self._store.turns(id, attempt=attempts[-1].number) if attempts else []

    async def _describe(self, rollout: Rollout) -> dict[str, Any]:
        attempts = await self._store.attempts(rollout.id) if rollout.attempts else []
        return describe_rollout(rollout, attempts)


async def _read(receive: Receive, kind: Any) -> Any:
    body = await read_body(receive)
    check_depth(body)
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise _unfit(f"the request does not fit: {error}") from None


def _number(asked: Asked, name: str, default: int) -> int:
    text = asked.get(name, [str(default)])[-1]
    if not (text.isascii() and text.isdigit() and len(text) < 16):
        raise _unfit(f"{name} is {text[:20]!r}. Fix: give a number")
    return int(text)


def _unfit(message: str) -> Refusal:
    """Its clients expect 422 where a request does not fit."""
    return Refusal(message, 422, "Malformed", "malformed")
