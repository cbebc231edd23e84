"""Stored data in a run's own store: ended rollouts that say what they are, whatever was killed on the way."""

from pathlib import Path

import msgspec

from strop.run.data.copies import RUNNER, copy_turn, finish_begun, name_turns
from strop.run.data.dataset import DataSample, DataSet, Header, write_dataset
from strop.store import open_store
from strop.types import Policy, Reward, Rollout, Sampling, Task
from tests.unit.run.data.made_runs import turns


def make_data(path: Path) -> DataSet:
    rewards = (Reward(value=1.0), Reward(name="neat", value=0.5, turn="g7.0/1/1"))
    excluded = {"g7.0/1/0": "title", "g7.0/1/7": "gone"}
    rollout = Rollout(
        id="g7.0", group="g7", member=0, task=Task(id="t"), created=0.0, rewards=rewards, excluded=excluded
    )
    sample = DataSample.of(0, rollout, turns("g7.0", [7, 8], [9]))
    header = Header(sources=["runs/a"], mix=[1.0], items=[(0,)])
    write_dataset(path / "data.jsonl", header, [msgspec.json.encode(sample)])
    return DataSet(path / "data.jsonl", seed=0, batch_size=1, epochs=None)


def test_a_copy_has_the_tokens_and_none_of_the_circumstances() -> None:
    first, second = turns("g7.0", [7, 8], [9], sampling=Sampling(temperature=0.3, top_p=0.5, max_tokens=9))
    names = {first.id: "g000001.0/2/0", second.id: "g000001.0/2/1"}
    copy = copy_turn(second, names, "g000001.0", 2)
    assert (copy.prompt_ids, copy.response_ids, copy.answer) == (second.prompt_ids, second.response_ids, second.answer)
    assert (copy.id, copy.rollout, copy.attempt, copy.parent) == ("g000001.0/2/1", "g000001.0", 2, "g000001.0/2/0")
    assert (copy.versions, copy.sampling) == ([(0, "data")], Sampling(max_tokens=9))
    rewards = [Reward(value=1.0, turn=second.id), Reward(value=2.0), Reward(value=3.0, turn="g000001.0/2/0")]
    assert name_turns(rewards, names) == [
        Reward(value=1.0, turn="g000001.0/2/1"),
        Reward(value=2.0),
        Reward(value=3.0, turn="data:g000001.0/2/0"),  # of a rollout that was called as the copy is
    ]


async def test_what_was_begun_when_a_run_was_killed_is_finished_before_agents_work(tmp_path: Path) -> None:
    data, store = make_data(tmp_path), await open_store(tmp_path)
    await store.put_policy(Policy(name="main", version="1.0", model="strop/nano"))
    (wanted,) = data.rollouts(3)
    await store.begin(wanted, RUNNER, seconds=60)
    waiting = Rollout(id="e1.0-test-sampled.0000", group="e", member=0, task=Task(id="t"), mode="eval", created=0.0)
    await store.enqueue([waiting])
    await store.reclaim(everything=True)  # as a run that is opened again does
    assert (await store.get(wanted.id)).status == "queued"
    await finish_begun(store, data)
    found = await store.get(wanted.id)
    assert (found.status, found.detail, found.reward()) == ("succeeded", "copied from runs/a, g7.0", 1.0)
    assert [turn.response_ids for turn in await store.turns(wanted.id)] == [[7, 8], [9]]
    assert {reward.turn for reward in found.rewards} == {None, f"{wanted.id}/2/1"}
    # What its agent did not want trained is not learnt here; that one is not there is counted by the step.
    assert found.excluded == {f"{wanted.id}/2/0": "title", "data:g7.0/1/7": "gone"}
    assert [lease.rollout.id for lease in await store.lease("agent", seconds=60, count=9)] == [waiting.id]
    await store.close()
