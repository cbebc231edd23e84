"""Several ranks train what one process alone does: the same losses, gradients, metrics and weights."""

import math

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from strop.config import LoraConfig
from strop.engines.weight_files import read_probe, read_specs
from strop.learner.ranks import pack_evenly
from strop.models.checksums import verify
from strop.trajectory import assemble
from tests.parity.ranked import give_away, run_ranks, train, train_two
from tests.unit.learner.conftest import episodes, folder

__all__ = ["episodes", "folder"]

SMALL = LoraConfig(rank=4, alpha=8)
LARGE = LoraConfig(rank=8, alpha=8, targets=("q_proj", "down_proj"))
CASES = {
    "grpo, two optimizer steps": ({"minibatches": 2}, {"name": "grpo", "settings": {"kl": "loss", "kl_coef": 0.1}}),
    "recomputed": ({"gradient_checkpointing": True}, {"name": "rloo"}),
    "offloaded and recomputed": ({"offload": True, "gradient_checkpointing": True}, {"name": "grpo"}),
    "gspo": ({}, {"name": "grpo", "settings": {"loss": "gspo"}}),
    "ppo": ({}, {"name": "ppo"}),
    "ppo on a shared trunk": ({"critic_kind": "shared"}, {"name": "ppo"}),
    "lora": ({"lora": SMALL}, {"name": "grpo", "settings": {"kl": "loss", "kl_coef": 0.1}}),
}
BUDGET = 30
TIMES = ("timing_s/", "perf/", "tree/")


