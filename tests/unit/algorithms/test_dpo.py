"""Which stored rollouts are compared; the loss itself is compared with autograd in tests/parity."""

from collections import Counter

import pytest

from strop.algorithms import make
from strop.algorithms.dpo import DPO
from strop.algorithms.offline import Candidate
from strop.config import AlgorithmConfig, LearnerConfig
from strop.errors import ConfigError
from strop.trajectory import assemble
from tests.parity.forests import Move, forest


def candidate(n: int, reward: float | None, key: str = "a", tokens: bytes | None = None) -> Candidate:
    return Candidate(source="runs/a", task="t", key=key, reward=reward, tokens=tokens or str(n).encode())


def test_the_best_is_compared_with_the_worst_of_its_group() -> None:
    given = [candidate(0, 0.5), candidate(1, 1.0), candidate(2, 0.0), candidate(3, 1.0, "b"), candidate(4, None, "b")]
    assert DPO().choose(given) == ([(1, 2)], Counter(no_pair=2, no_reward=1))


def test_all_pairs_differ_by_the_margin_at_least() -> None:
    given = [candidate(0, 0.5), candidate(1, 1.0), candidate(2, 0.0), candidate(3, 1.0)]
    assert DPO(pairs="all").choose(given)[0] == [(1, 0), (1, 2), (3, 0), (3, 2), (0, 2)]
    assert DPO(pairs="all", margin=0.6).choose(given) == ([(1, 2), (3, 2)], Counter(no_pair=1))


def test_the_very_same_tokens_are_no_pair() -> None:
    given = [candidate(0, 1.0, tokens=b"x"), candidate(1, 0.0, tokens=b"x"), candidate(2, 1.0)]
    assert DPO().choose(given) == ([], Counter(equal_pair=2, no_pair=1))
    assert DPO(pairs="all").choose(given) == ([(2, 1)], Counter(equal_pair=1))


def test_the_same_pair_is_learnt_once() -> None:
    given = [candidate(0, 1.0), candidate(1, 0.0), candidate(2, 1.0, "b", b"0"), candidate(3, 0.0, "b", b"1")]
    assert DPO().choose(given) == ([(0, 1)], Counter(duplicate=2))
    assert DPO(dedupe=False).choose(given)[0] == [(0, 1), (2, 3)]


def test_one_whose_other_is_left_out_is_left_out_too() -> None:
    samples = forest([[(1.0, [Move()]), (0.0, [Move(finish="abandoned")])], [(1.0, [Move()]), (0.0, [Move()])]])
    batch = assemble(samples, agents=("main",), budget=100)
    batch.entries.proximal[:] = batch.entries.ref[:] = -1.0
    metrics = DPO().assign_credit(batch)
    assert batch.dropped == {"g0.0": "no_pair", "g0.1": "abandoned"}
    assert metrics["actor/dpo_loss"] == pytest.approx(0.693147, abs=1e-6)
    assert set(batch.entries.group[batch.entries.weight > 0].tolist()) == {1}


def test_several_optimizer_steps_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"learner\.minibatches is 2, and dpo makes one optimizer step per step"):
        make(AlgorithmConfig(name="dpo"), LearnerConfig(minibatches=2))
