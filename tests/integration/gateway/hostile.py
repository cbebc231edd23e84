"""Clients that do what no SDK does, on plain sockets, and a look at what they leave behind."""

import asyncio
import gc
import json
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

from strop.types import Attempt
from tests.integration.gateway.stand import Stand

HI: Any = [{"role": "user", "content": "hi"}]
BODIES: dict[str, dict[str, Any]] = {
    "chat/completions": {"model": "m", "messages": HI},
    "completions": {"model": "m", "prompt": "hi"},
    "responses": {"model": "m", "input": "hi"},
    "messages": {"model": "m", "messages": HI, "max_tokens": 100},
}
"""The plainest request of every model API."""
COUNTS = {"messages/count_tokens": BODIES["messages"], "responses/input_tokens": BODIES["responses"]}

Said = tuple[int, dict[str, str], bytes]


class Raw:
    """One connection. What is written is up to the test."""

    def __init__(
        self, stand: Stand, attempt: Attempt, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self.reader, self.writer = reader, writer
        self._path, self._key = urlsplit(stand.url(attempt)).path, attempt.key

    def head(self, path: str, *headers: str, method: str = "POST", key: str | None = None) -> None:
        lines = [
            f"{method} {self._path}/{path} HTTP/1.1",
            "host: localhost",
            f"authorization: Bearer {key or self._key}",
            *headers,
        ]
        self.writer.write("\r\n".join([*lines, "", ""]).encode("latin-1"))

    def post(self, path: str, body: Any, *headers: str, key: str | None = None) -> None:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.head(path, f"content-length: {len(data)}", *headers, key=key)
        self.writer.write(data)

    async def chunked(self, path: str, pieces: Iterable[bytes]) -> None:
        """A body that does not say how long it is."""
        self.head(path, "transfer-encoding: chunked")
        for piece in pieces:
            self.writer.write(b"%x\r\n%b\r\n" % (len(piece), piece))
            await self.writer.drain()
        self.writer.write(b"0\r\n\r\n")

    async def answer(self) -> Said:
        """The whole answer: status, headers, body."""
        async with asyncio.timeout(20):
            status = int((await self.reader.readline()).split()[1])
            headers: dict[str, str] = {}
            while line := (await self.reader.readline()).strip():
                name, _, value = line.decode("latin-1").partition(":")
                headers[name.lower()] = value.strip()
            if headers.get("transfer-encoding") != "chunked":
                return status, headers, await self.reader.readexactly(int(headers["content-length"]))
            body = b""
            while size := int(await self.reader.readline(), 16):
                body += await self.reader.readexactly(size)
                await self.reader.readline()
            await self.reader.readline()
            return status, headers, body


@asynccontextmanager
async def connected(stand: Stand, attempt: Attempt) -> AsyncIterator[Raw]:
    place = urlsplit(stand.server.url)
    reader, writer = await asyncio.open_connection(place.hostname, place.port, limit=1 << 20)
    try:
        yield Raw(stand, attempt, reader, writer)
    finally:
        writer.transport.abort()


async def ask(stand: Stand, attempt: Attempt, path: str, body: Any, *headers: str, key: str | None = None) -> Said:
    async with connected(stand, attempt) as raw:
        raw.post(path, body, *headers, key=key)
        return await raw.answer()


def error(path: str, body: bytes) -> str:
    """The message of an error in the API's own shape, whole or in a stream."""
    if b"data: " in body:
        said = [json.loads(line[6:]) for line in body.splitlines() if line.startswith(b"data: {")]
        told = next(data for data in said if data.get("type") == "error" or ("error" in data and "object" not in data))
    else:
        told = json.loads(body)
    if path.startswith("messages"):
        assert told["type"] == "error"
        assert isinstance(told["error"]["type"], str)
    else:
        assert set(told["error"]) == {"message", "type", "param", "code"}
    return str(told["error"]["message"])


async def events(stand: Stand, attempt: Attempt) -> list[dict[str, Any]]:
    return [event.data for event in await stand.store.events(attempt.rollout) if event.attempt == attempt.number]


@asynccontextmanager
async def unharmed(stand: Stand, attempt: Attempt) -> AsyncIterator[None]:
    """Whatever is done in this block, afterwards nothing is in flight, no task is left, and the next request works."""
    before = len(asyncio.all_tasks())
    yield
    gateway, engine = stand.gateway, stand.engine
    async with asyncio.timeout(10):
        while gateway._requests._in_flight.total() or engine._in_flight or len(asyncio.all_tasks()) > before:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert all(session.in_flight == 0 for session in gateway.sessions._open.values())
    engine._script, latency, engine._latency = lambda asked: "fine", engine._latency, 0.0
    for path, body in BODIES.items():
        status, _, answer = await ask(stand, attempt, path, body)
        assert (status, b"fine" in answer) == (200, True), answer
    engine._latency = latency
    gc.collect()
