"""Runner, gateway and store with a scripted engine: what happens to a rollout when things go wrong around its agent."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from strop.config import RunnerConfig
from strop.engines.scripted import Answer, Breaks, Scripted
from strop.errors import EngineError
from strop.gateway.app import Gateway
from strop.gateway.route import PolicyRoute, Routes
from strop.gateway.template import Renderer
from strop.models.names import SHIPPED
from strop.net.server import serve
from strop.runners.pool import Pool
from strop.store.sqlite import SqliteStore
from strop.types import TERMINAL, Rollout, Sampling, Task

AGENT = """
def agent(task, llm):
    client = llm.client().with_options(max_retries=0)
    stream = client.chat.completions.create(
        model=llm.model, messages=[{"role": "user", "content": "hi"}], stream=True
    )
    return float(len(list(stream)) > 0)
"""


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[SqliteStore]:
    store = await SqliteStore.open(tmp_path / "store.sqlite")
    yield store
    await store.close()


async def play(
    store: SqliteStore, folder: Path, *answers: Answer, latency: float = 0.0, timeout: float = 20
) -> Rollout:
    """One rollout, to its end, with an engine that gives these answers."""
    (folder / "agent.py").write_text(AGENT)
    renderer = Renderer.from_folder(SHIPPED["strop/nano"])
    engine = Scripted(answers, renderer, latency=latency)
    route = PolicyRoute(
        policy="main", model="m", engine=engine, renderer=renderer, sampling_for=lambda _: Sampling(max_tokens=200)
    )
    gateway = Gateway(store, Routes({"*": route}))
    server = await serve(gateway)
    settings = RunnerConfig(workers=1, timeout=timeout)
    agent = f"{folder}/agent.py:agent"
    idle = gateway.wait_until_idle
    pool = Pool(store, {None: agent}, settings, gateway_url=server.url, model="m", wait_for_calls=idle)
    try:
        await pool.start()
        pool.work()
        await store.enqueue([Rollout(id="g.0", group="g", member=0, created=0.0, task=Task(id="t"))])
        cursor = 0
        while (rollout := await store.get("g.0")).status not in TERMINAL:
            cursor, _ = await store.wait(cursor, timeout=1.0)
        return rollout
    finally:
        await pool.close()
        await server.close()


async def test_an_engine_that_fails_is_not_the_agents_fault(store: SqliteStore, tmp_path: Path) -> None:
    rollout = await play(store, tmp_path, EngineError("out of breath"), "The answer is 12.")
    assert (rollout.status, rollout.attempts, rollout.reward()) == ("succeeded", 2, 1.0)
    assert [attempt.cause for attempt in await store.attempts("g.0")] == ["engine_error", None]


async def test_an_engine_that_fails_in_mid_answer(store: SqliteStore, tmp_path: Path) -> None:
    await play(store, tmp_path, Breaks("The answer is 12.", EngineError("gone")), "The answer is 12.")
    (broken,) = await store.turns("g.0", attempt=1)
    assert broken.finish == "error"
    assert broken.response_ids


async def test_what_was_sampled_for_an_agent_that_takes_too_long_is_recorded(
    store: SqliteStore, tmp_path: Path
) -> None:
    rollout = await play(store, tmp_path, "The answer is 12. " * 30, latency=0.2, timeout=1.5)
    assert (rollout.status, rollout.cause) == ("failed", "timeout")
    (turn,) = await store.turns("g.0")
    assert turn.finish == "abandoned"
    assert turn.response_ids
    assert len(turn.logprobs) == len(turn.response_ids)
