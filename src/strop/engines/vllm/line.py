"""The far end of a direct line to vLLM, in a process that has no engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing, suppress
from pathlib import Path

from strop.engines.base import Chunk
from strop.engines.direct_line import DirectLine
from strop.engines.server_events import ServerClient
from strop.engines.vllm.protocol import generate
from strop.net.client import Client
from strop.types import Sampling

LONGEST_WAIT = 30.0
"""Seconds that requests wait for a line to open. Pauses that last longer are for the engine to explain."""


class VllmLine:
    """What one process has in flight on the lines that it is told of, one at a time."""

    def __init__(self) -> None:
        self._line: DirectLine | None = None
        self._settled = asyncio.Event()  # it is not closed: it is open, or there is none
        self._client: Client | None = None
        self._in_flight = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._closing: set[asyncio.Task[None]] = set()

    def tell(self, line: DirectLine | None) -> None:
        self._line = line
        if line is None or line.open:
            self._settled.set()
        else:
            self._settled.clear()
        if self._client is not None and (line is None or self._client.url != line.url):
            self._drop_client()  # of a server that is gone, which it may not have said to who waits for it
        if self._client is None and line is not None:
            self._client = Client(line.url)

    @property
    def in_flight(self) -> int:
        return self._in_flight

    @property
    def leads_somewhere(self) -> bool:
        """Whether there is a server at its end, even if it rests."""
        return self._line is not None

    async def wait_until_open(self) -> bool:
        """Whether the server may be asked, now; otherwise the engine is."""
        if self._line is not None and not self._line.open:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._settled.wait(), LONGEST_WAIT)
        return self._line is not None and self._line.open

    async def wait_until_idle(self) -> None:
        await self._idle.wait()

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, stop_ids: Sequence[int]
    ) -> AsyncGenerator[Chunk]:
        """Raises the errors of `strop.engines.vllm.protocol.generate`; the line is open."""
        line, client = self._line, self._client
        assert line is not None
        assert line.open
        assert client is not None
        most = min(sampling.max_tokens, line.count_left(prompt_ids))
        server = ServerClient("vLLM", client)
        self._in_flight += 1
        self._idle.clear()
        try:
            pieces = generate(
                server,
                prompt_ids,
                sampling,
                stop_ids,
                model=line.model,
                max_tokens=most,
                stream_interval=line.stream_interval,
                seeds=line.seeds,
                folder=Path(line.folder),
                vocabulary=line.vocabulary,
            )
            async with aclosing(pieces):
                async for piece in pieces:
                    yield Chunk(ids=piece.ids, logprobs=piece.logprobs, version=line.version, finish=piece.finish)
        finally:
            self._in_flight -= 1
            if not self._in_flight:
                self._idle.set()

    def _drop_client(self) -> None:
        if self._client is not None:
            task = asyncio.create_task(self._client.close())
            self._client = None
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)
