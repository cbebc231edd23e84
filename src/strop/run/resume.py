"""The way back after a run was stopped or killed.

    step      1   2   3   4   5         lineage 1: checkpoint after step 2, killed while step 6 was collected
                      3   4   5   6     lineage 2: begins at the checkpoint, replays 3 to 5, samples on from there

Replayed steps train on the rollouts that the store recorded; nothing is sampled again. In deterministic mode they make
the very same weights, and what had been collected for step 6 is as good as before. Otherwise it was sampled from
weights that are no more: step 6 is collected anew in groups named after lineage 2, the old ones count as superseded.
Where rollouts may lag behind the learner anyway (loop.staleness), what had been collected is used as it is.

A checkpoint that is damaged is set aside, and the one before it is the last one. A store that has fewer steps than were
once acknowledged is refused: going on would give the newest weights up without a word.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from strop.errors import DamagedCheckpoint, StoreError
from strop.monitor.metrics import metrics_of
from strop.run.checkpoints import verify_parts
from strop.run.data.copies import finish_begun
from strop.run.folder import find_parts, name_step
from strop.run.rollouts import find_stored, read_samples
from strop.run.state import Collected, Run
from strop.types import TERMINAL, Rollout, Step, version


async def go_back(run: Run) -> list[Collected]:
    """Put the run back to its last checkpoint, in a new lineage. Returns what the steps after it were made from, to be
    made again before anything else."""
    await refuse_loss(run)
    await run.store.reclaim(everything=True)
    if run.data is not None:
        await finish_begun(run.store, run.data)
    line = await name_unnamed(run, await read_unbroken_line(run))
    last = await restore_last_checkpoint(run, line)
    base = last.number if last else 0
    run.steps, run.step = line[:base], base
    run.lineage = await run.store.open_lineage(after=base)
    run.superseded = [step for step in await run.store.steps(superseded=True) if step.superseded]
    run.folder.prune([step.checkpoint for step in run.steps if step.checkpoint])
    if last:
        run.versions = run.versions_of(last)
        for policy in run.policies.values():
            policy.algorithm.resume(metrics_of(last.metrics, policy.name, run.policies))
            await policy.publisher.publish(last.version)
    return [
        Collected(await read_samples(run.store, [await run.store.get(id) for id in step.rollouts]))
        for step in line[base:]
    ]


async def restore_last_checkpoint(run: Run, line: Sequence[Step]) -> Step | None:
    """The last step of the present line whose checkpoint can be had; the learner has its weights. None: there is none,
    and the learner has the model that the run began with."""
    named = [step for step in line if not step.superseded and step.checkpoint]
    broken: list[str] = []
    for step in reversed(named):
        place = run.folder.checkpoint(str(step.checkpoint))
        try:
            versions = await restore_parts(run, place) if place.is_dir() else None
        except DamagedCheckpoint as error:
            aside = run.folder.set_aside(place.name)
            broken.append(f"{str(error).partition(':')[0]} (kept as {aside.name})")
            continue
        if versions is None:  # the newest is never deleted, older ones are
            broken += [f"{place} is missing"] if step is named[-1] else []
            continue
        assert versions == {step.version}, f"the checkpoint of {versions} is not that of step {step.version}"
        note_damage(run, broken, step.number, len(line))
        return step
    note_damage(run, broken, 0, len(line))
    return None


async def restore_parts(run: Run, checkpoint: Path) -> set[str]:
    """Give every policy's learner its weights of a checkpoint; returns the versions that the parts say they are."""
    parts = find_parts(checkpoint, run.policies)
    await asyncio.to_thread(verify_parts, parts)
    found = [await run.policies[name].learner.restore(part) for name, part in parts.items()]
    return {meta["version"] for meta in found}


def note_damage(run: Run, broken: Sequence[str], base: int, last: int) -> None:
    """What is done about checkpoints that cannot be had, and what it costs."""
    if broken:
        begin = f"the checkpoint of step {base}" if base else "the model that the run began with"
        steps = f"step {last} is" if last == base + 1 else f"steps {base + 1} to {last} are"
        run.view.note(
            f"{'; '.join(broken)}: going back to {begin}; {steps} trained again on the rollouts that the store "
            "recorded, so that nothing is lost"
        )


