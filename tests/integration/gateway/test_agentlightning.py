"""What clients and agents of Agent Lightning 1.0 call, at a store that is served beside a gateway."""

import asyncio
import inspect
import re
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import httpx
import openai
import pytest

from strop.agent.llm import LLM
from strop.engines.scripted import Scripted
from strop.gateway.app import Gateway
from strop.gateway.template import Renderer
from strop.run.serve import StoreServer, serve_store
from strop.store.sqlite import SqliteStore
from strop.types import Rollout, Task
from tests.integration.gateway.stand import fetch, make_routes, open_stand

KEY = "run-key"
THEIRS = Path(__file__).parents[4] / "shared" / "peers" / "agentlightning" / "v1" / "tests" / "server"
MESSAGES: Any = [{"role": "user", "content": "hi"}]


class Served:
    def __init__(self, store: SqliteStore, server: StoreServer) -> None:
        self.store, self.server, self.clients = store, server, list[httpx.AsyncClient]()

    async def ask(self, method: str, path: str, body: Any = None, *, key: str = KEY, **params: Any) -> httpx.Response:
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        async with httpx.AsyncClient(base_url=self.server.url, headers=headers) as client:
            return await client.request(method, path, json=body, params=params)

    async def queue(self, **fields: Any) -> str:
        answer = await self.ask("POST", "/api/rollouts", [{"input": {"question": "1 + 1"}, **fields}])
        assert answer.status_code == 201, answer.text
        return answer.json()[0]["rollout_id"]

    async def leased(self, id: str = "g1.0") -> LLM:
        """What the agent of a rollout is given that a runner of ours has taken."""
        await self.store.enqueue([Rollout(id=id, group=id, member=0, task=Task(id="t"), created=1.0)])
        (lease,) = await self.store.lease("w", seconds=600, rollout=id)
        return LLM.at(self.server.url, lease, model="m")


@pytest.fixture
def engine(renderer: Renderer) -> Scripted:
    return Scripted([], renderer, chunk=1, context=1000)


@pytest.fixture
async def served(engine: Scripted, renderer: Renderer, tmp_path: Path) -> AsyncIterator[Served]:
    store = await SqliteStore.open(tmp_path / "served.sqlite")
    server = await serve_store(store, key=KEY, gateway=Gateway(store, make_routes(engine, renderer)))
    yield Served(store, server)
    await server.close()
    await store.close()


# -- what an agent does, with its attempt's key ------------------------------------------------------------------------


async def test_an_agent_with_what_a_runner_gives_it(served: Served, engine: Scripted) -> None:
    """The addresses are those that its agents read from AGL_OPENAI_BASE_URL and AGL_EVENT_URL."""
    engine._script = ("two", "three")
    given = (await served.leased()).environment("")
    base, key = given["AGL_OPENAI_BASE_URL"], given["AGL_KEY"]
    assert base.endswith("/proxy/rollout/g1.0/attempt/0/mode/train/openai/v1")
    async with openai.AsyncOpenAI(base_url=base, api_key=key) as client:
        chat: Any = await client.chat.completions.create(model="auto", messages=MESSAGES)
        raw: Any = await client.completions.create(model="auto", prompt=chat.prompt_token_ids)
    first, second = await served.store.turns("g1.0")
    assert (chat.choices[0].token_ids, raw.choices[0].token_ids) == (first.response_ids, second.response_ids)
    assert second.prompt_ids == first.prompt_ids
    event = {"event_type": "reward", "data": {"value": 0.5, "source": "agent", "reason": "em_match"}}
    theirs = f"{served.server.url}/api/rollouts/g1.0/attempt/0/events"
    for url in (given["AGL_EVENT_URL"], theirs):
        assert (await served.ask("POST", url, event, key=key)).status_code == 200
    rollout = await served.store.finish("g1.0", 1)
    assert [(reward.name, reward.value) for reward in rollout.rewards] == [("reward", 0.5)]


