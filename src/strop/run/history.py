"""Runs as they can be read from their folders, whether they are at work or not.

Only config.json, metrics.jsonl and summary.json are read, and the lock is asked whether somebody holds it: a run that
is at work notices nothing. Seconds are those of steps; evaluations are not in them until the run is done.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast

import msgspec
from msgspec import Struct

from strop.algorithms import every_setting
from strop.config import Config, describe_algorithms, describe_models, weigh_rewards
from strop.errors import PlaceError
from strop.files import find_near
from strop.monitor.metrics import flat, weigh
from strop.monitor.summary import Points, find_loss
from strop.run.folder import RunFolder

State = Literal["running", "stopped", "collapsed", "done"]

TRAINED = "critic/rewards/mean"
LOSS = "training loss"
WHOLE = ("rewards", "chat_template_kwargs")
"""Settings of a policy that are tables with names of a user's own."""
DEPTH = 3
"""How far below a folder runs are looked for."""


class Record(Struct, frozen=True, kw_only=True):
    """One run in a line. `start`, `end` and `best` are mean totals, of the rewards that count, of what `on` says: the
    first evaluated split, or "training" where nothing was evaluated; or of stored data, which has no reward that rises,
    the "training loss". There is no `end` before the second figure."""

    name: str
    model: str
    algorithm: str
    state: State
    steps: int
    of: int
    on: str
    start: float | None
    end: float | None
    best: float | None
    best_step: int | None
    seconds: float
    began: float


class PastRun(NamedTuple):
    """What a folder tells: the line, the settings, and the curves."""

    record: Record
    config: Config
    trained: Points
    evaluated: Points


def find(place: Path) -> list[Path]:
    """The run in `place`, or the runs in the folders below it, by name; not what `strop eval` left there."""
    if is_run(place):
        return [place]
    if not place.is_dir():
        near = find_near(place, folders=True)
        raise PlaceError(
            f"there is no folder {place}. Fix: {f'write {near}' if near else 'name a run, or a folder of runs'}"
        )
    return _below(place, DEPTH)


def is_run(place: Path) -> bool:
    return (place / "config.json").is_file() and (place / "checkpoints").is_dir()


def _below(place: Path, depth: int) -> list[Path]:
    found: list[Path] = []
    for child in sorted(place.iterdir()) if depth else ():
        if is_run(child):
            found += [] if _only_evaluates(child) else [child]
        elif child.is_dir() and not child.is_symlink():
            found += _below(child, depth - 1)
    return found


def _only_evaluates(run: Path) -> bool:
    """Whether it is a part of an evaluation: it has no steps, and nothing ever sums it up."""
    try:
        return RunFolder.config(run).loop.steps == 0 and not (run / "summary.json").exists()
    except PlaceError:  # said by whoever reads it
        return False


def read(folder: Path) -> PastRun:
    """Raises `PlaceError` if `folder` holds no run that this strop can read."""
    config = RunFolder.config(folder)
    lines = _lines(folder / "metrics.jsonl")
    split = next(iter(config.loop.eval_splits), "")
    trained = select_points(lines, TRAINED)
    evaluated = _evaluated(lines, split, config)
    steps = max((step for step, metrics in lines if "timing_s/step" in metrics), default=0)
    losses = sorted((step, loss) for step, metrics in lines if (loss := find_loss(metrics)) is not None)
    shown, on = evaluated or trained or losses, split if evaluated else "training" if trained or not losses else LOSS
    best = (min if on == LOSS else max)(shown, key=lambda at: at[1], default=(None, None))
    improves_prompts = config.algorithm.improves == "prompts"  # such a run may end before its last step
    state = _state(folder, finished=steps >= config.loop.steps or improves_prompts)
    record = Record(
        name=str(folder),
        model=describe_models(config),
        algorithm=describe_algorithms(config),
        state=state,
        steps=steps,
        of=config.loop.steps,
        on=on,
        start=shown[0][1] if shown else None,
        end=shown[-1][1] if len(shown) > 1 else None,
        best=best[1],
        best_step=best[0],
        seconds=round(_seconds(folder, lines, state), 2),
        began=(folder / "config.json").stat().st_mtime,
    )
    return PastRun(record, config, trained, evaluated)


