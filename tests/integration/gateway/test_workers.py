"""A gateway in several processes: whatever worker a request comes to, what is answered and recorded is the same."""

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest

from strop.agent.transports import httpx
from strop.engines.scripted import Scripted
from strop.errors import EngineError, Fenced
from strop.gateway import keeper, worker_process
from strop.gateway.app import Gateway
from strop.gateway.keeper import WorkerOrder
from strop.gateway.placement import OWNER, Placement
from strop.gateway.template import Renderer
from strop.gateway.worker import WorkerParts
from strop.gateway.workers import GatewayWorkers
from strop.net.client import Client
from strop.store.encoded_turns import EncodedTurn
from strop.store.sqlite import SqliteStore
from strop.types import Attempt
from tests.integration.gateway.stand import ROOT, Stand, fetch, open_stand
from tests.integration.gateway.test_chat_completions import CALL, QUESTION, check_appends, converse
from tests.limits import stretch

BODY = {"model": "any", "messages": QUESTION}


@pytest.fixture
async def stand(model: Path, renderer: Renderer, tmp_path: Path) -> AsyncIterator[Stand]:
    store = await SqliteStore.open(tmp_path / "store.sqlite")
    engine = Scripted([], renderer, chunk=1, context=1000)
    async with open_stand(model, store, engine, renderer, num_workers=2) as stand:
        yield stand
    await store.close()


def find_workers(stand: Stand) -> GatewayWorkers:
    assert isinstance(stand.gateway.workers, GatewayWorkers)
    return stand.gateway.workers


def find_place(stand: Stand, attempt: Attempt) -> int:
    return Placement(stand.store, 2).of_rollout(attempt.rollout)


async def make_two(stand: Stand) -> tuple[Attempt, Attempt]:
    """Attempts that are answered by different workers."""
    made = [await stand.attempt(f"r{n}") for n in range(8)]
    return next(one for one in made if find_place(stand, one) == 1), next(
        one for one in made if find_place(stand, one) == 2
    )


async def ask(client: Client, path: str, key: str, **headers: str) -> tuple[int, Any]:
    headers |= {"authorization": f"Bearer {key}"}
    response = await client.request("POST", path, json.dumps(BODY).encode(), timeout=stretch(20), headers=headers)
    return response.status, json.loads(response.body)


async def test_every_worker_answers_and_records_exactly(stand: Stand) -> None:
    for attempt in await make_two(stand):
        stand.script(CALL, CALL, "It is 12. 🙂")
        with openai.OpenAI(base_url=stand.url(attempt), api_key=attempt.key, max_retries=0) as client:
            answer, ids = await asyncio.to_thread(converse, client)
        turns = await stand.turns(attempt)
        assert answer == "It is 12. 🙂"
        assert [turn.id for turn in turns] == ids
        check_appends(turns)
    assert stand.gateway.counts["turns"] == 0  # none of it was answered here
    status, health = await fetch(f"{stand.server.url}/health")
    assert (status, health["counts"]["turns"], health["sessions"]) == (200, 6, 2)


async def test_streams_and_several_choices(stand: Stand) -> None:
    one, other = await make_two(stand)
    stand.script("Twelve it is.", "Twelve it is.")
    for attempt in (one, other):
        stream = await stand.client(attempt).chat.completions.create(model="any", messages=QUESTION, stream=True)
        text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
        assert text == "Twelve it is."
    stand.script("a", "b", "c")  # choices are compared with each other where the store is
    answered = await stand.client(one).chat.completions.create(model="any", messages=QUESTION, n=3)
    assert sorted(choice.message.content or "" for choice in answered.choices) == ["a", "b", "c"]
    assert [turn.choice for turn in (await stand.store.turns(one.rollout))[1:]] == [0, 1, 2]


async def test_one_connection_for_attempts_of_several_workers(stand: Stand) -> None:
    """A service that has one client for all of them: by address, by key alone, and for what the owner answers."""
    one, other = await make_two(stand)
    stand.script(*["fine"] * 6)
    client = Client(stand.server.url)
    for attempt in (one, other, one):
        path = f"/r/{attempt.rollout}/1/agents/main/v1/chat/completions"
        status, answer = await ask(client, path, attempt.key)
        assert (status, answer["id"].partition("/")[0]) == (200, attempt.rollout)
        status, answer = await ask(client, "/v1/chat/completions", "-", trace_id=attempt.key)
        assert (status, answer["id"].partition("/")[0]) == (200, attempt.rollout)
        health = await client.request("GET", "/health", timeout=stretch(20))
        assert health.status == 200
    assert len(await stand.turns(one)) == 4
    status, refused = await ask(client, "/v1/chat/completions", "nobody's")
    assert (status, refused["error"]["code"]) == (401, "invalid_api_key")
    await client.close()


async def test_events_are_recorded_by_the_owner(stand: Stand) -> None:
    for attempt in await make_two(stand):
        event = {"kind": "message", "data": {"said": "hello"}}
        status, _ = await fetch(stand.events_url(attempt), event, key=attempt.key)
        (recorded,) = await stand.store.events(attempt.rollout)
        assert (status, recorded.data) == (200, {"said": "hello"})


