"""Batches to update from, and rows: what a learner without a token tree would lay them out as.

    python benchmarks/peers/learner_batches.py TRANSCRIPTS TOKENIZER      writes learner_recorded.json

A batch is made from its shape: how many tokens the environment and the model wrote in turn, and from where on a rollout
differs from another. The ids are random, which changes nothing about the work. Rewards are made up and all differ, so
that every rollout is trained.

The recorded shape is that of real conversations: the first 8 airline tasks of tau-bench (github.com/sierra-research/
tau-bench, historical_trajectories/gpt-4o-airline, MIT), which GPT-4o solved or not, twice each, in ChatML with
Qwen2.5's tokenizer. TRANSCRIPTS is that file with a trajectory per line, TOKENIZER a tokenizer.json, or one gzipped.
"""

from __future__ import annotations

import gzip
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from strop.trajectory import Batch, MicroBatch, Sample, assemble
from strop.trajectory.batch import Ints
from strop.types import Reward, Rollout, Task, Turn

RECORDED = Path(__file__).parent / "learner_recorded.json"
RECORDED_TASKS, TRIALS = 8, 2

Layout = Callable[[Batch, int, Ints | None], list[MicroBatch]]
Row = tuple[Ints, list[int]]
"""A path, and the turns whose sampled tokens are trained on it."""


class Shape(msgspec.Struct, frozen=True):
    """One rollout. `turns` are (tokens of the environment, sampled tokens). The first `shared` are those of rollout
    `like`, which comes before."""

    group: int
    turns: list[tuple[int, int]]
    like: int = 0
    shared: int = 0

    def smaller(self, scale: int) -> Shape:
        turns = [(-(-written // scale), -(-sampled // scale)) for written, sampled in self.turns]
        return Shape(self.group, turns, self.like, self.shared // scale)


def grown(groups: int, rollouts: int, prompt: int, turns: int, message: int, sampled: int) -> list[Shape]:
    """Rollouts of one prompt per group that grow by a message and an answer a turn."""
    made: list[Shape] = []
    for group in range(groups):
        first = len(made)
        for member in range(rollouts):
            words = [(prompt + message, sampled)] + [(message, sampled)] * (turns - 1)
            made.append(Shape(group, words, first, prompt if member else 0))
    return made


def recorded() -> list[Shape]:
    return msgspec.json.decode(RECORDED.read_bytes(), type=list[Shape])


def made(shapes: Sequence[Shape], vocabulary: int, budget: int, seed: int = 0) -> Batch:
    rng = np.random.default_rng(seed)
    whole: list[list[int]] = []
    samples: list[Sample] = []
    for number, shape in enumerate(shapes):
        size = sum(written + sampled for written, sampled in shape.turns)
        ids: list[int] = rng.integers(vocabulary, size=size).tolist()
        if shape.shared:
            other = whole[shape.like]
            ids[: shape.shared] = other[: shape.shared]
            if shape.shared < min(size, len(other)) and ids[shape.shared] == other[shape.shared]:
                ids[shape.shared] = (ids[shape.shared] + 1) % vocabulary
        whole.append(ids)
        samples.append(_sample(number, shape, ids, float(rng.random())))
    return assemble(samples, agents=["main"], budget=budget)


def _sample(number: int, shape: Shape, ids: list[int], reward: float) -> Sample:
    id = f"r{number:05d}"
    turns: list[Turn] = []
    at = 0
    for k, (written, sampled) in enumerate(shape.turns):
        begin = at + written
        at = begin + sampled
        turn = Turn(
            id=f"{id}/1/{k}",
            rollout=id,
            attempt=1,
            prompt_ids=ids[:begin],
            response_ids=ids[begin:at],
            logprobs=[-1.0] * sampled,
            versions=[(0, "1.0")],
            finish="stop",
            started=float(k),
            ended=k + 0.5,
        )
        turns.append(turn)
    rollout = Rollout(
        id=id,
        group=f"g{shape.group:05d}",
        member=number,
        task=Task(id=f"t{shape.group}"),
        status="succeeded",
        created=0.0,
        rewards=(Reward(value=reward),),
    )
    return Sample(rollout, turns)


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


# -- recording ---------------------------------------------------------------------------------------------------------


def record(transcripts: Path, tokenizer: Path) -> list[Shape]:
    from tokenizers import Tokenizer

    text = gzip.decompress(tokenizer.read_bytes()) if tokenizer.suffix == ".gz" else tokenizer.read_bytes()
    encode: Any = Tokenizer.from_str(text.decode()).encode
    runs: list[Any] = [json.loads(line) for line in transcripts.read_text().splitlines()]
    runs = sorted((r for r in runs if r["task_id"] < RECORDED_TASKS), key=lambda r: (r["task_id"], r["trial"]))
    assert len(runs) == RECORDED_TASKS * TRIALS
    whole: list[list[int]] = []
    shapes: list[Shape] = []
    for run in runs:
        turns: list[tuple[int, int]] = []
        ids: list[int] = []
        written = ""
        for message in run["traj"]:
            if message["role"] != "assistant":
                written += f"<|im_start|>{message['role']}\n{message['content']}<|im_end|>\n"
                continue
            before: list[int] = encode(f"{written}<|im_start|>assistant\n").ids
            sampled: list[int] = encode(_said(message) + "<|im_end|>").ids
            turns.append((len(before), len(sampled)))
            ids += before + sampled
            written = "\n"
        shares = [_shared(ids, other) for other in whole] or [0]
        like = int(np.argmax(shares))
        shapes.append(Shape(run["task_id"], turns, like, shares[like]))
        whole.append(ids)
    return shapes


def _said(message: dict[str, Any]) -> str:
    calls: list[Any] = message.get("tool_calls") or []
    of = [{"name": call["function"]["name"], "arguments": call["function"]["arguments"]} for call in calls]
    return (message["content"] or "") + "".join(f"<tool_call>\n{json.dumps(call)}\n</tool_call>" for call in of)


def _shared(ids: list[int], other: list[int]) -> int:
    n = min(len(ids), len(other))
    differ = np.flatnonzero(np.array(ids[:n]) != np.array(other[:n]))
    return int(differ[0]) if len(differ) else n


if __name__ == "__main__":
    lines = [msgspec.json.encode(shape).decode() for shape in record(Path(sys.argv[1]), Path(sys.argv[2]))]
    RECORDED.write_text("[\n" + ",\n".join(lines) + "\n]\n")
