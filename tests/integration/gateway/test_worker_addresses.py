"""Gateway workers that are joined over TCP and have addresses of their own, as on the nodes of a cluster: whichever of
them is asked, what is answered and recorded is the same, and nothing is taken from one that was replaced."""

import asyncio
import os
import pickle
import signal
import socket
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import openai
import pytest

from strop.agent.transports import httpx
from strop.cluster.listener import ChildListener, connect
from strop.engines.base import Engine
from strop.engines.scripted import Scripted
from strop.gateway import worker_process
from strop.gateway.app import Gateway
from strop.gateway.contexts import extends
from strop.gateway.keeper import WorkerKeeper, WorkerOrder
from strop.gateway.replicas import Replicas
from strop.gateway.spawn import spawn_worker
from strop.gateway.template import Renderer
from strop.gateway.worker import WorkerSetup
from strop.gateway.worker_process import StartedWorker, describe_end
from strop.net.server import serve
from strop.runners.pool import LET_DOWN
from strop.store.sqlite import SqliteStore
from strop.types import Attempt
from tests.integration.gateway.stand import ROOT, Stand, fetch, make_in_worker, make_routes
from tests.integration.gateway.test_direct_line import Line
from tests.limits import stretch
from tests.unit.engines import test_vllm

QUESTION: Any = [{"role": "user", "content": "one"}]


class FarWorker(StartedWorker):
    """Where the keeper's `out_of_reach` is set nobody can end it, and it asks servers where it is `beside_servers`."""

    def __init__(self, process: subprocess.Popen[bytes], calls: socket.socket, keeper: "FarWorkers") -> None:
        self.calls, self.pid, self.process, self._keeper = calls, process.pid, process, keeper

    def reaches(self, url: str) -> bool:
        return self._keeper.beside_servers

    async def wait(self, seconds: float) -> str:
        with suppress(subprocess.TimeoutExpired):
            return describe_end(await asyncio.to_thread(self.process.wait, 0 if self._keeper.out_of_reach else seconds))
        return ""

    async def kill(self) -> None:
        if not self._keeper.out_of_reach:
            self.process.kill()
            await asyncio.to_thread(self.process.wait)


class FarWorkers(WorkerKeeper):
    """Started as a node's host does it."""

    fix = "look"

    def __init__(self, gateway: Gateway, store: SqliteStore, engine: Engine, model: Path) -> None:
        super().__init__(gateway, store, {"p": engine}, 2, WorkerOrder(make=make_in_worker, given=model))
        self.out_of_reach, self.beside_servers = False, True
        self.listener = ChildListener("127.0.0.1", 0)
        self.sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
        self.urls = [f"http://127.0.0.1:{one.getsockname()[1]}" for one in self.sockets]

    async def spawn(self, setup: WorkerSetup) -> FarWorker:
        number, key = self.listener.expect()
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])

        def start() -> subprocess.Popen[bytes]:
            with connect(self.listener.address, number, key) as sock:
                files = [sock.fileno(), self.sockets[setup.place - 1].fileno()]
                return spawn_worker("serve_at_address", pickle.dumps(setup), files, None, {"PYTHONPATH": path})

        process = await asyncio.to_thread(start)
        with await asyncio.to_thread(self.listener.take, number, 10.0) as connection:
            return FarWorker(process, socket.socket(fileno=os.dup(connection.fileno())), self)

    def process(self, place: int) -> subprocess.Popen[bytes]:
        worker = self._workers[place].process
        assert isinstance(worker, FarWorker)
        return worker.process


class Far:
    """The stand with two such workers; `at` asks one of them."""

    def __init__(self, stand: Stand, workers: FarWorkers) -> None:
        self.stand, self.workers = stand, workers

    def at(self, place: int, attempt: Attempt, **options: Any) -> openai.AsyncOpenAI:
        base = f"{self.workers.urls[place - 1]}/r/{attempt.rollout}/{attempt.number}/agents/main/v1"
        return self.stand.client(attempt).with_options(base_url=base, timeout=stretch(60), **options)

    async def ask(self, place: int, attempt: Attempt, messages: Any, retries: int = 0) -> str:
        client = self.at(place, attempt, max_retries=retries)
        answer = await client.chat.completions.create(model="m", messages=messages)
        return answer.choices[0].message.content or ""


