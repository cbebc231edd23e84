"""How settings are described: a section is a Struct or a dataclass whose fields carry a line of explanation each."""

from __future__ import annotations

import dataclasses
import types as pytypes
from collections.abc import Iterator
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from msgspec import Meta, Struct


def doc(text: str) -> Meta:
    return Meta(description=text)


class Setting(Struct, frozen=True):
    """One line of `strop config`: where it is, what it is, what it means."""

    key: str
    value: Any
    doc: str


def walk(section: Any, prefix: str) -> Iterator[Setting]:
    """The settings of a section and of those inside it. `prefix` is where it stands, with its dot."""
    for name, hint in field_types(section.__class__).items():
        value = getattr(section, name)
        if isinstance(value, Struct):
            yield from walk(value, f"{prefix}{name}.")
        else:
            yield Setting(prefix + name, value, _description(hint))


def field_types(section: type[Any]) -> dict[str, Any]:
    """By name, the types of a section's settings: of a Struct, or of a dataclass whose constructor takes them."""
    hints = get_type_hints(section, include_extras=True)
    if issubclass(section, Struct):
        return {name: hints[name] for name in section.__struct_fields__}
    return {field.name: hints[field.name] for field in dataclasses.fields(section) if field.init}


def _description(hint: Any) -> str:
    said = next((m.description for m in get_args(hint)[1:] if isinstance(m, Meta) and m.description), "")
    choices = get_args(get_args(hint)[0]) if get_origin(get_args(hint)[0]) is Literal else ()
    return f"{said} ({', '.join(choices)})" if choices else said


def section_type(hint: Any) -> type[Struct] | None:
    inner = get_args(hint)[0] if get_origin(hint) is Annotated else hint
    if get_origin(inner) in (Union, pytypes.UnionType):
        return None
    return inner if isinstance(inner, type) and issubclass(inner, Struct) else None
