"""What is said of a name that is not a setting, and of a value that does not fit."""

from __future__ import annotations

import difflib
import re
import reprlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast

import msgspec

from strop.config.describe import Setting, field_types, section_type
from strop.config.renamed import RENAMED, find_new_names
from strop.config.run import settings
from strop.errors import ConfigError

DECLARED: list[Callable[[], Iterable[Setting]]] = []
"""Settings that other packages declare and add here, to be found when a name is not: algorithms know this module, not
the other way round."""

POLICY_SECTIONS = ("algorithm", "learner", "engine")
"""Sections that each of several policies may have of its own, beside what is in `policy`."""


def refuse_unknown(raw: Mapping[str, Any], valid: Mapping[str, Any], path: str) -> None:
    """Raises `ConfigError` for the first name that is not one of the `valid` ones, which have their types. `path` is
    where they stand, with its dot."""
    for key, value in raw.items():
        if key not in valid:
            tail = _first_leaf(key, value)
            near = _nearest(tail, path, valid)
            fix = f"write {' or '.join(near)}" if near else f"name one of {', '.join(valid)}"
            raise ConfigError(f"there is no setting {path + tail!r}. Fix: {fix}")
        inner = section_type(valid[key])
        if inner is not None:
            if not isinstance(value, dict):
                raise ConfigError(f"{path + key!r} is a section, not a value. Fix: set {path}{key}.<name> instead")
            refuse_unknown(cast(dict[str, Any], value), field_types(inner), f"{path}{key}.")


def convert(value: Any, type: Any, path: str) -> Any:
    """Plain data as the type that a setting or a section has; what does not fit is named with its `path`."""
    try:
        return msgspec.convert(value, type)
    except msgspec.ValidationError as error:
        what, _, where = str(error).partition(" - at `$")
        name = (path + where.rstrip("`")).strip(".")
        given = reprlib.repr(_find_value(value, where))
        raise ConfigError(
            f"{name or 'the configuration'} does not fit: it is {given} ({what[:1].lower()}{what[1:]}). Fix: see "
            f"`{' '.join(['strop config', *_as_described(name)])}`"
        ) from None


def _find_value(value: Any, where: str) -> Any:
    """What stands at a place that msgspec names; what holds it, where the place is not named to its end.

    >>> _find_value({"loop": {"steps": "abc"}}, ".loop.steps"), _find_value({"agents": {"a": 1}}, ".agents[...]")
    ('abc', {'a': 1})
    """
    for name, index in re.findall(r"\.(\w+)|\[(\d+|\.\.\.)\]", where):
        if index == "..." or not isinstance(value, (dict, list, tuple)):
            break
        value = cast(Any, value)[name or int(index)]
    return value


def _as_described(name: str) -> list[str]:
    """The setting as `strop config` has it, or nothing for all of them.

    >>> _as_described("policies.a.learner.optim.lr"), _as_described("policies.a.model"), _as_described("agents[...]")
    (['learner.optim.lr'], ['policy.model'], ['agents'])
    """
    name, _, _ = name.partition("[")
    if own := re.match(r"policies\.[^.]+\.", name):
        name = name.removeprefix(own[0])
        name = name if name.partition(".")[0] in POLICY_SECTIONS else f"policy.{name}"
    return [name] if name else []


def _first_leaf(key: str, value: Any) -> str:
    """
    >>> _first_leaf("optim", {"lr": 1e-4})
    'optim.lr'
    """
    while isinstance(value, dict) and value:
        name, value = next(iter(cast(dict[str, Any], value).items()))
        key = f"{key}.{name}"
    return key


def _of_policy(key: str, path: str) -> str:
    """A setting as one of several policies has it, where it may.

    >>> _of_policy("policy.model", "policies.a."), _of_policy("learner.lr", "policies.a."), _of_policy("seed", "a.")
    ('policies.a.model', 'policies.a.learner.lr', 'seed')
    """
    section, _, name = key.partition(".")
    return path + (name if section == "policy" else key) if section in ("policy", *POLICY_SECTIONS) else key


def _nearest(tail: str, path: str, valid: Iterable[str]) -> list[str]:
    """What may have been meant by `tail`, which is not a setting below `path`: the same last word wherever it stands,
    those that end in all of `tail` first, then those below `path`; or the name most like it, there or anywhere, or like
    one that a setting had before."""
    keys = [setting.key for setting in (*settings(), *(one for declared in DECLARED for one in declared()))]
    before = {old.rpartition(".")[2]: find_new_names(old)[0] for old in reversed(RENAMED) if "*" not in old}
    if policy := re.match(r"policies\.[^.]+\.", path):
        keys = [_of_policy(key, policy[0]) for key in keys]
        before = {old: _of_policy(new, policy[0]) for old, new in before.items()}
    last = tail.rpartition(".")[2]
    same = [key for key in dict.fromkeys(keys) if key.rpartition(".")[2] == last]
    if same:
        same.sort(key=lambda key: (not key.endswith(f".{tail}"), not key.startswith(path)))
        whole = [key for key in same if key.endswith(f".{tail}") and key.startswith(path)]
        return (whole or same)[:2]
    words = before | {key.rpartition(".")[2]: key for key in reversed(keys)} | {name: path + name for name in valid}
    return [words[word] for word in difflib.get_close_matches(last, words, 1)]
