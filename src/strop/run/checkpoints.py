"""A run's checkpoints: when one is written, which is the best, and which are kept."""

from __future__ import annotations

import math
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from strop.config import Config, weigh_rewards
from strop.errors import DamagedCheckpoint
from strop.files import sync_folder
from strop.models.checksums import SUMS, verify
from strop.monitor.metrics import weigh
from strop.run.state import Run
from strop.types import Step, version


async def write_checkpoint(run: Run, number: int) -> str | None:
    """Write a checkpoint if one is due; it counts once the step that names it is committed."""
    loop = run.config.loop
    if number % loop.checkpoint_every and number < loop.steps and not run.stop.is_set():
        return None
    name = f"step-{number:06d}-{run.lineage}"
    place, meta = run.folder.checkpoint(name), {"version": version(run.lineage, number)}
    if len(run.policies) == 1:
        for policy in run.policies.values():
            await policy.learner.save(place, meta)
        return name
    fresh = place.with_name(f".{name}.new")
    shutil.rmtree(fresh, ignore_errors=True)  # half of one, of a run that was killed
    for policy in run.policies.values():
        await policy.learner.save(fresh / policy.name, meta)
    fresh.rename(place)  # there whole or not at all
    sync_folder(place.parent)
    return name


def verify_parts(parts: Mapping[str, Path]) -> None:
    """Before the first of several parts is restored: all of them can be. Raises `DamagedCheckpoint`."""
    for part in parts.values() if len(parts) > 1 else ():
        if not (part / SUMS).is_file():
            raise DamagedCheckpoint(f"{part} is not a checkpoint: {SUMS} is missing")
        verify(part)


def keep_checkpoints(run: Run) -> None:
    """The newest ones, and the best. How good the very newest are is a guess where only training tells: the best of the
    others stays as well, and so does the best of those that only training tells of."""
    if there := list_checkpoints(run):
        order = rank_steps(run, there)
        run.folder.name_best(str(order[-1].checkpoint))
        seen = len(run.steps) - run.config.loop.staleness
        known = [step for step in order if step.number < seen and score_step(run, step) is None]
        known = order if evaluates_every_checkpoint(run.config) else known
        kept = [order[-1], *known[-1:], *there[-run.config.loop.keep_checkpoints :]]
        run.folder.prune([str(step.checkpoint) for step in kept])


def list_checkpoints(run: Run) -> list[Step]:
    return [step for step in run.steps if step.checkpoint and run.folder.checkpoint(step.checkpoint).is_dir()]


def rank_steps(run: Run, there: Sequence[Step]) -> list[Step]:
    """Steps from worst to best. That is told by evaluations. Steps without one stand below, by what rollouts got in
    training: the worst of the steps which this one's weights may have sampled. The newest step has no next one yet; its
    own stands for it."""

    def standing(step: Step) -> tuple[bool, float, int]:
        if (total := score_step(run, step)) is not None:
            return True, total, step.number
        sampled = run.steps[step.number : step.number + 1 + run.config.loop.staleness] or [step]
        return False, min(one.metrics.get("critic/rewards/mean", -math.inf) for one in sampled), step.number

    return sorted(there, key=standing)


def score_step(run: Run, step: Step) -> float | None:
    """What a step's weights got on the first split, where that was evaluated."""
    splits = run.config.loop.eval_splits
    return weigh(run.scores.get((step.number, splits[0]), {}), weigh_rewards(run.config)) if splits else None


def evaluates_every_checkpoint(config: Config) -> bool:
    """Whether every checkpoint is evaluated."""
    loop = config.loop
    return bool(loop.eval_splits and loop.eval_every and loop.checkpoint_every % loop.eval_every == 0)
