"""The model APIs as an OpenAPI document, as far as the gateway serves them: what is sent, what comes back, and each
API's own shape of an error. Written from the APIs' side, for the tests that hold the gateway against it."""

from typing import Any

Json = dict[str, Any]

TEXT: Json = {"type": "string"}
FLAG: Json = {"type": "boolean"}
COUNT: Json = {"type": "integer", "minimum": 1}
NULL: Json = {"type": "null"}
ANY_OBJECT: Json = {"type": "object"}
TEXTS: Json = {"type": "array", "items": {"type": "string", "minLength": 1}}


def record(required: str, **fields: Json) -> Json:
    """An object; what else it may hold is not said."""
    return {"type": "object", "required": required.split(), "properties": fields}


def listed(item: Json, least: int = 0) -> Json:
    return {"type": "array", "items": item, "minItems": least}


def one_of(*values: str) -> Json:
    return {"type": "string", "enum": list(values)}


def either(*kinds: Json) -> Json:
    return {"anyOf": list(kinds)}


def number(low: float, high: float) -> Json:
    return {"type": "number", "minimum": low, "maximum": high}


def body(required: str, **fields: Json) -> Json:
    """A request's body: what is not described is refused by name."""
    nullable = {name: either(kind, NULL) for name, kind in fields.items() if name not in required.split()}
    return record(required, **(fields | nullable)) | {"additionalProperties": False}


PART = record("type text", type=one_of("text"), text=TEXT)
CALL = record(
    "id function",
    id=TEXT,
    type=one_of("function"),
    function=record("name", name=TEXT, arguments=either(TEXT, NULL)),
)
SAID = either(TEXT, listed(PART), NULL)
CHAT_MESSAGE = either(
    record("role", role=one_of("system", "developer", "user"), content=SAID),
    record("role", role=one_of("assistant"), content=SAID, tool_calls=either(listed(CALL), NULL)),
)
FUNCTION = record(
    "type function",
    type=one_of("function"),
    function=record("name", name={"type": "string", "minLength": 1}, parameters=either(ANY_OBJECT, NULL)),
)
DRAWN: Json = {
    "temperature": number(0, 2),
    "top_p": number(0.01, 1),
    "seed": {"type": "integer"},
    "top_k": {"type": "integer", "minimum": -1},
    "min_p": number(0, 1),
}
CHAT = body(
    "messages",
    model=TEXT,
    messages=listed(CHAT_MESSAGE, 1),
    tools=listed(FUNCTION),
    tool_choice=one_of("auto", "none"),
    parallel_tool_calls=FLAG,
    stream=FLAG,
    stream_options=body("", include_usage=FLAG),
    max_tokens=COUNT,
    max_completion_tokens=COUNT,
    stop=either({"type": "string", "minLength": 1}, TEXTS),
    n={"type": "integer", "minimum": 1, "maximum": 128},
    logprobs=FLAG,
    user=TEXT,
    metadata=ANY_OBJECT,
    store=FLAG,
    service_tier=TEXT,
    reasoning_effort=TEXT,
    verbosity=TEXT,
    **DRAWN,
)
COMPLETIONS = body(
    "prompt",
    model=TEXT,
    prompt=either(
        {"type": "string", "minLength": 1}, TEXTS | {"minItems": 1}, listed({"type": "integer", "minimum": 0}, 1)
    ),
    stream=FLAG,
    stream_options=body("", include_usage=FLAG),
    echo=FLAG,
    max_tokens=COUNT,
    stop=either({"type": "string", "minLength": 1}, TEXTS),
    n={"type": "integer", "minimum": 1, "maximum": 128},
    logprobs={"type": "integer", "minimum": 0, "maximum": 1},
    user=TEXT,
    **DRAWN,
)
ITEM = either(
    record(
        "role content",
        type=one_of("message"),
        role=one_of("user", "system", "developer", "assistant"),
        content=either(TEXT, listed(record("type text", type=one_of("input_text", "output_text"), text=TEXT))),
    ),
    record("type call_id name arguments", type=one_of("function_call"), call_id=TEXT, name=TEXT, arguments=TEXT),
    record("type", type=one_of("reasoning")),
)
TOOL = body("type name", type=one_of("function"), name={"type": "string", "minLength": 1}, parameters=ANY_OBJECT)
RESPONSES = body(
    "input",
    model=TEXT,
    input=either({"type": "string", "minLength": 1}, listed(ITEM, 1)),
    instructions=TEXT,
    tools=listed(TOOL),
    tool_choice=one_of("auto", "none"),
    parallel_tool_calls=FLAG,
    stream=FLAG,
    temperature=number(0, 2),
    top_p=number(0.01, 1),
    max_output_tokens=COUNT,
    include=listed(one_of("message.output_text.logprobs", "reasoning.encrypted_content")),
    reasoning=body("", effort=TEXT, summary=TEXT),
    text=body("", verbosity=TEXT),
    metadata={"type": "object", "additionalProperties": TEXT},
    store=FLAG,
    user=TEXT,
)
BLOCK = either(PART, record("type thinking", type=one_of("thinking"), thinking=TEXT, signature=TEXT))
MESSAGE = either(
    record("role content", role=one_of("user"), content=either(TEXT, listed(PART))),
    record("role content", role=one_of("assistant"), content=either(TEXT, listed(BLOCK))),
)
MESSAGES_FIELDS: Json = {
    "model": TEXT,
    "messages": listed(MESSAGE, 1),
    "max_tokens": COUNT,
    "system": either(TEXT, listed(PART)),
    "stop_sequences": TEXTS,
    "stream": FLAG,
    "temperature": number(0, 1),
    "top_p": number(0.01, 1),
    "top_k": {"type": "integer", "minimum": 0},
    "tools": listed(record("name input_schema", name={"type": "string", "minLength": 1}, input_schema=ANY_OBJECT)),
    "tool_choice": body("type", type=one_of("auto", "none"), disable_parallel_tool_use=FLAG),
    "thinking": record("type", type=one_of("disabled", "adaptive")),
    "metadata": ANY_OBJECT,
    "service_tier": TEXT,
}

