"""What happens to the processes on a cluster, as events: cluster.jsonl in the run's folder, a line each.

{"time": 1790000000.0, "event": "started", "what": "rank 1", "node": "10.0.0.7/3fa9c1", "pid": 71, "host": 64}
{"time": 1790000009.0, "event": "died", "what": "learner", "why": "... was killed by signal 9"}

`pid` is the process, `host` that of the actor above it. `url` is where a gateway answers, and which one the agents of a
runner pool ask, where there are any on nodes.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from strop.cluster.hosts import HostPlace
from strop.files import private, private_folder
from strop.monitor.console import View

FILE = "cluster.jsonl"
QUIET = frozenset({"planned", "started", "ended"})
"""Events that the run's view does not show."""


class PlacedProcess(Struct, frozen=True):
    """A process of the run that was started on a node, by an actor."""

    host: Any
    node: str
    pid: int
    since: float


class Journal:
    """Of the run in `folder`. What somebody should know is shown by the view as well. `running` are the processes that
    were started and have not ended, as far as it was told."""

    def __init__(self, folder: Path, view: View) -> None:
        self._file, self._view = folder / FILE, view
        self.running: dict[str, PlacedProcess] = {}

    def write_start(
        self, what: str, place: HostPlace, host: Any, pid: int, *, again: bool = False, url: str = ""
    ) -> None:
        """Of a process below a host."""
        self.running[what] = PlacedProcess(host, place.name, pid, time.time())
        self.write("started again" if again else "started", what, node=place.name, pid=pid, host=place.pid, url=url)

    def write_end(self, event: str, what: str, *, node: str, why: str) -> None:
        """Of such a process."""
        self.running.pop(what, None)
        self.write(event, what, node=node, why=why)

    def write(
        self, event: str, what: str, *, node: str = "", why: str = "", pid: int = 0, host: int = 0, url: str = ""
    ) -> None:
        told = {"node": node, "why": why, "pid": pid, "host": host, "url": url}
        line = {"time": round(time.time(), 3), "event": event, "what": what}
        line |= {name: value for name, value in told.items() if value}
        private_folder(self._file.parent)
        with open(self._file, "ab", opener=private) as file:
            file.write(msgspec.json.encode(line) + b"\n")
        if event not in QUIET:
            said = f"{what}{f' on {node}' if node else ''}: {event}"
            self._view.note(f"{said} ({why})" if why else said)
