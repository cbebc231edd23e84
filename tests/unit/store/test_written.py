"""Turns that were written lately save work, and change nothing of what is written."""

import sqlite3
from hashlib import blake2b
from pathlib import Path
from typing import Any

import pytest

from strop.errors import Fenced
from strop.store import written
from strop.store.sqlite import SqliteStore
from strop.store.written import HashedBytes, WrittenTurns
from strop.types import Rollout, Task, Turn
from tests.unit.store.conversations import say, talk, wander
from tests.unit.store.test_turn_deltas import branch


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


async def test_a_turn_that_goes_on_hashes_what_it_adds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: list[int] = []

    class Counted:
        """The real hash, counting what goes into it."""

        def __init__(self, data: bytes = b"", digest_size: int = 16, *, state: Any = None) -> None:
            self._state = state or blake2b(data, digest_size=digest_size)
            hashed.append(len(data))

        def copy(self) -> "Counted":
            return Counted(state=self._state.copy())

        def update(self, data: bytes) -> None:
            hashed.append(len(data))
            self._state.update(data)

        def digest(self) -> bytes:
            return self._state.digest()

    monkeypatch.setattr(written, "blake2b", Counted)
    store = await SqliteStore.open(tmp_path / "store.sqlite")
    await store.begin(Rollout(id="r", group="g", member=0, task=Task(id="t"), created=0.0), "w", seconds=600)
    sums: list[int] = []
    for turn in talk("r", 9):
        hashed.clear()
        await store.add_turns([turn])
        sums.append(sum(hashed))
    await store.close()
    assert len(set(sums[2:])) == 1, sums


async def test_what_was_not_written_is_not_gone_on_from(tmp_path: Path) -> None:
    store = await SqliteStore.open(tmp_path / "store.sqlite")
    await store.begin(Rollout(id="r", group="g", member=0, task=Task(id="t"), created=0.0), "w", seconds=600)
    first, second = talk("r", 2)
    await store.finish("r", 1)
    with pytest.raises(Fenced):
        await store.add_turns([first])
    assert store._written.find("r", first.id) is None
    assert store._written.find("r", second.parent) is None
    await store.close()


async def test_hashes_are_of_the_messages_where_an_earlier_turn_is_longer(tmp_path: Path) -> None:
    """The second turn begins with a part of the first one's long message, which the third is too short to have."""
    system, long, short = say("system", "s"), "u" * 400, say("user", "x" * 10)
    turns = [branch(0, system, say("user", long)), branch(1, system, say("user", long + "more")), branch(2, short)]
    turns.append(branch(3, short, turns[2].answer, say("user", "on"), parent="r/1/2"))
    turns.append(branch(4, *turns[3].messages, turns[3].answer, say("user", "on"), parent="r/1/3"))
    found: list[list[tuple[object, ...]]] = []
    for limit in (0, 1 << 20):
        store = await SqliteStore.open(tmp_path / f"{limit}.sqlite")
        store._written = WrittenTurns(limit)
        await store.begin(Rollout(id="r", group="g", member=0, task=Task(id="t"), created=0.0), "w", seconds=600)
        for turn in turns:
            await store.add_turns([turn])
        assert await store.turns("r") == turns
        await store.close()
        with sqlite3.connect(tmp_path / f"{limit}.sqlite") as connection:
            found.append(connection.execute("SELECT * FROM turns ORDER BY seq").fetchall())
    assert found[0] == found[1]


def test_hashes_go_on_from_others() -> None:
    data = bytes(range(256)) * 8
    hashed: HashedBytes | None = None
    for end in range(100, 2000, 100):
        hashed = HashedBytes(data[: end + 50], hashed)
        for part in (end, end + 50, end // 2):
            assert hashed.hash(part) == blake2b(data[:part], digest_size=16).digest()


async def test_what_has_ended_is_forgotten(tmp_path: Path) -> None:
    store = await SqliteStore.open(tmp_path / "store.sqlite")
    await store.begin(Rollout(id="r", group="g", member=0, task=Task(id="t"), created=0.0), "w", seconds=600)
    await store.add_turns(talk("r", 3))
    assert store._written.size > 0
    await store.finish("r", 1)
    assert (store._written.size, store._written._turns) == (0, {})
    await store.close()


async def test_a_list_that_its_owner_goes_on_with_is_written_as_it_was(tmp_path: Path) -> None:
    """Turns may share the list of their prompts' ids, and grow it: what was written is not looked up in it."""
    store = await SqliteStore.open(tmp_path / "store.sqlite")
    await store.begin(Rollout(id="r", group="g", member=0, task=Task(id="t"), created=0.0), "w", seconds=600)
    ids, wanted = list(range(10)), list[list[int]]()
    parent, shared = None, 0
    for number in range(3):
        turn = Turn(
            id=f"r/1/{number}",
            rollout="r",
            attempt=1,
            prompt_ids=ids,
            response_ids=[100 + number],
            logprobs=[-1.0],
            versions=[(0, "1.0")],
            finish="stop",
            parent=parent,
            shared=shared,
            started=float(number),
            ended=float(number),
        )
        await store.add_turns([turn])
        wanted.append([*ids])
        parent, shared = turn.id, len(ids) + 1
        ids += [100 + number, 200, 300 + number]
    assert [turn.prompt_ids for turn in await store.turns("r")] == wanted
    await store.close()
