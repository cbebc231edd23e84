"""What an answer must be: a request's schemas and the calls that it demands, as one grammar in the model's tokens.

The grammar (answer_grammar.py) holds from the first token of the answer on. Where nothing is asked for there is none.
For an engine that holds to no grammar schemas are refused; calls that are demanded are begun for its models
(generate.py), and that tools are strict changes nothing, which an event says.
"""

from __future__ import annotations

from msgspec.structs import replace

from strop.gateway.answer_grammar import AnswerForm, CallableTool, NoForm
from strop.gateway.dialects.base import ApiError, ModelRequest
from strop.gateway.dialects.fields import unsupported
from strop.gateway.route import PolicyRoute
from strop.models.grammar import VERSION, BadSchema
from strop.types import AnswerGrammar

NOT_HELD = "tools are strict, and the engine holds to no grammar: their calls are as the model writes them"


def is_held(request: ModelRequest, route: PolicyRoute) -> bool:
    """Whether a grammar says what the answer is. Raises `ApiError` for a schema that nothing would hold it to."""
    asked = request.schema
    if asked is not None and not route.holds_to_schemas:
        raise unsupported(
            asked.param, "the engine cannot hold answers to a schema. Fix: use engine.name=embedded, or vllm"
        )
    calls = request.parse_tools and (request.strict or request.tool_choice == "required")
    return route.holds_to_schemas and bool(asked is not None or calls)


def tell_unheld(request: ModelRequest, route: PolicyRoute) -> ModelRequest:
    """The request with what becomes of strict tools, where they are not held to."""
    if not request.strict or not request.parse_tools or route.holds_to_schemas:
        return request
    return replace(request, dropped=(*request.dropped, NOT_HELD))


def make_grammar(request: ModelRequest, route: PolicyRoute, lead: str) -> AnswerGrammar | None:
    """None where the answer may be anything; `lead` is what the prompt ends with, where the answer begins. Raises
    `ApiError`."""
    if not is_held(request, route):
        return None
    renderer, asked = route.renderer, request.schema
    param = asked.param if asked is not None else "tool_choice" if request.tool_choice == "required" else "tools"
    if request.prefill:
        raise unsupported(param, "it is not served beside the beginning of an answer. Fix: leave one of them out")
    form = AnswerForm(
        lead=lead,
        schema=asked.schema if asked is not None else None,
        tools=_list_tools(request) if request.parse_tools else (),
        required=request.parse_tools and request.tool_choice == "required",
        once=request.one_call,
    )
    try:
        text = renderer.write_answer(form)
    except BadSchema as error:
        raise ApiError(
            f"{param}: this schema cannot be held to: {error}. Fix: change it", param=param, code="invalid_value"
        ) from None
    except NoForm as error:
        if form.required:
            raise ApiError(
                f"a tool call cannot be demanded of this model: {error}. Fix: use tool_choice 'auto'",
                param="tool_choice",
                code="unsupported_value",
            ) from None
        why = "leave one of them out" if asked is not None else "leave strict out, or set policy.tools to system"
        raise unsupported(param, f"{error}. Fix: {why}") from None
    return AnswerGrammar(text=text, ends=tuple(sorted(renderer.stop_ids)), version=VERSION)


def _list_tools(request: ModelRequest) -> list[CallableTool]:
    """Those that may be called, and which are held to their schemas."""
    functions = [tool["function"] for tool in request.tools]
    return [
        CallableTool(one["name"], one.get("parameters") or {}, one["name"] in request.strict)
        for one in functions
        if request.tool in (None, one["name"])
    ]
