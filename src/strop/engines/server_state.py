"""How an engine's server is, for those who wait for it."""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from contextlib import contextmanager


class ServerState:
    """`reason` says why it does not serve.

    serving    it is up and has the current version
    failing    the opposite
    settled    it serves, or nobody tries any more
    up         it answers, whatever it has, or there is no hope that it will
    needed     it is to be started if it is down: not while the engine is paused, unless somebody waits for it
    """

    def __init__(self, reason: str) -> None:
        self.reason = reason
        self.serving, self.failing, self.settled = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.up, self.needed = asyncio.Event(), asyncio.Event()
        self.needed.set()
        self._paused, self._num_waiting = False, 0

    def serves(self) -> None:
        self.serving.set()
        self.settled.set()
        self.failing.clear()

    def fails(self, reason: str) -> None:
        self.reason = reason
        self.serving.clear()
        self.settled.clear()
        self.failing.set()

    def gives_up(self) -> None:
        """Nobody need wait any more."""
        self.settled.set()
        self.up.set()

    def pause(self, *, paused: bool) -> None:
        self._paused = paused
        self._update_need()

    @contextmanager
    def awaiting(self) -> Generator[None]:
        """Somebody waits for it."""
        self._num_waiting += 1
        self._update_need()
        try:
            yield
        finally:
            self._num_waiting -= 1
            self._update_need()

    def _update_need(self) -> None:
        if self._paused and not self._num_waiting:
            self.needed.clear()
        else:
            self.needed.set()
