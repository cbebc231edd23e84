"""Going on from an earlier run: the same one with some settings changed, or a new one from its weights.

    strop train --resume runs/a --steps 200              the same run, its numbers and its data; few settings may change
    strop train --from runs/a:100 --groups 32            a new run, from the weights after step 100; anything may change

Changes of a resumed run hold from its last checkpoint on, from where steps are made again, and for every later resume.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from strop import algorithms
from strop import config as configs
from strop.config import Config, replace_models, resolve_policies, trained_policies
from strop.errors import ConfigError, DamagedCheckpoint, PlaceError
from strop.files import private_folder
from strop.models.checksums import verify
from strop.monitor.summary import Summary
from strop.run import new_folder
from strop.run.folder import BEST, CHANGES, RunFolder, explain_no_run, find_free, find_parts, list_parts
from strop.run.history import find_differences
from strop.run.prompts.pool import read_prompts, replace_prompts
from strop.run.settings import make_absolute

_MAY_CHANGE = (
    *("loop.steps", "loop.eval_*", "loop.checkpoint_every", "loop.keep_checkpoints", "loop.collapse_patience"),
    *("loop.group_deadline", "loop.start_ahead"),
    *("learner.ranks", "learner.sequence_parallel", "learner.gradient_checkpointing", "learner.offload"),
    *("learner.start_budget", "learner.hang_timeout", "learner.collective_timeout"),
    *(f"learner.{optim}.{name}" for optim in ("optim", "critic") for name in ("lr", "warmup", "schedule", "decay")),
    *("policy.eval.*", "runner.*", "monitor.*", "cluster.*", "gateway.host", "gateway.port", "gateway.hosts"),
    *(
        f"algorithm.settings.{name}"
        for name in (*("max_calls", "max_tokens", "max_cost", "max_rollouts", "patience", "options", "answer_tokens"),)
    ),
)
MAY_CHANGE = (
    *_MAY_CHANGE,
    *(f"policies.*.{name}" for name in _MAY_CHANGE if name.startswith("learner.")),
    "policies.*.eval.*",
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
    given = list_policy_settings(before)  # what one of several policies has from the tables at the top
    changes = {key: (given.get(key, old), new) for key, (old, new) in find_differences([before, after]).items()}
    changes |= {"folder": (before.folder, after.folder)} if after.folder != before.folder else {}
    kept = [key for key in changes if not any(fnmatchcase(key, may) for may in MAY_CHANGE)]
    if "gateway.outside" in kept and _are_same_models(before, after):
        kept.remove("gateway.outside")
    if kept:
        raise ConfigError(
            f"a resumed run keeps its {', '.join(kept)}; what may change: {', '.join(MAY_CHANGE)}. Fix: leave that "
            f"out, or begin a new run from its weights with `strop train --from {folder}`"
        )
    return after, changes


def _are_same_models(before: Config, after: Config) -> bool:
    """Whether the outside models answer for the same agents as they did, wherever they are and whatever they cost."""
    kept = ("model", "agents", "models", "probability")
    one, other = (
        {name: [getattr(outside, field) for field in kept] for name, outside in config.gateway.outside.items()}
        for config in (before, after)
    )
    return one == other


def list_policy_settings(config: Config) -> dict[str, Any]:
    """What each of several policies is configured with, by the whole names of the settings."""
    sections = [
        (f"policies.{name}.{section}", table)
        for name, own in resolve_policies(config).items()
        for section, table in (("", own.policy), ("learner.", own.learner))
    ]
    return {setting.key: setting.value for path, table in sections for setting in configs.walk(table, path)}


def drop_other_settings(config: Config, before: Config) -> Config:
    """The configuration of a new run without what it has of an earlier one's algorithm and its own does not know."""
    if (name := config.algorithm.name) == before.algorithm.name:
        return config
    old, known = before.algorithm.settings, set(algorithms.setting_names(name))
    kept = {key: value for key, value in config.algorithm.settings.items() if key in known or old.get(key) != value}
    return replace(config, algorithm=replace(config.algorithm, settings=kept))


