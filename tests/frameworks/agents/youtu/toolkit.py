"""A toolkit as YAML names it: a class by its file and name, whose functions are the tools."""

from collections.abc import Callable
from typing import Any

import cities


class Cities:
    def __init__(self, config: Any) -> None:
        self.config = config

    def tools(self) -> dict[str, Callable[..., Any]]:
        return {"lookup": cities.lookup, "add": cities.add}
