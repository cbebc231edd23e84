"""One fixture, `store`, parametrised by backend: every test of this folder runs against each of them."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from strop.store.base import Store
from strop.store.sqlite import SqliteStore


@pytest.fixture(params=["sqlite"])
async def store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Store]:
    opened = {"sqlite": lambda: SqliteStore.open(tmp_path / "store.sqlite")}[request.param]
    store = await opened()
    yield store
    await store.close()
