"""Verbs of several callers in one request: each keeps its own answer, its own refusal and its own durability."""

import asyncio
import json
import sqlite3
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from starlette.types import Receive, Scope, Send

from strop.errors import BadReward, Fenced, StoreError, UnknownId
from strop.net.client import Client
from strop.net.server import serve as serve_app
from strop.store import batching
from strop.store.remote import HttpStore
from strop.store.server.app import StoreApp
from strop.store.sqlite import SqliteStore
from strop.types import Event, Reward, Rollout, Task
from tests.unit.store.test_http_store import cutting

KEY = "run-key"


def rollout(id: str, **fields: Any) -> Rollout:
    return Rollout(**{"id": id, "group": "g", "member": 0, "task": Task(id="t"), "created": 1.0} | fields)


def reward(id: str, value: float) -> Event:
    return Event(rollout=id, attempt=1, kind="reward", data={"name": "reward", "value": value}, time=1.0)


class Served:
    """A served store that writes down what it was asked for. `refuses`: paths that it says it does not know."""

    def __init__(self, behind: SqliteStore) -> None:
        self.behind, self._app = behind, StoreApp(behind, KEY)
        self.asked: list[str] = []
        self.refuses: Callable[[str], bool] = lambda path: False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.asked.append(scope["path"])
        where = "/nowhere" if self.refuses(scope["path"]) else scope["path"]
        await self._app({**scope, "path": where}, receive, send)

    @asynccontextmanager
    async def client(self) -> AsyncIterator[HttpStore]:
        server = await serve_app(self)
        store = await HttpStore.open(server.url, KEY, patience=10)
        try:
            self.asked.clear()
            yield store
        finally:
            await store.close()
            await server.close()


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Served]:
    behind = await SqliteStore.open(tmp_path / "store.sqlite")
    yield Served(behind)
    await behind.close()


async def test_callers_at_once_share_requests_and_get_their_own_answers(served: Served):
    ids = [f"r{n:02}" for n in range(40)]
    async with served.client() as store:
        assert await asyncio.gather(*(store.enqueue([rollout(id)]) for id in ids)) == [1] * 40
        assert served.asked == ["/v1/rollouts", "/v1/batch"]  # the first goes at once: it may be alone
        assert await asyncio.gather(*(store.enqueue([rollout(id)]) for id in ids)) == [0] * 40
        assert served.asked[2:] == ["/v1/batch"]
        leases = [lease for (lease,) in await asyncio.gather(*(store.lease("w", seconds=60) for _ in ids))]
        assert sorted(lease.rollout.id for lease in leases) == ids
        assert len({lease.attempt.key for lease in leases}) == 40
        served.asked.clear()
        ended = await asyncio.gather(
            *(store.finish(one.rollout.id, 1, rewards=[Reward(value=float(n))]) for n, one in enumerate(leases))
        )
        assert [one.id for one in ended] == [lease.rollout.id for lease in leases]
        assert [one.reward() for one in ended] == [float(n) for n in range(40)]
        assert served.asked == ["/v1/batch"]
    assert (await served.behind.stats())["succeeded"] == 40


async def test_a_lone_caller_goes_alone_again(served: Served):
    async with served.client() as store:
        await asyncio.gather(*(store.enqueue([rollout(f"r{n}")]) for n in range(3)))
        served.asked.clear()
        for n in range(3):
            await store.enqueue([rollout(f"s{n}")])
        assert served.asked == ["/v1/rollouts"] * 3


async def test_what_was_answered_is_in_the_file(served: Served, tmp_path: Path):
    async with served.client() as store:
        await asyncio.gather(*(store.enqueue([rollout(f"r{n}")]) for n in range(8)))
        with sqlite3.connect(f"file:{tmp_path}/store.sqlite?mode=ro", uri=True) as other:
            assert other.execute("SELECT count(*) FROM rollouts").fetchone() == (8,)


async def test_one_that_is_refused_is_refused_alone(served: Served):
    await served.behind.enqueue([rollout(id) for id in "abcd"])
    await served.behind.lease("w", seconds=60, count=4)
    await served.behind.finish("b", 1)
    async with served.client() as store:
        said = await asyncio.gather(
            store.add_events([reward("a", 1.0)]),
            store.add_events([reward("b", 1.0)]),
            store.finish("nobody", 1),
            store.finish("c", 7),
            store.finish("d", 1),
            return_exceptions=True,
        )
        assert served.asked == ["/v1/events", "/v1/batch"]
    assert said[0] is None
    assert [type(error) for error in said[1:4]] == [Fenced, UnknownId, UnknownId]
    assert "attempt 1 of rollout 'b' is over" in str(said[1])
    assert isinstance(said[4], Rollout)
    assert [one.status for one in await served.behind.list()] == ["running", "succeeded", "running", "succeeded"]


async def test_a_caller_that_goes_away_leaves_the_others_their_answers(served: Served):
    async with served.client() as store:
        tasks = [asyncio.create_task(store.enqueue([rollout(f"r{n}")])) for n in range(4)]
        await asyncio.sleep(0)
        tasks[1].cancel()  # before it was sent
        await asyncio.sleep(0)
        tasks[2].cancel()  # after
        done = await asyncio.gather(*tasks, return_exceptions=True)
    assert [isinstance(one, asyncio.CancelledError) for one in done] == [False, True, True, False]
    assert {"r0", "r3"} <= {one.id for one in await served.behind.list()}


async def test_large_bodies_verbs_that_read_and_verbs_that_wait_go_alone(served: Served):
    large = rollout("large", task=Task(id="t", data="x" * batching.LARGE))
    await served.behind.enqueue([rollout("a"), rollout("b")])
    async with served.client() as store:
        await asyncio.gather(
            store.enqueue([rollout("c")]),
            store.enqueue([large]),
            store.get("a"),
            store.lease("w", seconds=60, wait=1.0),
            store.heartbeat([("a", 1)], seconds=60),
        )
        assert "/v1/batch" not in served.asked
        assert len(served.asked) == 5


