"""Every parameter of the clients' create methods, against a real gateway and the guide's table of refusals."""

import inspect
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anthropic
import openai
import pytest

from tests.integration.gateway.stand import ROOT, Stand

CLIENTS_OWN = {"extra_headers", "extra_query", "extra_body", "timeout", "betas", "user_profile_id", "workspace_id"}
"""Parameters that do not come with the body."""
HI: Any = [{"role": "user", "content": "hi"}]
SCHEMA: Any = {
    "type": "object",
    "properties": {"a": {"type": "string"}},
    "required": ["a"],
    "additionalProperties": False,
}
FUNCTION: Any = {"name": "f", "description": "d", "parameters": SCHEMA}
DRAWN: Any = {
    "temperature": 0.5,
    "top_p": 0.9,
    "seed": 7,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.5,
}

CHAT: Any = {
    **DRAWN,
    "model": "m",
    "messages": HI,
    "audio": {"format": "wav", "voice": "alloy"},
    "function_call": "auto",
    "functions": [FUNCTION],
    "logit_bias": {"5": 1},
    "logprobs": True,
    "max_completion_tokens": 20,
    "max_tokens": 20,
    "metadata": {"a": "b"},
    "modalities": ["text", "audio"],
    "moderation": {"model": "m"},
    "n": 2,
    "parallel_tool_calls": False,
    "prediction": {"type": "content", "content": "hi"},
    "prompt_cache_key": "k",
    "prompt_cache_options": {"mode": "explicit"},
    "prompt_cache_retention": "24h",
    "reasoning_effort": "low",
    "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}},
    "safety_identifier": "s",
    "service_tier": "auto",
    "stop": ["END"],
    "store": True,
    "stream": True,
    "stream_options": {"include_usage": True},
    "tool_choice": "auto",
    "tools": [{"type": "function", "function": FUNCTION}],
    "top_logprobs": 2,
    "user": "u",
    "verbosity": "low",
    "web_search_options": {},
}
COMPLETIONS: Any = {
    **DRAWN,
    "model": "m",
    "prompt": "Once",
    "best_of": 3,
    "echo": True,
    "logit_bias": {"5": 1},
    "logprobs": 2,
    "max_tokens": 20,
    "n": 2,
    "stop": ["END"],
    "stream": True,
    "stream_options": {"include_usage": True},
    "suffix": "the end",
    "user": "u",
}
RESPONSES: Any = {
    "model": "m",
    "input": "hi",
    "access_programs": ["p"],
    "background": True,
    "context_management": [{"type": "compaction", "compact_threshold": 1000}],
    "conversation": "conv_1",
    "image": {"detail": "low"},
    "include": ["message.output_text.logprobs"],
    "instructions": "Be brief.",
    "max_output_tokens": 20,
    "max_tool_calls": 3,
    "metadata": {"a": "b"},
    "moderation": {"model": "m"},
    "parallel_tool_calls": False,
    "previous_response_id": None,  # that of a response that was given
    "prompt": {"id": "p"},
    "prompt_cache_key": "k",
    "prompt_cache_options": {"mode": "explicit"},
    "prompt_cache_retention": "24h",
    "reasoning": {"effort": "low", "summary": "auto"},
    "safety_identifier": "s",
    "service_tier": "auto",
    "store": True,
    "stream": True,
    "stream_options": {"include_obfuscation": False},
    "temperature": 0.5,
    "text": {"verbosity": "low"},
    "text.format": {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}},
    "tool_choice": "auto",
    "tools": [{"type": "function", "strict": True} | FUNCTION],
    "top_logprobs": 2,
    "top_p": 0.9,
    "truncation": "auto",
    "user": "u",
}
MESSAGES: Any = {
    "model": "m",
    "messages": HI,
    "max_tokens": 20,
    "billing_policy": {"type": "billing_policy", "bill_to": "self"},
    "cache_control": {"type": "ephemeral"},
    "compaction": {"type": "compact"},
    "container": "c",
    "context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]},
    "diagnostics": {"previous_message_id": "msg_1"},
    "fallback_credit_token": "t",
    "fallbacks": "default",
    "inference_geo": "eu",
    "mcp_servers": [{"type": "url", "url": "http://127.0.0.1:9", "name": "x"}],
    "metadata": {"user_id": "u"},
    "output_config": {"effort": "low"},
    "output_config.format": {"format": {"type": "json_schema", "schema": SCHEMA}},
    "service_tier": "auto",
    "speed": "fast",
    "stop_sequences": ["END"],
    "stream": True,
    "system": "Be brief.",
    "thinking": {"type": "enabled", "budget_tokens": 1024, "display": "omitted"},
    "thread": {"type": "create"},
    "tool_choice": {"type": "auto"},
    "tools": [{"name": "f", "description": "d", "input_schema": SCHEMA, "defer_loading": True}],
}
PARAMETERS: dict[str, Any] = {
    "chat completions": CHAT,
    "completions": COMPLETIONS,
    "responses": RESPONSES,
    "messages": MESSAGES,
}
ALWAYS = {
    "chat completions": ("model", "messages"),
    "completions": ("model", "prompt"),
    "responses": ("model", "input"),
    "messages": ("model", "messages", "max_tokens"),
}
EVERY = [(api, name) for api, values in PARAMETERS.items() for name in values]