@asynccontextmanager
async def open_far(folder: Path, model: Path, engine: Any, renderer: Renderer) -> AsyncIterator[Far]:
    store = await SqliteStore.open(folder / "store.sqlite")
    gateway = Gateway(store, make_routes(engine, renderer))
    gateway.workers = workers = FarWorkers(gateway, store, engine, model)
    workers.start()
    server = await serve(gateway, switch=workers.switch)
    await workers.open()
    stand = Stand(store, engine, gateway, server)
    yield Far(stand, workers)
    for client in stand.clients:
        await client.close()
    workers.out_of_reach = False
    await workers.close()
    workers.listener.close()
    for one in workers.sockets:
        one.close()
    await server.close()
    await store.close()


@pytest.fixture
async def far(model: Path, renderer: Renderer, tmp_path: Path) -> AsyncIterator[Far]:
    async with open_far(tmp_path, model, Scripted([], renderer, chunk=1, context=1000), renderer) as far:
        yield far


async def test_an_attempt_whose_calls_alternate_is_exact(far: Far) -> None:
    far.stand.script(*(f"the answer {number}" for number in range(20)))
    attempt = await far.stand.attempt("g.0")
    messages: Any = [{"role": "user", "content": "one"}]
    for place in (1, 2, 1, 1, 2, 2, 1):
        said = await far.ask(place, attempt, messages, retries=2)
        messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "and then?"}]
    turns = await far.stand.turns(attempt)
    assert [turn.branch for turn in turns] == [None] * 7
    for before, turn in pairwise(turns):
        assert extends(turn)
        assert turn.parent == before.id
        whole = before.prompt_ids + before.response_ids
        assert turn.prompt_ids[: len(whole)] == whole
    assert far.stand.gateway.counts["turns"] == 0  # none of it was answered by the owner
    assert (await far.workers.count())["turns"] == 7


async def test_two_answers_of_the_same_moment_are_not_both_given(far: Far) -> None:
    """Of what two gateways have made of the same past one is recorded, and only that one is answered."""
    far.stand.script(*(f"the answer {number}" for number in range(20)))
    attempt = await far.stand.attempt("g.0")
    await far.ask(1, attempt, QUESTION)
    await far.ask(2, attempt, [{"role": "user", "content": "two"}])
    with pytest.raises(openai.InternalServerError, match="another gateway has answered") as refused:
        await far.ask(1, attempt, [{"role": "user", "content": "three"}])
    assert refused.value.code in LET_DOWN  # an agent that ends by it is tried again
    assert [turn.messages[0]["content"] for turn in await far.stand.turns(attempt)] == ["one", "two"]


async def test_one_that_is_killed_in_mid_stream_loses_nothing_that_was_answered(far: Far) -> None:
    stand, attempt = far.stand, await far.stand.attempt("g.0")
    stand.script("first", "the answer that is cut off", "second")
    client = far.at(1, attempt)
    answered = await client.chat.completions.create(model="m", messages=QUESTION)
    stand.engine._latency = 0.2
    stream = await client.chat.completions.create(model="m", messages=QUESTION, stream=True)
    await anext(stream)
    before, epoch = far.workers.process(1), far.workers._workers[1].setup.epoch
    os.kill(before.pid, signal.SIGKILL)
    with pytest.raises((openai.APIError, httpx.HTTPError)):
        async for _ in stream:
            pass
    stand.engine._latency = 0.0
    messages = [*QUESTION, {"role": "assistant", "content": "first"}, {"role": "user", "content": "And?"}]
    assert await far.ask(1, attempt, messages, retries=3) == "second"  # at the same address
    turns = await stand.store.turns(attempt.rollout)
    assert turns[0].id == answered.id
    assert turns[-1].parent == answered.id  # rebuilt from the store, it goes on from the very tokens
    assert turns[-1].prompt_ids[: turns[-1].shared] == turns[0].ids
    assert far.workers._workers[1].setup.epoch == epoch + 1
    errors = [event.data["code"] for event in await stand.store.events(attempt.rollout) if event.kind == "error"]
    assert errors == ["server_error"]  # so that the agent is not blamed


