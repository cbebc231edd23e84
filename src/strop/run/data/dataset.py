"""The data set of a run: data.jsonl in its folder, and which items a step takes.

    {"sources": ["runs/demo"], "items": [[0], [1]]}          the samples of each item, by their lines
    {"source": 0, "rollout": "g000003.1", "task": ..., "rewards": [...], "turns": [...]}
    ...

Item n of a run is always the same: every epoch has an order of its own, made from the run's seed. So nothing needs
remembering but what the last step took, and a resumed run goes on where it was.
"""

from __future__ import annotations

import math
import random
import time
from array import array
from bisect import bisect_right
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
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
    """One rollout to learn from: its turns as they were recorded, or as a transcript makes them. Those that its agent
    `excluded` are not learnt here either."""

    source: int
    rollout: str
    task: Task
    rewards: tuple[Reward, ...] = ()
    turns: list[TurnDelta]
    excluded: dict[str, str] = {}

    @staticmethod
    def of(source: int, rollout: Rollout, turns: Iterable[Turn]) -> DataSample:
        return DataSample(
            source=source,
            rollout=rollout.id,
            task=rollout.task,
            rewards=rollout.rewards,
            turns=shrink(turns),
            excluded=rollout.excluded,
        )

    def whole_turns(self) -> list[Turn]:
        return grow(self.turns)


class DataSet:
    """`batch_size` items are taken by a step, fewer by the last one of the last of `epochs`."""

    def __init__(self, path: Path, *, seed: int, batch_size: int, epochs: float | None) -> None:
        self._path, self._seed, self.batch_size, self._epochs = path, seed, batch_size, epochs
        self._orders: dict[int, array[int]] = {}
        with self._explain_damage(), path.open("rb") as file:
            self.header = msgspec.json.decode(file.readline(), type=Header)

    @contextmanager
    def _explain_damage(self) -> Generator[None]:
        """Raises `PlaceError` where the file is gone, or not as it was written."""
        try:
            yield
        except (OSError, msgspec.MsgspecError, UnicodeError, RecursionError, LookupError) as error:
            why = "there are fewer lines than it had" if isinstance(error, LookupError) else error
            raise PlaceError(
                f"{self._path} has the data that this run learns from, and cannot be read ({why}). Fix: put it back, "
                "or begin a new run"
            ) from None

    @cached_property
    def _lines(self) -> array[int]:
        """Where each sample begins in the file."""
        starts, at = array("q"), 0
        with self._explain_damage(), self._path.open("rb") as file:
            for line in file:
                at += len(line)
                starts.append(at)
        return starts

    @property
    def epoch_size(self) -> float:
        """Items of an epoch in the mean: one may have one more of a source than another."""
        return math.fsum(self.header.mix[source] * len(items) for source, items in self._by_source.items())

    def _count_until(self, epoch: int) -> int:
        """Items of the epochs before this one."""
        sources = self._by_source.items()
        return sum(count_taken(len(items), self.header.mix[source], epoch) for source, items in sources)

    @cached_property
    def _by_source(self) -> dict[int, list[int]]:
        """The items of each source; one is of the source that its first sample is of."""
        found: dict[int, list[int]] = {}
        with self._explain_damage(), self._path.open("rb") as file:
            next(file)
            sources = [msgspec.json.decode(line, type=_Source).source for line in file]
            for n, item in enumerate(self.header.items):
                of = [sources[line] for line in item]
                _ = self.header.mix[of[0]]
                found.setdefault(of[0], []).append(n)
        return found

    @property
    def num_steps(self) -> int | None:
        """How many steps the epochs are; None where nobody said how many."""
        return None if self.limit is None else -(-self.limit // self.batch_size)

    @property
    def limit(self) -> int | None:
        """How many items the epochs are."""
        if self._epochs is None:
            return None
        part, whole = math.modf(self._epochs)
        begin, end = self._count_until(int(whole)), self._count_until(int(whole) + 1)
        return max(1, begin + round(part * (end - begin)))

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
        with self._explain_damage(), self._path.open("rb") as file:
            file.seek(self._lines[line])
            sample = msgspec.json.decode(file.readline(), type=DataSample)
            sample.whole_turns()
            return sample

    def _choose(self, n: int) -> int:
        epoch = self._find_epoch(n)
        if epoch not in self._orders:
            self._orders = {epoch: order_epoch(self._by_source, self.header.mix, seed=self._seed, epoch=epoch)}
        return self._orders[epoch][n - self._count_until(epoch)]

    def _find_epoch(self, n: int) -> int:
        """The epoch that the n-th item is in. Epochs that are empty are passed over."""
        beyond = int((n + len(self._by_source)) / self.epoch_size) + 2
        return bisect_right(range(beyond), n, key=self._count_until) - 1

    def find_taken(self, num: int) -> set[int]:
        """Which items are among the first `num` that the run takes."""
        epoch, found = self._find_epoch(num), set[int]()
        for source, items in self._by_source.items():
            count = count_taken(len(items), self.header.mix[source], epoch)
            found.update(items if count >= len(items) else order_source(items, self._seed, source, 0)[:count])
        return found | {self._choose(n) for n in range(self._count_until(epoch), num)}


def order_epoch(by_source: Mapping[int, Sequence[int]], mix: Sequence[float], *, seed: int, epoch: int) -> array[int]:
    """The items of an epoch in its order. Every source is gone through again and again, however many epochs it takes to
    get through it once, each time in an order of its own.

    >>> sorted(order_epoch({0: [0, 1], 1: [2, 3]}, [2, 0.5], seed=7, epoch=0))[:4]
    [0, 0, 1, 1]
    """
    rng, order = random.Random(stable_hash(seed, "data", epoch)), array("q")
    for source, items in by_source.items():
        first, end = (count_taken(len(items), mix[source], epochs) for epochs in (epoch, epoch + 1))
        for pass_ in range(first // len(items), -(-end // len(items))):
            begin = pass_ * len(items)
            whole = first <= begin and begin + len(items) <= end
            part = slice(max(0, first - begin), end - begin)
            order.extend(items if whole else order_source(items, seed, source, pass_)[part])
    rng.shuffle(order)
    return order


def order_source(items: Sequence[int], seed: int, source: int, pass_: int) -> list[int]:
    """The order in which a source's items are taken, the so-manieth time that it is gone through (`pass_`, from 0)."""
    shuffled = list(items)
    random.Random(stable_hash(seed, "data", source, pass_)).shuffle(shuffled)
    return shuffled


def count_taken(size: int, share: float, epochs: int) -> int:
    """How many items of a source of so many are taken in this many epochs: what is less than one in an epoch is carried
    over to the next.

    >>> [count_taken(2, 0.2, epochs) for epochs in range(6)]
    [0, 0, 1, 1, 2, 2]
    """
    return round(share * size * epochs)


class _Source(Struct):
    source: int


def write_dataset(path: Path, header: Header, samples: Iterable[bytes]) -> None:
    """Write the file; `samples` are `DataSample`s as JSON, in the order of the header's lines."""
    private_folder(path.parent)
    with open(path, "wb", opener=private) as file:
        file.write(msgspec.json.encode(header) + b"\n")
        file.writelines(sample + b"\n" for sample in samples)
