"""What coding agents send beside a conversation: Codex's namespaces and metadata, Claude Code's newer fields."""

import json
from typing import Any

import anthropic
import openai
import pytest

from tests.integration.gateway.stand import Stand, fetch

CALL = '<tool_call>\n{"name": "mcp__files__read", "arguments": {"path": "a.txt"}}\n</tool_call>'
READ = {
    "type": "function",
    "name": "read",
    "description": "Reads a file.",
    "strict": False,
    "defer_loading": True,
    "parameters": {"type": "object", "properties": {"path": {"type": "string"}}},
}
FILES = {"type": "namespace", "name": "mcp__files", "description": "Files of the project.", "tools": [READ]}
SHELL = {"type": "function", "name": "shell", "description": "Runs a command.", "strict": False, "parameters": None}
CODEX: Any = {
    "model": "m",
    "instructions": "You are a coding agent.",
    "input": [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "What is in a.txt?"}]}],
    "tools": [SHELL, FILES, {"type": "web_search", "external_web_access": False}],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "reasoning": {"effort": "medium", "summary": "auto"},
    "store": False,
    "stream": True,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "0199",
    "client_metadata": {"x-codex-installation-id": "7b", "nothing": None},
    "text": {"verbosity": "medium"},
}


async def create(client: openai.AsyncOpenAI, body: Any) -> Any:
    own = {"client_metadata": body["client_metadata"]}  # which this client has no name for
    return await client.responses.create(
        **{name: value for name, value in body.items() if name not in own}, extra_body=own
    )


async def respond(client: openai.AsyncOpenAI, body: Any) -> Any:
    """The response that a stream ends with, which its events must agree with."""
    items: list[Any] = []
    async for event in await create(client, body):
        if event.type == "response.output_item.done":
            items.append(event.item)
        elif event.type == "response.completed":
            assert event.response.output == items
            return event.response
    raise AssertionError("the stream ended early")


async def test_a_request_of_codex_and_the_call_that_comes_back(stand: Stand) -> None:
    stand.script(CALL, "It is empty.", "Bye.")
    attempt = await stand.attempt("r1")
    client = stand.client(attempt)
    said = await respond(client, CODEX)
    (call,) = said.output
    assert (call.type, call.namespace, call.name, json.loads(call.arguments)) == (
        "function_call",
        "mcp__files",
        "read",
        {"path": "a.txt"},
    )
    assert [tool.type for tool in said.tools] == ["function", "namespace", "web_search"]  # as it was sent
    back = {key: value for key, value in call.to_dict().items() if key not in ("id", "status")}  # Codex keeps no ids
    output = {"type": "function_call_output", "call_id": call.call_id, "output": ""}
    assert (await respond(client, CODEX | {"input": [*CODEX["input"], back, output]})).output_text == "It is empty."

    first, second = await stand.turns(attempt)
    assert (second.parent, second.branch, second.shared) == (first.id, None, len(first.ids))
    assert second.prompt_ids[: second.shared] == first.ids
    shell, read = [tool["function"] for tool in first.requested["tools"]]
    assert (shell["name"], read["name"]) == ("shell", "mcp__files__read")
    assert read["description"] == "Files of the project.\n\nReads a file."
    assert first.requested["client_metadata"] == CODEX["client_metadata"]

    (event,) = await stand.store.events("r1")  # once, though it was sent twice
    why = "tools of type 'web_search' are run by the API's maker: the model is not shown any"
    assert (event.kind, event.data["text"]) == ("message", why)
    assert [turn.requested["dropped"] for turn in (first, second)] == [[why], [why]]
    _, health = await fetch(f"{stand.server.url}/health")
    assert health["counts"]["dropped"] == 2


async def test_a_call_out_of_a_namespace_without_streaming(stand: Stand) -> None:
    stand.script(CALL, "ok")
    attempt = await stand.attempt("r1")
    client = stand.client(attempt)
    first = await create(client, CODEX | {"stream": False})
    assert first.output[0].to_dict()["namespace"] == "mcp__files"
    output: Any = {"type": "function_call_output", "call_id": first.output[0].to_dict()["call_id"], "output": "x"}
    await client.responses.create(model="m", tools=CODEX["tools"], input=[output], previous_response_id=first.id)
    assert len(await stand.turns(attempt)) == 2


