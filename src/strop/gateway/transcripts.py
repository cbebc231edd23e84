"""Conversations that a chat template is checked with: those of a file, or a few of our own."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import msgspec
from msgspec import Struct

from strop.errors import ConfigError
from strop.gateway.dialects.base import ApiError, Json
from strop.gateway.dialects.chat_messages import read_messages

NAMES = ("messages", "traj", "history")
"""What the list of messages is called in a transcript."""


class Transcript(Struct, frozen=True, kw_only=True):
    """`messages` are plain (see `ModelRequest`); `id` says where it stands in its file."""

    id: str
    messages: list[Json]
    tools: list[Json] | None = None


_CALL = {"type": "function", "function": {"name": "lookup", "arguments": {"city": "Zürich", "days": [1, 2]}}}
_TOOLS: list[Json] = [{"type": "function", "function": {"name": "lookup", "description": "The weather.", "parameters": {
    "type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "array"}},
}}}]  # fmt: skip
SAMPLES = [
    Transcript(
        id="three turns",
        messages=[
            {"role": "system", "content": "You are helpful."},
            {"role": "user", "content": "How are you?"},
            {"role": "assistant", "content": "Fine, thank you."},
            {"role": "user", "content": "And tomorrow?\n"},
            {"role": "assistant", "content": "Who knows."},
            {"role": "user", "content": "True."},
            {"role": "assistant", "content": "Indeed."},
        ],
    ),
    Transcript(
        id="tool calls",
        messages=[
            {"role": "user", "content": "The weather?"},
            {"role": "assistant", "content": "", "tool_calls": [{"id": "call00001"} | _CALL]},
            {"role": "tool", "name": "lookup", "tool_call_id": "call00001", "content": '{"sky": "blue"}'},
            {"role": "assistant", "content": "Once more.", "tool_calls": [{"id": "call00002"} | _CALL]},
            {"role": "tool", "name": "lookup", "tool_call_id": "call00002", "content": "blue"},
            {"role": "assistant", "content": "The sky is blue."},
        ],
        tools=_TOOLS,
    ),
    Transcript(
        id="thinking, several calls at once",
        messages=[
            {"role": "user", "content": "Here and there?"},
            {"role": "assistant", "content": "I see.", "reasoning_content": "Two places.", "tool_calls": [
                {"id": "call00001"} | _CALL, {"id": "call00002"} | _CALL,
            ]},
            {"role": "tool", "name": "lookup", "tool_call_id": "call00001", "content": "blue"},
            {"role": "tool", "name": "lookup", "tool_call_id": "call00002", "content": " grey\n"},
            {"role": "assistant", "content": "<think>\nBoth.\n</think>\n\nBlue, grey."},
            {"role": "user", "content": "Thanks 🙂"},
            {"role": "assistant", "content": "你好"},
            {"role": "user", "content": "?"},
            {"role": "assistant", "content": ""},
            {"role": "user", "content": "Bye."},
            {"role": "assistant", "content": "Bye.\n"},
        ],
        tools=_TOOLS,
    ),
]  # fmt: skip
"""What is replayed when nothing else is given."""


def read_transcripts(path: Path) -> list[Transcript]:
    """Conversations of a file: JSON lines with `messages` (or `traj`, `history`) in OpenAI's format and optional
    `tools`; or one JSON document that holds such objects."""
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}. Fix: give a readable file of UTF-8 text") from None
    found: list[Transcript] = []
    for where, raw in _objects(text, path):
        record = cast(Json, raw) if isinstance(raw, dict) else {}
        messages = next((record[name] for name in NAMES if isinstance(record.get(name), list)), None)
        if messages is None:
            raise ConfigError(
                f"{path}, {where}: no list of messages. Fix: write each line as an object with `messages`"
            )
        try:
            plain = read_messages([msgspec.json.encode(_known(message)) for message in messages])
        except (ApiError, TypeError, AttributeError) as error:
            raise ConfigError(f"{path}, {where}: {error}") from None
        found.append(Transcript(id=where, messages=plain, tools=record.get("tools")))
    return found


def _objects(text: str, path: Path) -> Iterator[tuple[str, Any]]:
    try:
        whole = json.loads(text)
    except ValueError:
        whole = None
    if isinstance(whole, dict) and not {*NAMES} & whole.keys():
        yield from ((str(name), value) for name, value in cast(Json, whole).items())
    elif isinstance(whole, list):
        yield from ((str(i), value) for i, value in enumerate(cast(list[Json], whole)))
    elif isinstance(whole, dict):
        yield "0", cast(Json, whole)
    else:
        for number, line in enumerate(text.splitlines(), 1):
            if not line.strip():
                continue
            try:
                yield f"line {number}", msgspec.json.decode(line, type=Json)
            except msgspec.DecodeError as error:
                raise ConfigError(f"{path}, line {number}: {error}. Fix: write each line as one JSON object") from None


def _known(message: Any) -> Json:
    """Some programs write the id of the one call a result answers as a list."""
    ids = message.get("tool_call_ids")
    return message | {"tool_call_id": ids[0]} if ids and len(ids) == 1 and message.get("role") == "tool" else message