async def test_a_killed_worker_loses_nothing_that_was_answered(stand: Stand) -> None:
    attempt, other = await make_two(stand)
    workers, place = find_workers(stand), find_place(stand, attempt)
    stand.script("first", "the answer that is cut off", "second", "elsewhere")
    client = stand.client(attempt)
    answered = await client.chat.completions.create(model="any", messages=QUESTION)
    stand.engine._latency = 0.2
    stream = await client.chat.completions.create(model="any", messages=QUESTION, stream=True)
    await anext(stream)
    before = workers._workers[place]
    os.kill(before.process.pid, signal.SIGKILL)
    with pytest.raises((openai.APIError, httpx.HTTPError)):
        async for _ in stream:
            pass
    stand.engine._latency = 0.0
    messages = [*QUESTION, {"role": "assistant", "content": "first"}, {"role": "user", "content": "And?"}]
    again = await client.with_options(max_retries=3, timeout=stretch(60)).chat.completions.create(
        model="any", messages=messages
    )
    assert again.choices[0].message.content == "second"
    turns = await stand.store.turns(attempt.rollout)
    assert turns[0].id == answered.id
    assert turns[-1].parent == answered.id  # rebuilt from the store, it goes on from the very tokens
    assert turns[-1].prompt_ids[: turns[-1].shared] == turns[0].ids
    assert workers._workers[place].setup.epoch == before.setup.epoch + 1
    errors = [event.data["code"] for event in await stand.store.events(attempt.rollout) if event.kind == "error"]
    assert errors == ["server_error"]  # so that the agent is not blamed
    answer = await stand.client(other).chat.completions.create(model="any", messages=QUESTION)
    assert answer.choices[0].message.content == "elsewhere"  # the other worker has noticed nothing


async def test_a_worker_that_hangs_is_replaced(stand: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_process, "HUNG", 1.0)
    monkeypatch.setattr(worker_process, "PING", 0.05)
    attempt, _ = await make_two(stand)
    workers, place = find_workers(stand), find_place(stand, attempt)
    os.kill(workers._workers[place].process.pid, signal.SIGSTOP)
    stand.script("fine")
    client = stand.client(attempt, max_retries=5, timeout=stretch(60))
    answer = await client.chat.completions.create(model="any", messages=QUESTION)
    assert answer.choices[0].message.content == "fine"
    assert workers.replaced[place] >= 1


def refuse_to_start(given: None, parts: WorkerParts) -> Gateway:
    raise RuntimeError("no gateway can be made")


async def test_workers_that_never_live_are_given_up(
    stand: Stand, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keeper, "FAILURES", 1)
    log, path = tmp_path / "gateway.log", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    workers = GatewayWorkers(
        stand.gateway,
        stand.store,
        {"p": stand.engine},
        2,
        WorkerOrder(make=refuse_to_start),
        log=log,
        environment={"PYTHONPATH": path},
    )
    workers.start()
    with pytest.raises(EngineError, match=r"died 1 times in a row.*gateway\.log.*Fix: set gateway\.workers=1"):
        await workers.open()
    with pytest.raises(EngineError):
        await workers.watch()
    await workers.close()
    assert "no gateway can be made" in log.read_text()


async def test_what_a_replaced_worker_sends_is_refused(stand: Stand) -> None:
    worker = find_workers(stand)._workers[1]
    worker._replaced = True
    with pytest.raises(Fenced, match="epoch 1 of gateway worker 1 is over"):
        worker._add_encoded([EncodedTurn("r/1/0", "r", 1, [])])
    worker._replaced = False


async def test_an_attempt_that_is_over_is_fenced(stand: Stand) -> None:
    attempt, _ = await make_two(stand)
    stand.script("first", "late")
    client = stand.client(attempt)
    await client.chat.completions.create(model="any", messages=QUESTION)
    await stand.store.finish(attempt.rollout, 1)
    with pytest.raises(openai.ConflictError):
        await client.chat.completions.create(model="any", messages=QUESTION)
    assert len(await stand.store.turns(attempt.rollout)) == 1


async def test_a_client_that_leaves_is_noticed(stand: Stand) -> None:
    attempt, _ = await make_two(stand)
    stand.script("a long answer that nobody waits for until it ends")
    stand.engine._latency = 0.05
    stream = await stand.client(attempt).chat.completions.create(model="any", messages=QUESTION, stream=True)
    await anext(stream)
    await stream.close()
    await find_workers(stand).wait_until_idle(attempt.rollout, 1, limit=stretch(20))
    (turn,) = await stand.turns(attempt)
    assert turn.finish == "abandoned"
    assert not stand.engine._in_flight


async def test_a_request_sent_before_the_answer_to_another_is_not_mixed_up(stand: Stand) -> None:
    one, other = await make_two(stand)
    stand.script("fine")
    reader, writer = await asyncio.open_connection("127.0.0.1", int(stand.server.url.rpartition(":")[2]))
    body = json.dumps(BODY).encode()
    for attempt in (one, other):
        path = f"/r/{attempt.rollout}/1/agents/main/v1/chat/completions"
        head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {attempt.key}\r\n"
        writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
    said = await asyncio.wait_for(reader.read(), stretch(20))  # to the end of the connection
    assert (said.count(b"HTTP/1.1 200"), said.count(one.rollout.encode() + b"/1/0") > 0) == (1, True)
    assert not await stand.store.turns(other.rollout)
    writer.close()