async def test_one_that_is_replaced_and_lives_records_and_answers_nothing(
    far: Far, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when its machine was out of reach for a while, and nobody could end it."""
    monkeypatch.setattr(worker_process, "HUNG", 1.0)
    monkeypatch.setattr(worker_process, "PING", 0.05)
    stand, attempt = far.stand, await far.stand.attempt("g.0")
    far.workers.out_of_reach = True
    stand.script("slowly said by the old one", "said by the new one")
    stand.engine._latency = 0.1
    old = far.workers.process(1)
    asking = asyncio.create_task(far.ask(1, attempt, QUESTION))
    while not far.workers._workers[1]._at_work:  # noqa: ASYNC110 - the call is on its way
        await asyncio.sleep(0.01)
    os.kill(old.pid, signal.SIGSTOP)
    async with asyncio.timeout(stretch(60)):
        while not ((now := far.workers._workers.get(1)) and now.setup.epoch == 2):  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    stand.engine._latency = 0.0
    other = await stand.attempt("g.1")
    assert old.poll() is None
    assert await far.ask(1, other, QUESTION, retries=3) == "said by the new one"
    os.kill(old.pid, signal.SIGCONT)
    with pytest.raises(openai.APIConnectionError):
        await asking
    assert await asyncio.to_thread(old.wait, stretch(20)) == 1  # it found that its owner has hung up
    assert await stand.store.turns(attempt.rollout) == []
    (told,) = await stand.store.events(attempt.rollout)
    assert told.data["code"] in LET_DOWN


async def test_events_and_keys_work_at_every_address(far: Far) -> None:
    attempt = await far.stand.attempt("g.0")
    far.stand.script("fine", "fine")
    for number, url in enumerate(far.workers.urls):
        event = {"kind": "message", "data": {"said": number, "x": 2**70}}
        status, _ = await fetch(f"{url}/r/g.0/1/events", event, key=attempt.key)
        assert status == 200
        status, rollout = await fetch(f"{url}/r/g.0/1", key=attempt.key)
        assert (status, rollout["id"]) == (200, "g.0")
        status, answer = await fetch(f"{url}/v1/chat/completions", {"messages": QUESTION}, key=attempt.key)
        if status == 503:  # the other one has answered this attempt
            status, answer = await fetch(f"{url}/v1/chat/completions", {"messages": QUESTION}, key=attempt.key)
        assert (status, answer["id"]) == (200, f"g.0/1/{number}")
        status, refused = await fetch(f"{url}/v1/chat/completions", {"messages": QUESTION}, key="nobody's")
        assert (status, refused["error"]["code"]) == (401, "invalid_api_key")
    said = [event.data["said"] for event in await far.stand.store.events("g.0") if event.kind == "message"]
    assert said == [0, 1]
    await far.stand.store.finish("g.0", 1)
    status, _ = await fetch(f"{far.workers.urls[0]}/r/g.0/1/events", {"kind": "message", "data": {}}, key=attempt.key)
    assert status == 409


async def test_sessions_are_forgotten_wherever_they_are(far: Far) -> None:
    attempt = await far.stand.attempt("g.0")
    far.stand.script(*["fine"] * 4)
    for place in (1, 2):
        await far.ask(place, attempt, QUESTION, retries=2)
    assert (await far.workers.count())["sessions"] == 2
    await far.workers.wait_until_idle("g.0", 1, limit=1.0)
    far.stand.gateway.forget("g.0")
    assert (await far.workers.count())["sessions"] == 0


async def test_a_server_is_asked_directly_where_it_is_reached(model: Path, renderer: Renderer, tmp_path: Path) -> None:
    vllm = test_vllm.Stand(tmp_path / "vllm", stream_interval=4)
    await vllm.engine.start()
    engine: Any = Replicas([vllm.engine])
    async with open_far(tmp_path, model, engine, renderer) as far:
        line, attempt = Line(vllm, far.stand), await far.stand.attempt("g.0")

        async def ask() -> None:
            client = far.at(1, attempt)
            answer = await client.completions.create(model="m", prompt=[5, 9, 7], max_tokens=4)
            turn = (await far.stand.store.turns("g.0"))[-1]
            assert (turn.id, turn.response_ids, len(turn.logprobs)) == (answer.id, [8, 9, 10, 11], 4)

        await ask()
        assert line.relayed == []
        far.workers.beside_servers = False
        await engine.pause()
        await engine.resume()  # workers are told of their lines anew
        await ask()
        assert line.relayed == [[5, 9, 7]]
    await vllm.engine.close()
