"""The whole loop, readable top to bottom.

    collect groups → assemble → score → credit → update → commit_step → publish → evaluate if due
                                                        └ a checkpoint, if due: copied, and written beside what follows

With loop.staleness 0 a step is collected once the one before it has been published, and engines rest while the learner
works; its agents start meanwhile, and their first model calls wait for the new weights. Above it, rollouts of the steps
that follow are queued meanwhile: agents, engines and learner all work at once, every turn says which version sampled
it, and a step waits only for rollouts that are not done yet.

runtime.py opens everything that is used here. A run lives in a folder and may be killed at any moment; resume.py finds
the way back. Group n of a run is always the same task with the same seeds, and steps take groups in that order, so
nothing needs remembering but what the last step took.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

from strop.config import Config, describe_algorithms, describe_models
from strop.monitor import transcripts
from strop.monitor.console import View
from strop.monitor.metrics import MetricsFile
from strop.monitor.summary import Summary, summarize
from strop.run.ahead import starting_ahead
from strop.run.checkpoints import (
    begin_checkpoint,
    finish_checkpoint,
    finish_writing,
    follow_checkpoint,
    keep_checkpoints,
)
from strop.run.collect import check_rewards, collect
from strop.run.data.prepare import prepare_data
from strop.run.health import Collapse, find_collapse
from strop.run.learn import learn_all, take_digest
from strop.run.machines import THIS_MACHINE, Machines
from strop.run.notes import note_trouble, stop_collapsed, stop_if_hopeless
from strop.run.opponents import describe_opponents
from strop.run.prompts.improve import go_back_to_prompts, improve_prompts, keep_first_prompts
from strop.run.resume import clear_queue, find_finished_evaluations, go_back
from strop.run.runtime import open_run
from strop.run.scoring import evaluate_if_due, show_scores
from strop.run.state import Collected, Run
from strop.run.supervise import run_with_agents
from strop.types import Step


async def train(
    config: Config,
    view: View,
    *,
    resume: bool = False,
    changes: Mapping[str, tuple[Any, Any]] | None = None,
    stop: asyncio.Event | None = None,
    machines: Machines = THIS_MACHINE,
) -> Summary:
    """Train as configured, or go on with the run in `config.folder`, with `changes` of its settings, before and after,
    written down there. Once `stop` is set the step at hand is finished and has a checkpoint, and nothing more is
    begun. `machines` are where its processes are started."""
    config = config if resume else await prepare_data(config, view.note)
    view.title(f"{config.folder} · {describe_models(config)} · {describe_algorithms(config)}", config.loop.steps)
    async with open_run(config, view, resume=resume, machines=machines) as run, finish_writing(run):
        run.stop = stop or run.stop
        if resume and run.optimizer is not None:
            await go_back_to_prompts(run)
            note_changes(run, changes or {})
        elif resume:
            left = await go_back(run)
            note_changes(run, changes or {})
            for collected in left:
                await advance(run, collected)
            await clear_queue(run)
        keep_first_prompts(run)
        for pool in run.opponents:
            await pool.refresh(run)
        # Agents begin only now: what is queued only the restored weights may sample.
        return await run_with_agents(run, repeat_steps(run))


def note_changes(run: Run, changes: Mapping[str, tuple[Any, Any]]) -> None:
    """Settings that a resumed run changes are written down, and said."""
    if changes:
        run.folder.change(changes, step=run.step)
        run.view.note("; ".join(f"{key}: {old} → {new}" for key, (old, new) in changes.items()))


async def repeat_steps(run: Run) -> Summary:
    """Step after step until all are made, the run is told to stop, or it has collapsed."""
    began, config = time.monotonic(), run.config
    before = sum(step.metrics["timing_s/step"] for step in run.steps)  # what was spent before the run was resumed
    await show_past(run)
    await evaluate_if_due(run)
    fallen = await train_weights(run) if run.optimizer is None else await improve_prompts(run)
    seconds = before + time.monotonic() - began
    await transcripts.leave(run.folder.path, run.store, run.steps, config)
    if fallen is not None:
        stop_collapsed(run, fallen, seconds)
    done = run.finished and all((run.step, split) in run.scores for split in run.evaluations(run.step, run.versions[0]))
    return summarize(config, run.folder.path, run.steps, run.scores, seconds=seconds, done=done)


async def train_weights(run: Run) -> Collapse | None:
    """Why it was stopped, if it has collapsed. A run that was resumed may have been stopped for it before."""
    patience = run.config.loop.collapse_patience
    keep_checkpoints(run)
    fallen = find_collapse(run.steps, patience)
    while fallen is None and not run.finished and not run.stop.is_set():
        await advance(run, await collect(run), ahead=True)
        stop_if_hopeless(run)
        fallen = find_collapse(run.steps, patience)
        if fallen is None:
            await evaluate_if_due(run)
            keep_checkpoints(run)
    await finish_checkpoint(run)
    if fallen is None:
        keep_checkpoints(run)
    return fallen


async def show_past(run: Run) -> None:
    """What a resumed run did before, shown and written to metrics.jsonl again: the store is the truth."""
    run.view.show_past([(step.number, step.metrics) for step in run.steps])
    for step, split, ended in await find_finished_evaluations(run):
        if step == 0 and run.group_reward is None:
            check_rewards(run, ended)
        show_scores(run, step, split, ended)
    run.metrics = MetricsFile(run.folder.metrics, run.steps, run.scores, run.writers, run.config.loop.eval_samples)


async def advance(run: Run, collected: Collected, *, ahead: bool = False) -> None:
    """One step: consumes collected rollouts, produces a committed and published version. `ahead`: agents of the step
    behind it may start meanwhile."""
    number, began = run.step + 1, time.monotonic()
    run.view.phase(f"training step {number}")
    if not run.overlaps:
        with run.timed("pause_engines"):
            for engine in run.engines:
                await engine.pause()
    async with starting_ahead(run) if ahead else nullcontext():
        learnt = await learn_all(run.policies, collected.samples, step=number, versions=run.versions)
    metrics = learnt.metrics | describe_opponents(run.config, collected.samples)
    with run.timed("save_checkpoint"):
        begun = await begin_checkpoint(run, number)
    metrics |= measure_time(run, collected, time.monotonic() - began)
    metrics["perf/rollouts"] = len(learnt.rollouts) / metrics["timing_s/step"]
    metrics["perf/throughput"] = metrics["perf/total_num_tokens"] / metrics["timing_s/step"]
    step = Step(
        lineage=run.lineage,
        number=number,
        rollouts=learnt.rollouts,
        dropped=learnt.dropped | collected.dropped,
        metrics=metrics,
        digest=await take_digest(run.policies),
        time=time.time(),
    )
    for policy in run.policies.values():
        policy.publisher.prepare(step.version)
    await run.store.commit_step(step, learnt.tokens)
    if begun is not None:
        follow_checkpoint(run, step, begun)
    await publish(run, step)
    if ahead:
        run.pool.go_on()


def measure_time(run: Run, collected: Collected, learning: float) -> dict[str, float]:
    """Where a step's seconds went; those of the next one are counted from here on."""
    seconds = learning + collected.seconds + run.spent["update_weights"]
    metrics = {f"timing_s/{phase}": spent for phase, spent in run.spent.items()}
    metrics |= {"timing_s/gen": collected.seconds, "timing_s/step": seconds, "perf/learner_busy": learning / seconds}
    metrics["perf/time_per_step"] = seconds
    run.spent.clear()
    return metrics


async def publish(run: Run, step: Step) -> None:
    """Engines serve the step's version from here on."""
    run.step, run.versions = step.number, run.versions_of(step)
    run.steps.append(step)
    with run.timed("update_weights"):
        for policy in run.policies.values():
            await policy.publisher.publish(step.version)
            run.spent["send_weights"] += policy.publisher.sending
        if any(pool.grows for pool in run.opponents):
            await finish_checkpoint(run)
        for pool in run.opponents:
            await pool.refresh(run)
        if not run.overlaps:
            for engine in run.engines:
                await engine.resume()
    run.view.step(step.number, step.metrics)
    if run.metrics is not None:
        run.metrics.write(step.number, step.metrics)
    note_trouble(run, step)
