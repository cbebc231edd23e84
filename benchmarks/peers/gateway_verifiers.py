"""verifiers' interception server as the benchmark asks it. Runs inside its own virtualenv (`gateway.py --setup`).

    gateway_verifiers.py UPSTREAM_URL

It takes the same orders as `gateway_strop.py`: {"make": n} registers so many rollouts, {"end": true} lets them go.

What was chosen for it, from its source: one server without a tunnel, on uvloop; its relaying client, which forwards
requests and parses a copy for the trace (the training client renders prompts and tokenises them besides, in threads);
no hooks, no limits; its log at errors only; its many imports are kept from the garbage collector. What it records stays
in memory, until a rollout ends.
"""

# pyright: reportMissingImports=false
# Its imports are those of its own virtualenv.
from __future__ import annotations

import asyncio
import gc
import json
import logging
import sys
from typing import Any

import uvloop
from verifiers.v1.clients import EvalClientConfig, ModelContext
from verifiers.v1.configs.agent import AgentConfig
from verifiers.v1.interception.server import InterceptionServer
from verifiers.v1.session import RolloutSession
from verifiers.v1.task import TaskData
from verifiers.v1.trace import AgentInfo, Trace, TraceTask


async def main(upstream: str) -> None:
    context = ModelContext(model="tiny", client=EvalClientConfig(base_url=upstream, api_key_var="NO_KEY"))
    server = InterceptionServer()
    running: list[tuple[str, str]] = []

    def register(number: int) -> tuple[str, str]:
        task = TraceTask(type="Task", data=TaskData(idx=number, prompt="a question"))
        session = RolloutSession(ctx=context, trace=Trace(task=task, agent=AgentInfo(config=AgentConfig())))
        running.append(server.register(session))
        return "/v1/chat/completions", running[-1][0]

    def end() -> dict[str, Any]:
        for secrets in running:
            server.unregister(*secrets)
        running.clear()
        return {}

    async with server:
        print(json.dumps({"url": server.base_url}), flush=True)
        gc.collect()
        gc.freeze()
        while line := await asyncio.to_thread(sys.stdin.readline):
            order = json.loads(line)
            found = [register(number) for number in range(order["make"])] if "make" in order else end()
            print(json.dumps(found), flush=True)


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    uvloop.run(main(sys.argv[1]))
