"""Chat templates, run as Hugging Face runs them: the same sandbox, filters and globals, so that a prompt made here is
the prompt the model is given when it is deployed. Neither transformers nor torch is needed.

A template is somebody else's program, and it runs for every model call: the sandbox stays, but what it would allow
anyway is decided by one look at the type.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from datetime import datetime
from functools import lru_cache
from types import BuiltinMethodType
from typing import Any, cast

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
from jinja2.runtime import Context, LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment

from strop.errors import ModelError
from strop.gateway.dialects.base import Json


class BadTemplate(Exception):
    """The chat template refused these messages."""


Rewrite = Callable[[Sequence[Json], Sequence[Json] | None], tuple[Sequence[Json], Sequence[Json] | None]]

GIVEN = frozenset({"messages", "tools", "add_generation_prompt", "continue_final_message"})
"""Variables of a template that the conversation itself decides."""
THINKING = ("enable_thinking", "thinking")
"""What templates call the variable that switches thinking on and off."""
EFFORT = ("reasoning_effort", "thinking_effort")
"""What they call the one that says how much to think."""


class Template:
    """A compiled chat template. `specials` are the tokenizer's, by name: bos_token and the like.

    `variables` are the values of others that it reads, enable_thinking for one; `reads` are the names of those. Names
    that it sets itself in some place may be among them.
    """

    def __init__(self, source: str, specials: Mapping[str, str], variables: Mapping[str, Any] | None = None) -> None:
        environment = _environment()
        known = cast(Any, environment).globals
        try:
            self._template = environment.from_string(source)
            unset = jinja2.meta.find_undeclared_variables(environment.parse(source))
        except jinja2.TemplateError as error:
            raise ModelError(
                f"the chat template cannot be read: {error}. Fix: correct it, or set policy.template"
            ) from None
        self.reads = frozenset(unset - set(known) - specials.keys() - GIVEN)
        self._template.globals = dict(self._template.globals)  # they are listed for every prompt: plain ones faster
        self._specials, self._rewrite = specials, cast("Rewrite | None", None)
        self._give(variables or {})

    def _give(self, variables: Mapping[str, Any]) -> None:
        self.variables = dict(variables)
        self._known = {**self._template.globals, "documents": None, **self._specials, **variables}

    def with_variables(self, variables: Mapping[str, Any]) -> Template:
        """The same with other values for its variables."""
        other = copy(self)
        other._give(variables)
        return other

    def with_rewrite(self, rewrite: Rewrite) -> Template:
        """The same for messages and tools as `rewrite` makes them."""
        other = copy(self)
        other._rewrite = rewrite
        return other

    def render(self, messages: Sequence[Json], tools: Sequence[Json] | None, *, generate: bool) -> str:
        if self._rewrite:
            messages, tools = self._rewrite(messages, tools)
        try:
            given: Json = {"messages": messages, "tools": tools or None, "add_generation_prompt": generate}
            context = self._template.new_context({**self._known, **given}, shared=True)
            return "".join(self._template.root_render_func(context))
        except (
            jinja2.TemplateError,
            ArithmeticError,
            AttributeError,
            LookupError,
            RecursionError,
            TypeError,
            ValueError,
        ) as error:
            raise BadTemplate(f"the model's chat template refuses these messages: {error}") from None


_LOOP = "first index index0 last length nextitem previtem revindex revindex0"
_METHODS = frozenset(name for name in dir(dict) if not name.startswith("_"))
_SAFE: dict[type[Any], frozenset[str]] = {
    str: frozenset(name for name in dir(str) if not name.startswith(("_", "format"))),
    LoopContext: frozenset(_LOOP.split()),
}
"""Attributes that the sandbox allows whatever their value."""


class _Environment(ImmutableSandboxedEnvironment):
    def getattr(self, obj: Any, attribute: str) -> Any:
        kind: type[Any] = type(obj)  # pyright: ignore[reportUnknownVariableType]
        if kind is dict and attribute not in _METHODS and attribute[:1] != "_":
            return obj[attribute] if attribute in obj else self.undefined(obj=obj, name=attribute)
        if kind in _SAFE and attribute in _SAFE[kind]:
            return getattr(obj, attribute)
        return super().getattr(obj, attribute)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Named as in jinja2: a template may give any other name to an argument."""
        kind: type[Any] = type(__obj)  # pyright: ignore[reportUnknownVariableType]
        is_macro = kind is Macro
        if is_macro or (kind is BuiltinMethodType and type(__obj.__self__) is str and __obj.__name__ in _SAFE[str]):
            if kwargs:
                kwargs.pop("_loop_vars", None)
                kwargs.pop("_block_vars", None)
            if not is_macro:
                return __obj(*args, **kwargs)
            if not kwargs and len(args) == __obj._argument_count and _is_plain(__obj, __context):
                return __obj._func(*args)
            return __obj(__context.eval_ctx, *args, **kwargs)
        return super().call(__context, __obj, *args, **kwargs)


def _is_plain(macro: Any, context: Context) -> bool:
    """Whether a macro is called with its arguments as they are, and gives out its text as it is."""
    return not (macro.caller or macro.catch_kwargs or macro.catch_varargs or context.eval_ctx.autoescape)


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks what an assistant wrote, for training on text; here its body stands as it is."""

    tags = {"generation"}  # noqa: RUF012 (as jinja2 declares it)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    environment: Any = _Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes HTML, which no model was trained on."""
    between = None if separators is None else (separators[0], separators[1])  # a template may give a list
    return _encoder(ensure_ascii, indent, between, sort_keys)(value)


@lru_cache(maxsize=64)
def _encoder(
    ensure_ascii: bool, indent: int | None, separators: tuple[str, str] | None, sort_keys: bool
) -> Callable[[Any], str]:
    return json.JSONEncoder(ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys).encode


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)
