import subprocess
import sys

import msgspec
import numpy as np
import pytest

from strop.algorithms import make as make_algorithm
from strop.algorithms.rewards import total_reward
from strop.config import AlgorithmConfig, LearnerConfig
from strop.trajectory import Sample, assemble
from strop.types import Reward, Rollout, Task, Turn


def sample(member, reward=None, lengths=(2,), group="g1", rewards=(), choices=1, agents=None, **more):
    id = f"{group}.{member}"
    turns = [
        Turn(
            id=f"{id}/1/{k}", rollout=id, attempt=1, agent=(agents or ["main"] * len(lengths))[k],
            prompt_ids=[1, 2], response_ids=[3 + k] * n, logprobs=[-1.0] * n, versions=[(0, "1.0")], finish="stop",
            choices=choices, started=float(k), ended=k + 0.5,
        )
        for k, n in enumerate(lengths)
    ]  # fmt: skip
    given = (*rewards, *(() if reward is None else (Reward(value=reward),)))
    fields = {"status": "succeeded", **more}
    return Sample(
        Rollout(id=id, group=group, member=member, task=Task(id="t"), created=0.0, rewards=given, **fields), turns
    )


def credit(*samples, budget=1000, agents=("main",), rewards=None, **settings):
    batch = assemble(samples, agents=agents, budget=budget)
    config = AlgorithmConfig(rewards=rewards or {"reward": 1.0}, settings=settings)
    metrics = make_algorithm(config, LearnerConfig()).assign_credit(batch)
    return batch, metrics


def by_rollout(batch, column="advantage"):
    values = getattr(batch.entries, column)
    return {s.rollout.id: values[batch.entries.rollout == k].tolist() for k, s in enumerate(batch.samples)}


def test_advantage_is_the_distance_to_the_groups_mean():
    batch, metrics = credit(sample(0, 1.0), sample(1, 0.0), sample(2, 0.5), normalize_std=False)
    assert by_rollout(batch) == {"g1.0": [0.5, 0.5], "g1.1": [-0.5, -0.5], "g1.2": [0.0, 0.0]}
    assert batch.entries.weight == pytest.approx(1 / 6)
    assert metrics["critic/rewards/mean"] == 0.5
    assert metrics["critic/advantages/max"] == 0.5


def test_std_is_unbiased_as_in_verl():
    rewards = [1.0, 0.0, 0.5, 0.25]
    batch, _ = credit(*(sample(k, r) for k, r in enumerate(rewards)))
    expected = (np.array(rewards) - np.mean(rewards)) / (np.std(rewards, ddof=1) + 1e-6)
    assert [v[0] for v in by_rollout(batch).values()] == pytest.approx(expected.tolist())


def test_a_rollout_counts_once_however_many_turns_it_has():
    batch, _ = credit(sample(0, 1.0, lengths=[5] * 20), sample(1, 0.0), normalize_std=False)
    assert set(by_rollout(batch)["g1.0"]) == {0.5}
    assert set(by_rollout(batch)["g1.1"]) == {-0.5}


def test_what_is_dropped_is_dropped_after_the_baseline():
    batch, metrics = credit(
        sample(0, 1.0), sample(1, 0.0), sample(2, 1.0, lengths=[60]), sample(3, 1.0, lengths=[]),
        budget=50, normalize_std=False,
    )  # fmt: skip
    assert batch.dropped == {"g1.2": "over_budget", "g1.3": "empty"}
    assert by_rollout(batch)["g1.0"] == [0.25, 0.25]
    assert by_rollout(batch)["g1.1"] == [-0.75, -0.75]
    assert (metrics["filter/over_budget"], metrics["filter/empty"]) == (1, 1)


def test_failures_count_by_cause():
    batch, metrics = credit(
        sample(0, 1.0),
        sample(1, 1.0),
        sample(2, 1.0, status="failed", cause="lost_runner"),
        sample(3, 1.0, status="failed", cause="timeout"),
        normalize_std=False,
    )
    assert by_rollout(batch)["g1.0"] == pytest.approx([1 / 3] * 2)
    assert by_rollout(batch)["g1.3"] == pytest.approx([-2 / 3] * 2)
    assert by_rollout(batch, "weight")["g1.2"] == [0, 0]
    assert batch.entries.weight.sum() == pytest.approx(1.0)
    assert metrics["filter/failed:lost_runner"] == 1
    assert metrics["critic/rewards/mean"] == pytest.approx(2 / 3)


def test_groups_that_teach_nothing_are_filtered_and_counted():
    batch, metrics = credit(
        sample(0, 1.0),
        sample(1, 1.0),
        sample(0, 1.0, group="g2"),
        sample(0, 1.0, group="g3"),
        sample(1, 0.0, group="g3"),
    )
    assert batch.dropped == {"g1.0": "zero_variance", "g1.1": "zero_variance", "g2.0": "group_of_one"}
    assert (metrics["filter/zero_variance"], metrics["filter/group_of_one"]) == (2, 1)
    assert by_rollout(batch, "weight")["g1.0"] == [0, 0]
    # Who agreed is counted, so that a step is no larger for it; who has nobody to compare with is not.
    assert by_rollout(batch, "weight")["g3.0"] == [0.125, 0.125]


SOLVED = [sample(m, 1.0, group="g1") for m in range(2)] + [sample(m, float(m), group="g2") for m in range(2)]


def test_groups_that_agree_do_not_change_the_step_of_the_others():
    """The mean is over all that was sampled: with half of the tasks solved, the step is half as large."""
    alone, _ = credit(*SOLVED[2:])
    beside, _ = credit(*SOLVED)
    assert by_rollout(alone, "weight")["g2.0"] == [0.25, 0.25]
    assert by_rollout(beside, "weight")["g2.0"] == [0.125, 0.125]
    filtered, _ = credit(*SOLVED, filter_groups=["zero_variance", "group_of_one"])
    assert by_rollout(filtered, "weight")["g2.0"] == [0.25, 0.25]


