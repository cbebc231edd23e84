"""What a worker makes of an agent, without any process around it."""

import asyncio
import json
import math
import os
import random
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from strop.agent import llm as llm_module
from strop.agent.llm import LLM
from strop.errors import AgentError, BadReward, StropError
from strop.runners.base import Job
from strop.runners.rewards import load_reward_function
from strop.runners.task_file import write_task
from strop.runners.worker import OutputFile, load_agent, run
from strop.types import Attempt, Lease, Reward, Rollout, Sampling, Task


def job(tmp_path: Path, *, url: str = "http://127.0.0.1:9", rollout: str = "g1.0", key: str = "secret") -> Job:
    task = Task(id="t", data={"x": 3})
    lease = Lease(
        rollout=Rollout(id=rollout, group="g1", member=0, task=task, created=0.0),
        attempt=Attempt(rollout=rollout, number=2, runner="r", key=key, started=0.0, lease_until=30.0),
    )
    llm = LLM.at(f"{url}/", lease, model="main", sampling=Sampling(temperature=0.5))
    return Job(llm=llm, seed=5, task_file=str(tmp_path / "task.json"))


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
    assert "strop/runners/" not in outcome.detail
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
    assert seen["OPENAI_BASE_URL"] == f"{base}/agents/main/v1"
    assert seen["AGL_OPENAI_BASE_URL"] == "http://127.0.0.1:9/proxy/rollout/g1.0/attempt/1/mode/train/openai/v1"
    assert seen["ANTHROPIC_BASE_URL"] == f"{base}/agents/main"
    assert seen["OPENAI_API_KEY"] == seen["ANTHROPIC_API_KEY"] == seen["AGL_KEY"] == "secret"
    assert seen["STROP_EVENTS_URL"] == seen["AGL_EVENT_URL"] == f"{base}/events"
    assert (seen["STROP_ROLLOUT"], seen["STROP_MODEL"]) == ("g1.0", "main")
    assert seen["task"] == {"id": "t", "split": "train", "data": {"x": 3}, "agent": None}
    assert os.environ["OPENAI_API_KEY"] == "mine"
    assert "STROP_TASK" not in os.environ


def test_an_agents_own_random_numbers_repeat(tmp_path: Path):
    first, second = (run(lambda task, llm: random.random(), job(tmp_path)).rewards for _ in range(2))
    assert first == second


def test_an_output_file_that_somebody_took_away_is_made_anew(tmp_path: Path):
    file = tmp_path / "1.out"
    output = OutputFile(str(file))
    with output.collect():
        pass
    assert output.keep_if_unused()
    file.unlink()
    with output.collect():
        os.write(1, b"said")
    assert not output.keep_if_unused()
    assert file.read_text() == "said"


@pytest.mark.parametrize("spoil", ["replace", "link", "move"])
def test_an_output_file_that_an_agent_meddled_with_is_not_used_again(tmp_path: Path, spoil: str):
    file = tmp_path / "1.out"
    output = OutputFile(str(file))
    with output.collect():
        if spoil == "link":
            os.link(file, tmp_path / "own")
        else:
            file.rename(tmp_path / "own")
        if spoil == "replace":
            file.write_bytes(b"")
    assert not output.keep_if_unused()
    with output.collect():
        os.write(1, b"said")
    assert not output.keep_if_unused()
    assert file.read_text() == "said"
    assert (tmp_path / "own").read_bytes() == b""


@pytest.mark.parametrize("spoil", ["nothing", "unlink", "link", "symlink", "mkdir", "mkfifo"])
def test_a_task_is_written_over_the_one_before_unless_an_agent_meddled_with_it(tmp_path: Path, spoil: str):
    file, own = tmp_path / "task.json", tmp_path / "own"
    first, second = job(tmp_path, rollout="g1.0"), job(tmp_path, rollout="g1.1")
    first.llm.task.data["text"] = "x" * 1000
    second.llm.task.data["n"] = 900
    assert write_task(first) == str(file)
    own.write_text("precious")
    if spoil == "link":
        own.unlink()
        os.link(file, own)
    elif spoil != "nothing":
        file.unlink()
    if spoil == "symlink":
        file.symlink_to(own)
    elif spoil in ("mkdir", "mkfifo"):
        getattr(os, spoil)(file)
    before = own.read_bytes()
    path = write_task(second)
    assert (path == str(file)) == (spoil in ("nothing", "unlink"))
    assert json.loads(Path(path).read_bytes())["data"]["n"] == 900
    assert own.read_bytes() == before


def test_an_agent_must_be_callable():
    with pytest.raises(AgentError, match="is int, not a function"):
        load_agent("strop.demo:MAX_TURNS")


