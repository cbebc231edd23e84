"""Credit assignment: which rewards are compared with which, and how a comparison becomes an advantage.

Everything here happens before anything is dropped and counts each rollout once, however many turns it has.

    compute_rewards_to_go   reward-to-go: what a turn and those after it got
    collect_scores          the numbers that are compared, and the key that comparable ones share
    include_everyone        the agents of other policies, and untrained ones, where all are compared together
    compare                 a number minus the mean of the comparable ones: the baseline
    compare_targeted        the same for rewards of single turns and agents
    whiten                  scaling to mean 0 and variance 1
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from strop.algorithms.rewards import Rewards, cap_failed, find_failed, select_last_rewards, tabulate
from strop.algorithms.timeline import build_timelines
from strop.trajectory import Batch
from strop.trajectory.batch import Floats, Ints
from strop.types import Reward

EPSILON = 1e-6
"""Added to a standard deviation before dividing by it, as verl does."""

Baseline = Literal["group", "agent", "role", "joint"]
"""Who is compared in a group: its rollouts; or, each with what it got, the same agent, agents of the same role, or all
agents together, those of other policies too."""

Credit = Literal["outcome", "to_go"]
"""What is compared: what a rollout came to, or for each turn what it and those after it got."""


def compute_rewards_to_go(batch: Batch, rewards: Rewards, discount: float, terminal_share: float) -> dict[str, float]:
    """By turn id: what the turn got of its own, what those at later moments of its timeline got, and the outcome.

    One moment later counts `discount` times as much; choices count 1/n for the turns before them. At the last moment
    each turn also gets `terminal_share` times the rollout's total and what its agent got.
    """
    own = rewards.by_turn(batch)
    returns: dict[str, float] = {}
    for timeline in build_timelines(batch):
        later = terminal_share * rewards.totals[timeline.sample] + rewards.agents[timeline.sample, timeline.agent]
        for k, moment in enumerate(reversed(timeline.moments)):
            later *= discount if k else 1.0
            for turn in moment:
                returns[turn.id] = float(own.get(turn.id, 0.0) + later)
            later += math.fsum(own.get(turn.id, 0.0) / turn.choices for turn in moment)
    return returns


# -- comparison --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Scores:
    """Numbers to compare: those with the same `key` are comparable. `share` weighs the scores of one sample against
    each other, and `turn[t]` is the score that turn t of the batch has, or -1."""

    value: Floats
    sample: Ints
    key: Ints
    share: Floats
    turn: Ints


def collect_scores(
    batch: Batch, rewards: Rewards, credit: Credit, baseline: Baseline, discount: float, terminal_share: float
) -> Scores:
    """What is compared. A sample that is in the baseline counts even if it has no entries. One that failed is nowhere
    above the others."""
    everyone, rewards = include_everyone(batch, rewards) if baseline == "joint" else (batch, rewards)
    rows: list[tuple[float, int, Hashable, float]] = []
    index: dict[Hashable, int] = {}

    def add(name: Hashable, value: float, s: int, agent: str, share: float = 1.0) -> None:
        like = {"agent": agent, "role": parse_role(agent)}.get(baseline, "")
        index[name] = len(rows)
        rows.append((value, s, (int(batch.group[s]), like), share))

    outcomes = rewards.outcomes(batch)
    returns = compute_rewards_to_go(everyone, rewards, discount, terminal_share) if credit == "to_go" else {}
    for s in map(int, np.flatnonzero(batch.counted)):
        sample = batch.samples[s]
        spoke = {turn.agent for turn in sample.turns if turn.response_ids}
        timed = [turn for turn in sample.turns if turn.id in returns]
        for turn in timed:
            add(turn.id, returns[turn.id], s, turn.agent, 1.0 / turn.choices)
        if credit == "outcome" and baseline != "group":
            for a, agent in enumerate(everyone.agents):
                if agent in spoke:
                    add((s, agent), float(outcomes[s] + rewards.agents[s, a]), s, agent)
        elif credit == "outcome":
            add(s, float(outcomes[s]), s, "")
        elif baseline == "group" and not timed:
            add(s, float(terminal_share * rewards.totals[s]), s, "")
    owner = batch.owners()
    names: list[Hashable] = [turn.id for turn in batch.turns]
    if credit == "outcome":
        names = [int(s) if baseline == "group" else (int(s), t.agent) for s, t in zip(owner, batch.turns, strict=True)]
    value, key = np.array([row[0] for row in rows], np.float64), number_keys([row[2] for row in rows])
    sample = np.array([row[1] for row in rows], np.int64)
    return Scores(
        value=cap_failed(value, value, key, find_failed(batch)[sample]),
        sample=sample,
        key=key,
        share=np.array([row[3] for row in rows], np.float64),
        turn=np.array([index.get(name, -1) for name in names], np.int64),
    )


def include_everyone(batch: Batch, rewards: Rewards) -> tuple[Batch, Rewards]:
    """The same with every agent that spoke, whichever policy it is of, trained or not. What outside models say has no
    tokens: as in every other baseline their agents are not compared."""
    spoke = {turn.agent for sample in batch.samples for turn in sample.turns if turn.response_ids}
    names = sorted({*batch.agents, *spoke})
    return replace(batch, agents=names), replace(rewards, agents=tabulate(rewards.given, len(batch.samples), names))


def compare(
    scores: Scores, *, std: bool, leave_one_out: bool = False, bare: bool = False
) -> tuple[Floats, list[str | None]]:
    """Each score minus the mean of the comparable ones, divided by their standard deviation (ddof 1) if asked for; and
    for each the reason it teaches nothing, or None.

    A rollout counts once: of several comparable scores each has its share of that. `leave_one_out` leaves a rollout's
    own out of the mean it is compared with. Where all are equal the result is 0, as it is where all are of one rollout,
    unless such scores are to stay `bare`: compared with 0, as verl has it.
    """
    advantage = np.zeros(len(scores.value))
    reasons: list[str | None] = [None] * len(scores.value)
    order = np.argsort(scores.key, kind="stable")
    for like in np.split(order, np.flatnonzero(np.diff(scores.key[order])) + 1):
        if not len(like):
            continue
        value, share = scores.value[like], scores.share[like]
        owner = np.unique(scores.sample[like], return_inverse=True)[1]
        rollouts = int(owner.max()) + 1
        if rollouts < 2 or value.min() == value.max():
            for k in like:
                reasons[k] = "group_of_one" if rollouts < 2 else "zero_variance"
            if bare and rollouts < 2:
                advantage[like] = value / (1.0 + EPSILON if std else 1.0)
            continue
        weight = share / np.bincount(owner, share)[owner]
        mean = (weight * value).sum() / rollouts
        scale = np.sqrt((weight * np.square(value - mean)).sum() / (rollouts - 1)) + EPSILON if std else 1.0
        if leave_one_out:
            mean = ((rollouts * mean - np.bincount(owner, weight * value)) / (rollouts - 1))[owner]
        advantage[like] = (value - mean) / scale
    return advantage, reasons


def compare_targeted(batch: Batch, weights: Mapping[str, float], *, agents: bool = True) -> Floats:
    """For each turn of the batch, what its own rewards and its agent's add: reward minus the group's mean of the
    comparable ones.

    Comparable are rewards of the same name, given to turns (or to the whole part) of the same agent in one group. The
    mean is over rollouts, each counted once with the mean of its own, so that many turns do not outweigh few; one that
    got no such reward counts as 0: for an agent's that is as if 0 had been given, for a turn's none of its turns is
    named and so none gets anything. The difference is not divided by a standard deviation: a turn's reward keeps the
    scale it was given in. Of a rollout that failed, all turns get what the lowest of the others got, or 0 where it is
    to count as that and the lowest is above. Without `agents` only rewards of turns are looked at.
    """
    by_turn: dict[str, list[float]] = defaultdict(list)
    by_agent: dict[tuple[int, str], list[float]] = defaultdict(list)
    found: dict[tuple[int, str, str, bool], dict[int, list[Reward]]] = defaultdict(lambda: defaultdict(list))
    members: dict[int, list[int]] = defaultdict(list)
    for s in map(int, np.flatnonzero(batch.counted)):
        members[int(batch.group[s])].append(s)
        speaker = {turn.id: turn.agent for turn in batch.samples[s].turns}
        for reward in select_last_rewards(batch.samples[s].rollout) if batch.stand_in[s] is None else ():
            agent = (reward.agent if agents else None) if reward.turn is None else speaker.get(reward.turn)
            if agent is not None and reward.name in weights:
                found[int(batch.group[s]), reward.name, agent, reward.turn is None][s].append(reward)
    for (group, name, agent, whole), given in found.items():
        means = {s: _mean([weights[name] * r.value for r in given.get(s, ())]) for s in members[group]}
        lowest = min(means[s] for s in members[group] if batch.stand_in[s] is None)
        for s in (s for s in members[group] if batch.stand_in[s] is not None):
            means[s] = lowest if batch.stand_in[s] == "lowest" else min(0.0, lowest)
        # Of equal ones the mean is that one, which sums and quotients miss by a rounding.
        mean = lowest if len(set(means.values())) == 1 else _mean(list(means.values()))
        for s in members[group]:
            if whole or batch.stand_in[s] is not None:
                by_agent[s, agent].append(means[s] - mean)
                continue
            for reward in given.get(s, ()):
                by_turn[str(reward.turn)].append(weights[name] * reward.value - mean)
    owner = batch.owners()
    return np.array(
        [math.fsum(by_turn[t.id] + by_agent[int(owner[k]), t.agent]) for k, t in enumerate(batch.turns)],
        np.float64,
    )


def whiten(values: Floats, weight: Floats) -> Floats:
    """Values shifted and scaled to mean 0 and variance 1 (ddof 1), each counted `weight` times, as verl does.

    >>> whiten(np.array([1.0, 3.0]), np.ones(2)).round(6).tolist()
    [-0.707107, 0.707107]
    """
    count = weight.sum()
    mean = (weight * values).sum() / count
    variance = (weight * np.square(values - mean)).sum() / (count - 1.0)
    return (values - mean) / np.sqrt(variance + 1e-8)


# -- keys --------------------------------------------------------------------------------------------------------------


def parse_role(agent: str) -> str:
    """What agents with the same part in a game share: the name without `-` or `_` and a number at its end.

    >>> parse_role("wolf-1"), parse_role("wolf_12"), parse_role("wolf"), parse_role("gpt-4-judge")
    ('wolf', 'wolf', 'wolf', 'gpt-4-judge')
    """
    return re.sub(r"[-_][0-9]+$", "", agent)


def number_keys(keys: Sequence[Hashable]) -> Ints:
    """Equal keys get equal numbers, in the order in which they first come.

    >>> number_keys(["b", "a", "b"]).tolist()
    [0, 1, 0]
    """
    numbers: dict[Hashable, int] = {}
    return np.array([numbers.setdefault(key, len(numbers)) for key in keys], np.int64)


def _mean(values: list[float]) -> float:
    """Exact, so that the order in which events arrived cannot show; 0 of none."""
    return math.fsum(values) / max(len(values), 1)
