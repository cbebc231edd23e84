"""A new run in a place: the one that was there comes back, and nothing is left behind, unless the new one begins."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Generator, Iterable
from pathlib import Path

from strop.errors import PlaceError
from strop.imports import GIVEN
from strop.run.folder import ASIDE, BEST, CHANGES, RunFolder

_LEFT = (
    *("config.json", "config.json.part", CHANGES, "store.sqlite*", "metrics.jsonl", "address.json", "summary.json"),
    *("learner.log", "agents.log", "gateway.log", "vllm.log", "sglang.log", "curve.png", "agents.png"),
    "transcripts.md",
    "data.jsonl",
    *("tensorboard", "wandb", "mlruns", "monitor.json", "weights", "policies", "start", "start.json", "past"),
    *("first", "prompts.json", "calls.jsonl"),
    *("learner-[0-9]*.log", "replica-[0-9]*", "gateway-[0-9]*.log", "runner-[0-9]*.log"),
    *("cluster.jsonl", "processes.jsonl"),
    *("checkpoints/step-[0-9]*", "checkpoints/.step-[0-9]*", f"checkpoints/{BEST}"),
)
"""What a run leaves in its folder, beside its lock. (Tasks may be a user's.)"""
_MADE = (*_LEFT, "tasks.jsonl", "key", f"*{GIVEN}.py", f"*{GIVEN}.pkl", "checkpoints", "lock")
"""What is made in the folder of a run until it has begun."""


@contextlib.contextmanager
def overwrite(path: Path) -> Generator[None]:
    """Another run may take the place of the one in `path`, which is deleted once that has begun, and put back if it
    never does. What a run does not leave there stays. Raises `PlaceError`, with everything as it was, if that is no
    run, or not one's to delete."""
    _put_back(path)  # the last time ended in between
    if path.exists():
        _set_aside(path)
    try:
        yield
    finally:
        _put_back(path)


@contextlib.contextmanager
def leave_nothing(path: Path) -> Generator[None]:
    """Where no run begins in `path` meanwhile, what was made there for it is deleted again, but for logs that have
    something to say. What was there before stays, and so does what another process holds."""
    before, new = set(_find(path, _MADE)), [place for place in (path, *path.parents) if not place.exists()]
    try:
        yield
    finally:
        if path.is_dir() and not (path / "config.json").exists():
            with contextlib.suppress(PlaceError):  # another one is at work there
                run = RunFolder.lock(path)
                for place in _find(path, _MADE):
                    if place not in before:
                        _delete_but_logs(place)
                run.close()
        for place in new:
            with contextlib.suppress(OSError):  # there is something in it
                place.rmdir()


def _set_aside(path: Path) -> None:
    if not (path / "config.json").exists() and set(path.iterdir()) <= {*_find(path, _MADE)} - {path / "checkpoints"}:
        return  # logs of one that never began
    if not (path / "checkpoints").is_dir() or not (path / "config.json").is_file():
        raise PlaceError(
            f"{path} is there and holds no run, and --overwrite deletes runs only. Fix: choose another --folder"
        )
    if RunFolder.config(path).store.url:
        raise PlaceError(
            f"the run in {path} has its store in a database, which --overwrite does not delete. Fix: choose "
            "another --folder, and a schema of its own"
        )
    run = RunFolder.lock(path)
    try:
        (path / ASIDE).mkdir()
        _move(path, path / ASIDE)
    except OSError as error:
        _move(path / ASIDE, path)
        raise PlaceError(f"cannot delete the run in {path} ({error}). Fix: choose another --folder") from None
    finally:
        run.close()


def _put_back(path: Path) -> None:
    """The run that was set aside, unless another one has begun since."""
    if not (path / ASIDE).is_dir():
        return
    if not (path / "config.json").exists():
        run = RunFolder.lock(path)
        try:
            for place in _left(path):
                _delete(place)
            _move(path / ASIDE, path)
        finally:
            run.close()
    shutil.rmtree(path / ASIDE)


def _left(path: Path) -> list[Path]:
    """What a run has left in `path`, its configuration first: without that it is none."""
    return _find(path, _LEFT)


def _find(path: Path, names: Iterable[str]) -> list[Path]:
    return list(dict.fromkeys(place for name in names for place in path.glob(name)))


def _delete_but_logs(place: Path) -> None:
    """Delete a file or a folder; logs that are not empty stay, and the folders that they are in."""
    if place.is_dir() and not place.is_symlink():
        for inner in place.iterdir():
            _delete_but_logs(inner)
        with contextlib.suppress(OSError):
            place.rmdir()
    elif place.suffix != ".log" or not place.lstat().st_size:
        place.unlink(missing_ok=True)


def _move(path: Path, to: Path) -> None:
    (to / "checkpoints").mkdir(exist_ok=True)
    for place in _left(path):
        place.rename(to / place.relative_to(path))


def _delete(place: Path) -> None:
    shutil.rmtree(place) if place.is_dir() and not place.is_symlink() else place.unlink()
