"""Strop's gateway as the benchmark asks it: one process with its SQLite store and an engine that answers at once.

    gateway_strop.py FOLDER SYNCHRONOUS MODEL [WORKERS [relayed]] [--replicas COUNT --seconds SECONDS [--chunks COUNT]]

With WORKERS above 1 so many processes answer before that store, each with such an engine, or `relayed` all with the one
in the process that has the store. With --replicas each engine is so many, which take --seconds for an answer and give
it in so many --chunks.

The first line it prints says where it serves. Then orders come as JSON lines, each answered by one:
    {"make": 100}    so many rollouts, queued and leased: [[path, key], ...]
    {"end": true}    all of them finished and their sessions forgotten: what the gateway counted since the last end
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import uvloop
from gateway_conversation import ARGUMENTS, NUM_TOKENS, TOOL, logprob

from strop.engines.base import Chunk, Engine
from strop.gateway.app import Gateway
from strop.gateway.route import PolicyRoute, Routes
from strop.gateway.template import Renderer
from strop.net.server import serve
from strop.store.base import AttemptStore
from strop.store.sqlite import SqliteStore
from strop.types import Lease, Reward, Rollout, Sampling, Task

if TYPE_CHECKING:
    from strop.gateway.workers import GatewayWorkers


class Instant(Engine):
    """Gives the same answer to everybody, whole and at once."""

    def __init__(self, ids: list[int]) -> None:
        self._chunk = Chunk(ids=ids, logprobs=[logprob(i) for i in range(len(ids))], version="1.0", finish="stop")

    @property
    def context(self) -> int:
        return 1 << 20

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, *, stop_ids: Sequence[int]
    ) -> AsyncIterator[Chunk]:
        yield self._chunk

    async def pause(self) -> None: ...

    async def resume(self) -> None: ...

    async def load(self, version: str, weights: object = None) -> None: ...

    async def close(self) -> None: ...


class Paced(Instant):
    """The same over some seconds, in so many chunks, to any number at once."""

    def __init__(self, ids: list[int], seconds: float, chunks: int = 1) -> None:
        super().__init__(ids)
        whole, size = self._chunk, -(-len(ids) // chunks)
        self._pause = seconds / chunks
        self._chunks = [
            Chunk(ids=ids[at : at + size], logprobs=whole.logprobs[at : at + size], version=whole.version)
            for at in range(0, len(ids), size)
        ]
        self._chunks[-1] = msgspec.structs.replace(self._chunks[-1], finish="stop")

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, *, stop_ids: Sequence[int]
    ) -> AsyncIterator[Chunk]:
        for chunk in self._chunks:
            await asyncio.sleep(self._pause)
            yield chunk


def make_engine(ids: list[int], replicas: int, seconds: float, chunks: int) -> Engine:
    if not replicas:
        return Instant(ids)
    from strop.gateway.replicas import Replicas

    return Replicas([Paced(ids, seconds, chunks) for _ in range(replicas)])


def answer_ids(renderer: Renderer) -> list[int]:
    """A tool call of so many tokens, the end of the turn included."""
    note = ""
    while True:
        call = json.dumps({"name": TOOL, "arguments": ARGUMENTS | {"day": f"Thu{note}"}})
        ids = [*renderer.encode(f"<tool_call>\n{call}\n</tool_call>"), renderer.end_of_turn]
        if len(ids) == NUM_TOKENS:
            return ids
        if len(ids) > NUM_TOKENS:
            raise SystemExit(f"no answer of exactly {NUM_TOKENS} tokens can be made with this model's tokenizer")
        note += "rsday, early in the morning, "[len(note) % 29]


class Stand:
    """The gateway, its store, and the rollouts that are being run."""

    def __init__(self, store: SqliteStore, gateway: Gateway, api: str = "chat/completions") -> None:
        self._store, self._gateway, self._api = store, gateway, api
        self._running: list[Lease] = []
        self._name, self._made = f"g{os.getpid():x}", 0  # a store may be used again

    async def make(self, count: int) -> list[tuple[str, str]]:
        made: list[Rollout] = []
        for _ in range(count):
            group = f"{self._name}-{self._made:07}"
            self._made += 1
            made.append(Rollout(id=f"{group}.0", group=group, member=0, task=Task(id=group), seed=1, created=1.0))
        await self._store.enqueue(made)
        leased = await self._store.lease("benchmark", seconds=36_000, count=count)
        assert len(leased) == count
        self._running += leased
        return [
            (f"/r/{of.rollout}/{of.number}/agents/main/v1/{self._api}", of.key)
            for of in (lease.attempt for lease in leased)
        ]

    async def end(self) -> dict[str, Any]:
        await asyncio.gather(*map(self._finish, self._running))
        self._running = []
        counts = dict(
            self._gateway.counts + (await self._gateway.workers.count() if self._gateway.workers else Counter())
        )
        self._gateway.counts.clear()
        return counts

    async def _finish(self, lease: Lease) -> None:
        await self._store.finish(lease.rollout.id, lease.attempt.number, rewards=[Reward(value=1.0)])
        self._gateway.forget(lease.rollout.id)


def make_gateway(store: AttemptStore, engine: Engine, renderer: Renderer, **options: Any) -> Gateway:
    """One without limits."""
    from strop.gateway.limits import Limits

    many = 1 << 20
    return Gateway(store, make_routes(engine, renderer), limits=Limits(in_flight=many), max_sessions=many, **options)


def make_routes(engine: Engine, renderer: Renderer) -> Routes:
    route = PolicyRoute(
        policy="main",
        model="tiny",
        engine=engine,
        renderer=renderer,
        sampling_for=lambda rollout: Sampling(max_tokens=1024),
    )
    return Routes({"*": route})


async def main(given: argparse.Namespace) -> None:
    model, num_workers = given.model, given.workers
    renderer = Renderer.from_folder(model)
    pace = (answer_ids(renderer), given.replicas, given.seconds, given.chunks)
    engine = make_engine(*pace)
    store = await SqliteStore.open(given.folder / "store.sqlite", given.synchronous)
    gateway = make_gateway(store, engine, renderer)
    relayed = given.relayed == "relayed"
    workers = open_workers(gateway, store, engine, num_workers, (model, pace, relayed)) if num_workers > 1 else None
    server = await serve(gateway, switch=workers)
    if workers is not None:
        await workers.open()
    stand = Stand(store, gateway)
    print(json.dumps({"url": server.url}), flush=True)
    while line := await asyncio.to_thread(sys.stdin.readline):
        order = json.loads(line)
        print(json.dumps(await (stand.make(order["make"]) if "make" in order else stand.end())), flush=True)
    if workers is not None:
        await workers.close()
    await server.close()
    await store.close()


def open_workers(
    gateway: Gateway, store: SqliteStore, engine: Engine, num_workers: int, given: Any
) -> GatewayWorkers | None:
    from gateway_worker import make

    # Not in older checkouts, which are measured with this as well.
    from strop.gateway.keeper import WorkerOrder
    from strop.gateway.workers import GatewayWorkers

    path = os.pathsep.join([str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    gateway.workers = workers = GatewayWorkers(
        gateway,
        store,
        {"main": engine},
        num_workers,
        WorkerOrder(make=make, given=given),
        environment={"PYTHONPATH": path},
    )
    workers.start()
    return workers


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("synchronous", choices=("NORMAL", "FULL"))
    parser.add_argument("model", type=Path)
    parser.add_argument("workers", type=int, nargs="?", default=1)
    parser.add_argument("relayed", choices=("relayed", ""), nargs="?", default="")
    parser.add_argument("--replicas", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=0.0)
    parser.add_argument("--chunks", type=int, default=1)
    uvloop.run(main(parser.parse_args()))
