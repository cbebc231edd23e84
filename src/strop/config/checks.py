"""What is said of a name that is not a setting, and of a value that does not fit."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast

import msgspec

from strop.config.describe import Setting, field_types, section_type
from strop.config.run import settings
from strop.errors import ConfigError

DECLARED: list[Callable[[], Iterable[Setting]]] = []
"""Settings that other packages declare and add here, to be found when a name is not: algorithms know this module, not
the other way round."""


def refuse_unknown(raw: Mapping[str, Any], valid: Mapping[str, Any], path: str) -> None:
    """Raises `ConfigError` for the first name that is not one of the `valid` ones, which have their types. `path` is
    where they stand, with its dot."""
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
            refuse_unknown(cast(dict[str, Any], value), field_types(inner), f"{path}{key}.")


def convert(value: Any, type: Any, path: str) -> Any:
    """Plain data as the type that a setting or a section has; what does not fit is named with its `path`."""
    try:
        return msgspec.convert(value, type)
    except msgspec.ValidationError as error:
        what, _, where = str(error).partition(" - at `$")
        name = (path + where.rstrip("`")).strip(".")
        raise ConfigError(f"{name or 'the configuration'} does not fit: {what}; see `strop config`") from None


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
