"""What an answer's text must be: a request's schema as a grammar in the model's tokens.

The grammar holds from the first token of the answer on. What would be lost by that is refused, by name: thoughts before
the answer, calls beside it, and an answer that is begun for the model.
"""

from __future__ import annotations

from strop.gateway.dialects.base import AnswerSchema, ApiError, ModelRequest
from strop.gateway.dialects.fields import unsupported
from strop.gateway.jinja import THINKING
from strop.gateway.route import PolicyRoute
from strop.models.grammar import VERSION, BadSchema, compile_schema
from strop.types import AnswerGrammar


def make_grammar(request: ModelRequest, route: PolicyRoute) -> AnswerGrammar | None:
    """None where its text may be anything. Raises `ApiError`."""
    asked = request.schema
    if asked is None:
        return None
    if not route.holds_to_schemas:
        raise unsupported(asked.param, "the engine cannot hold answers to a schema. Fix: use engine.name=embedded")
    if request.parse_tools:
        raise unsupported(
            asked.param, "it is not served beside tools. Fix: leave one of them out, or set tool_choice to none"
        )
    if request.prefill:
        raise unsupported(asked.param, "it is not served beside the beginning of an answer. Fix: leave one of them out")
    try:
        text = compile_schema(asked.schema)
    except BadSchema as error:
        raise ApiError(
            f"{asked.param}: this schema cannot be held to: {error}. Fix: change it",
            param=asked.param,
            code="invalid_value",
        ) from None
    return AnswerGrammar(text=text, ends=tuple(sorted(route.renderer.stop_ids)), version=VERSION)


def refuse_thoughts(asked: AnswerSchema, route: PolicyRoute, opening: str) -> None:
    """Raises `ApiError` for a prompt, by what stands before the answer, that leaves the model to think first."""
    format, switches = route.renderer.format, route.renderer.reads & {*THINKING}
    closed = any(close in opening for _, close in format.thoughts)
    if format.find_open_thought(opening) or (format.thoughts and switches and not closed):
        how = f'chat_template_kwargs {{"{min(switches)}": false}}' if switches else "a model that does not"
        raise unsupported(asked.param, f"this model thinks before it answers, and could not. Fix: use {how}")
