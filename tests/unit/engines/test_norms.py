"""Norms by one kernel: the model's own numbers but for a rounding, in place for one pass, and only where they are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from strop.engines.embedded.norms import FusedNorms


class HalvedRMSNorm(LlamaRMSNorm):
    def forward(self, hidden_states: Tensor) -> Tensor:
        return super().forward(hidden_states) / 2


def make(kind: type[Any], dtype: torch.dtype) -> Any:
    torch.manual_seed(0)
    norm = kind(48, eps=1e-5)
    nn.init.normal_(norm.weight, 1.0)
    return norm.to(dtype)


@pytest.mark.parametrize(("dtype", "near"), [(torch.float32, 1e-6), (torch.bfloat16, 2**-7)])
@torch.inference_mode()
def test_a_norm_gives_what_the_models_own_gives(dtype: torch.dtype, near: float) -> None:
    norm = make(LlamaRMSNorm, dtype)
    fused = FusedNorms(norm)
    assert len(fused) == 1
    given = torch.randn(3, 5, 48).to(dtype) * 7
    wanted = norm(given)
    with fused.using():
        found = norm(given)
        assert "forward" in vars(norm)
    assert "forward" not in vars(norm)
    assert found.dtype == dtype
    assert torch.allclose(found.float(), wanted.float(), rtol=near, atol=1e-6)


@torch.inference_mode()
def test_it_reads_weights_that_changed_in_place() -> None:
    norm = make(LlamaRMSNorm, torch.float32)
    fused = FusedNorms(norm)
    norm.weight.mul_(3.0)
    given = torch.randn(4, 48)
    wanted = norm(given)
    with fused.using():
        assert torch.allclose(norm(given), wanted, rtol=1e-5)


@pytest.mark.parametrize("kind", [HalvedRMSNorm, GemmaRMSNorm])
def test_a_norm_that_computes_something_else_is_left_alone(kind: type[Any]) -> None:
    assert len(FusedNorms(make(kind, torch.float32))) == 0


def test_every_norm_of_a_model_is_found() -> None:
    config = LlamaConfig(
        vocab_size=32, hidden_size=32, intermediate_size=32, num_hidden_layers=3, num_attention_heads=4
    )
    assert len(FusedNorms(LlamaForCausalLM(config))) == 7
