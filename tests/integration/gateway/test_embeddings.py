"""Embeddings: an outside model makes them, or nobody does."""

import json
from pathlib import Path
from typing import Any

import openai
import pytest

from strop.gateway.template import Renderer
from tests.integration.gateway.stand import Stand, fetch
from tests.integration.gateway.test_routes import faked, say

MODEL = "text-embedding-3-small"
ANSWER = {
    "object": "list",
    "model": MODEL,
    "data": [{"object": "embedding", "index": i, "embedding": [0.25, float(i)]} for i in range(2)],
    "usage": {"prompt_tokens": 3, "total_tokens": 3},
}


@pytest.mark.parametrize("texts", ["one", ["one", "two"], [[5, 7]]])
async def test_an_outside_model_makes_them(renderer: Renderer, tmp_path: Path, texts: Any) -> None:
    async def answer(number: int, send: Any) -> None:
        await say(send, 200, json.dumps(ANSWER).encode(), (b"content-type", b"application/json"))

    async with faked(answer, tmp_path / "g", renderer, models=(MODEL,), price_in=1.0, price_out=1.0, max_cost=1.0) as (
        fake,
        stand,
    ):
        attempt = await stand.attempt("r1")
        made = await stand.client(attempt).embeddings.create(model=MODEL, input=texts, encoding_format="float")
        assert [one.embedding for one in made.data] == [[0.25, 0.0], [0.25, 1.0]]
        assert json.loads(fake.asked[0][1])["input"] == texts
        (turn,) = await stand.store.turns("r1")
        assert (turn.policy, turn.finish, turn.prompt_ids) == ("fake", "stop", [])
        assert turn.requested["outside"]["usage"]["prompt_tokens"] == 3
        with pytest.raises(openai.NotFoundError, match="makes no embeddings"):
            await stand.client(attempt).embeddings.create(model="other", input=texts)
        assert len(fake.asked) == 1


async def test_without_one_they_are_refused(stand: Stand) -> None:
    attempt = await stand.attempt("r1")
    for base in (stand.url(attempt), f"{stand.server.url}/openai/deployments/m"):
        status, answer = await fetch(base + "/embeddings", {"model": MODEL, "input": "one"}, key=attempt.key)
        assert (status, answer["error"]["code"]) == (404, "model_not_found")
        assert "Fix: ask for a model that does" in answer["error"]["message"]
    assert await stand.turns(attempt) == []
