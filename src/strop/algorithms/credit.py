"""Rewards of rollouts, agents and turns as numbers to compare, the same for every algorithm.

Everything here happens before anything is dropped and counts each rollout once, however many turns it has.

    Rewards.of    what was given: to rollouts, agents, turns
    to_go         what a turn and those after it got
    scores        the numbers that are compared, and which of them are alike
    compare       a number minus the mean of the like
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from strop.algorithms.lines import lines
from strop.trajectory import Batch
from strop.trajectory.assemble import cause_of
from strop.trajectory.batch import Bools, Floats, Ints
from strop.types import Reward, Rollout

EPSILON = 1e-6
"""Added to a standard deviation before dividing by it, as verl does."""

Baseline = Literal["group", "agent", "role"]
"""Who is compared: all of the group; or in it the same agent, or agents of the same role, each with what it got."""

Credit = Literal["outcome", "to_go"]
"""What is compared: what a rollout came to, or for each turn what it and those after it got."""


# -- what was given ----------------------------------------------------------------------------------------------------


@dataclass
class Rewards:
    """What was given, weighted. `totals` is NaN where a sample is not in the baseline.

    Of a rollout with total 1, whose second turn of three got 0.5 of its own, alone in a batch with one trained agent:

        totals [samples]          1.0
        agents [samples, agents]  0.0
        turns  [turns]            0.0  0.5  0.0
        own    by turn id         {"g1.0/1/1": 0.5}, also for turns that no entry belongs to

    `tokens` [entries] is for penalties on single tokens; it begins at 0. The choices of one n > 1 request hold 1/n of
    theirs, so that what a rollout got for its tokens is their sum. A rollout that failed has the total it counts as
    (`Batch.stand_in`), and nothing for its turns and agents, whatever they got before.
    """

    totals: Floats
    turns: Floats
    agents: Floats
    tokens: Floats
    own: dict[str, float]

    @classmethod
    def of(cls, batch: Batch, weights: Mapping[str, float]) -> Rewards:
        """Drops what has no reward as `no_reward`."""
        by_turn: dict[str, list[float]] = defaultdict(list)
        by_agent: dict[tuple[int, int], list[float]] = defaultdict(list)
        for s, sample in enumerate(batch.samples):
            turns = {turn.id for turn in sample.turns}
            for reward in _last(sample.rollout) if batch.stand_in[s] is None else ():
                value = weights.get(reward.name, 0.0) * reward.value
                if reward.turn in turns:
                    by_turn[str(reward.turn)].append(value)
                elif reward.agent in batch.agents:
                    by_agent[s, batch.agents.index(str(reward.agent))].append(value)
        agents = np.zeros((len(batch.samples), len(batch.agents)))
        for place, values in by_agent.items():
            agents[place] = math.fsum(values)
        own = {turn: math.fsum(values) for turn, values in by_turn.items()}
        return cls(
            totals=totals(batch, weights),
            turns=np.array([own.get(turn.id, 0.0) for turn in batch.turns], np.float64),
            agents=agents,
            tokens=np.zeros(len(batch.entries)),
            own=own,
        )

    def outcomes(self, batch: Batch) -> Floats:
        """What each sample got as a whole: its total and what its tokens got."""
        return self.totals + np.bincount(batch.entries.rollout, self.tokens, minlength=len(batch.samples))

    def at_the_end(self, batch: Batch) -> Floats:
        """What lands at the end of each sample's time. One that failed gets no more than any other of its group could
        have come to, of whose turns and agents some may have lost what the total does not show."""
        losses = np.minimum(self.agents, 0.0).sum(axis=1)
        for s, sample in enumerate(batch.samples):
            losses[s] += math.fsum(min(self.own.get(t.id, 0.0), 0.0) / t.choices for t in sample.turns)
        could_be = np.where(batch.counted, self.totals + losses, np.inf)
        return never_above(self.totals, could_be, batch.group, failed(batch))

    def by_turn(self, batch: Batch) -> dict[str, float]:
        """What each turn got: of its own, and for its tokens."""
        sums = np.bincount(batch.entries.turn, self.tokens / shares(batch), minlength=len(batch.turns))
        return self.own | {turn.id: float(self.turns[t] + sums[t]) for t, turn in enumerate(batch.turns)}


def total(rollout: Rollout, weights: Mapping[str, float]) -> float | None:
    """The configured weighted sum of a rollout's rewards, or None where none of the configured names was given.

    A name that is missing beside one that was given counts as 0. One given only for turns or agents is not missing: it
    reaches those turns and adds nothing to the total.

    >>> from strop.types import Task
    >>> r = Rollout(id="g1.0", group="g1", member=0, task=Task(id="t"), created=0.0, rewards=(
    ...     Reward(value=1.0), Reward(name="format", value=0.5), Reward(name="latency", value=9.0)))
    >>> total(r, {"reward": 1.0, "format": 0.1}), total(r, {"reward": 1.0, "exact": 1.0}), total(r, {"exact": 1.0})
    (1.05, 1.0, None)
    """
    if not any(reward.name in weights for reward in rollout.rewards):
        return None
    own = [reward for reward in _last(rollout) if reward.name in weights and not (reward.turn or reward.agent)]
    return math.fsum(weights[reward.name] * reward.value for reward in own)


def totals(batch: Batch, weights: Mapping[str, float]) -> Floats:
    """A total per sample; NaN where it is not in the baseline. Drops what has no reward as `no_reward`, and what would
    count as its group's lowest total where nobody in it has one."""
    result = np.full(len(batch.samples), np.nan)

    def leave_out(s: int, reason: str) -> None:
        batch.counted[s] = False
        batch.drop(s, reason)

    for s in map(int, np.flatnonzero(batch.counted)):
        stand_in = batch.stand_in[s]
        value = total(batch.samples[s].rollout, weights) if stand_in is None else stand_in
        if value is None:
            leave_out(s, "no_reward")
        elif not isinstance(value, str):
            result[s] = value
    known = batch.counted & ~failed(batch)
    for s in map(int, np.flatnonzero(failed(batch))):
        others = result[known & (batch.group == batch.group[s])]
        if batch.stand_in[s] == "zero":
            result[s] = min([0.0, *others])
        elif len(others):
            result[s] = others.min()
        else:
            leave_out(s, f"failed:{cause_of(batch.samples[s].rollout)}")
    return result


