"""The whole loop, readable top to bottom.

    collect groups → assemble → score → credit → update → checkpoint if due → commit_step → publish → evaluate if due

With loop.staleness 0 a step is collected once the one before it has been published, and engines rest while the learner
works. Above it, rollouts of the steps that follow are queued meanwhile: agents, engines and learner all work at once,
every turn says which version sampled it, and a step waits only for rollouts that are not done yet.

rooms.py opens the rooms used here. A run lives in a folder and may be killed at any moment; lineage.py finds the way
back. Group n of a run is always the same task with the same seeds, and steps take groups in that order, so nothing
needs remembering but what the last step took.
"""

from __future__ import annotations

import asyncio
import math
import shlex
import time
from collections import Counter
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from typing import Any, NoReturn, TypeVar

import numpy as np

from strop.algorithms import Algorithm
from strop.algorithms.credit import spread
from strop.algorithms.filters import too_stale
from strop.config import Config
from strop.errors import AgentError, ConfigError, LearnerError
from strop.learner.process import LearnerProcess
from strop.monitor import transcripts
from strop.monitor.console import View
from strop.monitor.metrics import MetricsFile, counted, flat
from strop.monitor.summary import Summary, failures, summarize
from strop.run.folder import until_gone
from strop.run.group_reward import give
from strop.run.health import Collapse, collapse, nothing_since, nothing_yet
from strop.run.resume import clear_queue, finished_evaluations, go_back, has_checkpoint, sample, stored, superseded
from strop.run.runtime import POLICY, Collected, Run, open_rooms
from strop.store.reclaim import reclaiming
from strop.trajectory import Batch, Sample, assemble, exactness, explain
from strop.types import TERMINAL, Rollout, Step, version

T = TypeVar("T")
CALLED = "an agent reaches it at llm.base_url, which is also $OPENAI_BASE_URL"


async def train(
    config: Config,
    view: View,
    *,
    resume: bool = False,
    changes: Mapping[str, tuple[Any, Any]] | None = None,
    stop: asyncio.Event | None = None,
) -> Summary:
    """Train as configured, or go on with the run in `config.folder`, with `changes` of its settings, before and after,
    written down there. Once `stop` is set the step at hand is finished and has a checkpoint, and nothing more is
    begun."""
    view.title(f"{config.folder} · {config.policy.model} · {config.algorithm.name}", config.loop.steps)
    async with open_rooms(config, view, resume=resume) as run:
        run.stop = stop or run.stop
        if resume:
            left = await go_back(run)
            if changes:
                run.folder.change(changes, step=run.step)
                view.note("; ".join(f"{key}: {old} → {new}" for key, (old, new) in changes.items()))
            for collected in left:
                await advance(run, collected)
            await clear_queue(run)
        return await at_work(run, loop(run))  # not before: what is queued only the restored weights may sample


async def at_work(run: Run, main: Coroutine[Any, Any, T]) -> T:
    """The result of `main` while agents are at work and every room is watched."""
    run.pool.work()
    lease = run.config.runner.lease
    reclaim, gone = reclaiming(run.store, lease / 2, grace=lease), until_gone(run.folder.path)
    return await beside(main, run.learner.watch(), run.pool.watch(), reclaim, gone)


async def loop(run: Run) -> Summary:
    began, config = time.monotonic(), run.config
    before = sum(step.metrics["timing_s/step"] for step in run.steps)  # what was spent before the run was resumed
    run.view.past([(step.number, step.metrics) for step in run.steps])
    for step, split, ended in await finished_evaluations(run):
        if step == 0 and run.relative is None:
            check_rewards(run, ended)
        show_scores(run, step, split, ended)
    run.metrics = MetricsFile(run.folder.metrics, run.steps, run.scores, run.writers, run.config.loop.eval_samples)
    await evaluate_if_due(run)
    keep_checkpoints(run)
    fallen = collapse(run.steps, config.loop.collapse_patience)  # a run that was resumed may have been stopped for it
    while fallen is None and not finished(run) and not run.stop.is_set():
        await advance(run, await collect(run))
        stop_if_hopeless(run)
        fallen = collapse(run.steps, config.loop.collapse_patience)
        if fallen is None:
            await evaluate_if_due(run)
            keep_checkpoints(run)
    seconds = before + time.monotonic() - began
    await transcripts.leave(run.folder.path, run.store, run.steps, config)
    if fallen is not None:
        stop_collapsed(run, fallen, seconds)
    done = finished(run) and all((run.step, split) in run.scores for split in run.evaluations(run.step, run.names[0]))
    return summarize(config, run.folder.path, run.steps, run.scores, seconds=seconds, done=done)


