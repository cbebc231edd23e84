"""Python functions as tools, by the names they are given on the command line."""

from __future__ import annotations

import inspect
from collections.abc import Sequence

from strop.agent.tool import Tool
from strop.agent.toolbox import Tools
from strop.errors import ConfigError
from strop.imports import resolve


def load(specs: Sequence[str]) -> Tools:
    """From `FILE.py:name,name` and `package.module:name`."""
    found: list[Tool] = []
    for spec in specs:
        place, _, names = spec.rpartition(":")
        for name in names.split(","):
            function = resolve(f"{place}:{name.strip()}", "tools")
            if isinstance(function, Tool):
                found.append(function)
            elif inspect.isroutine(function):
                found.append(Tool(function))
            else:
                raise ConfigError(
                    f"tools: {place}:{name.strip()} is not a function. Fix: name one, with types and docstring"
                )
    return Tools(found)
