"""Rewards of rollouts, agents and turns as numbers to compare, the same for every algorithm.

Everything here happens before anything is dropped and counts each rollout once, however many turns it has.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping

import numpy as np

from strop.trajectory import Batch
from strop.trajectory.entries import Floats
from strop.types import Reward, Rollout

EPSILON = 1e-6
"""Added to a standard deviation before dividing by it, as verl does."""


def total(rollout: Rollout, weights: Mapping[str, float]) -> float | None:
    """The configured weighted sum of a rollout's rewards, or None where a configured name was never given.

    A name given only for turns or agents is not missing: it reaches those turns and adds nothing to the total.

    >>> from strop.types import Task
    >>> r = Rollout(id="g1.0", group="g1", member=0, task=Task(id="t"), created=0.0, rewards=(
    ...     Reward(value=1.0), Reward(name="format", value=0.5), Reward(name="latency", value=9.0)))
    >>> total(r, {"reward": 1.0, "format": 0.1}), total(r, {"exact": 1.0})
    (1.05, None)
    """
    given = {reward.name for reward in rollout.rewards}
    if not given.issuperset(weights):
        return None
    own = [reward for reward in _last(rollout) if reward.name in weights and not (reward.turn or reward.agent)]
    return math.fsum(weights[reward.name] * reward.value for reward in own)


def totals(batch: Batch, weights: Mapping[str, float]) -> Floats:
    """A total per sample; NaN where it is not in the baseline. Drops what has no reward as `no_reward`."""
    result = np.full(len(batch.samples), np.nan)
    for s, sample in enumerate(batch.samples):
        if not batch.counted[s]:
            continue
        value = 0.0 if batch.zeroed[s] else total(sample.rollout, weights)
        if value is None:
            batch.counted[s] = False
            batch.drop(s, "no_reward")
        else:
            result[s] = value
    return result


def targeted(batch: Batch, weights: Mapping[str, float]) -> Floats:
    """For each turn of the batch, what its own rewards and its agent's add: reward minus the group's mean of the like.

    Alike are rewards of the same name, given to turns (or to the whole part) of the same agent in the same group. The
    mean is over rollouts, each counted once with the mean of its own, so that many turns do not outweigh few. The
    difference is not divided by a standard deviation: a turn's reward keeps the scale it was given in.
    """
    by_turn: dict[str, list[float]] = defaultdict(list)
    by_agent: dict[tuple[int, str], list[float]] = defaultdict(list)
    found: dict[tuple[int, str, str, bool], list[tuple[int, Reward]]] = defaultdict(list)
    for s, sample in enumerate(batch.samples):
        agents = {turn.id: turn.agent for turn in sample.turns}
        for reward in _last(sample.rollout):
            agent = reward.agent if reward.turn is None else agents.get(reward.turn)
            if batch.counted[s] and agent is not None and reward.name in weights:
                found[int(batch.group[s]), reward.name, agent, reward.turn is None].append((s, reward))
    for rewards in found.values():
        each: dict[int, list[float]] = defaultdict(list)
        for s, reward in rewards:
            each[s].append(reward.value)
        mean = _mean([_mean(values) for values in each.values()])
        for s, reward in rewards:
            difference = weights[reward.name] * (reward.value - mean)
            if reward.turn is not None:
                by_turn[reward.turn].append(difference)
            elif reward.agent is not None:
                by_agent[s, reward.agent].append(difference)
    owner = batch.entries.rollout[batch.starts[:-1]]
    return np.array(
        [math.fsum(by_turn[t.id] + by_agent[int(owner[k]), t.agent]) for k, t in enumerate(batch.turns)],
        np.float64,
    )


def unused(batch: Batch, weights: Mapping[str, float]) -> dict[str, float]:
    """Rewards that were given but reach nobody, counted: by name, or because no such turn or agent is there."""
    counts: dict[str, float] = defaultdict(float)
    for sample in batch.samples:
        turns, agents = {turn.id for turn in sample.turns}, {turn.agent for turn in sample.turns}
        for reward in _last(sample.rollout):
            if reward.name not in weights:
                counts[f"filter_rewards/{reward.name}"] += 1.0
            elif reward.turn is not None and reward.turn not in turns:
                counts["filter_rewards/unknown_turn"] += 1.0
            elif reward.agent is not None and reward.agent not in agents:
                counts["filter_rewards/unknown_agent"] += 1.0
    return dict(sorted(counts.items()))


def spread(name: str, values: Floats) -> dict[str, float]:
    """The three numbers people look at.

    >>> spread("critic/rewards", np.array([0.0, 1.0]))
    {'critic/rewards/mean': 0.5, 'critic/rewards/max': 1.0, 'critic/rewards/min': 0.0}
    """
    if not len(values):
        return {}
    return {
        f"{name}/mean": float(values.mean()),
        f"{name}/max": float(values.max()),
        f"{name}/min": float(values.min()),
    }


def _mean(values: list[float]) -> float:
    """Exact, so that the order in which events arrived cannot show."""
    return math.fsum(values) / len(values)


def _last(rollout: Rollout) -> list[Reward]:
    """The rewards that count: the last one of each name and target."""
    return list({reward.target: reward for reward in rollout.rewards}.values())