@pytest.mark.parametrize(
    "name", [name if name == "ppo" else pytest.param(name, marks=pytest.mark.slow) for name in CASES]
)
@pytest.mark.parametrize("count", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_ranks_train_what_one_process_does(tmp_path, folder, episodes, name, count) -> None:
    config, algorithm = CASES[name]
    samples = make_samples(episodes)
    given = {"folder": folder, "samples": samples, "config": {"token_budget": BUDGET, **config}, "algorithm": algorithm}
    (alone,) = run_ranks(1, train, tmp_path / "alone", **given)
    ranks = run_ranks(count, train, tmp_path / "ranks", **given)
    for found in ranks:
        assert_same(found, alone)


@pytest.mark.parametrize(
    "name", [name if name == "ppo" else pytest.param(name, marks=pytest.mark.slow) for name in CASES]
)
@pytest.mark.parametrize("count", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_pieces_that_two_ranks_run_together(tmp_path, folder, episodes, name, count) -> None:
    config, algorithm = CASES[name]
    samples = make_samples(episodes)
    given = {"folder": folder, "samples": samples, "config": {"token_budget": BUDGET, **config}, "algorithm": algorithm}
    (alone,) = run_ranks(1, train, tmp_path / "alone", **given)
    for found in run_ranks(count, train, tmp_path / "ranks", sequence_parallel=2, **given):
        assert_same(found, alone)


def test_after_a_step_that_teaches_nothing(tmp_path, folder, episodes) -> None:
    """Nothing but passes without gradients, then what others read of the weights, then training."""
    idle = episodes(rewards=lambda group, member: 1.0)
    config = {"token_budget": 60, "critic_kind": "shared"}
    given = {"folder": folder, "samples": episodes(), "config": config, "algorithm": {"name": "grpo"}, "steps": 1}
    (alone,) = run_ranks(1, train, tmp_path / "alone", idle=idle, **given)
    for found in run_ranks(2, train, tmp_path / "ranks", idle=idle, **given):
        assert_same(found, alone)


@pytest.mark.slow
def test_fewer_micro_batches_than_ranks(tmp_path, folder, episodes) -> None:
    samples, config = episodes(num_groups=1, num_members=2), {"token_budget": 1000}
    batch = assemble(samples, agents=["main"], budget=1000)
    assert 0 < len(pack_evenly(batch, 1000, None, 3)) < 3
    given = {"folder": folder, "samples": samples, "config": config, "algorithm": {"name": "ppo"}}
    (alone,) = run_ranks(1, train, tmp_path / "alone", **given)
    for found in run_ranks(3, train, tmp_path / "ranks", **given):
        assert_same(found, alone)


@pytest.mark.slow
def test_mixed_precision(tmp_path, folder, episodes) -> None:
    """Computed in bfloat16, of float32 weights: gradients differ by as much as bfloat16 rounds."""
    config = {"token_budget": BUDGET, "dtype": "bfloat16"}
    given = {"folder": folder, "samples": make_samples(episodes), "config": config, "algorithm": {"name": "grpo"}}
    (alone,) = run_ranks(1, train, tmp_path / "alone", steps=1, **given)
    for found in run_ranks(2, train, tmp_path / "ranks", steps=1, **given):
        (ours,), (theirs,) = found["gradients"], alone["gradients"]
        for name, gradient in theirs.items():
            assert ours[name].dtype == gradient.dtype == torch.float32
            assert float((ours[name] - gradient).norm() / gradient.norm()) < 0.05, name
        for name in ("actor/pg_loss", "actor/entropy", "actor/grad_norm"):
            assert found["metrics"][0][name] == pytest.approx(alone["metrics"][0][name], rel=0.02, abs=0.01), name


@pytest.mark.slow
def test_fewer_keys_than_ranks(tmp_path, folder, episodes) -> None:
    """Four ranks share four heads, which look at two keys."""
    given = {"folder": folder, "samples": episodes(), "config": {"token_budget": 60}, "algorithm": {"name": "grpo"}}
    (alone,) = run_ranks(1, train, tmp_path / "alone", **given)
    for found in run_ranks(4, train, tmp_path / "ranks", sequence_parallel=4, **given):
        assert_same(found, alone)


@pytest.mark.parametrize(
    ("before", "after"),
    [(2, 2), *(pytest.param(*each, marks=pytest.mark.slow) for each in ((2, 1), (1, 2), (2, 4), (4, 2)))],
)
def test_a_checkpoint_goes_on_with_any_number_of_ranks(tmp_path, folder, episodes, before, after) -> None:
    given = {"folder": folder, "samples": episodes(), "config": {"token_budget": 60}, "algorithm": {"name": "ppo"}}
    (alone,) = run_ranks(1, train, tmp_path / "alone", **given)
    run_ranks(before, train, tmp_path / "before", steps=1, save=tmp_path / "saved", **given)
    assert (tmp_path / "saved" / ".metadata").exists() == (before > 1)
    verify(tmp_path / "saved")
    AutoModelForCausalLM.from_pretrained(tmp_path / "saved")  # it is a plain folder
    for found in run_ranks(after, train, tmp_path / "after", steps=1, restore=tmp_path / "saved", **given):
        actor, critic = alone["gradients"][2:]
        assert_close(found["gradients"], [actor, critic])
        assert math.isclose(found["metrics"][0]["actor/lr"], alone["metrics"][1]["actor/lr"])
        assert_close([found["weights"]], [alone["weights"]], 1e-4)


@pytest.mark.parametrize("lora", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_folder_that_engines_read(tmp_path, folder, episodes, lora) -> None:
    config = {"token_budget": 60, **({"lora": SMALL} if lora else {})}
    given = {"folder": folder, "samples": episodes(), "config": config}
    (alone,) = run_ranks(1, give_away, tmp_path / "alone", to=tmp_path / "1", **given)
    first, second = run_ranks(2, give_away, tmp_path / "ranks", to=tmp_path / "2", **given)
    ours, theirs = (load_file(next((tmp_path / name).glob("*.safetensors"))) for name in "21")
    assert_close([ours], [theirs])
    assert {each.name for each in (tmp_path / "2").iterdir()} == {each.name for each in (tmp_path / "1").iterdir()}
    assert "the weights cannot be written to" in first["refused"]
    assert not second["refused"]
    assert first["specs"] == alone["specs"]
    if lora:
        assert first["probe"].distance(alone["probe"].logprobs) < 1e-6
        return
    assert read_specs(tmp_path / "2") == first["specs"]
    probe, whole = (read_probe(tmp_path / name) for name in "21")
    assert probe is not None
    assert whole is not None
    assert probe.distance(whole.logprobs) < 1e-6
    for found in (first, second):
        assert "sharded over several ranks have no handles" in found["handles"]
        assert "has values that are not finite numbers" in found["handles"]


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 4])
def test_two_policies(tmp_path, folder, episodes, count) -> None:
    configs = [{"token_budget": 60, "lora": SMALL}, {"token_budget": 40, "lora": LARGE}]
    given = {"folder": folder, "samples": episodes(), "configs": configs}
    (alone,) = run_ranks(1, train_two, tmp_path / "alone", **given)
    for found in run_ranks(count, train_two, tmp_path / "ranks", **given):
        for ours, theirs in zip(found, alone, strict=True):
            assert_same(ours, theirs)


def make_samples(episodes):
    """Which come to an odd number of micro-batches, so that some rank repeats one."""
    samples = episodes(num_members=3)
    pieces = pack_evenly(assemble(samples, agents=["main"], budget=BUDGET), BUDGET, None, 2)
    assert len(pieces) % 2
    return samples


def assert_close(found, expected, limit: float = 1e-6) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.keys() == theirs.keys()
        assert max(float(tensor.abs().max()) for tensor in theirs.values()) > 1e-4
        for name, tensor in theirs.items():
            assert float((ours[name] - tensor).abs().max()) <= limit, name


def assert_same(found, expected, limit: float = 1e-6) -> None:
    assert len(found["gradients"]) == len(expected["gradients"]) > 0
    assert_close(found["gradients"], expected["gradients"], limit)
    for ours, theirs in zip(found["metrics"], expected["metrics"], strict=True):
        assert ours.keys() == theirs.keys()
        for name in theirs:
            if not name.startswith(TIMES):
                assert math.isclose(ours[name], theirs[name], rel_tol=limit, abs_tol=limit), name
        assert theirs["training/rollout_logprobs_checked"] > 0
    for ours, theirs in zip(found["columns"], expected["columns"], strict=True):
        for name, column in theirs.items():
            assert np.allclose(ours[name], column, atol=limit, equal_nan=True), name
    for name, tensor in expected["weights"].items():
        apart = (found["weights"][name] - tensor).abs()
        # Adam's first steps are as long where a gradient is nothing but rounding.
        told = [gradients[name].abs() > 1e-4 for gradients in expected["gradients"] if name in gradients]
        assert not told or float((apart * torch.stack(told).all(0)).max()) <= 1e-5, name
