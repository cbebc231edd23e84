"""Turns that were written lately save work, and change nothing of what is written."""

import sqlite3
from hashlib import blake2b
from pathlib import Path
from typing import Any

import pytest

from strop.errors import Fenced
from strop.store import turns as stored
from strop.store.sqlite import SqliteStore
from strop.store.written import HashedBytes, WrittenTurns
from strop.types import Rollout, Task
from tests.unit.store.conversations import talk, wander


async def write(path: Path, remembered: int, *, size: int = 3) -> list[tuple[object, ...]]:
    """The rows of some wild conversations, with so many bytes of them remembered."""
    store = await SqliteStore.open(path)
    store._written = WrittenTurns(remembered)
    for seed in range(3):
        rollout = Rollout(id=f"r{seed}", group="g", member=0, task=Task(id="t"), created=0.0)
        await store.begin(rollout, "w", seconds=600)
        turns = wander(f"r{seed}", 50, seed)
        for first in range(0, len(turns), size):
            await store.add_turns(turns[first : first + size])
        await store.add_turns(turns[-2 * size :])  # said again
    await store.close()
    with sqlite3.connect(path) as connection:
        return connection.execute("SELECT * FROM turns ORDER BY seq").fetchall()


async def test_rows_are_the_same_whatever_is_remembered(tmp_path: Path) -> None:
    found = [await write(tmp_path / f"{limit}.sqlite", limit) for limit in (0, 2000, 1 << 20)]
    assert found[0] == found[1] == found[2]


async def test_a_turn_that_goes_on_packs_what_it_adds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packed: list[int] = []
    encode = stored._encode

    def counted(name: str, value: Any) -> Any:
        packed.extend([len(value)] * (name == "prompt_ids"))
        return encode(name, value)

    monkeypatch.setattr(stored, "_encode", counted)
    store = await SqliteStore.open(tmp_path / "store.sqlite")
    await store.begin(Rollout(id="r", group="g", member=0, task=Task(id="t"), created=0.0), "w", seconds=600)
    sums: list[int] = []
    for turn in talk("r", 12):
        packed.clear()
        await store.add_turns([turn])
        sums.append(sum(packed))
    await store.close()
    assert sums[-1] == sums[1] > 0


async def test_what_was_not_written_is_not_gone_on_from(tmp_path: Path) -> None:
    store = await SqliteStore.open(tmp_path / "store.sqlite")
    await store.begin(Rollout(id="r", group="g", member=0, task=Task(id="t"), created=0.0), "w", seconds=600)
    first, second = talk("r", 2)
    await store.finish("r", 1)
    with pytest.raises(Fenced):
        await store.add_turns([first])
    assert store._written.find(first.id) is None
    assert store._written.find(second.parent) is None
    await store.close()


def test_hashes_go_on_from_others() -> None:
    data = bytes(range(256)) * 8
    hashed: HashedBytes | None = None
    for end in range(100, 2000, 100):
        hashed = HashedBytes(data[: end + 50], hashed)
        for part in (end, end + 50, end // 2):
            assert hashed.hash(part) == blake2b(data[:part], digest_size=16).digest()
    other = HashedBytes(b"x" + data, hashed)
    assert other.hash(500) == blake2b(b"x" + data[:499], digest_size=16).digest()


async def test_what_has_ended_is_forgotten(tmp_path: Path) -> None:
    store = await SqliteStore.open(tmp_path / "store.sqlite")
    await store.begin(Rollout(id="r", group="g", member=0, task=Task(id="t"), created=0.0), "w", seconds=600)
    await store.add_turns(talk("r", 3))
    assert store._written.size > 0
    await store.finish("r", 1)
    assert (store._written.size, store._written._turns, store._written._ids) == (0, {}, {})
    await store.close()