async def test_a_server_that_knows_no_batches_is_asked_one_by_one(served: Served):
    served.refuses = lambda path: path == "/v1/batch"
    async with served.client() as store:
        for _ in range(2):
            await asyncio.gather(*(store.enqueue([rollout(f"r{n}")]) for n in range(5)))
        assert served.asked.count("/v1/batch") == 1
    assert (await served.behind.stats())["queued"] == 5


async def test_a_batch_whose_answer_is_lost_is_not_done_twice(served: Served):
    """The server does all of it, and the line breaks before the answer: every caller says its verb again."""
    await served.behind.enqueue([rollout(f"r{n}") for n in range(6)])
    server = await serve_app(served)
    async with cutting(server.url, lambda number: number in (2, 3)) as url:
        store = await HttpStore.open(url, KEY)  # on the first connection, as is the verb that goes at once
        leases = [lease for (lease,) in await asyncio.gather(*(store.lease("w", seconds=60) for _ in range(6)))]
        await store.close()
    assert served.asked[:3] == ["/v1/policies", "/v1/lease", "/v1/batch"]
    assert len(served.asked) > 4
    assert len({lease.rollout.id for lease in leases}) == 6
    assert [one.attempts for one in await served.behind.list()] == [1] * 6
    async with cutting(server.url, lambda number: number in (2, 3)) as url:
        store = await HttpStore.open(url, KEY)
        ended = await asyncio.gather(*(store.finish(one.rollout.id, 1, cause="agent_error") for one in leases))
        await store.close()
    assert {one.status for one in ended} == {"failed"}
    assert [one.attempts for one in await served.behind.list()] == [1] * 6
    await server.close()


async def test_an_answer_that_does_not_fit_is_said_to_everybody():
    async def odd(scope: Scope, receive: Receive, send: Send) -> None:
        body = {"/v1/policies": b"[]", "/v1/batch": b"[]"}.get(scope["path"], b'{"queued": 1, "recorded": 1}')
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(body))]})
        await send({"type": "http.response.body", "body": body})

    server = await serve_app(odd)
    store = await HttpStore.open(server.url, KEY)
    said = await asyncio.gather(*(store.enqueue([rollout(f"r{n}")]) for n in range(3)), return_exceptions=True)
    assert said[0] == 1
    assert all("0 answers to 2 verbs). Fix: use the same version" in str(one) for one in said[1:])
    assert {type(one) for one in said[1:]} == {StoreError}
    await store.close()
    await server.close()


# -- as any client sees it ---------------------------------------------------------------------------------------------


async def ask(url: str, body: bytes, key: str | None = KEY) -> tuple[int, Any]:
    client = Client(url, key=key)
    answer = await client.request("POST", "/v1/batch", body)
    await client.close()
    return answer.status, json.loads(answer.body)


async def test_a_batch_by_hand(served: Served):
    deep: Any = "x"
    for _ in range(90):  # as deep as a verb may be alone
        deep = [deep]
    calls = [
        {"verb": "enqueue", "body": [{"id": "a", "task": {"id": "t", "data": deep}}]},
        {"verb": "enqueue", "body": [{"id": "b", "task": {"id": "t"}, "colour": "red"}]},
        {"verb": "finish", "at": {"id": "a", "n": "x"}, "body": {}},
        {"verb": "lease", "body": {"runner": "w", "seconds": 1, "wait": 5}},
        {"verb": "rollouts", "body": {}},
        {"verb": "batch", "body": []},
        {"verb": "close", "body": {}},
    ]
    server = await serve_app(served)
    status, answers = await ask(server.url, json.dumps(calls).encode())
    assert status == 200
    assert answers[0] == {"status": 200, "body": {"queued": 1, "recorded": 1}}
    refused = [(one["status"], one["body"]["error"]["message"]) for one in answers[1:]]
    assert [status for status, _ in refused] == [400, 404, 400, 400, 400, 400]
    assert "colour" in refused[0][1]
    assert "there is no attempt 'x' of rollout 'a'" in refused[1][1]
    assert "'lease' waits" in refused[2][1]
    assert all("is not a verb that a batch may hold. Fix: use one of finish, enqueue" in why for _, why in refused[3:])
    assert (await served.behind.get("a")).task.data == deep
    await server.close()


@pytest.mark.parametrize(
    ("body", "key", "status"),
    [
        (b"[]", KEY, 400),
        (b"[" + b",".join([b'{"verb":"lease","body":{}}'] * 1001) + b"]", KEY, 400),
        (b'[{"verb": "enqueue", "body": ' + b"[" * 100_000 + b"]" * 100_000 + b"}]", KEY, 400),
        (b"{}", KEY, 400),
        (b" " * (10 << 20), KEY, 413),
        (b"[]", "another", 401),
        (b"[]", None, 401),
    ],
    ids=["empty", "many", "deep", "shape", "large", "key", "no key"],
)
async def test_batches_that_are_refused_whole(served: Served, body: bytes, key: str | None, status: int):
    server = await serve_app(served)
    told, answer = await ask(server.url, body, key)
    assert told == status
    assert set(answer) == {"error"}
    await server.close()


async def test_rewards_are_checked_before_they_are_sent(served: Served):
    async with served.client() as store:
        said = await asyncio.gather(
            *(store.finish("a", 1, rewards=[Reward(value=float("nan"))]) for _ in range(2)), return_exceptions=True
        )
        assert [type(one) for one in said] == [BadReward, BadReward]
        assert not served.asked
