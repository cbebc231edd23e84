"""Direct lines of workers to the servers of engines, as the owner of both sees them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable

from strop.engines.direct_line import DirectLine, LineHolder
from strop.net.link import LinkLost, ProcessLink


class WorkerLines(LineHolder):
    """The lines of one policy in every worker, to one of its replicas each; this is the first one's. `find_links` leads
    to workers that are there; one that is gone has nothing in flight, since its connections went with it."""

    def __init__(self, policy: str, find_links: Callable[[], Iterable[ProcessLink]], replica: int = 0) -> None:
        self._policy, self._find_links, self._replica = policy, find_links, replica
        self._line: DirectLine | None = None
        self._others: dict[int, WorkerLines] = {}

    def of_replica(self, number: int) -> WorkerLines:
        if number == self._replica:
            return self
        return self._others.setdefault(number, WorkerLines(self._policy, self._find_links, number))

    def tell(self, line: DirectLine | None) -> None:
        self._line = line
        for link in self._find_links():
            self._send(link)

    def tell_worker(self, link: ProcessLink) -> None:
        """All lines, to one that has just come."""
        for lines in (self, *self._others.values()):
            lines._send(link)

    def _send(self, link: ProcessLink) -> None:
        with contextlib.suppress(LinkLost):
            link.send("line", (self._policy, self._replica, self._line))

    async def wait_until_idle(self) -> None:
        await asyncio.gather(*(self._wait(link) for link in self._find_links()))

    async def _wait(self, link: ProcessLink) -> None:
        with contextlib.suppress(LinkLost):
            await link.call("line_idle", (self._policy, self._replica), None)
