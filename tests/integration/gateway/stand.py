"""Everything between an agent and its engine, and ways to look behind the counter."""

import asyncio
import json
import os
import urllib.error
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import openai

from strop.engines.base import Engine
from strop.engines.scripted import Answer, Scripted
from strop.gateway.app import Gateway
from strop.gateway.keeper import WorkerOrder
from strop.gateway.route import PolicyRoute, Routes
from strop.gateway.template import Renderer
from strop.gateway.worker import WorkerParts
from strop.gateway.workers import GatewayWorkers
from strop.net.server import HttpServer, serve
from strop.store.sqlite import SqliteStore
from strop.types import Attempt, Rollout, Sampling, Task, Turn

ROOT = Path(__file__).parents[3]


def sampling_for(rollout: Rollout) -> Sampling:
    return Sampling(max_tokens=200) if rollout.mode == "train" else Sampling(temperature=0.0, max_tokens=100)


def make_routes(engine: Engine, renderer: Renderer) -> Routes:
    route = PolicyRoute(policy="p", model="tiny", engine=engine, renderer=renderer, sampling_for=sampling_for)
    return Routes({"*": route})


def make_in_worker(model: Path, parts: WorkerParts) -> Gateway:
    routes = make_routes(parts.engine("p"), Renderer.from_folder(model))
    return Gateway(parts.store, routes, in_flight=parts.in_flight)


@asynccontextmanager
async def open_stand(
    model: Path, store: SqliteStore, engine: Scripted, renderer: Renderer, *, num_workers: int = 1
) -> AsyncIterator["Stand"]:
    """A gateway that is served, in this process or in workers."""
    gateway, workers = Gateway(store, make_routes(engine, renderer)), None
    if num_workers > 1:
        order = WorkerOrder(make=make_in_worker, given=model)
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        gateway.workers = workers = GatewayWorkers(
            gateway, store, {"p": engine}, num_workers, order, environment={"PYTHONPATH": path}
        )
        workers.start()
    server = await serve(gateway, switch=workers)
    if workers is not None:
        await workers.open()
    stand = Stand(store, engine, gateway, server)
    try:
        yield stand
    finally:
        for client in stand.clients:
            await client.close()
        if workers is not None:
            await workers.close()
        await server.close()


class Stand:
    def __init__(self, store: SqliteStore, engine: Scripted, gateway: Gateway, server: HttpServer) -> None:
        self.store, self.engine, self.gateway, self.server = store, engine, gateway, server
        self.clients: list[openai.AsyncOpenAI] = []

    def script(self, *answers: Answer) -> None:
        self.engine._script = answers
        self.engine.calls.clear()

    async def attempt(self, id: str, *, mode: Any = "train", seed: int = 1) -> Attempt:
        rollout = Rollout(id=id, group=id, member=0, task=Task(id="t"), mode=mode, seed=seed, created=0.0)
        await self.store.enqueue([rollout])
        (lease,) = await self.store.lease("w0", seconds=600)
        assert lease.rollout.id == id
        return lease.attempt

    def url(self, attempt: Attempt, agent: str = "main") -> str:
        return f"{self.server.url}/r/{attempt.rollout}/{attempt.number}/agents/{agent}/v1"

    def events_url(self, attempt: Attempt) -> str:
        return f"{self.server.url}/r/{attempt.rollout}/{attempt.number}/events"

    def client(self, attempt: Attempt, agent: str = "main", **options: Any) -> openai.AsyncOpenAI:
        options = {"api_key": attempt.key, "max_retries": 0} | options
        client = openai.AsyncOpenAI(base_url=self.url(attempt, agent), **options)
        self.clients.append(client)
        return client

    async def turns(self, attempt: Attempt) -> list[Turn]:
        """Recorded turns, checked against what the engine saw and sampled."""
        turns = await self.store.turns(attempt.rollout, attempt=attempt.number)
        played = {(tuple(call.asked.prompt_ids), call.asked.sampling.seed): call for call in self.engine.calls}
        for turn in turns:
            call = played[tuple(turn.prompt_ids), turn.sampling.seed]
            assert turn.sampling == call.asked.sampling
            assert turn.response_ids == call.ids[: len(turn.response_ids)]
            assert turn.response_ids == call.ids or turn.sampling.stop or turn.abandoned
            assert len(turn.logprobs) == len(turn.response_ids)
        return turns


async def fetch(url: str, body: Any = None, *, key: str = "") -> tuple[int, Any]:
    """A plain request: the status and the JSON of the answer."""
    data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"authorization": f"Bearer {key}", "content-type": "application/json"})

    def send() -> tuple[int, Any]:
        try:
            with urllib.request.urlopen(request) as response:
                return response.status, json.load(response)
        except urllib.error.HTTPError as error:
            with error:
                return error.code, json.load(error)

    return await asyncio.to_thread(send)
