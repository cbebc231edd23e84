"""Tokens on their way out. They are held back for a moment: with a hundred sequences, a message for every token of each
would keep the gateway busy with little else. What ends an answer goes out at once, and what it had with it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from strop.engines.base import Chunk
from strop.errors import StropError

HOLD = 0.03
"""Seconds that a token may wait; nobody sees that in a stream of text."""

Arrivals = list[tuple[int, Chunk | StropError]]


class Outbox:
    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._held: dict[int, Chunk] = {}
        self._emptied = clock()

    def take(self, arrivals: Sequence[tuple[int, Chunk | StropError]]) -> Arrivals:
        """What is to be sent now, each answer's tokens in their order."""
        due: Arrivals = []
        for id, arrival in arrivals:
            held = self._held.pop(id, None)
            if isinstance(arrival, Chunk) and held is not None and held.version == arrival.version:
                arrival = Chunk(
                    ids=held.ids + arrival.ids,
                    logprobs=held.logprobs + arrival.logprobs,
                    version=arrival.version,
                    finish=arrival.finish,
                )
            elif held is not None:
                due.append((id, held))
            if isinstance(arrival, StropError) or arrival.finish is not None:
                due.append((id, arrival))
            else:
                self._held[id] = arrival
        if (now := self._clock()) - self._emptied >= HOLD:
            due += self._held.items()
            self._held, self._emptied = {}, now
        return due

    def forget(self, id: int) -> None:
        self._held.pop(id, None)
