"""Where a gateway is and who is speaking: one base URL for all rollouts, the address file, GET /address."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anthropic
import msgspec
import openai
import pytest

from strop.errors import PlaceError
from strop.net import addresses as address
from strop.net.addresses import AddressApp
from strop.net.client import Client
from strop.net.server import serve
from strop.types import Attempt
from tests.integration.gateway.stand import Stand, fetch

HI: Any = [{"role": "user", "content": "hi"}]


@asynccontextmanager
async def service(stand: Stand, **options: Any) -> AsyncIterator[openai.AsyncOpenAI]:
    """A client as an agent service holds it: made once, with one base URL for all rollouts."""
    options = {"api_key": "EMPTY", "max_retries": 0} | options
    async with openai.AsyncOpenAI(base_url=f"{stand.server.url}/v1", **options) as client:
        yield client


def trace(attempt: Attempt, **more: str) -> dict[str, str]:
    return {"trace_id": attempt.key, **more}


# -- one base URL for all rollouts -------------------------------------------------------------------------------------


async def test_one_client_speaks_for_many_rollouts_at_once(stand: Stand) -> None:
    stand.engine._script = lambda asked: "yes" if "one" in asked.prompt else "no"
    attempts = [await stand.attempt(id) for id in ("r1", "r2", "r3")]
    async with service(stand) as client:

        async def ask(attempt: Attempt, word: str) -> Any:
            question: Any = [{"role": "user", "content": word}]
            headers = trace(attempt)
            return await client.chat.completions.create(model="m", messages=question, extra_headers=headers)

        said = await asyncio.gather(*(ask(a, w) for a, w in zip(attempts, ("one", "two", "one"), strict=True)))
    assert [answer.choices[0].message.content for answer in said] == ["yes", "no", "yes"]
    for attempt, answer in zip(attempts, said, strict=True):
        (turn,) = await stand.turns(attempt)
        assert (turn.id, turn.agent) == (answer.id, "main")


@pytest.mark.parametrize("how", ["trace_id", "trace-id", "bearer", "x-api-key"])
async def test_the_key_alone_in_each_place(stand: Stand, how: str) -> None:
    stand.script("ok")
    attempt = await stand.attempt("r1")
    options = {"api_key": attempt.key} if how == "bearer" else {"default_headers": {how: attempt.key}}
    async with service(stand, **options) as client:
        await client.chat.completions.create(model="m", messages=HI)
    assert len(await stand.turns(attempt)) == 1


async def test_the_trace_id_says_it_before_an_api_key_that_opens_another_attempt(stand: Stand) -> None:
    stand.script("one", "two")
    mine, other = await stand.attempt("r1"), await stand.attempt("r2")
    async with service(stand, api_key=other.key) as client:
        await client.chat.completions.create(model="m", messages=HI)  # the other's session is open now
        await client.chat.completions.create(model="m", messages=HI, extra_headers=trace(mine))
    found = [await stand.store.turns(attempt.rollout, attempt=attempt.number) for attempt in (mine, other)]
    assert [[turn.answer["content"] for turn in turns] for turns in found] == [["two"], ["one"]]


async def test_no_api_key_at_all(stand: Stand) -> None:
    stand.script("ok")
    attempt = await stand.attempt("r1")
    client, body = Client(stand.server.url), b'{"messages": [{"role": "user", "content": "hi"}]}'
    answer = await client.request("POST", "/v1/chat/completions", body, headers=trace(attempt))
    await client.close()
    assert answer.status == 200
    assert len(await stand.turns(attempt)) == 1


async def test_an_api_key_that_means_something_is_heard_where_the_trace_id_is_somebody_elses(stand: Stand) -> None:
    stand.script("ok")
    attempt = await stand.attempt("r1")
    async with service(stand, api_key=attempt.key) as client:
        headers = {"trace_id": "4bf92f3577b34da6a3ce929d0e0e4736"}
        await client.chat.completions.create(model="m", messages=HI, extra_headers=headers)
    assert len(await stand.turns(attempt)) == 1


async def test_other_apis_and_a_conversation_that_goes_on(stand: Stand) -> None:
    stand.script("one", "two")
    attempt = await stand.attempt("r1")
    async with anthropic.AsyncAnthropic(base_url=stand.server.url, api_key=attempt.key, max_retries=0) as client:
        first = await client.messages.create(model="m", max_tokens=20, messages=HI)
    follow: Any = [*HI, {"role": "assistant", "content": first.content[0].text}, {"role": "user", "content": "so?"}]  # type: ignore[union-attr]
    async with service(stand) as other:
        await other.chat.completions.create(model="m", messages=follow, extra_headers=trace(attempt))
    before, after = await stand.turns(attempt)
    assert (after.parent, after.shared) == (before.id, len(before.ids))  # one session, whatever the address


async def test_a_header_names_the_agent(stand: Stand) -> None:
    stand.script("a", "b", "c")
    attempt = await stand.attempt("r1")
    async with service(stand) as client:
        for named in ({"x-strop-agent": "critic"}, {}):
            await client.chat.completions.create(model="m", messages=HI, extra_headers=trace(attempt, **named))
    await stand.client(attempt, "writer").chat.completions.create(
        model="m", messages=HI, extra_headers={"x-strop-agent": "critic"}
    )  # the path says it
    assert [turn.agent for turn in await stand.turns(attempt)] == ["critic", "main", "writer"]


@pytest.mark.parametrize("key", ["", "nobody", "\xe9", "a" * 5000])
async def test_a_key_that_opens_nothing(stand: Stand, key: str) -> None:
    await stand.attempt("r1")
    status, answer = await fetch(f"{stand.server.url}/v1/chat/completions", {"messages": HI}, key=key)
    assert status == 401
    assert ("no attempt has this key" if key else "a key is needed") in answer["error"]["message"]
    assert "server" not in answer["error"]["message"], "there is none whose key would do"


async def test_an_attempt_that_is_over(stand: Stand) -> None:
    stand.script("a", "b")
    attempt = await stand.attempt("r1")
    async with service(stand) as client:
        await client.chat.completions.create(model="m", messages=HI, extra_headers=trace(attempt))
        await stand.store.finish("r1", 1)
        for _ in range(2):  # by the session that was open, then by the store
            with pytest.raises(openai.ConflictError, match="is over"):
                await client.chat.completions.create(model="m", messages=HI, extra_headers=trace(attempt))


async def test_a_session_that_is_open_is_found_without_asking_the_store(
    stand: Stand, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand.script("a", "b", "c")
    attempt = await stand.attempt("r1")
    asked: list[str] = []
    look = stand.store.attempt

    async def counted(key: str) -> Attempt:
        asked.append(key)
        return await look(key)

    monkeypatch.setattr(stand.store, "attempt", counted)
    async with service(stand) as client:
        for _ in range(2):
            await client.chat.completions.create(model="m", messages=HI, extra_headers=trace(attempt))
        assert asked == [attempt.key]
        stand.gateway.forget("r1")
        await client.chat.completions.create(model="m", messages=HI, extra_headers=trace(attempt))
    assert asked[-1] == attempt.key
    assert [turn.id for turn in await stand.turns(attempt)] == ["r1/1/0", "r1/1/1", "r1/1/2"]


# -- the key in the address --------------------------------------------------------------------------------------------


async def test_a_key_in_the_address_is_the_key_whatever_else_is_sent(stand: Stand) -> None:
    stand.script("one", "two", "three")
    mine, other = await stand.attempt("r1"), await stand.attempt("r2")
    base = f"{stand.server.url}/k/{mine.key}"
    status, _ = await fetch(f"{base}/v1/chat/completions", {"messages": HI})  # no key at all
    assert status == 200
    async with openai.AsyncOpenAI(base_url=f"{base}/v1", api_key=other.key, max_retries=0) as client:
        listed = await client.models.list()
        await client.chat.completions.create(
            model="m", messages=HI, extra_headers={**trace(other), "x-strop-agent": "critic"}
        )
    assert [model.id for model in listed.data] == ["tiny"]
    async with anthropic.AsyncAnthropic(base_url=base, api_key="hard-coded", max_retries=0) as claude:
        await claude.messages.create(model="m", max_tokens=20, messages=HI)
    assert [turn.agent for turn in await stand.turns(mine)] == ["main", "critic", "main"]
    assert await stand.turns(other) == []


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/models", "/v1/other", "/chat/completions", "", "/"])
async def test_a_key_in_the_address_is_shown_to_nobody(
    stand: Stand, path: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Neither by answers, whatever is wrong with the request, nor by events, nor by logs."""
    caplog.set_level(0)
    attempt = await stand.attempt("r1")
    await stand.attempt("r2")
    for key in (attempt.key, "wrong-" + attempt.key):
        status, answer = await fetch(f"{stand.server.url}/k/{key}{path}", {"messages": []})
        assert 400 <= status < 500
        assert attempt.key not in json.dumps(answer)
        assert "Fix: " in answer["error"]["message"] or path == "/v1/models" or status == 400
    events = await stand.store.events("r1")
    assert len(events) == 1, "the attempt's own key records what it was refused"
    assert attempt.key not in str(events)
    assert attempt.key not in caplog.text


