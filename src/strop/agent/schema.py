"""What a model is told of a Python function: its arguments from the type hints, the rest from the docstring.

    def weather(city: str, days: int = 1) -> str:
        \"\"\"Tell the weather of the next days.

        Args:
            city: where
        \"\"\"

Hints may be whatever JSON can hold and msgspec reads: str, int, float, bool, list, dict, Literal, Enum, X | None,
dataclasses, TypedDicts, Structs, Annotated[int, msgspec.Meta(ge=0)].

Left out: arguments without a name (`*args`, `**kwargs`, those before a `/`).
"""

from __future__ import annotations

import enum
import inspect
import json
import re
from collections.abc import Callable, Mapping
from typing import Annotated, Any, cast

import msgspec
from msgspec import Meta

from strop.errors import ConfigError

NAME = re.compile(r"[A-Za-z0-9_-]+")
"""What model APIs take as a tool's name."""
SECTION = re.compile(r"^(Args|Arguments|Parameters|Returns|Yields|Raises|Examples?|Notes?):", re.MULTILINE)
"""Where the parts of a docstring begin that do not describe the whole."""
ARGUMENT = re.compile(r"^( +)(\w+)(?: *\([^)]*\))?:[ \t]*(.*(?:\n\1 +.+)*)", re.MULTILINE)
"""A line about an argument, and those under it that are further in."""


def build_arguments(function: Callable[..., Any], name: str, hints: Mapping[str, Any]) -> type[msgspec.Struct]:
    """A function's arguments as a record: its fields are what JSON is described by and checked against."""
    if not NAME.fullmatch(name):
        raise ConfigError(
            f"tools: {name} is not a name that models can call. Fix: @strop.tool(name=...) of letters, digits, _ and -"
        )
    about = parse_docstring(function)[1]
    fields: list[tuple[str, Any, Any]] = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise ConfigError(
                f"tools: {name} takes {parameter}, which has no name of its own. Fix: give it named arguments"
            )
        if parameter.name not in hints:
            raise ConfigError(
                f"tools: {name} does not say what {parameter.name} is. Fix: write {parameter.name}: str, say"
            )
        if parameter.name.startswith("__"):
            raise ConfigError(f"tools: {name} takes {parameter.name}. Fix: give it a name that does not begin with __")
        hint = hints[parameter.name]
        if parameter.name in about:
            hint = Annotated[hint, Meta(description=about[parameter.name])]
        fields.append((parameter.name, hint, _default(parameter)))
    made = msgspec.defstruct("Arguments", fields, kw_only=True, forbid_unknown_fields=True)
    try:
        described = msgspec.json.schema(made)
    except TypeError as error:
        raise ConfigError(f"tools: {name} cannot be described: {' '.join(str(error).split())}") from None
    try:
        json.dumps(described, allow_nan=False)
    except ValueError:
        raise ConfigError(f"tools: {name} has a default that JSON cannot hold (inf or nan). Fix: take None") from None
    return made


def describe_parameters(arguments: type[msgspec.Struct]) -> dict[str, Any]:
    """The record as JSON schema, as OpenAI's API has it."""
    whole = msgspec.json.schema(arguments)
    defined: dict[str, Any] = whole["$defs"]
    own = defined.pop(whole["$ref"].removeprefix("#/$defs/"))
    shown = {key: own[key] for key in ("type", "properties", "required")}
    return shown | ({"$defs": defined} if defined else {})


def parse_docstring(function: Callable[..., Any]) -> tuple[str, dict[str, str]]:
    """Its first paragraph, and what its section `Args:` says of each argument."""
    text = inspect.getdoc(function) or ""
    sections = list(SECTION.finditer(text))
    about: dict[str, str] = {}
    for number, section in enumerate(sections):
        if section[1] in ("Args", "Arguments", "Parameters"):
            end = sections[number + 1].start() if number + 1 < len(sections) else len(text)
            found = ARGUMENT.findall(text[section.end() : end])
            about = {name: " ".join(said.split()) for _, name, said in found}
    whole = text[: sections[0].start() if sections else None].strip()
    return " ".join(whole.partition("\n\n")[0].split()), about


def summarize_parameters(parameters: Mapping[str, Any]) -> str:
    """The arguments in short, for a model that got them wrong.

    >>> properties = {"city": {"type": "string"}, "days": {"type": "integer"}}
    >>> summarize_parameters({"properties": properties, "required": ["city"]})
    '{"city": string, "days": integer (may be left out)}'
    """
    required = parameters.get("required", ())
    properties: dict[str, Any] = parameters.get("properties") or {}
    return (
        "{"
        + ", ".join(
            f'"{name}": {_kind(about)}' + ("" if name in required else " (may be left out)")
            for name, about in properties.items()
        )
        + "}"
    )


def _kind(schema: Any) -> str:
    about = cast("dict[str, Any]", schema) if isinstance(schema, dict) else {}
    if "enum" in about:
        return " or ".join(msgspec.json.encode(value).decode() for value in about["enum"])
    if "anyOf" in about:
        return " or ".join(map(_kind, about["anyOf"]))
    if "$ref" in about:
        return "object"
    kinds: Any = about.get("type", "any value")
    if kinds == "array" and "items" in about:
        return f"array of {_kind(about['items'])}"
    return " or ".join(cast("list[str]", kinds)) if isinstance(kinds, list) else str(kinds)


def _default(parameter: inspect.Parameter) -> Any:
    value = parameter.default
    if value is parameter.empty:
        return msgspec.NODEFAULT
    # Anything that could be changed is shared between calls, as Python shares it.
    plain = value is None or isinstance(value, str | int | float | bool | enum.Enum)
    return value if plain else msgspec.field(default_factory=lambda: value)
