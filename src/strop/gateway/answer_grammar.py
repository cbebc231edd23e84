"""The grammar of a whole answer, from its first token: thoughts, then what must follow, or words with calls in them.

    what must be            the answer
    a schema                thoughts? JSON
    a schema beside tools   thoughts? (JSON | calls)
    a call                  thoughts? calls
    calls of strict tools   (thoughts | words | call)*

Thoughts and words are free (`models/lark.py`) up to the marks that the family's reader knows. Where it would see a call
there is one: of one of the tools, written in the family's own form (`tool_calls/form.py`), and so its reader finds it.
Where a thought begins, and whether one is open already, is read from what the prompt ends with.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any, cast

from msgspec import Struct
from msgspec.structs import replace

from strop.gateway.tool_calls.arguments import ESCAPES, Json
from strop.gateway.tool_calls.form import CallForm, split_variables
from strop.gateway.tool_calls.reader import Grammar
from strop.gateway.tool_calls.syntax import JsonCalls, PythonCalls, TaggedCalls
from strop.gateway.tool_calls.values import list_kinds
from strop.models.grammar import BadSchema
from strop.models.lark import FreePart, Lark, MarkTokens, escape, quote

SPACE = r"/[ \n]{0,4}/"
"""Between a thought and what follows it."""


class CallableTool(Struct, frozen=True):
    """A tool by its name. If it is `held` to its schema its arguments follow that, or it is refused; if not they may be
    anything, but in calls that are required they follow the schema where a grammar can be made of it."""

    name: str
    schema: dict[str, Any]
    held: bool


class AnswerForm(Struct, frozen=True, kw_only=True):
    """What an answer must be: `schema` is of its words, where they have one; `tools` may be called, or must be where
    calls are `required`, `once` at most. `lead` is what the prompt ends with, from where the answer begins."""

    lead: str = ""
    schema: dict[str, Any] | None = None
    tools: Sequence[CallableTool] = ()
    required: bool = False
    once: bool = False


class NoForm(Exception):
    """Calls of a family that no grammar writes, with the reason."""


class _BadGrammar(BadSchema):
    """The whole cannot be compiled, and whose fault that is nobody knows yet."""


def write_answer(format: Grammar, tokens: MarkTokens, form: AnswerForm) -> str:
    """A grammar. Raises `BadSchema` and `NoForm`."""
    try:
        return _write(format, tokens, form)
    except _BadGrammar as error:
        fault = error
        bad = {tool.name: why for tool in form.tools if (why := _find_fault(format, tokens, tool))}
    for tool in form.tools:
        if tool.held and tool.name in bad:
            raise BadSchema(f"the parameters of {tool.name!r} cannot be held to: {bad[tool.name]}")
    if not bad:
        raise fault
    tools = [replace(tool, schema={}) if tool.name in bad else tool for tool in form.tools]
    return _write(format, tokens, replace(form, tools=tools))


def _find_fault(format: Grammar, tokens: MarkTokens, tool: CallableTool) -> str:
    """Why no grammar can be made of this tool's schema; empty if one can."""
    try:
        _write(format, tokens, AnswerForm(tools=[tool], required=True))
    except BadSchema as error:
        return str(error)
    return ""


def _write(format: Grammar, tokens: MarkTokens, form: AnswerForm) -> str:
    writer = _Writer(format, tokens, form)
    start = writer.write_start()
    try:
        return writer.rules.write(start)
    except BadSchema as error:
        raise _BadGrammar(*error.args) from None


