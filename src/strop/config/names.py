"""Names of settings: all of them with their values, and what is said of a name that is none."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, cast

from msgspec import Struct

from strop.config.describe import Setting, field_types, section_type, walk
from strop.config.run import Config
from strop.errors import ConfigError

DECLARED: list[Callable[[], Iterable[Setting]]] = []
"""Settings that other packages declare and add here, to be found when a name is not: algorithms know this module, not
the other way round."""


def settings(config: Config | None = None) -> Iterator[Setting]:
    """Every setting with its value and its line of explanation, in the order of the file."""
    yield from walk(config or Config(), "")


def refuse_unknown(raw: dict[str, Any], struct: type[Struct], path: str) -> None:
    valid = field_types(struct)
    for key, value in raw.items():
        if key not in valid:
            tail = _first_leaf(key, value)
            near = _nearest(tail, path, valid)
            hint = (
                f"did you mean {' or '.join(map(repr, near))}?" if near else f"valid names there: {', '.join(valid)}."
            )
            raise ConfigError(f"there is no setting {path + tail!r}; {hint}")
        inner = section_type(valid[key])
        if inner is not None:
            if not isinstance(value, dict):
                raise ConfigError(f"{path + key!r} is a section, not a value: set {path}{key}.<name> instead")
            refuse_unknown(cast(dict[str, Any], value), inner, f"{path}{key}.")


def _first_leaf(key: str, value: Any) -> str:
    """
    >>> _first_leaf("optim", {"lr": 1e-4})
    'optim.lr'
    """
    while isinstance(value, dict) and value:
        name, value = next(iter(cast(dict[str, Any], value).items()))
        key = f"{key}.{name}"
    return key


def _nearest(tail: str, path: str, valid: Iterable[str]) -> list[str]:
    """What somebody may have meant by `tail`, which is no setting below `path`: the same last word wherever it stands,
    those that end in all of `tail` first, then those below `path`; or the name most like it, there or anywhere."""
    keys = [setting.key for setting in (*settings(), *(one for declared in DECLARED for one in declared()))]
    last = tail.rpartition(".")[2]
    same = [key for key in dict.fromkeys(keys) if key.rpartition(".")[2] == last]
    if same:
        same.sort(key=lambda key: (not key.endswith(f".{tail}"), not key.startswith(path)))
        whole = [key for key in same if key.endswith(f".{tail}") and key.startswith(path)]
        return (whole or same)[:2]
    words = {key.rpartition(".")[2]: key for key in reversed(keys)} | {name: path + name for name in valid}
    return [words[word] for word in difflib.get_close_matches(last, words, 1)]