async def test_a_key_in_the_address_opens_its_attempt_only(stand: Stand) -> None:
    mine, other = await stand.attempt("r1"), await stand.attempt("r2")
    for path in (f"/k/{mine.key}{stand.url(other).removeprefix(stand.server.url)}/chat/completions",
                 f"/k/{mine.key}/r/r1/1/events", f"/k/{mine.key}/v1/rollouts"):  # fmt: skip
        status, _ = await fetch(stand.server.url + path, {"messages": HI}, key=other.key)
        assert status == 404, path
    status, answer = await fetch(f"{stand.server.url}/k/nobody/v1/chat/completions", {"messages": HI}, key=mine.key)
    assert (status, answer["error"]["code"]) == (401, "invalid_api_key")
    stand.script("late")
    await stand.store.finish("r1", 1)
    status, _ = await fetch(f"{stand.server.url}/k/{mine.key}/v1/chat/completions", {"messages": HI})
    assert status == 409
    assert await stand.turns(other) == []


# -- where it is -------------------------------------------------------------------------------------------------------


async def test_an_app_tells_its_address_while_it_is_announced(stand: Stand, tmp_path: Path) -> None:
    app = AddressApp(stand.gateway)
    server = await serve(app)
    try:
        assert (await fetch(f"{server.url}/address"))[0] == 503
        with app.announce(server.url, "tiny", tmp_path) as announced:
            assert json.loads((tmp_path / "address.json").read_text()) == msgspec.to_builtins(announced)
            assert await asyncio.to_thread(address.read, tmp_path) == announced
            port = server.url.rpartition(":")[2]
            status, seen = await fetch(f"http://localhost:{port}/address")  # as it is called there
            assert (status, seen["base_url"]) == (200, f"http://localhost:{port}/v1")
            assert (await fetch(f"{server.url}/address", {}))[0] == 405
            assert (await fetch(f"{server.url}/health"))[0] == 200
        assert not (tmp_path / "address.json").exists()
        assert (await fetch(f"{server.url}/address"))[0] == 503
    finally:
        await server.close()


