"""What an attempt may say and see, with its own key and no other.

    POST /r/{rollout}/{attempt}/events    {"kind": "reward", "data": {...}} or a list of them; "id" guards against twice
    GET  /r/{rollout}/{attempt}           its rollout

A gateway includes these routes beside its own, so that agents find them wherever they find their model.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Awaitable, Callable

import msgspec
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from strop.store.base import Store
from strop.store.http.asgi import ByMethod, Refusal, answer, check_depth, encode, malformed, read_body, refuse
from strop.store.http.keys import AttemptKeys, RunKey, bearer
from strop.store.http.wire import Recorded, Said
from strop.types import Event

PATH = "/r/{rollout}/{attempt}"
MAX_BODY = 16 << 20
"""Agents are trusted with less than the run's own programs."""

_ONE, _LIST = msgspec.json.Decoder(Said), msgspec.json.Decoder(list[Said])


def attempt_routes(store: Store, keys: AttemptKeys | None = None, run_key: RunKey | None = None) -> list[Route]:
    """The routes. `run_key`, where there is one, opens them too."""
    known = keys or AttemptKeys(store)

    async def report(rollout: str, attempt: int, receive: Receive) -> bytes:
        events = _events(await read_body(receive, MAX_BODY), rollout, attempt)
        await store.add_events(events)
        return encode(Recorded(len(events)))

    async def look(rollout: str, attempt: int, receive: Receive) -> bytes:
        return encode(await store.get(rollout))

    return [
        Route(PATH + "/events", ByMethod({"POST": _Opened(known, run_key, report)})),
        Route(PATH, ByMethod({"GET": _Opened(known, run_key, look)})),
    ]


class _Opened:
    """An address below an attempt's, for whoever has its key."""

    def __init__(
        self, keys: AttemptKeys, run_key: RunKey | None, do: Callable[[str, int, Receive], Awaitable[bytes]]
    ) -> None:
        self._keys, self._run_key, self._do = keys, run_key, do

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        rollout, number = scope["path_params"]["rollout"], scope["path_params"]["attempt"]
        try:
            if not (number.isascii() and number.isdigit() and len(number) < 10):
                raise _shut()
            attempt = int(number)
            key = bearer(scope["headers"])
            run = self._run_key is not None and self._run_key.fits(key)
            if not run and not await self._keys.open(rollout, attempt, key):
                raise _shut()
            body = await self._do(rollout, attempt, receive)
        except Exception as error:
            return await refuse(send, error)
        await answer(send, body)


def _events(body: bytes, rollout: str, attempt: int) -> list[Event]:
    try:
        check_depth(body)
        said = _LIST.decode(body) if body.lstrip().startswith(b"[") else [_ONE.decode(body)]
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        reason = str(error) or "it is nested too deeply"
        raise malformed(f'an event is {{"kind": ..., "data": {{...}}}}, or a list of them: {reason}') from None
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
        for event in said
    ]


def _shut() -> Refusal:
    message = "this key does not open this attempt: use the api_key the agent was given, with the base_url it was given"
    return Refusal(message, 401, "Unauthorized", "invalid_api_key", [(b"www-authenticate", b"Bearer")])
