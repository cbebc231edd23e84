"""Where the processes that hold weights are started: on this machine, or wherever another launcher has them.

    [child] = await launcher.start([log])                      one process
    children = await launcher.start(logs, meeting=folder)      the ranks of one model, and where they meet

`LearnerProcess` speaks to a child over its connection, and needs of its handle only what `subprocess.Popen` has. A
cluster's launcher (cluster/) starts the very same child on other machines.
"""

from __future__ import annotations

from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple, Protocol

from strop.learner import spawn
from strop.learner.verbs import RankPlace


class ChildHandle(Protocol):
    """A process that was started somewhere. `subprocess.Popen` is one."""

    def poll(self) -> int | None:
        """Its exit code, once it is known; a negative one is the signal that killed it."""
        ...

    def wait(self, timeout: float | None = None) -> int:
        """The same once it has ended. Raises `subprocess.TimeoutExpired`."""
        ...

    def terminate(self) -> None: ...

    def kill(self) -> None: ...


class StartedChild(NamedTuple):
    """A process, the connection to it, and which rank it is to be."""

    handle: ChildHandle
    connection: Connection
    place: RankPlace


class Launcher:
    """On this machine: each a child of this process, which may have been started ahead."""

    async def start(self, logs: Sequence[Path], *, meeting: Path | None = None) -> list[StartedChild]:
        """As many processes as there are logs, which train one model together. `meeting` is an empty folder on this
        machine in which several of them may meet. Whoever is cancelled here leaves none behind."""
        return start_here(logs, meeting=meeting)


HERE = Launcher()


def start_here(logs: Sequence[Path], *, meeting: Path | None = None) -> list[StartedChild]:
    """See `Launcher.start`; this takes milliseconds. Not in a thread: a child dies with the one that started it."""
    where = (meeting / "rendezvous").as_uri() if meeting is not None else ""
    places = [
        RankPlace(index=index, count=len(logs), rendezvous=where, gpu=index) if len(logs) > 1 else RankPlace()
        for index in range(len(logs))
    ]
    return [StartedChild(*spawn.take(log), place) for log, place in zip(logs, places, strict=True)]
