"""How busy the processes of a run on a cluster are: processes.jsonl in the run's folder, a line each, now and then.

{"time": 1790000030.0, "what": "rank 1", "node": "10.0.0.7/3fa9c1", "pid": 71, "cpus": 1.93, "memory": 2147483648}

`cpus` is how many CPUs it used since the line before, with all that it has started, and `memory` is in bytes. Where it
has GPUs, `gpu` is the share of time in which they computed lately, and `gpu_memory` what all programs have of them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from strop.cluster.calls import ask
from strop.cluster.journal import Journal, PlacedProcess
from strop.cluster.load import ProcessLoad
from strop.files import private

FILE = "processes.jsonl"
FIRST, EVERY = 5.0, 30.0
"""Seconds until the first look, and between two."""
ANSWER_SECONDS = 10.0
"""A host that does not answer within so many is left out."""


class LoadMeter:
    """Asks the hosts of all processes that the journal tells of."""

    def __init__(self, folder: Path, journal: Journal) -> None:
        self._file, self._journal = folder / FILE, journal
        self._last: dict[PlacedProcess, tuple[float, float]] = {}  # when, and its seconds of CPU then

    async def watch(self) -> None:
        """Never returns."""
        await asyncio.sleep(FIRST)
        while True:
            await self.look()
            await asyncio.sleep(EVERY)

    async def look(self) -> None:
        """Write a line for each process whose host answers."""
        running = dict(sorted(self._journal.running.items()))
        loads = await asyncio.gather(*(self._ask(one.host) for one in running.values()))
        now = time.time()
        lines = [
            self._describe(what, one, load, now)
            for (what, one), load in zip(running.items(), loads, strict=True)
            if load is not None
        ]
        self._last = {one: last for one, last in self._last.items() if one in running.values()}
        self._write(lines)

    def _write(self, lines: Sequence[dict[str, Any]]) -> None:
        with suppress(OSError), open(self._file, "ab", opener=private) as file:  # a full disk ends no run
            file.write(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))

    async def _ask(self, host: Any) -> ProcessLoad | None:
        try:
            return await ask(host.measure.remote(), ANSWER_SECONDS)
        except Exception:  # whatever befell it, others notice
            return None

    def _describe(self, what: str, process: PlacedProcess, load: ProcessLoad, now: float) -> dict[str, Any]:
        then, before = self._last.get(process, (process.since, 0.0))
        self._last[process] = now, load.cpu
        cpus = max(load.cpu - before, 0.0) / max(now - then, 0.001)
        line = {"time": round(now, 3), "what": what, "node": process.node, "pid": process.pid, "cpus": round(cpus, 3)}
        gpu = {"gpu": load.gpu, "gpu_memory": load.gpu_memory}
        return line | {"memory": load.memory} | {name: value for name, value in gpu.items() if value is not None}
