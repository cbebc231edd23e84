"""The run's part of `control_plane.py`: which replica answers, waiting for rollouts, the batch of a step."""

from __future__ import annotations

import asyncio
import pickle
import random
import statistics
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import uvloop
from control_plane_store import CALLERS, GROUP, make_rollouts
from machine import measure_reference
from msgspec import structs
from peers.processes import say

from strop import algorithms
from strop import config as configs
from strop.config import RunnerConfig
from strop.engines.base import Chunk, Engine
from strop.errors import EngineError
from strop.gateway.app import Gateway
from strop.gateway.replicas import Replicas
from strop.gateway.route import Routes
from strop.monitor.console import Silent
from strop.run.collect import wait_until_ended
from strop.run.learn import assemble_batch
from strop.run.state import Run
from strop.runners.pool import Pool
from strop.store.sqlite import SqliteStore
from strop.trajectory import Sample
from strop.types import Reward, Rollout, Sampling, Turn

Found = dict[str, Any]
PICKS = 50_000
REQUEST = 4
"""How often a request asks how long a context may be."""


class Simulated(Engine):
    """Answers after some seconds, or never, or fails."""

    def __init__(self, seconds: float = 0.0, *, fails: bool = False) -> None:
        self._seconds, self._fails = seconds, fails

    @property
    def context(self) -> int:
        return 32768

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, *, stop_ids: Sequence[int]
    ) -> AsyncIterator[Chunk]:
        if self._fails:
            raise EngineError("out of memory")
        await asyncio.sleep(self._seconds * random.uniform(0.5, 1.5))
        yield Chunk(ids=[1], logprobs=[-1.0], version="1.0", finish="stop")

    async def pause(self) -> None: ...

    async def resume(self) -> None: ...

    async def load(self, version: str, weights: object = None) -> None: ...

    async def close(self) -> None: ...


# -- which replica answers -------------------------------------------------------------------------------------------


def time_picks(num_replicas: int, in_flight: int) -> Found:
    """What a request costs that goes to its replica, with so many in flight on all of them."""
    replicas = Replicas([Simulated() for _ in range(num_replicas)])
    rollouts = [f"r{number}" for number in range(in_flight)]
    for rollout in rollouts:
        replicas.pick(rollout).in_flight += 1
    began = time.process_time()
    for number in range(PICKS):
        replicas.pick(rollouts[number % in_flight])
    picked = time.process_time()
    for _ in range(PICKS):
        _ = replicas.context
    pick, context = picked - began, time.process_time() - picked
    cost = (pick + REQUEST * context) / PICKS * 1e6
    return {"replicas": num_replicas, "in_flight": in_flight, "cpu_us_per_request": cost}


async def share(in_flight: int, seconds: float = 2.0, turns: int = 4) -> Found:
    """62 replicas that answer, one that does not and one that fails: who gets what."""
    hung, broken = Simulated(1e6), Simulated(fails=True)
    replicas = Replicas([*(Simulated(seconds) for _ in range(62)), hung, broken])
    times: list[float] = []

    async def talk(rollout: str) -> None:
        engine = replicas.of(rollout)
        for _ in range(turns):
            began = time.perf_counter()
            async for _ in engine.generate([1], Sampling(), stop_ids=[]):
                pass
            times.append(time.perf_counter() - began)

    talks = [asyncio.create_task(talk(f"r{number}")) for number in range(in_flight)]
    _, stuck = await asyncio.wait(talks, timeout=seconds * turns * 1.5 + 10)
    on_hung = next(one.in_flight for one in replicas._replicas if one.engine is hung)
    for task in stuck:
        task.cancel()
    await asyncio.gather(*stuck, return_exceptions=True)
    times.sort()
    return {
        "in_flight": in_flight,
        "stuck_on_the_one_that_hangs": on_hung,
        "stuck_share": len(stuck) / in_flight,
        "answered": len(times),
        "engine_seconds": seconds,
        "p50_seconds": statistics.median(times),
        "p99_seconds": times[int(0.99 * (len(times) - 1))],
    }


# -- waiting for the step's rollouts ---------------------------------------------------------------------------------


