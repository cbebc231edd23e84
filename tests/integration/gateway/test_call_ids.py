"""A model that gives its calls ids itself, as Kimi does: agents get those, and the model gets them back unchanged."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from anthropic import AsyncAnthropic
from msgspec.structs import replace

from strop.gateway.route import Routes
from strop.gateway.template import Renderer
from tests import chatml
from tests.integration.gateway.stand import Stand

TEMPLATE = (
    "{# </think> #}{% if tools %}<|im_start|>tool_declare\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'tool' %}## Return of {{ m.tool_call_id }}\n{% endif %}{{ m.content or '' }}"
    "{% if m.tool_calls %}<|tool_calls_section_begin|>{% for call in m.tool_calls %}"
    "<|tool_call_begin|>{{ call.id }}<|tool_call_argument_begin|>{{ call.function.arguments | tojson }}"
    "<|tool_call_end|>{% endfor %}<|tool_calls_section_end|>{% endif %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SCHEMA = {"type": "object", "properties": {"q": {"type": "string"}}}


def called(*ids: str, q: str = "x") -> str:
    calls = "".join(
        f"<|tool_call_begin|>{id}<|tool_call_argument_begin|>{json.dumps({'q': q})}<|tool_call_end|>" for id in ids
    )
    return f"<|tool_calls_section_begin|>{calls}<|tool_calls_section_end|>"


@pytest.fixture(params=["sampled", "template"])
async def kimi(request: pytest.FixtureRequest, stand: Stand, tmp_path: Path) -> Stand:
    renderer = Renderer.from_parts(chatml.make(tmp_path / "model"), TEMPLATE)
    route = replace(stand.gateway.routes.agents["*"], renderer=renderer, history=request.param)
    stand.gateway.routes = Routes({"*": route})
    stand.engine._tokens, stand.engine._context = renderer, 10_000
    return stand


@pytest.fixture
async def claude(kimi: Stand) -> AsyncIterator[AsyncAnthropic]:
    attempt = await kimi.attempt("r1")
    async with AsyncAnthropic(base_url=kimi.url(attempt).removesuffix("/v1"), api_key=attempt.key) as client:
        yield client


async def check(kimi: Stand, ids: list[list[str]]) -> None:
    """Every turn goes on from the one before it, and the model sees its own ids above the results."""
    turns = await kimi.store.turns("r1")
    renderer = kimi.engine._tokens
    assert [[call["id"] for call in turn.answer["tool_calls"]] for turn in turns[: len(ids)]] == ids
    for n, turn in enumerate(turns[1:]):
        assert (turn.parent, turn.branch, turn.shared) == (turns[n].id, None, len(turns[n].ids))
        new = renderer.decode(turn.prompt_ids[turn.shared :])
        assert [line for line in new.splitlines() if "##" in line] == [f"## Return of {id}" for id in ids[n]]


SCRIPT = (called("functions.find:0", "functions.find:1"), called("functions.find:0"), called("functions.find:0"), "ok")
IDS = [["functions.find:0", "functions.find:1"], ["functions.find:0"], ["functions.find:0"]]


@pytest.mark.parametrize("stream", [False, True])
async def test_chat(kimi: Stand, stream: bool) -> None:
    """The model begins anew with every turn: the same id means the latest call of that id."""
    kimi.script(*SCRIPT)
    client = kimi.client(await kimi.attempt("r1"))
    tools: Any = [{"type": "function", "function": {"name": "find", "parameters": SCHEMA}}]
    messages: list[Any] = [{"role": "user", "content": "go"}]
    for _ in range(4):
        request: Any = {"model": "m", "messages": messages, "tools": tools}
        if stream:
            async with client.chat.completions.stream(**request) as events:
                message = (await events.get_final_completion()).choices[0].message
        else:
            message = (await client.chat.completions.create(**request)).choices[0].message
        messages += [
            message,
            *({"role": "tool", "tool_call_id": c.id, "content": "1"} for c in message.tool_calls or []),
        ]
    await check(kimi, IDS)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("remembered", [False, True])
async def test_responses(kimi: Stand, stream: bool, remembered: bool) -> None:
    kimi.script(*SCRIPT)
    client = kimi.client(await kimi.attempt("r1"))
    tools: Any = [{"type": "function", "name": "find", "parameters": SCHEMA, "strict": False}]
    items: list[Any] = [{"role": "user", "content": "go"}]
    new, previous = items, None
    for _ in range(4):
        request: Any = {"model": "m", "input": new if remembered else items, "tools": tools}
        if remembered:
            request["previous_response_id"] = previous
        if stream:
            async with client.responses.stream(**request) as events:
                response = await events.get_final_response()
        else:
            response = await client.responses.create(**request)
        calls = [item for item in response.output if item.type == "function_call"]
        new = [{"type": "function_call_output", "call_id": call.call_id, "output": "1"} for call in calls]
        items, previous = [*items, *response.output, *new], response.id
    await check(kimi, IDS)


@pytest.mark.parametrize("stream", [False, True])
async def test_messages(kimi: Stand, claude: AsyncAnthropic, stream: bool) -> None:
    kimi.script(*SCRIPT)
    messages: list[Any] = [{"role": "user", "content": "go"}]
    for _ in range(4):
        request: Any = {"model": "m", "max_tokens": 200, "messages": messages}
        request["tools"] = [{"name": "find", "input_schema": SCHEMA}]
        if stream:
            async with claude.messages.stream(**request) as events:
                message = await events.get_final_message()
        else:
            message = await claude.messages.create(**request)
        ids = [block.id for block in message.content if block.type == "tool_use"]
        results = [{"type": "tool_result", "tool_use_id": id, "content": "1"} for id in ids]
        messages += [{"role": "assistant", "content": message.content}, {"role": "user", "content": results}]
    await check(kimi, IDS)


async def test_ids_that_cannot_be_told_apart(kimi: Stand) -> None:
    """A model may give one answer's calls the same id: the second gets another, or one result would be lost."""
    kimi.script(called("functions.find:0", "functions.find:0"), "ok")
    client = kimi.client(await kimi.attempt("r1"))
    tools: Any = [{"type": "function", "function": {"name": "find", "parameters": SCHEMA}}]
    question: Any = {"role": "user", "content": "go"}
    answer = await client.chat.completions.create(model="m", messages=[question], tools=tools)
    first, second = [call.id for call in answer.choices[0].message.tool_calls or ()]
    assert first == "functions.find:0"
    assert len(second) == 9