async def test_an_agent_at_gateways_in_several_processes(
    model: Path, engine: Scripted, renderer: Renderer, tmp_path: Path
) -> None:
    """Without a store beside it: an agent finds its events' address wherever it finds its model."""
    engine._script = ("two",)
    store = await SqliteStore.open(tmp_path / "store.sqlite")
    async with open_stand(model, store, engine, renderer, num_workers=2) as stand:
        attempt = await stand.attempt("r1")
        base = f"{stand.server.url}/proxy/rollout/r1/attempt/0/mode/train/openai/v1"
        async with openai.AsyncOpenAI(base_url=base, api_key=attempt.key) as client:
            chat: Any = await client.chat.completions.create(model="auto", messages=MESSAGES)
        (turn,) = await stand.turns(attempt)
        assert chat.choices[0].token_ids == turn.response_ids
        url, event = f"{stand.server.url}/api/rollouts/r1/attempt/0/events", {"event_type": "x", "data": {"n": 1}}
        assert (await fetch(url, event, key=attempt.key))[0] == 200
        assert (await fetch(url, event, key="wrong"))[0] == 401
        assert [recorded.data for recorded in await store.events("r1")] == [{"event_type": "x", "data": {"n": 1}}]
    await store.close()


async def test_a_stream_has_no_token_ids(served: Served, engine: Scripted) -> None:
    engine._script = ("two",)
    given = (await served.leased()).environment("")
    async with openai.AsyncOpenAI(base_url=given["AGL_OPENAI_BASE_URL"], api_key=given["AGL_KEY"]) as client:
        stream = await client.chat.completions.create(model="auto", messages=MESSAGES, stream=True)
        said = [chunk.choices[0].delta.content or "" async for chunk in stream]
    assert "".join(said) == "two"


async def test_an_attempts_key_opens_that_attempt_only(served: Served) -> None:
    mine, other = await served.leased("g1.0"), await served.leased("g2.0")
    event = {"event_type": "reward", "data": {"value": 1.0}}
    chat = {"model": "auto", "messages": MESSAGES}
    for key in (other.api_key, "wrong", ""):
        posts = {"/api/rollouts/g1.0/attempt/0/events": event}
        posts["/proxy/rollout/g1.0/attempt/0/mode/train/openai/v1/chat/completions"] = chat
        for path, body in posts.items():
            assert (await served.ask("POST", path, body, key=key)).status_code == 401, path
    for method, path in [
        ("GET", "/api/rollouts/g1.0"),
        ("GET", "/api/rollouts/g1.0/events"),
        ("GET", "/api/rollouts"),
        ("GET", "/api/rollouts/terminal"),
        ("PATCH", "/api/rollouts/g1.0"),
        ("POST", "/api/rollouts"),
        ("DELETE", "/api/rollouts/g1.0"),
        ("POST", "/api/models"),
    ]:
        for key, status in ((mine.api_key, 403), ("wrong", 401), ("", 401)):
            await served.ask("POST", "/api/rollouts/g1.0/attempt/0/events", event, key=mine.api_key)
            assert (await served.ask(method, path, key=key)).status_code == status, (method, path)
    assert await served.store.turns("g1.0") == []


async def test_an_attempt_that_is_over(served: Served) -> None:
    llm = await served.leased()
    await served.store.finish("g1.0", 1)
    event = {"event_type": "reward", "data": {"value": 1.0}}
    for key in (llm.api_key, KEY):
        assert (await served.ask("POST", "/api/rollouts/g1.0/attempt/0/events", event, key=key)).status_code == 409
        chat = "/proxy/rollout/g1.0/attempt/0/mode/train/openai/v1/chat/completions"
        assert (await served.ask("POST", chat, {"messages": MESSAGES}, key=key)).status_code == 409


@pytest.mark.parametrize(
    "event",
    [
        {"event_type": "reward", "data": {}},
        {"event_type": "reward", "data": {"value": "much"}},
        {"event_type": "reward", "data": {"value": 1e300}},
        {"event_type": 3},
        {"event_type": "x", "data": []},
        {"kind": "reward"},
        [],
    ],
)
async def test_events_that_do_not_fit(served: Served, event: Any) -> None:
    llm = await served.leased()
    for path in ("/api/rollouts/g1.0/attempt/0/events", "/r/g1.0/1/events"):
        if event == [] and path.startswith("/r/"):
            continue
        answer = await served.ask("POST", path, event, key=llm.api_key)
        assert answer.status_code == 400, answer.text
        assert ": give a number" in (said := answer.json()["error"]["message"]) or "Fix: " in said
    assert await served.store.events("g1.0") == []


