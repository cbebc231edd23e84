"""Conversations of a file, in the shapes that training files have; and a few of our own, which chat templates are
checked with.

    {"messages": [...], "tools": [...]}                       OpenAI's fine-tuning files, TRL
    {"messages": [..., {"role": "assistant", "weight": 0}]}   an answer that is read and not learnt
    {"prompt": [...], "completion": [...]}                    TRL: answers in the prompt are read and not learnt
    {"prompt": [...], "chosen": [...], "rejected": [...]}     TRL's preferences: two conversations, rewarded 1 and 0

Beside these a line may have an `id`, and a `reward`: a number, or numbers by name. Arguments of calls may be JSON or
the text of it, and calls without ids are answered in their order.
"""

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
WRITE = "write messages as {'role': 'user', 'content': 'text'}, as OpenAI's API has them"
DEEP = "it has too many brackets within each other"
ROLES = ("system", "developer", "user", "assistant", "tool")
PARTS = ("prompt", "completion", "chosen", "rejected")
"""What its parts are called where there are several."""


class Transcript(Struct, frozen=True, kw_only=True):
    """`messages` are plain (see `ModelRequest`); `id` says where it stands in its file, `task` what it is called there,
    or else its place. `pair`: it is one of the two of its line, chosen or rejected. `unweighted` are the places of
    answers that carry no loss."""

    id: str
    messages: list[Json]
    tools: list[Json] | None = None
    task: str = ""
    pair: bool = False
    unweighted: frozenset[int] = frozenset()
    rewards: dict[str, float] = {}


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
    """Conversations of a file: JSON lines, or one JSON document that holds such objects; `traj` and `history` may stand
    for `messages`."""
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}. Fix: give a readable file of UTF-8 text") from None
    found: list[Transcript] = []
    for where, raw in _objects(text, path):
        record = cast(Json, raw) if isinstance(raw, dict) else {}
        try:
            found += [_read(record, where, *told) for told in _split_record(record)]
        except (ApiError, ValueError, RecursionError, msgspec.MsgspecError) as error:
            why = DEEP if isinstance(error, RecursionError) else str(error).rstrip(".")
            fix = "" if ". Fix: " in why else f". Fix: {WRITE}"
            raise ConfigError(f"{path}, {where}: {why}{fix}") from None
    return found


def _split_record(record: Json) -> list[tuple[list[Any], list[Any], Any]]:
    """The conversations of one object, each as what is only read, what is learnt, and its reward."""
    messages = next((record[name] for name in NAMES if isinstance(record.get(name), list)), None)
    if messages is not None:
        return [([], messages, record.get("reward"))]
    parts: dict[str, Any] = {name: record[name] for name in PARTS if name in record}
    if len(parts) < 2:
        raise ValueError("no list of messages. Fix: write each line as an object with `messages`")
    for name, part in parts.items():
        if not isinstance(part, list):
            raise ValueError(f"{name} is not a list of messages. Fix: write it as [{{'role': ..., 'content': ...}}]")
    prompt = parts.get("prompt", [])
    if "completion" in parts:
        return [(prompt, parts["completion"], record.get("reward"))]
    if not {"chosen", "rejected"} <= parts.keys():
        raise ValueError("it has one of chosen and rejected. Fix: give both, or `messages`")
    return [(prompt, parts["chosen"], 1.0), (prompt, parts["rejected"], 0.0)]


def _read(record: Json, where: str, prompt: list[Any], learnt: list[Any], reward: Any) -> Transcript:
    _refuse_shapes([*prompt, *learnt])
    messages, tools = _name_calls([*prompt, *learnt]), record.get("tools")
    if isinstance(tools, str):
        try:
            tools = json.loads(tools)
        except ValueError:
            raise ValueError("tools is a text that is not JSON. Fix: write it as a list") from None
    if tools is not None and not isinstance(tools, list):
        raise ValueError("tools is not a list. Fix: write each as {'type': 'function', 'function': {...}}")
    rewards = cast(
        "dict[Any, Any]", {} if reward is None else reward if isinstance(reward, dict) else {"reward": reward}
    )
    unweighted = {
        at
        for at, message in enumerate(messages)
        if message.get("role") == "assistant" and (at < len(prompt) or _is_unweighted(message))
    }
    return Transcript(
        id=where,
        messages=read_messages([msgspec.json.encode(message) for message in messages]),
        tools=cast("list[Json] | None", tools) or None,
        task=str(record.get("id", where)),
        pair="chosen" in record and not any(isinstance(record.get(name), list) for name in NAMES),
        unweighted=frozenset(unweighted),
        rewards={str(name): _read_reward(value) for name, value in rewards.items()},
    )


