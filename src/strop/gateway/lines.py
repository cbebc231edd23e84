"""Direct lines of workers to the servers of engines, as the owner of both sees them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable

from strop.engines.direct_line import DirectLine, LineHolder
from strop.net.link import LinkLost, ProcessLink


class WorkerLines(LineHolder):
    """The line of one policy in every worker. `find_links` leads to those that are there; one that is gone has nothing
    in flight, since its connections went with it."""

    def __init__(self, policy: str, find_links: Callable[[], Iterable[ProcessLink]]) -> None:
        self._policy, self._find_links = policy, find_links
        self._line: DirectLine | None = None

    def tell(self, line: DirectLine | None) -> None:
        self._line = line
        for link in self._find_links():
            self.tell_worker(link)

    def tell_worker(self, link: ProcessLink) -> None:
        with contextlib.suppress(LinkLost):
            link.send("line", (self._policy, self._line))

    async def wait_until_idle(self) -> None:
        await asyncio.gather(*(self._wait(link) for link in self._find_links()))

    async def _wait(self, link: ProcessLink) -> None:
        with contextlib.suppress(LinkLost):
            await link.call("line_idle", (self._policy,), None)
