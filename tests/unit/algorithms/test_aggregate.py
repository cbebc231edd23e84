from typing import get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strop.algorithms import make as make_algorithm
from strop.algorithms.aggregate import Aggregation, aggregate
from strop.config import AlgorithmConfig, LearnerConfig, PolicyConfig, SamplingConfig
from strop.trajectory import Sample, assemble, pack
from strop.types import Reward, Rollout, Sampling, Task, Turn

KINDS = get_args(Aggregation)


def make(*rollouts):
    """A batch of rollouts, each a list of turns (length, choices, finish), the last two if they differ from 1, stop."""
    samples = []
    for m, turns in enumerate(rollouts):
        id, made = f"g.{m}", []
        for k, turn in enumerate(turns):
            length, choices, finish = (turn, 1, "stop") if isinstance(turn, int) else turn
            made.append(
                Turn(
                    id=f"{id}/1/{k}", rollout=id, attempt=1, prompt_ids=[1, 2], response_ids=[3 + k] * length,
                    logprobs=[-1.0] * length, versions=[(0, "1.0")], finish=finish, choices=choices,
                    sampling=Sampling(max_tokens=8 + k), started=float(k), ended=k + 0.5,
                )
            )  # fmt: skip
        rollout = Rollout(
            id=id, group="g", member=m, task=Task(id="t"), status="succeeded", created=0.0, rewards=(Reward(value=1.0),)
        )  # fmt: skip
        samples.append(Sample(rollout, made))
    return assemble(samples, agents=["main"], budget=1000)


def weights(kind, *rollouts, horizon=10):
    batch = make(*rollouts)
    aggregate(batch, kind, horizon)
    return batch.entries.weight.tolist()


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("token-mean", [1 / 4, 1 / 4, 1 / 4, 1 / 4]),
        ("sequence-mean", [1 / 6, 1 / 6, 1 / 3, 1 / 3]),
        ("sequence-sum", [1 / 3, 1 / 3, 1 / 3, 1 / 3]),
        ("sequence-sum-norm", [1 / 30, 1 / 30, 1 / 30, 1 / 30]),
        ("rollout-mean", [1 / 6, 1 / 6, 1 / 6, 1 / 2]),
        ("rollout-sum-norm", [1 / 20, 1 / 20, 1 / 20, 1 / 20]),
    ],
)
def test_weights(kind, expected):
    """Two rollouts: turns of two tokens and one, a turn of one."""
    assert weights(kind, [2, 1], [1]) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("token-mean", [1 / 5, 1 / 5, 1 / 5, 2 / 5]),
        ("sequence-mean", [1 / 8, 1 / 8, 1 / 4, 1 / 2]),
        ("sequence-sum", [1 / 4, 1 / 4, 1 / 4, 1 / 2]),
        ("sequence-sum-norm", [1 / 40, 1 / 40, 1 / 40, 1 / 20]),
        ("rollout-mean", [1 / 6, 1 / 6, 1 / 6, 1 / 2]),
        ("rollout-sum-norm", [1 / 40, 1 / 40, 1 / 40, 1 / 20]),
    ],
)
def test_two_choices_of_one_request_count_as_one_turn(kind, expected):
    assert weights(kind, [(2, 2, "stop"), (1, 2, "stop")], [1]) == pytest.approx(expected)


@pytest.mark.parametrize("kind", KINDS)
def test_only_what_is_trained_is_counted(kind):
    batch = make([2, (5, 1, "abandoned"), 1], [1], [7], [(3, 1, "abandoned")])
    batch.drop(2, "zero_variance")
    aggregate(batch, kind, 10)
    trained = batch.entries.weight > 0
    assert trained.tolist() == [True] * 2 + [False] * 5 + [True] * 2 + [False] * 10
    assert batch.entries.weight[trained].tolist() == pytest.approx(weights(kind, [2, 1], [1]))