async def advance(run: Run, collected: Collected) -> None:
    """One step: consumes collected rollouts, produces a committed and published version."""
    number, began = run.step + 1, time.monotonic()
    run.view.phase(f"training step {number}")
    if not run.overlaps:
        await run.engine.pause()
    batch, metrics = await learn(
        collected.samples, run.config, run.algorithm, run.learner, step=number, names=run.names
    )
    with run.timed("save_checkpoint"):
        saved = await checkpoint(run, number)
    learning = time.monotonic() - began
    seconds = learning + collected.seconds + run.spent["update_weights"]
    metrics |= {f"timing_s/{phase}": spent for phase, spent in run.spent.items()}
    metrics |= {"timing_s/gen": collected.seconds, "timing_s/step": seconds, "perf/learner_busy": learning / seconds}
    metrics["perf/time_per_step"] = seconds
    metrics["perf/rollouts"] = len(batch.samples) / seconds
    metrics["perf/throughput"] = metrics["perf/total_num_tokens"] / seconds
    run.spent.clear()
    step = Step(
        lineage=run.lineage,
        number=number,
        rollouts=[sample.rollout.id for sample in batch.samples],
        dropped=batch.dropped | collected.dropped,
        metrics=metrics,
        checkpoint=saved,
        digest=await run.learner.call("digest") if run.config.engine.deterministic else None,
        time=time.time(),
    )
    await run.store.commit_step(step, policy=POLICY)
    await publish(run, step)


async def learn(
    samples: Sequence[Sample],
    config: Config,
    algorithm: Algorithm,
    learner: LearnerProcess,
    *,
    step: int,
    names: Collection[str],
) -> tuple[Batch, dict[str, float]]:
    """From rollouts to new weights in the learner. Everything that a step learns is learnt here. `names` are the
    versions that the weights have before it: only what they sampled is compared with what the learner reads."""
    began = time.monotonic()
    batch = assembled(config, samples)
    batch.entries.exact &= batch.sampled_by(names)
    metrics = too_stale(batch, step - 1, config.loop.staleness) if config.loop.staleness else {}
    metrics["timing_s/assemble"] = time.monotonic() - began
    if algorithm.needs:
        batch.entries, seconds = await learner.call("score", batch.bare())
        metrics |= seconds
    began = time.monotonic()
    metrics |= algorithm.credit(batch) | describe(batch)
    metrics["timing_s/adv"] = time.monotonic() - began
    return batch, metrics | await learner.call("update", batch.bare())