@pytest.mark.parametrize(
    ("tools", "param", "words"),
    [
        ([FILES, READ | {"name": "mcp__files__read"}], "tools", "two that the model would be shown as"),
        ([FILES, FILES | {"name": "mcp__files__"}], "tools", "two that the model would be shown as"),
        ([FILES | {"tools": [READ | {"type": "local_shell"}]}], "tools[0].tools[0].type", "is not served"),
        ([{"type": "custom", "name": "x", "format": {"type": "lark"}}], "tools[0]", "write a custom tool as"),
        ([{"type": "custom"}], "tools[0]", "write a custom tool as"),
        ([{"type": "namespace", "name": "x"}], "tools[0]", "write a namespace as"),
        ([{"type": "local_shell"}], "tools[0].type", "'local_shell' is not served. Fix: use 'function' or 'custom'"),
        ([{"type": ["web_search"]}], "tools[0].type", "is not served"),
    ],
)
async def test_tools_that_cannot_be_shown(stand: Stand, tools: Any, param: str, words: str) -> None:
    attempt = await stand.attempt("r1")
    status, answer = await fetch(stand.url(attempt) + "/responses", CODEX | {"tools": tools}, key=attempt.key)
    assert (status, answer["error"]["param"]) == (400, param)
    assert words in answer["error"]["message"]
    assert "Fix: " in answer["error"]["message"]


GRAMMAR = {"type": "grammar", "syntax": "lark", "definition": 'start: "go" | "stop"'}
EXEC = {"type": "custom", "name": "exec", "description": "Runs JavaScript.", "format": GRAMMAR}
OWN_MODEL: Any = {name: value for name, value in CODEX.items() if name not in ("tools", "instructions")} | {
    "reasoning": {"effort": "low", "context": "all_turns"},
    "input": [
        {
            "type": "additional_tools",
            "id": "at_01",
            "role": "developer",
            "tools": [{"type": "namespace", "name": "functions", "tools": [EXEC]}, EXEC | {"name": "patch"}, SHELL],
        },
        *CODEX["input"],
    ],
}
"""What Codex sends for a model of its maker's: tools among the items, and one whose calls are text."""


