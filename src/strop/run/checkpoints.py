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
from strop.monitor.metrics import weigh, weigh_parts
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
        kept += [step for pool in run.opponents for step in pool.list_steps(run)[-pool.config.size :]]
        run.folder.prune([str(step.checkpoint) for step in kept])


def list_checkpoints(run: Run) -> list[Step]:
    return [step for step in run.steps if step.checkpoint and run.folder.checkpoint(step.checkpoint).is_dir()]


def rank_steps(run: Run, there: Sequence[Step]) -> list[Step]:
    """Steps from worst to best. That is told by evaluations. Steps without one stand below, by what rollouts got in
    training: the worst of the steps which this one's weights may have sampled. The newest step has no next one yet; its
    own stands for it. Of those that are equal, but for a rounding, the newest is the best: in a game where one agent
    gains what another loses, what all of them got together never changes."""
    trained = score_training(run)

    def standing(step: Step) -> tuple[bool, float, int]:
        if (total := score_step(run, step)) is not None:
            return True, round(total, 9), step.number
        sampled = run.steps[step.number : step.number + 1 + run.config.loop.staleness] or [step]
        return False, round(min(trained[one.number] for one in sampled), 9), step.number

    return sorted(there, key=standing)


def score_step(run: Run, step: Step) -> float | None:
    """What a step's weights got on the first split, where that was evaluated: the total, or where only agents and turns
    are rewarded what the trained ones got (`weigh`)."""
    splits, weights = run.config.loop.eval_splits, weigh_rewards(run.config)
    means = run.scores.get((step.number, splits[0]), {}) if splits else {}
    if are_rollouts_rewarded(run):
        means = {name: mean for name, mean in means.items() if name in weights}
    return weigh(means, weights)


def score_training(run: Run) -> dict[int, float]:
    """What the rollouts of each step got, by its number: their mean total, or where only agents and turns are rewarded
    what the agents got in whom something was ever trained (`agents/<role>/reward/<name>`)."""
    weights, tokens = weigh_rewards(run.config), "loss_tokens"
    counts = (item for step in run.steps for item in step.metrics.items() if item[0].startswith("agents/"))
    roles = tuple({name.removesuffix(tokens) for name, count in counts if name.endswith(f"/{tokens}") and count})
    scores, totals = dict[int, float](), are_rollouts_rewarded(run)
    for step in run.steps:
        own = {name: mean for name, mean in step.metrics.items() if name.startswith(roles)}
        parts = None if totals else weigh_parts(own, weights)
        scores[step.number] = step.metrics.get("critic/rewards/mean", -math.inf) if parts is None else parts
    return scores


def are_rollouts_rewarded(run: Run) -> bool:
    """Whether a whole rollout, of a step or of an evaluation, was ever given a reward that has a weight. If not, totals
    say nothing."""
    names = [name for name, weight in weigh_rewards(run.config).items() if weight]
    return any(name in means for means in run.scores.values() for name in names) or any(
        f"reward/{name}" in step.metrics for step in run.steps for name in names
    )


def evaluates_every_checkpoint(config: Config) -> bool:
    """Whether every checkpoint is evaluated."""
    loop = config.loop
    return bool(loop.eval_splits and loop.eval_every and loop.checkpoint_every % loop.eval_every == 0)
