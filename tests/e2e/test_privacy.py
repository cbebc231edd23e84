"""What a run keeps is its owner's: another user of the machine can open none of it."""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from strop.run.folder import RunFolder
from strop.run.serve import hold_folder
from strop.store.sqlite import SqliteStore
from tests import runs

NOBODY = 65534
LOOK = f"""
import os, sys
os.setgroups([])
os.setgid({NOBODY})
os.setuid({NOBODY})
for folder, _, files in os.walk(sys.argv[1]):
    for name in files:
        try:
            open(os.path.join(folder, name), "rb").close()
            print(os.path.join(folder, name))
        except OSError:
            pass
try:
    print(os.listdir(sys.argv[1]))
except PermissionError:
    pass
for name in sys.argv[2:]:
    try:
        open(name, "rb").close()
        print(name)
    except PermissionError:
        pass
"""


@pytest.fixture
def shared() -> Iterator[Path]:
    """A folder that every user can look into, as a shared disk would be."""
    folder = Path(tempfile.mkdtemp(prefix="strop-shared-"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def assert_private(folder: Path) -> None:
    inside = [path for path in folder.rglob("*") if path.is_file()]
    assert inside
    assert mode_of(folder) == 0o700
    for path in folder.iterdir():
        if path.is_file() and path.name != "curve.png":  # a picture to be shown around
            assert mode_of(path) & 0o077 == 0, path
    if os.getuid() == 0:  # really, as another user
        look = [sys.executable, "-c", LOOK, str(folder), *map(str, inside)]
        done = subprocess.run(look, capture_output=True, text=True, check=False)
        assert (done.stdout, done.stderr) == ("", "")


def test_the_folder_of_a_run_opens_for_its_owner_only(shared: Path) -> None:
    folder = shared / "run"
    settings = [*runs.SMALL, "loop.steps=1", "loop.groups=1", "loop.group_size=2", "loop.eval_every=0"]
    runs.finish(runs.demo(folder, *settings))
    names = {path.name for path in folder.iterdir()}
    assert {"store.sqlite", "config.json", "learner.log", "agents.log", "metrics.jsonl", "transcripts.md"} <= names
    assert_private(folder)


def test_the_folder_of_a_served_store_opens_for_its_owner_only(shared: Path) -> None:
    folder = shared / "served"
    command = runs.strop("serve", "--folder", folder, "--port", "0", "--json")
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        json.loads(server.stdout.readline())
        try:
            names = {path.name for path in folder.iterdir()}  # while it is up, when the keys in it open something
            assert {"store.sqlite", "store.sqlite-wal", "store.sqlite-shm", "address.json", "key", "lock"} <= names
            assert_private(folder)
        finally:
            server.terminate()


@pytest.mark.parametrize("opened", ["run", "served"])
def test_a_folder_that_was_open_to_all_is_closed_when_it_is_opened(shared: Path, opened: str) -> None:
    folder = shared / "older"
    (folder / "checkpoints").mkdir(parents=True)
    for name in ("store.sqlite", "agents.log", "address.json"):
        (folder / name).touch()
        (folder / name).chmod(0o644)
    folder.chmod(0o755)
    if opened == "run":
        RunFolder.create(folder).close()
    else:
        with hold_folder(folder, alone=True):
            pass
    assert_private(folder)


async def test_a_store_of_its_own_is_private_and_its_folder_is_left_alone(shared: Path) -> None:
    store = await SqliteStore.open(shared / "mine.sqlite")
    try:
        modes = {name: mode_of(shared / name) for name in os.listdir(shared)}
    finally:
        await store.close()
    assert modes == dict.fromkeys(("mine.sqlite", "mine.sqlite-wal", "mine.sqlite-shm"), 0o600)
    assert mode_of(shared) == 0o755


def test_a_folder_that_is_everybodys_is_left_as_it_is(shared: Path) -> None:
    shared.chmod(0o1777)  # as /tmp is: closing it would take it from everybody else
    RunFolder.create(shared).close()
    assert mode_of(shared) == 0o1777
    assert mode_of(shared / "lock") == 0o600
    assert mode_of(shared / "checkpoints") == 0o700
