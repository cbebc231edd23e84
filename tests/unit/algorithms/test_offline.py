"""What a stored rollout got, as selection and weighting see it."""

from strop.algorithms.dpo import DPO
from strop.algorithms.offline import measure_reward
from strop.types import Reward
from tests.unit.algorithms.rollouts import batch_of, credited, sample, turn

NEAT = Reward(name="neat", value=3.0, turn="g1.0/1/1")


def measure(*rewards, agent="main", choices=1):
    one = sample(0, None, turn(agent=agent, choices=choices), turn(agent=agent), rewards=rewards)
    return measure_reward(one.rollout, one.turns, {"reward": 1.0, "neat": 0.5}, lambda name: name == "main")


def test_turns_and_agents_that_are_trained_count():
    assert measure((1.0, 0)) == 1.0
    assert measure((1.0, 0), NEAT, Reward(value=4.0)) == 6.5
    assert measure((1.0, 0), (2.0, "main"), (9.0, "judge")) == 3.0
    assert measure((1.0, 0), choices=4) == 0.25
    assert measure((1.0, 0), agent="judge") == 0.0
    assert measure(Reward(name="other", value=1.0, turn="g1.0/1/0")) is None


def test_rewards_of_turns_say_which_rollout_is_preferred():
    batch = batch_of(sample(0, 0.5, turn()), sample(1, None, turn(), rewards=[(1.0, 0)]))
    batch.entries.proximal[:] = batch.entries.ref[:] = -1.0
    DPO().assign_credit(batch)
    assert (batch.entries.advantage > 0).tolist() == [False, True]


def test_rewards_of_turns_weigh_rollouts():
    samples = sample(0, 1.0, turn()), sample(1, None, turn(), group="g2", rewards=[(3.0, 0)])
    batch, metrics = credited("sft", *samples, weighting="reward")
    assert batch.entries.weight.tolist() == [0.25, 0.75]
    assert not metrics
