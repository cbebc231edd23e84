"""A run's folder is held by one process at a time, and looking at it disturbs nobody."""

import fcntl
import threading
import time
from pathlib import Path

import pytest

from strop.errors import PlaceError
from strop.folder import RunFolder, free


def test_whoever_looks_for_a_moment_does_not_keep_a_run_from_starting(tmp_path: Path) -> None:
    (tmp_path / "lock").touch()
    looking = threading.Event()

    def look() -> None:
        with (tmp_path / "lock").open("rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH)
            looking.set()
            time.sleep(0.03)

    thread = threading.Thread(target=look)
    thread.start()
    looking.wait()
    RunFolder.create(tmp_path)._lock.close()
    thread.join()


def test_a_held_folder_is_refused_and_seen_as_held(tmp_path: Path) -> None:
    assert not RunFolder.held(tmp_path)  # nobody was ever there
    run = RunFolder.create(tmp_path)
    assert RunFolder.held(tmp_path)
    with pytest.raises(PlaceError, match="another process"):
        RunFolder.create(tmp_path)
    run._lock.close()
    assert not RunFolder.held(tmp_path)


def test_a_run_of_another_version_is_left_alone_too(tmp_path: Path) -> None:
    demo = tmp_path / "demo"
    demo.mkdir()
    (demo / "config.json").write_text('{"a setting": "of long ago"}')
    assert free(demo, RunFolder.taken) == tmp_path / "demo-2"
    with pytest.raises(PlaceError, match="another strop"):
        RunFolder.config(demo)