@pytest.mark.parametrize(
    ("target", "own"),
    [
        ("/r/r1/1/agents/main/v1/chat/completions", True),
        ("http://gateway.example/r/r1/1/agents/main/v1/chat/completions?x=1", True),
        ("/r/r1/1/agents/main/openai/deployments/m/chat/completions", True),
        ("/r/r%31/1/agents/main/v1/models", True),
        ("/r/r1/1/events", False),
        ("/k/nobodys/v1/chat/completions", False),
        ("/health", False),
        ("/v1/rollouts", False),
        ("nonsense", False),
    ],
)
async def test_places(stand: Stand, target: str, own: bool) -> None:
    placement = Placement(stand.store, 2)
    head = f"POST {target} HTTP/1.1\r\n".encode()
    assert placement.find(head[:-2]) is None  # its line is not whole
    found = placement.find(head)
    place = found if isinstance(found, int) or found is None else await found
    assert place == (placement.of_rollout("r1") if own else OWNER)


@pytest.mark.parametrize("server_key", [b"", b"the-servers-own"])
async def test_a_key_in_the_address_finds_its_worker(stand: Stand, server_key: bytes) -> None:
    """Whatever other keys are sent with it, and however often."""
    one, other = await make_two(stand)
    find_workers(stand).set_server_key(server_key.decode())
    stand.script(*["fine"] * 8)
    client = Client(stand.server.url)
    for attempt, sent in ((one, other.key), (other, "the-servers-own"), (one, other.key), (other, "-")):
        status, answer = await ask(client, f"/k/{attempt.key}/v1/chat/completions", sent, trace_id=other.key)
        assert (status, answer["id"].partition("/")[0]) == (200, attempt.rollout)
    await client.close()
    assert stand.gateway.counts["turns"] == 0  # none of it was answered by the owner


async def test_empty_lines_before_a_request_change_nothing(stand: Stand) -> None:
    """Parsers skip them, and so must who finds the worker: a rollout has one."""
    attempt, _ = await make_two(stand)
    stand.script(*["fine"] * 3)
    body = json.dumps(BODY).encode()
    path = f"/r/{attempt.rollout}/1/agents/main/v1/chat/completions"
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {attempt.key}\r\n"
    request = f"{head}content-length: {len(body)}\r\n\r\n".encode() + body
    for before in (b"", b"\r\n", b"\r\n\r\n"):
        reader, writer = await asyncio.open_connection("127.0.0.1", int(stand.server.url.rpartition(":")[2]))
        writer.write(before + request)
        assert (await asyncio.wait_for(reader.readline(), stretch(20))).startswith(b"HTTP/1.1 200")
        writer.close()
    assert [turn.id for turn in await stand.turns(attempt)] == [f"{attempt.rollout}/1/{n}" for n in range(3)]
    assert stand.gateway.counts["turns"] == 0


async def test_numbers_of_any_size(stand: Stand) -> None:
    """What JSON holds, in tasks, events and tools."""
    attempt, _ = await make_two(stand)
    large = 2**70
    event = {"kind": "message", "data": {"x": large}}
    status, _ = await fetch(stand.events_url(attempt), event, key=attempt.key)
    (recorded,) = await stand.store.events(attempt.rollout)
    assert (status, recorded.data) == (200, {"x": large})
    stand.script("fine")
    number = {"type": "object", "properties": {"n": {"type": "integer", "maximum": large}}}
    tools: Any = [{"type": "function", "function": {"name": "f", "parameters": number}}]
    await stand.client(attempt).chat.completions.create(model="any", messages=QUESTION, tools=tools)
    (turn,) = await stand.turns(attempt)
    assert turn.requested["tools"][0]["function"]["parameters"]["properties"]["n"]["maximum"] == large


async def test_calls_that_a_hung_worker_took_along_are_not_the_agents_fault(
    stand: Stand, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_process, "HUNG", 1.0)
    monkeypatch.setattr(worker_process, "PING", 0.05)
    attempt, _ = await make_two(stand)
    worker = find_workers(stand)._workers[find_place(stand, attempt)]
    stand.script("an answer that comes slowly enough")
    stand.engine._latency = 0.1
    asking = asyncio.create_task(stand.client(attempt).chat.completions.create(model="any", messages=QUESTION))
    while not worker._at_work:  # noqa: ASYNC110 - the call is on its way
        await asyncio.sleep(0.01)
    os.kill(worker.process.pid, signal.SIGSTOP)
    with pytest.raises(openai.APIConnectionError):
        await asyncio.wait_for(asking, stretch(60))
    await asyncio.wait_for(find_workers(stand)._up.wait(), stretch(20))
    for _ in range(500):
        if events := await stand.store.events(attempt.rollout):
            break
        await asyncio.sleep(0.02)
    assert [event.data["code"] for event in events] == ["server_error"]
