"""The token tree against the plainest thing that could be right: one row per turn, stock eager attention, autograd.

In float64 everything agrees to 1e-9: logprobs, entropies, values, loss, metrics and every gradient. In float32, with
Hugging Face as it is, to what `FLOAT32` says.
"""

from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from strop.trajectory import pack
from tests.parity.forests import EXAMPLE, FORESTS
from tests.parity.rows import unrounded
from tests.parity.trees import CASES, Both, longest, small

FLOAT64 = 1e-9
FLOAT32 = 2e-5
"""Relative to the largest number of a tensor. The sums are the same and their order is not: float32 has 6e-8."""

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("name", CASES)
def test_one_of_everything(llama, name):
    """Whole, and cut as small as it can be, its blocks computed again and everything else in small pieces too."""
    tight = longest(EXAMPLE)
    with unrounded():
        whole = Both(llama, CASES[name], EXAMPLE, budget=1000)
        whole.compare_scores(FLOAT64)
        metrics = whole.compare_update(FLOAT64)
        assert (metrics["actor/pg_clipfrac"] > 0) == CASES[name].moved
        assert metrics["tree/unique_tokens"] < metrics["tree/tokens"]
        assert len(pack(whole.batch, 1000)) == 1
        with small():
            cut = Both(llama, replace(CASES[name], recompute=True), EXAMPLE, budget=tight)
            cut.compare_scores(FLOAT64)
            cut.compare_update(FLOAT64)
        assert len(pack(cut.batch, tight)) > 3


@pytest.mark.parametrize("name", ["grpo, kl and correction", "ppo", "ppo, one trunk", "ppo, lora"])
def test_a_model_with_tied_weights(qwen3, name):
    with unrounded():
        both = Both(qwen3, CASES[name], EXAMPLE, budget=40)
        both.compare_scores(FLOAT64)
        both.compare_update(FLOAT64)


@pytest.mark.parametrize("name", CASES)
def test_in_float32_beside_stock_models(llama, name):
    both = Both(llama, CASES[name], EXAMPLE, budget=40, dtype=torch.float32)
    both.compare_scores(FLOAT32)
    both.compare_update(FLOAT32)


def any_forest(llama, samples, name, more, recompute, block):
    budget = longest(samples) + more
    with unrounded(), small(block):
        both = Both(llama, replace(CASES[name], recompute=recompute), samples, budget)
        both.compare_scores(FLOAT64)
        both.compare_update(FLOAT64)
    event(f"{len(pack(both.batch, budget))} pieces")


DRAWN = (FORESTS, st.sampled_from(sorted(CASES)), st.integers(0, 60), st.booleans(), st.sampled_from([1, 8, 128]))
UNTIMED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])


@settings(UNTIMED, max_examples=15)
@given(*DRAWN)
def test_any_forest(llama, samples, name, more, recompute, block):
    any_forest(llama, samples, name, more, recompute, block)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@settings(UNTIMED, max_examples=500)
@given(*DRAWN)
def test_very_many_forests(llama, samples, name, more, recompute, block):
    any_forest(llama, samples, name, more, recompute, block)
