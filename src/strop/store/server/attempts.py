"""What an attempt may say and see, with its own key and no other.

    POST /r/{rollout}/{attempt}/events    {"kind": "reward", "data": {...}} or a list of them; "id" guards against twice
    GET  /r/{rollout}/{attempt}           its rollout
    POST /api/rollouts/{rollout}/attempt/{n}/events    the same, as agents of Agent Lightning 1.0 write it

A gateway includes these routes beside its own, so that agents find them wherever they find their model.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Awaitable, Callable

import msgspec
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from strop.errors import UnknownId
from strop.net.asgi import (
    ByMethod,
    Refusal,
    answer,
    check_depth,
    encode,
    malformed,
    read_body,
    refuse,
)
from strop.store.base import AttemptStore
from strop.store.server.agentlightning.events import TypedEvent, describe
from strop.store.server.agentlightning.routes import EVENTS, read_number
from strop.store.server.keys import AttemptKeys, RunKey, hide_key, read_bearer
from strop.store.wire import AgentEvent, RecordedCount
from strop.types import Attempt, Event

PATH = "/r/{rollout}/{attempt}"
MAX_BODY = 16 << 20
"""Agents are trusted with less than the run's own programs."""

_ONE, _LIST = msgspec.json.Decoder(AgentEvent), msgspec.json.Decoder(list[AgentEvent])
_TYPED = msgspec.json.Decoder(TypedEvent)

Take = Callable[[str, int], Awaitable[object]]
"""Opens an attempt for a client that has the run's key and runs the rollout itself."""


def make_attempt_routes(
    store: AttemptStore, keys: AttemptKeys | None = None, run_key: RunKey | None = None, take: Take | None = None
) -> list[Route]:
    """The routes. `run_key`, where there is one, opens them too; `take` is for clients of Agent Lightning with it."""
    known = keys or AttemptKeys(store)

    async def report(rollout: str, attempt: int, receive: Receive) -> bytes:
        events = _events(await read_body(receive, MAX_BODY), rollout, attempt)
        await store.add_events(events)
        return encode(RecordedCount(len(events)))

    async def report_typed(rollout: str, attempt: int, receive: Receive) -> bytes:
        (event,) = _events(body := await read_body(receive, MAX_BODY), rollout, attempt, typed=True)
        await store.add_events([event])
        said = _TYPED.decode(body)
        return encode(describe(said.event_type, said.data, rollout=rollout, attempt=attempt, time=event.time))

    async def look(rollout: str, attempt: int, receive: Receive) -> bytes:
        return encode(await store.get(rollout))

    return [
        Route(PATH + "/events", ByMethod({"POST": _AttemptEndpoint(store, known, run_key, report)})),
        Route(PATH, ByMethod({"GET": _AttemptEndpoint(store, known, run_key, look)})),
        Route(EVENTS, ByMethod({"POST": _TypedEndpoint(store, known, run_key, report_typed, take)})),
    ]


class _AttemptEndpoint:
    """An address below an attempt's, for clients that have its key."""

    def __init__(
        self,
        store: AttemptStore,
        keys: AttemptKeys,
        run_key: RunKey | None,
        do: Callable[[str, int, Receive], Awaitable[bytes]],
        take: Take | None = None,
    ) -> None:
        self._store, self._keys, self._run_key, self._do, self._take = store, keys, run_key, do, take

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        rollout, number = scope["path_params"]["rollout"], scope["path_params"]["attempt"]
        try:
            if not (attempt := self.read_number(number)):
                raise _shut()
            key = read_bearer(scope["headers"])
            run = self._run_key is not None and self._run_key.fits(key)
            if not run and not await self._keys.open(rollout, attempt, key):
                raise _shut()
            if run and self._take is not None:
                await self._take(rollout, attempt)
            if run:
                await find_attempt(self._store, rollout, attempt)
            body = await self._do(rollout, attempt, receive)
        except Exception as error:
            return await refuse(send, error)
        await answer(send, body)

    def read_number(self, text: str) -> int:
        return number_of(text)


class _TypedEndpoint(_AttemptEndpoint):
    """One at an address that counts attempts as Agent Lightning does."""

    def read_number(self, text: str) -> int:
        return read_number(text)


def number_of(text: str) -> int:
    """An attempt's number as an address has it; 0 where it is none."""
    return int(text) if text.isascii() and text.isdigit() and len(text) < 10 else 0


