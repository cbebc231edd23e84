"""Evaluations while a run trains: when one is due, and what its rollouts came to.

reward                     what a whole rollout was given, by the reward's name
agents/wolf/reward/win     what trained agents were given, by role
turns/reward/format        what turns were given

Left out: whose a turn was, which its reward does not say.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Coroutine, Mapping, Sequence
from statistics import fmean
from typing import Any

from strop.algorithms.rewards import select_last_rewards
from strop.config import Config, find_policy, resolve_policies, trained_policies, weigh_rewards
from strop.monitor.metrics import flat, is_part, weigh_parts
from strop.run.agent_metrics import name_roles
from strop.run.collect import check_rewards, stop_if_all_failed, wait_until_ended
from strop.run.state import Run
from strop.run.supervise import cancel_all
from strop.types import Reward, Rollout


async def evaluate_if_due(run: Run) -> None:
    """Every split of the configuration, sampled and greedily. What the store has already is not run again."""
    if run.is_evaluated(run.step):
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
    """Mean of every named reward over an evaluation; rollouts that failed count as 0. Of what agents and turns got only
    the sum is shown."""
    if failed := Counter(rollout.cause for rollout in ended if rollout.cause):
        reasons = ", ".join(f"{cause} {count}" for cause, count in failed.items())
        run.view.note(f"evaluating {split} after step {step}: failed rollouts count as 0 ({reasons})")
    means = {name: fmean(values) for name, values in collect_rewards(run.config, ended).items()}
    names = sorted(means, key=lambda name: (name not in run.rewards, is_part(name), name))  # those that count first
    means = run.scores[step, split] = {name: means[name] for name in names}
    shown = {f"{split} {name}": value for name, value in means.items() if not is_part(name)}
    if (parts := weigh_parts(means, weigh_rewards(run.config))) is not None:
        shown[f"{split} agents"] = parts
    run.view.evaluation(step, shown)
    if run.metrics is not None:
        run.metrics.write(step, flat(split, means, run.config.loop.eval_samples))


def collect_rewards(config: Config, ended: Sequence[Rollout]) -> dict[str, list[float]]:
    """By name, what each of the rollouts got: 0 where it failed or got none, the mean where several turns, or agents of
    one role, got it."""
    policies = resolve_policies(config)
    wanted = trained_policies(config) or policies
    agents = {reward.agent for rollout in ended for reward in rollout.rewards if reward.agent is not None}
    roles = name_roles(sorted(name for name in agents if find_policy(name, policies) in wanted))
    found: dict[str, list[list[float]]] = {}
    for k, rollout in enumerate(ended):
        for reward in select_last_rewards(rollout) if not rollout.cause else ():
            if reward.agent is None or reward.agent in roles:
                name = name_part(reward, roles)
                found.setdefault(name, [[] for _ in ended])[k].append(reward.value)
    return {name: [fmean(values) if values else 0.0 for values in found[name]] for name in sorted(found)}


def name_part(reward: Reward, roles: Mapping[str, str]) -> str:
    """
    >>> name_part(Reward(name="win", value=1.0, agent="wolf-1"), {"wolf-1": "wolf"})
    'agents/wolf/reward/win'
    """
    if reward.agent is not None:
        return f"agents/{roles[reward.agent]}/reward/{reward.name}"
    return reward.name if reward.turn is None else f"turns/reward/{reward.name}"
