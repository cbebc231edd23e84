"""What only the store over HTTP can get wrong: lines that break, servers that come back, keys, addresses.

That it answers like any other store is tested by `test_store.py`.
"""

import asyncio
import math
import socket
import sqlite3
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from starlette.types import Receive, Scope, Send

from strop.errors import BadReward, ConfigError, Fenced, IllegalTransition, StoreError, UnknownId
from strop.net.server import bind
from strop.net.server import serve as serve_app
from strop.run.serve import StoreServer, open_store_server, serve_store
from strop.store.remote import HttpStore
from strop.store.server.app import StoreApp
from strop.store.sqlite import SqliteStore
from strop.types import Event, Policy, Reward, Rollout, Step, Task, Turn
from tests.limits import stretch

KEY = "run-key"


def rollout(id: str, **fields: Any) -> Rollout:
    return Rollout(**{"id": id, "group": "g", "member": 0, "task": Task(id="t"), "created": 1.0} | fields)


@pytest.fixture
async def behind(tmp_path: Path) -> AsyncIterator[SqliteStore]:
    store = await SqliteStore.open(tmp_path / "store.sqlite")
    yield store
    await store.close()


@pytest.fixture
async def server(behind: SqliteStore) -> AsyncIterator[StoreServer]:
    async with open_store_server(behind, KEY) as server:
        yield server


@asynccontextmanager
async def client(url: str, **options) -> AsyncIterator[HttpStore]:
    store = await HttpStore.open(url, KEY, **options)
    try:
        yield store
    finally:
        await store.close()


def port_of(url: str) -> int:
    return urlsplit(url).port or 0


# -- addresses and keys ------------------------------------------------------------------------------------------------


async def test_a_url_may_end_in_a_slash_or_begin_with_a_prefix(behind: SqliteStore, server: StoreServer):
    async with client(server.url + "/") as store:
        await store.enqueue([rollout("a")])
    app = StoreApp(behind, KEY)

    class Stripped:
        """A proxy that serves the store below an address of its own."""

        async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
            assert scope["path"].startswith("/runs/7/")
            await app(scope | {"path": scope["path"].removeprefix("/runs/7")}, receive, send)

    proxy = await serve_app(Stripped())
    for url in (f"{proxy.url}/runs/7", f"{proxy.url}/runs/7/"):
        async with client(url) as store:
            assert (await store.get("a")).id == "a"
    await proxy.close()


async def test_a_wrong_key_says_what_to_do(server: StoreServer):
    with pytest.raises(StoreError, match=rf"{server.url}\. Fix: give the run's key \(--key-file or STROP_KEY\)"):
        await HttpStore.open(server.url, "wrong")
    with pytest.raises(ConfigError, match=r"no key is given\. Fix: .* keep in their folder's file `key`"):
        await HttpStore.open(server.url, "")


@pytest.mark.parametrize("key", ["two words", "line\nbreak", "schlüssel"])
async def test_a_key_that_cannot_be_sent(server: StoreServer, key: str):
    with pytest.raises(ConfigError, match="a key is made of"):
        await HttpStore.open(server.url, key)