@pytest.mark.parametrize("more", [{"kl": "loss"}, {"entropy_coef": 0.01}])
def test_groups_that_agree_carry_kl_and_entropy(more):
    batch, metrics = credit(*SOLVED, **more)
    assert set(batch.entries.weight) == {0.125}
    assert by_rollout(batch)["g1.0"] == [0, 0]
    assert batch.dropped == {}
    assert "filter/zero_variance" not in metrics
    assert batch.teaching().tolist() == [1]
    filtered, _ = credit(*SOLVED, filter_groups=["zero_variance"], **more)
    assert by_rollout(filtered, "weight") == {"g1.0": [0, 0], "g1.1": [0, 0], "g2.0": [0.25] * 2, "g2.1": [0.25] * 2}


def test_what_is_left_out_for_another_reason_is_not_counted():
    long = sample(2, 1.0, lengths=[4], group="g1")
    cut = [msgspec.structs.replace(turn, finish="length") for turn in long.turns]
    batch, _ = credit(*SOLVED, Sample(long.rollout, cut), overlong="drop")
    assert batch.dropped == {"g1.0": "zero_variance", "g1.1": "zero_variance", "g1.2": "overlong"}
    assert by_rollout(batch, "weight")["g2.0"] == [0.125, 0.125]


def test_a_group_of_one_trains_on_its_bare_reward_where_it_is_not_filtered():
    batch, _ = credit(sample(0, 3.0), filter_groups=[])
    assert by_rollout(batch)["g1.0"] == pytest.approx([3.0] * 2)
    assert batch.dropped == {}


def test_groups_are_compared_only_within():
    batch, _ = credit(
        *(sample(k, 10.0 + k, group="g1") for k in range(2)), *(sample(k, float(k), group="g2") for k in range(2)),
        normalize_std=False,
    )  # fmt: skip
    assert [v[0] for v in by_rollout(batch).values()] == [-0.5, 0.5, -0.5, 0.5]


def test_a_missing_reward_is_a_reason_not_a_zero():
    batch, metrics = credit(sample(0, 1.0), sample(1, 0.0), sample(2), normalize_std=False)
    assert batch.dropped == {"g1.2": "no_reward"}
    assert by_rollout(batch)["g1.0"] == [0.5, 0.5]
    assert metrics["filter/no_reward"] == 1


def test_total_is_the_weighted_sum_and_the_last_reward_wins():
    rewards = [Reward(name="format", value=9.0), Reward(name="format", value=2.0), Reward(name="seen", value=7.0)]
    rollout = sample(0, 1.0, rewards=rewards).rollout
    assert total_reward(rollout, {"reward": 1.0, "format": 0.5}) == 2.0
    assert total_reward(rollout, {"reward": 1.0, "absent": 0.5}) == 1.0
    assert total_reward(rollout, {"absent": 0.5}) is None


def test_rewards_in_no_total_are_counted():
    _, metrics = credit(sample(0, 1.0, rewards=[Reward(name="seen", value=7.0)]), sample(1, 0.0))
    assert metrics["filter_rewards/seen"] == 1


def test_a_turns_own_reward_reaches_that_turn():
    def own(member, turn, value):
        return Reward(name="reward", value=value, turn=f"g1.{member}/1/{turn}")

    batch, _ = credit(
        sample(0, 1.0, lengths=[1, 1, 1], rewards=[own(0, 0, 1.0), own(0, 1, 0.0), own(0, 2, 0.5)]),
        sample(1, 1.0, lengths=[1, 1], rewards=[own(1, 1, 0.0)]),
        normalize_std=False,
    )
    # The mean of the like is over rollouts: (0.5 + 0) / 2. Totals are equal, yet the turns tell the rollouts apart.
    assert by_rollout(batch) == {"g1.0": [0.75, -0.25, 0.25], "g1.1": [0.0, -0.25]}
    assert batch.dropped == {}


def test_an_agents_reward_reaches_its_turns_and_is_compared_with_the_like():
    def won(agent, value):
        return Reward(name="reward", value=value, agent=agent)

    batch, _ = credit(
        sample(0, 0.0, lengths=[1, 1], agents=["wolf", "villager"], rewards=[won("wolf", 1.0), won("villager", 0.0)]),
        sample(1, 0.0, lengths=[1, 1], agents=["wolf", "villager"], rewards=[won("wolf", 0.0), won("villager", 0.0)]),
        agents=["wolf", "villager"],
        normalize_std=False,
    )
    assert by_rollout(batch) == {"g1.0": [0.5, 0.0], "g1.1": [-0.5, 0.0]}


def test_choices_of_one_request_share_its_weight():
    batch, _ = credit(sample(0, 1.0, lengths=[1, 1], choices=2), sample(1, 0.0, lengths=[1]))
    assert by_rollout(batch, "weight") == {"g1.0": [0.25, 0.25], "g1.1": [0.5]}


def test_an_empty_batch_has_no_weight_and_says_why():
    batch, metrics = credit(sample(0, 1.0, lengths=[]), sample(1, 0.0, lengths=[]))
    assert len(batch.entries) == 0
    assert metrics["filter/empty"] == 2


def test_proximal_is_asked_for_only_when_there_is_a_second_optimizer_step():
    assert make_algorithm(AlgorithmConfig(), LearnerConfig(minibatches=1)).needs == frozenset()
    assert make_algorithm(AlgorithmConfig(), LearnerConfig(minibatches=2)).needs == {"proximal"}


def test_this_room_runs_without_torch():
    code = "import sys, strop.trajectory, strop.algorithms.grpo; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
