"""Batches with nothing, or something wrong, in them: each has an outcome that is said, and a reason that is counted.

Every batch here goes the whole way that a step takes it: assemble, score, credit, update.
"""

import math
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from strop.algorithms import make
from strop.config import AlgorithmConfig, LearnerConfig, OptimConfig
from strop.errors import LearnerError
from strop.learner.learner import Learner
from strop.trajectory import assemble, explain
from strop.trajectory.batch import REASONS
from strop.types import Sampling
from tests.parity.forests import AGENTS, FORESTS
from tests.unit.algorithms.rollouts import sample, turn

COMPARE = ["grpo", "rloo", "dr_grpo", "gigpo"]
"""Those that compare the rollouts of a group with each other."""
ALL = [*COMPARE, "reinforce_pp", "ppo"]
BUDGET = 60


@pytest.fixture(scope="module")
def stepped(folder):
    """What a step makes of samples: the batch and all metrics. A learner takes one bad batch after the other."""

    @cache
    def learner(name, settings):
        optim = OptimConfig(lr=1e-2)
        config = LearnerConfig(device="cpu", token_budget=BUDGET, optim=optim, critic=optim, critic_kind="shared")
        return Learner(folder, config, make(AlgorithmConfig(name=name, settings=dict(settings)), config))

    def step(name, samples, **settings):
        taught = learner(name, tuple(settings.items()))
        before, steps = taught.digest(), taught.optim.steps
        trains = False
        try:
            batch = assemble(samples, agents=["main"], budget=BUDGET)
            taught.score(batch)
            metrics = taught.algorithm.assign_credit(batch) | taught.update(batch)
            trains = metrics["actor/skipped"] == 0.0
        finally:
            assert (taught.digest() != before) == (taught.optim.steps > steps) == trains
            assert all(weight.grad is None for weight in taught.model.parameters())
        assert all(math.isfinite(value) for value in metrics.values()), metrics
        return batch, metrics

    return step


def pair(*turns, **more):
    """A group whose two members would teach something if their turns did."""
    return [sample(m, float(m), *turns, **more) for m in range(2)]


def renamed(given, group):
    """The same rollout in another group."""
    id = f"{group}.{given.rollout.member}"
    turns = [replace(t, rollout=id, id=t.id.replace(given.rollout.id, id)) for t in given.turns]
    return type(given)(replace(given.rollout, id=id, group=group), turns)


BAD = {
    "no_reward": [sample(m, None, turn(2, ids=[3, m])) for m in range(3)],
    "empty": pair(),
    "abandoned": pair(turn(3, finish="abandoned"), turn(2, finish="error")),
    "greedy": pair(turn(3, warmth=0.0)),
    "truncated_sampling": pair({**turn(3), "sampling": Sampling(top_p=0.5)}),
    "untrained": pair(turn(3, agent="judge")),
    "over_budget": pair(turn(3, prompt=[1] * BUDGET)),
    "failed:lost_runner": pair(turn(3), status="failed", cause="lost_runner"),
    "outside": pair({**turn(1), "prompt_ids": [], "response_ids": [], "logprobs": []}),
}
EQUAL = {
    "zero_variance": [sample(m, 0.5, turn(2, ids=[3, m])) for m in range(3)],
    "group_of_one": [sample(0, 1.0, turn(2), group=group) for group in ("g1", "g2")],
}


@pytest.mark.parametrize("reason", BAD)
@pytest.mark.parametrize("name", ALL)
def test_a_batch_of_nothing_else_trains_nothing_and_says_why(stepped, name, reason):
    batch, metrics = stepped(name, BAD[reason])
    assert metrics["actor/skipped"] == 1.0
    assert metrics[f"filter/{reason}"] == len(BAD[reason])
    assert set(batch.dropped.values()) == {reason}
    assert reason in REASONS or reason.startswith("failed:")
    assert explain(reason)


@pytest.mark.parametrize("reason", EQUAL)
@pytest.mark.parametrize("name", COMPARE)
def test_nothing_to_compare_trains_nothing_and_says_why(stepped, name, reason):
    batch, metrics = stepped(name, EQUAL[reason])
    assert metrics["actor/skipped"] == 1.0
    assert metrics[f"filter/{reason}"] == len(EQUAL[reason])
    assert set(batch.dropped.values()) == {reason}


def test_who_needs_no_group_trains_without_one(stepped):
    """A critic, and a baseline over the whole batch, are there for a rollout that is alone in its group."""
    alone = [sample(0, total, turn(2, ids=[3, k]), group=f"g{k}") for k, total in enumerate((1.0, 0.0))]
    for name in ("ppo", "reinforce_pp"):
        batch, metrics = stepped(name, alone)
        assert metrics["actor/skipped"] == 0.0
        assert batch.dropped == {}


def test_a_baseline_over_the_batch_needs_two_totals(stepped):
    for reason, samples in (("zero_variance", EQUAL["zero_variance"]), ("group_of_one", [sample(0, 1.0, turn(2))])):
        batch, metrics = stepped("reinforce_pp", samples)
        assert metrics["actor/skipped"] == 1.0
        assert set(batch.dropped.values()) == {reason}