class _Writer:
    def __init__(self, format: Grammar, tokens: MarkTokens, form: AnswerForm) -> None:
        self.rules = Lark(tokens)
        self._format, self._form = format, form
        self._open = format.find_open_thought(form.lead)
        self._closed = any(close in form.lead for _, close in format.thoughts)

    def write_start(self) -> str:
        form = self._form
        if form.schema is None and not form.required:
            return self.write_words()
        ways: list[str] = []
        if form.tools:
            ways.append(self.write_calls() if form.required else self.write_calls_beside(form.schema or {}))
        if form.schema is not None and not form.required:
            ways.append(self.write_schema(form.schema))
        return f"{self.write_thoughts()} ({' | '.join(ways)})"

    # -- what must be ----------------------------------------------------------------------------------------------

    def write_thoughts(self) -> str:
        """What may be thought before the rest, up to its end."""
        rules, after = self.rules, f"{SPACE} {self.rules.spell(self._format.after_thought)}"
        if self._open:
            return f"{self._write_thought(self._open)} {after}"
        if self._closed or not self._format.thoughts:
            return rules.terminal(r"/\n{0,2}/") if self._closed else ""
        ways = [f"{rules.spell(open)} {self._write_thought(close)}" for open, close in self._format.thoughts]
        return rules.rule(f"(({' | '.join(ways)}) {after})?")

    def _write_thought(self, close: str) -> str:
        thought = FreePart(self.rules, [close])
        return f"{thought.anything} {thought.until(close)}"

    def write_schema(self, schema: dict[str, Any]) -> str:
        before, after = self._format.words
        before = "" if self._form.lead.rstrip().endswith(before.strip()) else before
        return f"{self.rules.spell(before)} {self.rules.json(schema)} {self.rules.spell(after)}"

    def write_calls(self) -> str:
        """One call or several, and nothing else."""
        form = self._find_form()
        call = self.rules.rule(f"{self._spell(form.before)} {self._write_call(form)}")
        more = "" if form.between is None or self._form.once else f"({self.rules.spell(form.between)} {call})*"
        return f"{self.rules.spell(form.begin)} {call} {more} {self.rules.spell(form.end)}"

    def write_calls_beside(self, schema: dict[str, Any]) -> str:
        """Calls where the answer may be JSON instead. Where calls begin as that does both have to be JSON to the
        library, which decides at the first letter otherwise; and of objects there is one."""
        form = self._find_form()
        if not self._is_bare(form):
            return self.write_calls()
        if not isinstance(form.arguments, Json):
            if not (kinds := list_kinds(schema)) or "array" in kinds:
                raise NoForm(f"calls of this model's family ({self._format.name}) cannot be told from an array")
            return self.write_calls()
        (call,) = json.loads(f"[{form.before}x{form.after}0{form.close}]")
        first, second = call
        schemas = {
            str(at): nest(self._list_schema(form, tool), str(at)) for at, tool in enumerate(self._list_tools(form))
        }
        calls = [
            {
                "type": "object",
                "properties": {first: {"const": tool.name}, second: {"$ref": f"#/$defs/{at}"}},
                "required": [first, second],
                "additionalProperties": False,
            }
            for at, tool in enumerate(self._list_tools(form))
        ]
        several = {"type": "array", "items": {"anyOf": calls}, "minItems": 1}
        if self._form.once:
            several["maxItems"] = 1
        return self.rules.json({"$defs": schemas} | (several if form.begin else {"anyOf": calls}), escapes=ESCAPES)

    def _is_bare(self, form: CallForm) -> bool:
        """Whether calls are written without a mark, and begin as JSON does."""
        whole, syntax = form.begin + form.before, self._format.syntax
        marked = isinstance(syntax, JsonCalls | PythonCalls) and any(map(whole.startswith, syntax.after))
        return whole[:1] in ("{", "[") and not marked

    def _list_schema(self, form: CallForm, tool: CallableTool) -> dict[str, Any]:
        _write_name(form, tool.name)
        return {"type": "object", **(tool.schema if tool.held else form.arguments.loosen(tool.schema))}

    def _list_tools(self, form: CallForm) -> Sequence[CallableTool]:
        """Those that this family can call: it has no way to write some names, and its reader none to read them."""
        tools = [tool for tool in self._form.tools if tool.held or re.fullmatch(form.names, tool.name)]
        return tools or self._form.tools

    def _find_form(self) -> CallForm:
        if self._format.form is None:
            raise NoForm(f"calls of this model's family ({self._format.name}) cannot be written by a grammar")
        return self._format.form

    def _spell(self, text: str) -> str:
        """Text of a form, with what stands for numbers and ids in it."""
        return " ".join(
            f"{self.rules.spell(part)} {self._variable(pattern)}" for part, pattern in split_variables(text)
        )

    def _variable(self, pattern: str) -> str:
        return self.rules.terminal(pattern) if pattern else ""

    def _write_call(self, form: CallForm) -> str:
        """The rest of a call, from its tool's name."""
        calls = [
            f"{quote(_write_name(form, tool.name))} {self._write_arguments(form, tool)}"
            for tool in self._list_tools(form)
        ]
        return self.rules.rule(f"({' | '.join(calls)}) {self.rules.spell(form.close)}")

    def _write_arguments(self, form: CallForm, tool: CallableTool, *, begun: bool = False) -> str:
        """What stands after the name, up to the end of the arguments; `begun`: their opening stands there."""
        schemas = [tool.schema] if tool.held or self._form.required else []
        why = ""
        schemas += [] if tool.held else [form.arguments.loosen(tool.schema), {}]
        for schema in schemas:
            try:
                with self.rules.attempt():
                    arguments = form.arguments.write(self.rules, schema)
                break
            except (BadSchema, RecursionError) as error:
                why = "it is nested too deep" if isinstance(error, RecursionError) else str(error)
        else:
            raise BadSchema(f"the parameters of {tool.name!r} cannot be held to: {why}")
        return arguments if begun else f"{self._spell(form.after + form.arguments.opening)} {arguments}"

    # -- words with calls in them ----------------------------------------------------------------------------------

    def write_words(self) -> str:
        """Anything, but for calls."""
        rules, format, form = self.rules, self._format, self._find_form()
        triggers, bare = self._list_triggers(form)
        marks = [*triggers, *(open for open, _ in format.thoughts)]
        lost = [escape(mark) for mark, rest in triggers.items() if not rest]
        words = FreePart(rules, marks, without="|".join([bare, *lost] if bare else lost))
        calls = [f"{words.until(mark)} {rest}" for mark, rest in triggers.items() if rest]
        if bare:
            calls += self._write_bare(form, words, bare)
        thoughts = [f"{words.until(open)} {self._write_thought(close)}" for open, close in format.thoughts]
        part = rules.rule(" | ".join([*calls, *thoughts]))
        lasts = [words.text]
        for open, close in format.thoughts:
            unclosed = FreePart(rules, [close])
            lasts.append(f"{words.until(open)} {unclosed.anything} {unclosed.text}")
        rest = rules.rule(f"({words.anything} {part})* {words.anything} ({' | '.join(lasts)})")
        if not self._open:
            return f"{self._write_begun(triggers)} {rest}"
        thought = FreePart(rules, [self._open])
        return f"{thought.anything} ({thought.text} | {thought.until(self._open)} {rest})"

    def _write_begun(self, triggers: dict[str, str]) -> str:
        """A call whose mark the prompt ends with the first part of."""
        lead = self._form.lead
        begun = {mark: n for mark in triggers for n in range(1, len(mark)) if lead.endswith(mark[:n])}
        ways = [f"{self.rules.rule(quote(mark[n:]), lazy=True)} {triggers[mark]}" for mark, n in begun.items()]
        return f"({' | '.join(ways)})?" if ways else ""

    def _list_triggers(self, form: CallForm) -> tuple[dict[str, str], str]:
        """Marks at which the reader looks for a call, with what must follow (nothing if the mark may not come), and the
        pattern by which it finds calls without a mark."""
        match syntax := self._format.syntax:
            case TaggedCalls(open=open) if open in form.before:
                return {open: f"{self._spell(form.before.partition(open)[2])} {self._write_call(form)}"}, ""
            case JsonCalls(item=None, after=after):
                if form.before and all(mark.endswith(form.before) for mark in after):
                    told = {
                        mark: form.told_after if form.told_in and form.told_in in mark else form.after for mark in after
                    }
                    return {mark: self._write_call(replace(form, after=told[mark])) for mark in after}, ""
            case JsonCalls() | PythonCalls():
                found = {mark: self._write_section(form, mark) for mark in syntax.after}
                return found, syntax.bare_call
            case _:
                pass
        raise NoForm(f"calls of this model's family ({self._format.name}) cannot be told from words by a grammar")

    def _write_section(self, form: CallForm, mark: str) -> str:
        if mark in form.before:
            return f"{self._spell(form.before.partition(mark)[2])} {self._write_call(form)}"
        if mark not in form.begin and not self._is_bare(form):
            return ""
        rest = form.begin.partition(mark)[2] if mark in form.begin else form.begin
        call = f"{self._spell(form.before)} {self._write_call(form)}"
        more = "" if form.between is None else f"({self.rules.spell(form.between)} {call})*"
        return f"{self.rules.spell(rest)} {call} {more} {self.rules.spell(form.end)}"

    def _write_bare(self, form: CallForm, words: FreePart, bare: str) -> list[str]:
        """Calls without a mark, if this family's may have none: their first letters are a mark of their own."""
        if not self._is_bare(form):
            return []
        rules, whole = self.rules, form.begin + form.before
        call = f"{self._spell(form.before)} {self._write_call(form)}"
        more = "" if form.between is None else f"({rules.spell(form.between)} {call})*"
        if re.search(bare, whole):
            return [f"{words.until(whole)} {self._write_call(form)} {more} {rules.spell(form.end)}"]
        end = f"{rules.spell(form.close)} {more} {rules.spell(form.end)}"
        heads = {
            _write_name(form, tool.name) + form.after + form.arguments.opening: tool for tool in self._list_tools(form)
        }
        return [
            f"{words.until(whole + head)} {self._write_arguments(form, tool, begun=True)} {end}"
            for head, tool in heads.items()
        ]


def nest(schema: Any, name: str) -> Any:
    """A schema that becomes one of another's definitions.

    >>> nest({"items": {"$ref": "#/$defs/it"}}, "0")
    {'items': {'$ref': '#/$defs/0/$defs/it'}}
    """
    if isinstance(schema, list):
        return [nest(one, name) for one in cast(list[Any], schema)]
    if not isinstance(schema, dict):
        return schema
    return {
        key: f"#/$defs/{name}{value[1:]}" if key == "$ref" and str(value).startswith("#") else nest(value, name)
        for key, value in cast(dict[str, Any], schema).items()
    }


def _write_name(form: CallForm, name: str) -> str:
    if not re.fullmatch(form.names, name):
        raise BadSchema(f"{name!r} is not a tool's name that this model could write. Fix: use letters, digits and _")
    return json.dumps(name, ensure_ascii=False)[1:-1]
