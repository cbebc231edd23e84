"""Settings in TOML: read from a file or from --set, and written with a line of explanation on each, so that the file
loads back to the same configuration."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import msgspec

from strop.config.describe import Setting
from strop.errors import ConfigError

_BARE = re.compile(r"[A-Za-z0-9_-]+")


def dumps(settings: Iterable[Setting], unset: Iterable[str] = ()) -> str:
    """The settings by section. Those in `unset` are only told of, and so are those that are None, which no file can
    say: without a line they have their default."""
    sections: dict[str, list[str]] = {"": []}
    left = set(unset)
    for setting in settings:
        section, _, name = setting.key.rpartition(".")
        said = "" if setting.value is None else format_value(setting.value, setting.key)
        line = f"{_key(name)} = {said}  # {setting.doc}"
        sections.setdefault(section, []).append(f"# {line}" if setting.value is None or setting.key in left else line)
    blocks = ["\n".join([f"[{section}]"] * bool(section) + lines) for section, lines in sections.items() if lines]
    return "\n\n".join(blocks) + "\n"


def format_value(value: Any, what: str = "a setting") -> str:
    """A value as TOML writes it.

    >>> format_value({"reward": 1.0, "a name": ["é", True]})
    '{reward = 1.0, "a name" = ["é", true]}'
    """
    value = msgspec.to_builtins(value)
    if isinstance(value, Mapping):
        items = [(name, item) for name, item in cast(Mapping[str, Any], value).items() if item is not None]
        return "{" + ", ".join(f"{_key(name)} = {format_value(item, what)}" for name, item in items) + "}"
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, Sequence):
        return "[" + ", ".join(format_value(item, what) for item in cast(Sequence[Any], value)) + "]"
    if value is None:
        raise ConfigError(f"{what} holds null, which TOML cannot say. Fix: use --json")
    return str(value).lower() if isinstance(value, bool) else repr(value)


def _text(value: str) -> str:
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _key(name: str) -> str:
    return name if _BARE.fullmatch(name) else _text(name)


def parse_value(text: str) -> Any:
    """TOML's or JSON's reading of a value, or the text itself: 1e-4, grpo, ["test"], {"reward": 1} all work."""
    if text in ("none", "None", "null"):
        return None
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        pass
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError:
        return text


def read_file(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text("utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}. Fix: check the path") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from None