@pytest.mark.parametrize("stream", [True, False])
async def test_a_custom_tool_and_the_text_that_comes_back(stand: Stand, stream: bool) -> None:
    calls = [("functions__exec", {"input": "go"}), ("patch", {"input": "stop"}), ("patch", {"path": "a"})]
    written = [json.dumps({"name": name, "arguments": arguments}) for name, arguments in calls]
    stand.script("\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in written), "It is done.")
    attempt = await stand.attempt("r1")
    client = stand.client(attempt)
    said: Any = await respond(client, OWN_MODEL) if stream else await create(client, OWN_MODEL | {"stream": False})
    first, second, odd = [item.to_dict() for item in said.output]
    assert (first["type"], first["namespace"], first["name"], first["input"]) == (
        "custom_tool_call", "functions", "exec", "go",
    )  # fmt: skip
    assert (second["type"], second["name"], second["input"]) == ("custom_tool_call", "patch", "stop")
    assert json.loads(odd["input"]) == {"path": "a"}  # all that was written, where it is not the one argument

    back = [{key: value for key, value in item.items() if key not in ("id", "status")} for item in (first, second, odd)]
    back[2]["input"] = "x"  # as if it had said another thing
    results = [{"type": "custom_tool_call_output", "call_id": item["call_id"], "output": "ok"} for item in back]
    more = OWN_MODEL | {"stream": False, "input": [*OWN_MODEL["input"], *back, *results]}
    assert (await create(client, more)).output_text == "It is done."
    turn, edited = await stand.turns(attempt)
    assert edited.branch == "edited_history"
    shown, _, shell = [tool["function"] for tool in turn.requested["tools"]]
    assert (shown["name"], shell["name"]) == ("functions__exec", "shell")
    assert shown["parameters"]["properties"].keys() == {"input"}
    assert shown["description"].startswith("Runs JavaScript.")
    assert GRAMMAR["definition"] in shown["description"]


@pytest.mark.parametrize("named", [False, True])
async def test_custom_calls_are_gone_on_from_exactly(stand: Stand, named: bool) -> None:
    call = json.dumps({"name": "functions__exec", "arguments": {"input": 'text("é\\n")'}})
    stand.script(f"Looking.\n<tool_call>\n{call}\n</tool_call>", "It is done.")
    attempt = await stand.attempt("r1")
    client = stand.client(attempt)
    said = await respond(client, OWN_MODEL)
    back = [{key: value for key, value in item.to_dict().items() if key != "status"} for item in said.output]
    if named:  # and not sent
        back = [{"type": "item_reference", "id": item["id"]} for item in back]
    result = {"type": "custom_tool_call_output", "call_id": said.output[-1].to_dict()["call_id"], "output": [
        {"type": "input_text", "text": "é"},
    ]}  # fmt: skip
    await respond(client, OWN_MODEL | {"input": [*OWN_MODEL["input"], *back, result]})
    first, second = await stand.turns(attempt)
    assert (second.parent, second.branch, second.shared) == (first.id, None, len(first.ids))


# -- Claude Code -------------------------------------------------------------------------------------------------------

CLAUDE: Any = {
    "model": "m",
    "max_tokens": 100,
    "messages": [{"role": "user", "content": "hi"}],
    "thinking": {"type": "adaptive", "display": "omitted"},
    "tools": [
        {"type": "tool_search_tool_regex_20251119", "name": "tool_search_tool_regex"},
        {"name": "look", "input_schema": {"type": "object", "properties": {}}, "defer_loading": True},
    ],
}


async def test_what_claude_code_sends_and_changes_nothing(stand: Stand) -> None:
    stand.script("fine")
    attempt = await stand.attempt("r1")
    base = stand.url(attempt).removesuffix("/v1")
    async with anthropic.AsyncAnthropic(base_url=base, api_key=attempt.key, max_retries=0) as client:
        answer: Any = await client.messages.create(**CLAUDE)
    assert answer.content[-1].text == "fine"
    (turn,) = await stand.turns(attempt)
    assert [tool["function"]["name"] for tool in turn.requested["tools"]] == ["look"]
    assert turn.requested["thinking"] == CLAUDE["thinking"]
    (event,) = await stand.store.events("r1")
    assert "'tool_search_tool_...' has nothing to search for" in event.data["text"]


async def test_a_thread_is_refused_by_name(stand: Stand) -> None:
    """So that clients which try it send the conversation whole."""
    attempt = await stand.attempt("r1")
    body = CLAUDE | {"thread": {"type": "create"}}
    status, answer = await fetch(stand.url(attempt) + "/messages", body, key=attempt.key)
    assert (status, answer["error"]["type"]) == (400, "invalid_request_error")
    assert "unsupported parameter 'thread'" in answer["error"]["message"]
    assert answer["error"]["details"] == {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
    assert stand.engine.calls == []


EDIT: Any = {
    "name": "Edit",
    "input_schema": {
        "type": "object",
        "properties": {
            "file": {"type": "string"},
            "replace_all": {"type": "boolean", "default": False},
            "lines": {"type": "array", "default": []},
        },
        "required": ["file"],
    },
}


@pytest.mark.parametrize(
    ("said", "back", "branch"),
    [
        ({"file": "a"}, {"file": "a", "replace_all": False, "lines": []}, None),
        ({"file": "a", "replace_all": False}, {"file": "a"}, None),
        ({"file": "a", "replace_all": True}, {"file": "a"}, "edited_history"),
        ({"file": "a"}, {"file": "a", "replace_all": 0}, "edited_history"),
        ({"file": "a"}, {"file": "a", "encoding": "utf-8"}, "edited_history"),
        ({"file": "a"}, {"file": "b", "replace_all": False}, "edited_history"),
    ],
)
async def test_defaults_that_claude_code_writes_into_calls(stand: Stand, said: Any, back: Any, branch: Any) -> None:
    """It sends an Edit back with `replace_all: false`, which the schema says is the same: no branch, and the model sees
    the call as it wrote it."""
    call = "<tool_call>\n" + json.dumps({"name": "Edit", "arguments": said}) + "\n</tool_call>"
    stand.script(call, call, "done")
    attempt = await stand.attempt("r1")
    base = stand.url(attempt).removesuffix("/v1")
    messages: list[Any] = [{"role": "user", "content": "Edit a."}]
    async with anthropic.AsyncAnthropic(base_url=base, api_key=attempt.key, max_retries=0) as client:
        for _ in range(3):
            answer: Any = await client.messages.create(model="m", max_tokens=100, messages=messages, tools=[EDIT])
            if answer.stop_reason == "tool_use":
                block = answer.content[-1]
                result = {"type": "tool_result", "tool_use_id": block.id, "content": "ok"}
                messages.append({"role": "assistant", "content": [block.to_dict() | {"input": back}]})
                messages.append({"role": "user", "content": [result]})
    first, second, third = await stand.turns(attempt)
    assert [turn.branch for turn in (first, second, third)] == [None, branch, branch]
    if branch is None:
        assert (second.parent, third.parent) == (first.id, second.id)
        assert third.prompt_ids[: third.shared] == second.ids
        assert second.prompt_ids[: second.shared] == first.ids
