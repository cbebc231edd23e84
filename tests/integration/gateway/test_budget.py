"""What outside models may cost a run."""

import json
from pathlib import Path
from typing import Any

import openai
import pytest

from strop.config import OutsideConfig
from strop.errors import ConfigError
from strop.gateway.outside import OutsideRoute
from strop.gateway.template import Renderer
from tests.integration.gateway.test_routes import COMPLETION, HI, Stand, chunk, faked, say

JSON = (b"content-type", b"application/json")


async def whole(number: int, send: Any) -> None:
    await say(send, 200, COMPLETION, JSON)  # 5 tokens asked, 1 answered


async def refused_after(stand: Stand, rollout: str, **more: Any) -> tuple[int, openai.APIStatusError]:
    """How many requests are answered, and what the next one is told."""
    client = stand.client(await stand.attempt(rollout), "judge")
    for number in range(100):
        try:
            answer = await client.chat.completions.create(model="big", messages=HI, **more)
            if more.get("stream"):
                assert [part async for part in answer]
        except openai.APIStatusError as error:
            return number, error
    raise AssertionError("a hundred requests were answered")


async def test_tokens(renderer: Renderer, tmp_path: Path) -> None:
    async with faked(whole, tmp_path / "g", renderer, max_tokens=15) as (fake, stand):
        number, error = await refused_after(stand, "r1")
        assert (number, len(fake.asked)) == (3, 3), "6 and 12 tokens are not 15 yet, and 402 is not tried again"
        assert (error.status_code, error.code) == (402, "budget_used_up")
        assert "18 of 15 tokens" in error.message
        assert "gateway.outside.fake.max_tokens" in error.message
        (event,) = await stand.store.events("r1")
        assert event.data["code"] == "budget_used_up"
        assert len(await stand.store.turns("r1")) == 3
        assert (await refused_after(stand, "r2"))[0] == 0, "a budget is the run's, not a rollout's"


async def test_money(renderer: Renderer, tmp_path: Path) -> None:
    prices = {"price_in": 2e6, "price_out": 10e6}
    async with faked(whole, tmp_path / "g", renderer, max_cost=60.0, **prices) as (_, stand):
        number, error = await refused_after(stand, "r1")
        assert number == 3, "each costs 5 x 2 + 1 x 10"
        assert "60.00 of 60.00" in error.message


async def test_a_run_that_is_opened_again(renderer: Renderer, tmp_path: Path) -> None:
    """What was spent is in the turns: with n = 2 once per request, not once per choice."""
    both = json.loads(COMPLETION)
    both["choices"] = [both["choices"][0] | {"index": index} for index in (0, 1)]

    async def twice(number: int, send: Any) -> None:
        await say(send, 200, json.dumps(both).encode(), JSON)

    async with faked(twice, tmp_path / "g", renderer, max_tokens=1000) as (_, stand):
        client = stand.client(await stand.attempt("r1"), "judge")
        for _ in range(2):
            await client.chat.completions.create(model="big", messages=HI, n=2)
        assert len(await stand.store.turns("r1")) == 4
    async with faked(twice, tmp_path / "g", renderer, max_tokens=13) as (_, stand):
        await stand.gateway.routes.recall(stand.store)
        assert (await refused_after(stand, "r2"))[0] == 1, "12 of 13 were spent"


async def test_a_stream_that_does_not_say_what_it_cost(renderer: Renderer, tmp_path: Path) -> None:
    async def stream(number: int, send: Any) -> None:
        body = chunk("four " * 400) + b"data: [DONE]\n\n"
        await say(send, 200, body, (b"content-type", b"text/event-stream"))

    async with faked(stream, tmp_path / "g", renderer, max_tokens=1000) as (_, stand):
        number, _ = await refused_after(stand, "r1", stream=True)
        assert number == 2, "2,000 letters are about 500 tokens"


def test_money_without_prices() -> None:
    with pytest.raises(ConfigError, match="price_in"):
        OutsideRoute.of("judge", OutsideConfig(url="http://127.0.0.1:1/v1", max_cost=1.0))
