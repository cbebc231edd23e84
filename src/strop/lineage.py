"""The way back after a run was stopped or killed.

    step      1   2   3   4   5         lineage 1: checkpoint after step 2, killed while step 6 was collected
                      3   4   5   6     lineage 2: begins at the checkpoint, replays 3 to 5, samples on from there

Replayed steps train on the rollouts that the store recorded; nothing is sampled again. In deterministic mode they make
the very same weights, and what had been collected for step 6 is as good as before. Otherwise it was sampled from
weights that are no more: step 6 is collected anew in groups named after lineage 2, the old ones count as superseded.
Where rollouts may lag behind the learner anyway (loop.staleness), what had been collected is used as it is.
"""

from __future__ import annotations

from collections.abc import Sequence

from strop.rooms import POLICY, Collected, Run
from strop.trajectory import Sample
from strop.types import TERMINAL, Rollout, Step, version

PAGE = 1000


async def go_back(run: Run) -> list[Collected]:
    """Put the run back to its last checkpoint, in a new lineage. Returns what the steps after it were made from, to be
    made again before anything else."""
    await run.store.reclaim(everything=True)
    line = await unbroken_line(run)
    kept = [step for step in line if not step.superseded and has_checkpoint(run, step)]
    base = kept[-1].number if kept else 0
    run.steps, run.step = line[:base], base
    run.lineage = await run.store.open_lineage(POLICY, after=base)
    run.left_behind = [step for step in await run.store.steps(superseded=True) if step.superseded]
    run.folder.prune([step.checkpoint for step in run.steps if step.checkpoint])
    if kept:
        meta = await run.learner.call("restore", run.folder.checkpoint(str(kept[-1].checkpoint)))
        assert meta["version"] == kept[-1].version, f"checkpoint {meta} is not that of step {kept[-1].version}"
        run.algorithm.resume(kept[-1].metrics)
        run.names = run.names_of(kept[-1])
        await run.weights.publish(kept[-1].version)
    return [Collected([await sample(run, await run.store.get(id)) for id in step.rollouts]) for step in line[base:]]


async def unbroken_line(run: Run) -> list[Step]:
    """The present line, and where an earlier replay was cut off, the steps it had not come to again."""
    line = await run.store.steps()
    newest = {step.number: step for step in await run.store.steps(superseded=True) if step.superseded}
    while (following := newest.get(len(line) + 1)) is not None:
        line.append(following)
    return line


def has_checkpoint(run: Run, step: Step) -> bool:
    return step.checkpoint is not None and run.folder.checkpoint(step.checkpoint).is_dir()


async def sample(run: Run, rollout: Rollout) -> Sample:
    return Sample(rollout, await run.store.turns(rollout.id))


async def clear_queue(run: Run) -> None:
    """Cancel queued rollouts that belong neither to the next step nor to an evaluation of the present weights."""
    lists = [run.next_rollouts(run.groups_ahead), *run.evaluations(run.step, run.names[0]).values()]
    wanted = {rollout.group for rollouts in lists for rollout in rollouts}
    after: str | None = None
    while page := await run.store.list(status="queued", after=after):
        left = [rollout.id for rollout in page if rollout.group not in wanted]
        await run.store.cancel(left, detail="superseded: sampled anew after the run was resumed")
        after = page[-1].id


async def finished_evaluations(run: Run) -> list[tuple[int, str, list[Rollout]]]:
    """Evaluations that were finished before the run was interrupted: step, split, rollouts."""
    found: list[tuple[int, str, list[Rollout]]] = []
    versions = {0: version(1, 0)} | {step.number: run.names_of(step)[0] for step in run.steps}
    for number, name in versions.items():
        for split, wanted in run.evaluations(number, name).items():
            there = list((await stored(run, wanted)).values())
            if len(there) == len(wanted) and all(rollout.status in TERMINAL for rollout in there):
                found.append((number, split, there))
    return found


async def stored(run: Run, wanted: Sequence[Rollout]) -> dict[str, Rollout]:
    """What the store has of these rollouts, by id. A group may have others too, where loop.eval_samples was changed."""
    ids, found = [rollout.id for rollout in wanted], dict[str, Rollout]()
    for group in dict.fromkeys(rollout.group for rollout in wanted):
        page = await run.store.list(group=group, limit=PAGE)
        found |= {rollout.id: rollout for rollout in page}
        while len(page) == PAGE:
            page = await run.store.list(group=group, after=page[-1].id, limit=PAGE)
            found |= {rollout.id: rollout for rollout in page}
    return {id: found[id] for id in ids if id in found}


async def superseded(run: Run, wanted: Sequence[Rollout]) -> dict[str, str]:
    """Earlier rollouts in the place of these, sampled from weights that are no more: left out, and counted by name."""
    here = {rollout.group for rollout in wanted}
    before, limit = range(1, run.origin), run.config.loop.members
    groups = {rollout.group for lineage in before for rollout in run.next_rollouts(origin=lineage)} - here
    return {
        rollout.id: "superseded" for name in sorted(groups) for rollout in await run.store.list(group=name, limit=limit)
    }
