"""Clients that hold connections without asking for anything, and a good one that is answered all the same."""

from __future__ import annotations

import asyncio
import json
import resource
import select
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from strop.run import serve
from strop.run.serve import StoreServer
from strop.store.remote import HttpStore
from strop.store.sqlite import SqliteStore
from tests import runs
from tests.limits import stretch

ANNOUNCED = "host: 127.0.0.1\r\ncontent-length: 104857600\r\n"
KINDS = {
    "no key": "POST /v1/rollouts HTTP/1.1\r\n" + ANNOUNCED + "\r\n[",
    "a wrong key": "POST /r/a/1/events HTTP/1.1\r\n" + ANNOUNCED + "authorization: Bearer x\r\n\r\n[",
    "no such address": "POST /nowhere HTTP/1.1\r\n" + ANNOUNCED + "\r\n[",
    "the key": "POST /v1/rollouts HTTP/1.1\r\n" + ANNOUNCED + "authorization: Bearer KEY\r\n\r\n[",
    "half a head": "GET /health HTTP/1.1\r\nhost: 127.0.0.1\r\nx: ",
    "nothing": "",
}
SERVE = """
import resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, ({files}, {files}))
from strop.cli import main
from strop.net import bounds
bounds.HEAD_TIME = bounds.BODY_TIME = {patience}
sys.exit(main(sys.argv[1:]))
"""
PATIENCE = 600.0
"""Seconds that the server waits for heads and bodies: longer than a test takes on the busiest machine, so that nobody
is answered because the others were given up."""


@contextmanager
def served(folder: Path, files: int) -> Iterator[tuple[str, str]]:
    """A store served by a process that may have so many files and connections open."""
    arguments = runs.strop("serve", "--folder", folder, "--port", "0", "--json")[3:]
    command = [sys.executable, "-c", SERVE.format(files=files, patience=PATIENCE), *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        said = json.loads(server.stdout.readline())
        try:
            yield said["url"], said["key"]
        finally:
            server.terminate()


class Holding:
    """One connection that trickles, until the other side closes it."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.writer = writer
        self.tasks = [asyncio.create_task(self._trickle()), asyncio.create_task(self._listen(reader))]
        self.closed, self.answer = False, b""

    @classmethod
    async def at(cls, url: str, begin: str) -> Holding:
        reader, writer = await asyncio.open_connection("127.0.0.1", urlsplit(url).port)
        writer.write(begin.encode())
        return cls(reader, writer)

    async def _trickle(self) -> None:
        while not self.closed:
            await asyncio.sleep(0.3)
            self.writer.write(b"a")

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        with suppress(ConnectionError):
            self.answer = await reader.read()
        self.closed = True

    def end(self) -> None:
        for task in self.tasks:
            task.cancel()
        self.writer.transport.abort()


@pytest.mark.parametrize(
    ("kinds", "files", "number"),
    [(tuple(KINDS), 200, 250), *(pytest.param((kind,), 1024, 1100, marks=pytest.mark.slow, id=kind) for kind in KINDS)],
)
async def test_many_that_trickle_keep_nobody_else_waiting(
    tmp_path: Path, kinds: tuple[str, ...], files: int, number: int
) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 4096), hard))
    held: list[Holding] = []
    try:
        with served(tmp_path, files) as (url, key):
            begins = [KINDS[kind].replace("KEY", key) for kind in kinds]
            held += [await Holding.at(url, begins[n % len(begins)]) for n in range(number)]
            for _ in range(3):
                store = await HttpStore.open(url, key, patience=PATIENCE / 10)
                assert await store.list() == []
                await store.close()
                await asyncio.sleep(0.5)
    finally:
        for one in held:
            one.end()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[StoreServer]:
    store = await SqliteStore.open(tmp_path / "store.sqlite")
    async with serve.open_store_server(store) as server:
        yield server
    await store.close()


@pytest.mark.parametrize("kind", ["no key", "a wrong key", "no such address"])
async def test_a_body_that_nobody_wants_is_refused_and_not_waited_for(server: StoreServer, kind: str) -> None:
    one = await Holding.at(server.url, KINDS[kind])
    async with asyncio.timeout(120):
        await one.tasks[1]
    one.end()
    head, _, body = one.answer.partition(b"\r\n\r\n")
    assert head.split()[1] in (b"401", b"404")
    assert json.loads(body)["error"]["message"]


async def test_a_large_body_with_a_wrong_key_still_reads_why(server: StoreServer) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", urlsplit(server.url).port)
    writer.write(KINDS["no key"].encode())
    for _ in range(100):  # as clients do that send all of it before they look
        writer.write(b"a" * 100_000)
        await asyncio.sleep(0)
    async with asyncio.timeout(120):
        assert (await reader.readline()).split()[1] == b"401"
    writer.transport.abort()


async def test_a_client_that_asks_to_close_still_reads_why(server: StoreServer) -> None:
    """Python's own urllib does: it sends all of the body, and only then looks."""

    def send_all() -> bytes:
        with socket.create_connection(("127.0.0.1", urlsplit(server.url).port or 0)) as sock:
            sock.sendall(KINDS["no key"].replace("\r\n", "\r\nconnection: close\r\n", 1).encode())
            select.select([sock], [], [], stretch(30))  # it was answered before the body was there
            for _ in range(20):
                sock.sendall(b"a" * 100_000)
            return sock.makefile("rb").read()

    assert (await asyncio.to_thread(send_all)).split()[1] == b"401"


async def test_a_body_that_is_sent_too_slowly_is_given_up(server: StoreServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("strop.net.bounds.BODY_TIME", 0.5)
    one = await Holding.at(server.url, KINDS["the key"].replace("KEY", server.key))
    async with asyncio.timeout(120):
        await one.tasks[1]
    one.end()
    assert one.answer.split()[1] == b"408"


async def test_a_slow_body_that_goes_on_is_taken(server: StoreServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A poor line is no attack: what counts is how much comes."""
    monkeypatch.setattr("strop.net.bounds.BODY_TIME", 0.5)
    body = json.dumps([{"id": "a", "task": {"id": "t", "data": {"text": "x" * 200_000}}}]).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", urlsplit(server.url).port)
    head = f"POST /v1/rollouts HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: {len(body)}\r\n"
    writer.write((head + f"authorization: Bearer {server.key}\r\n\r\n").encode())
    for first in range(0, len(body), 20_000):
        writer.write(body[first : first + 20_000])
        await asyncio.sleep(0.3)
    async with asyncio.timeout(120):
        assert (await reader.readline()).split()[1] == b"200"
    writer.close()
