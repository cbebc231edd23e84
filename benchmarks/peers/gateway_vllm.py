"""Strop's gateway before a vLLM server, as benchmarks/gateway_vllm.py asks it.

    gateway_vllm.py FOLDER MODEL SETTINGS      SETTINGS are those of engine.vllm, as JSON

The first line it prints says where the gateway serves, and where vLLM does. Orders are those of gateway_strop.py.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import msgspec
import uvloop
from gateway_strop import Stand

from strop.config import VllmConfig
from strop.engines.vllm.engine import Vllm
from strop.gateway.app import Gateway
from strop.gateway.route import PolicyRoute, Routes
from strop.gateway.template import Renderer
from strop.net.server import serve
from strop.store.sqlite import SqliteStore
from strop.types import Sampling


async def main(folder: Path, model: Path, settings: VllmConfig) -> None:
    engine = Vllm(model, settings, log=folder / "vllm.log")
    await engine.start()
    route = PolicyRoute(
        policy="main",
        model="tiny",
        engine=engine,
        renderer=Renderer.from_folder(model),
        sampling_for=lambda rollout: Sampling(max_tokens=1024),
    )
    store = await SqliteStore.open(folder / "store.sqlite")
    gateway = Gateway(store, Routes({"*": route}))
    server = await serve(gateway)
    stand = Stand(store, gateway, "completions")
    print(json.dumps({"url": server.url, "vllm": engine.url}), flush=True)
    while line := await asyncio.to_thread(sys.stdin.readline):
        order = json.loads(line)
        print(json.dumps(await (stand.make(order["make"]) if "make" in order else stand.end())), flush=True)
    await server.close()
    await engine.close()
    await store.close()


if __name__ == "__main__":
    given = msgspec.json.decode(sys.argv[3], type=VllmConfig)
    uvloop.run(main(Path(sys.argv[1]), Path(sys.argv[2]), given))
