"""Every model API that is spoken here. A new one is a file in this folder and a line in `CLASSES`."""

from __future__ import annotations

from importlib import import_module

from strop.gateway.dialects.base import Dialect

CLASSES = (
    "chat.ChatCompletions",
    "completions.Completions",
    "responses.Responses",
    "messages.Messages",
    "embeddings.Embeddings",
)
"""Module and class. The first is spoken where nothing says which API a client means."""


def load() -> tuple[Dialect, ...]:
    names = (name.split(".") for name in CLASSES)
    return tuple(getattr(import_module(f"{__package__}.{module}"), kind)() for module, kind in names)


DIALECTS = load()
BY_PATH = {dialect.path: dialect for dialect in DIALECTS}
PATHS = [path for dialect in DIALECTS for path in (dialect.path, dialect.count_path) if path is not None]
"""What is served below /v1/, but models."""


def is_model_path(path: str) -> bool:
    """Whether an address below /v1/ is a model API's, served or not: others have theirs beside them.

    >>> is_model_path("chat/completions"), is_model_path("models"), is_model_path("rollouts")
    (True, True, False)
    """
    return path.partition("/")[0] in _TOPS


_TOPS = frozenset({"models", *(path.partition("/")[0] for path in BY_PATH)})
