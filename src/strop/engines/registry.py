"""The engines that can be chosen by name. A new one is a file with a class, and a line here."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from strop.config import EngineConfig
from strop.engines.base import Engine
from strop.errors import ConfigError

ENGINES = {
    "embedded": "embedded.engine.Embedded",
    "vllm": "vllm.engine.Vllm",
    "sglang": "sglang.engine.Sglang",
}
"""By `engine.name`: modules of this package and the class in them. They are imported when they are chosen."""


def engine_class(config: EngineConfig) -> type[Engine]:
    """The class of the engine that is configured."""
    module, _, name = ENGINES[engine_name(config)].rpartition(".")
    return getattr(import_module(f"strop.engines.{module}"), name)


def engine_name(config: EngineConfig) -> str:
    """The engine that is configured; what `auto` means on this machine."""
    if config.name == "auto":
        there = config.vllm.url or (Path("/dev/nvidiactl").exists() and find_spec("vllm"))
        return "vllm" if there and not config.deterministic else "embedded"
    if config.name not in ENGINES:
        raise ConfigError(f"engine.name is {config.name!r}, which is not an engine. Fix: auto, {', '.join(ENGINES)}")
    if config.deterministic and config.name != "embedded":
        raise ConfigError(
            f"engine.deterministic is the embedded engine's, and engine.name is {config.name}. Fix: leave one out"
        )
    return config.name