# -- what a controller does, with the run's key ------------------------------------------------------------------------


async def test_a_controller_runs_a_rollout(served: Served, engine: Scripted) -> None:
    engine._script = ("two",)
    id = await served.queue(is_train=False, config={"timeout_seconds": 60}, metadata={"batch_idx": 3})
    (listed,) = (await served.ask("GET", "/api/rollouts", state_in="queuing", limit=50)).json()
    assert (listed["input"], listed["is_train"], listed["metadata"]["batch_idx"]) == ({"question": "1 + 1"}, False, 3)
    assert listed["config"]["timeout_seconds"] == 60
    status = {"state": "running", "last_attempt_id": "0", "k8s_job_name": "job-1"}
    patched = await served.ask("PATCH", f"/api/rollouts/{id}", {"status": status})
    assert (patched.json()["status"]["state"], patched.json()["status"]["k8s_job_name"]) == ("running", "job-1")
    chat = f"/proxy/rollout/{id}/attempt/0/mode/val/openai/v1/chat/completions"
    assert (await served.ask("POST", chat, {"messages": MESSAGES})).json()["choices"][0]["message"]["content"] == "two"
    event = {"event_type": "note", "data": {"text": "hm"}}
    assert (await served.ask("POST", f"/api/rollouts/{id}/attempt/0/events", event)).json()["event_type"] == "note"
    ended = await served.ask("PATCH", f"/api/rollouts/{id}", {"status": {"state": "succeeded"}})
    assert ended.json()["status"]["state"] == "succeeded"
    called, noted = (await served.ask("GET", f"/api/rollouts/{id}/events")).json()
    (turn,) = await served.store.turns(id)
    assert called["data"]["response"]["choices"][0]["token_ids"] == turn.response_ids
    assert called["data"]["request"]["messages"] == MESSAGES
    assert (noted["event_type"], noted["attempt_id"], noted["data"]) == ("note", "0", {"text": "hm"})
    (triplet,) = (
        await served.ask("GET", f"/api/rollouts/{id}/events", event_type="model_request", format="triplet")
    ).json()
    assert triplet["data"]["response_log_probs"] == turn.logprobs
    assert (await served.store.get(id)).mode == "eval"


async def test_a_call_that_comes_before_its_rollout_is_taken(served: Served, engine: Scripted) -> None:
    """A controller starts an agent first and says so afterwards."""
    engine._script = ("two",)
    id = await served.queue()
    chat = f"/proxy/rollout/{id}/attempt/0/mode/train/openai/v1/chat/completions"
    assert (await served.ask("POST", chat, {"messages": MESSAGES})).status_code == 200
    assert (await served.ask("PATCH", f"/api/rollouts/{id}", {"status": {"state": "running"}})).status_code == 200
    failed = {"status": {"state": "failed", "error_message": "subprocess exited with code 1"}}
    answer = (await served.ask("PATCH", f"/api/rollouts/{id}", failed)).json()
    assert answer["status"]["error_message"] == "subprocess exited with code 1"
    assert (await served.ask("PATCH", f"/api/rollouts/{id}", failed)).status_code == 409


async def test_a_rollout_that_is_deleted_ends_and_stays(served: Served) -> None:
    id = await served.queue()
    for _ in range(2):
        answer = await served.ask("DELETE", f"/api/rollouts/{id}")
        assert (answer.status_code, answer.content) == (204, b"")
    assert (await served.ask("DELETE", "/api/rollouts/nowhere")).status_code == 204
    assert (await served.ask("GET", f"/api/rollouts/{id}")).json()["rollout"]["status"]["state"] == "failed"


