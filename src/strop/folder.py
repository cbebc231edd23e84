"""A run's folder: where everything of it lies, open to its owner only and held by one process at a time.

runs/demo/
  config.json     the full configuration it ran with
  store.sqlite    every rollout, turn, event and step
  metrics.jsonl   one line per step and evaluation
  checkpoints/    step-000010-1/ ...: each a Hugging Face folder (of a LoRA adapter: PEFT's), the optimizer's state
                  beside; best leads to one of them
  address.json    where its gateway is, while it is up
  learner.log, agents.log, gateway.log (if it has anything to say)
  summary.json, curve.png, transcripts.md
  tensorboard/, wandb/, mlruns/, monitor.json: what monitor.writers leave, where they are asked for
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import re
import shutil
import time
from collections.abc import Collection
from pathlib import Path
from typing import IO

from strop import config as configs
from strop.config import Config
from strop.errors import ConfigError, PlaceError
from strop.private import private, private_folder

BEST = "best"


class RunFolder:
    def __init__(self, path: Path, lock: IO[bytes]) -> None:
        self.path = path
        self._lock = lock  # held until `close`; the kernel lets go of it when the process dies

    @classmethod
    def create(cls, path: str | Path) -> RunFolder:
        """Make the folder of a new run. It holds a run once `keep` has been called."""
        path = Path(path)
        cls.refuse_taken(path)
        return cls._locked(path)

    @staticmethod
    def refuse_taken(path: Path) -> None:
        """Raises `PlaceError` if `path` holds a run already."""
        if os.path.exists(path / "config.json"):
            raise PlaceError(
                f"{path} already holds a run: go on with it by `strop train --resume {path}`, "
                "or choose another place with --folder"
            )

    @classmethod
    def open(cls, path: str | Path) -> RunFolder:
        """Open the folder of a run that was begun."""
        cls.config(Path(path))
        return cls._locked(Path(path))

    def close(self) -> None:
        """Let others have it."""
        self._lock.close()

    def keep(self, config: Config) -> None:
        """Write down the configuration: everything has started, and there is a run to go on with."""
        write_whole(self.path / "config.json", configs.to_json(config))

    @staticmethod
    def is_run(name: str) -> bool:
        """Whether `name`, which may be anything else as well, is the folder of a run."""
        return os.path.isdir(os.path.join(os.path.expanduser(name), "checkpoints"))

    @staticmethod
    def config(path: Path) -> Config:
        """The configuration of the run in `path`, wherever the folder lies now."""
        try:
            stored = configs.from_json((path / "config.json").read_bytes())
        except OSError:
            raise PlaceError(f"{path} holds no run (no config.json in it): check the path, or start one") from None
        except (ValueError, ConfigError) as error:
            raise PlaceError(f"{path}/config.json cannot be read: {error}; was it written by another strop?") from None
        return configs.load(base=stored, folder=str(path))

    @classmethod
    def _locked(cls, path: Path) -> RunFolder:
        try:
            private_folder(path)
            (path / "checkpoints").mkdir(exist_ok=True)
            lock = open(path / "lock", "wb", opener=private)  # noqa: SIM115 - held until `close`
        except OSError as error:
            raise PlaceError(
                f"cannot write to {path} ({error.strerror}): make it writable, or choose another place with --folder"
            ) from None
        for _ in range(5):  # somebody may only be looking, see `held`
            with contextlib.suppress(OSError):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return cls(path, lock)
            time.sleep(0.02)
        lock.close()
        raise PlaceError(f"another process is at work in {path}: wait for it, or choose another --folder")

    @staticmethod
    def held(path: Path) -> bool:
        """Whether a process is at work in `path`. Asking takes a shared lock for a moment, and changes nothing."""
        try:
            with (path / "lock").open("rb") as lock:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:
            return False
        return False

    @property
    def store(self) -> Path:
        return self.path / "store.sqlite"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def learner_log(self) -> Path:
        return self.path / "learner.log"

    @property
    def gateway_log(self) -> Path:
        return self.path / "gateway.log"

    @property
    def agents_log(self) -> Path:
        return self.path / "agents.log"

    @staticmethod
    def last_checkpoint(path: Path) -> Path:
        """The newest lineage's, of its highest step."""
        names = [
            found for p in (path / "checkpoints").iterdir() if (found := re.fullmatch(r"step-(\d+)-(\d+)", p.name))
        ]
        if not names:
            raise PlaceError(f"{path} has no checkpoint yet: let it run until loop.checkpoint_every steps are done")
        newest = max(names, key=lambda name: (int(name[2]), int(name[1])))
        return path / "checkpoints" / newest[0]

    @staticmethod
    def best_checkpoint(path: Path) -> Path:
        best = path / "checkpoints" / BEST
        if not best.exists():
            raise PlaceError(f"{path} has no checkpoint yet: let it run until loop.checkpoint_every steps are done")
        return best.resolve()

    @classmethod
    def chosen_checkpoint(cls, path: Path, *, best: bool) -> Path:
        """The best one, or the newest."""
        return cls.best_checkpoint(path) if best else cls.last_checkpoint(path)

    def name_best(self, name: str) -> None:
        """Have `best` lead to this checkpoint from now on; at no moment to none."""
        link, fresh = self.checkpoint(BEST), self.checkpoint(BEST + ".new")
        fresh.unlink(missing_ok=True)
        fresh.symlink_to(name)
        fresh.replace(link)
        directory = os.open(link.parent, os.O_RDONLY)
        try:
            os.fsync(directory)  # what it led to before may be deleted next
        finally:
            os.close(directory)

    def checkpoint(self, name: str) -> Path:
        return self.path / "checkpoints" / name

    def prune(self, keep: Collection[str]) -> None:
        """Delete checkpoints not in `keep`: old ones, those of a step that was never committed, halves of them. What a
        user put beside them stays."""
        for folder in (self.path / "checkpoints").iterdir():
            if folder.name not in keep and re.fullmatch(r"\.?step-\d+-\d+(\.new)?", folder.name):
                shutil.rmtree(folder, ignore_errors=True)


async def until_gone(path: Path) -> None:
    """Raises once `path` is not the file any more that it was when this began: removed, moved away or replaced. What is
    written after that is written into nowhere."""
    held = os.open(path, os.O_RDONLY)
    try:
        while _still_there(path, held):  # noqa: ASYNC110
            await asyncio.sleep(1.0)
    finally:
        os.close(held)
    raise PlaceError(f"{path} was removed or replaced while it was in use: what was said since then is lost")


def _still_there(path: Path, held: int) -> bool:
    ours = os.fstat(held)
    try:
        return ours.st_nlink > 0 and os.path.samestat(ours, path.stat())
    except OSError:
        return False


def write_whole(path: Path, data: bytes, *, shared: bool = False) -> None:
    """Write a file so that a reader finds all of it or what was there before. Others may read it if it is `shared`."""
    part = path.with_name(path.name + ".part")
    with open(part, "wb", opener=None if shared else private) as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)
