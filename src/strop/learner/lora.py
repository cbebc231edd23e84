"""LoRA by PEFT: small matrices beside the model's linear layers. They alone are trained.

The model stays what it was, a Hugging Face model with a few more modules in it, so that whatever runs it runs it still.
The reference policy is the model without them. On disk an adapter is a folder in PEFT's format.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from strop.config import LoraConfig
from strop.engines.embedded.adapters import AdapterMatrices
from strop.errors import LearnerError, ModelError
from strop.imports import to_install

ADAPTER = "default"
PREFIX = "base_model.model."
"""What PEFT puts before every name in an adapter's file."""


def attach(model: PreTrainedModel, config: LoraConfig) -> None:
    """Put an adapter that changes nothing yet into `model`, and freeze the rest. Its first matrices are random."""
    try:
        import peft
    except ImportError:
        raise LearnerError(f"learner.lora needs PEFT: {to_install('peft')}, or set learner.lora.rank to 0") from None
    targets = _targets(model, config)
    settings = peft.LoraConfig(r=config.rank, lora_alpha=config.alpha, target_modules=targets, lora_dropout=0.0)
    peft.inject_adapter_in_model(settings, model, adapter_name=ADAPTER)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(torch.promote_types(model.dtype, torch.float32))
    model.eval()


def make_served(base: PreTrainedModel, config: LoraConfig) -> PreTrainedModel:
    """The same model with an adapter that is never trained; its matrices come from a checkpoint later."""
    model = share_weights(base)
    with torch.random.fork_rng():  # what is trained beside it draws the same numbers as without it
        attach(model, config)
    return model.requires_grad_(False)


def share_weights(model: PreTrainedModel) -> PreTrainedModel:
    """Another model of the very same tensors: what is put into the one is not in the other."""
    return copy.deepcopy(model, {id(t): t for t in (*model.parameters(), *model.buffers())})


def read_matrices(model: PreTrainedModel) -> AdapterMatrices:
    """The adapter in a model, as it stands."""
    layers = dict(_layers(model))
    first = next(iter(layers.values()))
    found = {name: (one.lora_A[ADAPTER].weight, one.lora_B[ADAPTER].weight) for name, one in layers.items()}
    return AdapterMatrices(found, first.r[ADAPTER], first.scaling[ADAPTER])


def _targets(model: PreTrainedModel, config: LoraConfig) -> list[str]:
    """The last part of the names of the layers that get matrices."""
    blocks = model.base_model.named_modules()
    found = sorted({name.rpartition(".")[2] for name, module in blocks if type(module) is nn.Linear})
    if not found:
        raise ModelError(f"{type(model).__name__} has no linear layers in its blocks. Fix: set learner.lora.rank to 0")
    if unknown := [name for name in config.targets if name not in found]:
        raise LearnerError(
            f"learner.lora.targets names {unknown[0]!r}, and this model's blocks have no such linear layer. Fix: "
            f"choose from {', '.join(found)}"
        )
    return list(config.targets) or found


@contextmanager
def without_adapter(model: PreTrainedModel) -> Iterator[PreTrainedModel]:
    """The model as it was before it got its adapter."""
    layers = [layer for _, layer in _layers(model)]
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield model
    finally:
        for layer in layers:
            layer.enable_adapters(True)


def _layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """The layers that have matrices, by name; PEFT's, known by their parts so that it need not be there."""
    for name, module in model.named_modules():
        if hasattr(module, "lora_A") and hasattr(module, "base_layer"):
            yield name, module


# -- the plain model -----------------------------------------------------------------------------------------------


@torch.no_grad()
def iterate_merged(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Every parameter by the name it has without an adapter, the adapter added in: summed in float32, in its dtype."""
    layers = dict(_layers(model))
    for name, parameter in model.named_parameters():
        if ".lora_" in name:
            continue
        before, inside, last = name.rpartition(".base_layer.")
        if inside and last == "weight":
            yield f"{before}.weight", _sum(layers[before])
        else:
            yield (f"{before}.{last}" if inside else name), parameter.detach()


def _sum(layer: Any) -> Tensor:
    base, a, b = layer.base_layer.weight, layer.lora_A[ADAPTER].weight, layer.lora_B[ADAPTER].weight
    wide = torch.promote_types(base.dtype, torch.float32)
    return (base.to(wide) + layer.scaling[ADAPTER] * (b.to(wide) @ a.to(wide))).to(base.dtype)


class Merged:
    """A model with an adapter, as engines elsewhere are given it. Its tensors stay in place and are brought up to date
    whenever they are asked for: handles of them stay good."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.adapter = model
        self._tensors: dict[str, Tensor] = {}

    @property
    def config(self) -> Any:
        return self.adapter.config

    @property
    def device(self) -> torch.device:
        return self.adapter.device

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.adapter(*args, **kwargs)

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in iterate_merged(self.adapter):
            kept = self._tensors.setdefault(name, tensor)
            if kept is not tensor and kept.data_ptr() != tensor.data_ptr():
                kept.copy_(tensor)
            yield name, kept

    def parameters(self) -> Iterator[Tensor]:
        return (tensor for _, tensor in self.named_parameters())


# -- on disk -------------------------------------------------------------------------------------------------------


def name_in_file(name: str) -> str:
    """A parameter's name in an adapter's file."""
    return PREFIX + name.replace(f".{ADAPTER}.", ".")


def describe(model: PreTrainedModel, base: Path) -> dict[str, Any]:
    """adapter_config.json: what PEFT and engines must know of an adapter beside its weights."""
    layers = dict(_layers(model))
    first = next(iter(layers.values()))
    rank = first.r[ADAPTER]
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(base),
        "r": rank,
        "lora_alpha": round(first.scaling[ADAPTER] * rank),
        "lora_dropout": 0.0,
        "bias": "none",
        "inference_mode": True,
        "target_modules": sorted({name.rpartition(".")[2] for name in layers}),
    }
