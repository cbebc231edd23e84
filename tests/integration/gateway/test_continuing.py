"""Turns that said the same words after different thoughts: agents name the one they go on from, as each API has it.

Real clients over a socket. Whatever a client keeps of an answer, it goes on from that turn and no other.
"""

from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import openai
import pytest
from anthropic import AsyncAnthropic
from msgspec.structs import replace

from strop.demo import TOOLS
from strop.gateway.route import Routes
from strop.gateway.template import Renderer
from strop.types import Attempt, Turn
from tests import chatml
from tests.integration.gateway.stand import Stand, fetch

CALL = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "3 * 4"}}\n</tool_call>'
FUNCTION: Any = TOOLS[0]["function"]
Ask = Callable[[list[Any]], Awaitable[list[Any]]]
"""Asks with these messages, and gives back what the client keeps of the answer."""


@pytest.fixture
async def thinking(stand: Stand, tmp_path: Path) -> Stand:
    renderer = Renderer.from_parts(chatml.make(tmp_path / "model"), chatml.TEMPLATE + "{# <think></think> #}")
    stand.gateway.routes = Routes({"*": replace(stand.gateway.routes.agents["*"], renderer=renderer)})
    stand.engine._tokens = renderer
    return stand


def chat(client: openai.AsyncOpenAI, stream: bool, keep: str) -> Ask:
    async def ask(messages: list[Any]) -> list[Any]:
        request: Any = {"model": "m", "messages": messages, "tools": TOOLS}
        if stream:
            async with client.chat.completions.stream(**request) as events:
                message = (await events.get_final_completion()).choices[0].message.model_dump(exclude_none=True)
        else:
            answer = await client.chat.completions.create(**request)
            message = answer.choices[0].message.model_dump(exclude_none=True)
        thought = message.pop("reasoning_content")
        for call in message.get("tool_calls", ()):
            call["function"].pop("parsed_arguments", None)
        return [message if keep == "calls" else message | {keep: thought}]

    return ask


def responses(client: openai.AsyncOpenAI, stream: bool, keep: str) -> Ask:
    tools: Any = [{"type": "function", "strict": True} | FUNCTION]

    async def ask(items: list[Any]) -> list[Any]:
        request: Any = {"model": "m", "input": items, "tools": tools}
        if keep == "previous" and "previous" in (last := items[-2] if len(items) > 1 else {}):
            request |= {"input": items[-1:], "previous_response_id": last["previous"]}
        if stream:
            async with client.responses.stream(**request) as events:
                response = await events.get_final_response()
        else:
            response = await client.responses.create(**request)
        if keep == "previous":
            return [{"previous": response.id}]
        output = [item.model_dump(exclude_none=True, exclude={"parsed_arguments"}) for item in response.output]
        for item in output:
            if keep != "ids":
                del item["id"]
            if keep != "thought" and item["type"] == "reasoning":
                del item["content"]
        return [item for item in output if keep != "calls" or item["type"] != "reasoning"]

    return ask


def messages(client: AsyncAnthropic, stream: bool, keep: str) -> Ask:
    tools: Any = [{"name": FUNCTION["name"], "input_schema": FUNCTION["parameters"]}]

    async def ask(messages: list[Any]) -> list[Any]:
        request: Any = {"model": "m", "max_tokens": 100, "messages": messages, "tools": tools}
        if stream:
            async with client.messages.stream(**request) as events:
                message = await events.get_final_message()
        else:
            message = await client.messages.create(**request)
        blocks = [block.model_dump(exclude_none=True, include=KEPT[block.type]) for block in message.content]
        for block in blocks:
            if block["type"] == "thinking":
                block |= {"signature": "not-ours/=="} if keep == "thought" else {"thinking": ""}
        return [{"role": "assistant", "content": [b for b in blocks if keep != "calls" or b["type"] != "thinking"]}]

    return ask


