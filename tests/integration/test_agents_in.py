"""The same agent in a process of its own or a shared one, in a thread, and in the event loop that the gateway is in."""

import asyncio
from pathlib import Path

import pytest

from strop.config import RunnerConfig
from strop.engines.scripted import Scripted
from strop.gateway.app import Gateway
from strop.gateway.route import PolicyRoute, Routes
from strop.gateway.template import Renderer
from strop.models.names import SHIPPED
from strop.net.server import serve
from strop.runners.pool import Pool
from strop.store.sqlite import SqliteStore
from strop.types import Rollout, Sampling, Task

AGENT = """
async def agent(task, llm):
    async with llm.async_client() as client:
        answer = await client.chat.completions.create(model=llm.model, messages=[{"role": "user", "content": "hi"}])
    llm.event("message", {"text": "asked"})
    llm.reward("tokens", answer.usage.completion_tokens, turn=answer.id)
    return 1.0
"""
COUNT = 40


@pytest.mark.parametrize("agents_in", ["processes", "loops", "threads", "loop"])
async def test_agents_say_the_same_wherever_they_run(tmp_path: Path, agents_in: str) -> None:
    (tmp_path / "agent.py").write_text(AGENT)
    renderer = Renderer.from_folder(SHIPPED["strop/nano"])
    route = PolicyRoute(
        policy="main",
        model="m",
        engine=Scripted(["The answer is 12."] * COUNT, renderer),
        renderer=renderer,
        sampling_for=lambda _: Sampling(max_tokens=200),
    )
    store = await SqliteStore.open(tmp_path / "store.sqlite")
    server = await serve(Gateway(store, Routes({"*": route})))
    settings = RunnerConfig(workers=COUNT if agents_in.startswith("loop") else 4, agents_in=agents_in)  # pyright: ignore
    specs: dict[str | None, str] = {None: f"{tmp_path}/agent.py:agent"}
    pool = Pool(store, specs, settings, gateway_url=server.url, model="m")
    await pool.start()
    pool.work()
    try:
        await store.enqueue(
            [Rollout(id=f"g.{n}", group="g", member=n, created=0.0, task=Task(id="t")) for n in range(COUNT)]
        )
        async with asyncio.timeout(60):
            cursor = 0
            while len(done := await store.list(status="succeeded")) < COUNT:
                assert not await store.list(status="failed"), await store.list(status="failed")
                cursor, _ = await store.wait(cursor, timeout=5.0)
        for rollout in done:
            (turn,) = await store.turns(rollout.id)
            message, reward = await store.events(rollout.id)
            assert (message.data, reward.data["turn"]) == ({"text": "asked"}, turn.id)
            assert {(r.name, r.turn) for r in rollout.rewards} == {("reward", None), ("tokens", turn.id)}
    finally:
        await pool.close()
        await server.close()
        await store.close()
