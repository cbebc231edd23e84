"""Anthropic's answers, block by block: the same blocks make a whole message and a stream of events.

    thinking, text, tool_use, tool_use, ...

Calls are sent at the end of a stream, whole: a model may go on talking after one, and that belongs to the text before
it. A model that thinks once more after it has begun to talk gets a second block of thinking in a stream; in a whole
message all of its thinking is one block.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from strop.gateway.dialects.base import AnswerInfo, ApiError, ChoiceDone, Delta, Json, ToolCall

KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    529: "overloaded_error",
}
REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}

BlockKind = Literal["thinking", "text"]


def content(answer: AnswerInfo, done: ChoiceDone) -> list[Json]:
    blocks: list[Json] = []
    if done.reasoning:
        blocks.append({"type": "thinking", "thinking": done.reasoning, "signature": answer.id})
    if done.text:
        blocks.append({"type": "text", "text": done.text})
    return blocks + [_tool_use(call, call.arguments) for call in done.calls]


def stop(done: ChoiceDone) -> Json:
    """Why the answer ended. One that calls tools ended for that, whatever stopped the model's words."""
    if done.stopped_by is not None and done.finish == "stop":
        return {"stop_reason": "stop_sequence", "stop_sequence": done.stopped_by}
    return {"stop_reason": REASONS[done.finish], "stop_sequence": None}


def usage(answer: AnswerInfo) -> Json:
    """`input_tokens` are those that were not served before."""
    return {
        "input_tokens": answer.prompt_tokens - answer.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": answer.cached_tokens,
        "output_tokens": answer.response_tokens,
        "output_tokens_details": {"thinking_tokens": answer.reasoning_tokens},
    }


def error_body(refused: ApiError) -> Json:
    kind = KINDS.get(refused.status, "api_error" if refused.status >= 500 else "invalid_request_error")
    # Agents that shorten their history when it has grown too long know the occasion by these words.
    overlong = refused.code == "context_length_exceeded"
    message = f"prompt is too long: {refused.message}" if overlong else refused.message
    error: Json = {"type": kind, "message": message}
    if refused.param == "thread":  # clients that know this code send the conversation whole from then on
        error["details"] = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
    return {"type": "error", "error": error, "request_id": None}


def error_event(refused: ApiError) -> bytes:
    return _event("error", **{name: value for name, value in error_body(refused).items() if name != "type"})


class MessageEvents:
    """One message as events. A block is open until the next one begins."""

    def __init__(self) -> None:
        self._index = -1
        self._open: BlockKind | None = None

    def opening(self, answer: AnswerInfo) -> bytes:
        message: Json = {"id": answer.id, "type": "message", "role": "assistant", "model": answer.model, "content": []}
        message |= {"stop_reason": None, "stop_sequence": None, "usage": usage(answer)}
        return _event("message_start", message=message) + _event("ping")

    def delta(self, answer: AnswerInfo, delta: Delta) -> bytes:
        events = self._say(answer, "thinking", delta.reasoning) if delta.reasoning else b""
        return events + self._say(answer, "text", delta.text) if delta.text else events

    def closing(self, answer: AnswerInfo, choices: Sequence[ChoiceDone]) -> bytes:
        (done,) = choices
        events = [self._end(answer)]
        for call in done.calls:
            arguments = msgspec.json.encode(call.arguments).decode()
            events.append(self._start(_tool_use(call, {})))
            events.append(self._change({"type": "input_json_delta", "partial_json": arguments}))
            events.append(_event("content_block_stop", index=self._index))
        events.append(_event("message_delta", delta=stop(done), usage=usage(answer)))
        return b"".join([*events, _event("message_stop")])

    def error(self, refused: ApiError) -> bytes:
        return error_event(refused)

    def _say(self, answer: AnswerInfo, kind: BlockKind, text: str) -> bytes:
        events = b""
        if self._open != kind:
            events = self._end(answer)
            empty: Json = {"signature": ""} if kind == "thinking" else {}
            events += self._start({"type": kind, kind: ""} | empty)
            self._open = kind
        return events + self._change({"type": f"{kind}_delta", kind: text})

    def _end(self, answer: AnswerInfo) -> bytes:
        """Close the block that is open, if one is."""
        kind, self._open = self._open, None
        if kind is None:
            return b""
        signed = self._change({"type": "signature_delta", "signature": answer.id}) if kind == "thinking" else b""
        return signed + _event("content_block_stop", index=self._index)

    def _start(self, block: Json) -> bytes:
        self._index += 1
        return _event("content_block_start", index=self._index, content_block=block)

    def _change(self, delta: Json) -> bytes:
        return _event("content_block_delta", index=self._index, delta=delta)


def _tool_use(call: ToolCall, arguments: Json) -> Json:
    return {"type": "tool_use", "id": call.id, "name": call.name, "input": arguments}


def _event(kind: str, **fields: Any) -> bytes:
    return b"event: %s\ndata: %s\n\n" % (kind.encode(), msgspec.json.encode({"type": kind} | fields))
