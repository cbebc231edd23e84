"""What the responses API answers with: the response object, and the events it comes as.

    response.created, response.in_progress
    output_item.added, content_part.added, reasoning_text.delta ...    as tokens arrive
    output_item.added, content_part.added, output_text.delta ...
    reasoning_text.done, content_part.done, output_item.done           at the end, once the turn is durable
    output_text.done, content_part.done, output_item.done
    output_item.added, function_call_arguments.delta, .done, output_item.done      for every call
    response.completed or response.incomplete

Items always come in the order reasoning, message, calls, whatever order the model wrote them in, and the response at
the end is the one that is given without streaming. A response's id is its turn's, and so are its items' after the `_`.

Logprobs are those of a message: one entry per sampled token of the whole answer, the one that ended it included.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import msgspec

from strop.gateway.dialects.base import (
    AnswerInfo,
    ApiError,
    ChoiceDone,
    Delta,
    Json,
    ModelRequest,
    SampledToken,
    ToolCall,
    turn_named,
)
from strop.gateway.dialects.openai import error_body

INPUT = "input"
"""The one argument that a custom tool has as a function: its calls are text."""


def turn_of(item: str | None) -> str | None:
    """The turn an item's id names, if the item was made here.

    >>> turn_of("fc1_g1.0/1/4"), turn_of("msg_689a0b"), turn_of(None)
    ('g1.0/1/4', None, None)
    """
    return turn_named((item or "").partition("_")[2])


# -- the object --------------------------------------------------------------------------------------------------------


def write(answer: AnswerInfo, done: ChoiceDone, request: ModelRequest) -> bytes:
    return msgspec.json.encode(_finish_response(answer, done, request))


def _finish_response(answer: AnswerInfo, done: ChoiceDone, request: ModelRequest) -> Json:
    cut = done.finish == "length"
    return _response(answer, request, "incomplete" if cut else "completed") | {
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "output": _output(answer.id, done, request),
        "usage": {
            "input_tokens": answer.prompt_tokens,
            "input_tokens_details": {"cached_tokens": answer.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": answer.response_tokens,
            "output_tokens_details": {"reasoning_tokens": answer.reasoning_tokens},
            "total_tokens": answer.prompt_tokens + answer.response_tokens,
        },
    }


def _response(answer: AnswerInfo, request: ModelRequest, status: str) -> Json:
    """A response nothing was said in yet."""
    defaults: Json = {
        "instructions": None,
        "previous_response_id": None,
        "tools": [],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "temperature": 1.0,
        "top_p": 1.0,
        "max_output_tokens": None,
        "metadata": {},
        "user": None,
        "store": True,
    }
    echoed: Json = request.options.get("echoed", {})
    reasoning = {"effort": None, "summary": None} | echoed.get("reasoning", {})
    return {
        "id": answer.id,
        "object": "response",
        "created_at": answer.created,
        "status": status,
        "background": False,
        "error": None,
        "incomplete_details": None,
        "model": answer.model,
        "output": [],
        **defaults,
        **echoed,
        "reasoning": reasoning,
        "service_tier": "default",
        "text": {"format": {"type": "text"}, "verbosity": "medium"} | echoed.get("text", {}),
        "top_logprobs": 0,
        "truncation": "disabled",
        "usage": None,
    }


def _output(turn: str, done: ChoiceDone, request: ModelRequest) -> list[Json]:
    """An answer as items; a message stands even where nothing was said."""
    cut = done.finish == "length"
    items: list[Json] = []
    if done.reasoning:
        only = not (done.text or done.calls)
        items.append(_reasoning(turn, "incomplete" if cut and only else "completed", done.reasoning))
    if done.text or not items + list(done.calls):
        part = _text_part(done.text, _logprobs(done.tokens) if request.logprobs else [])
        items.append(_message(turn, "incomplete" if cut else "completed", part))
    return items + [_function_call(turn, call, request) for call in done.calls]


def _reasoning(turn: str, status: str, text: str | None = None) -> Json:
    content = [] if text is None else [{"type": "reasoning_text", "text": text}]
    return {"id": f"rs_{turn}", "type": "reasoning", "status": status, "summary": [], "content": content}


def _message(turn: str, status: str, part: Json | None = None) -> Json:
    content = [] if part is None else [part]
    return {"id": f"msg_{turn}", "type": "message", "status": status, "role": "assistant", "content": content}


def _function_call(turn: str, call: ToolCall, request: ModelRequest) -> Json:
    namespace, name = request.options.get("namespaces", {}).get(call.name, (None, call.name))
    if call.name in request.options.get("custom", ()):
        item = {
            "id": f"ctc{call.position}_{turn}",
            "type": "custom_tool_call",
            "status": "completed",
            "call_id": call.id,
            "name": name,
            "input": _input(call),
        }
        return item if namespace is None else item | {"namespace": namespace}
    item = {
        "id": f"fc{call.position}_{turn}",
        "type": "function_call",
        "status": "completed",
        "call_id": call.id,
        "name": name,
        "arguments": _arguments(call),
    }
    return item if namespace is None else item | {"namespace": namespace}


def _text_part(text: str, logprobs: list[Json]) -> Json:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def _logprobs(tokens: Sequence[SampledToken]) -> list[Json]:
    return [{"token": t.token, "logprob": t.logprob, "bytes": t.bytes or [], "top_logprobs": []} for t in tokens]


def _arguments(call: ToolCall) -> str:
    return json.dumps(call.arguments, ensure_ascii=False)


def _input(call: ToolCall) -> str:
    """The text of a custom call; all that was written where it is not the one argument."""
    text = call.arguments.get(INPUT) if len(call.arguments) == 1 else None
    return text if isinstance(text, str) else _arguments(call)


# -- the events --------------------------------------------------------------------------------------------------------


class ResponseEvents:
    """One response on its way. Calls wait for the end: only then is it certain that no text comes before them."""

    def __init__(self, request: ModelRequest) -> None:
        self._request = request
        self._answer: AnswerInfo | None = None
        self._number = 0
        self._open: dict[str, int] = {}  # items begun: their ids, with their places in the output
        self._pending: list[SampledToken] = []  # tokens of which no event has told yet

    def opening(self, answer: AnswerInfo) -> bytes:
        self._answer = answer
        response = _response(answer, self._request, "in_progress")
        return self._event("response.created", response=response) + self._event(
            "response.in_progress", response=response
        )

    def delta(self, answer: AnswerInfo, delta: Delta) -> bytes:
        events = b""
        self._pending += delta.tokens
        if delta.reasoning:
            item = _reasoning(answer.id, "in_progress")
            events += self._begin(item, {"type": "reasoning_text", "text": ""})
            events += self._item("response.reasoning_text.delta", item, content_index=0, delta=delta.reasoning)
        message = _message(answer.id, "in_progress")
        if delta.text or (self._pending and message["id"] in self._open):
            events += self._begin(message, _text_part("", []))
            events += self._text_delta(message, delta.text)
        return events

    def closing(self, answer: AnswerInfo, choices: Sequence[ChoiceDone]) -> bytes:
        response = _finish_response(answer, choices[0], self._request)
        events = b""
        for item in response["output"]:
            events += self._call(item) if "call_id" in item else self._end(item)
            events += self._event("response.output_item.done", output_index=self._open[item["id"]], item=item)
        return events + self._event(f"response.{response['status']}", response=response)

    def error(self, refused: ApiError) -> bytes:
        """What failed, and then the error itself, which makes OpenAI's client raise it."""
        assert self._answer is not None, "an error before the stream began has a status"
        failed = _response(self._answer, self._request, "failed")
        failed["error"] = {"code": "server_error", "message": refused.message}
        flat = {"code": refused.code, "message": refused.message, "param": refused.param}
        return self._event("response.failed", response=failed) + self._event("error", **flat, **error_body(refused))

    def _call(self, item: Json) -> bytes:
        """A call comes whole, in all the events one that is written bit by bit has."""
        if item["type"] == "custom_tool_call":
            events = self._begin(item | {"status": "in_progress", "input": ""})
            events += self._item("response.custom_tool_call_input.delta", item, delta=item["input"])
            return events + self._item("response.custom_tool_call_input.done", item, input=item["input"])
        events = self._begin(item | {"status": "in_progress", "arguments": ""})
        events += self._item("response.function_call_arguments.delta", item, delta=item["arguments"])
        return events + self._item(
            "response.function_call_arguments.done", item, name=item["name"], arguments=item["arguments"]
        )

    def _end(self, item: Json) -> bytes:
        """The last words about reasoning or a message, which nothing was told of if nothing was said."""
        part: Json = item["content"][0]
        text = part["text"]
        if item["type"] == "reasoning":
            events = self._item("response.reasoning_text.done", item, content_index=0, text=text)
        else:
            events = self._begin(item | {"status": "in_progress", "content": []}, _text_part("", []))
            if self._pending:
                events += self._text_delta(item, "")
            events += self._item(
                "response.output_text.done", item, content_index=0, text=text, logprobs=part["logprobs"]
            )
        return events + self._item("response.content_part.done", item, content_index=0, part=part)

    def _begin(self, item: Json, part: Json | None = None) -> bytes:
        """Tell of an item, and of its only part, the first time it comes up."""
        if item["id"] in self._open:
            return b""
        place = self._open[item["id"]] = len(self._open)
        events = self._event("response.output_item.added", output_index=place, item=item)
        if part is None:
            return events
        return events + self._item("response.content_part.added", item, content_index=0, part=part)

    def _text_delta(self, message: Json, text: str) -> bytes:
        tokens, self._pending = self._pending, []
        return self._item(
            "response.output_text.delta", message, content_index=0, delta=text, logprobs=_logprobs(tokens)
        )

    def _item(self, kind: str, item: Json, **fields: Any) -> bytes:
        return self._event(kind, item_id=item["id"], output_index=self._open[item["id"]], **fields)

    def _event(self, kind: str, **fields: Any) -> bytes:
        body = {"type": kind, "sequence_number": self._number, **fields}
        self._number += 1
        return b"event: " + kind.encode() + b"\ndata: " + msgspec.json.encode(body) + b"\n\n"
