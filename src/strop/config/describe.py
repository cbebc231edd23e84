"""How settings are described: a section is a Struct whose fields carry a line of explanation each."""

from __future__ import annotations

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


def walk(struct: Struct, prefix: str) -> Iterator[Setting]:
    for name, hint in field_types(type(struct)).items():
        value = getattr(struct, name)
        if isinstance(value, Struct):
            yield from walk(value, f"{prefix}{name}.")
        else:
            yield Setting(prefix + name, value, _description(hint))


def field_types(struct: type[Struct]) -> dict[str, Any]:
    hints = get_type_hints(struct, include_extras=True)
    return {name: hints[name] for name in struct.__struct_fields__}


def _description(hint: Any) -> str:
    said = next((m.description for m in get_args(hint)[1:] if isinstance(m, Meta) and m.description), "")
    choices = get_args(get_args(hint)[0]) if get_origin(get_args(hint)[0]) is Literal else ()
    return f"{said} ({', '.join(choices)})" if choices else said


def section_type(hint: Any) -> type[Struct] | None:
    inner = get_args(hint)[0] if get_origin(hint) is Annotated else hint
    if get_origin(inner) in (Union, pytypes.UnionType):
        return None
    return inner if isinstance(inner, type) and issubclass(inner, Struct) else None