async def collect(run: Run) -> Collected:
    """Consumes tasks; waits for the next step's rollouts to end or for their deadline; produces them as samples. Where
    groups taught nothing (loop.groups_most) the groups behind them are taken as well."""
    began, loop = time.monotonic(), run.config.loop
    dropped = await superseded(run, run.next_rollouts())
    groups, phase, reads = loop.groups, f"collecting step {run.step + 1}", dict[str, asyncio.Task[Sample]]()

    def read(rollout: Rollout) -> None:
        """At once, while others still run."""
        reads[rollout.id] = asyncio.create_task(sample(run, rollout))

    try:
        while True:
            wanted = run.next_rollouts(groups)
            await run.store.enqueue(run.next_rollouts(groups + run.groups_of_later_steps))
            fresh = [rollout for rollout in wanted if rollout.id not in reads]
            await ended_of(run, fresh, phase, then=read)
            samples = [await reads[rollout.id] for rollout in wanted]
            await stop_if_all_failed(run, [sample.rollout for sample in samples], phase)
            samples = await compared(run, samples)
            if run.step == 0 and (run.relative is not None or not run.scores):  # an evaluation would have told
                check_rewards(run, [sample.rollout for sample in samples])
            if groups >= (loop.groups_most or loop.groups):
                break
            run.algorithm.credit(batch := assembled(run.config, samples))
            telling = len(batch.teaching())
            if telling >= loop.groups:
                break
            groups = min(groups + loop.groups - telling, loop.groups_most or loop.groups)
    finally:
        await call_off(*reads.values())
    if run.step == 0 and not any(sample.turns for sample in samples):
        raise AgentError(
            f"none of the {len(samples)} rollouts called the model: {CALLED}; mend it, then begin a new run"
        )
    sampled_by = {name for sample in samples for turn in sample.turns for _, name in turn.versions}
    assert run.overlaps or sampled_by <= set(run.names), f"sampled from {sampled_by}, the weights are {run.names}"
    return Collected(samples, dropped, time.monotonic() - began)


async def compared(run: Run, samples: list[Sample]) -> list[Sample]:
    """The same with the rewards that are relative to their groups, if there are any. All members have ended."""
    if run.relative is None:
        return samples
    seconds = run.config.loop.group_deadline
    try:
        with run.timed("group_reward"):
            async with asyncio.timeout(seconds):
                return await give(run.store, samples, run.relative)
    except TimeoutError:
        raise AgentError(
            f"group_reward took longer than loop.group_deadline ({seconds:g} s) for one step: mend the function, or "
            "allow more, then resume"
        ) from None


def assembled(config: Config, samples: Sequence[Sample]) -> Batch:
    return assemble(
        samples,
        agents=config.policy.agents,
        budget=config.learner.token_budget,
        failures=config.algorithm.failures.by_cause(),
    )


async def publish(run: Run, step: Step) -> None:
    """Engines serve the step's version from here on."""
    run.step, run.names = step.number, run.names_of(step)
    run.steps.append(step)
    with run.timed("update_weights"):
        await run.weights.publish(step.version)
        if not run.overlaps:
            await run.engine.resume()
    run.view.step(step.number, step.metrics)
    if run.metrics is not None:
        run.metrics.write(step.number, step.metrics)
    tell_of_trouble(run, step)


def tell_of_trouble(run: Run, step: Step) -> None:
    """What a step's metrics say that a user should know of."""
    number, metrics, note = step.number, step.metrics, run.view.note
    if off := int(metrics.get("training/rollout_logprobs_off", 0)):
        gap, checked = (metrics[f"training/rollout_logprobs_{name}"] for name in ("diff_max", "checked"))
        note(
            f"step {number}: engine and learner logprobs of {off:,} of {checked:,.0f} tokens differ by more than "
            f"learner.logprob_limit, {gap:.1e} at most"
        )
    most = run.config.learner.token_budget
    budgets = [most, *(step.metrics.get("perf/token_budget", most) for step in run.steps[-2:])]
    if budgets[-1] < budgets[-2]:
        note(
            f"step {number}: a micro-batch of {budgets[-2]:.0f} tokens took more memory than the GPU has; going on "
            f"with {budgets[-1]:.0f}, which learner.token_budget could be set to"
        )
    patience, rate = run.config.loop.collapse_patience, run.config.learner.optim.lr
    if why := nothing_yet(run.steps, patience, run.config.policy.model) or nothing_since(run.steps, patience, rate):
        note(why)
    if metrics["actor/skipped"]:
        reasons = "; ".join(
            f"{n} rollouts {explain(reason)}" for reason, n in Counter(step.dropped.values()).most_common()
        )
        note(f"step {number} had nothing to train on: {reasons}")
    if (failed := failures(metrics)).total() > len(step.rollouts) / 10:
        reasons = ", ".join(f"{cause} {count}" for cause, count in failed.items())
        look = f"strop rollouts {run.folder.path} --status failed"
        note(f"step {number}: {failed.total()} of {len(step.rollouts)} rollouts failed ({reasons}): {look}")