def _lines(path: Path) -> list[tuple[int, dict[str, float]]]:
    """metrics.jsonl as far as it goes: the last line may be half written, and a run that has just begun has none."""
    try:
        whole = path.read_bytes().rpartition(b"\n")[0]
    except FileNotFoundError:
        return []
    try:
        return [_line(line) for line in whole.splitlines()]
    except (msgspec.DecodeError, KeyError) as error:
        raise PlaceError(f"{path} cannot be read ({error}). Fix: `strop train --resume` writes it anew") from None


def _line(line: bytes) -> tuple[int, dict[str, float]]:
    found = msgspec.json.decode(line, type=dict[str, float | None])  # null: not a number
    return int(found.pop("step") or 0), {name: value for name, value in found.items() if value is not None}


def select_points(lines: Sequence[tuple[int, dict[str, float]]], name: str) -> Points:
    """
    >>> select_points([(0, {"a": 1.0}), (1, {"b": 2.0}), (2, {"a": 3.0})], "a")
    [(0, 1.0), (2, 3.0)]
    """
    return sorted((step, metrics[name]) for step, metrics in lines if name in metrics)


def _evaluated(lines: Sequence[tuple[int, dict[str, float]]], split: str, config: Config) -> Points:
    """The total of the rewards that count, or where only agents get them what those got, wherever the split was
    evaluated."""
    weights, mark = weigh_rewards(config), "*"
    before, after = next(iter(flat(split, {mark: 0.0}, config.loop.eval_samples))).split(mark)

    def read(metrics: dict[str, float]) -> dict[str, float]:
        named = (key for key in metrics if key.startswith(before) and key.endswith(after))
        return {key.removeprefix(before).removesuffix(after): metrics[key] for key in named}

    found = [(step, weigh(read(metrics), weights)) for step, metrics in lines]
    return sorted((step, total) for step, total in found if total is not None)


def _state(folder: Path, *, finished: bool) -> State:
    if RunFolder.is_held(folder):
        return "running"
    summary = RunFolder.summary(folder)
    if summary.get("collapsed"):
        return "collapsed"
    return "done" if finished and summary.get("done") else "stopped"


def _seconds(folder: Path, lines: Sequence[tuple[int, dict[str, float]]], state: State) -> float:
    if state == "done":
        return float(RunFolder.summary(folder).get("seconds", 0.0))
    return sum(metrics.get("timing_s/step", 0.0) for _, metrics in lines)


def find_differences(configs: Sequence[Config]) -> dict[str, list[Any]]:
    """The settings in which runs differ, with every run's value; None where a run has no such setting."""
    tables = [
        {setting.key: setting.value for setting in every_setting(config)} | flatten_policies(config.policies)
        for config in configs
    ]
    left_out = ("folder", "algorithm.settings", "policies")
    keys = dict.fromkeys(key for table in tables for key in table if key not in left_out)
    values = {key: [table.get(key) for table in tables] for key in keys}
    return {key: row for key, row in values.items() if any(value != row[0] for value in row)}


def flatten_policies(tables: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The policies of a run, and what was set of each by its whole name.

    >>> flatten_policies({"writer": {}, "critic": {"learner": {"optim": {"lr": 0.1}}}})
    {'policies.writer': 'given', 'policies.critic': 'given', 'policies.critic.learner.optim.lr': 0.1}
    """
    found: dict[str, Any] = {f"policies.{name}": "given" for name in tables}
    for name, table in tables.items():
        found |= _flatten(table, f"policies.{name}.")
    return found


def _flatten(table: Mapping[str, Any], path: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in table.items():
        if isinstance(value, dict) and name not in WHOLE:
            found |= _flatten(cast("dict[str, Any]", value), f"{path}{name}.")
        else:
            found[path + name] = value
    return found
