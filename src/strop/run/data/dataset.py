"""The data set of a run: data.jsonl in its folder, and which items a step takes.

    {"sources": ["runs/demo"], "items": [[0], [1]]}          the samples of each item, by their lines
    {"source": 0, "rollout": "g000003.1", "task": ..., "rewards": [...], "turns": [...]}
    ...

Item n of a run is always the same: every epoch has an order of its own, made from the run's seed. So nothing needs
remembering but what the last step took, and a resumed run goes on where it was.
"""

from __future__ import annotations

import random
import time
from array import array
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path

import msgspec
from msgspec import Struct

from strop.errors import PlaceError
from strop.files import private, private_folder
from strop.store.turn_deltas import TurnDelta, grow, shrink
from strop.types import Reward, Rollout, Task, Turn, stable_hash

NAME = "data.jsonl"


class Header(Struct, frozen=True):
    """`items` are samples by their lines, from 0; `mix` is how often an item of each source is in an epoch."""

    sources: list[str]
    mix: list[float]
    items: list[tuple[int, ...]]


class DataSample(Struct, frozen=True, kw_only=True):
    """One rollout to learn from: its turns as they were recorded, or as a transcript makes them."""

    source: int
    rollout: str
    task: Task
    rewards: tuple[Reward, ...] = ()
    turns: list[TurnDelta]

    @staticmethod
    def of(source: int, rollout: str, task: Task, rewards: Sequence[Reward], turns: Iterable[Turn]) -> DataSample:
        return DataSample(source=source, rollout=rollout, task=task, rewards=tuple(rewards), turns=shrink(turns))

    def whole_turns(self) -> list[Turn]:
        return grow(self.turns)


class DataSet:
    """`batch_size` items are taken by a step, fewer by the last one of the last of `epochs`."""

    def __init__(self, path: Path, *, seed: int, batch_size: int, epochs: float | None) -> None:
        self._path, self._seed, self.batch_size, self._epochs = path, seed, batch_size, epochs
        self._orders: dict[int, array[int]] = {}
        try:
            with path.open("rb") as file:
                self.header = msgspec.json.decode(file.readline(), type=Header)
        except (OSError, msgspec.MsgspecError) as error:
            raise PlaceError(
                f"{path} has the data that this run learns from, and cannot be read ({error}). Fix: put it back, or "
                "begin a new run"
            ) from None

    @cached_property
    def _lines(self) -> array[int]:
        """Where each sample begins in the file."""
        starts, at = array("q"), 0
        with self._path.open("rb") as file:
            for line in file:
                at += len(line)
                starts.append(at)
        return starts

    @property
    def epoch_size(self) -> int:
        """Items of an epoch."""
        return sum(self._sizes)

    @cached_property
    def _sizes(self) -> list[int]:
        sources = self._by_source
        return [round(self.header.mix[source] * len(items)) for source, items in sources.items()]

    @cached_property
    def _by_source(self) -> dict[int, list[int]]:
        """The items of each source; one is of the source that its first sample is of."""
        found: dict[int, list[int]] = {}
        with self._path.open("rb") as file:
            next(file)
            sources = [msgspec.json.decode(line, type=_Source).source for line in file]
        for n, item in enumerate(self.header.items):
            found.setdefault(sources[item[0]], []).append(n)
        return found

    @property
    def num_steps(self) -> int | None:
        """How many steps the epochs are; None where nobody said how many."""
        return None if self.limit is None else -(-self.limit // self.batch_size)

    @property
    def limit(self) -> int | None:
        """How many items the epochs are."""
        return None if self._epochs is None else max(1, round(self._epochs * self.epoch_size))

    def count(self, first: int) -> int:
        """How many items a step takes that begins with item `first`. One beyond the epochs, in a run that was given
        more steps, takes as many as any."""
        left = self.limit - first if self.limit is not None else 0
        return min(self.batch_size, left) if left > 0 else self.batch_size

    def rollouts(self, first: int) -> list[Rollout]:
        """The rollouts that a step takes which begins with item `first`: a group for each item."""
        return [rollout for n in range(first, first + self.count(first)) for rollout in self._group(n)]

    def _group(self, n: int) -> list[Rollout]:
        name, now = f"g{n:06d}", time.time()
        return [
            Rollout(
                id=f"{name}.{member}",
                group=name,
                member=member,
                task=sample.task,
                seed=stable_hash(self._seed, "data", n, member),
                retries={},  # nobody but the run itself may ever take it up
                created=now,
            )
            for member, sample in enumerate(self.read(n))
        ]

    def read(self, n: int) -> list[DataSample]:
        """The samples of the n-th item that the run takes."""
        return [self._sample(line) for line in self.header.items[self._choose(n)]]

    def _sample(self, line: int) -> DataSample:
        with self._path.open("rb") as file:
            file.seek(self._lines[line])
            return msgspec.json.decode(file.readline(), type=DataSample)

    def _choose(self, n: int) -> int:
        epoch, place = divmod(n, self.epoch_size)
        if epoch not in self._orders:
            self._orders = {epoch: order_epoch(self._by_source, self.header.mix, seed=self._seed, epoch=epoch)}
        return self._orders[epoch][place]


def order_epoch(by_source: Mapping[int, Sequence[int]], mix: Sequence[float], *, seed: int, epoch: int) -> array[int]:
    """The items of an epoch in its order: each as often as its source's share says, and of what is left over as many as
    it takes, others in every epoch.

    >>> sorted(order_epoch({0: [0, 1], 1: [2, 3]}, [2, 0.5], seed=7, epoch=0))[:4]
    [0, 0, 1, 1]
    """
    rng, order = random.Random(stable_hash(seed, "data", epoch)), array("q")
    for source, items in by_source.items():
        again, left = divmod(round(mix[source] * len(items)), len(items))
        order.extend([*items] * again + rng.sample(list(items), left))
    rng.shuffle(order)
    return order


class _Source(Struct):
    source: int


def write_dataset(path: Path, header: Header, samples: Iterable[bytes]) -> None:
    """Write the file; `samples` are `DataSample`s as JSON, in the order of the header's lines."""
    private_folder(path.parent)
    with open(path, "wb", opener=private) as file:
        file.write(msgspec.json.encode(header) + b"\n")
        file.writelines(sample + b"\n" for sample in samples)
