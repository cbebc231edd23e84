"""Going on from an earlier run: the same one with some settings changed, or a new one from its weights.

    strop train --resume runs/a --steps 200              the same run, its numbers and its data; few settings may change
    strop train --from runs/a:100 --groups 32            a new run, from the weights after step 100; anything may change

Changes of a resumed run hold from its last checkpoint on, from where steps are made again, and for every later resume.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from strop import config as configs
from strop.config import Config, resolve_policies
from strop.errors import ConfigError, DamagedCheckpoint, PlaceError
from strop.files import private_folder
from strop.models.checksums import verify
from strop.monitor.summary import Summary
from strop.run.folder import BEST, CHANGES, RunFolder, find_parts, free
from strop.run.history import differences
from strop.run.settings import make_absolute

MAY_CHANGE = (
    *("loop.steps", "loop.eval_*", "loop.checkpoint_every", "loop.keep_checkpoints", "loop.collapse_patience"),
    "loop.group_deadline",
    *(f"learner.{optim}.{name}" for optim in ("optim", "critic") for name in ("lr", "warmup", "schedule", "decay")),
    *("policy.eval.*", "runner.*", "monitor.*"),
)
"""Settings that a resumed run may change: none of them says what its rollouts, so far, mean."""
START = "start"


def change_settings(
    folder: Path, *, sets: Sequence[str] = (), **sections: Any
) -> tuple[Config, dict[str, tuple[Any, Any]]]:
    """The configuration of the run in `folder` with what is given on top, and what that changes, before and after.
    Raises `ConfigError` where it may not."""
    before = RunFolder.config(folder)
    after = configs.load(base=before, sets=sets, **sections)
    after = replace(after, runner=replace(after.runner, python=make_absolute(after.runner.python)))
    changes = {key: (old, new) for key, (old, new) in differences([before, after]).items()}
    changes |= {"folder": (before.folder, after.folder)} if after.folder != before.folder else {}
    if kept := [key for key in changes if not any(fnmatchcase(key, may) for may in MAY_CHANGE)]:
        raise ConfigError(
            f"a resumed run keeps its {', '.join(kept)}: leave that out, or begin a new run from its weights with "
            f"`strop train --from {folder}`. What may change: {', '.join(MAY_CHANGE)}"
        )
    return after, changes


def find_summary(folder: Path, changes: Mapping[str, tuple[Any, Any]]) -> Summary | None:
    """What the run in `folder` came to, where a resume with `changes` would find nothing to do. It says so without
    loading anything; where it is in doubt, it leaves that to the run."""
    config = RunFolder.config(folder)
    try:
        told = msgspec.json.decode((folder / "summary.json").read_bytes(), type=Summary)
        steps = max(config.loop.steps, changes.get("loop.steps", (0, 0))[1])
        if not told.done or told.steps < steps or changes.keys() - {"loop.steps"} or RunFolder.held(folder):
            return None
        missing = not config.store.url and not (folder / "store.sqlite").exists()
        if missing or _time(folder / CHANGES) > _time(folder / "summary.json"):  # what was changed may not be done yet
            return None
        if told.checkpoint:
            verify(folder / "checkpoints" / told.checkpoint)
    except (OSError, msgspec.DecodeError, DamagedCheckpoint):
        return None
    return replace(told, folder=str(folder))


def _time(path: Path) -> float:
    return path.stat().st_mtime if path.exists() else 0.0


def warn_of_rate(config: Config) -> str:
    """A warning, where the learning rate is 0 before the steps are over."""
    optim = config.learner.optim
    done = optim.decay and optim.schedule != "constant" and config.loop.steps * config.learner.minibatches > optim.decay
    return f"the learning rate is 0 from optimizer step {optim.decay} on: raise learner.optim.decay too" * bool(done)


def source(name: str) -> tuple[Path, Path]:
    """The run and the checkpoint that RUN, RUN:STEP or RUN:best names."""
    if (found := RunFolder.named(name)) is None:
        raise PlaceError(f"{name} holds no run to begin from: give its folder, or FOLDER:STEP")
    return found[0], RunFolder.chosen_checkpoint(*found)


def find_checkpoint(name: str, *, best: bool = False) -> Path | None:
    """The checkpoint of one model that RUN (its result, or its `best`) or RUN:STEP names; None where it is not a run's
    name."""
    if (found := RunFolder.named(name)) is None:
        return None
    run, step = found
    return RunFolder.refuse_parts(RunFolder.chosen_checkpoint(run, BEST if best else step))


def require_checkpoint(name: str, *, best: bool) -> Path:
    """The same, or the checkpoint's own folder. Raises `PlaceError` where it is neither."""
    if best and not RunFolder.is_run(name):
        raise PlaceError(f"--best chooses among the checkpoints of a run, and {name} is none: leave it out")
    place = Path(name).expanduser()
    found = find_checkpoint(name, best=best) or (place if place.is_dir() else source(name)[1])
    return RunFolder.refuse_parts(found)


@contextmanager
def choose_place(folder: Path, *, overwrite: bool, beside: Path | None = None) -> Generator[Path]:
    """Where a new run is kept: in `folder`, or where that is taken, under its name with a number; with `overwrite`, in
    the place of the run that was there, once it has begun. The run in `beside` is needed, and stays."""
    if not overwrite:
        yield free(folder, RunFolder.taken)
        return
    if beside is not None and beside.resolve() == folder.resolve():
        raise PlaceError(f"--overwrite would delete {folder}, which the new run begins from: leave it out")
    with RunFolder.overwriting(folder):
        yield folder


def begin_from(checkpoint: Path, config: Config) -> Config:
    """The configuration of a new run whose model is the one in a checkpoint. Its weights are copied into the run's
    folder, an adapter merged into its model: the earlier run may delete the checkpoint one day."""
    from strop.learner.export import export

    place = Path(config.folder).absolute() / START
    shutil.rmtree(place, ignore_errors=True)  # of a run that never began
    private_folder(place.parent)
    policies = resolve_policies(config)
    if len(policies) == 1:
        export(RunFolder.refuse_parts(checkpoint), place)
        begun = replace(config, policy=replace(config.policy, model=str(place)))
    else:
        parts = find_parts(checkpoint, policies)
        if missing := [name for name, part in parts.items() if not part.is_dir()]:
            raise PlaceError(
                f"{checkpoint} has no part of the policy {missing[0]}. Fix: begin with a checkpoint of a run that has "
                "the same policies, or name each one's model in policies.NAME.model"
            )
        for name, part in parts.items():
            export(part, place / name)
        models = {name: table | {"model": str(place / name)} for name, table in config.policies.items()}
        begun = replace(config, policies=models)
    source = msgspec.json.encode({"checkpoint": os.path.abspath(checkpoint)})
    place.with_suffix(".json").write_bytes(source + b"\n")
    return begun
