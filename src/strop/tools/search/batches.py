"""Queries that come at the same time are answered together, in threads: the event loop is never blocked.

A request that finds a thread free goes at once; those that come while all are busy wait, and go together.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from strop.tools.search.index import ScoredPassage

Answers = list[list[ScoredPassage]]
AT_ONCE = 64
"""Queries in one batch; a request with more goes alone."""


class _Asked:
    def __init__(self, queries: Sequence[str], topk: int) -> None:
        self.queries, self.topk = queries, topk
        self.answers: asyncio.Future[Answers] = asyncio.get_running_loop().create_future()


class Batches:
    """`search(queries, topk)` gives a list per query, best first; it is called from `threads` threads."""

    def __init__(self, search: Callable[[Sequence[str], int], Answers], threads: int) -> None:
        self._search, self._free = search, threads
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="search")
        self._waiting: deque[_Asked] = deque()
        self.waiting = 0  # queries, not requests

    async def ask(self, queries: Sequence[str], topk: int) -> Answers:
        one = _Asked(queries, topk)
        self._waiting.append(one)
        self.waiting += len(queries)
        self._start()
        return await one.answers

    def close(self) -> None:
        """End what waits, and wait for nothing."""
        for one in self._waiting:
            one.answers.cancel()
        self._waiting.clear()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _start(self) -> None:
        while self._free and self._waiting:
            batch = self._next()
            self._free -= 1
            queries = [query for one in batch for query in one.queries]
            future = asyncio.get_running_loop().run_in_executor(self._pool, self._search, queries, batch[0].topk)
            future.add_done_callback(partial(self._deliver, batch))

    def _next(self) -> list[_Asked]:
        """Requests that wait and ask for as many passages as the first of them."""
        first = self._waiting.popleft()
        batch, count = [first], len(first.queries)
        while self._waiting and self._waiting[0].topk == first.topk:
            count += len(self._waiting[0].queries)
            if count > AT_ONCE:
                break
            batch.append(self._waiting.popleft())
        self.waiting -= sum(len(one.queries) for one in batch)
        return batch

    def _deliver(self, batch: list[_Asked], done: asyncio.Future[Answers]) -> None:
        self._free += 1
        self._start()
        at = 0
        for one in batch:
            if one.answers.done():  # cancelled: nobody waits any more
                pass
            elif done.cancelled():
                one.answers.cancel()
            elif (error := done.exception()) is not None:
                one.answers.set_exception(error)
            else:
                one.answers.set_result(done.result()[at : at + len(one.queries)])
            at += len(one.queries)
