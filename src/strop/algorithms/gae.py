"""Generalised advantage estimation over sampled tokens (Schulman et al. 2015, https://arxiv.org/abs/1506.02438).

Time runs along one agent of one rollout (`timeline.py`): from token to token within a turn, and from a turn's last
token to the first one of the next turn, whatever its branch. What the environment wrote in between takes no time. Turns
that share a moment, since they overlap or are choices of one request, all go on to what starts next after they all
ended. Choices count by their mean. Of several requests in one moment time runs along the one that started first; the
others add what is their own, which is what they come to without what follows them all, so that nothing given to one is
lost to the turns before, and what follows counts once:

    value of a moment      v(first) + sum over the others of v - discount^length x value of the next moment
    advantage of a moment  the same of advantages, with (discount x lam)^length

At the end of the line nothing follows but the outcome, which no critic is asked about: there the outcome itself is what
the others leave out.

    tokens    a b c   (environment)   d e
    value     . . .                   . .       read where a token's logits are
    reward    0 0 r1                  0 r2+R    a turn's own on its last token, the rollout's on the last of all
"""

from __future__ import annotations

from itertools import accumulate

import numpy as np

from strop.algorithms.rewards import Rewards
from strop.algorithms.timeline import build_timelines
from strop.trajectory import Batch
from strop.trajectory.batch import Bools, Floats
from strop.types import Turn


def place_rewards(batch: Batch, rewards: Rewards) -> Floats:
    """The reward that lands on each entry, trainable or not: nothing is lost because a token carries no loss.

    A turn's own reward lands on its last token. What the rollout and the agent got lands on the last token of the
    agent's last turn: on each one of them, where several share the last moment and so none of them leads to another.
    """
    result = rewards.tokens / batch.shares()
    last = batch.starts[1:] - 1
    result[last] += rewards.turns
    where = {turn.id: t for t, turn in enumerate(batch.turns)}
    ends = rewards.at_the_end(batch)
    for timeline in build_timelines(batch):
        for turn in timeline.moments[-1]:
            if turn.id in where:
                outcome = ends[timeline.sample] + rewards.agents[timeline.sample, timeline.agent]
                result[last[where[turn.id]]] += outcome
    return result


def find_timed(batch: Batch) -> Bools:
    """The entries that time runs through."""
    told = {turn.id for timeline in build_timelines(batch) for moment in timeline.moments for turn in moment}
    return np.array([turn.id in told for turn in batch.turns], bool)[batch.entries.turn]


def estimate_advantages(batch: Batch, rewards: Rewards, value: Floats, discount: float, lam: float) -> Floats:
    """One advantage per entry, 0 outside time. Advantage plus value is the return that a critic learns."""
    reward, ends = place_rewards(batch, rewards), rewards.at_the_end(batch)
    advantage = np.zeros(len(batch.entries))
    where = {turn.id: t for t, turn in enumerate(batch.turns)}
    decay = discount * lam
    for timeline in build_timelines(batch):
        if timeline.moments[0][0].id not in where:  # no entries: the rollout is over budget
            continue
        outcome = float(ends[timeline.sample] + rewards.agents[timeline.sample, timeline.agent])
        value_next = advantage_next = 0.0
        for moment in reversed(timeline.moments):
            for turn in moment:
                rows = batch.rows(where[turn.id])
                following = np.append(value[rows[1:]], value_next)
                surprise = reward[rows] + discount * following - value[rows]
                back = accumulate(
                    surprise[::-1].tolist(), lambda later, now: now + decay * later, initial=advantage_next
                )
                advantage[rows] = list(back)[:0:-1]
            values = advantages_here = 0.0
            for k, request in enumerate(_requests(moment)):
                firsts = [int(batch.starts[where[turn.id]]) for turn in request]
                lengths = np.array([len(turn.response_ids) for turn in request])
                values += float(value[firsts].mean())
                advantages_here += float(advantage[firsts].mean())
                if k and moment is timeline.moments[-1]:
                    values -= outcome * float((discount ** (lengths - 1.0)).mean())
                elif k:
                    values -= value_next * float((discount**lengths).mean())
                    advantages_here -= advantage_next * float((decay**lengths).mean())
            value_next, advantage_next = values, advantages_here
    return advantage


def _requests(moment: list[Turn]) -> list[list[Turn]]:
    """The turns of a moment by request. Choices are numbered one after the other, with one start."""
    found: dict[tuple[float, int], list[Turn]] = {}
    for turn in moment:
        found.setdefault((turn.started, int(turn.id.rpartition("/")[2]) - turn.choice), []).append(turn)
    return list(found.values())