@pytest.mark.parametrize("kimi", ["sampled"], indirect=True)
async def test_an_id_said_twice_names_no_turn(kimi: Stand) -> None:
    """Two turns with the same call under the same id and with other thoughts: the thoughts tell which one it is, and
    without them it is the latest."""
    call = called("functions.find:0")
    kimi.script(
        f"<think>this</think>{call}", f"<think>that</think>{call}", "ok", "ok", called("functions.find:7"), "ok"
    )
    client = kimi.client(await kimi.attempt("r1"))
    tools: Any = [{"type": "function", "function": {"name": "find", "parameters": SCHEMA}}]
    question: Any = {"role": "user", "content": "go"}

    async def ask(*messages: Any) -> Any:
        answer = await client.chat.completions.create(model="m", messages=[question, *messages], tools=tools)
        return answer.choices[0].message.model_dump(exclude_none=True)

    this, that = await ask(), await ask()
    result = {"role": "tool", "tool_call_id": "functions.find:0", "content": "1"}
    await ask(this, result)
    await ask({name: value for name, value in this.items() if name != "reasoning_content"}, result)
    other = await ask()
    assert that["tool_calls"] == this["tool_calls"] != other["tool_calls"]
    await ask(other, result | {"tool_call_id": "functions.find:7"})
    turns = await kimi.store.turns("r1")
    assert [turns[n].parent for n in (2, 3, 5)] == [turns[n].id for n in (0, 1, 4)]
