"""Which containers there are to be, and whether an agent can be in one."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Sequence
from pathlib import Path

from strop.config import ContainerConfig
from strop.errors import ConfigError
from strop.runners.containers.base import Containers
from strop.runners.containers.bubblewrap import Bubblewrap
from strop.runners.containers.engine import ContainerEngine, answers

ENGINES = ("docker", "podman")


def check(config: ContainerConfig) -> None:
    """Raises `ConfigError` for settings that contradict each other."""
    if config.runtime in ENGINES and not config.image:
        raise _no_image(config.runtime)
    if config.runtime == "bubblewrap" and config.image:
        raise ConfigError(
            "runner.container.image is for docker and podman, and runner.container.runtime is bubblewrap. Fix: leave "
            "one of them out"
        )


async def choose(config: ContainerConfig, private: Sequence[Path] = ()) -> Containers:
    """The containers that `config` asks for; of `auto`, those that this machine has."""
    check(config)
    runtime = config.runtime
    if runtime == "auto":
        there = [name for name in ENGINES if shutil.which(name)]
        answering = await asyncio.gather(*(answers(name) for name in there))
        runtime = next((name for name, is_up in zip(there, answering, strict=True) if is_up), "bubblewrap")
    if runtime == "bubblewrap":
        return Bubblewrap(config, private)
    if not config.image:
        raise _no_image(runtime)
    return ContainerEngine(runtime, config, private)


def _no_image(runtime: str) -> ConfigError:
    return ConfigError(
        f"{runtime} needs an image to run the agent in. Fix: set runner.container.image, or "
        "runner.container.runtime=bubblewrap, which needs none"
    )
