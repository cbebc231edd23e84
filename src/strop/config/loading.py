"""From TOML, `--set a.b=c` and Python to one Config, and to JSON and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import msgspec

from strop.config.checks import convert, refuse_unknown
from strop.config.describe import field_types
from strop.config.prompts import refuse_prompts
from strop.config.renamed import rename_old
from strop.config.run import Config
from strop.config.toml import parse_value, read_file
from strop.errors import ConfigError


def load(
    *,
    toml: str | Path | None = None,
    sets: Sequence[str] = (),
    base: Config | None = None,
    data: str | None = None,
    **fields: Any,
) -> Config:
    """Make a Config from defaults, then a TOML file, then keyword fields, then `a.b=c` settings; the last one wins.
    `data` is the place of that name among `tasks_args`, which otherwise stay."""
    raw: dict[str, Any] = msgspec.to_builtins(base or Config())
    if toml is not None:
        merge(raw, rename_old(read_file(Path(toml))))
    merge(raw, rename_old(msgspec.to_builtins({k: v for k, v in fields.items() if v is not None})))
    chosen = rename_old(_from_sets(sets))
    # One argument by itself stands beside the others, unless it is for other tasks.
    merge(raw, chosen, REPLACED if "tasks" in chosen else [name for name in REPLACED if name != "tasks_args"])
    if data is not None:
        raw["tasks_args"] = {**raw["tasks_args"], "data": str(Path(data).absolute()) if Path(data).exists() else data}
    return from_builtins(raw)


def changed(config: Config, values: Mapping[str, Any]) -> Config:
    """The configuration with other values for settings, by their whole names: {"loop.steps": 40}."""
    raw: dict[str, Any] = msgspec.to_builtins(config)
    for key, value in values.items():
        merge(raw, rename_old(_nest(key.split("."), value)))
    return from_builtins(raw)


def _from_sets(sets: Sequence[str]) -> dict[str, Any]:
    """All `a.b=c` as one table, so that several entries of a table that is given whole stand together."""
    together: dict[str, Any] = {}
    for item in sets:
        key, eq, value = item.partition("=")
        if not eq:
            raise ConfigError(f"--set {item!r} has no '='. Fix: write it as section.name=value")
        merge(together, _nest(key.strip().split("."), parse_value(value.strip())), replaced=())
    return together


def from_builtins(raw: dict[str, Any]) -> Config:
    """Check and convert plain data; what is wrong is named with its path and the nearest valid name."""
    from strop.config.policies import refuse_values, resolve_policies  # which lay tables over others as it is done here

    refuse_unknown(raw, field_types(Config), "")
    refuse_values(raw.get("policies"))
    config = convert(raw, Config, "")
    refuse_prompts(config.prompts, resolve_policies(config))
    return config


def to_json(config: Config) -> bytes:
    return msgspec.json.format(msgspec.json.encode(config), indent=2)


def from_json(data: bytes) -> Config:
    """What `to_json` wrote, also with the names that settings had then."""
    return from_builtins(rename_old(msgspec.json.decode(data), quiet=True))


REPLACED = ("rewards", "tasks_args", "agents", "tasks")
"""Tables that are given whole: a default in them would not go away otherwise."""


def merge(into: dict[str, Any], new: dict[str, Any], replaced: Sequence[str] = REPLACED) -> None:
    """Lay `new` over `into`, table by table; tables named in `replaced` are taken whole."""
    for key, value in new.items():
        here = into.get(key)
        if isinstance(here, dict) and key not in replaced:
            if not isinstance(value, dict):
                raise ConfigError(f"{key!r} is a section, not a value. Fix: set {key}.<name> instead")
            merge(cast(dict[str, Any], here), cast(dict[str, Any], value), replaced)
        else:
            into[key] = value


def _nest(path: list[str], value: Any) -> dict[str, Any]:
    return {path[0]: _nest(path[1:], value)} if len(path) > 1 else {path[0]: value}
