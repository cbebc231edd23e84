"""Several verbs in one request: each is done as if it had come alone, all at once, so that they share a commit.

[{"verb": "finish", "at": {"id": "q1", "n": "1"}, "body": {...}}, ...] ──▶ [{"status": 200, "body": {...}}, ...]

A verb that is refused says so at its place; the others are done. Left out: verbs that only read, whose answers may be
large, and those that wait for something to happen.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from starlette.types import Receive, Scope, Send

from strop.net.asgi import answer, check_depth, encode, malformed, read_body, refusal, refuse
from strop.store import rpc, wire
from strop.store.server.handlers import Handlers
from strop.store.server.keys import RunKey

MAX_BODY = 9 << 20
"""Bytes. What is large is sent alone."""

_calls = msgspec.json.Decoder(rpc.BATCH.takes).decode


class BatchEndpoint:
    """`POST /v1/batch`."""

    def __init__(self, handlers: Handlers, key: RunKey) -> None:
        self._key = key
        self._verbs: dict[str, tuple[Callable[[bytes], Any], Callable[..., Awaitable[Any]]]] = {
            verb.name: (msgspec.json.Decoder(verb.takes).decode, getattr(handlers, verb.name))
            for verb in rpc.VERBS
            if verb.method != "GET" and verb is not rpc.BATCH
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            self._key.check(scope["headers"])
            calls = _calls(await read_body(receive, MAX_BODY))
            answers = await asyncio.gather(*(self._answer(call, receive) for call in calls))
        except Exception as error:
            return await refuse(send, error)
        await answer(send, encode(answers))

    async def _answer(self, call: wire.VerbCall, receive: Receive) -> wire.VerbAnswer:
        try:
            decode, do = self._find(call.verb)
            body = bytes(call.body)
            check_depth(body)
            given = decode(body)
            if getattr(given, "wait", 0):
                raise malformed(f"{call.verb!r} waits, and all of the batch would wait with it. Fix: send it alone")
            return wire.VerbAnswer(200, await do(given, call.at, receive))
        except Exception as error:
            why = refusal(error)
            return wire.VerbAnswer(why.status, msgspec.Raw(why.body))

    def _find(self, verb: str) -> tuple[Callable[[bytes], Any], Callable[..., Awaitable[Any]]]:
        try:
            return self._verbs[verb]
        except KeyError:
            known = ", ".join(self._verbs)
            raise malformed(f"{verb[:40]!r} is not a verb that a batch may hold. Fix: use one of {known}") from None
