"""A run's checkpoints: when one is written, which is the best, and which are kept.

    update ─ copy ─ commit_step ─ publish ─ collect ─ update ...
               └── written beside it, fsynced, renamed ── the step names it in the store

A step is committed without waiting for its checkpoint. Killed before that is named, the run goes back to the one before
or, where it was whole already, finds it by its name (resume.py).
"""

from __future__ import annotations

import asyncio
import math
import shutil
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from msgspec.structs import replace

from strop.config import Config, weigh_rewards
from strop.errors import DamagedCheckpoint, StropError
from strop.files import sync_folder
from strop.models.checksums import SUMS, verify
from strop.monitor.metrics import weigh, weigh_parts
from strop.run.folder import find_parts, name_step
from strop.run.state import CheckpointWriting, Run
from strop.run.supervise import cancel_all
from strop.types import Step, version


async def begin_checkpoint(run: Run, number: int) -> str | None:
    """Take a copy of what a checkpoint holds, if one is due, and have it written beside what follows. Returns the name
    that it will have. One is written at a time: the one before is waited for, and what kept it from being written is
    raised here, at the next step."""
    loop = run.config.loop
    due = number % loop.checkpoint_every == 0 or number >= loop.steps or run.stop.is_set()
    if due or (run.writing is not None and run.writing.named.done()):
        await finish_checkpoint(run)
    if not due:
        return None
    name = name_step(run.lineage, number)
    place = find_half(run, name) if len(run.policies) > 1 else run.folder.checkpoint(name)
    shutil.rmtree(find_half(run, name), ignore_errors=True)  # of a run that was killed
    for policy, part in find_parts(place, run.policies).items():
        await run.policies[policy].learner.begin_save(part, {"version": version(run.lineage, number)})
    return name


def follow_checkpoint(run: Run, step: Step, name: str) -> None:
    """Have the step, which is committed, name its checkpoint as soon as that is whole."""
    run.writing = CheckpointWriting(name, asyncio.create_task(name_checkpoint(run, step, name)))


async def name_checkpoint(run: Run, step: Step, name: str) -> None:
    """Wait until a checkpoint is whole, and have the store know it as the step's."""
    await finish_parts(run, name)
    await run.store.name_checkpoint(step.lineage, step.number, name)
    run.steps[step.number - 1] = replace(run.steps[step.number - 1], checkpoint=name)


async def finish_parts(run: Run, name: str) -> None:
    """Wait until every policy's part is written, and give the whole its name."""
    for policy in run.policies.values():
        await policy.learner.finish_save()
    if len(run.policies) > 1:
        find_half(run, name).rename(run.folder.checkpoint(name))  # there whole or not at all
        await asyncio.to_thread(sync_folder, run.folder.checkpoint(name).parent)


async def finish_checkpoint(run: Run) -> None:
    """Wait until the checkpoint that is being written, if there is one, is whole and named by its step."""
    if (writing := run.writing) is not None:
        try:
            await asyncio.shield(writing.named)
        finally:
            run.writing = None if writing.named.done() else writing


@asynccontextmanager
async def finish_writing(run: Run) -> AsyncGenerator[None]:
    """Whatever goes wrong in the block, a checkpoint that is being written is finished first, to be resumed from; not
    where the run is to end at once."""
    try:
        yield
    except Exception:
        with suppress(StropError):  # what went wrong first is told
            await finish_checkpoint(run)
        raise
    finally:
        if run.writing is not None:
            await cancel_all(run.writing.named)


def find_half(run: Run, name: str) -> Path:
    """Where a checkpoint lies until it is whole."""
    return run.folder.checkpoint(f".{name}.new")


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
        written = [run.writing.name] if run.writing is not None else []
        run.folder.prune([*(str(step.checkpoint) for step in kept), *written])


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