async def test_a_server_that_is_no_store():
    async def other(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": scope["path"].count("x") or 404, "headers": []})
        await send({"type": "http.response.body", "body": b"<html>hello</html>"})

    server = await serve_app(other)
    with pytest.raises(StoreError, match=r"status 404, but is not a Strop store. Fix: check the address"):
        await HttpStore.open(server.url, KEY)
    with pytest.raises(StoreError, match="cannot be read here"):
        await HttpStore.open(server.url + "/" + "x" * 200, KEY)
    await server.close()


async def test_nobody_there(unused_tcp_port: int):
    url = f"http://127.0.0.1:{unused_tcp_port}"
    began = time.monotonic()
    with pytest.raises(StoreError, match=rf"{url} cannot be reached \(tried for . s, .*refused.*strop serve") as raised:
        await HttpStore.open(url, KEY, patience=0.5)
    assert 0.3 < time.monotonic() - began < stretch(10)
    assert str(raised.value).count("cannot be reached") == str(raised.value).count(url) == 1


async def test_who_never_answered_is_given_up_sooner(
    behind: SqliteStore, unused_tcp_port: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("strop.store.remote.FIRST", 0.2)
    server = await serve_store(behind, key=KEY, port=unused_tcp_port)
    async with client(server.url) as store:
        await server.close()
        async with asyncio.timeout(30):
            with pytest.raises(StoreError, match=r"cannot be reached \(tried for 0 s"):
                await HttpStore.open(server.url, KEY)
        waiting = asyncio.create_task(store.stats())  # it has answered before: a pause, not an end
        await asyncio.sleep(0.6)
        server = await serve_store(behind, key=KEY, port=unused_tcp_port)
        assert (await waiting)["queued"] == 0
        await server.close()


async def test_an_answer_that_is_too_large_is_not_asked_for_again(
    server: StoreServer, behind: SqliteStore, monkeypatch: pytest.MonkeyPatch
):
    await behind.enqueue([rollout("a", task=Task(id="t", data="x" * 5000))])
    monkeypatch.setattr("strop.store.remote.MAX_ANSWER", 4096)
    async with client(server.url, patience=1000) as store, asyncio.timeout(30):
        with pytest.raises(StoreError, match=r"larger than 4096 bytes\. Fix: read it beside the store itself"):
            await store.get("a")


# -- records -----------------------------------------------------------------------------------------------------------


async def test_refusals_are_the_same_errors_on_both_sides(server: StoreServer):
    async with client(server.url) as store:
        for verb, error in (
            (store.get("nobody"), UnknownId),
            (store.get("a/b"), UnknownId),
            (store.get(""), UnknownId),
            (store.get("\ud800"), UnknownId),
            (store.finish("a b", 1), UnknownId),
            (store.enqueue([rollout("a", status="failed")]), IllegalTransition),
            (store.enqueue([rollout("a b")]), StoreError),
            (store.enqueue([rollout("a", task=Task(id="t", data={1j}))]), StoreError),
            (store.enqueue([rollout("a", task=Task(id="\ud800"))]), StoreError),
            (store.finish("a", 1, rewards=[Reward(value=math.nan)]), BadReward),
            (store.finish("a", 1, rewards=[Reward(name="", value=1.0)]), BadReward),
            (store.lease("w", seconds=0), StoreError),
        ):
            with pytest.raises(error) as raised:
                await verb
            assert type(raised.value) is error
        await store.enqueue([rollout("a")])
        await store.lease("w\0\ud800", seconds=30)
        await store.finish("a", 1, detail="odd \ud800")
        with pytest.raises(Fenced, match="attempt 1 of rollout 'a' is over"):
            await store.add_events([Event(rollout="a", attempt=1, kind="message", data={}, time=1.0)])
        assert (await store.get("a")).detail == "odd ?"


async def test_keys_of_attempts_stay_where_they_are(server: StoreServer, behind: SqliteStore):
    async with client(server.url) as store:
        await store.enqueue([rollout("a")])
        (lease,) = await store.lease("w", seconds=30)
        assert len(lease.attempt.key) > 20
        (attempt,) = await store.attempts("a")
        assert (attempt.key, attempt.number, attempt.runner) == ("", 1, "w")
        assert (await behind.attempts("a"))[0].key == lease.attempt.key


async def test_long_lists_come_in_pages(server: StoreServer):
    async with client(server.url) as store:
        await store.enqueue([rollout(f"r{n}") for n in range(2300)])
        assert [r.id for r in await store.list(limit=5000)] == [f"r{n}" for n in range(2300)]
        assert [r.id for r in await store.list(limit=1500, after="r9")] == [f"r{n}" for n in range(10, 1510)]
        assert len(await store.lease("w", seconds=30, count=5000)) == 1000
        assert len(await store.list(status="queued", group="g", mode="train", limit=2000)) == 1300


async def test_a_damaged_rollout_is_not_taken_for_another(server: StoreServer, behind: SqliteStore, tmp_path: Path):
    await behind.enqueue([rollout("a"), rollout("b")])
    with sqlite3.connect(tmp_path / "store.sqlite") as db:
        db.execute("""UPDATE rollouts SET task = '{"id":"t"' WHERE id = 'a'""")
    async with client(server.url) as store:
        with pytest.raises(StoreError, match="cannot be read here"):
            await store.list()


async def test_metrics_that_are_no_numbers(server: StoreServer, behind: SqliteStore):
    async with client(server.url) as store:
        await store.put_policy(Policy(name="main", version="1.0", model="m"))
        metrics = {"kl": math.nan, "loss": -0.5}
        await store.commit_step(Step(lineage=1, number=1, rollouts=[], metrics=metrics, time=1.0))
        for found in ((await store.steps())[0].metrics, (await behind.steps())[0].metrics):
            assert math.isnan(found["kl"])
            assert found["loss"] == -0.5


async def test_a_turn_larger_than_most_answers(server: StoreServer):
    """A long context, many times: more than the client takes from servers it does not know."""
    async with client(server.url) as store:
        await store.enqueue([rollout("a")])
        await store.lease("w", seconds=600)
        ids, long = list(range(100_000, 350_000)), [{"x": "y" * (6 << 20)}]
        given = [
            Turn(
                id=f"a/1/{n}", rollout="a", attempt=1, prompt_ids=ids, response_ids=[1], logprobs=[-1.0],
                versions=[(0, "1.0")], finish="stop", started=float(n), ended=n + 1.0, messages=long,
            )
            for n in range(10)
        ]  # fmt: skip
        for turn in given:
            await store.add_turns([turn])
        assert await store.turns("a") == given


# -- lines that break --------------------------------------------------------------------------------------------------


@asynccontextmanager
async def cutting(url: str, cut: Callable[[int], bool]) -> AsyncIterator[str]:
    """A line that breaks: of the connections for whose number `cut` holds, the answer is thrown away."""
    count = 0

    async def pipe(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, lost: bool) -> None:
        while data := await reader.read(65536):
            if lost:
                break
            writer.write(data)
            await writer.drain()

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal count
        count += 1
        lost = cut(count)
        up_reader, up_writer = await asyncio.open_connection("127.0.0.1", port_of(url))
        pipes = [
            asyncio.create_task(pipe(reader, up_writer, False)),
            asyncio.create_task(pipe(up_reader, writer, lost)),
        ]
        await asyncio.wait(pipes, return_when=asyncio.FIRST_COMPLETED)
        for task in pipes:
            task.cancel()
        await asyncio.gather(*pipes, return_exceptions=True)
        for end in (writer, up_writer):
            end.transport.abort()

    proxy = await asyncio.start_server(talk, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{proxy.sockets[0].getsockname()[1]}"
    finally:
        proxy.close()
        await proxy.wait_closed()


async def test_what_was_done_is_not_done_twice(server: StoreServer, behind: SqliteStore):
    """The first answer to every verb is lost, so every verb is said twice."""
    connections: list[int] = []

    def every_other(number: int) -> bool:
        connections.append(number)
        return number % 2 == 1

    async def say(verb: str, *args: Any, **kwargs: Any) -> Any:
        store = HttpStore(url, KEY)  # without a connection yet
        try:
            return await getattr(store, verb)(*args, **kwargs)
        finally:
            await store.close()

    turn = Turn(
        id="a/1/0", rollout="a", attempt=1, prompt_ids=[1], response_ids=[2], logprobs=[-0.5],
        versions=[(0, "1.0")], finish="stop", started=1.0, ended=2.0,
    )  # fmt: skip
    async with cutting(server.url, every_other) as url:
        await say("enqueue", [rollout("a"), rollout("b")])
        (lease,) = await say("lease", "w", seconds=60)
        assert lease.rollout.id == "a"
        await say("add_turns", [turn])
        await say("add_events", [Event(rollout="a", attempt=1, kind="message", data={}, time=1.0)])
        done = await say("finish", "a", 1, rewards=[Reward(value=1.0)])
        assert done.status == "succeeded"
        await say("put_policy", Policy(name="main", version="1.0", model="m"))
        await say("commit_step", Step(lineage=1, number=1, rollouts=["a"], metrics={}, time=1.0))
    assert len(connections) == 14
    assert [(r.id, r.status, r.attempts) for r in await behind.list()] == [("a", "succeeded", 1), ("b", "queued", 0)]
    assert await behind.turns("a") == [turn]
    assert len(await behind.events("a")) == 1
    assert len(await behind.steps()) == 1


async def test_a_server_that_is_started_again_while_clients_wait(behind: SqliteStore, unused_tcp_port: int):
    first = await serve_store(behind, key=KEY, port=unused_tcp_port)
    async with client(first.url) as store:
        cursor, _ = await store.wait(0, timeout=0)
        leasing = asyncio.create_task(store.lease("w", seconds=30, wait=60))
        waiting = asyncio.create_task(store.wait(cursor, timeout=60))
        await asyncio.sleep(0.2)
        await first.close()
        enqueueing = asyncio.create_task(store.enqueue([rollout("a")]))  # while nobody is there
        await asyncio.sleep(0.5)
        assert not leasing.done()
        assert not waiting.done()
        assert not enqueueing.done()
        async with asyncio.timeout(30):
            second = await serve_store(behind, key=KEY, port=unused_tcp_port)
            await enqueueing
            assert [lease.rollout.id for lease in await leasing] == ["a"]
            assert [r.id for r in (await waiting)[1]] == ["a"]
        await second.close()


async def test_patience_begins_when_the_line_breaks():
    """However long a request was at work before."""
    asked = 0

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal asked
        asked += 1
        await reader.readuntil(b"\r\n\r\n")
        if asked == 1:
            await asyncio.sleep(0.7)
            return writer.transport.abort()
        writer.write(b'HTTP/1.1 200 OK\r\ncontent-length: 13\r\n\r\n{"queued": 7}')
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(talk, "127.0.0.1", 0)
    store = HttpStore(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", KEY, patience=0.5)
    assert await store.stats() == {"queued": 7}
    await store.close()
    server.close()
    await server.wait_closed()


async def test_a_heartbeat_does_not_wait_on_a_silent_line():
    """Nobody says that the line is dead: the lease must not run out over it."""
    silent: list[asyncio.StreamWriter] = []

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        silent.append(writer)
        if len(silent) == 1:
            return  # takes the request and says nothing
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b'HTTP/1.1 200 OK\r\ncontent-length: 11\r\n\r\n{"over":[]}')

    line = await asyncio.start_server(talk, "127.0.0.1", 0)
    store = HttpStore(f"http://127.0.0.1:{line.sockets[0].getsockname()[1]}", KEY)
    async with asyncio.timeout(20):  # less than any other request is given
        assert await store.heartbeat([("a", 1)], seconds=1.0) == []
    assert len(silent) == 2
    await store.close()
    for writer in silent:
        writer.close()
    line.close()
    await line.wait_closed()


async def test_a_store_that_has_trouble_is_asked_again(behind: SqliteStore, server: StoreServer):
    async with client(server.url, patience=0.5) as store:
        await behind.close()  # as good as a disk that is full
        with pytest.raises(StoreError, match=rf"is closed.*{server.url} was asked for . s"):
            await store.stats()


async def test_waiting_longer_than_one_request_may(server: StoreServer, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("strop.store.remote.POLL", 0.1)
    async with client(server.url) as store:
        began = time.monotonic()
        assert await store.lease("w", seconds=30, wait=0.5) == []
        assert await store.wait(5, timeout=0.5) == (5, [])
        assert 0.9 < time.monotonic() - began < stretch(10)


async def test_leases_that_ran_out_are_taken_back(behind: SqliteStore):
    server = await serve_store(behind, key=KEY, lease_check=0.05, grace=0.0)
    async with client(server.url) as store:
        await store.enqueue([rollout("a")])
        await store.lease("w", seconds=0.05)
        (lease,) = await store.lease("w2", seconds=30, wait=30)
        assert lease.attempt.number == 2
    await server.close()


async def test_small_answers_are_sent_at_once():
    """On asyncio's own loop too, which waits for acknowledgements (40 ms) on sockets that do not say they are TCP."""
    sock = bind("127.0.0.1", 0, ("--host", "--port"))
    assert sock.proto == socket.IPPROTO_TCP
    sock.close()
