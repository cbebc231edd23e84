"""Made-up requests to every model API, right and wrong ones, of a real server: each is answered, or refused with a 4xx
in that API's own shape. Nothing is a 5xx, nothing breaks off in mid-stream, nothing stays in flight."""

import asyncio
import http.client
import json
import logging
import threading
from collections.abc import Coroutine, Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemathesis.checks import positive_data_acceptance
from schemathesis.config import SchemathesisConfig

from strop.engines.scripted import Scripted
from strop.gateway.app import Gateway
from strop.gateway.route import PolicyRoute, Routes
from strop.gateway.template import Renderer
from strop.net.server import serve
from strop.store.sqlite import SqliteStore
from strop.types import Attempt, Sampling
from tests.integration.gateway.described import ANSWERS, Json, document
from tests.integration.gateway.stand import Stand

QUICK = {
    "deadline": None, "derandomize": True, "database": None, "suppress_health_check": list(HealthCheck)
}  # fmt: skip
CALL = '<tool_call>\n{"name": "look", "arguments": {"at": "sky"}}\n</tool_call>'
SCHEMA = {"type": "object", "properties": {"at": {"type": "string"}}, "required": ["at"]}
FUNCTION = {"name": "look", "description": "Look.", "parameters": SCHEMA}
DRAWN = {"temperature": 0.5, "top_p": 0.9, "model": "m"}

VALID: dict[str, Json] = {
    "chat/completions": {
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "hi"}], "name": "u"},
            {
                "role": "assistant",
                "content": None,
                "reasoning_content": "so",
                "tool_calls": [
                    {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"at": "sky"}'}}
                ],
            },
            {"role": "tool", "content": "blue", "tool_call_id": "c1"},
        ],
        "tools": [{"type": "function", "function": FUNCTION}],
        "tool_choice": {"type": "function", "function": {"name": "look"}},
        "stop": ["x"],
        "n": 2,
        "max_tokens": 4,
        "seed": 1,
        "logprobs": True,
        "logit_bias": {},
        "metadata": {"a": "b"},
        "response_format": {"type": "text"},
        "stream_options": {"include_usage": True},
        **DRAWN,
    },
    "completions": {
        "prompt": ["a", [5, 6]],
        "n": 2,
        "best_of": 2,
        "stop": "x",
        "logprobs": 1,
        "echo": False,
        "suffix": "",
        "seed": 1,
        "stream_options": {"include_usage": True},
        **DRAWN,
    },
    "responses": {
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
            {
                "type": "reasoning",
                "id": "rs_1",
                "summary": [{"type": "summary_text", "text": "so"}],
                "content": [{"type": "reasoning_text", "text": "so"}],
            },
            {"type": "function_call", "call_id": "c1", "name": "look", "arguments": '{"at": "sky"}'},
            {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "blue"}]},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "It is blue."}]},
        ],
        "instructions": "Be brief.",
        "tools": [{"type": "function", **FUNCTION}],
        "tool_choice": {"type": "function", "name": "look"},
        "include": ["message.output_text.logprobs"],
        "reasoning": {"effort": "low", "summary": None},
        "text": {"format": {"type": "text"}, "verbosity": "low"},
        "metadata": {"a": "b"},
        "max_output_tokens": 4,
        **DRAWN,
    },
    "messages": {
        "system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "hi"}]},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "so", "signature": "s"},
                    {"type": "tool_use", "id": "t1", "name": "look", "input": {"at": "sky"}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {
                        "type": "tool_result",
                        "tool_use_id": "t1",
                        "is_error": True,
                        "content": [{"type": "text", "text": "dark"}],
                    }
                ],
            },
        ],
        "tools": [{"name": "look", "description": "Look.", "input_schema": SCHEMA}],
        "tool_choice": {"type": "tool", "name": "look", "disable_parallel_tool_use": True},
        "thinking": {"type": "enabled", "budget_tokens": 1024},
        "context_management": {"edits": [{"type": "clear_thinking_20251015"}]},
        "output_config": {"effort": "low"},
        "stop_sequences": ["x"],
        "max_tokens": 4,
        "top_k": 5,
        **DRAWN,
    },
}
VALID["messages/count_tokens"] = {name: VALID["messages"][name] for name in ("system", "messages", "tools", "model")}
VALID["responses/input_tokens"] = {name: VALID["responses"][name] for name in ("input", "instructions", "tools")}