@pytest.mark.parametrize("kind", ["sequence-sum-norm", "rollout-sum-norm"])
def test_the_horizon_is_the_same_in_every_step(kind):
    """By default what the policy may sample, whatever the turns of this batch were allowed."""
    settings = {"aggregation": kind, "entropy_coef": 1.0}
    policy = PolicyConfig(train=SamplingConfig(max_tokens=64))
    for chosen, horizon in ((settings, 64), (settings | {"horizon": 7}, 7)):
        batch = make([2, 1, 1], [1])
        assert {turn.sampling.max_tokens for turn in batch.turns} == {8, 9, 10}
        make_algorithm(AlgorithmConfig(settings=chosen), LearnerConfig(), policy).assign_credit(batch)
        assert batch.entries.weight.tolist() == pytest.approx(weights(kind, [2, 1, 1], [1], horizon=horizon))


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_to_train_is_no_weight(kind):
    assert weights(kind, [(3, 1, "abandoned")]) == [0.0] * 3
    assert weights(kind, []) == []
    batch = make([2], [1])
    batch.entries.weight[:] = 5.0
    for s in range(2):
        batch.drop(s, "zero_variance")
    aggregate(batch, kind, 10)
    assert not batch.entries.weight.any()


turns = st.tuples(st.integers(1, 6), st.integers(1, 3), st.sampled_from(["stop", "stop", "length", "abandoned"]))
batches = st.lists(st.lists(turns, min_size=1, max_size=4), min_size=1, max_size=5)


@given(batches, st.integers(0, 4))
@settings(max_examples=60, deadline=None)
def test_weights_sum_to_what_they_should(rollouts, gone):
    def total(kind):
        batch = make(*rollouts)
        if gone < len(rollouts):
            batch.drop(gone, "zero_variance")
        aggregate(batch, kind, 10)
        assert (batch.entries.weight >= 0).all()
        return batch.entries.weight.sum(), batch

    left = [
        [(length, n) for length, n, finish in turns if finish != "abandoned"]
        for s, turns in enumerate(rollouts)
        if s != gone
    ]
    left = [turns for turns in left if turns]
    count = sum(1 / n for turns in left for _, n in turns)
    tokens = sum(length / n for turns in left for length, n in turns)
    for kind in ("token-mean", "sequence-mean", "rollout-mean"):
        assert total(kind)[0] == pytest.approx(1.0 if left else 0.0)
    assert total("sequence-sum")[0] == pytest.approx(tokens / count if left else 0.0)
    assert total("sequence-sum-norm")[0] == pytest.approx(tokens / count / 10 if left else 0.0)
    assert total("rollout-sum-norm")[0] == pytest.approx(tokens / len(left) / 10 if left else 0.0)
    # Each turn has the same part of a sequence mean, each rollout the same of a rollout mean.
    weight, batch = total("sequence-mean")[1].entries.weight, total("rollout-mean")[1]
    for t, made in enumerate(batch.turns):
        own = weight[batch.rows(t)].sum()
        assert own == 0 or own == pytest.approx(1 / made.choices / count)
    for s in range(len(batch.samples)):
        own = batch.entries.weight[batch.entries.rollout == s].sum()
        assert own == 0 or own == pytest.approx(1 / len(left))


@given(batches)
@settings(max_examples=30, deadline=None)
def test_token_mean_is_one_over_all_tokens_bit_for_bit(rollouts):
    batch = make(*rollouts)
    aggregate(batch, "token-mean", 10)
    choices = np.array([turn.choices for turn in batch.turns], np.float64)
    expected = np.where(batch.entries.trainable, 1.0 / choices[batch.entries.turn], 0.0)
    if expected.any():
        expected /= expected.sum()
    assert np.array_equal(batch.entries.weight, expected)


@pytest.mark.parametrize("kind", KINDS)
def test_packing_cannot_change_the_batch_loss(kind):
    batch = make([2, 3, 1], [4], [(2, 2, "stop"), (3, 2, "stop")])
    aggregate(batch, kind, 10)
    loss = np.arange(1.0, len(batch.entries) + 1)
    whole = (batch.entries.weight * loss).sum()
    for budget in (6, 9, 1000):
        pieces = pack(batch, budget)
        parts = [(batch.entries.weight[piece.entry] * loss[piece.entry]).sum() for piece in pieces]
        assert sum(parts) == pytest.approx(whole, rel=1e-12)
