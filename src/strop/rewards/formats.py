"""Whether an answer has the form that was asked for, and whether it is too long. Nothing here looks at what it says."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, cast

from strop.rewards.verdict import Verdict


def has_format(text: str, wanted: str | re.Pattern[str] | Sequence[str]) -> bool:
    """Whether the whole text has a form: a regular expression (in which a dot is any character), or the names of tags
    that follow each other, each once, with nothing but white space between them.

    >>> has_format("<think>2 + 2</think> <answer>4</answer>", ["think", "answer"])
    True
    >>> has_format("<answer>4</answer> <answer>5</answer>", ["answer"]), has_format("4", r"\\d+")
    (False, True)
    """
    if isinstance(wanted, str | re.Pattern):
        return re.compile(wanted, re.DOTALL if isinstance(wanted, str) else 0).fullmatch(text) is not None
    for name in wanted:
        text = text.lstrip()
        opened, closed = f"<{name}>", f"</{name}>"
        if not text.startswith(opened) or text.count(opened) != 1 or text.count(closed) != 1:
            return False
        text = text.partition(closed)[2]
    return not text.strip()


def soft_overlong(length: int, limit: int, buffer: int) -> float:
    """DAPO's penalty: 0 up to `limit - buffer`, from there in a straight line down to -1 at `limit` and beyond.
    Lengths are in whatever unit `limit` is in, mostly tokens.

    >>> [soft_overlong(n, limit=100, buffer=20) for n in (50, 80, 90, 100, 500)]
    [0.0, 0.0, -0.5, -1.0, -1.0]
    """
    if not 0 < buffer <= limit:
        raise ValueError(f"buffer is {buffer} and limit {limit}. Fix: give a buffer above 0 and not above limit")
    return min(0.0, max(-1.0, (limit - buffer - length) / buffer))


def valid_tool_calls(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()) -> Verdict:
    """Whether all tool calls of a conversation, in the form of OpenAI's chat completions, are well formed: an id of
    their own, a name, a JSON object as arguments, and an answer before the model speaks again (the last message's
    calls need none). With `tools` also that the name is among them, that nothing required is missing and that no
    argument is unknown. A conversation without calls is valid.

    Left out: the types of arguments.

    >>> call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1'}}
    >>> valid_tool_calls([{"role": "assistant", "tool_calls": [call]}]).why
    'the arguments of add are not a JSON object'
    """
    known = {tool["function"]["name"]: tool["function"].get("parameters", {}) for tool in tools}
    seen, waiting = set[str](), set[str]()
    for message in messages:
        if message.get("role") == "tool":
            id = message.get("tool_call_id")
            if id not in waiting:
                return Verdict(0.0, f"there is a tool's answer to {id!r}, which is not an open call")
            waiting.discard(id)
            continue
        if waiting:
            return Verdict(0.0, f"the call {min(waiting)!r} was not answered before the next message")
        for call in message.get("tool_calls") or ():
            if wrong := _wrong(call, known, seen):
                return Verdict(0.0, wrong)
            waiting.add(call["id"])
            seen.add(call["id"])
    return Verdict(1.0)


def _wrong(call: Mapping[str, Any], known: Mapping[str, Any], seen: set[str]) -> str:
    function = call.get("function")
    if call.get("type", "function") != "function" or not isinstance(function, Mapping):
        return "a call is not one of a function"
    given = cast("Mapping[str, Any]", function)
    id, name, arguments = call.get("id"), given.get("name"), _object(given.get("arguments"))
    if not isinstance(id, str) or not id or id in seen:
        return f"the id {id!r} is missing, or of two calls"
    if not isinstance(name, str) or not name:
        return f"the call {id!r} names no function"
    if arguments is None:
        return f"the arguments of {name} are not a JSON object"
    if not known:
        return ""
    if name not in known:
        return f"there is no tool {name}"
    parameters = cast("Mapping[str, Any]", known[name])
    if missing := [key for key in parameters.get("required", ()) if key not in arguments]:
        return f"{name} was called without {missing[0]}"
    if odd := [key for key in arguments if key not in parameters.get("properties", {})]:
        return f"{name} was called with {odd[0]}, which it does not take"
    return ""


def _object(arguments: Any) -> dict[str, Any] | None:
    """Arguments as the API gives them, which is text, or as some libraries do, parsed already."""
    try:
        found = json.loads(arguments) if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError):
        return None
    return cast("dict[str, Any]", found) if isinstance(found, dict) else None
