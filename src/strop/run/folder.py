"""A run's folder: where everything of it lies, open to its owner only and held by one process at a time.

runs/demo/
  config.json     the full configuration it began with
  changes.jsonl   what was changed when it was resumed, one line each
  start/          the weights it began with, where they are another run's
  store.sqlite    every rollout, turn, event and step
  metrics.jsonl   one line per step and evaluation
  data.jsonl      what it learns from, where that was stored already
  checkpoints/    step-000010-1/ ...: each a Hugging Face folder (of a LoRA adapter: PEFT's), the optimizer's state
                  beside; with several policies there is a folder like that in it for each, by name; best leads to one
                  of them, and .damaged follows the name of one that could not be read
  first/          the prompts it began with, where it improves some: RUN:0
  prompts.json    every version of them, with what each came to; calls.jsonl: every call of the optimiser model
  .overwritten/   the run that was here before, until this one has begun
  address.json    where its gateway is, while it is up
  past/           NAME/1.4/ ...: checkpoints of an earlier run that answer in the place of a policy
  policies/       NAME/ ...: learner.log and weights of each, where there are several
  learner.log, agents.log, gateway.log (if it has anything to say); learner-1.log, ... of further ranks
  replica-2/      ...: logs and weights of an engine's further replicas
  cluster.jsonl, processes.jsonl: what happened to processes on a cluster, and how busy they were; gateway-0.log, ...
                  and runner-0.log, ... are theirs
  summary.json, curve.png, agents.png (by role, where several agents are rewarded), transcripts.md
  tensorboard/, wandb/, mlruns/, monitor.json: what monitor.writers leave, where they are asked for
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import itertools
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import IO, Any

import msgspec

from strop import config as configs
from strop.config import Config
from strop.errors import ConfigError, PlaceError
from strop.files import close_to_others, find_near, private, private_folder, sync_folder, write_whole
from strop.types import version

BEST, CHANGES, ASIDE, FIRST = "best", "changes.jsonl", ".overwritten", "first"
_STEP = re.compile(r"step-(\d+)-(\d+)")


class RunFolder:
    def __init__(self, path: Path, lock: IO[bytes]) -> None:
        self.path = path
        self._lock = lock  # held until `close`; the kernel lets go of it when the process dies

    @classmethod
    def create(cls, path: str | Path) -> RunFolder:
        """Make the folder of a new run. It holds a run once `keep` has been called."""
        path = Path(path)
        if os.path.exists(path / "config.json"):
            raise PlaceError(
                f"{path} already holds a run. Fix: go on with it by `strop train --resume {path}`, "
                "or choose another place with --folder"
            )
        return cls.lock(path)

    @classmethod
    def is_taken(cls, path: Path) -> bool:
        """Whether a new run must leave `path` alone: it holds one, or one is about to begin there."""
        return os.path.exists(path / "config.json") or os.path.exists(path / ASIDE) or cls.is_held(path)

    @classmethod
    def open(cls, path: str | Path) -> RunFolder:
        """Open the folder of a run that was begun."""
        store = Path(path) / "store.sqlite"
        if not cls.config(Path(path)).store.url and not (store.is_file() and store.stat().st_size):
            raise PlaceError(  # opened, it would be made anew, and a log beside it that still has everything deleted
                f"{store} is {'empty' if store.exists() else 'gone'}, which has all that the run recorded. Fix: put it "
                f"back (with {store.name}-wal, if that is there), or begin a new run from the newest weights with "
                f"`strop train --from {path}`"
            )
        return cls.lock(Path(path))

    def close(self) -> None:
        """Let others have it."""
        self._lock.close()

    def keep(self, config: Config) -> None:
        """Write down the configuration: everything has started, and there is a run to go on with."""
        write_whole(self.path / "config.json", configs.to_json(config))
        shutil.rmtree(self.path / ASIDE, ignore_errors=True)

    @staticmethod
    def is_run(name: str) -> bool:
        """Whether `name`, which may be anything else as well, is the folder of a run."""
        return os.path.isdir(os.path.join(os.path.expanduser(name), "checkpoints"))

    def change(self, changed: Mapping[str, tuple[Any, Any]], *, step: int) -> None:
        """Write down settings, each before and after, that hold from behind this step on."""
        line = msgspec.json.encode({"after_step": step, "time": round(time.time(), 1), "changed": changed})
        write_whole(self.path / CHANGES, b"".join([*_lines(self.path / CHANGES), line + b"\n"]))

    @staticmethod
    def config(path: Path, step: int | None = None) -> Config:
        """The configuration of the run in `path`, wherever the folder lies now, as it is or as it was for a step."""
        try:
            config = configs.from_json((path / "config.json").read_bytes())
            for line in map(msgspec.json.decode, _lines(path / CHANGES)):
                if step is None or line["after_step"] < step:
                    config = configs.changed(config, {key: after for key, (_, after) in line["changed"].items()})
        except OSError:
            raise explain_no_run(path) from None
        except (ValueError, TypeError, KeyError, ConfigError) as error:
            why = str(error).partition(". Fix: ")[0]
            raise PlaceError(
                f"the settings in {path} cannot be read: {why}. Fix: use the strop that wrote them"
            ) from None
        return configs.load(base=config, folder=str(path))

    @classmethod
    def lock(cls, path: Path) -> RunFolder:
        try:
            private_folder(path)
            (path / "checkpoints").mkdir(mode=0o700, exist_ok=True)
            close_to_others(path / "checkpoints")  # also where the folder itself is everybody's
            lock = open(path / "lock", "wb", opener=private)  # noqa: SIM115 - held until `close`
        except OSError as error:
            raise PlaceError(
                f"cannot write to {path} ({error.strerror}). Fix: make it writable, or choose another place with "
                "--folder"
            ) from None
        for _ in range(5):  # somebody may only be looking, see `is_held`
            with contextlib.suppress(OSError):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if _still_there(path / "lock", lock.fileno()):  # or else whoever had it has deleted it
                    return cls(path, lock)
            time.sleep(0.02)
        lock.close()
        raise PlaceError(f"another process is at work in {path}. Fix: wait for it, or choose another --folder")

    @staticmethod
    def is_held(path: Path) -> bool:
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
    def gateway_log(self) -> Path:
        return self.path / "gateway.log"

    @property
    def agents_log(self) -> Path:
        return self.path / "agents.log"

    @staticmethod
    def last_checkpoint(path: Path) -> Path:
        """The newest lineage's, of its highest step."""
        names = _checkpoints(path)
        if not names:
            raise PlaceError(
                f"{path} has no checkpoint yet. Fix: let it run until loop.checkpoint_every steps are done"
            )
        newest = max(names, key=lambda name: (int(name[2]), int(name[1])))
        return path / "checkpoints" / newest[0]

    @staticmethod
    def best_checkpoint(path: Path) -> Path:
        best = path / "checkpoints" / BEST
        if not best.exists():
            raise PlaceError(
                f"{path} has no checkpoint yet. Fix: let it run until loop.checkpoint_every steps are done"
            )
        return best.resolve()

    @classmethod
    def checkpoint_at(cls, path: Path, step: str) -> Path:
        """That of a step, by its number, of the newest lineage that has it; or the `best`."""
        if step == BEST:
            return cls.best_checkpoint(path)
        if int(step) == 0 and (path / FIRST).is_dir():
            return path / FIRST
        found = _checkpoints(path)
        wanted = [name for name in found if int(name[1]) == int(step)]
        if not wanted:
            cls.last_checkpoint(path)  # a sentence, since there is none at all
            there = ", ".join(map(str, sorted({int(name[1]) for name in found})))
            raise PlaceError(f"{path} has no checkpoint of step {step}. Fix: name one of steps {there}, or `best`")
        return path / "checkpoints" / max(wanted, key=lambda name: int(name[2]))[0]

    @classmethod
    def chosen_checkpoint(cls, path: Path, step: str = "") -> Path:
        """That of a step, the `best`, or else the run's result: the newest, unless the run collapsed, which is said."""
        if step:
            return cls.checkpoint_at(path, step)
        newest, summary = cls.last_checkpoint(path), cls.summary(path)
        if not summary.get("collapsed") or cls.is_held(path):  # held: it was resumed, and goes on
            return newest
        good = path / "checkpoints" / str(summary.get("checkpoint"))
        chosen, which = (good, "its last good checkpoint") if good.is_dir() else (newest, "as no good one is left")
        print(f"strop: {path} collapsed: taking {chosen.name}, {which}; {path}:STEP names another", file=sys.stderr)
        return chosen

    @staticmethod
    def summary(path: Path) -> dict[str, Any]:
        """What a run left when it last ended; nothing where it was killed before it ever did."""
        try:
            return msgspec.json.decode((path / "summary.json").read_bytes(), type=dict[str, Any])
        except (OSError, msgspec.MsgspecError):
            return {}

    @classmethod
    def parse_name(cls, name: str) -> tuple[Path, str] | None:
        """The run and the step (or `best`, or nothing) that RUN, RUN:STEP or RUN:best names; None if it is no run's."""
        place, _, step = name.rpartition(":")
        if cls.is_run(name) or not re.fullmatch(rf"\d+|{BEST}", step):
            place, step = name, ""
        return (Path(place).expanduser(), step) if cls.is_run(place) else None

    @staticmethod
    def choose_part(checkpoint: Path, policy: str = "") -> Path:
        """The checkpoint of one model: the whole, or of a run with several policies the part of the one that is named.
        Raises `PlaceError` where that one is not there, or none is named."""
        if not (parts := list_parts(checkpoint)) and not policy:
            return checkpoint
        if policy in parts:
            return checkpoint / policy
        if not parts:
            raise PlaceError(f"{checkpoint} is one model, without parts of several policies. Fix: leave out --policy")
        there = f"{checkpoint} has a part for each of several policies ({', '.join(parts)})"
        said = f"and none of them is {policy!r}" if policy else "and one model is asked for"
        raise PlaceError(
            f"{there}, {said}. Fix: name one, with --policy {parts[0]} where the command has it, or by its folder: "
            f"{checkpoint / parts[0]}"
        )

    def name_best(self, name: str) -> None:
        """Have `best` lead to this checkpoint from now on; at no moment to none."""
        link, fresh = self.checkpoint(BEST), self.checkpoint(BEST + ".new")
        fresh.unlink(missing_ok=True)
        fresh.symlink_to(name)
        fresh.replace(link)
        sync_folder(link.parent)  # what it led to before may be deleted next

    def checkpoint(self, name: str) -> Path:
        return self.path / "checkpoints" / name

    def checkpoints(self) -> dict[str, int]:
        """The names of those that are here with the numbers of their steps, by lineage and step."""
        return {name[0]: int(name[1]) for name in _checkpoints(self.path)}

    def set_aside(self, name: str) -> Path:
        """Rename a checkpoint that is damaged: it stays, and is none any more."""
        aside = self.checkpoint(f"{name}.damaged")
        shutil.rmtree(aside, ignore_errors=True)
        return self.checkpoint(name).rename(aside)

    def prune(self, keep: Collection[str]) -> None:
        """Delete checkpoints not in `keep`: old ones, those of a step that was never committed, halves of them. What a
        user put beside them stays, and so does the half of one in `keep`, which is being written."""
        for folder in (self.path / "checkpoints").iterdir():
            found = re.fullmatch(r"\.?(step-\d+-\d+)(\.new)?", folder.name)
            if found and found[1] not in keep:
                shutil.rmtree(folder, ignore_errors=True)