KEPT = {
    "thinking": {"type", "thinking", "signature"},
    "text": {"type", "text"},
    "tool_use": {"type", "id", "name", "input"},
}
WAYS = [
    (chat, "reasoning_content"),
    (chat, "reasoning"),
    (chat, "calls"),
    (responses, "previous"),
    (responses, "ids"),
    (responses, "thought"),
    (responses, "calls"),
    (messages, "signature"),
    (messages, "thought"),
    (messages, "calls"),
]


def more(said: list[Any], way: Any, keep: str) -> Any:
    """What comes behind an answer: the result of its call, or the user's next words."""
    if keep != "calls":
        return {"role": "user", "content": "more"}
    if way is responses:
        return {"type": "function_call_output", "call_id": said[-1]["call_id"], "output": "12"}
    if way is messages:
        result = {"type": "tool_result", "tool_use_id": said[0]["content"][-1]["id"], "content": "12"}
        return {"role": "user", "content": [result]}
    return {"role": "tool", "tool_call_id": said[0]["tool_calls"][0]["id"], "content": "12"}


@pytest.fixture
async def claude(thinking: Stand) -> AsyncIterator[Callable[[Attempt], AsyncAnthropic]]:
    clients: list[AsyncAnthropic] = []

    def connect(attempt: Attempt) -> AsyncAnthropic:
        url = thinking.url(attempt).removesuffix("/v1")
        clients.append(AsyncAnthropic(base_url=url, api_key=attempt.key, max_retries=0))
        return clients[-1]

    yield connect
    for client in clients:
        await client.close()


def check_goes_on(turn: Turn, parent: Turn) -> None:
    assert (turn.parent, turn.branch, turn.shared) == (parent.id, None, len(parent.ids))
    assert turn.prompt_ids[: len(parent.ids)] == parent.ids


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("way", "keep"), WAYS, ids=[f"{way.__name__}-{keep}" for way, keep in WAYS])
async def test_the_turn_that_is_named(thinking: Stand, claude: Any, way: Any, keep: str, stream: bool) -> None:
    """Two paths, the same in all words: they part in their first thoughts, or only in the ids of their calls. The
    gateway starts anew midway."""
    says = CALL if keep == "calls" else "Well, 12."
    thinking.script(*(f"<think>{thought}</think>{says}" for thought in ("this", "that", *["so"] * 4)))
    attempt = await thinking.attempt("r1")
    ask = way(claude(attempt) if way is messages else thinking.client(attempt), stream, keep)
    question: list[Any] = [{"role": "user", "content": "3 * 4?"}]
    paths = [[*question, *said, more(said, way, keep)] for said in [await ask(question), await ask(question)]]
    for level in range(2):
        if level:
            thinking.gateway.forget("r1")
        for path in paths:
            said = await ask(path)
            path += [*said, more(said, way, keep)]
        turns = await thinking.turns(attempt)
        for path in range(2):
            check_goes_on(turns[2 * level + 2 + path], turns[2 * level + path])
    turns = await thinking.turns(attempt)
    assert [turn.answer["content"] for turn in turns] == [turns[0].answer["content"]] * 6


@pytest.mark.parametrize("keep", ["reasoning_content", "calls"])
async def test_the_choice_that_is_taken(thinking: Stand, keep: str) -> None:
    says = CALL if keep == "calls" else "Well, 12."
    thinking.script(f"<think>this</think>{says}", f"<think>that</think>{says}", "ok")
    attempt = await thinking.attempt("r1")
    client = thinking.client(attempt)
    request: Any = {"model": "m", "messages": [{"role": "user", "content": "3 * 4?"}], "tools": TOOLS}
    answer = await client.chat.completions.create(**request, n=2)
    message = answer.choices[1].message.model_dump(exclude_none=True)
    if keep == "calls":
        del message["reasoning_content"]
    then = more([message], chat, keep)
    await client.chat.completions.create(**request | {"messages": [*request["messages"], message, then]})
    turns = await thinking.turns(attempt)
    check_goes_on(turns[2], turns[1])


