"""What agents say in the gateway's benchmark, and what the mock model server answers.

A conversation is a system prompt, a question, and then pairs of an answer (one tool call) and its result, so requests
have 2, 4, 6, ... messages. `gateway_load.c` says what the bytes 1, 2 and 3 stand for: the number of the rollout, the
calls it was answered, and the id of the first of them.
"""

from __future__ import annotations

import json
from typing import Any

Json = dict[str, Any]

NUMBER, CALLS, ID = "\x01", "\x02", "\x03"
NUM_TOKENS = 64
"""How many tokens an answer has."""

SYSTEM = (
    "You are a travel clerk. Use the tools to look up trains, prices and seats before you answer, one call at a time. "
    "Never guess a departure or a price; if a tool returns nothing, say so and try another day or another station. "
    "When everything has been found, answer in one sentence with the train, the departure, the seat and the price."
)
QUESTION = (
    "Request {}: I have to be in Vienna before noon on Thursday, coming from Munich, with a seat at the window and a "
    "table if there is one. What does it cost, and when do I have to be at the station?"
)
RESULT = (
    '{"trains": [{"number": "RJX 61", "from": "Munich Hbf", "departure": "05:34", "to": "Wien Hbf", "arrival": "09:30",'
    ' "seats": 41, "price": 64.9}, {"number": "RJX 63", "from": "Munich Hbf", "departure": "07:34", "to": "Wien Hbf",'
    ' "arrival": "11:30", "seats": 3, "price": 89.9}], "page": '
)


def _tool(name: str, description: str, **properties: str) -> Json:
    fields = {key: {"type": "string", "description": text} for key, text in properties.items()}
    parameters = {"type": "object", "properties": fields, "required": list(fields)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


TOOLS = [
    _tool("find_trains", "Trains between two stations.", origin="station", destination="station", day="such as Thu"),
    _tool("seat_map", "Free seats of a train.", train="its number", wagon="its number"),
    _tool("price", "What a seat costs.", train="its number", seat="such as 21A"),
]
TOOL = "find_trains"
ARGUMENTS = {"origin": "Munich Hbf", "destination": "Wien Hbf", "day": "Thu"}


def requests(num_turns: int, model: str = "tiny") -> bytes:
    """A conversation as `gateway_load` reads it: one body per line."""
    return b"".join(_body(turn, model) + b"\n" for turn in range(num_turns))


def _body(turn: int, model: str) -> bytes:
    messages: list[Json] = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": QUESTION.format("NUMBER")},
    ]
    for past in range(turn):
        messages.append({"role": "assistant", "content": None, "tool_calls": f"CALLS{past}."})
        messages.append({"role": "tool", "tool_call_id": f"ID{past}.", "content": f"{RESULT}{past + 1}}}"})
    body = {"model": model, "messages": messages, "tools": TOOLS, "temperature": 1.0, "logprobs": True}
    text = json.dumps(body).replace("Request NUMBER", f"Request {NUMBER}").encode()
    for past in range(turn):
        at = bytes([0x80 + past])
        text = text.replace(f'"CALLS{past}."'.encode(), CALLS.encode() + at)
        text = text.replace(f"ID{past}.".encode(), ID.encode() + at)
    return text


def answer() -> bytes:
    """The mock's answer, as vLLM gives it when asked for token ids and logprobs."""
    call = {"id": "call00001", "type": "function", "function": {"name": TOOL, "arguments": json.dumps(ARGUMENTS)}}
    words = (json.dumps({"name": TOOL, "arguments": ARGUMENTS}) * 4).split(" ")
    tokens = [{"token": f" {word}"[:8], "logprob": logprob(i)} for i, word in enumerate((words * 8)[:NUM_TOKENS])]
    ids = [(index * 7919) % 150_000 for index in range(256)]
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": None, "refusal": None, "tool_calls": [call]},
        "logprobs": {"content": [t | {"bytes": list(t["token"].encode()), "top_logprobs": []} for t in tokens]},
        "finish_reason": "tool_calls",
        "stop_reason": None,
        "token_ids": ids[:NUM_TOKENS],
    }
    usage = {"prompt_tokens": len(ids), "completion_tokens": NUM_TOKENS, "total_tokens": len(ids) + NUM_TOKENS}
    whole = {"id": "chatcmpl-1", "object": "chat.completion", "created": 1_700_000_000, "model": "tiny"}
    body = whole | {"choices": [choice], "usage": usage, "prompt_token_ids": ids}
    return json.dumps(body, separators=(",", ":")).encode()


def logprob(index: int) -> float:
    return -((index * 37) % 1000) / 500 - 0.001
