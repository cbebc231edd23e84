"""Thinking switched over the wire, with OpenAI's own client."""

import json
from pathlib import Path
from typing import Any

import openai
import pytest
from msgspec.structs import replace

from strop.demo import TOOLS
from strop.gateway.route import Routes
from strop.gateway.template import Renderer
from tests import chatml
from tests.integration.gateway.stand import Stand, fetch
from tests.unit.gateway.test_thinking import HYBRID

CALL = 'Let me see.\n<tool_call>\n{"name": "calculator", "arguments": {"expression": "3 * 4"}}\n</tool_call>'
OFF = {"chat_template_kwargs": {"enable_thinking": False}}


@pytest.fixture
def thinking(stand: Stand, tmp_path: Path) -> Stand:
    renderer = Renderer.from_parts(chatml.make(tmp_path / "model"), HYBRID)
    stand.gateway.routes = Routes({"*": replace(stand.gateway.routes.agents["*"], renderer=renderer)})
    return stand


async def ask(client: openai.AsyncOpenAI, stream: bool, **fields: Any) -> tuple[str, str, list[str], str]:
    """Reasoning, words, names of calls, and why it ended."""
    messages: Any = [{"role": "user", "content": "3 * 4?"}]
    given: Any = {"model": "any", "messages": messages, "tools": TOOLS} | fields
    if not stream:
        (choice,) = (await client.chat.completions.create(**given)).choices
        calls = [call.function.name for call in choice.message.tool_calls or []]
        reasoning = getattr(choice.message, "reasoning_content", "") or ""
        return reasoning, choice.message.content or "", calls, choice.finish_reason
    reasoning, words, calls, ended = "", "", [], ""
    async for chunk in await client.chat.completions.create(**given, stream=True):
        (choice,) = chunk.choices
        reasoning += getattr(choice.delta, "reasoning_content", "") or ""
        words += choice.delta.content or ""
        calls += [call.function.name for call in choice.delta.tool_calls or [] if call.function.name]
        ended = choice.finish_reason or ended
    return reasoning, words, calls, ended


@pytest.mark.parametrize("stream", [False, True])
async def test_thinking_is_switched_over_the_wire(thinking: Stand, stream: bool) -> None:
    thinking.script(f"Hm.\n</think>\n\n{CALL}", CALL, CALL)
    attempt = await thinking.attempt("r1")
    client = thinking.client(attempt)
    assert await ask(client, stream) == ("Hm.", "Let me see.", ["calculator"], "tool_calls")
    assert await ask(client, stream, extra_body=OFF) == ("", "Let me see.", ["calculator"], "tool_calls")
    assert await ask(client, stream, reasoning_effort="none") == ("", "Let me see.", ["calculator"], "tool_calls")
    turns = await thinking.turns(attempt)
    assert [turn.requested.get("chat_template_kwargs", {}).get("enable_thinking") for turn in turns] == [
        None,
        False,
        False,
    ]


@pytest.mark.parametrize("path", ["chat/completions", "responses", "messages"])
async def test_what_no_template_reads_is_refused_by_every_api(thinking: Stand, path: str) -> None:
    attempt = await thinking.attempt("r1")
    said = [{"role": "user", "content": "hi"}]
    body: Any = {"input": "hi"} if path == "responses" else {"messages": said}
    if path == "messages":
        body["max_tokens"] = 9
    body["chat_template_kwargs"] = {"enable_thoughts": True}
    status, told = await fetch(f"{thinking.url(attempt)}/{path}", body, key=attempt.key)
    assert status == 400
    assert "does not read enable_thoughts" in json.dumps(told)
    (event,) = await thinking.store.events("r1")
    assert event.data["param"] == "chat_template_kwargs"
