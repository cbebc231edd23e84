"""Answers `import agentlightning`, and `from agentlightning.litagent import rollout`, for files that import from
several of its modules: `import strop.compat.agentlightning.installed` stands above them.

Every module of that name has what strop.compat.agentlightning has. Where Agent Lightning itself is installed, nothing
is done, and a line says so.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType

import strop.compat.agentlightning as ours

NAME = "agentlightning"


class _Finder(MetaPathFinder, Loader):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname.partition(".")[0] != NAME:
            return None
        return ModuleSpec(fullname, self, is_package=True)

    def exec_module(self, module: ModuleType) -> None:
        for name in ours.__all__:
            setattr(module, name, getattr(ours, name))
        vars(module)["__getattr__"] = ours.__getattr__


def install() -> None:
    if any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return
    if find_spec(NAME) is not None:
        print("strop: Agent Lightning is installed here and answers by its own name", file=sys.stderr)
        return
    sys.meta_path.append(_Finder())


install()
