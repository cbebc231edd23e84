"""While no engine of a policy can answer, every rollout that runs has it written down, once per attempt."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

import strop
from strop.engines.scripted import Scripted
from strop.gateway.template import Renderer
from strop.run import outages
from strop.run.outages import tell_of_outages
from strop.store import open_store
from strop.store.base import Store
from strop.types import Cause, Event, Retry, Rollout, Task


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[Store]:
    store = await open_store(tmp_path)
    yield store
    await store.close()


class Server(Scripted):
    up = True

    @property
    def serving(self) -> bool:
        return self.up


async def codes(store: Store, rollout: str, attempt: int) -> list[Any]:
    events: list[Event] = await store.events(rollout, attempt=attempt)
    return [event.data.get("code") for event in events if event.kind == "error"]


async def test_who_runs_during_an_outage_is_told_once(store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outages, "LOOK", 0.02)
    monkeypatch.setattr(outages, "SHORT", 0.1)
    retry: dict[Cause, Retry] = {"agent_error": Retry(limit=1)}
    rollouts = [
        Rollout(id=f"g{n}.0", group=f"g{n}", member=0, task=Task(id="t"), created=0.0, retries=retry) for n in range(3)
    ]
    await store.enqueue(rollouts)
    await store.lease("w", count=2, seconds=60)
    renderer = Renderer.from_folder(Path(strop.__file__).parent / "models" / "nano")
    first, second = Server([], renderer), Server([], renderer)
    watching = asyncio.create_task(tell_of_outages([first, second], store))
    second.up = False
    await asyncio.sleep(0.05)
    second.up = True
    await asyncio.sleep(0.2)
    assert await codes(store, "g0.0", 1) == [], "too short to be told"
    second.up = False
    await asyncio.sleep(0.4)
    assert [await codes(store, f"g{n}.0", 1) for n in (0, 1)] == [["engine_down"]] * 2
    await store.finish("g0.0", 1, cause="agent_error", detail="")
    await store.lease("w", count=2, seconds=60)
    await asyncio.sleep(0.2)
    assert await codes(store, "g0.0", 2) == ["engine_down"], "another attempt"
    assert await codes(store, "g2.0", 1) == ["engine_down"], "it began meanwhile"
    assert await codes(store, "g1.0", 1) == ["engine_down"]
    second.up = True
    await asyncio.sleep(0.1)
    second.up = False
    await asyncio.sleep(0.3)
    assert await codes(store, "g1.0", 1) == ["engine_down"] * 2, "another outage"
    watching.cancel()
