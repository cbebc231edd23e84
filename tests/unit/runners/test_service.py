"""Agents that are HTTP services: a real server that says what a test wants to hear."""

import asyncio
import email.utils
import json
import secrets
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from strop.agent.llm import LLM
from strop.errors import AgentError
from strop.net.server import HttpServer, serve
from strop.runners.base import Job, Outcome
from strop.runners.service import ServiceAgent
from strop.types import EventKind, Reward, Task

Answers = Callable[[Request], Awaitable[Response]]


def job(data: Any = None) -> Job:
    base = "http://127.0.0.1:9/r/g1.0/2"
    llm = LLM(
        base_url=f"{base}/agents/main/v1",
        api_key="secret",
        trace_id="secret",
        model="main",
        events_url=f"{base}/events",
        rollout="g1.0",
        task=Task(id="t", data=data),
    )
    return Job(llm=llm, seed=5, task_file="unused")


async def say(kind: EventKind, data: dict[str, Any]) -> None:
    raise AssertionError("a service has nothing to say here")


class Stand:
    """A service that answers with `answers`, the last of them again and again."""

    def __init__(self) -> None:
        self.answers: list[Answers | Response] = []
        self.seen: list[tuple[dict[str, str], Any]] = []
        self.agents: list[ServiceAgent] = []
        self.server: HttpServer

    async def open(self) -> None:
        self.server = await serve(Starlette(routes=[Route("/agent", self._answer, methods=["POST"])]))

    async def _answer(self, request: Request) -> Response:
        headers = dict(request.headers) | {"query": request.url.query}
        self.seen.append((headers, await request.json()))
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        return answer if isinstance(answer, Response) else await answer(request)

    async def agent(self, path: str = "/agent", **settings: Any) -> ServiceAgent:
        agent = ServiceAgent(self.server.url + path, **({"wait": 0.01} | settings))
        await agent.start()
        self.agents.append(agent)
        return agent

    async def run(self, *answers: Answers | Response, data: Any = None, **settings: Any) -> Outcome:
        self.answers = list(answers)
        return await (await self.agent(**settings)).run(job(data), say)

    async def close(self) -> None:
        for agent in self.agents:
            await agent.close()
        await self.server.close()


@pytest.fixture
async def stand() -> AsyncIterator[Stand]:
    stand = Stand()
    await stand.open()
    yield stand
    await stand.close()


async def test_the_service_gets_the_task_and_the_addresses(stand: Stand) -> None:
    outcome = await stand.run(JSONResponse(0.5), data={"question": "wie spät?"}, path="/agent?fast=1")
    assert outcome == Outcome(rewards=[Reward(value=0.5)])
    ((headers, body),) = stand.seen
    llm = job().llm
    assert body == {
        "task": {"id": "t", "split": "train", "data": {"question": "wie spät?"}, "agent": None},
        "rollout": "g1.0",
        "model": "main",
        "base_url": llm.base_url,
        "api_key": "secret",
        "trace_id": "secret",
        "events_url": llm.events_url,
    }
    assert (headers["trace_id"], headers["x-strop-rollout"], headers["query"]) == ("secret", "g1.0", "fast=1")
    assert headers["content-type"] == "application/json"


@pytest.mark.parametrize(
    ("body", "rewards"),
    [
        ("1", [Reward(value=1.0)]),
        ("true", [Reward(value=1.0)]),
        ('{"reward": 1, "format": 0.5}', [Reward(value=1.0), Reward(name="format", value=0.5)]),
        ('[{"name": "a", "value": 1, "turn": "g1.0/2/0"}]', [Reward(name="a", value=1.0, turn="g1.0/2/0")]),
        ("null", []),
        ("", []),
        ("\n", []),
    ],
)
async def test_the_answer_is_the_reward(stand: Stand, body: str, rewards: list[Reward]) -> None:
    assert await stand.run(Response(body, status_code=201)) == Outcome(rewards=rewards)


async def test_no_content_is_no_reward(stand: Stand) -> None:
    assert await stand.run(Response(status_code=204)) == Outcome()


