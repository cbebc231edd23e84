"""Evaluations while a run trains: when one is due, and what its rollouts came to."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Coroutine, Sequence
from typing import Any

from strop.monitor.metrics import flat
from strop.run.collect import check_rewards, stop_if_all_failed, wait_until_ended
from strop.run.state import Run
from strop.run.supervise import cancel_all
from strop.types import Rollout


async def evaluate_if_due(run: Run) -> None:
    """Every split of the configuration, sampled and greedily. What the store has already is not run again."""
    every = run.config.loop.eval_every
    if run.step == 0 or run.finished or (every and run.step % every == 0):
        for split, wanted in run.evaluations(run.step, run.versions[0]).items():
            if (run.step, split) not in run.scores:
                with run.timed("testing"):
                    ended = await wait_unless_stopped(run, wait_until_ended(run, wanted, f"evaluating {split}"))
                if ended is None:
                    return
                await stop_if_all_failed(run, ended, f"evaluating {split}")
                if run.step == 0 and run.group_reward is None:  # otherwise they are known once groups were compared
                    check_rewards(run, ended)
                show_scores(run, run.step, split, ended)


async def wait_unless_stopped(run: Run, waiting: Coroutine[Any, Any, list[Rollout]]) -> list[Rollout] | None:
    """An evaluation can be taken up again: it need not be finished first."""
    task, told = asyncio.create_task(waiting), asyncio.create_task(run.stop.wait())
    try:
        await asyncio.wait([task, told], return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        await cancel_all(task, told)


def show_scores(run: Run, step: int, split: str, ended: Sequence[Rollout]) -> None:
    """Mean of every named reward over an evaluation; rollouts that failed count as 0."""
    if failed := Counter(rollout.cause for rollout in ended if rollout.cause):
        reasons = ", ".join(f"{cause} {count}" for cause, count in failed.items())
        run.view.note(f"evaluating {split} after step {step}: failed rollouts count as 0 ({reasons})")
    names = {r.name for rollout in ended for r in rollout.rewards if r.target == (r.name, None, None)}
    names = sorted(names, key=lambda name: (name not in run.rewards, name))  # those that count first
    means = {name: sum(rollout.reward(name) or 0.0 for rollout in ended) / len(ended) for name in names}
    run.scores[step, split] = means
    run.view.evaluation(step, {f"{split} {name}": value for name, value in means.items()})
    if run.metrics is not None:
        run.metrics.write(step, flat(split, means, run.config.loop.eval_samples))