def failed(batch: Batch) -> Bools:
    """The samples that failed and yet count, but never for more than the others of their group: as 0 or the lowest."""
    return batch.counted & np.array([isinstance(one, str) for one in batch.stand_in], bool)


def never_above(value: Floats, others: Floats, key: Ints, low: Bools) -> Floats:
    """`value` with those that are `low` cut down to the least among `others` that are not, of the same key.

    >>> value, low = np.array([0.0, -1.0, 2.0]), np.array([True, False, False])
    >>> never_above(value, value, np.array([7, 7, 8]), low).tolist()
    [-1.0, -1.0, 2.0]
    """
    result = value.copy()
    for k in np.unique(key[low]):
        like = others[(key == k) & ~low]
        if len(like):
            result[(key == k) & low] = np.minimum(value[(key == k) & low], like.min())
    return result


def unused(batch: Batch, weights: Mapping[str, float]) -> dict[str, float]:
    """Rewards that were given but reach nobody, counted: by name, because no such turn or agent is there, or because
    it has no entries (`no_entries`: it is not trained, said nothing, or what it said was never delivered)."""
    counts: dict[str, float] = defaultdict(float)
    told = {turn.id for line in lines(batch) for place in line.places for turn in place}
    spoke = {(line.sample, batch.agents[line.agent]) for line in lines(batch)}
    for s, sample in enumerate(batch.samples):
        turns, agents = {turn.id for turn in sample.turns}, {turn.agent for turn in sample.turns}
        for reward in _last(sample.rollout):
            if reward.name not in weights:
                counts[f"filter_rewards/{reward.name}"] += 1.0
            elif reward.turn is not None and reward.turn not in turns:
                counts["filter_rewards/unknown_turn"] += 1.0
            elif reward.agent is not None and reward.agent not in agents:
                counts["filter_rewards/unknown_agent"] += 1.0
            elif sample.rollout.id in batch.dropped:
                continue
            elif (reward.turn and reward.turn not in told) or (reward.agent and (s, reward.agent) not in spoke):
                counts["filter_rewards/no_entries"] += 1.0
    return dict(sorted(counts.items()))


def to_go(batch: Batch, rewards: Rewards, discount: float, terminal_share: float) -> dict[str, float]:
    """By turn id: what the turn got of its own, what those at later places of its line got, and the outcome.

    One place later counts `discount` times as much; choices count 1/n for the turns before them. At the last place each
    turn also gets `terminal_share` times the rollout's total and what its agent got.
    """
    own = rewards.by_turn(batch)
    returns: dict[str, float] = {}
    for line in lines(batch):
        later = terminal_share * rewards.totals[line.sample] + rewards.agents[line.sample, line.agent]
        for k, place in enumerate(reversed(line.places)):
            later *= discount if k else 1.0
            for turn in place:
                returns[turn.id] = float(own.get(turn.id, 0.0) + later)
            later += math.fsum(own.get(turn.id, 0.0) / turn.choices for turn in place)
    return returns


