"""`strop serve` without its command line: the folder, the key, the lock, and how it ends."""

import asyncio
import fcntl
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from strop.errors import ConfigError, PlaceError
from strop.run import serve
from strop.run.folder import RunFolder
from strop.store.remote import HttpStore
from strop.store.sqlite import SqliteStore
from strop.types import Rollout, Task
from tests.limits import stretch

CHUNKED = b"POST /v1/lease HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n"


@asynccontextmanager
async def running(folder: Path, **options: Any) -> AsyncIterator[tuple[str, str]]:
    """A server of its own, told to stop by a signal at the end of the block."""
    ready: asyncio.Future[tuple[str, str]] = asyncio.get_running_loop().create_future()
    main = asyncio.create_task(serve.main(folder, on_ready=lambda url, key: ready.set_result((url, key)), **options))
    await asyncio.wait({main, ready}, return_when=asyncio.FIRST_COMPLETED)
    if main.done():
        await main
    yield await ready
    os.kill(os.getpid(), signal.SIGTERM)
    async with asyncio.timeout(20):
        await main


async def test_a_key_is_made_once_and_kept_to_its_owner(tmp_path: Path):
    folder = tmp_path / "new" / "folder"
    async with running(folder) as (url, key):
        assert len(key) >= 32
        store = await HttpStore.open(url, key)
        await store.enqueue([Rollout(id="a", group="a", member=0, task=Task(id="t"), created=1.0)])
        await store.close()
    assert (folder / "key").read_text().strip() == key
    assert (folder / "key").stat().st_mode & 0o777 == 0o600
    async with running(folder) as (url, again):
        assert again == key
        store = await HttpStore.open(url, key)
        assert (await store.get("a")).status == "queued"
        await store.close()
    assert sorted(path.name for path in folder.iterdir()) == ["key", "lock", "store.sqlite"]


async def test_a_key_that_is_given_is_not_written_down(tmp_path: Path):
    async with running(tmp_path, key="mine") as (_, key):
        assert key == "mine"
    assert not (tmp_path / "key").exists()
    for key in ("", "a b", "ä"):
        with pytest.raises(ConfigError, match="a key is made of"):
            async with running(tmp_path, key=key):
                pass
    (tmp_path / "key").write_text("two words")
    with pytest.raises(PlaceError, match=r"holds no key\. Fix: delete the file"):
        async with running(tmp_path):
            pass


async def test_a_store_has_one_owner(tmp_path: Path):
    async with running(tmp_path):
        with (tmp_path / "lock").open("wb") as lock, pytest.raises(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    training = RunFolder.create(tmp_path)
    with pytest.raises(PlaceError, match="another process is at work"):
        async with running(tmp_path):
            pass
    training._lock.close()


async def test_places_that_cannot_be_had(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(PlaceError, match="cannot write to"):
        async with running(tmp_path / "file"):
            pass
    taken = socket.create_server(("127.0.0.1", 0))
    with taken, pytest.raises(PlaceError, match=r"is in use; --port=0 picks a free one"):
        async with running(tmp_path / "two", port=taken.getsockname()[1]):
            pass
    for port in (-1, 65536, 99999):
        with pytest.raises(PlaceError, match=f"there is no port {port}: --port is from 1 to 65535"):
            async with running(tmp_path / "two", port=port):
                pass
    with pytest.raises(PlaceError, match="set --host to an address of this machine"):
        async with running(tmp_path / "two", host="192.0.2.1"):
            pass


@pytest.mark.parametrize(
    "begin", [b"GET /", b"GET / HTTP/1.1\r\nhost: localhost\r\nx: ", CHUNKED + b"0\r\nx: ", CHUNKED + b"1;x="]
)
async def test_an_endless_head_is_cut_off(tmp_path: Path, begin: bytes):
    async with running(tmp_path) as (url, _):
        reader, writer = await asyncio.open_connection("127.0.0.1", urlsplit(url).port)
        writer.write(begin)
        async with asyncio.timeout(30):
            with suppress(ConnectionError):
                for _ in range(1000):
                    writer.write(b"a" * 65536)
                    await writer.drain()
                    await asyncio.sleep(0)
                pytest.fail("64 MB were taken")
        writer.transport.abort()
        reader, writer = await asyncio.open_connection("127.0.0.1", urlsplit(url).port)
        writer.write(b"GET /health HTTP/1.1\r\nhost: localhost\r\nx: " + b"a" * 60_000 + b"\r\n\r\n")
        assert await reader.readline() == b"HTTP/1.1 200 OK\r\n"
        writer.write(b"GET /health HTTP/1.1\r\nhost: localhost\r\nx: " + b"a" * 70_000)
        assert b"HTTP/1.1 431 " in await reader.read()
        writer.close()


async def test_who_never_shows_a_whole_head_is_cut_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("strop.net.bounds.HEAD_TIME", 0.5)
    async with running(tmp_path) as (url, key):
        store = await HttpStore.open(url, key)
        waiting = asyncio.create_task(store.wait(10**6, timeout=4.0))  # longer, but all of it was said
        for begin in (b"", b"GET /health HT", b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\nGET"):
            reader, writer = await asyncio.open_connection("127.0.0.1", urlsplit(url).port)
            writer.write(begin)
            dripping = asyncio.create_task(drip(writer))
            async with asyncio.timeout(30):
                with suppress(ConnectionError):
                    assert (b"200 OK" in await reader.read()) == (b"host" in begin)
            dripping.cancel()
            writer.close()
        assert await waiting == (10**6, [])
        await store.close()


async def drip(writer: asyncio.StreamWriter) -> None:
    """A byte now and then, once the first have been said."""
    await asyncio.sleep(0.2)
    while True:
        writer.write(b"X")
        await asyncio.sleep(0.2)


async def test_it_drains_when_told_to_stop(tmp_path: Path):
    """What was acknowledged is there, requests that wait end at once, and so does the server."""
    async with running(tmp_path) as (url, key):
        store = await HttpStore.open(url, key, patience=0.2)
        acknowledged: list[str] = []

        async def enqueue(worker: int) -> None:
            for n in range(10**6):
                await store.enqueue([Rollout(id=f"w{worker}.{n}", group="g", member=0, task=Task(id="t"), created=1.0)])
                acknowledged.append(f"w{worker}.{n}")

        work = [asyncio.create_task(enqueue(worker)) for worker in range(4)]
        waiting = asyncio.create_task(store.wait(10**6, timeout=60))
        await asyncio.sleep(0.3)
        began = time.monotonic()
    assert time.monotonic() - began < stretch(10)
    for task in (*work, waiting):
        with pytest.raises(Exception, match="cannot be reached"):
            await task
    await store.close()
    behind = await SqliteStore.open(tmp_path / "store.sqlite")
    assert len(acknowledged) > 10
    assert {rollout.id for rollout in await behind.list(limit=10**6)} >= set(acknowledged)
    await behind.close()
    log = tmp_path / "serve.log"
    assert not log.exists() or "Traceback" not in log.read_text()


def test_it_starts_without_what_training_needs():
    code = "import sys, strop.run.serve; print(sorted({'torch', 'transformers', 'openai'} & sys.modules.keys()))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "[]\n"
