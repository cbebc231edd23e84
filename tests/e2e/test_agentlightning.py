"""Agents of Agent Lightning train here: those of its own examples, as they are, or with one line changed."""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

import strop
from strop.compat import agentlightning as agl
from strop.models.names import SHIPPED
from tests import runs

THEIRS = Path(__file__).parents[3] / "shared" / "peers" / "agentlightning"
LOOP = {"steps": 3, "groups": 2, "group_size": 2, "eval_splits": []}
SMALL: dict[str, Any] = {"loop": LOOP, "runner": {"workers": 2}, "policy": {"train": {"max_tokens": 12}}, "quiet": True}
SUMS = [("a", "12 + 30", "42"), ("b", "64 - 17", "47"), ("c", "14 + 22", "36")]
TASKS = [{"id": id, "data": {"question": f"What is {sum}?", "answer": said}} for id, sum, said in SUMS]

pytestmark = pytest.mark.skipif(not THEIRS.is_dir(), reason=f"{THEIRS} is not here")


@pytest.fixture
def examples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to import `examples.gsm8k.gsm8k_agent` from, as in its repository."""
    (tmp_path / "examples").symlink_to(THEIRS / "v1")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    for name in [name for name in sys.modules if name.partition(".")[0] == "examples"]:
        monkeypatch.delitem(sys.modules, name)
    return tmp_path


def check(folder: Path, *, rollouts: int = 12) -> runs.Story:
    """Three steps on rollouts that all succeeded, each with a reward and turns."""
    told = runs.story(folder)
    assert len(told.rollouts) == rollouts
    assert {(one.status, one.detail) for one in told.rollouts} == {("succeeded", None)}
    assert all(one.reward() is not None and told.turns[one.id] for one in told.rollouts)
    return told


def test_gsm8k_of_1_0_asks_chat_completions(examples: Path) -> None:
    launch = "-m strop.compat.agentlightning.launch examples.gsm8k.gsm8k_agent.ChatAgent"
    agent = f"{sys.executable} {launch} QUESTION=input.question ANSWER=input.answer"
    summary = strop.train(agent, TASKS, model="strop/nano", folder=examples / "run", **SMALL)
    assert summary.steps == 3
    check(examples / "run")


def test_gsm8k_of_1_0_asks_completions(examples: Path) -> None:
    """Its prompts are token ids, and it reads its answers from the ids that were sampled."""
    agent = agl.launch(
        "examples.gsm8k.gsm8k_agent.CompletionAgent",
        QUESTION="input.question",
        ANSWER="input.answer",
        GSM8K_MODEL=f"={SHIPPED['strop/nano']}",
    )
    strop.train(agent, TASKS, model="strop/nano", folder=examples / "run", **SMALL)
    told = check(examples / "run")
    assert {turn.messages[0]["role"] for turns in told.turns.values() for turn in turns} == {"prompt"}


@pytest.mark.parametrize("kind", ["SearchR1Agent", "SearchR1CompletionAgent"])
def test_search_r1_of_1_0(examples: Path, kind: str) -> None:
    """The model in the box does not know its tags: it is told that its action is no action."""
    tasks = [{**task, "data": {**task["data"], "golden_answers": [task["data"]["answer"]]}} for task in TASKS]
    agent = agl.launch(
        f"examples.search_r1.agents.search_r1_agent.{kind}",
        QUESTION="input.question",
        GOLDEN_ANSWERS="input.golden_answers",
        SEARCH_R1_TOKENIZER_MODEL=f"={SHIPPED['strop/nano']}",
        SEARCH_R1_MAX_TOKENS="=12",
    )
    strop.train(agent, tasks, model="strop/nano", folder=examples / "run", **SMALL)
    check(examples / "run")


def change(source: Path, to: Path, before: str, after: str) -> Path:
    """A copy of an example's file, with one line of it changed."""
    text = source.read_text()
    assert text.count(before) == 1
    (to / source.name).write_text(text.replace(before, after))
    return to / source.name


class Judge(BaseHTTPRequestHandler):
    """A provider's model that is asked for a score."""

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        assert asked["response_format"]["type"] == "json_schema"
        score = len(asked["messages"][0]["content"]) % 5 / 4
        message = {"role": "assistant", "content": json.dumps({"reason": "it is long", "score": score})}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        body = {"id": "j", "object": "chat.completion", "created": 1, "model": asked["model"], "choices": [choice]}
        said = json.dumps(body).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(said)))
        self.end_headers()
        self.wfile.write(said)

    def log_message(self, format: str, *args: Any) -> None: ...


@pytest.fixture
def judge() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Judge)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/v1"
    server.shutdown()
    thread.join()
    server.server_close()


def test_apos_agent_of_0_3(tmp_path: Path, judge: str) -> None:
    """One line above its imports. The judge that it asks for by name is an outside model, and is not trained."""
    top = "import asyncio\n"
    file = change(
        THEIRS / "v0/apo/room_selector.py", tmp_path, top, f"import strop.compat.agentlightning.installed\n{top}"
    )
    rooms = [json.loads(line) for line in (THEIRS / "v0/apo/room_tasks.jsonl").read_text().splitlines()[:3]]
    text = "Find a room on {date} at {time} for {duration_min} minutes, {attendees} attendees. Needs: {needs}."
    strop.train(
        f"{file}:room_selector",
        [{"id": room["id"], "data": room} for room in rooms],
        model="strop/nano",
        folder=tmp_path / "run",
        prompts={"prompt_template": {"text": text}},
        gateway={"outside": {"judge": {"url": judge, "models": ["gpt-4.1-mini"]}}},
        **SMALL,
    )
    told = check(tmp_path / "run")
    asked, judged = next(iter(told.turns.values()))
    assert (asked.policy, judged.outside) == ("main", True)
    assert rooms[0]["task_input"]["date"] in asked.messages[1]["content"]
