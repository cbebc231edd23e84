"""One HTTP exchange at its leanest: read a body, answer, refuse. Plain ASGI, since every verb pays for what is here.

Left out on purpose: content types. A body is JSON whatever it is called, so that `curl -d` works as it is.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import msgspec
from msgspec import Struct
from starlette.types import Receive, Scope, Send

from strop.errors import (
    BadExclusion,
    BadReward,
    Fenced,
    IllegalTransition,
    NewerStore,
    PlaceError,
    RunEnded,
    StoreError,
    TurnTaken,
    Unavailable,
    UnknownId,
)

Header = tuple[bytes, bytes]

MAX_BODY = 64 << 20
MAX_DEPTH = 100
"""How deep lists and tables may be nested. What is deeper than Python's own limit allows could be stored, but not read
by everybody who wants to."""
MAX_LISTS = 1_000_000
"""How many lists and tables one body may hold: each costs much more memory and time than the bytes it came as."""

JSON: Header = (b"content-type", b"application/json")
LOG = logging.getLogger("strop.store")

encode = msgspec.json.Encoder().encode


class Problem(Struct):
    """What went wrong: a sentence for people, a name and a code for programs."""

    message: str
    type: str
    code: str


class ErrorBody(Struct):
    """Every answer that is not a success."""

    error: Problem


class Refusal(Exception):
    """An answer that is not a success."""

    def __init__(self, message: str, status: int, type: str, code: str, headers: Sequence[Header] = ()) -> None:
        super().__init__(message)
        self.status, self.headers = status, headers
        self.body = encode(ErrorBody(Problem(message, type, code)))


class ClientDisconnected(Exception):
    """The client went away: there is nobody to answer."""


def malformed(message: str) -> Refusal:
    return Refusal(message, 400, "Malformed", "malformed")


# In this order: the first that fits.
_STATUS: tuple[tuple[type[Exception], int, str], ...] = (
    (BadExclusion, 400, "bad_exclusion"),
    (BadReward, 400, "bad_reward"),
    (UnknownId, 404, "unknown_id"),
    (Fenced, 409, "attempt_over"),
    (IllegalTransition, 409, "illegal_transition"),
    (TurnTaken, 409, "turn_taken"),
    (Unavailable, 503, "store_unavailable"),
    (NewerStore, 503, "store_unavailable"),
    (PlaceError, 503, "store_unavailable"),
    (RunEnded, 410, "run_ended"),
    (StoreError, 409, "refused"),
)


def refusal(error: Exception) -> Refusal:
    """What a client is told about an error. One that nobody thought of goes to the log; clients learn no more than
    that."""
    if isinstance(error, Refusal):
        return error
    if isinstance(error, msgspec.ValidationError):
        return malformed(f"the request does not fit: {error}")
    if isinstance(error, (msgspec.MsgspecError, UnicodeError)):
        return malformed(f"the body is not JSON: {error}")
    if isinstance(error, RecursionError):
        return malformed(f"the request is nested too deeply: {MAX_DEPTH} levels are allowed")
    for kind, status, code in _STATUS:
        if isinstance(error, kind):
            # Some clients try a 409 again; one that says that the attempt is over will not change.
            headers = [(b"x-should-retry", b"false")] if status == 409 else ()
            return Refusal(str(error), status, type(error).__name__, code, headers)
    LOG.error("a request failed", exc_info=error)
    return Refusal("the server ran into an error of its own: its log says more", 500, "ServerError", "server_error")


async def read_body(receive: Receive, limit: int = MAX_BODY) -> bytes:
    """The whole body, unless it is larger than `limit`: one client must not take everybody's memory."""
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnected
        part: bytes = message.get("body", b"")
        size += len(part)
        check_size(size, limit)
        parts.append(part)
        if not message.get("more_body"):
            return b"".join(parts)


def check_size(size: int, limit: int) -> None:
    """Refuse a body of so many bytes where only `limit` are taken."""
    if size > limit:
        raise _too_large(f"is larger than {limit >> 20} MiB")


def _too_large(how: str) -> Refusal:
    return Refusal(f"the body {how}: send less at once", 413, "TooLarge", "request_too_large")


_checked = msgspec.json.Decoder(msgspec.Raw).decode
_STEPS = bytes.maketrans(b"[{]}", b"\x01\x01\xff\xff")  # one level up, or down: as signed bytes 1 and -1
_NO_STEPS = bytes(set(range(256)) - set(b'[]{}"'))


def check_depth(body: bytes) -> None:
    """Refuse JSON that is nested too deeply or holds too many lists. Whatever comes costs a few quick passes over it.

    >>> check_depth(b"[" * 100 + b"]" * 100)
    >>> check_depth(b"[" * 101 + b"]" * 101)
    Traceback (most recent call last):
    RecursionError
    """
    if body.count(b"[") + body.count(b"{") <= MAX_DEPTH:
        return
    _checked(body)  # from here on it is JSON: every text has its end
    plain = body.replace(rb"\\", b"").replace(rb"\"", b"").translate(_STEPS, _NO_STEPS)
    # Two quotes side by side are an empty text, or two texts that may as well be one.
    steps = b"".join(plain.replace(b'""', b"").split(b'"')[::2])
    if len(steps) > 2 * MAX_LISTS:
        raise _too_large(f"holds more than {MAX_LISTS} lists and tables")
    if max(accumulate(memoryview(steps).cast("b")), default=0) > MAX_DEPTH:
        raise RecursionError


async def answer(send: Send, body: bytes, status: int = 200, headers: Sequence[Header] = ()) -> None:
    length = (b"content-length", b"%d" % len(body))
    await send({"type": "http.response.start", "status": status, "headers": [JSON, length, *headers]})
    await send({"type": "http.response.body", "body": body})


async def refuse(send: Send, error: Exception) -> None:
    if isinstance(error, ClientDisconnected):
        return
    why = refusal(error)
    await answer(send, why.body, why.status, why.headers)


async def wait_for_disconnect(receive: Receive) -> None:
    """Returns when the client has hung up. Call it once the body was read."""
    while (await receive())["type"] != "http.disconnect":
        pass


class FixedResponse:
    """Always the same answer, made ahead."""

    def __init__(self, what: Any) -> None:
        self._body = encode(what)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await answer(send, self._body)


class ByMethod:
    """One address: an endpoint for each method, and the names of those there are for any other."""

    def __init__(self, endpoints: dict[str, Any]) -> None:
        self._endpoints = endpoints | ({"HEAD": endpoints["GET"]} if "GET" in endpoints else {})
        self._allow = ", ".join(sorted(self._endpoints))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        endpoint = self._endpoints.get(scope["method"])
        if endpoint is None:
            message = f"{scope['method']} {scope['path']} is not served: use {self._allow}"
            headers = [(b"allow", self._allow.encode())]
            await refuse(send, Refusal(message, 405, "WrongMethod", "wrong_method", headers))
        else:
            await endpoint(scope, receive, send)
