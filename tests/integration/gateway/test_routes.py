"""Who answers: outside models and replicas, with real clients on one side and real servers on the other."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
from msgspec.structs import replace

from strop.config import MAIN, Config, GatewayConfig, OutsideConfig
from strop.engines.scripted import Scripted
from strop.errors import ConfigError, EngineError
from strop.gateway import proxy
from strop.gateway.app import Gateway
from strop.gateway.limits import Limits
from strop.gateway.outside import Pace
from strop.gateway.replicas import Replicas
from strop.gateway.route import PolicyRoute, Routes
from strop.gateway.template import Renderer
from strop.net.server import serve
from strop.run.gateway import make_gateway
from strop.run.prepare import PreparedPolicy
from strop.run.runtime import ServedPolicy
from strop.runners.pool import LET_DOWN
from strop.store.sqlite import SqliteStore
from strop.types import Attempt, Sampling
from tests.integration.gateway.stand import Stand, fetch

HI: Any = [{"role": "user", "content": "hi"}]
TOOLS: Any = [
    {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}},
]
CALL = '<tool_call>\n{"name": "look", "arguments": {"at": "sky"}}\n</tool_call>'


def policy(engine: Scripted, renderer: Renderer) -> PolicyRoute:
    return PolicyRoute(
        policy="p", model="tiny", engine=engine, renderer=renderer, sampling_for=lambda _: Sampling(max_tokens=200)
    )


@asynccontextmanager
async def gateway(
    folder: Path, renderer: Renderer, limits: Limits | None = None, **outside: OutsideConfig
) -> AsyncIterator[Stand]:
    """A gateway of its own, whose agents are answered by outside models as far as `outside` says."""
    folder.mkdir(exist_ok=True)  # noqa: ASYNC240
    store = await SqliteStore.open(folder / "store.sqlite")
    engine = Scripted([], renderer, chunk=1, context=1000)
    app = Gateway(store, Routes.of(policy(engine, renderer), outside), limits=limits)
    server = await serve(app)
    stand = Stand(store, engine, app, server)
    yield stand
    for client in stand.clients:
        await client.close()
    await server.close()
    await app.routes.close()
    await store.close()


@pytest.fixture
async def provider(renderer: Renderer, tmp_path: Path) -> AsyncIterator[Stand]:
    """A real provider of every model API: another gateway, whose attempt's key is the provider's key."""
    async with gateway(tmp_path / "provider", renderer) as stand:
        yield stand


def to(provider: Stand, attempt: Attempt, **more: Any) -> OutsideConfig:
    return OutsideConfig(**({"url": provider.url(attempt), "key_env": "PROVIDER_KEY", "agents": ("judge",)} | more))


class Fake:
    """A small HTTP server that says what it is told to, and keeps what it was asked."""

    def __init__(self, answer: Callable[..., Awaitable[None]]) -> None:
        self.answer = answer
        self.asked: list[tuple[dict[str, str], bytes]] = []
        self.gone = asyncio.Event()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        body = b""
        while True:
            message = await receive()
            body += message["body"]
            if not message["more_body"]:
                break
        self.asked.append(({k.decode(): v.decode() for k, v in scope["headers"]}, body))

        async def watch() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass
            self.gone.set()

        watching = asyncio.create_task(watch())
        try:
            await self.answer(len(self.asked), send)
        finally:
            watching.cancel()


async def say(send: Any, status: int, body: bytes, *headers: tuple[bytes, bytes]) -> None:
    await send({"type": "http.response.start", "status": status, "headers": [*headers]})
    await send({"type": "http.response.body", "body": body})


COMPLETION = json.dumps(
    {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 1,
        "model": "big",
        "choices": [{"index": 0, "message": {"role": "assistant", "content": "4"}, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 5, "completion_tokens": 1, "total_tokens": 6},
        "a_field_of_its_own": [1.0, {"x": None}],
    }
).encode()


@asynccontextmanager
async def faked(
    answer: Callable[..., Awaitable[None]],
    folder: Path,
    renderer: Renderer,
    *,
    limits: Limits | None = None,
    **more: Any,
) -> AsyncIterator[tuple[Fake, Stand]]:
    fake = Fake(answer)
    server = await serve(fake)
    try:
        outside = OutsideConfig(**({"url": f"{server.url}/v1", "agents": ("judge",)} | more))
        async with gateway(folder, renderer, limits, fake=outside) as stand:
            yield fake, stand
    finally:
        await server.close()


# -- a real provider ---------------------------------------------------------------------------------------------------


async def test_every_api_passes_whole_and_streamed(
    provider: Stand, renderer: Renderer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = await provider.attempt("p1")
    monkeypatch.setenv("PROVIDER_KEY", there.key)
    provider.engine._script = lambda asked: CALL if "look" in asked.prompt else "the sky is blue"
    async with gateway(tmp_path / "g", renderer, judge=to(provider, there, model="big")) as stand:
        attempt = await stand.attempt("r1")
        client = stand.client(attempt, "judge")
        chat = await client.chat.completions.create(model="m", messages=HI, tools=TOOLS)
        stream = await client.chat.completions.create(model="m", messages=HI, tools=TOOLS, stream=True)
        calls = [c.choices[0].delta.tool_calls async for c in stream if c.choices and c.choices[0].delta.tool_calls]
        assert chat.choices[0].message.tool_calls[0].function.name == "look"  # type: ignore[union-attr]
        assert calls[0][0].function.name == "look"
        text = [c.choices[0].text async for c in await client.completions.create(model="m", prompt="x", stream=True)]
        assert "".join(text) == "the sky is blue"
        both = await client.completions.create(model="m", prompt=["x", "y"])
        assert [choice.text for choice in both.choices] == ["the sky is blue"] * 2
        response = await client.responses.create(model="m", input="hi")
        assert response.output_text == "the sky is blue"
        async with client.responses.stream(model="m", input="hi") as events:
            async for _ in events:
                pass
        base = stand.url(attempt, "judge").removesuffix("/v1")
        async with anthropic.AsyncAnthropic(base_url=base, api_key=attempt.key, max_retries=0) as claude:
            message = await claude.messages.create(model="m", max_tokens=50, messages=HI)
            assert message.content[0].text == "the sky is blue"  # type: ignore[union-attr]
            async with claude.messages.stream(model="m", max_tokens=50, messages=HI) as streamed:
                assert await streamed.get_final_text() == "the sky is blue"
        turns = await stand.store.turns("r1")
    look = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"function": {"name": "look", "arguments": {"at": "sky"}}}],
    }
    for turn in turns[:2]:
        (call,) = turn.answer["tool_calls"]
        assert call["function"] == look["tool_calls"][0]["function"]  # type: ignore[index]
        assert turn.finish == "tool_calls"
    assert {turn.answer["content"] for turn in turns[2:]} == {"the sky is blue"}
    assert {turn.finish for turn in turns[2:]} == {"stop"}
    assert len(turns) == 9
    assert [(turn.choice, turn.choices, turn.messages[0]["content"]) for turn in turns[3:5]] == [
        (0, 2, "x"),
        (1, 2, "y"),
    ]
    for turn in turns:
        assert (turn.agent, turn.policy, turn.prompt_ids, turn.logprobs) == ("judge", "judge", [], [])
        assert turn.messages[0]["content"] in ("hi", "x", "y")
        assert turn.requested["outside"]["model"] == "big"
    assert all(turn.requested["outside"]["usage"] for i, turn in enumerate(turns) if i not in (1, 2))
    # What the provider recorded is what a direct client would have caused, under the model it was configured with.
    asked = await provider.store.turns("p1")
    assert [turn.requested["model"] for turn in asked] == ["big"] * 9
    assert not stand.engine.calls


async def test_agents_and_models_find_their_way(
    provider: Stand, renderer: Renderer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = await provider.attempt("p1")
    monkeypatch.setenv("PROVIDER_KEY", there.key)
    provider.engine._script = lambda asked: "outside"
    async with gateway(tmp_path / "g", renderer, far=to(provider, there, models=("gpt",))) as stand:
        stand.engine._script = lambda asked: "inside"
        attempt = await stand.attempt("r1")
        said = [
            (await stand.client(attempt, agent).chat.completions.create(model=model, messages=HI)).choices[0].message
            for agent, model in (("main", "m"), ("judge", "m"), ("main", "gpt"), ("main", "gpt2"))
        ]
        assert [message.content for message in said] == ["inside", "outside", "outside", "inside"]
        assert [turn.policy for turn in await stand.store.turns("r1")] == ["p", "far", "far", "p"]
        assert [m.id for m in (await stand.client(attempt, "judge").models.list()).data] == ["far"]
        # A gateway that is started again goes on with the policy's own contexts and with the numbers of turns.
        stand.gateway.forget("r1")
        follow = [*HI, {"role": "assistant", "content": "inside"}, {"role": "user", "content": "more"}]
        await stand.client(attempt).chat.completions.create(model="m", messages=follow)
        *_, last = await stand.store.turns("r1")
        assert (last.id, last.parent) == ("r1/1/4", "r1/1/3")


# -- what passes, byte for byte ----------------------------------------------------------------------------------------


async def test_bytes_pass_unchanged_and_keys_stay_apart(
    renderer: Renderer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def answer(number: int, send: Any) -> None:
        await say(send, 200, COMPLETION, (b"content-type", b"application/json"), (b"x-request-id", b"7"))

    monkeypatch.setenv("FAKE_KEY", "provider-secret")
    async with faked(answer, tmp_path / "g", renderer, key_env="FAKE_KEY", model="big") as (fake, stand):
        attempt = await stand.attempt("r1")
        body: dict[str, Any] = {
            "model": "m",
            "messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}],
            "response_format": {"type": "json_object"},
            "temperature": 0.30000000000000004,
            "seed": 12345678901234567890,
        }
        client = stand.client(attempt, "judge")
        raw = await client.chat.completions.with_raw_response.create(**body)
    (headers, sent) = fake.asked[0]
    assert raw.content == COMPLETION
    assert raw.headers["x-request-id"] == "7"
    assert json.loads(sent) == body | {"model": "big"}
    assert b"0.30000000000000004" in sent
    assert headers["authorization"] == "Bearer provider-secret"
    assert attempt.key not in json.dumps(headers) + sent.decode()
    assert "provider-secret" not in str(raw.headers) + raw.text
    async with gateway(tmp_path / "g", renderer) as again:
        (turn,) = await again.store.turns("r1")
    assert turn.id == raw.headers["x-strop-turn"]
    assert turn.messages == [{"role": "user", "content": "[image_url]"}]
    assert turn.answer == {"role": "assistant", "content": "4"}
    assert turn.requested["outside"]["usage"]["total_tokens"] == 6
    assert turn.requested["response_format"] == {"type": "json_object"}


async def test_a_refusal_of_the_provider_is_the_agents_to_see(renderer: Renderer, tmp_path: Path) -> None:
    async def answer(number: int, send: Any) -> None:
        await say(send, 400, b'{"error": {"message": "no such thing", "code": "odd"}}', (b"content-type", b"a/json"))

    async with faked(answer, tmp_path / "g", renderer) as (fake, stand):
        attempt = await stand.attempt("r1")
        status, said = await fetch(stand.url(attempt, "judge") + "/chat/completions", b"{}", key=attempt.key)
        assert (status, said["error"]["code"]) == (400, "odd")
        assert len(fake.asked) == 1
        (event,) = await stand.store.events("r1")
        assert (event.kind, event.data["status"], event.data["agent"]) == ("error", 400, "judge")
        assert "no such thing" in event.data["message"]
        assert await stand.store.turns("r1") == []


async def test_a_busy_provider_is_asked_again(
    renderer: Renderer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proxy, "WAIT", 0.01)

    async def answer(number: int, send: Any) -> None:
        if number < 3:
            await say(send, (429, 503)[number - 1], b"{}", (b"retry-after", b"0.3"))
        else:
            await say(send, 200, COMPLETION, (b"content-type", b"application/json"))

    async with faked(answer, tmp_path / "g", renderer) as (fake, stand):
        attempt = await stand.attempt("r1")
        began = asyncio.get_running_loop().time()
        await stand.client(attempt, "judge").chat.completions.create(model="m", messages=HI)
        assert asyncio.get_running_loop().time() - began > 0.6
        assert len(fake.asked) == 3
        assert len(await stand.store.turns("r1")) == 1


async def test_a_provider_that_stays_busy_has_the_last_word(
    renderer: Renderer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proxy, "WAIT", 0.01)

    async def answer(number: int, send: Any) -> None:
        await say(send, 429, b'{"error": {"message": "slow down"}}', (b"retry-after", b"0"))

    async with faked(answer, tmp_path / "g", renderer) as (fake, stand):
        attempt = await stand.attempt("r1")
        with pytest.raises(openai.RateLimitError, match="slow down"):
            await stand.client(attempt, "judge").chat.completions.create(model="m", messages=HI)
        assert len(fake.asked) == proxy.TRIES


@pytest.mark.parametrize(("status", "code"), [(401, "outside_refused"), (403, "outside_refused"), (400, "outside")])
async def test_whose_fault_a_refusal_is(renderer: Renderer, tmp_path: Path, status: int, code: str) -> None:
    """A provider that takes the key for none of its own does not tell of the agent."""

    async def answer(number: int, send: Any) -> None:
        await say(send, status, b'{"error": {"message": "no"}}')

    async with faked(answer, tmp_path / "g", renderer) as (_, stand):
        attempt = await stand.attempt("r1")
        with pytest.raises(openai.APIStatusError):
            await stand.client(attempt, "judge").chat.completions.create(model="m", messages=HI)
        (event,) = await stand.store.events("r1")
        assert (event.data["code"], code in LET_DOWN) == (code, status != 400)


@pytest.mark.parametrize("stream", [False, True])
async def test_nobody_there(renderer: Renderer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stream: bool) -> None:
    monkeypatch.setattr(proxy, "WAIT", 0.01)
    nowhere = OutsideConfig(url="http://127.0.0.1:9/v1", agents=("judge",))
    async with gateway(tmp_path / "g", renderer, far=nowhere) as stand:
        attempt = await stand.attempt("r1")
        with pytest.raises(openai.APIStatusError, match="outside model far gave no answer") as caught:
            await stand.client(attempt, "judge").chat.completions.create(model="m", messages=HI, stream=stream)
        assert caught.value.status_code == 502
        base = stand.url(attempt, "judge").removesuffix("/v1")
        async with anthropic.AsyncAnthropic(base_url=base, api_key=attempt.key, max_retries=0) as claude:
            with pytest.raises(anthropic.APIStatusError, match="gave no answer") as wrong:
                await claude.messages.create(model="m", max_tokens=5, messages=HI)
        assert wrong.value.body["type"] == "error"  # type: ignore[index,call-overload]
        events = await stand.store.events("r1")
        assert [event.data["status"] for event in events] == [502, 502]


def chunk(text: str) -> bytes:
    head = b'{"id":"c","object":"chat.completion.chunk","created":1,"model":"big","choices":[{"index":0,"delta":'
    return b"data: " + head + json.dumps({"content": text}).encode() + b"}]}\n\n"


async def test_a_stream_that_breaks_off_says_so_and_is_recorded(renderer: Renderer, tmp_path: Path) -> None:
    async def answer(number: int, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]})
        await send({"type": "http.response.body", "body": chunk("half"), "more_body": True})
        await asyncio.sleep(0.1)
        raise OSError("the provider dies")

    async with faked(answer, tmp_path / "g", renderer) as (_, stand):
        attempt = await stand.attempt("r1")
        stream = await stand.client(attempt, "judge").chat.completions.create(model="m", messages=HI, stream=True)
        assert (await anext(stream)).choices[0].delta.content == "half"
        with pytest.raises(openai.APIError, match="in the middle"):
            await anext(stream)
        (turn,) = await stand.store.turns("r1")
        assert (turn.finish, turn.answer["content"]) == ("error", "half")


async def test_an_agent_that_leaves_ends_the_call_to_the_provider(renderer: Renderer, tmp_path: Path) -> None:
    async def answer(number: int, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]})
        for _ in range(1000):
            await send({"type": "http.response.body", "body": chunk("more"), "more_body": True})
            await asyncio.sleep(0.02)

    async with faked(answer, tmp_path / "g", renderer) as (fake, stand):
        attempt = await stand.attempt("r1")
        stream = await stand.client(attempt, "judge").chat.completions.create(model="m", messages=HI, stream=True)
        await anext(stream)
        await stream.close()
        await asyncio.wait_for(fake.gone.wait(), 5)
        await stand.gateway.wait_until_idle("r1", 1)
        (turn,) = await stand.store.turns("r1")
        assert turn.finish == "abandoned"
        assert turn.answer["content"].startswith("more")


async def test_a_provider_that_takes_too_long(renderer: Renderer, tmp_path: Path) -> None:
    async def answer(number: int, send: Any) -> None:
        await asyncio.sleep(30)

    async with faked(answer, tmp_path / "g", renderer, timeout=0.3) as (fake, stand):
        attempt = await stand.attempt("r1")
        with pytest.raises(openai.APIStatusError, match=r"took longer than 0.3 s") as caught:
            await stand.client(attempt, "judge").chat.completions.create(model="m", messages=HI)
        assert caught.value.status_code == 504
        await asyncio.wait_for(fake.gone.wait(), 5)


async def test_requests_over_the_rate_wait(renderer: Renderer, tmp_path: Path) -> None:
    now = most = 0

    async def answer(number: int, send: Any) -> None:
        nonlocal now, most
        now += 1
        most = max(most, now)
        await asyncio.sleep(0.05)
        now -= 1
        await say(send, 200, COMPLETION, (b"content-type", b"application/json"))

    async with faked(answer, tmp_path / "g", renderer, max_concurrency=2) as (fake, stand):
        attempt = await stand.attempt("r1")
        client = stand.client(attempt, "judge")
        await asyncio.gather(*(client.chat.completions.create(model="m", messages=HI) for _ in range(8)))
        assert (len(fake.asked), most) == (8, 2)


async def test_so_many_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, slept = [0.0], []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)
        clock[0] += seconds

    monkeypatch.setattr("strop.gateway.outside.time.monotonic", lambda: clock[0])
    monkeypatch.setattr("strop.gateway.outside.asyncio.sleep", sleep)
    pace = Pace(2, 0)
    began = []
    for _ in range(5):
        async with pace.one():
            began.append(clock[0])
        clock[0] += 10.0
    assert began == [0.0, 10.0, 60.0, 70.0, 120.0]


async def test_an_api_that_the_provider_does_not_speak(renderer: Renderer, tmp_path: Path) -> None:
    only = OutsideConfig(url="http://127.0.0.1:9/v1", agents=("judge",), dialects=("messages",))
    async with gateway(tmp_path / "g", renderer, far=only) as stand:
        attempt = await stand.attempt("r1")
        with pytest.raises(openai.NotFoundError, match="does not speak chat/completions, only messages"):
            await stand.client(attempt, "judge").chat.completions.create(model="m", messages=HI)


# -- several engines ---------------------------------------------------------------------------------------------------


async def test_a_policy_with_several_engines(renderer: Renderer, tmp_path: Path) -> None:
    async with gateway(tmp_path / "g", renderer) as stand:
        engines = [Scripted(lambda asked: "ok", renderer, chunk=1) for _ in range(2)]
        replicas = Replicas(engines, patience=0.2)
        route = stand.gateway.routes.find("main", None)
        stand.gateway.routes = Routes({"*": replace(route, engine=replicas)})
        attempts = [await stand.attempt(f"r{n}") for n in range(4)]

        async def ask(attempt: Attempt) -> None:
            await stand.client(attempt).chat.completions.create(model="m", messages=HI, n=2)

        for _ in range(3):
            for attempt in attempts:
                await ask(attempt)
        assert [len(engine.calls) for engine in engines] == [12, 12]
        await replicas.pause()
        with pytest.raises(openai.InternalServerError, match="paused for more than") as caught:
            await ask(attempts[0])
        assert caught.value.status_code == 503
        await replicas.resume()
        engines[0]._script = lambda asked: EngineError("it is gone")
        for attempt in attempts:
            await ask(attempt)
        turns = await stand.store.turns("r0")
        assert [turn.finish for turn in turns] == ["stop"] * 6 + ["error"] * 2 + ["stop"] * 2
        assert (await stand.store.events("r1")) == []  # others took over, and nobody noticed


def test_what_cannot_be_configured(renderer: Renderer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_SUCH_KEY", raising=False)
    route = policy(Scripted([], renderer), renderer)
    here = {"url": "http://127.0.0.1:9/v1"}
    for wrong, says in (
        ({"a": OutsideConfig(**here, key_env="NO_SUCH_KEY")}, r"gateway.outside.a: the environment has no NO_SUCH_KEY"),
        ({"a": OutsideConfig(url="api.example.com")}, "write http://HOST:PORT"),
        ({n: OutsideConfig(**here, agents=("x",)) for n in "ab"}, r"outside.b: another outside model has 'x' too"),
    ):
        with pytest.raises(ConfigError, match=says):
            Routes.of(route, wrong)


def test_an_agent_is_answered_by_its_policy(renderer: Renderer) -> None:
    """By its name, or else by the first pattern that it matches; the others by the one for all."""
    plain = policy(Scripted([], renderer), renderer)
    writer, critic = (replace(plain, policy=name) for name in ("writer", "critic"))
    outside = {"large": OutsideConfig(url="http://127.0.0.1:9/v1", agents=("critic-2",))}
    routes = Routes.of(writer, outside, {"writer": writer, "crit*": critic, "c*": writer})
    found = {name: routes.any(name, None).policy for name in ("writer", "critic", "critic-2", "cook", "main")}
    assert found == {"writer": "writer", "critic": "critic", "critic-2": "large", "cook": "writer", "main": "writer"}
    with pytest.raises(ConfigError, match="a policy answers for 'critic-2' too"):
        Routes.of(writer, outside, {"writer": writer, "critic-2": critic})


async def test_an_outside_model_for_all_answers_for_a_run_with_one_policy(renderer: Renderer, tmp_path: Path) -> None:
    """Whatever names its policy is trained on: `main` is the default."""
    config = Config(gateway=GatewayConfig(outside={"large": OutsideConfig(url="http://127.0.0.1:9/v1", agents=("*",))}))
    prepared = PreparedPolicy(name=MAIN, config=config, model=tmp_path, renderer=renderer)
    served = ServedPolicy(prepared=prepared, engine=Scripted([], renderer), learner=None, place=tmp_path)
    store = await SqliteStore.open(tmp_path / "store.sqlite")
    made = make_gateway(config, store, [served])
    assert {made.routes.any(name, None).policy for name in ("main", "critic")} == {"large"}
    await made.routes.close()
    await store.close()