@pytest.mark.parametrize("name", ALL)
def test_no_rollouts_at_all(stepped, name):
    _, metrics = stepped(name, [])
    assert metrics["actor/skipped"] == 1.0
    assert metrics["tree/tokens"] == 0.0


@pytest.mark.parametrize("name", ALL)
def test_filters_that_leave_nothing_are_counted(stepped, name):
    cut_off = [sample(m, float(m), turn(2, ids=[3, m], finish="length")) for m in range(2)]
    for overlong in ("drop", "mask"):
        batch, metrics = stepped(name, cut_off, overlong=overlong)
        assert metrics["actor/skipped"] == 1.0
        assert set(batch.dropped.values()) == {"overlong"}
        assert metrics["filter/overlong"] == 2.0


@pytest.mark.parametrize("name", ALL)
def test_one_good_group_trains_beside_every_bad_one(stepped, name):
    """With the weights that it has alone."""
    good = [sample(m, float(m), turn(2, ids=[3, m]), turn(1, ids=[5 + m]), group="good") for m in range(2)]
    bad = [renamed(one, f"bad{k}") for k, samples in enumerate(BAD.values()) for one in samples]
    batch, metrics = stepped(name, [*bad, *good])
    assert metrics["actor/skipped"] == 0.0
    for reason, samples in BAD.items():
        assert metrics[f"filter/{reason}"] == len(samples)
    weighted = np.unique(batch.entries.rollout[batch.entries.weight > 0])
    assert [batch.samples[s].rollout.id for s in weighted] == ["good.0", "good.1"]
    alone = stepped(name, good)[0].entries.weight
    assert np.array_equal(batch.entries.weight[batch.entries.weight > 0], alone)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("logprobs", [[-1.0, math.nan], [-1.0, -math.inf], [-1.0]])
def test_a_logprob_that_is_no_number_never_gets_to_the_learner(stepped, name, logprobs):
    """It is our own engine's or gateway's, so the step stops and names the turn; whoever resumes loses nothing."""
    samples = [sample(0, 1.0, turn(2)), sample(1, 0.0, {**turn(2), "logprobs": logprobs})]
    with pytest.raises(AssertionError, match=r"g1\.1/1/0 has"):
        stepped(name, samples)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.filterwarnings("ignore:invalid value")
def test_a_reward_that_is_no_number_trains_nobody(stepped, name, value):
    """It is refused where it enters. Should one come through, the update is refused with the weights as they were."""
    samples = [sample(0, value, turn(2, ids=[3, 4])), sample(1, 0.0, turn(2)), sample(2, 1.0, turn(2, ids=[4, 4]))]
    with pytest.raises(LearnerError, match="the loss is"):
        stepped(name, samples)


@settings(deadline=None, max_examples=60)
@given(FORESTS, st.sampled_from(ALL), st.integers(3, 30), st.sampled_from(["keep", "drop", "mask"]))
def test_who_is_not_trained_is_counted_and_who_is_counted_is_not_trained(samples, name, budget, overlong):
    """Of any rollouts: each one either carries weight or has a reason, and so does each of its turns."""
    batch = assemble(samples, agents=AGENTS, budget=budget)
    batch.entries.value[:] = np.sin(np.arange(len(batch.entries)))
    batch.entries.proximal[:] = -1.0
    make(AlgorithmConfig(name=name, settings={"overlong": overlong, "max_turns": 2}), LearnerConfig()).assign_credit(
        batch
    )
    weight = batch.entries.weight
    carries = {batch.samples[s].rollout.id for s in np.unique(batch.entries.rollout[weight > 0])}
    assert carries | batch.dropped.keys() == {one.rollout.id for one in samples}
    assert not carries & batch.dropped.keys()
    for t, one in enumerate(batch.turns):
        left_out = batch.skipped[t] is not None or one.rollout in batch.dropped
        assert (weight[batch.rows(t)] == 0).all() if left_out else (weight[batch.rows(t)] > 0).all()


def test_a_critic_whose_gradient_is_refused_leaves_the_policy_as_it_was(folder):
    """Both are looked at before either is changed, and neither keeps gradients."""
    config = LearnerConfig(device="cpu", token_budget=BUDGET)
    taught = Learner(folder, config, make(AlgorithmConfig(name="ppo"), config))
    before = taught.digest()
    batch = assemble(pair(turn(3)), agents=["main"], budget=BUDGET)
    taught.score(batch)
    taught.algorithm.assign_credit(batch)
    batch.entries.ret[:] = 1.5e19
    with pytest.raises(LearnerError, match=r"the critic's gradient .* lower learner.critic.lr"):
        taught.update(batch)
    assert (taught.digest(), taught.optim.steps, taught.critic_optim.steps) == (before, 0, 0)
    assert all(weight.grad is None for module in (taught.model, taught.critic) for weight in module.parameters())
