from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from strop.store.sqlite import SqliteStore


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[SqliteStore]:
    store = await SqliteStore.open(tmp_path / "store.sqlite")
    yield store
    await store.close()
