"""One fixture, `store`, parametrised by backend: every test that asks for it runs against each of them."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from strop.run.serve import open_store_server
from strop.store.base import Store
from strop.store.remote import HttpStore
from strop.store.sqlite import SqliteStore
from tests.postgres import postgres_server

__all__ = ["postgres_server"]  # a fixture

BACKENDS = ["sqlite", "http", pytest.param("postgres", marks=pytest.mark.postgres)]


@pytest.fixture(params=BACKENDS)
async def store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Store]:
    if request.param == "postgres":
        from strop.store.postgres import PostgresStore

        server = request.getfixturevalue("postgres_server")
        opened: Store = await PostgresStore.open(server.url(f"t{abs(hash(request.node.nodeid))}"))
        yield opened
        await opened.close()
        return
    behind = await SqliteStore.open(tmp_path / "store.sqlite")
    if request.param == "sqlite":
        yield behind
    else:
        async with open_store_server(behind) as server:
            over = await HttpStore.open(server.url, server.key)
            yield over
            await over.close()
    await behind.close()
