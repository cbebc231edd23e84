"""Which stored rollouts are imitated, and how much each counts."""

from collections import Counter

import numpy as np
import pytest

from strop.algorithms import make
from strop.algorithms.offline import Candidate
from strop.algorithms.sft import SFT
from strop.config import AlgorithmConfig, LearnerConfig
from strop.errors import ConfigError
from strop.trajectory import Sample, assemble
from strop.types import Reward, Rollout, Task, Turn


def candidate(n: int, reward: float | None, *, task: str = "t", tokens: bytes | None = None) -> Candidate:
    return Candidate(source="runs/a", task=task, key=task, reward=reward, tokens=tokens or str(n).encode())


def test_rollouts_are_left_out_under_their_reasons() -> None:
    given = [
        candidate(0, 1.0),
        candidate(1, None),
        candidate(2, 0.4),
        candidate(3, 2.0),
        candidate(4, 3.0),
        candidate(5, 2.5, tokens=b"4"),  # said what the one before did, and got less for it
        candidate(6, 1.5, task="u"),
    ]
    items, left = SFT(min_reward=0.5, top=2).choose(given)
    assert items == [(3,), (4,), (6,)]
    assert left == Counter(no_reward=1, min_reward=1, duplicate=1, top=1)
    assert len(items) + left.total() == len(given)


def test_without_a_filter_everything_is_taken_in_its_order() -> None:
    given = [candidate(0, 0.0), candidate(1, None), candidate(2, 5.0), candidate(3, 5.0, tokens=b"2")]
    assert SFT(dedupe=False).choose(given) == ([(0,), (1,), (2,), (3,)], Counter())


def sample(n: int, reward: float | None, length: int, *, weight: int = 1) -> Sample:
    rewards = () if reward is None else (Reward(value=reward),)
    rollout = Rollout(
        id=f"g{n}.0", group=f"g{n}", member=0, task=Task(id="t"), status="succeeded", created=0.0, rewards=rewards
    )
    turn = Turn(
        id=f"g{n}.0/1/0", rollout=rollout.id, attempt=1, prompt_ids=[1, 2], response_ids=[3] * length,
        logprobs=[0.0] * length, versions=[(0, "data")], requested={} if weight else {"weight": 0}, finish="stop",
        started=0.0, ended=0.0,
    )  # fmt: skip
    return Sample(rollout, [turn])


def weigh(samples: list[Sample], **settings: object) -> tuple[np.ndarray, dict[str, float]]:
    """What a token of each sample counts, and metrics."""
    batch = assemble(samples, agents=("main",), budget=100)
    metrics = make(AlgorithmConfig(name="sft", settings=dict(settings)), LearnerConfig()).assign_credit(batch)
    return batch.entries.weight[batch.starts[:-1]], metrics


def test_every_token_counts_the_same_by_default() -> None:
    weights, metrics = weigh([sample(0, 1.0, 3), sample(1, None, 5)])
    assert weights == pytest.approx([1 / 8, 1 / 8])
    assert not metrics


def test_a_rollout_counts_as_much_as_it_got() -> None:
    """Weights have mean 1 over the rollouts that count; the others are in no denominator."""
    weights, metrics = weigh(
        [sample(0, 1.0, 3), sample(1, 3.0, 3), sample(2, 0.0, 9), sample(3, -1.0, 9), sample(4, None, 9)],
        weighting="reward",
    )
    assert weights == pytest.approx([0.5 / 6, 1.5 / 6, 0, 0, 0])
    assert metrics == {"filter/no_reward": 1.0, "filter/no_weight": 2.0}


@pytest.mark.parametrize("shift", [0.0, 1e6])
def test_a_baseline_changes_nothing_about_exponential_weights(shift: float) -> None:
    weights, _ = weigh([sample(0, shift, 2), sample(1, shift + 2.0, 2)], weighting="exponential", beta=2.0)
    whole = (1 + np.e) / 2
    assert weights == pytest.approx([1 / whole / 4, np.e / whole / 4])


def test_answers_of_weight_0_are_counted_and_carry_no_loss() -> None:
    weights, metrics = weigh([sample(0, None, 3), sample(1, None, 4, weight=0)])
    assert weights == pytest.approx([1 / 3, 0])
    assert metrics == {"filter/zero_weight": 1.0}


def test_a_beta_of_0_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"algorithm\.settings\.beta"):
        SFT(beta=0)