async def test_what_was_edited_is_a_branch(thinking: Stand, renderer: Renderer) -> None:
    """Thoughts that nobody thought, and a turn that does not exist: the model is shown what the agent wrote."""
    thinking.script("<think>this</think>12", "a", "b", "c", "d")
    attempt = await thinking.attempt("r1")
    url, key = thinking.url(attempt), attempt.key
    question, then = {"role": "user", "content": "3 * 4?"}, {"role": "user", "content": "more"}
    await fetch(f"{url}/chat/completions", {"messages": [question]}, key=key)
    edited = {"role": "assistant", "content": "12", "reasoning_content": "other"}
    await fetch(f"{url}/chat/completions", {"messages": [question, edited, then]}, key=key)
    thought = {"type": "thinking", "thinking": "other", "signature": "r1/1/0"}
    said = {"role": "assistant", "content": [thought, {"type": "text", "text": "12"}]}
    await fetch(f"{url}/messages", {"max_tokens": 9, "messages": [question, said, then]}, key=key)
    item = {"id": "msg_r1/1/77", "type": "message", "role": "assistant", "content": "12"}
    await fetch(f"{url}/responses", {"input": [question, item, then]}, key=key)
    turns = await thinking.turns(attempt)
    assert [turn.branch for turn in turns] == [None, *["edited_history"] * 3]
    assert turns[3].prompt_ids == renderer.prompt(turns[3].messages, None)
    status, body = await fetch(f"{url}/responses", {"input": "more", "previous_response_id": "r1/1/77"}, key=key)
    assert (status, body["error"]["code"]) == (404, "previous_response_not_found")


async def test_names_that_others_gave_say_nothing(thinking: Stand) -> None:
    thinking.script("<think>this</think>12", "a", "b")
    attempt = await thinking.attempt("r1")
    url, key = thinking.url(attempt), attempt.key
    question, then = {"role": "user", "content": "3 * 4?"}, {"role": "user", "content": "more"}
    await fetch(f"{url}/chat/completions", {"messages": [question]}, key=key)
    item = {"id": "msg_689a0b", "type": "message", "role": "assistant", "content": "12"}
    await fetch(f"{url}/responses", {"input": [question, item, then]}, key=key)
    thought = {"type": "thinking", "thinking": "", "signature": "EqQBCgIYAhIM1gbcDa9GJwZA2b3h/7/2=="}
    said = {"role": "assistant", "content": [thought, {"type": "text", "text": "12"}]}
    await fetch(f"{url}/messages", {"max_tokens": 9, "messages": [question, said, then]}, key=key)
    turns = await thinking.turns(attempt)
    assert [(turn.parent, turn.branch) for turn in turns[1:]] == [(turns[0].id, None)] * 2


async def test_a_raw_prompt_names_nothing_but_its_words(thinking: Stand, renderer: Renderer) -> None:
    """The same text in other tokens: as in conversations, the latest request's first choice is gone on from. A prompt
    of ids says itself which one it is, even if others have more of it in common."""
    spelled = [renderer.encode(letter)[0] for letter in "answer"]
    thinking.script("answer", [*spelled, renderer.end_of_turn], "other", "ok")
    assert spelled != renderer.encode("answer")
    attempt = await thinking.attempt("r1")
    client = thinking.client(attempt)
    await client.completions.create(model="m", prompt="Say: ")
    await client.completions.create(model="m", prompt="Say: ", n=2)
    await client.completions.create(model="m", prompt="Say: answer, two")
    turns = await thinking.turns(attempt)
    assert (turns[3].parent, turns[3].branch) == (turns[1].id, None)
    for number in (0, 1):
        thinking.script("ok")
        await client.completions.create(model="m", prompt=[*turns[number].ids[:-1], *renderer.encode(", three")])
        turn = (await thinking.store.turns("r1"))[-1]
        assert (turn.parent, turn.branch) == (turns[number].id, None)
