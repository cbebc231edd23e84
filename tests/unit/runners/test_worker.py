"""What a worker makes of an agent, without any process around it."""

import asyncio
import json
import math
import os
import random
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from strop.errors import AgentError, BadReward, StropError
from strop.runners.llm import LLM
from strop.runners.wire import Job
from strop.runners.worker import load_agent, rewards_of, run
from strop.types import Reward, Task


def job(tmp_path: Path, **fields) -> Job:
    base = "http://127.0.0.1:9/r/g1.0/2"
    given = {
        "base_url": f"{base}/agents/main/v1",
        "api_key": "secret",
        "trace_id": "secret",
        "model": "main",
        "events_url": f"{base}/events",
        "rollout": "g1.0",
        "task": Task(id="t", data={"x": 3}),
    }
    return Job(llm=LLM(**(given | fields)), seed=5, task_file=str(tmp_path / "task.json"))


class Scalar:
    """As numpy's and torch's scalars do it."""

    def __float__(self) -> float:
        return 0.5


@pytest.mark.parametrize(
    ("value", "rewards"),
    [
        (None, []),
        (1, [("reward", 1.0)]),
        (0.25, [("reward", 0.25)]),
        (True, [("reward", 1.0)]),
        (Scalar(), [("reward", 0.5)]),
        ({"reward": 1, "format": False}, [("reward", 1.0), ("format", 0.0)]),
        ({}, []),
        (Reward(name="a", value=2), [("a", 2.0)]),
        ([Reward(name="a", value=2), Reward(name="b", value=3)], [("a", 2.0), ("b", 3.0)]),
    ],
)
def test_what_may_be_returned(value: object, rewards: list[tuple[str, float]]):
    assert [(r.name, r.value) for r in rewards_of(value)] == rewards


def test_a_rewards_target_is_kept():
    assert rewards_of(Reward(value=1, turn="g1.0/1/0")) == [Reward(value=1.0, turn="g1.0/1/0")]


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (math.nan, "reward 'reward' is nan: give a finite number"),
        (-math.inf, "reward 'reward' is -inf"),
        ("1.0", "returned str '1.0' as 'reward': return a number"),
        ({"a": 1, "b": math.nan}, "reward 'b' is nan"),
        ({"a": "x"}, "str 'x' as 'a'"),
        ([1.0, 2.0], "list of something else than Reward"),
        (object(), "returned object .* as 'reward'"),
        (Reward(name="r", value=math.inf), "reward 'r' is inf"),
    ],
)
def test_what_may_not_be_returned(value: object, says: str):
    with pytest.raises(BadReward, match=says):
        rewards_of(value)


def test_sync_and_async_agents(tmp_path: Path):
    async def later(task: Task, llm: LLM) -> float:
        await asyncio.sleep(0)
        return task.data["x"] / 2

    class Callable:
        async def __call__(self, task: Task, llm: LLM) -> float:
            return 4.0

    assert run(later, job(tmp_path)).rewards == [Reward(value=1.5)]
    assert run(lambda task, llm: task.data["x"], job(tmp_path)).rewards == [Reward(value=3.0)]
    assert run(Callable(), job(tmp_path)).rewards == [Reward(value=4.0)]


def test_errors_are_outcomes(tmp_path: Path):
    def fails(task: Task, llm: LLM) -> None:
        raise ValueError("the tool is out of order")

    def exits(task: Task, llm: LLM) -> None:
        raise SystemExit(3)

    outcome = run(fails, job(tmp_path))
    assert outcome.cause == "agent_error"
    assert outcome.detail is not None
    assert outcome.detail.endswith("ValueError: the tool is out of order")
    assert "in fails" in outcome.detail
    assert "strop/runners/worker.py" not in outcome.detail
    assert run(exits, job(tmp_path)).cause == "agent_error"
    assert run(lambda task, llm: math.nan, job(tmp_path)).cause == "bad_reward"


def test_a_long_traceback_keeps_its_end(tmp_path: Path):
    def fails(task: Task, llm: LLM) -> None:
        raise ValueError("x" * 10_000 + " the end")

    detail = run(fails, job(tmp_path)).detail
    assert detail is not None
    assert len(detail) < 5000
    assert detail.endswith("the end")


