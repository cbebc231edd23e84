"""What rollouts, agents and turns got, weighted: the rewards that every algorithm begins with.

Everything here happens before anything is dropped and counts each rollout once, however many turns it has.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from strop.algorithms.timeline import build_timelines
from strop.trajectory import Batch
from strop.trajectory.assemble import find_cause
from strop.trajectory.batch import Bools, Floats, Ints
from strop.types import Reward, Rollout


@dataclass
class Rewards:
    """What was given, weighted. `totals` is NaN where a sample is not in the baseline.

    Of a rollout with total 1, whose second turn of three got 0.5 of its own, alone in a batch with one trained agent:

        totals [samples]          1.0
        agents [samples, agents]  0.0
        turns  [turns]            0.0  0.5  0.0
        own    by turn id         {"g1.0/1/1": 0.5}, also for turns that no entry belongs to
        given  by sample, name    {}: what `agents` is made of, also of agents that are not trained here

    `tokens` [entries] is for penalties on single tokens; it begins at 0. The choices of one n > 1 request hold 1/n of
    theirs, so that what a rollout got for its tokens is their sum. A rollout that failed has the total it counts as
    (`Batch.stand_in`), and nothing for its turns and agents, whatever they got before.
    """

    totals: Floats
    turns: Floats
    agents: Floats
    tokens: Floats
    own: dict[str, float]
    given: dict[tuple[int, str], float]

    @classmethod
    def of(cls, batch: Batch, weights: Mapping[str, float], *, required: bool = True) -> Rewards:
        """Where they are `required`, what has no reward is dropped as `no_reward`; otherwise its total is NaN."""
        by_turn: dict[str, list[float]] = defaultdict(list)
        by_agent: dict[tuple[int, str], list[float]] = defaultdict(list)
        for s, sample in enumerate(batch.samples):
            turns = {turn.id for turn in sample.turns}
            for reward in select_last_rewards(sample.rollout) if batch.stand_in[s] is None else ():
                value = weights.get(reward.name, 0.0) * reward.value
                if reward.turn in turns:
                    by_turn[str(reward.turn)].append(value)
                elif reward.agent is not None:
                    by_agent[s, reward.agent].append(value)
        given = {place: math.fsum(values) for place, values in by_agent.items()}
        own = {turn: math.fsum(values) for turn, values in by_turn.items()}
        return cls(
            totals=total_rewards(batch, weights, required=required),
            turns=np.array([own.get(turn.id, 0.0) for turn in batch.turns], np.float64),
            agents=tabulate(given, len(batch.samples), batch.agents),
            tokens=np.zeros(len(batch.entries)),
            own=own,
            given=given,
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
        return cap_failed(self.totals, could_be, batch.group, find_failed(batch))

    def by_turn(self, batch: Batch) -> dict[str, float]:
        """What each turn got: of its own, and for its tokens."""
        sums = np.bincount(batch.entries.turn, self.tokens / batch.shares(), minlength=len(batch.turns))
        return self.own | {turn.id: float(self.turns[t] + sums[t]) for t, turn in enumerate(batch.turns)}


def tabulate(given: Mapping[tuple[int, str], float], num_samples: int, agents: Sequence[str]) -> Floats:
    """What agents got as [samples, agents], 0 where nothing was given.

    >>> tabulate({(0, "a"): 1.0, (1, "c"): 2.0}, 2, ["a", "b"]).tolist()
    [[1.0, 0.0], [0.0, 0.0]]
    """
    got = [given.get((s, agent), 0.0) for s in range(num_samples) for agent in agents]
    return np.array(got, np.float64).reshape(num_samples, len(agents))


def total_reward(rollout: Rollout, weights: Mapping[str, float]) -> float | None:
    """The configured weighted sum of a rollout's rewards, or None where none of the configured names was given.

    A name that is missing beside one that was given counts as 0. One given only for turns or agents is not missing: it
    reaches those turns and adds nothing to the total.

    >>> from strop.types import Task
    >>> r = Rollout(id="g1.0", group="g1", member=0, task=Task(id="t"), created=0.0, rewards=(
    ...     Reward(value=1.0), Reward(name="format", value=0.5), Reward(name="latency", value=9.0)))
    >>> total_reward(r, {"reward": 1.0, "format": 0.1}), total_reward(r, {"reward": 1.0, "exact": 1.0})
    (1.05, 1.0)
    >>> total_reward(r, {"exact": 1.0}) is None
    True
    """
    if not any(reward.name in weights for reward in rollout.rewards):
        return None
    own = [
        reward
        for reward in select_last_rewards(rollout)
        if reward.name in weights and not (reward.turn or reward.agent)
    ]
    return math.fsum(weights[reward.name] * reward.value for reward in own)


def total_rewards(batch: Batch, weights: Mapping[str, float], *, required: bool = True) -> Floats:
    """A total per sample; NaN where it is not in the baseline. Drops what has no reward as `no_reward`, and what would
    count as its group's lowest total where nobody in it has one, unless rewards are not `required`."""
    result = np.full(len(batch.samples), np.nan)

    def leave_out(s: int, reason: str) -> None:
        if required:
            batch.counted[s] = False
            batch.drop(s, reason)

    for s in map(int, np.flatnonzero(batch.counted)):
        stand_in = batch.stand_in[s]
        value = total_reward(batch.samples[s].rollout, weights) if stand_in is None else stand_in
        if value is None:
            leave_out(s, "no_reward")
        elif not isinstance(value, str):
            result[s] = value
    known = batch.counted & ~find_failed(batch)
    for s in map(int, np.flatnonzero(find_failed(batch))):
        others = result[known & (batch.group == batch.group[s]) & ~np.isnan(result)]
        if batch.stand_in[s] == "zero":
            result[s] = min([0.0, *others])
        elif len(others):
            result[s] = others.min()
        else:
            leave_out(s, f"failed:{find_cause(batch.samples[s].rollout)}")
    return result


