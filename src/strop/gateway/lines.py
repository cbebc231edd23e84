"""Direct lines of workers to the servers of engines, as the owner of both sees them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable
from typing import Protocol

from strop.engines.direct_line import DirectLine, LineHolder
from strop.net.link import LinkLost, ProcessLink


class LineWorker(Protocol):
    """A worker, as far as lines go."""

    link: ProcessLink

    def reaches(self, url: str) -> bool:
        """Whether a server at this address is the same one for the worker as it is here."""
        ...


class WorkerLines(LineHolder):
    """The lines of one policy in every worker, to one of its replicas each; this is the first one's. `find_workers`
    gives those that are there; one that is gone has nothing in flight, since its connections went with it. A worker
    that does not reach a server has no line to it, and asks its owner. `changed` is called after each change."""

    def __init__(
        self,
        policy: str,
        find_workers: Callable[[], Iterable[LineWorker]],
        changed: Callable[[], None],
        replica: int = 0,
    ) -> None:
        self._policy, self._find_workers, self._changed, self._replica = policy, find_workers, changed, replica
        self._line: DirectLine | None = None
        self._others: dict[int, WorkerLines] = {}

    def of_replica(self, number: int) -> WorkerLines:
        if number == self._replica:
            return self
        return self._others.setdefault(number, WorkerLines(self._policy, self._find_workers, self._changed, number))

    def tell(self, line: DirectLine | None) -> None:
        self._line = line
        for worker in self._find_workers():
            self._send(worker)
        self._changed()

    def tell_worker(self, worker: LineWorker) -> None:
        """All lines, to one that has just come."""
        for lines in (self, *self._others.values()):
            lines._send(worker)

    def _send(self, worker: LineWorker) -> None:
        line = self._line if self._line is not None and worker.reaches(self._line.url) else None
        with contextlib.suppress(LinkLost):
            worker.link.send("line", (self._policy, self._replica, line))

    async def wait_until_idle(self) -> None:
        await asyncio.gather(*(self._wait(worker.link) for worker in self._find_workers()))

    async def _wait(self, link: ProcessLink) -> None:
        with contextlib.suppress(LinkLost):
            await link.call("line_idle", (self._policy, self._replica), None)