async def find_attempt(store: AttemptStore, rollout: str, number: int) -> Attempt:
    """The attempt at an address, for clients that may know. `UnknownId` says which part of it there is not."""
    attempts = await store.attempts(rollout)  # or there is no such rollout
    found = next((attempt for attempt in attempts if attempt.number == number), None)
    if found is None:
        had = f"{len(attempts)} attempt{'s' * (len(attempts) != 1)}"
        raise UnknownId(f"rollout {rollout!r} has had {had}, so there is no attempt {number}. Fix: check the number")
    return found


class UnservedPaths:
    """Addresses below /r/ that are not served. A client with a key is told which part of one is unknown; a client
    without one learns nothing of rollouts. `model`: whether a gateway answers beside it."""

    def __init__(self, store: AttemptStore, keys: AttemptKeys, run_key: RunKey, *, model: bool) -> None:
        self._store, self._keys, self._run_key, self._model = store, keys, run_key, model

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        _, top, *parts = scope["path"].split("/")
        try:
            if top != "r" or (not self._model and parts[2:3] == ["agents"]):
                raise Refusal(self._no_such(scope, top), 404, "NoSuchRoute", "not_found")
            await self._tell(scope, parts)
        except Exception as error:
            await refuse(send, error)

    def _no_such(self, scope: Scope, top: str) -> str:
        asked = f"{scope['method']} {hide_key(scope['path'])}"
        if top in ("v1", "r", "proxy") and not self._model:
            return (
                f"{asked} is not one of the store's verbs, and no model is served here. Fix: start `strop serve` "
                "with --model, let agents bring a model of their own, or run them under `strop train`"
            )
        base = "" if top == "v1" else "; the base URL of an OpenAI client ends in /v1"
        return f"{asked} is not served here. Fix: see /openapi.json for what is{base}"

    async def _tell(self, scope: Scope, parts: list[str]) -> None:
        rollout, number = [*parts, "", ""][:2]
        key, attempt = read_bearer(scope["headers"]), number_of(number)
        if self._run_key.fits(key):
            if not attempt:
                raise Refusal(f"{scope['path']} names no attempt. Fix: {_SHAPE}", 404, "NoSuchRoute", "not_found")
            await find_attempt(self._store, rollout, attempt)
        elif not attempt or not await self._keys.open(rollout, attempt, key):
            raise _shut()
        below = " or ".join(["/events", "/agents/NAME/v1 with the model APIs"][: 1 + self._model])
        message = f"{scope['method']} {scope['path']} is not served. Fix: below an attempt use {below}"
        raise Refusal(message, 404, "NoSuchRoute", "not_found")


_SHAPE = "write an attempt's address as /r/ROLLOUT/NUMBER, such as /r/g000000.0/1"


def _events(body: bytes, rollout: str, attempt: int, *, typed: bool = False) -> list[Event]:
    now = time.time()
    return [
        Event(
            id=event.id or secrets.token_hex(8),
            rollout=rollout,
            attempt=attempt,
            kind=event.kind,
            data=event.data,
            time=now,
        )
        for event in _read(body, typed)
    ]


def _read(body: bytes, typed: bool) -> list[AgentEvent]:
    """What is said, also by an agent of Agent Lightning that was given our address."""
    try:
        check_depth(body)
        if not typed and body.lstrip().startswith(b"["):
            return _LIST.decode(body)
        if typed or b'"event_type"' in body:
            with contextlib.nullcontext() if typed else contextlib.suppress(msgspec.ValidationError):
                kind, data = _TYPED.decode(body).read()
                return [AgentEvent(kind=kind, data=data)]
        return [_ONE.decode(body)]
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        reason = str(error) or "it is nested too deeply"
        shape = '{"event_type": ..., "data": {...}}' if typed else '{"kind": ..., "data": {...}}'
        several = "" if typed else ", or send a list of them"
        raise malformed(f"an event does not fit: {reason}. Fix: write it as {shape}{several}") from None


def _shut() -> Refusal:
    message = (
        "this key does not open this attempt. Fix: use the api_key the agent was given, with the base_url it was given"
    )
    return Refusal(message, 401, "Unauthorized", "invalid_api_key", [(b"www-authenticate", b"Bearer")])
