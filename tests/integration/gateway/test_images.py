"""Images are refused in one sentence in every API, wherever they stand, and counted."""

from typing import Any

import pytest

from tests.integration.gateway.stand import Stand, fetch

PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
URL: Any = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PIXEL}"}}
INPUT: Any = {"type": "input_image", "image_url": f"data:image/png;base64,{PIXEL}", "detail": "auto"}
BLOCK: Any = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PIXEL}}
HI: Any = {"role": "user", "content": "hi"}
CALL = {"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}
CALLED = [HI, {"role": "assistant", "tool_calls": [CALL]}]
USED = [HI, {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "look", "input": {}}]}]
MADE = {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"}
TEXT = {"type": "text", "text": "What is this?"}

IMAGES: dict[str, Any] = {
    "chat": ("chat/completions", {"messages": [{"role": "user", "content": [TEXT, URL]}]}),
    "chat, of a tool": (
        "chat/completions",
        {"messages": [*CALLED, {"role": "tool", "tool_call_id": "c", "content": [TEXT, URL]}]},
    ),
    "responses": ("responses", {"input": [{"role": "user", "content": [INPUT]}]}),
    "responses, of a tool": (
        "responses",
        {"input": [HI, MADE, {"type": "function_call_output", "call_id": "c", "output": [INPUT]}]},
    ),
    "responses, counted": ("responses/input_tokens", {"input": [{"role": "user", "content": [INPUT]}]}),
    "messages": ("messages", {"max_tokens": 9, "messages": [{"role": "user", "content": [TEXT, BLOCK]}]}),
    "messages, of a tool": (
        "messages",
        {
            "max_tokens": 9,
            "messages": [
                *USED,
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": [TEXT, BLOCK]}]},
            ],
        },
    ),
    "messages, counted": ("messages/count_tokens", {"messages": [{"role": "user", "content": [BLOCK]}]}),
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("where", IMAGES)
async def test_an_image(stand: Stand, where: str, stream: bool) -> None:
    stand.script("fine")
    attempt = await stand.attempt("r1")
    path, body = IMAGES[where]
    status, answer = await fetch(f"{stand.url(attempt)}/{path}", body | {"stream": stream}, key=attempt.key)
    assert (status, answer["error"]["type"]) == (400, "invalid_request_error")
    message = answer["error"]["message"]
    assert "image" in message
    assert message.count("Fix: ") == 1
    assert PIXEL not in message
    (event,) = await stand.store.events("r1")
    assert (event.kind, event.data["code"], event.data["message"]) == ("error", "unsupported_image", message)
    _, health = await fetch(f"{stand.server.url}/health")
    assert health["counts"]["refused/unsupported_image"] == 1
    assert stand.engine.calls == []
    assert await stand.turns(attempt) == []