def explain_no_run(path: Path) -> PlaceError:
    """What to say of a folder that holds no run, or is not there."""
    missing = not path.exists()
    near = find_near(path, folders=True) if missing else None
    fix = f"write {near}" if near else "check the path, or begin a run with `strop train`"
    return PlaceError(
        f"{path} holds no run ({'there is no such folder' if missing else 'no config.json in it'}). Fix: {fix}"
    )


def find_free(folder: Path, taken: Callable[[Path], bool] = Path.exists) -> Path:
    """The folder, or the first with a number behind its name that is not taken: runs/demo, runs/demo-2, ..."""
    numbered = (folder.with_name(f"{folder.name}-{n}") for n in itertools.count(2))
    return next(name for name in itertools.chain([folder], numbered) if not taken(name))


def name_step(lineage: int, number: int) -> str:
    """What the checkpoint of a step is called.

    >>> name_step(2, 10)
    'step-000010-2'
    """
    return f"step-{number:06d}-{lineage}"


def find_parts(checkpoint: Path, policies: Collection[str]) -> dict[str, Path]:
    """The folder of every policy's part of a checkpoint: the checkpoint itself where there is one policy."""
    return {name: checkpoint if len(policies) == 1 else checkpoint / name for name in policies}


def list_parts(checkpoint: Path) -> list[str]:
    """The policies that a checkpoint has a part of; none where it is one model's."""
    there = checkpoint.iterdir() if checkpoint.is_dir() else ()
    return sorted(part.name for part in there if (part / "strop.json").is_file())