# -- compared with the like --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Scores:
    """Numbers to compare: those with the same `key` are alike. `share` weighs the scores of one sample against each
    other, and `turn[t]` is the score that turn t of the batch has, or -1."""

    value: Floats
    sample: Ints
    key: Ints
    share: Floats
    turn: Ints


def scores(
    batch: Batch, rewards: Rewards, credit: Credit, baseline: Baseline, discount: float, terminal_share: float
) -> Scores:
    """What is compared. A sample that is in the baseline counts even if it has no entries. One that failed is nowhere
    above the others."""
    rows: list[tuple[float, int, Hashable, float]] = []
    index: dict[Hashable, int] = {}

    def add(name: Hashable, value: float, s: int, agent: str, share: float = 1.0) -> None:
        like = {"group": "", "agent": agent, "role": role(agent)}[baseline]
        index[name] = len(rows)
        rows.append((value, s, (int(batch.group[s]), like), share))

    outcomes = rewards.outcomes(batch)
    returns = to_go(batch, rewards, discount, terminal_share) if credit == "to_go" else {}
    for s in map(int, np.flatnonzero(batch.counted)):
        sample = batch.samples[s]
        spoke = {turn.agent for turn in sample.turns if turn.response_ids}
        timed = [turn for turn in sample.turns if turn.id in returns]
        for turn in timed:
            add(turn.id, returns[turn.id], s, turn.agent, 1.0 / turn.choices)
        if credit == "outcome" and baseline != "group":
            for a, agent in enumerate(batch.agents):
                if agent in spoke:
                    add((s, agent), float(outcomes[s] + rewards.agents[s, a]), s, agent)
        elif credit == "outcome":
            add(s, float(outcomes[s]), s, "")
        elif baseline == "group" and not timed:
            add(s, float(terminal_share * rewards.totals[s]), s, "")
    owner = owners(batch)
    names: list[Hashable] = [turn.id for turn in batch.turns]
    if credit == "outcome":
        names = [int(s) if baseline == "group" else (int(s), t.agent) for s, t in zip(owner, batch.turns, strict=True)]
    value, key = np.array([row[0] for row in rows], np.float64), numbered([row[2] for row in rows])
    sample = np.array([row[1] for row in rows], np.int64)
    return Scores(
        value=never_above(value, value, key, failed(batch)[sample]),
        sample=sample,
        key=key,
        share=np.array([row[3] for row in rows], np.float64),
        turn=np.array([index.get(name, -1) for name in names], np.int64),
    )


def compare(
    scores: Scores, *, std: bool, leave_one_out: bool = False, bare: bool = False
) -> tuple[Floats, list[str | None]]:
    """Each score minus the mean of the like, divided by their standard deviation (ddof 1) if asked for; and for each
    the reason it teaches nothing, or None.

    A rollout counts once: with several like scores, each has its share of that. `leave_one_out` leaves a rollout's own
    out of the mean it is compared with. Where all are equal the result is 0, as it is where all are of one rollout,
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


def targeted(batch: Batch, weights: Mapping[str, float], *, agents: bool = True) -> Floats:
    """For each turn of the batch, what its own rewards and its agent's add: reward minus the group's mean of the like.

    Alike are rewards of the same name, given to turns (or to the whole part) of the same agent in the same group. The
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
        for reward in _last(batch.samples[s].rollout) if batch.stand_in[s] is None else ():
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
    owner = owners(batch)
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


# -- small things ------------------------------------------------------------------------------------------------------


def role(agent: str) -> str:
    """What agents with the same part in a game share: the name without `-` or `_` and a number at its end.

    >>> role("wolf-1"), role("wolf_12"), role("wolf"), role("gpt-4-judge")
    ('wolf', 'wolf', 'wolf', 'gpt-4-judge')
    """
    return re.sub(r"[-_][0-9]+$", "", agent)


def owners(batch: Batch) -> Ints:
    """The sample that each turn of the batch belongs to."""
    return batch.entries.rollout[batch.starts[:-1]]


def shares(batch: Batch) -> Floats:
    """What each entry counts beside the other choices of its request: 1/n."""
    return (1.0 / np.array([turn.choices for turn in batch.turns], np.float64))[batch.entries.turn]


def numbered(keys: Sequence[Hashable]) -> Ints:
    """Equal keys get equal numbers, in the order in which they first come.

    >>> numbered(["b", "a", "b"]).tolist()
    [0, 1, 0]
    """
    numbers: dict[Hashable, int] = {}
    return np.array([numbers.setdefault(key, len(numbers)) for key in keys], np.int64)


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
    """Exact, so that the order in which events arrived cannot show; 0 of none."""
    return math.fsum(values) / max(len(values), 1)


def _last(rollout: Rollout) -> list[Reward]:
    """The rewards that count: the last one of each name and target."""
    return list({reward.target: reward for reward in rollout.rewards}.values())
