"""The server's own key: where it may stand, and what is asked with it."""

from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest

from strop.gateway.server_key import ServerKeyCalls
from strop.net.server import serve
from strop.run.serve import serve_store
from strop.store.server.keys import AttemptKeys, RunKey
from tests.integration.gateway.stand import Stand, fetch

HI: Any = [{"role": "user", "content": "hi"}]
KEY = "the-servers-own"


@pytest.fixture
async def url(stand: Stand) -> AsyncIterator[str]:
    server = await serve(ServerKeyCalls(stand.gateway, stand.store, RunKey(KEY, AttemptKeys(stand.store))))
    yield server.url
    await server.close()


async def test_it_is_refused_in_an_address(stand: Stand, url: str) -> None:
    status, answer = await fetch(f"{url}/k/{KEY}/v1/chat/completions", {"messages": HI})
    assert (status, answer["error"]["code"]) == (403, "run_key")
    assert KEY not in str(answer)
    assert await stand.store.list() == []


async def test_an_attempts_key_in_the_address_goes_before_it(stand: Stand, url: str) -> None:
    stand.script("fine")
    attempt = await stand.attempt("r1")
    status, answer = await fetch(f"{url}/k/{attempt.key}/v1/chat/completions", {"messages": HI}, key=KEY)
    assert (status, answer["id"]) == (200, "r1/1/0")
    assert [rollout.id for rollout in await stand.store.list()] == ["r1"]


async def test_its_requests_are_sampled_as_they_say(stand: Stand, url: str) -> None:
    stand.script("fine")
    body = {"messages": HI, "repetition_penalty": 1.5}
    status, answer = await fetch(f"{url}/v1/chat/completions", body, key=KEY)
    assert status == 200, answer
    (turn,) = await stand.store.turns(answer["id"].partition("/")[0])
    assert turn.sampling.repetition_penalty == 1.5


async def test_azures_client_asks_with_it(stand: Stand, url: str) -> None:
    stand.script("fine")
    async with openai.AsyncAzureOpenAI(azure_endpoint=url, api_key=KEY, api_version="1", max_retries=0) as client:
        answer = await client.chat.completions.create(model="m", messages=HI)
    assert answer.choices[0].message.content == "fine"
    (rollout,) = await stand.store.list()
    assert rollout.task.id == "chat/completions"


async def test_a_server_without_a_model_shows_no_key_of_an_address(stand: Stand) -> None:
    attempt = await stand.attempt("r1")
    server = await serve_store(stand.store, key=KEY, lease_check=None)
    try:
        status, answer = await fetch(f"{server.url}/k/{attempt.key}/v1/chat/completions", {"messages": HI})
    finally:
        await server.close()
    assert status == 404
    assert "/k/.../v1/chat/completions is not served" in str(answer)
    assert attempt.key not in str(answer)
