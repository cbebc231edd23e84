"""Settings that have another name now. The old ones work for one release more, and a note names the new one."""

from __future__ import annotations

import re
import warnings
from fnmatch import fnmatchcase
from typing import Any, cast

from strop.errors import ConfigError

RENAMED = {
    "loop.groups_most": "max_groups",
    "loop.members": "group_size",
    "learner.updates": "minibatches",
    "engine.rows": "max_sequences",
    "engine.memory": "kv_cache_gib",
    "engine.vllm.rows": "max_sequences",
    "engine.vllm.patience": "restart_timeout",
    "engine.sglang.rows": "max_sequences",
    "engine.sglang.patience": "restart_timeout",
    "gateway.pause_patience": "pause_timeout",
    "gateway.outside.*.per_minute": "requests_per_minute",
    "gateway.outside.*.at_once": "max_concurrency",
    "gateway.outside.*.tokens": "max_tokens",
    "gateway.outside.*.money": "max_cost",
    "algorithm.settings.over": "normalize_over",
}
"""The whole old name, and the new one in the same section; * is a name that the user chose."""


class RenamedSetting(FutureWarning):
    """A setting was given by its old name."""


def rename_old(raw: dict[str, Any], path: str = "", *, quiet: bool = False) -> dict[str, Any]:
    """The same settings under the names they have now; unless `quiet` with a note for each. `path` is where they stand,
    with its dot.

    >>> rename_old({"loop": {"groups_most": 8, "steps": 2}}, quiet=True)
    {'loop': {'max_groups': 8, 'steps': 2}}
    """
    found: dict[str, Any] = {}
    for name, value in raw.items():
        old = path + name
        new = next((new for pattern, new in RENAMED.items() if _is(old, pattern)), name)
        if new != name:
            if new in raw:
                raise ConfigError(f"{old} is called {path}{new} now, and both are given. Fix: leave out {old}")
            if not quiet:
                note = f"{old} is called {path}{new} now: the old name works for one release more"
                warnings.warn(note, RenamedSetting, stacklevel=2)
        is_section = isinstance(value, dict)
        found[new] = rename_old(cast(dict[str, Any], value), f"{old}.", quiet=quiet) if is_section else value
    return found


def find_new_names(old: str) -> list[str]:
    """What a setting is called now, by its whole old name or by the last word of it; nothing where it has no new name.

    >>> find_new_names("loop.groups_most"), find_new_names("pause_patience"), find_new_names("loop.steps")
    (['loop.max_groups'], ['gateway.pause_timeout'], [])
    """
    whole = [f"{old.rpartition('.')[0]}.{new}" for pattern, new in RENAMED.items() if _is(old, pattern)]
    sections = [pattern.rpartition(".") for pattern in RENAMED]
    return whole or [f"{section}.{RENAMED[f'{section}.{last}']}" for section, _, last in sections if last == old]


def _is(name: str, pattern: str) -> bool:
    name = re.sub(r"^policies\.[^.]+\.(?=[a-z_]+\.)", "", name)  # whose tables hold the same sections
    return name.count(".") == pattern.count(".") and fnmatchcase(name, pattern)