async def test_a_page_of_what_has_ended(served: Served) -> None:
    first, second = await served.queue(rollout_id="a"), await served.queue(rollout_id="b", is_train=False)
    await served.ask("DELETE", f"/api/rollouts/{second}")
    page = (await served.ask("GET", "/api/rollouts/terminal", after=0)).json()
    assert page["items"] == [{"rollout_id": "b", "state": "failed", "data_id": "", "is_train": False}]
    assert page["total_terminal"] == 1
    for state in ("running", "succeeded"):
        await served.ask("PATCH", f"/api/rollouts/{first}", {"status": {"state": state}})
    then = (await served.ask("GET", "/api/rollouts/terminal", after=page["next_after"])).json()
    assert [(item["rollout_id"], item["state"]) for item in then["items"]] == [("a", "succeeded")]
    last = (await served.ask("GET", "/api/rollouts/terminal", after=then["next_after"])).json()
    assert last == {"items": [], "next_after": then["next_after"], "total_terminal": 2}


async def test_attempts_that_are_not_there(served: Served) -> None:
    id = await served.queue()
    for number in ("1", "x", "-1"):
        chat = f"/proxy/rollout/{id}/attempt/{number}/mode/train/openai/v1/chat/completions"
        answer = await served.ask("POST", chat, {"messages": MESSAGES})
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "unknown_id")
    assert (await served.store.get(id)).status == "queued"
    assert (await served.ask("PATCH", "/api/rollouts/nowhere", {"status": {"state": "running"}})).status_code == 404


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/api/models"),
        ("DELETE", "/api/models"),
        ("POST", "/proxy/pause"),
        ("POST", "/proxy/resume"),
        ("GET", "/proxy/state"),
    ],
)
async def test_what_is_different_on_purpose_says_why(served: Served, method: str, path: str) -> None:
    answer = await served.ask(method, path)
    assert (answer.status_code, answer.json()["error"]["code"]) == (501, "not_served")
    assert "Fix: " in answer.json()["error"]["message"]


# -- all calls of its clients -----------------------------------------------------------------------------------------

GUIDE = Path(__file__).parents[3] / "docs" / "guides" / "from-agent-lightning.md"
CHAT = "/proxy/rollout/{id}/attempt/0/mode/train/openai/v1/chat/completions"
SAME: dict[tuple[str, str], tuple[Any, int]] = {
    ("GET", "/healthz"): (None, 200),
    ("POST", "/api/rollouts"): ([{"input": {"question": "2 + 2"}}], 201),
    ("GET", "/api/rollouts"): (None, 200),
    ("GET", "/api/rollouts/{id}"): (None, 200),
    ("PATCH", "/api/rollouts/{id}"): ({"status": {"state": "running"}}, 200),
    ("POST", "/api/rollouts/{id}/attempt/{n}/events"): ({"event_type": "reward", "data": {"value": 1.0}}, 200),
    ("GET", "/api/rollouts/{id}/events"): (None, 200),
    ("POST", CHAT): ({"model": "auto", "messages": MESSAGES}, 200),
}
"""What is answered as there."""
OTHERWISE = {
    ("GET", "/api/rollouts/terminal"): 200,
    ("DELETE", "/api/rollouts/{id}"): 204,
    ("POST", "/api/models"): 501,
    ("DELETE", "/api/models"): 501,
    ("POST", "/proxy/pause"): 501,
    ("POST", "/proxy/resume"): 501,
    ("GET", "/proxy/state"): 501,
}
"""What is answered otherwise, on purpose: the guide says why."""


async def test_its_fifteen_calls(served: Served, engine: Scripted) -> None:
    """Eight are the same, seven are different on purpose, and there are no others."""
    engine._script = ("4",)
    id = await served.queue()
    assert (len(SAME), len(OTHERWISE)) == (8, 7)
    for (method, path), (body, status) in SAME.items():
        where = path.format(id=id, n=0)
        asked = {"state_in": "queuing"} if path == "/api/rollouts" and method == "GET" else {}
        answer = await served.ask(method, where, body, key="" if path == "/healthz" else KEY, **asked)
        assert answer.status_code == status, (method, where, answer.text)
    (turn,) = await served.store.turns(id)
    assert turn.answer["content"] == "4"
    for (method, path), status in OTHERWISE.items():
        assert (await served.ask(method, path.format(id=id))).status_code == status, (method, path)