async def collect(folder: Path, count: int) -> Found:
    """CPU of the run's process for each rollout that a step waits for, beside what ending it costs."""
    cpu: dict[bool, float] = {}
    for waits in (False, True):
        store = await SqliteStore.open(folder / f"collect-{count}-{waits}.sqlite")
        run = make_run(store)
        wanted = make_rollouts("g", count)
        if waits:
            waiting = asyncio.create_task(wait_until_ended(run, wanted, "collecting"))
            while (await store.stats())["queued"] < count:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        else:
            await store.enqueue(wanted)
        leases = [lease for _ in range(0, count, 100) for lease in await store.lease("w", seconds=3600, count=100)]
        rest = iter(leases)

        async def end(store: SqliteStore = store, rest: Any = rest) -> None:
            for lease in rest:
                await store.finish(lease.rollout.id, 1, rewards=[Reward(value=1.0)])
                await asyncio.sleep(0)

        began = time.process_time()
        await asyncio.gather(*(end() for _ in range(CALLERS)))
        if waits:
            assert len(await waiting) == count  # pyright: ignore
        cpu[waits] = (time.process_time() - began) / count * 1e6
        await store.close()
    waiting_us = cpu[True] - cpu[False]
    return {
        "rollouts": count,
        "end_cpu_us": cpu[False],
        "wait_cpu_us": waiting_us,
        "reference_ms": measure_reference(),
    }


def make_run(store: SqliteStore) -> Run:
    """What waiting needs of a run."""
    pool = Pool(store, {}, RunnerConfig(workers=0), gateway_url="http://127.0.0.1:1", model="m")
    config, gateway = configs.load(sets=["loop.group_deadline=3600"]), Gateway(store, Routes({}))
    return cast(Run, SimpleNamespace(store=store, view=Silent(), pool=pool, config=config, gateway=gateway, cursor=0))


# -- the batch -------------------------------------------------------------------------------------------------------


def measure_batch(num_turns: int, first: int, added: int, sampled: int) -> Found:
    """Bytes that each learner rank is sent of a rollout: as it is pickled for the pipe or the connection to it."""
    samples: list[Sample] = []
    for rollout in make_rollouts("g", 8 * GROUP, status="succeeded", attempts=1, ended=2.0):
        ids = list(range(first))
        turns: list[Turn] = []
        for number in range(num_turns):
            answer = [random.randrange(150_000) for _ in range(sampled)]
            turns.append(_make_turn(rollout, number, list(ids), answer))
            ids += answer + [random.randrange(150_000) for _ in range(added)]
        rewards = (Reward(value=float(rollout.member)),)
        samples.append(Sample(structs.replace(rollout, rewards=rewards), turns))
    budget = first + num_turns * (added + sampled)
    config = configs.load(sets=[f"learner.token_budget={budget}"])
    batch = assemble_batch(config, samples, "main")
    algorithms.make(config.algorithm, config.learner).assign_credit(batch)
    bare, began = batch.bare(), time.process_time()
    size = len(pickle.dumps(bare))
    took = time.process_time() - began
    tokens = num_turns * sampled * len(samples)
    return {
        "turns": num_turns,
        "tokens_of_a_rollout": len(ids),
        "sampled_tokens_of_a_rollout": num_turns * sampled,
        "kb_per_rollout": size / len(samples) / 1024,
        "bytes_per_sampled_token": size / tokens,
        "pickle_cpu_ms_per_rollout": took / len(samples) * 1e3,
        "pickle_mb_per_second": size / took / 1e6,
    }


def _make_turn(rollout: Rollout, number: int, prompt: list[int], answer: list[int]) -> Turn:
    return Turn(
        id=f"{rollout.id}/1/{number}",
        rollout=rollout.id,
        attempt=1,
        agent="main",
        parent=f"{rollout.id}/1/{number - 1}" if number else None,
        shared=len(prompt) if number else 0,
        prompt_ids=prompt,
        response_ids=answer,
        logprobs=[-1.0] * len(answer),
        versions=[(0, "1.0")],
        finish="stop",
        started=float(number),
        ended=number + 0.5,
    )


def run(folder: Path, sizes: list[int]) -> Found:
    say("run: routing")
    routing = {f"{count} replicas": time_picks(count, min(156 * count, 50_000)) for count in (4, 64, 512)}
    shared = {"62 that answer, 1 hung, 1 broken": asyncio.run(share(sizes[-1]))}
    collecting: Found = {}
    for count in sizes:
        say(f"run: waiting for {count:,}")
        collecting[f"{count} rollouts"] = uvloop.run(collect(folder, count))
    batches = {
        "6 turns of 64 tokens": measure_batch(6, 600, 150, 64),
        "8 turns of 512 tokens": measure_batch(8, 1024, 256, 512),
        "1 turn of 8,192 tokens": measure_batch(1, 512, 0, 8192),
    }
    return {"routing": routing, "sharing": shared, "collecting": collecting, "batch": batches}
