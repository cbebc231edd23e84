"""`return_token_ids`: agents that keep tokens themselves are given the very ones that are recorded."""

from typing import Any

import pytest

from tests.integration.gateway.stand import Stand, fetch

HI: Any = [{"role": "user", "content": "hi"}]
ASKED: Any = {"return_token_ids": True}
CALL = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
TOOLS: Any = [{"type": "function", "function": {"name": "f", "parameters": {}}}]


async def gather(stream: Any) -> tuple[list[list[int]], dict[int, list[int]]]:
    """The prompts that came, in order, and each choice's tokens."""
    prompts: list[list[int]] = []
    said: dict[int, list[int]] = {}
    async for chunk in stream:
        prompts += [chunk.prompt_token_ids] if "prompt_token_ids" in chunk.to_dict() else []
        for choice in chunk.choices:
            prompts += [choice.prompt_token_ids] if "prompt_token_ids" in choice.to_dict() else []
            said.setdefault(choice.index, []).extend(choice.to_dict().get("token_ids", []))
    return prompts, said


@pytest.mark.parametrize("stream", [False, True])
async def test_chat_completions(stand: Stand, stream: bool) -> None:
    stand.script("one 🙂", CALL)
    attempt = await stand.attempt("r1")
    client: Any = stand.client(attempt).chat.completions
    answer = await client.create(model="m", messages=HI, tools=TOOLS, n=2, stream=stream, extra_body=ASKED)
    if stream:
        prompts, said = await gather(answer)
    else:
        prompts = [answer.prompt_token_ids] * 2
        said = {choice.index: choice.token_ids for choice in answer.choices}
    turns = await stand.turns(attempt)
    assert prompts == [turn.prompt_ids for turn in turns]
    assert said == {turn.choice: turn.response_ids for turn in turns}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("echo", [False, True])
async def test_completions(stand: Stand, stream: bool, echo: bool) -> None:
    stand.script("one", "two", "three", "four")
    attempt = await stand.attempt("r1")
    client: Any = stand.client(attempt).completions
    answer = await client.create(model="m", prompt=["a", "b c"], n=2, stream=stream, echo=echo, extra_body=ASKED)
    if stream:
        prompts, said = await gather(answer)
    else:
        prompts = [choice.prompt_token_ids for choice in answer.choices]
        said = {choice.index: choice.token_ids for choice in answer.choices}
    turns = await stand.turns(attempt)
    assert prompts == [turn.prompt_ids for turn in turns]
    assert said == {turn.choice: turn.response_ids for turn in turns}
    assert len(prompts) == 4


async def test_nobody_else_is_given_any(stand: Stand) -> None:
    stand.script("one", "two")
    attempt = await stand.attempt("r1")
    _, chat = await fetch(stand.url(attempt) + "/chat/completions", {"messages": HI}, key=attempt.key)
    _, raw = await fetch(stand.url(attempt) + "/completions", {"prompt": "a"}, key=attempt.key)
    assert "token_ids" not in str(chat) + str(raw)
    body = {"messages": HI, "return_token_ids": 1}
    status, refused = await fetch(stand.url(attempt) + "/chat/completions", body, key=attempt.key)
    assert (status, refused["error"]["param"]) == (400, "return_token_ids")
