"""Two gateways over one store, both of which answer calls of the same attempt, as a proxy before them might have it."""

from collections.abc import AsyncIterator
from itertools import pairwise

import openai
import pytest

from strop.gateway.app import Gateway
from strop.gateway.contexts import extends
from strop.net.server import serve
from strop.runners.pool import LET_DOWN
from strop.types import Attempt
from tests.integration.gateway.stand import Stand


@pytest.fixture
async def other(stand: Stand) -> AsyncIterator[Stand]:
    """A second gateway over the store and the engine of the first."""
    gateway = Gateway(stand.store, stand.gateway.routes)
    server = await serve(gateway)
    other = Stand(stand.store, stand.engine, gateway, server)
    yield other
    for client in other.clients:
        await client.close()
    await server.close()


async def ask(stand: Stand, attempt: Attempt, messages: list[dict[str, str]], retries: int = 0) -> None:
    """Ask with what was said so far, and add what is answered."""
    client = stand.client(attempt, max_retries=retries)
    answer = await client.chat.completions.create(model="m", messages=messages)  # pyright: ignore
    messages.append({"role": "assistant", "content": answer.choices[0].message.content or ""})
    messages.append({"role": "user", "content": "and then?"})


async def test_an_attempt_that_changes_gateways_is_exact(stand: Stand, other: Stand) -> None:
    stand.script(*(f"the answer {number}" for number in range(20)))
    attempt = await stand.attempt("g.0")
    messages = [{"role": "user", "content": "one"}]
    for gateway in (stand, stand, other, stand, other, other, stand):
        await ask(gateway, attempt, messages, retries=2)
    turns = await stand.turns(attempt)
    assert len(turns) == 7
    assert [turn.branch for turn in turns] == [None] * 7
    for before, turn in pairwise(turns):
        assert extends(turn)
        assert turn.parent == before.id
        whole = before.prompt_ids + before.response_ids
        assert turn.prompt_ids[: len(whole)] == whole


async def test_an_answer_that_cannot_be_kept_is_not_given(stand: Stand, other: Stand) -> None:
    stand.script(*(f"the answer {number}" for number in range(20)))
    attempt = await stand.attempt("g.0")
    await ask(stand, attempt, [{"role": "user", "content": "one"}])
    await ask(other, attempt, [{"role": "user", "content": "two"}])
    with pytest.raises(openai.InternalServerError, match="have all calls of a rollout go to one gateway") as refused:
        await ask(stand, attempt, [{"role": "user", "content": "three"}])
    assert refused.value.status_code == 503
    assert refused.value.code in LET_DOWN  # an agent that ends by it is tried again
    assert [turn.messages[0]["content"] for turn in await stand.turns(attempt)] == ["one", "two"]