def test_the_reward_function_sees_what_the_agent_returned(tmp_path: Path):
    (tmp_path / "judges.py").write_text("async def judge(task, answer, llm):\n    return len(answer) + task.data['x']")
    judge = load_reward_function(f"{tmp_path}/judges.py:judge")
    assert run(lambda task, llm: "four", job(tmp_path), judge).rewards == [Reward(value=7.0)]
    assert run(lambda task, llm: None, job(tmp_path), judge).cause == "agent_error"


# -- llm ---------------------------------------------------------------------------------------------------------------


@pytest.fixture
def server():
    """Answers every request, writes down what it heard, and first fails as it is told to."""
    heard: list[tuple[str, str, bytes]] = []
    failing: list[int] = []

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
            status = failing.pop() if failing else 400 if b"refuse" in body else 200
            if status == 0:
                return  # hangs up without an answer
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
        yield f"http://127.0.0.1:{http.server_port}", heard, failing
        http.shutdown()
        thread.join()


def test_clients_speak_to_their_attempt(tmp_path: Path, server):
    url, heard, _ = server

    def ask(llm: LLM) -> str | None:
        answer = llm.client().chat.completions.create(model="main", messages=[{"role": "user", "content": "hello"}])
        return answer.choices[0].message.content

    for rollout in ("a", "b"):
        llm = job(tmp_path, url=url, rollout=rollout, key=f"key-{rollout}").llm
        assert ask(llm) == "hi"
        assert heard[-1][:2] == (f"/r/{rollout}/2/agents/main/v1/chat/completions", f"Bearer key-{rollout}")
        llm.client().close()  # an agent may do this, and must not spoil it for the next one

    async def ask_async() -> None:
        async with llm.async_client() as client:
            await client.chat.completions.create(model="main", messages=[])

    for _ in range(2):  # each in an event loop of its own
        asyncio.run(ask_async())
    assert heard[-1][:2] == ("/r/b/2/agents/main/v1/chat/completions", "Bearer key-b")


def test_addresses_of_an_attempt(tmp_path: Path):
    llm = job(tmp_path).llm
    assert llm.base_url == "http://127.0.0.1:9/r/g1.0/2/agents/main/v1"
    assert llm.events_url == "http://127.0.0.1:9/r/g1.0/2/events"
    assert (llm.api_key, llm.trace_id, llm.rollout, llm.model) == ("secret", "secret", "g1.0", "main")
    assert llm.sampling.temperature == 0.5


def test_rewards_and_events_are_posted(tmp_path: Path, server):
    url, heard, _ = server
    llm = job(tmp_path, url=url).llm
    llm.reward("format", 0.5, turn="turn-1")
    path, key, body = heard[-1]
    assert (path, key) == ("/r/g1.0/2/events", "Bearer secret")
    said = json.loads(body)
    assert said.pop("id")
    assert said == {"kind": "reward", "data": {"name": "format", "value": 0.5, "turn": "turn-1", "agent": None}}
    llm.event("message", {"text": "thinking"})
    assert json.loads(heard[-1][2])["data"] == {"text": "thinking"}
    assert json.loads(heard[-1][2])["id"] != json.loads(heard[-2][2])["id"]
    with pytest.raises(BadReward, match="finite"):
        llm.reward("format", math.nan)
    with pytest.raises(BadReward, match="is too large for a float"):
        llm.reward("format", 10**400)
    with pytest.raises(StropError, match=r"refused a message event \(400\): .*no such turn"):
        llm.event("message", {"text": "refuse"})


def test_an_event_is_sent_again_under_the_same_id_until_it_is_taken(tmp_path: Path, server):
    url, heard, failing = server
    failing += [0, 503, 500]
    job(tmp_path, url=url).llm.event("message", {"text": "hello"})
    assert failing == []
    assert len(heard) == 4
    assert len({body for _, _, body in heard}) == 1


def test_an_event_waits_for_a_gateway_that_is_started_again(tmp_path: Path, server):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    heard: list[bytes] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            heard.append(self.rfile.read(int(self.headers["content-length"])))
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    def later() -> None:
        time.sleep(0.5)
        with HTTPServer(("127.0.0.1", port), Handler) as http:
            http.handle_request()

    thread = threading.Thread(target=later)
    thread.start()
    job(tmp_path, url=f"http://127.0.0.1:{port}").llm.event("message", {"text": "hello"})
    thread.join()
    assert len(heard) == 1


def test_patience_with_a_gateway_has_an_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(llm_module, "EVENT_SECONDS", 0.3)
    with pytest.raises(StropError, match=r"took no message event for 0.3 s .*refused.*\. Fix: see whether it is up"):
        job(tmp_path).llm.event("message", {"text": "hello"})
