"""How an engine's server is spoken to over HTTP: questions, answers that come event by event, and refusals in words."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from typing import Any, Literal, cast
from urllib.parse import urlencode

import msgspec
from msgspec import Struct

from strop.errors import EngineError
from strop.net.client import Client, Response

ASKED = 60.0
"""Seconds for an answer that costs the server nothing."""
MOVED = 1800.0
"""Seconds for weights to be loaded, and for requests in flight to end before that."""

Said = Mapping[str, Any]
_JSON = {"content-type": "application/json"}


class BrokenOff(EngineError):
    """An answer that the server began and did not end. Asking again may help."""


class RequestRefused(EngineError):
    """A request that the server does not take. Asking again does not help."""


class SampledTokens(Struct, frozen=True):
    """Some sampled tokens. `finish` ends the answer."""

    ids: list[int]
    logprobs: list[float]
    finish: Literal["stop", "length"] | None


class ServerClient:
    """The line to one server. Errors call it `name`."""

    def __init__(self, name: str, client: Client) -> None:
        self.name, self.url = name, client.url
        self._client = client

    async def send(
        self, method: str, path: str, body: Said | None = None, *, query: Said | None = None, timeout: float = ASKED
    ) -> Response:
        """Any answer, whatever its status."""
        target = f"{path}?{urlencode(query)}" if query else path
        data = b"" if body is None else msgspec.json.encode(body)
        try:
            return await self._client.request(method, target, data, headers=_JSON, timeout=timeout)
        except (ConnectionError, TimeoutError) as error:
            raise EngineError(f"{self.name} did not answer {path}: {error}") from error

    async def ask(
        self, method: str, path: str, body: Said | None = None, *, query: Said | None = None, timeout: float = ASKED
    ) -> Response:
        """What it says if it agrees."""
        answer = await self.send(method, path, body, query=query, timeout=timeout)
        if answer.status != 200:
            raise self.make_error(answer.status, answer.body, path)
        return answer

    async def ask_once(self, path: str, body: Said) -> bytes:
        """A whole answer, however long it takes. Raises `EngineError` if the request is refused, the errors of
        `net.client` if the connection breaks."""
        answer = await self._client.request("POST", path, msgspec.json.encode(body), headers=_JSON)
        if answer.status != 200:
            raise self.make_error(answer.status, answer.body)
        return answer.body

    async def events(self, path: str, body: Said) -> AsyncGenerator[bytes]:
        """The data of server-sent events as they come, but for the one that says that they are over. Raises
        `EngineError` if the request is refused, the errors of `net.client` if the connection breaks; closing it closes
        the connection."""
        held = b""
        async with self._client.stream("POST", path, msgspec.json.encode(body), headers=_JSON) as streamed:
            if streamed.status != 200:
                raise self.make_error(streamed.status, b"".join([piece async for piece in streamed]))
            async for piece in streamed:
                *whole, held = (held + piece).split(b"\n\n")
                for event in whole:
                    data = event.removeprefix(b"data:").strip()
                    if data and data != b"[DONE]":
                        yield data

    def make_error(self, status: int, body: bytes, what: str = "an answer") -> EngineError:
        said: Any = body[:300].decode(errors="replace")
        try:
            said = msgspec.json.decode(body, type=dict[str, Any])
            said = said.get("error") or said.get("message") or said.get("detail") or said
            said = cast("dict[str, Any]", said).get("message", said) if isinstance(said, dict) else said
        except msgspec.DecodeError:
            pass
        kind = BrokenOff if status >= 500 else RequestRefused
        return kind(f"{self.name} refused {what} (status {status}): {said or 'it does not say why'}")