def find_summary(folder: Path, changes: Mapping[str, tuple[Any, Any]]) -> Summary | None:
    """What the run in `folder` came to, where a resume with `changes` would find nothing to do. It says so without
    loading anything; where it is in doubt, it leaves that to the run."""
    config = RunFolder.config(folder)
    try:
        told = msgspec.json.decode((folder / "summary.json").read_bytes(), type=Summary)
        steps = max(config.loop.steps, changes.get("loop.steps", (0, 0))[1])
        # Prompts may be done before the last step: the budget is spent, or the best version is perfect.
        open_steps = told.steps < steps and (changes or config.algorithm.improves == "weights")
        if not told.done or open_steps or changes.keys() - {"loop.steps"} or RunFolder.is_held(folder):
            return None
        missing = not config.store.url and not (folder / "store.sqlite").exists()
        if missing or _time(folder / CHANGES) > _time(folder / "summary.json"):  # what was changed may not be done yet
            return None
        if told.checkpoint:
            for part in find_parts(folder / "checkpoints" / told.checkpoint, trained_policies(config)).values():
                verify(part)
    except (OSError, msgspec.DecodeError, DamagedCheckpoint):
        return None
    return replace(told, folder=str(folder))


def _time(path: Path) -> float:
    return path.stat().st_mtime if path.exists() else 0.0


def warn_of_rate(config: Config) -> str:
    """A warning, where a learning rate is 0 before the steps are over."""
    for name, own in trained_policies(config).items():
        optim, last = own.learner.optim, config.loop.steps * own.learner.minibatches
        if optim.decay and optim.schedule != "constant" and last > optim.decay:
            setting = f"policies.{name}.learner.optim.decay" if config.policies else "learner.optim.decay"
            return f"the learning rate is 0 from optimizer step {optim.decay} on. Fix: raise {setting} too"
    return ""


def find_source(name: str) -> tuple[Path, Path]:
    """The run and the checkpoint that RUN, RUN:STEP or RUN:best names."""
    if (found := RunFolder.parse_name(name)) is None:
        raise explain_no_run(Path(re.sub(rf":(\d+|{BEST})$", "", name)).expanduser())
    return found[0], RunFolder.chosen_checkpoint(*found)


def find_checkpoint(name: str, *, best: bool = False, policy: str = "") -> Path | None:
    """The checkpoint of one model that RUN (its result, or its `best`) or RUN:STEP names, of several policies that of
    the one called `policy`; None where it is not a run's name."""
    if (found := RunFolder.parse_name(name)) is None:
        return None
    run, step = found
    return choose_policy(run, RunFolder.chosen_checkpoint(run, BEST if best else step), policy)


def choose_policy(run: Path, checkpoint: Path, policy: str) -> Path:
    """The part of a run's checkpoint that is a policy's: the whole of it, where no other policy is trained there."""
    if policy and not list_parts(checkpoint) and len(policies := resolve_policies(RunFolder.config(run))) > 1:
        refuse_untrained(policy, policies)
        return checkpoint
    return RunFolder.choose_part(checkpoint, policy)


def refuse_untrained(policy: str, policies: Mapping[str, Config]) -> None:
    """Raises `PlaceError` where a run has no checkpoints of a policy."""
    if policy not in policies:
        raise PlaceError(f"the run has no policy {policy!r}. Fix: name one of {', '.join(policies)}")
    if (own := policies[policy].policy).frozen:
        raise PlaceError(
            f"policies.{policy} is not trained, so that there is no checkpoint of it. Fix: use its model, {own.model}"
        )


def require_checkpoint(name: str, *, best: bool, policy: str = "") -> Path:
    """The same, or the checkpoint's own folder. Raises `PlaceError` where it is neither."""
    if best and not RunFolder.is_run(name):
        raise PlaceError(f"--best chooses among the checkpoints of a run, and {name} is not a run. Fix: leave it out")
    if found := find_checkpoint(name, best=best, policy=policy):
        return found
    place = Path(name).expanduser()
    return RunFolder.choose_part(place if place.is_dir() else find_source(name)[1], policy)