ODD: list[Any] = [
    None, True, 0, -1, 2**70, -0.5, 1e308, "", "x", "\x00", "é🙂", [], [[]], [None], {}, {"": {}}, {"type": "x"},
    ["x", 1],
]  # fmt: skip
"""Values to put in the place of others."""
RAW = [b'"\\ud800"', b'"\\udc00x"', b"NaN", b"-Infinity", b"1e999", b"[" * 2000 + b"]" * 2000, b'{"a":1,"a":2}', b"01"]
"""The same as JSON text, for what Python would not write."""


class Running:
    """A gateway in a thread of its own, with one attempt, and a connection to it."""

    def __init__(self, folder: Path, renderer: Renderer) -> None:
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        self.stand, self.attempt = self.run(self._open(folder, renderer))
        self.base = self.stand.url(self.attempt)
        self._place = urlsplit(self.base)
        self._connection = http.client.HTTPConnection(str(self._place.hostname), self._place.port, timeout=20)

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(60)

    async def _open(self, folder: Path, renderer: Renderer) -> tuple[Stand, Attempt]:
        store = await SqliteStore.open(folder / "store.sqlite")
        engine = Scripted(lambda asked: CALL if "Look." in asked.prompt else "It is 12.", renderer, context=1000)
        route = PolicyRoute(
            policy="p", model="tiny", engine=engine, renderer=renderer, sampling_for=lambda _: Sampling(max_tokens=5)
        )
        gateway = Gateway(store, Routes({"*": route}))
        stand = Stand(store, engine, gateway, await serve(gateway))
        return stand, await stand.attempt("r1")

    def close(self) -> None:
        self._connection.close()
        self.run(self.stand.server.close())
        self.run(self.stand.store.close())
        self._loop.call_soon_threadsafe(self._loop.stop)

    def post(self, path: str, body: bytes) -> tuple[int, str, bytes]:
        headers = {"authorization": f"Bearer {self.attempt.key}", "content-type": "application/json"}
        self._connection.request("POST", f"{self._place.path}/{path}", body, headers)
        answer = self._connection.getresponse()
        return answer.status, answer.headers.get("content-type", ""), answer.read()

    def events(self) -> int:
        return len(self.run(self.stand.store.events("r1")))

    def settled(self) -> bool:
        """Whether nothing stays in flight; an answer's last byte may be here a moment before its request is over."""
        self.run(self.stand.gateway.wait_until_idle("r1", 1, limit=5.0))
        return self.stand.gateway.sessions["r1", 1].in_flight == 0