def read_table() -> set[tuple[str, str]]:
    """The refusals that the guide lists, by API and parameter."""
    guide = (ROOT / "docs" / "guides" / "gateway.md").read_text()
    section = guide.partition("## What is refused\n")[2].partition("\n## ")[0]
    rows = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("|")][2:]
    assert all(len(row) == 3 and row[2] for row in rows)
    listed = {
        (api, name) for apis, names, _ in rows for api in apis.split(", ") for name in re.findall(r"`([^`]+)`", names)
    }
    assert listed <= set(EVERY)
    return listed


REFUSED = read_table()


@asynccontextmanager
async def creates(stand: Stand) -> AsyncIterator[dict[str, Any]]:
    """The clients' methods, by API."""
    attempt = await stand.attempt("r1")
    ours, options = stand.client(attempt), {"api_key": attempt.key, "max_retries": 0}
    base = stand.url(attempt).removesuffix("/v1")
    async with anthropic.AsyncAnthropic(base_url=base, **options) as claude:  # type: ignore[arg-type]
        yield {
            "chat completions": ours.chat.completions.create,
            "completions": ours.completions.create,
            "responses": ours.responses.create,
            "messages": claude.messages.create,
            "more messages": claude.beta.messages.create,
        }


def body(api: str, *names: str) -> Any:
    values = PARAMETERS[api]
    return {name.partition(".")[0]: values[name] for name in (*ALWAYS[api], *names)}


async def send(create: Any, fields: Any) -> None:
    """A request, and its answer to the end."""
    answer = await create(**fields)
    if fields.get("stream"):
        async for _ in answer:
            pass


async def test_every_parameter_is_known(stand: Stand) -> None:
    """A client of a later version may have more: they are to be accepted, or put on the list."""
    async with creates(stand) as methods:
        has = {api: set(inspect.signature(create).parameters) - CLIENTS_OWN for api, create in methods.items()}
    has["messages"] |= has.pop("more messages")
    assert has == {api: {name for name in values if "." not in name} for api, values in PARAMETERS.items()}


@pytest.mark.parametrize(("api", "name"), EVERY)
async def test_one_parameter(stand: Stand, api: str, name: str) -> None:
    stand.script(*["fine"] * 3)
    async with creates(stand) as methods:
        create, fields = methods[api], body(api, name)
        if api == "messages" and name not in inspect.signature(create).parameters:
            create = methods["more messages"] if "." not in name else create
        if name == "previous_response_id":
            fields[name] = (await create(**body(api))).id
        if (api, name) not in REFUSED:
            return await send(create, fields)
        with pytest.raises((openai.BadRequestError, anthropic.BadRequestError)) as refused:
            await send(create, fields)
    assert stand.engine.calls == []
    assert f"'{name}'" in refused.value.message
    assert "Fix: " in refused.value.message
    (event,) = await stand.store.events("r1")
    assert event.data["param"] == name


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("api", PARAMETERS)
async def test_all_that_are_accepted_at_once(stand: Stand, api: str, stream: bool) -> None:
    stand.script(*["fine"] * 3)
    alone = {"stream", "stream_options"} if not stream else set[str]()
    names = [name for name in PARAMETERS[api] if (api, name) not in REFUSED and name not in alone]
    async with creates(stand) as methods:
        create, fields = methods[api], body(api, *names)
        if api == "messages":
            create = methods["more messages"]
        if api == "responses":
            fields["previous_response_id"] = (await create(**body(api))).id
        await send(create, fields)
    assert (await stand.store.turns("r1"))[-1].answer["content"].endswith("fine")