def stop_if_hopeless(run: Run, patience: int = 3) -> None:
    """Some failures are data; step after step of nothing else is an outage."""
    last = run.steps[-patience:]
    if len(last) == patience and all(failures(step.metrics).total() == len(step.rollouts) for step in last):
        raise AgentError(
            f"all rollouts of the last {patience} steps failed ({', '.join(failures(last[-1].metrics))}): look at them "
            f"with `strop rollouts {run.folder.path} --status failed`, mend the cause, then resume"
        )


def stop_collapsed(run: Run, fallen: Collapse, seconds: float) -> NoReturn:
    """The run's result is the best checkpoint from before, if there is one. `best` leads to it from now on."""
    place, config = run.folder.path, run.config
    # Step n is sampled by the weights behind step n - 1, or behind one as far back as staleness allows.
    good = ranked(run, [s for s in checkpoints(run) if s.number < fallen.since - 1 - config.loop.staleness])
    result, rate = str(good[-1].checkpoint) if good else None, config.learner.optim.lr
    if result is not None:
        run.folder.name_best(result)
        kept = f"The result is {run.folder.checkpoint(result)}, the best checkpoint before that"
        again = f"strop train --from {shlex.quote(f'{place}:best')} --lr {rate / 10:g}"
    else:
        kept = "No checkpoint is left from before that (loop.checkpoint_every)"
        again = f"type what began this run, with --lr {rate / 10:g} behind it"
    why = (
        f"collapsed: {fallen.why}. {kept}. Fix: if agent and rewards are sound, lower learner.optim.lr (it was "
        f"{rate:g}) and begin again: {again}; with loop.collapse_patience=0 no run is stopped"
    )
    summarize(config, place, run.steps, run.scores, seconds=seconds, done=False, collapsed=why, result=result)
    raise LearnerError(why)


def finished(run: Run) -> bool:
    return run.step >= run.config.loop.steps


# -- evaluation --------------------------------------------------------------------------------------------------------


async def evaluate_if_due(run: Run) -> None:
    """Every split of the configuration, sampled and greedily. What the store has already is not run again."""
    every = run.config.loop.eval_every
    if run.step == 0 or finished(run) or (every and run.step % every == 0):
        for split, wanted in run.evaluations(run.step, run.names[0]).items():
            if (run.step, split) not in run.scores:
                with run.timed("testing"):
                    ended = await unless_told_to_stop(run, ended_of(run, wanted, f"evaluating {split}"))
                if ended is None:
                    return
                await stop_if_all_failed(run, ended, f"evaluating {split}")
                if run.step == 0 and run.relative is None:  # otherwise they are known once groups were compared
                    check_rewards(run, ended)
                show_scores(run, run.step, split, ended)


