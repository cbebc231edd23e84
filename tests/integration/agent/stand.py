"""An agent on one task: a real gateway and a real store, and a model that plays a script."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from strop.agent.functions import run_until_done
from strop.agent.llm import LLM
from strop.engines.scripted import Answer, Scripted
from strop.gateway.app import Gateway
from strop.gateway.route import PolicyRoute, Routes
from strop.gateway.template import Renderer
from strop.models.names import SHIPPED
from strop.net.server import serve
from strop.store.sqlite import SqliteStore
from strop.types import Reward, Rollout, Sampling, Task, Turn


def call(name: str, **arguments: Any) -> str:
    """The words with which strop/nano calls a tool."""
    return "<tool_call>\n" + json.dumps({"name": name, "arguments": arguments}) + "\n</tool_call>"


class Stand:
    def __init__(self, folder: Path) -> None:
        self.folder, self.numbers = folder, itertools.count()

    async def __aenter__(self) -> Stand:
        self.renderer = Renderer.from_folder(SHIPPED["strop/nano"])
        self.engine = Scripted([], self.renderer, context=4000)
        route = PolicyRoute(
            policy="main",
            model="m",
            engine=self.engine,
            renderer=self.renderer,
            sampling_for=lambda _: Sampling(max_tokens=200),
        )
        self.store = await SqliteStore.open(self.folder / "store.sqlite")
        self.server = await serve(Gateway(self.store, Routes({"*": route})))
        return self

    async def __aexit__(self, *raised: object) -> None:
        await self.server.close()
        await self.store.close()

    async def run(self, agent: Callable[..., Any], *script: Answer, data: Any = "What is 3 * 4?") -> Any:
        """What the agent returns, in a thread and an event loop of its own, as runners have it."""
        self.engine._script = script
        self.engine.calls.clear()
        self.id = f"g{next(self.numbers)}.0"
        task = Task(id="t", data=data)
        await self.store.enqueue([Rollout(id=self.id, group="g", member=0, task=task, created=0.0)])
        (lease,) = await self.store.lease("w0", seconds=600)
        llm = LLM.at(self.server.url, lease, model="m")
        return await asyncio.to_thread(lambda: run_until_done(agent(task, llm)))

    async def turns(self) -> list[Turn]:
        return await self.store.turns(self.id)

    async def rewards(self) -> list[Reward]:
        events = await self.store.events(self.id)
        return [Reward(**event.data) for event in events if event.kind == "reward"]

    def prompts(self) -> Sequence[str]:
        """What the engine was shown, by request."""
        return [played.asked.prompt for played in self.engine.calls]