def _read_reward(value: Any) -> float:
    if isinstance(value, bool | int | float):
        try:
            return float(value)
        except OverflowError:
            raise ValueError("reward is too large a number. Fix: write one that fits a float") from None
    raise ValueError(f"reward is {_show(value)}, not a number. Fix: write a number, or numbers by name")


def _refuse_shapes(messages: list[Any]) -> None:
    """Raises `ValueError` for what is not shaped like messages at all; the rest is said where they are read."""
    for at, message in enumerate(messages):
        if not isinstance(message, dict):
            raise ValueError(f"messages[{at}] is {_show(message)}, not an object. Fix: {WRITE}")
        role, calls = cast(Json, message).get("role"), cast(Json, message).get("tool_calls")
        if role not in ROLES:
            raise ValueError(f"messages[{at}] has role {_show(role)}. Fix: write one of {', '.join(ROLES)}")
        fine = calls is None or isinstance(calls, list)
        for call in cast("list[Any]", calls or []) if fine else ():
            fine = fine and isinstance(call, dict) and isinstance(cast(Json, call).get("function"), dict)
        if not fine:
            raise ValueError(
                f"messages[{at}].tool_calls is not a list of calls. Fix: write each as {{'function': {{'name': ..., "
                "'arguments': ...}}"
            )


def _show(value: Any) -> str:
    return repr(value)[:60]


def _is_unweighted(message: Json) -> bool:
    weight: Any = message.get("weight", 1)
    if weight not in (0, 1):
        raise ValueError(f"a message has weight {weight!r}. Fix: write 0 or 1")
    return weight == 0


def _name_calls(messages: list[Json]) -> list[Json]:
    """The messages with an id for every call that has none, which the results after it then answer in their order, and
    with arguments as text."""
    found: list[Json] = []
    open_calls: list[str] = []
    for message in messages:
        if calls := message.get("tool_calls"):
            made: list[Json] = []
            for call in calls:
                function = dict(call["function"])
                if not isinstance(function.get("arguments"), str | None):
                    function["arguments"] = msgspec.json.encode(function["arguments"]).decode()
                id = call.get("id") or f"call{len(found):04d}{len(made)}"
                open_calls.append(id)
                made.append({"id": id, "type": "function", "function": function})
            message = message | {"tool_calls": made}
        if message.get("role") == "tool":
            id = message.get("tool_call_id") or next(iter(message.get("tool_call_ids") or open_calls[:1]), None)
            message = message | {"tool_call_id": id}
            open_calls = [one for one in open_calls if one != id]
        found.append(message)
    return found


def _objects(text: str, path: Path) -> Iterator[tuple[str, Any]]:
    try:
        whole = json.loads(text)
    except (ValueError, RecursionError):
        whole = None
    if isinstance(whole, dict) and all(isinstance(one, dict) for one in cast(Json, whole).values()):  # by name
        yield from ((str(name), value) for name, value in cast(Json, whole).items())
    elif isinstance(whole, list):
        yield from ((str(i), value) for i, value in enumerate(cast(list[Json], whole)))
    elif isinstance(whole, dict):
        yield "line 1", cast(Json, whole)
    else:
        for number, line in enumerate(text.split("\n"), 1):  # other line ends may stand within a string
            if not line.strip():
                continue
            try:
                yield f"line {number}", msgspec.json.decode(line, type=Json)
            except (msgspec.DecodeError, RecursionError) as error:
                why = DEEP if isinstance(error, RecursionError) else error
                raise ConfigError(f"{path}, line {number}: {why}. Fix: write each line as one JSON object") from None