def test_the_guide_names_all_fifteen_calls() -> None:
    text = GUIDE.read_text()
    same, _, rest = text.partition("Different on purpose:")
    for table, calls in ((same, SAME), (rest, OTHERWISE)):
        for method, path in calls:
            written = path if path != CHAT else "/proxy/rollout/{id}/attempt/{n}/mode/{mode}/openai/v1/chat/completions"
            assert any(method in line and written in line for line in table.splitlines()), (method, path)
    assert "Of the 15 calls of its server eight are answered as there and seven otherwise on purpose" in " ".join(
        text.split()
    )


def test_its_endpoint_tests_make_no_other_calls(endpoints: dict[str, Any]) -> None:
    source = (THEIRS / "test_endpoints.py").read_text()
    used = set(re.findall(r"client\.(get|post|patch|delete|put)\(\s*f?\"([^\"?]+)", source))
    known = {(method, re.sub(r"{\w+}", "*", path)) for method, path in [*SAME, *OTHERWISE]}
    for method, path in used:
        plain = re.sub(r"{[^}]*}", "*", path).replace("/attempt/0/events", "/attempt/*/events")
        plain = re.sub(r"/v1/(chat/)?completions$", "/v1/chat/completions", plain)
        assert (method.upper(), plain) in known, (method, path)
    assert len(used) > 10


# -- its own tests -----------------------------------------------------------------------------------------------------

DIFFERENT = {
    "test_delete_rollout": "it ends, and what happened stays",
    "test_model_endpoints": "a run's models are its policies",
    "test_proxy_completion_endpoint": "it replaces a function of its own server",
    "test_proxy_error_triplet_preserves_status": "it replaces a function of its own server",
    "test_proxy_admin_endpoints": "the gateway is not paused from outside",
    "test_triplet_events_keep_last_model_request_for_duplicate_prompt": "turns are what the gateway recorded",
    "test_terminal_rollouts_cursor_pagination": "a page is what changed since its cursor, which counts all changes",
}


@pytest.fixture
def endpoints(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The functions of its endpoint tests; what they import of its server is not there, and not needed."""
    if not THEIRS.is_dir():
        pytest.skip(f"{THEIRS} is not here")
    fastapi, conftest = ModuleType("fastapi.testclient"), ModuleType("tests.server.conftest")
    fastapi.TestClient, conftest.MODEL_NAME = httpx.Client, "test-model"  # type: ignore[attr-defined]
    for name, module in {"fastapi.testclient": fastapi, "tests.server.conftest": conftest}.items():
        monkeypatch.setitem(sys.modules, name, module)
    for name in ("fastapi", "tests.server"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    found: dict[str, Any] = {}
    exec(compile((THEIRS / "test_endpoints.py").read_text(), "test_endpoints.py", "exec"), found)
    return {name: test for name, test in found.items() if name.startswith("test_")}


@pytest.mark.parametrize(
    "name",
    [
        "test_healthz",
        "test_auth_required",
        "test_rollout_endpoints",
        "test_list_rollouts_filters_by_state_in",
        "test_event_endpoints",
        "test_enqueue_with_client_rollout_id_is_idempotent",
        "test_re_enqueue_does_not_clobber_a_running_rollout",
    ],
)
async def test_its_endpoint_tests(served: Served, endpoints: dict[str, Any], name: str) -> None:
    def play() -> None:
        with httpx.Client(base_url=served.server.url) as client:
            given: dict[str, Any] = {"client": client, "auth_headers": {"Authorization": f"Bearer {KEY}"}}
            test = endpoints[name]
            test(**{name: given[name] for name in inspect.signature(test).parameters})

    await asyncio.to_thread(play)


def test_every_endpoint_test_is_played_or_different_on_purpose(endpoints: dict[str, Any]) -> None:
    mark = next(mark for mark in cast(Any, test_its_endpoint_tests).pytestmark if mark.name == "parametrize")
    assert {*mark.args[1], *DIFFERENT} == set(endpoints)
