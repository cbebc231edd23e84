"""A gateway on a real socket: SQLite store, scripted engine."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from strop.engines.scripted import Scripted
from strop.gateway.app import Gateway
from strop.gateway.route import PolicyRoute, Routes
from strop.gateway.template import Renderer
from strop.net.server import serve
from strop.store.sqlite import SqliteStore
from strop.types import Rollout, Sampling
from tests import chatml
from tests.integration.gateway.stand import Stand


@pytest.fixture(scope="session")
def renderer(tmp_path_factory: pytest.TempPathFactory) -> Renderer:
    return Renderer.from_folder(chatml.make(tmp_path_factory.mktemp("chatml")))


@pytest.fixture
async def stand(renderer: Renderer, tmp_path: Path) -> AsyncIterator[Stand]:
    store = await SqliteStore.open(tmp_path / "store.sqlite")
    engine = Scripted([], renderer, chunk=1, context=1000)

    def sampling_for(rollout: Rollout) -> Sampling:
        return Sampling(max_tokens=200) if rollout.mode == "train" else Sampling(temperature=0.0, max_tokens=100)

    route = PolicyRoute(policy="p", model="tiny", engine=engine, renderer=renderer, sampling_for=sampling_for)
    gateway = Gateway(store, Routes({"*": route}))
    server = await serve(gateway)
    stand = Stand(store, engine, gateway, server)
    yield stand
    for client in stand.clients:
        await client.close()
    await server.close()
    await store.close()
