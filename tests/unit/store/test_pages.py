"""Which pages are kept, and for how long. What they hold is tested in test_store.py, for every backend."""

from pathlib import Path

import pytest

from strop.store import pages
from strop.store.sqlite import SqliteStore
from strop.types import Rollout, Task


def rollouts(first: int, count: int) -> list[Rollout]:
    ids = [f"g1.{number}" for number in range(first, first + count)]
    return [Rollout(id=id, group="g1", member=0, task=Task(id="t"), created=1.0) for id in ids]


async def test_a_page_is_made_once_for_as_long_as_no_rollout_changes(tmp_path: Path):
    store = await SqliteStore.open(tmp_path / "store.sqlite")
    other = await SqliteStore.open(tmp_path / "store.sqlite")  # another process
    await store.enqueue(rollouts(0, 3))
    statements: list[str] = []
    store._reader._connection.set_trace_callback(statements.append)

    async def made(**which) -> bool:
        statements.clear()
        await store.list_json(**which)
        return any("FROM rollouts" in statement for statement in statements)

    assert [await made(limit=2), await made(limit=2)] == [True, False]
    assert [await made(limit=2, newest=True), await made(limit=2)] == [True, False]
    await store.lease("w", seconds=30)
    assert [await made(limit=2), await made(limit=2)] == [True, False]
    await other.cancel(["g1.1"], detail="not wanted")
    assert [await made(limit=2), await made(limit=2)] == [True, False]
    assert b"not wanted" in await store.list_json(limit=2)
    await other.close()
    await store.close()


async def test_kept_pages_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    store = await SqliteStore.open(tmp_path / "store.sqlite")
    await store.enqueue(rollouts(0, 9))
    size = len(await store.list_json(limit=1))
    monkeypatch.setattr(pages, "MAX_KEPT", 3 * size)
    for limit in (1, 2, 9, 1):
        await store.list_json(limit=limit)
        _, kept = store._pages._kept
        assert sum(map(len, kept.values())) <= 3 * size
        assert any(query.limit == limit for query in kept) == (limit != 9)
    await store.close()


async def test_pages_that_nobody_has_are_bounded_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """An empty page is two bytes; what it was asked for by may be long."""
    store = await SqliteStore.open(tmp_path / "store.sqlite")
    for number in range(2 * pages.MAX_PAGES):
        assert await store.list_json(group=f"nobody {number}") == b"[]"
        assert len(store._pages._kept[1]) <= pages.MAX_PAGES
    monkeypatch.setattr(pages, "MAX_KEPT", 1000)
    await store.list_json(group="n" * 2000)
    assert not any(len(query.group or "") > 1000 for query in store._pages._kept[1])
    await store.close()
