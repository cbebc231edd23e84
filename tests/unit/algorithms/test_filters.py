from typing import get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strop.algorithms.aggregate import aggregate
from strop.algorithms.filters import Overlong, drop_stale, filter_batch, find_overlong
from strop.trajectory import Sample, assemble, explain
from strop.types import Rollout, Task, Turn

OFF = {"overlong": "keep", "malformed": False, "max_turns": None}


def turn(k, finish="stop", malformed=0, agent="main", versions=((0, "1.4"),), length=2):
    return {
        "finish": finish, "agent": agent, "versions": list(versions), "prompt_ids": [1, 2],
        "response_ids": [3 + k] * length, "logprobs": [-1.0] * length, "started": float(k), "ended": k + 0.5,
        "answer": {"malformed_calls": malformed} if malformed else {},
    }  # fmt: skip


def make(*rollouts, budget=1000):
    samples = []
    for m, turns in enumerate(rollouts):
        id = f"g.{m}"
        made = [Turn(id=f"{id}/1/{k}", rollout=id, attempt=1, **fields) for k, fields in enumerate(turns)]
        rollout = Rollout(id=id, group="g", member=m, task=Task(id="t"), status="succeeded", created=0.0)
        samples.append(Sample(rollout, made))
    batch = assemble(samples, agents=["main"], budget=budget)
    batch.entries.advantage[:] = np.arange(1.0, len(batch.entries) + 1)
    return batch


def trainable(batch):
    """For each turn, whether its entries may carry loss; a turn is never half trainable."""
    found = [set(batch.entries.trainable[batch.rows(t)].tolist()) for t in range(len(batch.turns))]
    assert all(len(one) == 1 for one in found)
    return [one == {True} for one in found]


def test_all_off_leaves_everything():
    batch = make([turn(0, "length", malformed=2)], [turn(0)])
    filter_batch(batch, **OFF)
    assert (batch.dropped, batch.skipped, trainable(batch)) == ({}, [None, None], [True, True])


def test_cut_off_answers_of_trained_agents_are_overlong():
    batch = make(
        [turn(0), turn(1, "length")], [turn(0), turn(1, "length", agent="judge")], [turn(0, "length", length=60)], [],
        budget=50,
    )  # fmt: skip
    assert batch.dropped["g.2"] == "over_budget"  # it still counts in the baseline, and for what it is
    assert find_overlong(batch).tolist() == [1.0, 0.0, 1.0, 0.0]


def test_overlong_rollouts_can_be_dropped():
    batch = make([turn(0), turn(1, "length")], [turn(0)], [turn(0, "length")])
    batch.drop(2, "zero_variance")
    filter_batch(batch, **OFF | {"overlong": "drop"})
    assert batch.dropped == {"g.0": "overlong", "g.2": "zero_variance"}
    assert batch.counts()["filter/overlong"] == 1
    assert batch.counted.all()


def test_overlong_turns_can_be_masked():
    batch = make([turn(0), turn(1, "length")], [turn(0, "length"), turn(1, "abandoned")], [turn(0, "length")])
    batch.drop(2, "zero_variance")
    filter_batch(batch, **OFF | {"overlong": "mask"})
    assert batch.skipped == [None, "overlong", "overlong", "abandoned", None]
    assert trainable(batch) == [True, False, False, False, True]
    assert batch.dropped == {"g.1": "overlong", "g.2": "zero_variance"}  # nothing is left of the second
    assert batch.counts() == {
        "filter/overlong": 1, "filter/zero_variance": 1, "filter_tokens/overlong": 4, "filter_tokens/abandoned": 2,
    }  # fmt: skip


def test_a_penalty_is_not_a_filter():
    batch = make([turn(0, "length")], [turn(0)])
    filter_batch(batch, **OFF | {"overlong": "penalise"})
    assert (batch.dropped, batch.skipped) == ({}, [None, None])


def test_turns_with_malformed_calls_are_left_out():
    batch = make([turn(0, malformed=1), turn(1), turn(2, "length", malformed=3)], [turn(0, malformed=1)])
    filter_batch(batch, overlong="mask", malformed=True, max_turns=None)
    assert batch.skipped == ["malformed_call", None, "overlong", "malformed_call"]
    assert batch.dropped == {"g.1": "malformed_call"}


def test_a_cap_keeps_a_choice_that_depends_on_the_rollout_alone():
    def kept(batch):
        filter_batch(batch, **OFF | {"max_turns": 2})
        return [t for t, ok in enumerate(trainable(batch)) if ok]

    turns = [turn(k) for k in range(6)]
    batch = make(turns, turns)
    both = kept(batch)
    assert batch.skipped.count("turn_cap") == 8
    assert batch.dropped == {}
    first, second = both[:2], [t - 6 for t in both[2:]]
    assert max(first) < 6 <= min(both[2:])
    assert kept(make(turns)) == first  # whoever else is in the batch
    choices = {tuple(first), tuple(second)}
    for m in range(3, 20):
        one = make(*[[]] * m, turns)
        choices.add(tuple(kept(one)))
    assert len(choices) > 5
    assert {t for choice in choices for t in choice} == set(range(6))


