import numpy as np
import pytest

from strop.algorithms import make as make_algorithm
from strop.config import AlgorithmConfig, LearnerConfig
from strop.errors import ConfigError
from strop.trajectory import assemble
from tests.unit.algorithms.test_grpo import by_rollout, sample


def credit(*samples, teacher=-1.5, failures=None, **settings):
    """With a student's logprob of -1 for every token, as it was sampled."""
    given = {} if failures is None else {"failures": failures}
    batch = assemble(samples, agents=("main",), budget=1000, **given)
    batch.entries.proximal[:] = -1.0
    batch.entries.teacher[:] = teacher
    algorithm = make_algorithm(AlgorithmConfig(name="distill", settings={"teacher": "t", **settings}), LearnerConfig())
    return batch, algorithm.assign_credit(batch)


def test_a_tokens_advantage_is_what_the_teacher_finds_likelier():
    batch, metrics = credit(sample(0), sample(1, lengths=(1, 3)), teacher=np.array([-1.5, -0.2, -1, -4, -1, -1]))
    assert by_rollout(batch)["g1.0"] == pytest.approx([-0.5, 0.8])
    assert by_rollout(batch)["g1.1"] == pytest.approx([0, -3, 0, 0])
    assert batch.entries.weight == pytest.approx(1 / 6)
    assert metrics["distill/kl/mean"] == pytest.approx((0.5 - 0.8 + 3) / 6)
    assert (metrics["distill/kl/max"], metrics["distill/kl/min"]) == pytest.approx((3, -0.8))


def test_the_mean_of_the_kl_is_by_weight():
    _, metrics = credit(sample(0), sample(1, lengths=(6,)), teacher=-1.0 - np.array([3.0] * 2 + [1.0] * 6))
    assert metrics["distill/kl/mean"] == pytest.approx((3 * 2 + 6) / 8)
    _, metrics = credit(
        sample(0), sample(1, lengths=(6,)), teacher=-1.0 - np.array([3.0] * 2 + [1.0] * 6), aggregation="rollout-mean"
    )
    assert metrics["distill/kl/mean"] == pytest.approx(2.0)


def test_a_token_may_answer_for_later_ones_of_its_turn():
    teacher = -1.0 - np.array([1.0, 2.0, 4.0, 8.0])
    batch, metrics = credit(sample(0, lengths=(3, 1)), teacher=teacher, kl_discount=0.5)
    assert by_rollout(batch)["g1.0"] == pytest.approx([-3, -4, -4, -8])
    assert metrics["distill/kl/mean"] == pytest.approx(15 / 4), "told is the KL of each token"


def test_no_reward_is_needed_and_those_that_are_given_are_shown():
    batch, metrics = credit(sample(0), sample(1, 1.0), sample(2, 0.0))
    assert not batch.dropped
    assert (batch.entries.weight > 0).all()
    assert metrics["critic/rewards/mean"] == 0.5
    assert not [name for name in metrics if name.startswith("filter/")]
    _, metrics = credit(sample(0), sample(1))
    assert "critic/rewards/mean" not in metrics


def test_groups_of_one_and_equal_rewards_teach_as_well():
    batch, _ = credit(sample(0, 1.0), sample(1, 1.0), sample(0, 1.0, group="g2"))
    assert not batch.dropped
    assert (batch.entries.advantage == -0.5).all()


@pytest.mark.parametrize("failed", ["zero", "lowest", -1.0])
def test_failed_rollouts_count_as_configured(failed):
    """What the student said in them is its own all the same, unless they are excluded."""
    causes = {"agent_error": failed, "timeout": "exclude"}
    lost = [sample(k, status="failed", cause=cause) for k, cause in enumerate(causes)]
    batch, metrics = credit(*lost, sample(2), failures=causes)
    assert batch.dropped == {"g1.1": "failed:timeout"}
    assert [weights[0] > 0 for weights in by_rollout(batch, "weight").values()] == [True, False, True]
    assert metrics["filter/failed:timeout"] == 1


def test_rewards_may_count_beside_the_kl():
    batch, _ = credit(sample(0, 1.0), sample(1, 0.0), reward_coef=0.1, normalize_std=False)
    assert by_rollout(batch)["g1.0"] == pytest.approx([-0.5 + 0.05] * 2)
    assert by_rollout(batch)["g1.1"] == pytest.approx([-0.5 - 0.05] * 2)
    batch, _ = credit(sample(0, 1.0), sample(1, 0.0), sample(2), reward_coef=0.1)
    assert batch.dropped == {"g1.2": "no_reward"}


def test_credit_twice_is_credit():
    batch, _ = credit(sample(0), sample(1))
    algorithm = make_algorithm(AlgorithmConfig(name="distill"), LearnerConfig())
    before = batch.entries.advantage.copy()
    algorithm.assign_credit(batch)
    assert np.array_equal(batch.entries.advantage, before)


def test_a_token_that_nobody_scored_is_a_bug():
    with pytest.raises(AssertionError, match="has no teacher logprobs"):
        credit(sample(0), teacher=np.nan)


@pytest.mark.parametrize(("name", "value"), [("kl", "reward"), ("overlong", "penalise")])
def test_what_only_changes_rewards_is_refused_without_them(name, value):
    with pytest.raises(ConfigError, match=f"algorithm.settings.{name} is '{value}', which lowers rewards"):
        credit(sample(0), **{name: value})
    credit(sample(0, 1.0), sample(1, 0.0), reward_coef=1.0, overlong="penalise")
