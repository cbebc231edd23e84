"""Batches to update from, and rows: what a learner without a token tree would lay them out as.

A batch is made from its shapes (learner_shapes.py). The ids are random, which changes nothing about the work. Rewards
are made up and, unless a shape has one, all differ, so that every rollout is trained.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np
from learner_shapes import CallShape, Shape

from strop.trajectory import Batch, MicroBatch, Sample, assemble
from strop.trajectory.batch import Ints
from strop.types import Reward, Rollout, Task, Turn

Layout = Callable[[Batch, int, Ints | None], list[MicroBatch]]
Row = tuple[Ints, list[int]]
"""A path, and the turns whose sampled tokens are trained on it."""


def made(shapes: Sequence[Shape], vocabulary: int, budget: int, seed: int = 0) -> Batch:
    rng = np.random.default_rng(seed)
    paths: dict[tuple[int, int], list[int]] = {}
    samples: list[Sample] = []
    for number, shape in enumerate(shapes):
        turns: list[Turn] = []
        for k, call in enumerate(shape.calls):
            known = _known(call, paths, shapes)
            fresh: list[int] = rng.integers(vocabulary, size=call.written + call.sampled).tolist()
            paths[number, k] = ids = known + fresh
            turns.append(_turn(number, k, call, ids, choice=turns[-1].choice + 1 if _again(shape.calls, k) else 0))
        reward = float(rng.random()) if shape.reward is None else shape.reward
        samples.append(Sample(_rollout(number, shape.group, reward), turns))
    return assemble(samples, agents=["main", "helper"], budget=budget)


def _known(call: CallShape, paths: dict[tuple[int, int], list[int]], shapes: Sequence[Shape]) -> list[int]:
    """What a call's prompt begins with."""
    if call.after is None:
        return []
    rollout, number = call.after
    path = paths[call.after]
    return path[: len(path) - shapes[rollout].calls[number].sampled if call.kept == "prompt" else call.kept]


def _again(calls: Sequence[CallShape], k: int) -> bool:
    """Whether a call is one more answer to the request of the one before."""
    return calls[k].choices > 1 and k % calls[k].choices > 0


def _turn(number: int, k: int, call: CallShape, ids: list[int], choice: int) -> Turn:
    begin = len(ids) - call.sampled
    started = float(k - choice)
    return Turn(
        id=f"r{number:05d}/1/{k}",
        rollout=f"r{number:05d}",
        attempt=1,
        agent=call.agent,
        prompt_ids=ids[:begin],
        response_ids=ids[begin:],
        logprobs=[-1.0] * call.sampled,
        versions=[(0, "1.0")],
        finish="stop",
        started=started,
        ended=started + 0.5,
        choice=choice,
        choices=call.choices,
    )


def _rollout(number: int, group: int, reward: float) -> Rollout:
    return Rollout(
        id=f"r{number:05d}",
        group=f"g{group:05d}",
        member=number,
        task=Task(id=f"t{group}"),
        status="succeeded",
        created=0.0,
        rewards=(Reward(value=reward),),
    )


# -- rows --------------------------------------------------------------------------------------------------------------


def row_per_turn(batch: Batch, budget: int, turns: Ints | None) -> list[MicroBatch]:
    return _packed(batch, [(batch.paths[t], [t]) for t in _chosen(batch, turns)], budget)


def row_per_rollout(batch: Batch, budget: int, turns: Ints | None) -> list[MicroBatch]:
    """The longest context of each rollout with the sampled tokens of all turns that it runs through; one row more for
    each branch of a rollout that did not only append."""
    by_rollout: dict[int, list[int]] = {}
    for t in _chosen(batch, turns):
        by_rollout.setdefault(int(batch.entries.rollout[batch.starts[t]]), []).append(t)
    rows: list[Row] = []
    for own in by_rollout.values():
        left = sorted(own, key=lambda t: len(batch.paths[t]), reverse=True)
        while left:
            path = batch.paths[left[0]]
            on = [t for t in left if np.array_equal(batch.paths[t], path[: len(batch.paths[t])])]
            rows.append((path, sorted(on)))
            left = [t for t in left if t not in on]
    return _packed(batch, rows, budget)


def _chosen(batch: Batch, turns: Ints | None) -> Iterable[int]:
    return range(len(batch.turns)) if turns is None else [int(t) for t in turns]


def _packed(batch: Batch, rows: list[Row], budget: int) -> list[MicroBatch]:
    """In as few pieces as are easily had: the longest row first, each into the first piece that has room."""
    pieces: list[list[Row]] = []
    room: list[int] = []
    for row in sorted(rows, key=lambda row: len(row[0]), reverse=True):
        size = len(row[0])
        assert size <= budget
        place = next((k for k, left in enumerate(room) if left >= size), len(pieces))
        if place == len(pieces):
            pieces.append([])
            room.append(budget)
        pieces[place].append(row)
        room[place] -= size
    return [_piece(batch, rows) for rows in pieces]


def _piece(batch: Batch, rows: list[Row]) -> MicroBatch:
    """Each row is a tree without branches: positions begin again, and nothing before it is seen."""
    start = 0
    end: list[Ints] = []
    entry: list[Ints] = []
    at: list[Ints] = []
    for path, turns in rows:
        for t in turns:
            own = batch.rows(t)
            entry.append(own)
            at.append(start + len(batch.paths[t]) - len(own) - 1 + np.arange(len(own)))
        start += len(path)
        end.append(np.full(len(path), start))
    return MicroBatch(
        ids=np.concatenate([path for path, _ in rows]),
        pos=np.concatenate([np.arange(len(path)) for path, _ in rows]),
        end=np.concatenate(end),
        entry=np.concatenate(entry),
        at=np.concatenate(at),
    )