def test_a_cap_counts_only_turns_that_can_be_trained():
    batch = make([turn(0, "abandoned"), turn(1), turn(2)], [turn(0)])
    filter_batch(batch, **OFF | {"max_turns": 2})
    assert batch.skipped == ["abandoned", None, None, None]


def test_the_choice_is_the_same_in_every_process():
    batch = make([turn(k) for k in range(6)])
    filter_batch(batch, **OFF | {"max_turns": 2})
    # Python's own hash of a string is another one in each: this would hold by chance only.
    assert [t for t in range(6) if batch.skipped[t] is None] == [0, 3]


@given(
    st.lists(
        st.lists(
            st.builds(turn, st.integers(0, 5), st.sampled_from(["stop", "length", "abandoned"]), st.integers(0, 1)),
            min_size=1,
            max_size=5,
        ),
        min_size=1,
        max_size=5,
    ),
    st.sampled_from(get_args(Overlong)),
    st.booleans(),
    st.none() | st.integers(1, 3),
    st.sets(st.integers(0, 4)),
)
@settings(max_examples=60, deadline=None)
def test_filters_keep_advantages_earlier_reasons_and_count_everything(rollouts, overlong, malformed, max_turns, gone):
    batch = make(*rollouts)
    for s in gone & set(range(len(rollouts))):
        batch.drop(s, "zero_variance")
    advantage, skipped, dropped = batch.entries.advantage.copy(), list(batch.skipped), dict(batch.dropped)
    filter_batch(batch, overlong=overlong, malformed=malformed, max_turns=max_turns)
    after = (list(batch.skipped), dict(batch.dropped))
    filter_batch(batch, overlong=overlong, malformed=malformed, max_turns=max_turns)
    assert after == (batch.skipped, batch.dropped)  # the second time nothing is left to do
    assert np.array_equal(batch.entries.advantage, advantage)
    assert batch.counted.all()
    assert dropped.items() <= batch.dropped.items()
    assert all(now == before for before, now in zip(skipped, batch.skipped, strict=True) if before)
    assert trainable(batch) == [reason is None for reason in batch.skipped]
    aggregate(batch, "token-mean", None)
    for s, sample in enumerate(batch.samples):
        carries = bool(batch.entries.weight[batch.entries.rollout == s].any())
        assert carries == (sample.rollout.id not in batch.dropped)  # what carries no loss has a reason
        count = len(np.unique(batch.entries.turn[(batch.entries.rollout == s) & (batch.entries.weight > 0)]))
        assert max_turns is None or count <= max_turns
    for reason in {*batch.dropped.values(), *filter(None, batch.skipped)}:
        assert explain(reason) != f"left out as {reason}"


# -- staleness ---------------------------------------------------------------------------------------------------------


def test_staleness_is_that_of_the_oldest_token():
    batch = make(
        [turn(0, versions=[(0, "1.4")])],
        [turn(0, versions=[(0, "1.4")]), turn(1, versions=[(0, "1.2"), (1, "1.4")])],
        [turn(0, versions=[(0, "1.3")]), turn(1, versions=[(0, "2.4")])],  # resumed in between
        [turn(0, versions=[(0, "1.1")])],
        [turn(0), turn(1, versions=[(0, "1.0")], agent="judge")],
    )
    batch.drop(3, "zero_variance")
    metrics = drop_stale(batch, 4, 1)
    assert batch.dropped == {"g.1": "too_stale", "g.3": "zero_variance"}
    assert batch.counted.all()
    assert metrics == {
        "training/off_policy/staleness/mean": pytest.approx(6 / 5),
        "training/off_policy/staleness/max": 3.0,
        "training/off_policy/staleness/min": 0.0,
    }


def test_versions_are_numbers_not_words():
    batch = make([turn(0, versions=[(0, "1.9")])], [turn(0, versions=[(0, "1.10")])])
    drop_stale(batch, 10, 0)
    assert batch.dropped == {"g.0": "too_stale"}


def test_nothing_sampled_is_not_stale():
    batch = make([], [])
    assert drop_stale(batch, 7, 0) == {}
    assert set(batch.dropped.values()) == {"empty"}


def test_a_turn_must_say_what_sampled_it():
    with pytest.raises(AssertionError, match=r"turn g\.0/1/0 does not say which version"):
        drop_stale(make([turn(0, versions=[])]), 4, 1)
