"""Collecting a step's rollouts: queue them, wait until they end, give the rewards that are relative to their groups,
and stop at once where nothing could ever be learnt from what came back."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Sequence

from strop.errors import AgentError, ConfigError
from strop.run.data.copies import collect_stored
from strop.run.group_reward import give
from strop.run.learn import assemble_batch
from strop.run.rollouts import find_stored, find_superseded, read_samples
from strop.run.state import Collected, Run
from strop.run.supervise import cancel_all
from strop.trajectory import Sample
from strop.types import TERMINAL, Rollout

CALLED = "an agent reaches it at llm.base_url, which is also $OPENAI_BASE_URL"


async def collect(run: Run) -> Collected:
    """Consumes tasks; waits for the next step's rollouts to end or for their deadline; produces them as samples. Where
    groups taught nothing (loop.max_groups) the groups behind them are taken as well. Stored data needs no agents."""
    if run.data is not None:
        return await collect_stored(run, run.data)
    began, loop = time.monotonic(), run.config.loop
    dropped = await find_superseded(run)
    groups, phase, reads = loop.groups, f"collecting step {run.step + 1}", list[asyncio.Task[list[Sample]]]()
    read = dict[str, Sample]()

    def begin_to_read(ended: Sequence[Rollout]) -> None:
        """At once, while others still run."""
        reads.append(asyncio.create_task(read_samples(run.store, ended)))

    try:
        while True:
            queued = run.next_rollouts(groups + run.groups_of_later_steps)
            wanted = queued[: groups * loop.group_size]
            fresh = [rollout for rollout in wanted if rollout.id not in read]
            await wait_until_ended(run, fresh, phase, later=queued[len(wanted) :], then=begin_to_read)
            read |= {sample.rollout.id: sample for some in reads for sample in await some}
            samples = [read[rollout.id] for rollout in wanted]
            await stop_if_all_failed(run, [sample.rollout for sample in samples], phase)
            samples = await give_group_rewards(run, samples)
            if run.step == 0 and (run.group_reward is not None or not run.scores):  # an evaluation would have told
                check_rewards(run, [sample.rollout for sample in samples])
            if groups >= (loop.max_groups or loop.groups):
                break
            telling = count_telling_groups(run, samples)
            if telling >= loop.groups:
                break
            groups = min(groups + loop.groups - telling, loop.max_groups or loop.groups)
    finally:
        await cancel_all(*reads)
    if run.step == 0 and not any(sample.turns for sample in samples):
        raise AgentError(
            f"none of the {len(samples)} rollouts called the model: {CALLED}. Fix: correct the agent, "
            "then begin a new run"
        )
    trained = [turn for sample in samples for turn in sample.turns if turn.policy in run.policies]
    sampled_by = {name for turn in trained for _, name in turn.versions}
    assert run.overlaps or sampled_by <= set(run.versions), f"sampled from {sampled_by}, the weights are {run.versions}"
    return Collected(samples, dropped, time.monotonic() - began)


def count_telling_groups(run: Run, samples: Sequence[Sample]) -> int:
    """How many groups teach any of the policies something."""
    found: set[int] = set()
    for policy in run.policies.values():
        policy.algorithm.assign_credit(batch := assemble_batch(policy.config, samples, policy.name))
        found |= {int(group) for group in batch.teaching()}
    return len(found)


async def give_group_rewards(run: Run, samples: list[Sample]) -> list[Sample]:
    """The same with the rewards that are relative to their groups, if there are any. All members have ended."""
    if run.group_reward is None:
        return samples
    seconds = run.config.loop.group_deadline
    try:
        with run.timed("group_reward"):
            async with asyncio.timeout(seconds):
                return await give(run.store, samples, run.group_reward)
    except TimeoutError:
        raise AgentError(
            f"group_reward took longer than loop.group_deadline ({seconds:g} s) for one step. Fix: correct "
            "the function or allow more, then resume"
        ) from None


async def wait_until_ended(
    run: Run,
    wanted: Sequence[Rollout],
    phase: str,
    *,
    later: Sequence[Rollout] = (),
    then: Callable[[Sequence[Rollout]], None] = lambda _: None,
) -> list[Rollout]:
    """Queue rollouts, and those of later steps behind them (those already there stay as they are), and wait until all
    that are wanted have ended. When none has for as long as loop.group_deadline, the rest is cancelled as late.
    Returned in the order they were wanted; `then` is told of them as they end."""
    there = await find_stored(run.store, [*wanted, *later])
    await run.store.enqueue([rollout for rollout in (*wanted, *later) if rollout.id not in there])
    total = len(wanted)
    over = {id: rollout for id, rollout in there.items() if rollout.status in TERMINAL}
    open = {rollout.id: None for rollout in wanted if rollout.id not in over}  # in their order; each leaves it once
    then([over[rollout.id] for rollout in wanted if rollout.id in over])
    deadline = time.monotonic() + run.config.loop.group_deadline
    while open:
        run.view.phase(phase, total - len(open), total, run.pool.slowest())
        if time.monotonic() > deadline:
            await run.store.cancel(list(open), cause="late", detail=f"past loop.group_deadline in {phase}")
        run.cursor, changed = await run.store.wait(run.cursor, timeout=1.0)
        ended = [rollout for rollout in changed if rollout.status in TERMINAL]
        for rollout in ended:
            run.gateway.forget(rollout.id)
        if news := [rollout for rollout in ended if rollout.id in open]:
            over |= {rollout.id: rollout for rollout in news}
            for rollout in news:
                del open[rollout.id]
            deadline = time.monotonic() + run.config.loop.group_deadline
            then(news)
    run.view.phase(phase, total, total)
    return [over[rollout.id] for rollout in wanted]


def check_rewards(run: Run, ended: Sequence[Rollout]) -> None:
    """Before anything is trained: one of the rewards that count must be among those the agent gives. Others may be
    rare; a name that nobody gave counts as 0, which somebody who misspelt it should hear."""
    given = {reward.name for rollout in ended for reward in rollout.rewards}
    wanted = run.rewards
    said = f"gave only {', '.join(sorted(given))}" if given else "gave no reward"
    if wanted and not wanted & given and run.data is None:  # otherwise rewards are looked at, and not learnt from
        raise ConfigError(
            f"algorithm.rewards counts {', '.join(sorted(wanted))}, but the agent {said}. Fix: return it, or begin a "
            f"run with --set algorithm.rewards.{sorted(given)[0] if given else 'NAME'}=1"
        )
    if missing := sorted(wanted - given):
        names = ", ".join(missing)
        run.view.note(f"algorithm.rewards counts {names}, and so far the agent {said}: what is not given counts as 0")


async def stop_if_all_failed(run: Run, ended: Sequence[Rollout], phase: str) -> None:
    """Before the first step that is a bad agent; later it is a bad step."""
    if run.step == 0 and (why := await explain_if_all_failed(run, ended, phase)):
        example = find_commonest_failure(ended)
        resume = run.config.loop.steps and example.cause != "late"
        next_step = "then resume (tasks stay as they are in the run)" if resume else "then begin again"
        look = f"look, with what the agent printed: strop rollouts {run.folder.path} {example.id}"
        raise AgentError(f"{why} ({look}). Fix: correct the agent, {next_step}")


async def explain_if_all_failed(run: Run, ended: Sequence[Rollout], phase: str) -> str:
    """Why, if every one of them failed; otherwise nothing."""
    if any(rollout.status == "succeeded" for rollout in ended):
        return ""
    example = find_commonest_failure(ended)
    same = sum(rollout.cause == example.cause for rollout in ended)
    why = (
        f"all {len(ended)} rollouts failed while {phase}, {same} with {example.cause}: {take_last_line(example.detail)}"
    )
    return (
        why
        if (await run.store.stats())["turns"] or example.cause == "engine_error"
        else f"{why}; none of them called the model: {CALLED}"
    )


def find_commonest_failure(failed: Sequence[Rollout]) -> Rollout:
    """The first one that failed as most did."""
    cause = Counter(rollout.cause for rollout in failed).most_common(1)[0][0]
    return next(rollout for rollout in failed if rollout.cause == cause)


def take_last_line(text: str | None) -> str:
    """What an error says, without the traceback above it."""
    return (text or "no reason given").strip().split("\n")[-1]
