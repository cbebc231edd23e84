"""Which items a step takes: every one once per epoch, in an order that only the seed decides."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from strop.errors import PlaceError
from strop.run.data.dataset import DataSample, DataSet, Header, order_epoch, write_dataset
from strop.types import Rollout, Task
from tests.unit.run.data.made_runs import turns


def rollout(id: str, task: str) -> Rollout:
    return Rollout(id=id, group=id, member=0, task=Task(id=task), created=0.0)


def make(path: Path, *, sizes: tuple[int, ...] = (6,), mix: tuple[float, ...] = (1.0,), **settings: object) -> DataSet:
    """A data set with so many items of each source."""
    samples = [
        DataSample.of(source, rollout(f"r{n}", f"{source}-{n}"), turns(f"r{n}", [n, 1], [2]))
        for source, size in enumerate(sizes)
        for n in range(size)
    ]
    header = Header(sources=["a", "b"][: len(sizes)], mix=list(mix), items=[(n,) for n in range(len(samples))])
    write_dataset(path / "data.jsonl", header, map(msgspec.json.encode, samples))
    given: dict[str, object] = {"seed": 3, "batch_size": 4, "epochs": None}
    return DataSet(path / "data.jsonl", **(given | settings))  # pyright: ignore[reportArgumentType]


def take(data: DataSet, *firsts: int) -> list[list[str]]:
    return [[rollout.task.id for rollout in data.rollouts(first)] for first in firsts]


def test_every_item_is_taken_once_per_epoch(tmp_path: Path) -> None:
    data = make(tmp_path)
    taken = [id for step in take(data, 0, 4, 8) for id in step]
    assert sorted(taken[:6]) == sorted(taken[6:]) == [f"0-{n}" for n in range(6)]
    assert taken[:6] != taken[6:]
    assert taken != [id for step in take(make(tmp_path, seed=4), 0, 4, 8) for id in step]


def test_what_a_step_takes_depends_on_nothing_before_it(tmp_path: Path) -> None:
    assert take(make(tmp_path), 8) == [take(make(tmp_path), 0, 4, 8)[-1]]
    assert [one.id for one in make(tmp_path).rollouts(8)] == [f"g{n:06d}.0" for n in range(8, 12)]


def test_the_last_step_of_the_epochs_takes_what_is_left(tmp_path: Path) -> None:
    data = make(tmp_path, epochs=1.5)
    assert (data.limit, data.num_steps) == (9, 3)
    assert [len(step) for step in take(data, 0, 4, 8)] == [4, 4, 1]
    assert len(data.rollouts(9)) == 4  # the run was given more steps


def test_sources_are_seen_as_often_as_their_share_says(tmp_path: Path) -> None:
    data = make(tmp_path, sizes=(4, 6), mix=(2.0, 0.5), batch_size=11)
    assert data.epoch_size == 11
    epochs = [Counter(epoch) for epoch in take(data, 0, 11, 22)]
    for epoch in epochs:
        assert [epoch[f"0-{n}"] for n in range(4)] == [2] * 4
        assert sum(count for id, count in epoch.items() if id.startswith("1-")) == 3
    assert len({id for epoch in epochs for id in epoch if id.startswith("1-")}) > 3


def test_less_than_one_item_per_epoch_is_carried_over(tmp_path: Path) -> None:
    """A source of two at 0.2 gives an item in some epochs only, and no item twice before the other one."""
    data = make(tmp_path, sizes=(4, 2), mix=(1.0, 0.2), batch_size=22, epochs=5)
    assert (data.limit, data.num_steps) == (22, 1)
    ((*taken,),) = take(data, 0)
    assert Counter(taken) == {"0-0": 5, "0-1": 5, "0-2": 5, "0-3": 5, "1-0": 1, "1-1": 1}
    assert [len(order_epoch({0: [0, 1]}, [0.2], seed=0, epoch=epoch)) for epoch in range(5)] == [0, 1, 0, 1, 0]


def test_epochs_without_an_item_are_passed_over(tmp_path: Path) -> None:
    data = make(tmp_path, sizes=(5,), mix=(0.1,), batch_size=5)
    assert [sorted(step) for step in take(data, 0, 5)] == [[f"0-{n}" for n in range(5)]] * 2


@pytest.mark.parametrize("mix", [(1.0, 0.2), (0.3, 0.45), (1.7, 0.1)])
@pytest.mark.parametrize("num", [1, 4, 7, 20])
def test_what_is_taken_is_known_beforehand(tmp_path: Path, mix: tuple[float, float], num: int) -> None:
    data = make(tmp_path, sizes=(7, 5), mix=mix, batch_size=num)
    ids = [f"0-{n}" for n in range(7)] + [f"1-{n}" for n in range(5)]
    assert {ids[n] for n in data.find_taken(num)} == set(take(data, 0)[0])


def test_a_source_at_0_is_never_seen() -> None:
    assert set(order_epoch({0: [0, 1], 1: [2]}, [1.0, 0.0], seed=0, epoch=0)) == {0, 1}


def test_turns_come_back_whole(tmp_path: Path) -> None:
    data = make(tmp_path)
    (sample,) = data.read(2)
    assert sample.whole_turns() == turns(sample.rollout, [int(sample.rollout[1:]), 1], [2])


def test_data_that_is_gone_is_said(tmp_path: Path) -> None:
    with pytest.raises(PlaceError, match=r"data\.jsonl has the data that this run learns from, and cannot be read"):
        DataSet(tmp_path / "data.jsonl", seed=0, batch_size=1, epochs=None)


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[: len(text) // 2],
        lambda text: b"".join(text.splitlines(keepends=True)[:-2]),
        lambda text: text.replace(b'"rollout":"r5"', b'"rollout":5'),
        lambda text: text.replace(b'"rollout":"r5"', b'"rollout":"\xff5"'),
        lambda text: text.replace(b'"source":0', b'"source":7'),
        lambda text: text.replace(b'"ids_from":null', b'"ids_from":"gone"'),
        lambda text: text.replace(b'"items":[[0]', b'"items":[[]'),
    ],
    ids=["half", "lines", "type", "bytes", "source", "delta", "item"],
)  # fmt: skip
def test_data_that_was_damaged_is_said(tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    make(tmp_path)
    path = tmp_path / "data.jsonl"
    text = path.read_bytes()
    path.write_bytes(damage(text))
    assert path.read_bytes() != text
    with pytest.raises(PlaceError, match=r"data\.jsonl has the data .* cannot be read \(.+\)\. Fix: put it back, or"):
        take(DataSet(path, seed=0, batch_size=6, epochs=None), 0)
