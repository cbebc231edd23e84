"""A gateway on a real socket: SQLite store, scripted engine. STROP_TEST_WORKERS=2 puts it into so many processes."""

import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from strop.engines.scripted import Scripted
from strop.gateway.template import Renderer
from strop.store.sqlite import SqliteStore
from tests import chatml
from tests.integration.gateway.stand import Stand, open_stand


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chatml.make(tmp_path_factory.mktemp("chatml"))


@pytest.fixture(scope="session")
def renderer(model: Path) -> Renderer:
    return Renderer.from_folder(model)


@pytest.fixture
async def stand(model: Path, renderer: Renderer, tmp_path: Path) -> AsyncIterator[Stand]:
    store = await SqliteStore.open(tmp_path / "store.sqlite")
    engine = Scripted([], renderer, chunk=1, context=1000)
    num_workers = int(os.environ.get("STROP_TEST_WORKERS", "1"))
    async with open_stand(model, store, engine, renderer, num_workers=num_workers) as stand:
        yield stand
    await store.close()