@pytest.mark.parametrize("body", ["NaN", '"good"', '{"text": "hello"}', "hello", "[" * 10_000, b"\xff\x00"])
async def test_an_answer_that_is_no_reward_is_refused(stand: Stand, body: str | bytes) -> None:
    outcome = await stand.run(Response(body))
    assert outcome.cause == "bad_reward"
    assert outcome.detail is not None
    assert len(outcome.detail) < 1000
    assert "\0" not in outcome.detail


async def test_a_reward_function_gets_the_answer_whatever_it_is(stand: Stand, tmp_path: Path) -> None:
    path = tmp_path / "judge_of_test_service.py"
    path.write_text("def judge(task, answer):\n    return answer == task.data\n")
    for body, answer in (('{"text": "hello"}', {"text": "hello"}), ("plain text", "plain text"), ("", None)):
        outcome = await stand.run(Response(body), data=answer, reward=f"{path}:judge")
        assert outcome == Outcome(rewards=[Reward(value=1.0)]), body


@pytest.mark.parametrize("status", [400, 401, 404, 422, 500, 501])
async def test_an_error_is_the_agents_and_final(stand: Stand, status: int) -> None:
    outcome = await stand.run(Response("it went wrong: " + "x" * 10_000, status_code=status), JSONResponse(1))
    assert outcome.cause == "agent_error"
    assert outcome.detail is not None
    assert outcome.detail.startswith(f"{stand.server.url}/agent answered {status}: it went wrong: xxx")
    assert len(outcome.detail) < 600
    assert len(stand.seen) == 1


async def test_a_redirect_is_not_followed(stand: Stand) -> None:
    outcome = await stand.run(Response(status_code=307, headers={"location": "http://elsewhere/agent"}))
    assert outcome.cause == "agent_error"
    assert outcome.detail is not None
    assert "http://elsewhere/agent: write that address" in outcome.detail


@pytest.mark.parametrize("status", [429, 503])
async def test_a_busy_service_is_asked_again(stand: Stand, status: int) -> None:
    busy = Response("busy", status_code=status)
    assert await stand.run(busy, busy, JSONResponse(1)) == Outcome(rewards=[Reward(value=1.0)])
    assert len(stand.seen) == 3


@pytest.mark.parametrize("status", [502, 504])
async def test_what_a_proxy_lost_is_not_sent_again_with_the_same_key(stand: Stand, status: int) -> None:
    """The service may be at work on it: a second execution would mix with the first one in one attempt."""
    outcome = await stand.run(Response("bad gateway", status_code=status), JSONResponse(1))
    detail = f"{stand.server.url}/agent answered {status}: bad gateway"
    assert outcome == Outcome(cause="lost_runner", detail=detail, clean=False)
    assert len(stand.seen) == 1


async def test_a_service_that_stays_busy_is_given_up(stand: Stand) -> None:
    outcome = await stand.run(Response("come later", status_code=503))
    assert (outcome.cause, outcome.clean) == ("lost_runner", True)
    assert outcome.detail is not None
    assert f"{stand.server.url}/agent answered 503: come later" in outcome.detail
    assert len(stand.seen) == 5


@pytest.mark.parametrize("as_date", [False, True])
async def test_retry_after_is_honoured(stand: Stand, as_date: bool) -> None:
    after = email.utils.formatdate(time.time() + 2, usegmt=True) if as_date else "1"
    began = time.monotonic()
    outcome = await stand.run(Response(status_code=429, headers={"retry-after": after}), JSONResponse(1))
    assert outcome.rewards == [Reward(value=1.0)]
    assert time.monotonic() - began > 0.9