def refuse_missing_parts(checkpoint: Path, config: Config) -> Path:
    """The checkpoint, where it has a part for each of the policies that `config` trains. Raises `PlaceError`."""
    parts = find_parts(checkpoint, trained_policies(config))
    if missing := [name for name, part in parts.items() if not (part / "strop.json").is_file()]:
        raise explain_missing_part(checkpoint, missing[0])
    return checkpoint


def explain_missing_part(checkpoint: Path, policy: str) -> PlaceError:
    return PlaceError(
        f"{checkpoint} has no part of the policy {policy}. Fix: name a checkpoint of a run that has the same policies, "
        "or each one's model in policies.NAME.model"
    )


def drop_frozen_adapters(config: Config) -> Config:
    """The configuration without adapters of policies that are frozen: one that was trained in the earlier run is merged
    into its model."""

    def drop(table: dict[str, Any]) -> dict[str, Any]:
        learner = {name: value for name, value in table.get("learner", {}).items() if name != "lora"}
        return table | {"learner": learner} if table.get("frozen") and "learner" in table else table

    return replace(config, policies={name: drop(table) for name, table in config.policies.items()})


@contextmanager
def choose_place(folder: Path, *, overwrite: bool, beside: Path | None = None) -> Generator[Path]:
    """Where a new run is kept: in `folder`, or where that is taken, under its name with a number; with `overwrite`, in
    the place of the run that was there, once it has begun. The run in `beside` is needed, and stays. One that never
    begins leaves nothing."""
    if not overwrite:
        place = find_free(folder, RunFolder.is_taken)
        with new_folder.leave_nothing(place):
            yield place
        return
    if beside is not None and beside.resolve() == folder.resolve():
        raise PlaceError(f"--overwrite would delete {folder}, which the new run begins from. Fix: leave it out")
    with new_folder.overwrite(folder), new_folder.leave_nothing(folder):
        yield folder


def copy_models(config: Config) -> Config:
    """The configuration of a new run with models that lie in an earlier run's folder copied into its own."""
    models = {name: Path(own.policy.model) for name, own in resolve_policies(config).items()}
    found = {name: model for name, model in models.items() if START in model.parts[-2:] and model.is_dir()}
    places = find_parts(Path(config.folder).absolute() / START, models)
    for name, model in found.items():
        private_folder(places[name].parent)
        shutil.copytree(model, places[name])
    return replace_models(config, {name: str(places[name]) for name in found}) if found else config


def begin_from(checkpoint: Path, config: Config) -> Config:
    """The configuration of a new run whose model is the one in a checkpoint. Its weights are copied into the run's
    folder, an adapter merged into its model: the earlier run may delete the checkpoint one day."""
    from strop.learner.export import export

    if (prompts := read_prompts(checkpoint)) is not None:
        return copy_models(replace_prompts(config, prompts))
    place = Path(config.folder).absolute() / START
    shutil.rmtree(place, ignore_errors=True)  # of a run that never began
    private_folder(place.parent)
    config = drop_frozen_adapters(config)
    policies = resolve_policies(config) if config.algorithm.improves == "prompts" else trained_policies(config)
    parts = dict[str, Path]()
    if there := list_parts(checkpoint):  # also of a policy that was trained there, and is frozen from now on
        parts = {name: checkpoint / name for name in resolve_policies(config) if name in there}
    if missing := [name for name in policies if name not in parts and (there or len(policies) > 1)]:
        raise explain_missing_part(checkpoint, missing[0])
    parts = parts or find_parts(checkpoint, policies)
    models = find_parts(place, parts)
    for name, part in parts.items():
        export(part, models[name])
    given = {name: str(model) for name, model in models.items()}
    for name, own in resolve_policies(config).items():  # past versions are of the model that they are versions of
        if own.policy.past.of in models:
            given[name] = given[own.policy.past.of]
    begun = replace_models(config, given)
    source = msgspec.json.encode({"checkpoint": os.path.abspath(checkpoint)})
    place.with_suffix(".json").write_bytes(source + b"\n")
    return begun