def _lines(path: Path) -> list[bytes]:
    return path.read_bytes().splitlines(keepends=True) if path.exists() else []


def list_versions(run: Path) -> dict[str, Path]:
    """A run's checkpoints by version, oldest first."""
    return {version(int(name[2]), int(name[1])): run / "checkpoints" / name[0] for name in _checkpoints(run)}


def _checkpoints(path: Path) -> list[re.Match[str]]:
    """The names of a run's checkpoints, step and lineage, by lineage and step."""
    found = [name for p in (path / "checkpoints").iterdir() if (name := _STEP.fullmatch(p.name))]
    return sorted(found, key=lambda name: (int(name[2]), int(name[1])))


async def wait_until_gone(path: Path) -> None:
    """Raises once `path` is not the file any more that it was when this began: removed, moved away or replaced. What is
    written after that is written into nowhere."""
    held = os.open(path, os.O_RDONLY)
    try:
        while _still_there(path, held):  # noqa: ASYNC110
            await asyncio.sleep(1.0)
    finally:
        os.close(held)
    raise PlaceError(
        f"{path} was removed or replaced while it was in use, and what was said since then is lost. Fix: begin again"
    )


def _still_there(path: Path, held: int) -> bool:
    ours = os.fstat(held)
    try:
        return ours.st_nlink > 0 and os.path.samestat(ours, path.stat())
    except OSError:
        return False