async def test_a_service_of_verls_kind_is_notified(
    stand: Stand, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It reads HOST:PORT and asks at /v1 of it, with the header `trace_id` that came with its task."""
    app, notice = AddressApp(stand.gateway), tmp_path / "llm_server"
    server = await serve(app)
    monkeypatch.setenv("LLM_SERVER_NOTIFY_FILE", str(notice))
    try:
        with app.announce(server.url, "", tmp_path):
            assert not notice.exists()  # no model is served
        with app.announce(server.url, "tiny", tmp_path):
            assert f"http://{notice.read_text()}/v1" == f"{server.url}/v1"
            stand.script("yes")
            attempt = await stand.attempt("r1")
            client = openai.AsyncOpenAI(base_url=f"http://{notice.read_text()}/v1", api_key="-", max_retries=0)
            message: Any = {"role": "user", "content": "?"}
            async with client:
                await client.chat.completions.create(
                    model="any", messages=[message], extra_headers={"trace_id": attempt.key}
                )
            assert len(await stand.turns(attempt)) == 1
        assert not notice.exists()
        with app.announce(server.url, "tiny", tmp_path):
            notice.write_text("10.0.0.7:1")
        assert notice.read_text() == "10.0.0.7:1"  # another's by now
        monkeypatch.setenv("LLM_SERVER_NOTIFY_FILE", str(tmp_path / "nowhere" / "llm_server"))
        refused = pytest.raises(PlaceError, match=r"LLM_SERVER_NOTIFY_FILE names .*nowhere.* cannot be written.*Fix: ")
        with refused, app.announce(server.url, "tiny", tmp_path):
            pass
        assert not (tmp_path / "address.json").exists()
    finally:
        await server.close()


async def test_an_address_that_is_another_runs_by_now_is_waited_out(stand: Stand, tmp_path: Path) -> None:
    app = AddressApp(stand.gateway)
    server = await serve(app)
    try:
        (tmp_path / "left").mkdir()
        left = msgspec.structs.replace(address.GatewayAddress.of(server.url, "old"), started=1.0)
        (tmp_path / "left" / "address.json").write_bytes(msgspec.json.encode(left))
        with app.announce(server.url, "new", tmp_path):
            with pytest.raises(PlaceError, match="another run's by now"):
                await asyncio.to_thread(address.read, tmp_path / "left", timeout=0.3)
            reading = asyncio.create_task(asyncio.to_thread(address.read, tmp_path / "left", timeout=10))
            await asyncio.sleep(0.2)
            with app.announce(server.url, "newer", tmp_path / "left") as announced:
                assert await reading == announced
    finally:
        await server.close()
