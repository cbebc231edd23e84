"""A new column of a turn takes two files, as `store/turns.py` says: done to a copy, as a contributor would."""

import difflib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import strop
from strop.store import schema
from tests.unit.store import version_3
from tests.unit.store.conversations import talk

SOURCE = Path(strop.__file__).parent
EDITS = {
    "types.py": ("    started: float\n    ended: float\n\n    @property\n    def ids", "    queued: float = 0.0\n"),
    "store/turns.py": ('    # "latency"', f'    "queued": AddedColumn({schema.VERSION + 1}, "0"),\n'),
}

USE = """
import asyncio, sys
from msgspec.structs import replace
from strop.store.sqlite import SqliteStore
from tests.unit.store.conversations import talk
from tests.unit.store.conftest import HttpStore, open_store_server
from tests.unit.store.test_turn_deltas import begin

async def use(path):
    store = await SqliteStore.open(path)
    older = await store.turns("r")
    assert older and all(turn.queued == 0.0 for turn in older), older
    new = [replace(turn, queued=1.5) for turn in talk("r", 5)[3:]]
    await store.add_turns(new)
    assert (await store.turns("r"))[3:] == new
    async with open_store_server(store) as server:
        over = await HttpStore.open(server.url, server.key)
        assert (await over.turns("r"))[3:] == new
        await over.close()
    await store.close()

for path in sys.argv[1:]:
    asyncio.run(use(path))
"""


def test_a_column_takes_two_files(tmp_path: Path):
    three, four = tmp_path / "three.sqlite", tmp_path / "four.sqlite"
    version_3.write(three, talk("r", 3))
    version_3.write(four, talk("r", 3))
    opened = (
        "import asyncio, sys; from strop.store.sqlite import SqliteStore; asyncio.run(SqliteStore.open(sys.argv[1]))"
    )
    subprocess.run([sys.executable, "-c", opened, str(four)], check=True)  # as today's strop leaves it
    copy = tmp_path / "src" / "strop"
    shutil.copytree(SOURCE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    added = 0
    for name, (before, line) in EDITS.items():
        text = (copy / name).read_text()
        assert text.count(before) == 1
        (copy / name).write_text(text.replace(before, line + before))
        added += sum(
            change.startswith("+ ")
            for change in difflib.ndiff(text.splitlines(), (copy / name).read_text().splitlines())
        )
    assert added == 2
    root = str(SOURCE.parent.parent)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(copy.parent), root])}
    subprocess.run([sys.executable, "-c", USE, str(three), str(four)], check=True, env=environment, cwd=tmp_path)