def find_failed(batch: Batch) -> Bools:
    """The samples that failed and yet count, but never for more than the others of their group: as 0 or the lowest."""
    return batch.counted & np.array([isinstance(one, str) for one in batch.stand_in], bool)


def cap_failed(value: Floats, others: Floats, key: Ints, low: Bools) -> Floats:
    """`value` with those that are `low` cut down to the least among `others` that are not, of the same key.

    >>> value, low = np.array([0.0, -1.0, 2.0]), np.array([True, False, False])
    >>> cap_failed(value, value, np.array([7, 7, 8]), low).tolist()
    [-1.0, -1.0, 2.0]
    """
    result = value.copy()
    for k in np.unique(key[low]):
        like = others[(key == k) & ~low]
        if len(like):
            result[(key == k) & low] = np.minimum(value[(key == k) & low], like.min())
    return result


def count_unused(batch: Batch, weights: Mapping[str, float]) -> dict[str, float]:
    """Rewards that were given but reach nobody, counted: by name, because no such turn or agent is there, or because
    it has no entries (`no_entries`: it is not trained, said nothing, or what it said was never delivered)."""
    counts: dict[str, float] = defaultdict(float)
    told = {turn.id for timeline in build_timelines(batch) for moment in timeline.moments for turn in moment}
    spoke = {(timeline.sample, batch.agents[timeline.agent]) for timeline in build_timelines(batch)}
    for s, sample in enumerate(batch.samples):
        turns, agents = {turn.id for turn in sample.turns}, {turn.agent for turn in sample.turns}
        for reward in select_last_rewards(sample.rollout):
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


def select_last_rewards(rollout: Rollout) -> list[Reward]:
    """The rewards that count: the last one of each name and target."""
    return list({reward.target: reward for reward in rollout.rewards}.values())
