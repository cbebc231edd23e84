"""Generalised advantage estimation over sampled tokens (Schulman et al. 2015, https://arxiv.org/abs/1506.02438).

Time runs along one agent of one rollout (`lines.py`): from token to token within a turn, and from a turn's last
token to the first one of the next turn, whatever its branch. What the environment wrote in between takes no time. Turns
that share a place, since they overlap or are choices of one request, all go on to the turn that starts next after they
all ended; where that has several choices, to the mean of them.

    tokens    a b c   (environment)   d e
    value     . . .                   . .       read where a token's logits are
    reward    0 0 r1                  0 r2+R    a turn's own on its last token, the rollout's on the last of all
"""

from __future__ import annotations

from itertools import accumulate

import numpy as np

from strop.algorithms.credit import Rewards, shares
from strop.algorithms.lines import lines
from strop.trajectory import Batch
from strop.trajectory.entries import Bools, Floats
from strop.types import Turn


def placed(batch: Batch, rewards: Rewards) -> Floats:
    """The reward that lands on each entry, trainable or not: nothing is lost because a token carries no loss.

    A turn's own reward lands on its last token. What the rollout and the agent got lands on the last token of the
    agent's last turn: on each one of them, where several share the last place and so none of them leads to another.
    """
    result = rewards.tokens / shares(batch)
    last = batch.starts[1:] - 1
    result[last] += rewards.turns
    where = {turn.id: t for t, turn in enumerate(batch.turns)}
    ends = rewards.at_the_end(batch)
    for line in lines(batch):
        for turn in line.places[-1]:
            if turn.id in where:
                outcome = ends[line.sample] + rewards.agents[line.sample, line.agent]
                result[last[where[turn.id]]] += outcome
    return result


def in_time(batch: Batch) -> Bools:
    """The entries that time runs through."""
    told = {turn.id for line in lines(batch) for place in line.places for turn in place}
    return np.array([turn.id in told for turn in batch.turns], bool)[batch.entries.turn]


def advantages(batch: Batch, reward: Floats, value: Floats, discount: float, lam: float) -> Floats:
    """One advantage per entry, 0 outside time. Advantage plus value is the return that a critic learns."""
    advantage = np.zeros(len(batch.entries))
    where = {turn.id: t for t, turn in enumerate(batch.turns)}
    decay = discount * lam
    for line in lines(batch):
        value_next = advantage_next = 0.0
        if line.places[0][0].id not in where:  # no entries: the rollout is over budget
            continue
        for place in reversed(line.places):
            for turn in place:
                rows = batch.rows(where[turn.id])
                following = np.append(value[rows[1:]], value_next)
                surprise = reward[rows] + discount * following - value[rows]
                back = accumulate(
                    surprise[::-1].tolist(), lambda later, now: now + decay * later, initial=advantage_next
                )
                advantage[rows] = list(back)[:0:-1]
            firsts = np.array([batch.starts[where[turn.id]] for turn in _first_request(place)])
            value_next, advantage_next = float(value[firsts].mean()), float(advantage[firsts].mean())
    return advantage


def _first_request(place: list[Turn]) -> list[Turn]:
    """The choices of the request that started first. They are numbered one after the other, with one start."""
    begins = [(turn.started, int(turn.id.rpartition("/")[2]) - turn.choice) for turn in place]
    return [turn for turn, begin in zip(place, begins, strict=True) if begin == begins[0]]