async def refuse_loss(run: Run) -> None:
    """Raises `StoreError` if steps are gone that were once committed. Who knows of them: metrics.jsonl, which is told
    of a step once it is committed, and checkpoints, of which only the newest may be of a step that never was."""
    steps, there = await run.store.steps(superseded=True), run.folder.checkpoints()
    stored = max((step.number for step in steps), default=0)
    known = max(max(there.values(), default=0) - 1, read_last_step(run.folder.metrics))
    unknown = [name for name in there if name not in {step.checkpoint for step in steps}]
    place, way = run.folder.path, f"begin a new run from its newest weights (strop train --from {run.folder.path})"
    missing = ""
    if known > stored:
        made = f"step {known} is" if known == stored + 1 else f"{known - stored} steps, {stored + 1} to {known}, are"
        missing = f"ends with step {stored}, but {made} known to have been made"
    elif len(unknown) > 1:
        missing = f"knows nothing of {', '.join(unknown)}, of which only the last can be of a step that was never made"
    if missing:
        raise StoreError(
            f"the store of {place} {missing}: its file or its log (store.sqlite-wal) was damaged, lost or replaced by "
            f"an older copy. Fix: put it back, or {way}, or go on without those steps: move "
            f"{', '.join(['metrics.jsonl', *unknown])} away, then resume"
        )
    if not await run.store.policies():
        raise StoreError(f"the store of {place} is empty. Fix: put back what was there, or {way}")


async def read_unbroken_line(run: Run) -> list[Step]:
    """The present line, and where an earlier replay was cut off, the steps it had not come to again."""
    line = await run.store.steps()
    newest = {step.number: step for step in await run.store.steps(superseded=True) if step.superseded}
    while (following := newest.get(len(line) + 1)) is not None:
        line.append(following)
    return line


async def name_unnamed(run: Run, line: Sequence[Step]) -> list[Step]:
    """The same line. A checkpoint that was whole when the run was killed, a moment before its step would have named
    it, is named now."""
    found: list[Step] = []
    for step in line:
        name = name_step(step.lineage, step.number)
        if step.checkpoint is None and not step.superseded and run.folder.checkpoint(name).is_dir():
            await run.store.name_checkpoint(step.lineage, step.number, name)
            found.append(msgspec.structs.replace(step, checkpoint=name))
        else:
            found.append(step)
    return found


def read_last_step(metrics: Path) -> int:
    """The last step that metrics.jsonl has, 0 if there is none. Lines that were damaged tell nothing."""
    found = 0
    for line in metrics.read_bytes().splitlines() if metrics.is_file() else ():
        with suppress(msgspec.MsgspecError):
            found = max(found, msgspec.json.decode(line, type=_Line).step)
    return found


class _Line(msgspec.Struct):
    step: int


async def clear_queue(run: Run) -> None:
    """Cancel queued rollouts that belong neither to the next step nor to an evaluation of the present weights."""
    lists = [run.next_rollouts(run.groups_ahead), *run.evaluations(run.step, run.versions[0]).values()]
    wanted = {rollout.group for rollouts in lists for rollout in rollouts}
    after: str | None = None
    while page := await run.store.list(status="queued", after=after):
        left = [rollout.id for rollout in page if rollout.group not in wanted]
        await run.store.cancel(left, detail="superseded: sampled anew after the run was resumed")
        after = page[-1].id


async def find_finished_evaluations(run: Run) -> list[tuple[int, str, list[Rollout]]]:
    """Evaluations that were finished before the run was interrupted: step, split, rollouts."""
    found: list[tuple[int, str, list[Rollout]]] = []
    versions = {0: version(1, 0)} | {step.number: run.versions_of(step)[0] for step in run.steps}
    for number, name in versions.items():
        for split, wanted in run.evaluations(number, name).items():
            there = list((await find_stored(run.store, wanted)).values())
            if len(there) == len(wanted) and all(rollout.status in TERMINAL for rollout in there):
                found.append((number, split, there))
    return found