def test_the_environment_is_set_for_the_rollout_and_put_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("OPENAI_API_KEY", "mine")
    monkeypatch.delenv("STROP_TASK", raising=False)
    seen: dict[str, str] = {}

    def agent(task: Task, llm: LLM) -> None:
        seen.update(os.environ)
        seen["task"] = json.loads(Path(os.environ["STROP_TASK"]).read_text())
        raise ValueError

    run(agent, job(tmp_path))
    base = "http://127.0.0.1:9/r/g1.0/2"
    assert seen["OPENAI_BASE_URL"] == seen["AGL_OPENAI_BASE_URL"] == f"{base}/agents/main/v1"
    assert seen["ANTHROPIC_BASE_URL"] == f"{base}/agents/main"
    assert seen["OPENAI_API_KEY"] == seen["ANTHROPIC_API_KEY"] == seen["AGL_KEY"] == "secret"
    assert seen["STROP_EVENTS_URL"] == seen["AGL_EVENT_URL"] == f"{base}/events"
    assert seen["STROP_ROLLOUT"] == "g1.0"
    assert seen["task"] == {"id": "t", "split": "train", "data": {"x": 3}, "agent": None}
    assert os.environ["OPENAI_API_KEY"] == "mine"
    assert "STROP_TASK" not in os.environ


def test_an_agents_own_random_numbers_repeat(tmp_path: Path):
    first, second = (run(lambda task, llm: random.random(), job(tmp_path)).rewards for _ in range(2))
    assert first == second


def test_an_agent_must_be_callable():
    with pytest.raises(AgentError, match="is int, not a function"):
        load_agent("strop.demo:MAX_TURNS")


# -- llm ---------------------------------------------------------------------------------------------------------------


@pytest.fixture
def server():
    """Answers every request with what it heard."""
    heard: list[tuple[str, str, bytes]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            heard.append((self.path, self.headers["authorization"], body))
            message = {"role": "assistant", "content": "hi"}
            answer = {
                "id": "turn-1",
                "object": "chat.completion",
                "created": 0,
                "model": "main",
                "choices": [{"index": 0, "finish_reason": "stop", "message": message}],
            }
            status = 400 if b"refuse" in body else 200
            data = json.dumps(answer if status == 200 else {"error": "no such turn"}).encode()
            self.send_response(status)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as http:
        thread = threading.Thread(target=http.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{http.server_port}", heard
        http.shutdown()
        thread.join()


def test_clients_speak_to_their_attempt(tmp_path: Path, server):
    url, heard = server

    def ask(llm: LLM) -> str | None:
        answer = llm.client().chat.completions.create(model="main", messages=[{"role": "user", "content": "hello"}])
        return answer.choices[0].message.content

    for rollout in ("a", "b"):
        base = f"{url}/r/{rollout}/1/agents/main/v1"
        llm = job(tmp_path, base_url=base, api_key=f"key-{rollout}").llm
        assert ask(llm) == "hi"
        assert heard[-1][:2] == (f"/r/{rollout}/1/agents/main/v1/chat/completions", f"Bearer key-{rollout}")
        llm.client().close()  # an agent may do this, and must not spoil it for the next one

    async def ask_async() -> None:
        async with llm.async_client() as client:
            await client.chat.completions.create(model="main", messages=[])

    for _ in range(2):  # each in an event loop of its own
        asyncio.run(ask_async())
    assert heard[-1][:2] == ("/r/b/1/agents/main/v1/chat/completions", "Bearer key-b")


def test_rewards_and_events_are_posted(tmp_path: Path, server):
    url, heard = server
    llm = job(tmp_path, events_url=f"{url}/r/a/1/events").llm
    llm.reward("format", 0.5, turn="turn-1")
    path, key, body = heard[-1]
    assert (path, key) == ("/r/a/1/events", "Bearer secret")
    assert json.loads(body) == {
        "kind": "reward",
        "data": {"name": "format", "value": 0.5, "turn": "turn-1", "agent": None},
    }
    llm.event("message", {"text": "thinking"})
    assert json.loads(heard[-1][2]) == {"kind": "message", "data": {"text": "thinking"}}
    with pytest.raises(BadReward, match="finite"):
        llm.reward("format", math.nan)
    with pytest.raises(StropError, match=r"refused a message event \(400\): .*no such turn"):
        llm.event("message", {"text": "refuse"})
