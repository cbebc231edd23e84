"""Azure's addresses and its header for keys, with its own client."""

from pathlib import Path
from typing import Any

import openai
import pytest

from strop.config import OutsideConfig
from strop.gateway.auth import RequestAddress
from strop.gateway.template import Renderer
from strop.types import Attempt
from tests.integration.gateway.stand import Stand, fetch
from tests.integration.gateway.test_routes import gateway, provider, to

HI: Any = [{"role": "user", "content": "hi"}]

__all__ = ["provider"]


def azure(stand: Stand, attempt: Attempt, base: str, **options: Any) -> openai.AsyncAzureOpenAI:
    options = {"api_key": attempt.key, "api_version": "2024-10-21", "max_retries": 0} | options
    client = openai.AsyncAzureOpenAI(azure_endpoint=stand.server.url + base, **options)
    stand.clients.append(client)
    return client


@pytest.mark.parametrize("base", ["/r/r1/1/agents/main", "", "/k/{key}"])
async def test_azures_client_at_each_address(stand: Stand, base: str) -> None:
    stand.script("one", "two", "three", "four", "five", "six")
    attempt = await stand.attempt("r1")
    base = base.format(key=attempt.key)
    client = azure(stand, attempt, base)
    chat = await client.chat.completions.create(model="org/m", messages=HI)
    assert chat.choices[0].message.content == "one"
    completion = await client.completions.create(model="m", prompt="Once")
    assert completion.choices[0].text == "two"
    response = await client.responses.create(model="m", input="hi")
    assert response.output_text == "three"
    assert [model.id async for model in await client.models.list()] == ["tiny"]
    deployed = azure(stand, attempt, base, azure_deployment="mine")
    stream = await deployed.chat.completions.create(model="m", messages=HI, stream=True)
    assert "".join([part.choices[0].delta.content or "" async for part in stream]) == "four"
    new = openai.AsyncOpenAI(base_url=f"{stand.server.url}{base}/openai/v1", api_key=attempt.key, max_retries=0)
    stand.clients.append(new)
    assert (await new.chat.completions.create(model="m", messages=HI)).choices[0].message.content == "five"
    assert (await new.responses.create(model="m", input="hi")).output_text == "six"
    assert [turn.requested["model"] for turn in await stand.turns(attempt)] == ["org/m", *["m"] * 5]


async def test_the_deployment_is_the_model_where_the_body_names_none(stand: Stand) -> None:
    stand.script("one", "two", "three")
    attempt = await stand.attempt("r1")
    url = f"{stand.server.url}/openai/deployments/mine/chat/completions?api-version=2024-10-21"
    for more in ({}, {"model": None}, {"model": "other"}):
        status, _ = await fetch(url, {"messages": HI} | more, key=attempt.key)
        assert status == 200
    assert [turn.requested["model"] for turn in await stand.turns(attempt)] == ["mine", "mine", "other"]
    status, answer = await fetch(url, b"[]", key=attempt.key)
    assert (status, "not a JSON object" in answer["error"]["message"]) == (400, True)


async def test_an_outside_model_is_asked_for_by_its_deployment(
    provider: Stand, renderer: Renderer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    provider.script("outside")
    theirs = await provider.attempt("p1")
    monkeypatch.setenv("PROVIDER_KEY", theirs.key)
    outside: OutsideConfig = to(provider, theirs, agents=(), models=("judge-1",))
    async with gateway(tmp_path / "mine", renderer, far=outside) as stand:
        attempt = await stand.attempt("r1")
        url = f"{stand.server.url}/openai/deployments/judge-1/chat/completions"
        status, answer = await fetch(url, {"messages": HI}, key=attempt.key)
        assert (status, answer["choices"][0]["message"]["content"]) == (200, "outside")
        (turn,) = await stand.store.turns("r1")
        assert turn.policy == "far"


async def test_another_attempts_key_opens_nothing(stand: Stand) -> None:
    await stand.attempt("r1")
    other = await stand.attempt("r2")
    with pytest.raises(openai.AuthenticationError):
        await azure(stand, other, "/r/r1/1/agents/main").chat.completions.create(model="m", messages=HI)


@pytest.mark.parametrize(
    ("path", "means"),
    [
        ("/openai/deployments/a/b/chat/completions", ("a/b", "chat/completions")),
        ("/openai/deployments/m/completions", ("m", "completions")),
        ("/openai/v1/responses/input_tokens", ("", "responses/input_tokens")),
        ("/openai/responses", ("", "responses")),
        ("/openai/deployments/m/nothing", ("", "deployments/m/nothing")),
    ],
)
def test_what_an_address_means(path: str, means: tuple[str, str]) -> None:
    for base in ("", "/k/key", "/r/r1/1/agents/main"):
        address = RequestAddress.of(base + path)
        assert address is not None
        assert (address.model, address.path) == means
