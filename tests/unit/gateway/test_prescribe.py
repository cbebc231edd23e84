"""Which answers can be held to a schema, and why others are refused."""

from typing import Any

import pytest

from strop.gateway.dialects.base import AnswerSchema, ApiError, ModelRequest
from strop.gateway.prescribe import make_grammar, refuse_thoughts
from strop.gateway.route import PolicyRoute
from strop.gateway.template import Renderer
from strop.types import Sampling
from tests.chatml import TEMPLATE

HI = [{"role": "user", "content": "hi"}]
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
NUMBER = AnswerSchema({"type": "integer"}, "response_format")
OFF = "{% if not (enable_thinking | default(true)) %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
SWITCHED = TEMPLATE.replace("<|im_start|>assistant\n{% endif %}", "<|im_start|>assistant\n" + OFF)
"""Thinks of its own accord, unless it is switched off."""
OPENED = "<|im_start|>assistant\n<think>\n{% endif %}{# </think> #}"
OPENED = "<|im_start|>assistant\n<think>\n{% endif %}{# </think> #}"
ALWAYS = TEMPLATE.replace("<|im_start|>assistant\n{% endif %}", OPENED)


def route(renderer: Renderer, *, holds: bool = True) -> PolicyRoute:
    nobody: Any = None
    return PolicyRoute(
        policy="p", model="m", engine=nobody, renderer=renderer, sampling_for=lambda _: Sampling(),
        holds_to_schemas=holds,
    )  # fmt: skip


def test_an_answer_ends_with_the_tokens_that_end_a_turn(renderer: Renderer) -> None:
    grammar = make_grammar(ModelRequest(messages=HI, schema=NUMBER), route(renderer))
    assert grammar is not None
    assert grammar.ends == tuple(sorted(renderer.stop_ids))
    assert grammar.version.startswith("llguidance@")
    assert make_grammar(ModelRequest(messages=HI), route(renderer, holds=False)) is None


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"tools": TOOLS}, "is not served beside tools"),
        ({"prefill": "The"}, "beside the beginning of an answer"),
        ({"schema": AnswerSchema({"not": {}}, "text.format")}, r'^text.format: .*"not"'),
    ],
)
def test_what_would_be_lost_is_refused(renderer: Renderer, change: dict[str, Any], why: str) -> None:
    request = ModelRequest(**{"messages": HI, "schema": NUMBER, **change})
    with pytest.raises(ApiError, match=why):
        make_grammar(request, route(renderer))


def test_tools_that_may_not_be_called_are_no_hindrance(renderer: Renderer) -> None:
    request = ModelRequest(messages=HI, schema=NUMBER, tools=TOOLS, tool_choice="none")
    assert make_grammar(request, route(renderer)) is not None


def test_an_engine_that_cannot_says_so(renderer: Renderer) -> None:
    with pytest.raises(ApiError, match=r"cannot hold answers to a schema\. Fix: use engine\.name=embedded"):
        make_grammar(ModelRequest(messages=HI, schema=NUMBER), route(renderer, holds=False))


def test_a_model_that_would_think_first_is_not_kept_from_it_in_silence(renderer: Renderer) -> None:
    def check(template: str, **variables: bool) -> None:
        thinker = Renderer(renderer.tokenizer, template, specials={"eos_token": "<|im_end|>"}, variables=variables)
        refuse_thoughts(NUMBER, route(thinker), thinker.opening(HI, None))

    with pytest.raises(ApiError, match=r'chat_template_kwargs \{"enable_thinking": false\}'):
        check(SWITCHED)
    check(SWITCHED, enable_thinking=False)
    with pytest.raises(ApiError, match="use a model that does not"):
        check(ALWAYS)
    check(TEMPLATE)
