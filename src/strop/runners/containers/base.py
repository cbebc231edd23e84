"""The seam between a command and what it runs in.

    CommandAgent ──words, variables, task file──▶ Containers.enclose ──Enclosed──▶ the process that is started

Whatever makes the container, the agent sees the same: its folder where it is on this machine, read-only unless
`writable`; the task as a file; a /tmp of its own; the machine's network, so that the gateway answers at the address it
has anywhere; the variables that it is given, and no others. It does not see the home, other rollouts' files or
processes, nor a run's folder, also where that lies inside the agent's.

Left out: a network of its own. What listens on this machine's loopback can be reached, and asks for keys.
"""

from __future__ import annotations

import asyncio
import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from strop.config import ContainerConfig
from strop.errors import ConfigError
from strop.net.secrets import child_environment

TASK_FILE = "/run/strop/task.json"
"""Where $STROP_TASK is inside."""
DEPTH = 4
"""How deep in the agent's folder runs are looked for."""
PASSED_OVER = frozenset({"node_modules", ".git", ".venv", "__pycache__"})


@dataclass
class Enclosed:
    """What is started in the place of the agent's own words. `files` are open descriptors that it inherits."""

    words: list[str]
    environment: dict[str, str]
    name: str = ""
    files: list[int] = field(default_factory=list[int])

    def close(self) -> None:
        for file in self.files:
            os.close(file)


class Containers(ABC):
    """Makes a container for each rollout. `private` are folders that no agent may see."""

    title: str

    def __init__(self, config: ContainerConfig, private: Sequence[Path] = ()) -> None:
        self.config = config
        self.folder = Path(config.folder or ".").expanduser().absolute()
        if not self.folder.is_dir():
            raise ConfigError(f"runner.container.folder: there is no folder {config.folder}. Fix: check its name")
        self._private = [path.resolve() for path in private]
        self._mounts = [_read_mount(mount) for mount in config.mounts]

    @abstractmethod
    async def start(self, program: str) -> None:
        """Get ready. Raises `ConfigError` or `AgentError` where containers, or the agent's program in them, cannot be
        had."""

    @abstractmethod
    def enclose(self, words: list[str], environment: Mapping[str, str], task_file: str) -> Enclosed: ...

    async def watch(self, pid: int) -> str:
        """Ends a container that takes more than it may, and says why. Returns only then."""
        await asyncio.Event().wait()
        raise AssertionError("nobody sets it")

    @abstractmethod
    def explain(self, code: int | None, printed: str) -> str:
        """Where it was not the agent that ended with `code`: what became of its container. `printed` is the end of what
        was printed."""

    async def end(self, enclosed: Enclosed, code: int | None) -> None:  # noqa: B027 - most have nothing to do
        """Nothing of the container is left afterwards. `code` is None where it was stopped before it had ended."""

    async def close(self) -> None:  # noqa: B027
        """Nothing of any container is left afterwards."""

    def check_places(self) -> None:
        """Raises `ConfigError` where what the agent would see holds what it must not see."""
        home = Path.home()
        for place, _ in self.visible():
            if place == Path("/") or home.is_relative_to(place):
                raise ConfigError(
                    f"the agent would see all of {place}, and with it the home. Fix: start in the agent's own folder, "
                    "and name what else it needs in runner.container.mounts"
                )
            if _holds_run(place):
                raise ConfigError(
                    f"the agent would see {place}, which holds a run. Fix: start in the agent's own folder"
                )
            for private in self._private:
                if place.is_relative_to(private):
                    raise ConfigError(
                        f"the agent would see {place}, which is in the run's folder. Fix: start in another folder, or "
                        "choose another place for the run with --folder"
                    )

    def visible(self) -> Iterator[tuple[Path, bool]]:
        """What it sees of this machine beside the system, and whether it may write there."""
        yield self.folder, self.config.writable
        yield from self._mounts

    def hidden(self) -> list[Path]:
        """Runs' folders inside of what it sees. Looked for anew each time: others may have begun."""
        visible = [place for place, _ in self.visible()]
        named = {
            path for path in self._private if path.is_dir() and any(path.is_relative_to(place) for place in visible)
        }
        return sorted(named.union(*(_find_runs(place, DEPTH) for place in visible)))

    def passed(self) -> dict[str, str]:
        """The variables of `runner.container.environment`."""
        there = child_environment()
        for name in self.config.environment:
            if name not in there:
                raise ConfigError(
                    f"runner.container.environment names {name}, which is not set, or kept from agents. Fix: set it, "
                    "or leave it out"
                )
        return {name: there[name] for name in self.config.environment}


def _read_mount(written: str) -> tuple[Path, bool]:
    place, writable = written.removesuffix(":rw"), written.endswith(":rw")
    path = Path(place).expanduser().absolute()
    if not path.exists():
        raise ConfigError(f"runner.container.mounts: there is no {place}. Fix: check its name, or leave it out")
    return path, writable


def _find_runs(place: Path, depth: int) -> set[Path]:
    """The folders in which a run or a served store lies."""
    found: set[Path] = set()
    if depth == 0 or not place.is_dir():
        return found
    for entry in _list_folders(place):
        inside = Path(entry.path)
        if _holds_run(inside):
            found.add(inside)
        else:
            found |= _find_runs(inside, depth - 1)
    return found


def _holds_run(place: Path) -> bool:
    """Whether a run or a server has its folder there: they have a store in it or, where that is elsewhere, a lock, and
    open it for their owner only."""
    if (place / "store.sqlite").exists() or (place / "address.json").exists():
        return True
    try:
        return (place / "lock").exists() and not place.stat().st_mode & 0o077
    except OSError:
        return False


def _list_folders(place: Path) -> Iterable[os.DirEntry[str]]:
    try:
        with os.scandir(place) as entries:
            return [entry for entry in entries if entry.is_dir(follow_symlinks=False) and entry.name not in PASSED_OVER]
    except OSError:
        return []