@pytest.fixture(scope="module")
def running(renderer: Renderer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    logged = Logged()
    for name in ("strop", "uvicorn"):
        logging.getLogger(name).addHandler(logged)
    running = Running(tmp_path_factory.mktemp("fuzz"), renderer)
    yield running
    running.close()
    for name in ("strop", "uvicorn"):
        logging.getLogger(name).removeHandler(logged)
    assert logged.errors == [], "nothing may fail that is not told to the client"


class Logged(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.errors: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.errors.append(self.format(record))


def check(running: Running, path: str, body: bytes) -> int:
    """Send it. What comes back is right, or a refusal in the API's own shape that is recorded. Which, as a status."""
    refused = running.stand.gateway.counts["refused"]
    status, kind, answer = running.post(path, body)
    shown = f"{path} {body[:3000]!r} was answered with {status} {answer[:500]!r}"
    assert status == 200 or 400 <= status < 500, shown
    if kind.startswith("text/event-stream"):
        assert status == 200, shown
        assert not any(mark in answer for mark in (b"event: error", b'"type":"error"', b'data: {"error"')), shown
        return status
    said = json.loads(answer)
    if status == 200:
        assert set(ANSWERS[path]["required"]) <= set(said), shown
    else:
        assert right_error(path, said), shown
    assert running.stand.gateway.counts["refused"] - refused == (status != 200), shown
    return status


def right_error(path: str, said: Any) -> bool:
    """Whether a refusal has the shape of the API's own."""
    error = said["error"]
    if path.startswith("messages"):
        return said["type"] == "error" and {"type", "message"} <= set(error) and bool(error["message"])
    return set(said) == {"error"} and set(error) == {"message", "type", "param", "code"} and bool(error["message"])


def nodes(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The way to every value inside a value."""
    if at:
        yield at
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in inner:
        yield from nodes(item, (*at, key))


def changed(body: Json, at: tuple[Any, ...], how: str, value: Any = None) -> Json:
    body = deepcopy(body)
    place: Any = body
    for key in at[:-1]:
        place = place[key]
    if how == "replace":
        place[at[-1]] = value
    elif how == "delete":
        del place[at[-1]]
    elif isinstance(place, list):
        place.insert(at[-1], deepcopy(place[at[-1]]))
    else:
        place[f"{at[-1]}_"] = place[at[-1]]
    return body


@pytest.mark.parametrize("path", list(VALID))
def test_every_value_replaced_deleted_and_doubled(running: Running, path: str) -> None:
    valid = VALID[path]
    assert check(running, path, json.dumps(valid).encode()) == 200
    before, statuses = running.events(), list[int]()
    for number, at in enumerate(nodes(valid)):
        wrong = [changed(valid, at, "replace", value) for value in ODD]
        wrong += [changed(valid, at, how) for how in ("delete", "double")]
        statuses += [check(running, path, json.dumps(body).encode()) for body in wrong]
        raw = json.dumps(changed(valid, at, "replace", "@@")).encode()
        statuses.append(check(running, path, raw.replace(b'"@@"', RAW[number % len(RAW)])))
    assert running.events() - before == sum(status != 200 for status in statuses)
    assert 0.3 < sum(status != 200 for status in statuses) / len(statuses) < 1.0
    assert running.settled()
    assert check(running, path, json.dumps(valid).encode()) == 200


LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text()
JSON = st.recursive(LEAVES, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner))


@pytest.mark.parametrize("path", list(VALID))
@settings(max_examples=40, **QUICK)
@given(data=st.data())
def test_several_changes_at_once(running: Running, path: str, data: st.DataObject) -> None:
    body = VALID[path] | {"stream": data.draw(st.booleans())} if "/" not in path[4:] else VALID[path]
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.sampled_from(list(nodes(body))))
        how = data.draw(st.sampled_from(["replace", "delete", "double"]))
        body = changed(body, at, how, data.draw(JSON) if how == "replace" else None)
    check(running, path, json.dumps(body).encode())
    assert running.settled()


@pytest.mark.parametrize("path", list(VALID))
@settings(max_examples=40, **QUICK)
@given(data=st.data())
def test_bytes_cut_and_exchanged(running: Running, path: str, data: st.DataObject) -> None:
    body = bytearray(json.dumps(VALID[path], ensure_ascii=False).encode())
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(body) - 1))
        body[at : at + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=3))
    check(running, path, bytes(body[: data.draw(st.integers(0, len(body)))] if data.draw(st.booleans()) else body))


# -- as they are described ---------------------------------------------------------------------------------------------

api = schemathesis.openapi.from_dict(document(), config=SchemathesisConfig.from_dict({"seed": 1}))


@api.parametrize()
@settings(max_examples=20, **QUICK)
def test_every_address(running: Running, case: schemathesis.Case) -> None:
    anthropic, key = case.operation.path.startswith("/messages"), running.attempt.key
    headers = {"x-api-key": key} if anthropic else {"Authorization": f"Bearer {key}"}
    # What two fields may not be together is more than the description tells, so right requests may be refused.
    case.call_and_validate(base_url=running.base, headers=headers, excluded_checks=[positive_data_acceptance])
    assert running.settled()
