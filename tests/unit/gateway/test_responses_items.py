"""Items of the responses API, from what a model said and back, without a gateway: reasoning in particular."""

import json
from typing import Any

import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from strop.gateway.dialects.base import AnswerInfo, ChoiceDone, Delta, ModelRequest, SampledToken, ToolCall
from strop.gateway.dialects.responses import Responses
from strop.gateway.dialects.responses_items import read_input

ANSWER = AnswerInfo(id="r1/1/4", model="tiny", created=7, prompt_tokens=5, response_tokens=9, reasoning_tokens=3)
CALL = ToolCall(0, "c1", "calculator", {"expression": "é"})
OTHER = ToolCall(1, "c2", "calculator", {})
TOKENS = tuple(SampledToken(text, -0.5, list(text.encode())) for text in ("a", "b", "c", "d"))
EVENT: Any = TypeAdapter(ResponseStreamEvent)


def told(stream: Any, deltas: list[Delta], done: ChoiceDone) -> list[Any]:
    data = stream.opening(ANSWER) + b"".join(stream.delta(ANSWER, delta) for delta in deltas)
    data += stream.closing(ANSWER, [done])
    bodies = [json.loads(part.partition(b"data: ")[2]) for part in data.split(b"\n\n") if part]
    for body in bodies:
        EVENT.validate_python(body)
    return bodies


THINKS_AND_CALLS = [
    Delta(reasoning="Let "),
    Delta(reasoning="me."),
    Delta(text="So: "),
    Delta(text="", calls=(CALL,)),
    Delta(text="there.", calls=(OTHER,)),
]


@pytest.mark.parametrize(
    "deltas",
    [
        THINKS_AND_CALLS,
        [Delta(reasoning="Let me."), Delta(calls=(CALL,))],
        [Delta(reasoning="Let me."), Delta(text="yes")],
        [Delta(reasoning="Let me.", text="yes", calls=(CALL,))],
        [Delta(text="Hm."), Delta(reasoning="Late.")],
        [Delta(calls=(CALL,)), Delta(text="behind")],
        [Delta(reasoning="cut")],
        [],
        [Delta(tokens=TOKENS[:1], reasoning="x"), Delta(tokens=TOKENS[1:3], text="y"), Delta(tokens=TOKENS[3:])],
    ],
)
@pytest.mark.parametrize("finish", ["stop", "length"])
def test_events_add_up_to_the_response(deltas: list[Delta], finish: Any) -> None:
    done = ChoiceDone(
        choice=0,
        reasoning="".join(delta.reasoning for delta in deltas),
        text="".join(delta.text for delta in deltas),
        calls=tuple(call for delta in deltas for call in delta.calls),
        tokens=tuple(token for delta in deltas for token in delta.tokens),
        finish=finish,
    )
    request = ModelRequest(messages=[{"role": "user", "content": "hi"}], logprobs=bool(done.tokens))
    whole = json.loads(Responses().write(ANSWER, [done], request))
    Response.model_validate(whole)
    events = told(Responses().stream(request), deltas, done)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert events[-1]["response"] == whole
    items: dict[str, Any] = {}
    for event in events:  # as a client without the last event would put it together
        if event["type"] == "response.output_item.added":
            items[event["item"]["id"]] = event["item"]
        elif event["type"] == "response.content_part.added":
            items[event["item_id"]]["content"].append(event["part"])
        elif event["type"].endswith("_text.delta"):
            items[event["item_id"]]["content"][event["content_index"]]["text"] += event["delta"]
            if event["type"] == "response.output_text.delta":
                items[event["item_id"]]["content"][0]["logprobs"] += event["logprobs"]
        elif event["type"] == "response.function_call_arguments.delta":
            items[event["item_id"]]["arguments"] += event["delta"]
        elif event["type"] == "response.output_item.done":
            assert items[event["item"]["id"]] | {"status": event["item"]["status"]} == event["item"]
    assert sorted(items) == sorted(item["id"] for item in whole["output"])
    kinds = [item["type"] for item in whole["output"]]
    assert kinds == sorted(kinds, key=["reasoning", "message", "function_call"].index)
    assert kinds, "an answer has an item even where nothing was said"


def test_an_answer_comes_back_as_the_one_message_it_was() -> None:
    done = ChoiceDone(choice=0, text="So.", reasoning="Let me.", calls=(CALL, OTHER), finish="tool_calls")
    output = json.loads(Responses().write(ANSWER, [done], ModelRequest()))["output"]
    assert [item["type"] for item in output] == ["reasoning", "message", "function_call", "function_call"]
    assert output[0]["content"] == [{"type": "reasoning_text", "text": "Let me."}]
    message = {
        "role": "assistant",
        "content": "So.",
        "turn": "r1/1/4",
        "reasoning_content": "Let me.",
        "tool_calls": [
            {"id": "c1", "type": "function", "function": {"name": "calculator", "arguments": {"expression": "é"}}},
            {"id": "c2", "type": "function", "function": {"name": "calculator", "arguments": {}}},
        ],
    }
    assert read_input(output) == [message]
    assert read_input([output[2], output[3], output[0], output[1]]) == [message], "in any order, by the ids"


def test_two_answers_in_a_row_stay_two() -> None:
    """A model that thought and was cut off, asked again at once: nothing but the ids tells whose words are whose."""
    thought = ChoiceDone(choice=0, text="", reasoning="Let me.", finish="length")
    said = ChoiceDone(choice=0, text="So.", finish="stop")
    first = json.loads(Responses().write(ANSWER, [thought], ModelRequest()))
    assert (first["status"], first["output"][0]["status"]) == ("incomplete", "incomplete")
    after = AnswerInfo(id="r1/1/5", model="tiny", created=8, prompt_tokens=5)
    second = json.loads(Responses().write(after, [said], ModelRequest()))
    assert read_input(first["output"] + second["output"]) == [
        {"role": "assistant", "content": "", "turn": "r1/1/4", "reasoning_content": "Let me."},
        {"role": "assistant", "content": "So.", "turn": "r1/1/5"},
    ]
