"""Tools of OpenAI's responses in the chat API's shape (see `ModelRequest`).

Tools in a namespace, as Codex sends them, are shown to the model as functions whose names begin with the namespace's; a
call of one comes back with the two apart. The description of a namespace stands before that of its first function.

A custom tool, whose calls are text in a format of its own, is shown as a function with one argument, and its format in
the description; calls of it come back as custom calls.

Tools that the API's maker runs (a web search) are not shown to the model. Loading is never deferred: all others are.
The model is not shown that a tool is `strict`: its calls are held to the schema.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta, Struct
from msgspec.structs import asdict, replace

from strop.gateway.dialects.base import ApiError, Json
from strop.gateway.dialects.fields import check_schema, unsupported
from strop.gateway.dialects.responses_items import join_name
from strop.gateway.dialects.responses_stream import INPUT

PROVIDERS = frozenset(
    {
        "web_search",
        "web_search_2025_08_26",
        "web_search_preview",
        "web_search_preview_2025_03_11",
        "file_search",
        "code_interpreter",
        "image_generation",
        "mcp",
        "tool_search",
    }
)
"""Kinds of tools that the API's maker runs, or that find others for it. An agent gets on without them."""


_Given = TypeVar("_Given")


class _Function(Struct, forbid_unknown_fields=True):
    type: Literal["function"]
    name: Annotated[str, Meta(min_length=1)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    defer_loading: bool | None = None


class _Tool(_Function):
    """A function as the model is shown it."""

    custom: bool = False


class _CustomFormat(Struct):
    type: Literal["text", "grammar"]
    syntax: str = ""
    definition: str = ""


class _Custom(Struct, forbid_unknown_fields=True):
    type: Literal["custom"]
    name: Annotated[str, Meta(min_length=1)]
    description: str | None = None
    format: _CustomFormat | None = None
    defer_loading: bool | None = None


class _Namespace(Struct):
    name: Annotated[str, Meta(min_length=1)]
    tools: list[Json]
    description: str | None = None


class ToolList(Struct, frozen=True):
    """What the model is shown, and what it is not and why. `namespaces` has, for functions out of one, the namespace
    and the name there by the name that the model is shown; `strict` and `custom` the names of those that are."""

    shown: list[Json]
    dropped: tuple[str, ...]
    namespaces: dict[str, tuple[str, str]]
    strict: frozenset[str]
    custom: frozenset[str]


def read_tools(given: Sequence[Json]) -> ToolList:
    shown: list[Json] = []
    dropped: dict[str, str] = {}
    namespaces: dict[str, tuple[str, str]] = {}
    strict: set[str] = set()
    custom: set[str] = set()
    for i, raw in enumerate(given):
        kind, where = raw.get("type"), f"tools[{i}]"
        if kind == "namespace":
            for space, tool in _read_namespace(raw, where):
                called = join_name(space, tool.name)
                namespaces[called] = space, tool.name
                shown.append(_show(replace(tool, name=called)))
                strict |= {called} if tool.strict else set()
                custom |= {called} if tool.custom else set()
        elif isinstance(kind, str) and kind in PROVIDERS:
            dropped[kind] = f"tools of type {kind!r} are run by the API's maker: the model is not shown any"
        else:
            tool = _read_function(raw, where)
            shown.append(_show(tool))
            strict |= {tool.name} if tool.strict else set()
            custom |= {tool.name} if tool.custom else set()
    named = [tool["function"]["name"] for tool in shown]
    if twice := next((name for name in namespaces if named.count(name) > 1), None):
        raise ApiError(
            f"tools has two that the model would be shown as {twice!r}. Fix: give one of them another name",
            param="tools",
            code="invalid_value",
        )
    return ToolList(shown, tuple(dropped.values()), namespaces, frozenset(strict), frozenset(custom))


def _read_namespace(raw: Json, where: str) -> list[tuple[str, _Tool]]:
    shape = 'write a namespace as {"type": "namespace", "name": ..., "description": ..., "tools": [...]}'
    space = _convert(raw, _Namespace, where, shape)
    tools = [_read_function(tool, f"{where}.tools[{i}]") for i, tool in enumerate(space.tools)]
    if tools and space.description:
        about = "\n\n".join(filter(None, (space.description, tools[0].description)))
        tools[0] = replace(tools[0], description=about)
    return [(space.name, tool) for tool in tools]


def _read_function(raw: Json, where: str) -> _Tool:
    if raw.get("type") == "custom":
        return _read_custom(raw, where)
    if raw.get("type") != "function":
        raise unsupported(f"{where}.type", f"{raw.get('type')!r} is not served. Fix: use 'function' or 'custom'")
    shape = 'write a tool as {"type": "function", "name": ..., "description": ..., "parameters": ...}'
    given = _convert({name: value for name, value in raw.items() if value is not None}, _Function, where, shape)
    check_schema(given.parameters, f"{where}.parameters")
    return _Tool(**asdict(given))


def _read_custom(raw: Json, where: str) -> _Tool:
    shape = 'write a custom tool as {"type": "custom", "name": ..., "description": ..., "format": ...}'
    custom = _convert({name: value for name, value in raw.items() if value is not None}, _Custom, where, shape)
    how = custom.format
    told = f"The input follows this grammar ({how.syntax}):\n{how.definition}" if how and how.definition else None
    about = "\n\n".join(filter(None, (custom.description, told))) or None
    schema = {"type": "object", "properties": {INPUT: {"type": "string"}}, "required": [INPUT]}
    return _Tool(type="function", name=custom.name, description=about, parameters=schema, custom=True)


def _convert(raw: Json, kind: type[_Given], where: str, shape: str) -> _Given:
    try:
        return msgspec.convert(raw, kind)
    except msgspec.ValidationError as error:
        raise ApiError(f"{where}: {error}. Fix: {shape}", param=where, code="invalid_value") from None


def _show(tool: _Tool) -> Json:
    shown = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
    return {"type": "function", "function": {name: value for name, value in shown.items() if value is not None}}