# -- what comes back ---------------------------------------------------------------------------------------------------

NULL_OR_TEXT: Json = {"type": ["string", "null"]}
OPENAI_ERROR = record(
    "error",
    error=record(
        "message type param code",
        message={"type": "string", "minLength": 1},
        type=TEXT,
        param=NULL_OR_TEXT,
        code=NULL_OR_TEXT,
    ),
)
ANTHROPIC_ERROR = record(
    "type error", type=one_of("error"), error=record("type message", type=TEXT, message={"type": "string"})
)
ANSWERS: dict[str, Json] = {
    "chat/completions": record("id object choices usage", object=one_of("chat.completion")),
    "completions": record("id object choices usage", object=one_of("text_completion")),
    "responses": record("id object output usage", object=one_of("response")),
    "messages": record("id type role content usage", type=one_of("message")),
    "messages/count_tokens": record("input_tokens", input_tokens={"type": "integer"}),
    "responses/input_tokens": record("object input_tokens", input_tokens={"type": "integer"}),
    "models": record("object data", data=listed(record("id object", id=TEXT))),
    "models/{name}": record("id object", id=TEXT, object=one_of("model")),
}
BODIES: dict[str, Json] = {
    "chat/completions": CHAT,
    "completions": COMPLETIONS,
    "responses": RESPONSES,
    "messages": body("messages max_tokens", **MESSAGES_FIELDS),
    "messages/count_tokens": body("messages", **MESSAGES_FIELDS),
    "responses/input_tokens": RESPONSES,
}
STREAMED = ("chat/completions", "completions", "responses", "messages")


def error_of(path: str) -> Json:
    return ANTHROPIC_ERROR if path.startswith("messages") else OPENAI_ERROR


def document() -> Json:
    return {
        "openapi": "3.1.0",
        "info": {"title": "The model APIs of an agent", "version": "1"},
        "components": {
            "securitySchemes": {
                "openai": {"type": "http", "scheme": "bearer"},
                "anthropic": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            }
        },
        "paths": {f"/{path}": {"post" if path in BODIES else "get": _operation(path)} for path in ANSWERS},
    }


def _operation(path: str) -> Json:
    def said(schema: Json) -> Json:
        return {"description": "", "content": {"application/json": {"schema": schema}}}

    answered = said(ANSWERS[path])
    if path in STREAMED:
        answered["content"]["text/event-stream"] = {"schema": {}}
    statuses = [401, 404, 405] + ([400, 413] if path in BODIES else [])
    operation: Json = {
        "operationId": path,
        "security": [{"anthropic": []} if path.startswith("messages") else {"openai": []}],
        "responses": {"200": answered} | {str(status): said(error_of(path)) for status in statuses},
    }
    if path in BODIES:
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": BODIES[path]}}}
    if "{name}" in path:
        operation["parameters"] = [{"name": "name", "in": "path", "required": True, "schema": TEXT}]
    return operation