async def test_a_service_that_is_not_up_yet(stand: Stand) -> None:
    """It need not be there at the start, and comes back after a while."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        agent = ServiceAgent(f"http://127.0.0.1:{port}/agent", wait=0.01)
        await agent.start()
        outcome = await agent.run(job(), say)
        await agent.close()
    assert (outcome.cause, outcome.clean) == ("lost_runner", True)
    assert outcome.detail is not None
    assert f"the service http://127.0.0.1:{port}/agent took the task in none of 5 tries" in outcome.detail
    assert "Connection refused" in outcome.detail

    stand.answers = [JSONResponse(1)]
    late = ServiceAgent(f"http://127.0.0.1:{port}/agent", wait=0.2)
    await late.start()
    running = asyncio.create_task(late.run(job(), say))
    await asyncio.sleep(0.1)
    server = await serve(Starlette(routes=[Route("/agent", stand._answer, methods=["POST"])]), port=port)
    assert await running == Outcome(rewards=[Reward(value=1.0)])
    await late.close()
    await server.close()


async def test_a_service_that_hangs_up_before_it_answers_gets_no_second_task_with_the_same_key() -> None:
    """Nor on a connection that was kept from an earlier task."""
    seen = 0

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal seen
        for answers in (True, False):
            length = int((await reader.readuntil(b"\r\n\r\n")).split(b"content-length: ")[1].split(b"\r\n")[0])
            await reader.readexactly(length)
            seen += 1
            if answers:
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\n\r\n1")
        writer.close()
        await writer.wait_closed()

    server = await asyncio.start_server(talk, "127.0.0.1", 0)
    agent = ServiceAgent(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", wait=0.01)
    await agent.start()
    assert await agent.run(job(), say) == Outcome(rewards=[Reward(value=1.0)])
    outcome = await agent.run(job(), say)
    assert (outcome.cause, outcome.clean) == ("lost_runner", False)
    assert outcome.detail is not None
    assert "closed the connection before it answered" in outcome.detail
    assert seen == 2
    await agent.close()
    server.close()
    await server.wait_closed()


async def test_a_service_that_dies_in_the_middle_of_its_answer_is_not_tried_again(stand: Stand) -> None:
    async def dies(request: Request) -> Response:
        async def parts() -> AsyncIterator[bytes]:
            yield b"[" * 100
            raise OSError("the service dies")

        return StreamingResponse(parts())

    outcome = await stand.run(dies)
    assert (outcome.cause, outcome.clean) == ("lost_runner", False)
    assert outcome.detail is not None
    assert "in the middle of its answer" in outcome.detail
    assert len(stand.seen) == 1


async def until_left(request: Request) -> Response:
    while (await request.receive())["type"] != "http.disconnect":
        pass
    return Response()


async def test_a_service_that_takes_too_long(stand: Stand) -> None:
    outcome = await stand.run(until_left, timeout=0.2)
    assert (outcome.cause, outcome.clean) == ("timeout", False)
    assert outcome.detail is not None
    assert "within 0.2 s" in outcome.detail


async def test_a_cancelled_run_hangs_up(stand: Stand) -> None:
    left = asyncio.Event()

    async def waits(request: Request) -> Response:
        answer = await until_left(request)
        left.set()
        return answer

    stand.answers = [waits]
    running = asyncio.create_task((await stand.agent()).run(job(), say))
    while not stand.seen:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    await asyncio.wait_for(left.wait(), 10)


async def test_many_at_once(stand: Stand) -> None:
    async def echo(request: Request) -> Response:
        await asyncio.sleep(0.02)
        return JSONResponse({"n": json.loads(await request.body())["task"]["data"]})

    stand.answers = [echo]
    agent = await stand.agent()
    outcomes = await asyncio.gather(*(agent.run(job(number), say) for number in range(200)))
    assert [outcome.rewards[0].value for outcome in outcomes] == list(range(200))


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("ftp://host/agent", "http://HOST:PORT"),
        ("http://", "http://HOST:PORT"),
        ("http://host:port/", "[Pp]ort"),
        ("http://me:secret@host/", "leave out the user"),
        ("http://host/a b", "percent-encode"),
        ("http://host/#part", "leave out everything"),
    ],
)
def test_an_address_that_cannot_be_is_refused_with_the_way_out(url: str, says: str) -> None:
    with pytest.raises(AgentError, match=says):
        ServiceAgent(url)


async def test_a_reward_function_that_cannot_be_had_is_found_at_the_start() -> None:
    with pytest.raises(AgentError, match=r"^reward: "):
        await ServiceAgent("http://127.0.0.1:9/", reward=f"no_{secrets.token_hex(4)}:judge").start()
