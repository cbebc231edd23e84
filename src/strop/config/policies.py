"""The policies of a run by name, each with the whole configuration that it would have as the only one.

    [policy]                      what all of them begin with
    model = "strop/nano"

    [policies.writer]             laid over [policy]; answers for, and is trained on, the agent "writer"
    [policies.critic]
    agents = ["critic*"]
    model = "smollm2-135m"
    learner.optim.lr = 1e-5       laid over [learner]; [algorithm] and [engine] the same way

Without a table of policies there is one, called main, made of the tables at the top. An agent's name belongs to the
first policy with a pattern that it matches. One that matches none is answered by `main`, or else by the first policy,
and its turns are recorded but not trained.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any, TypeVar, cast

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from strop.config.checks import convert, refuse_unknown
from strop.config.describe import field_types
from strop.config.loading import merge
from strop.config.run import Config
from strop.errors import ConfigError

MAIN = "main"
"""The name of the one policy of a run that names none."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
_WILD = re.compile(r"[*?\[]")
_OWN = ("algorithm", "learner", "engine")

S = TypeVar("S", bound=Struct)


def resolve_policies(config: Config) -> dict[str, Config]:
    """The configuration of every policy, by name, in the order they are given in. Raises `ConfigError`."""
    if not config.policies:
        return {MAIN: config}
    found = {name: _resolve(config, name, table) for name, table in config.policies.items()}
    _refuse_overlaps({name: one.policy.agents for name, one in found.items()})
    return found


def default_policy(names: Mapping[str, Any]) -> str:
    """Who answers agents that no pattern matches."""
    return MAIN if MAIN in names else next(iter(names))


def describe_models(config: Config) -> str:
    """A run's model in a few words, or the models by policy."""
    models = {name: one.policy.model for name, one in resolve_policies(config).items()}
    return next(iter(models.values())) if len(models) == 1 else ", ".join(f"{n}: {m}" for n, m in models.items())


def _resolve(config: Config, name: str, table: dict[str, Any]) -> Config:
    path = f"policies.{name}."
    if not _NAME.fullmatch(name):
        raise ConfigError(f"a policy is called {name!r}. Fix: use letters, digits, '_' and '-', 64 at most")
    own = {key: value for key, value in table.items() if key not in _OWN}
    sections: dict[str, Any] = {"policy": _lay_over(config.policy, own, path)}
    if "agents" not in own:
        sections["policy"] = replace(sections["policy"], agents=(name,))
    for key in _OWN:
        sections[key] = _lay_over(getattr(config, key), table.get(key, {}), f"{path}{key}.")
    if sections["algorithm"].name != config.algorithm.name:  # whose settings are another algorithm's
        sections["algorithm"] = replace(sections["algorithm"], settings=table["algorithm"].get("settings", {}))
    return replace(config, policies={}, **sections)


def _lay_over(base: S, table: Any, path: str) -> S:
    if not isinstance(table, dict):
        raise ConfigError(f"{path[:-1]!r} is a section, not a value: set {path}<name> instead")
    given = cast(dict[str, Any], table)
    refuse_unknown(given, field_types(type(base)), path)
    raw: dict[str, Any] = msgspec.to_builtins(base)
    merge(raw, given)
    return convert(raw, type(base), path[:-1])


def _refuse_overlaps(agents: Mapping[str, tuple[str, ...]]) -> None:
    """The first match wins; a name that would never reach its policy is refused."""
    before: list[tuple[str, str]] = []
    for policy, patterns in agents.items():
        for pattern in patterns:
            for other, earlier in before:
                if pattern == earlier or (not _WILD.search(pattern) and fnmatchcase(pattern, earlier)):
                    raise ConfigError(
                        f"policies.{policy}.agents has {pattern!r}, which {earlier!r} of policies.{other} matches "
                        f"first. Fix: leave one of them out, or put policies.{policy} before policies.{other}"
                    )
        before += [(policy, pattern) for pattern in patterns]