async def unless_told_to_stop(run: Run, waiting: Coroutine[Any, Any, list[Rollout]]) -> list[Rollout] | None:
    """An evaluation can be taken up again: it need not be finished first."""
    task, told = asyncio.create_task(waiting), asyncio.create_task(run.stop.wait())
    try:
        await asyncio.wait([task, told], return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        await call_off(task, told)


def show_scores(run: Run, step: int, split: str, ended: Sequence[Rollout]) -> None:
    """Mean of every named reward over an evaluation; rollouts that failed count as 0."""
    if failed := Counter(rollout.cause for rollout in ended if rollout.cause):
        reasons = ", ".join(f"{cause} {count}" for cause, count in failed.items())
        run.view.note(f"evaluating {split} after step {step}: failed rollouts count as 0 ({reasons})")
    names = {r.name for rollout in ended for r in rollout.rewards if r.target == (r.name, None, None)}
    names = sorted(names, key=lambda name: (name not in run.config.algorithm.rewards, name))  # those that count first
    means = {name: sum(rollout.reward(name) or 0.0 for rollout in ended) / len(ended) for name in names}
    run.scores[step, split] = means
    run.view.evaluation(step, {f"{split} {name}": value for name, value in means.items()})
    if run.metrics is not None:
        run.metrics.write(step, flat(split, means, run.config.loop.eval_samples))


def check_rewards(run: Run, ended: Sequence[Rollout]) -> None:
    """Before anything is trained: one of the rewards that count must be among those the agent gives. Others may be
    rare; a name that nobody gave counts as 0, which somebody who misspelt it should hear."""
    given = {reward.name for rollout in ended for reward in rollout.rewards}
    wanted = set(run.config.algorithm.rewards)
    said = f"gave only {', '.join(sorted(given))}" if given else "gave no reward"
    if not wanted & given:
        raise ConfigError(
            f"algorithm.rewards counts {', '.join(sorted(wanted))}, but the agent {said}: return it, or begin a run "
            f"with --set algorithm.rewards.{sorted(given)[0] if given else 'NAME'}=1"
        )
    if missing := sorted(wanted - given):
        names = ", ".join(missing)
        run.view.note(f"algorithm.rewards counts {names}, and so far the agent {said}: what is not given counts as 0")


async def ended_of(
    run: Run, wanted: Sequence[Rollout], phase: str, *, then: Callable[[Rollout], None] = lambda _: None
) -> list[Rollout]:
    """Queue rollouts (those already there stay as they are) and wait until all have ended. When none has for as long as
    loop.group_deadline, the rest is cancelled as late. Returned in the order they were wanted; `then` is told of each
    as it ends."""
    await run.store.enqueue(wanted)
    ids, now = [rollout.id for rollout in wanted], await stored(run, wanted)
    for id in ids:
        if now[id].status in TERMINAL:
            then(now[id])
    deadline = time.monotonic() + run.config.loop.group_deadline
    while open := [id for id in ids if now[id].status not in TERMINAL]:
        run.view.phase(phase, len(ids) - len(open), len(ids), run.pool.slowest())
        if time.monotonic() > deadline:
            await run.store.cancel(open, cause="late", detail=f"past loop.group_deadline in {phase}")
        run.cursor, changed = await run.store.wait(run.cursor, timeout=1.0)
        for rollout in changed:
            if (before := now.get(rollout.id)) is not None:
                now[rollout.id] = rollout
                if rollout.status in TERMINAL and before.status not in TERMINAL:
                    deadline = time.monotonic() + run.config.loop.group_deadline
                    then(rollout)
            if rollout.status in TERMINAL:
                run.gateway.forget(rollout.id)
    run.view.phase(phase, len(ids), len(ids))
    return [now[id] for id in ids]


async def stop_if_all_failed(run: Run, ended: Sequence[Rollout], phase: str) -> None:
    """Before the first step that is a bad agent; later it is a bad step."""
    if run.step == 0 and (why := await all_failed(run, ended, phase)):
        example = commonest(ended)
        resume = run.config.loop.steps and example.cause != "late"
        mended = "then resume (tasks stay as they are in the run)" if resume else "then begin again"
        look = f"look, with what the agent printed: strop rollouts {run.folder.path} {example.id}"
        raise AgentError(f"{why} ({look}); mend it, {mended}")


async def all_failed(run: Run, ended: Sequence[Rollout], phase: str) -> str:
    """Why, if every one of them failed; otherwise nothing."""
    if any(rollout.status == "succeeded" for rollout in ended):
        return ""
    example = commonest(ended)
    same = sum(rollout.cause == example.cause for rollout in ended)
    why = f"all {len(ended)} rollouts failed while {phase}, {same} with {example.cause}: {last_line(example.detail)}"
    return why if (await run.store.stats())["turns"] else f"{why}; none of them called the model: {CALLED}"


def commonest(failed: Sequence[Rollout]) -> Rollout:
    """The first one that failed as most did."""
    cause = Counter(rollout.cause for rollout in failed).most_common(1)[0][0]
    return next(rollout for rollout in failed if rollout.cause == cause)


def last_line(text: str | None) -> str:
    """What an error says, without the traceback above it."""
    return (text or "no reason given").strip().split("\n")[-1]


async def checkpoint(run: Run, number: int) -> str | None:
    """Write a checkpoint if one is due; it counts once the step that names it is committed."""
    loop = run.config.loop
    if number % loop.checkpoint_every and number < loop.steps and not run.stop.is_set():
        return None
    name = f"step-{number:06d}-{run.lineage}"
    await run.learner.call("save", run.folder.checkpoint(name), {"version": version(run.lineage, number)})
    return name


def keep_checkpoints(run: Run) -> None:
    """The newest ones, and the best. How good the very newest are is a guess where only training tells: the best of the
    others stays as well, and so does the best of those that only training tells of."""
    if there := checkpoints(run):
        order = ranked(run, there)
        run.folder.name_best(str(order[-1].checkpoint))
        seen = len(run.steps) - run.config.loop.staleness
        known = [step for step in order if step.number < seen and score(run, step) is None]
        known = order if evaluated(run.config) else known
        kept = [order[-1], *known[-1:], *there[-run.config.loop.keep_checkpoints :]]
        run.folder.prune([str(step.checkpoint) for step in kept])


def checkpoints(run: Run) -> list[Step]:
    return [step for step in run.steps if has_checkpoint(run, step)]


def ranked(run: Run, there: Sequence[Step]) -> list[Step]:
    """Steps from worst to best. That is told by evaluations. Steps without one stand below, by what rollouts got in
    training: the worst of the steps which this one's weights may have sampled. The newest step has no next one yet; its
    own stands for it."""

    def standing(step: Step) -> tuple[bool, float, int]:
        if (total := score(run, step)) is not None:
            return True, total, step.number
        sampled = run.steps[step.number : step.number + 1 + run.config.loop.staleness] or [step]
        return False, min(one.metrics.get("critic/rewards/mean", -math.inf) for one in sampled), step.number

    return sorted(there, key=standing)


def score(run: Run, step: Step) -> float | None:
    """What a step's weights got on the first split, where that was evaluated."""
    splits = run.config.loop.eval_splits
    return counted(run.scores.get((step.number, splits[0]), {}), run.config.algorithm.rewards) if splits else None


def evaluated(config: Config) -> bool:
    """Whether every checkpoint is evaluated."""
    loop = config.loop
    return bool(loop.eval_splits and loop.eval_every and loop.checkpoint_every % loop.eval_every == 0)


def describe(batch: Batch) -> dict[str, float]:
    """What was collected, as metrics."""
    turns = [turn for sample in batch.samples for turn in sample.turns if not turn.outside]
    metrics = spread("response_length", np.array([len(turn.response_ids) for turn in turns], float))
    metrics |= spread("prompt_length", np.array([len(turn.prompt_ids) for turn in turns], float))
    calls = [sum(len(turn.answer.get("tool_calls", ())) for turn in sample.turns) for sample in batch.samples]
    metrics |= spread("tool_call_counts", np.array(calls, float))
    metrics |= spread("num_turns", np.array([len(sample.turns) for sample in batch.samples], float))
    if turns:
        metrics["response_length/clip_ratio"] = sum(turn.finish == "length" for turn in turns) / len(turns)
    metrics |= exactness(batch.samples).metrics()
    rollouts = [sample.rollout for sample in batch.samples]
    for name in sorted({reward.name for rollout in rollouts for reward in rollout.rewards}):
        given = [value for rollout in rollouts if (value := rollout.reward(name)) is not None]
        metrics |= {f"reward/{name}": sum(given) / len(given)} if given else {}
    for cause, count in Counter(rollout.cause for rollout in rollouts if rollout.cause).items():
        metrics[f"failed/{cause}"] = float(count)
    return metrics


async def beside(main: Coroutine[Any, Any, T], *watches: Coroutine[Any, Any, None]) -> T:
    """The result of `main`, unless one of `watches` raises first: then that, with `main` cancelled."""
    first = asyncio.create_task(main)
    tasks: list[asyncio.Task[Any]] = [first, *map(asyncio.create_task, watches)]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in reversed(tasks):  # a watch that raised says why main may have failed too
            if task in done:
                task.result()
        return first.result()
    finally:
        await call_off(*tasks)


async def call_off(*tasks: asyncio.Task[Any]) -> None:
    """Nothing of them goes on, whatever they were at."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
