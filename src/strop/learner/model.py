"""A Hugging Face causal language model from a folder, ready to be laid out as a token tree.

Left out: sliding-window layers, mixture-of-experts (until routing can be replayed), anything that is not text.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging

from strop.config import LearnerConfig
from strop.errors import LearnerError, ModelError
from strop.learner.blocks import Way
from strop.learner.logprobs import compute_hidden_states, find_head
from strop.learner.masters import lower
from strop.learner.sequence_parallel import SequenceGroup
from strop.learner.tree_attention import NAME

PROBED_BLOCKS, PROBED_IDS = 2, 128
"""What an architecture is tried with that has no weights yet."""


def place(config: LearnerConfig) -> tuple[torch.device, torch.dtype]:
    """Where a learner computes, and in what."""
    there = torch.cuda.is_available()
    if config.device == "cuda" and not there:
        raise LearnerError("learner.device is cuda and torch finds no GPU here. Fix: set it to auto or cpu")
    device = torch.device("cuda" if there and config.device != "cpu" else "cpu")
    if config.dtype == "auto":
        return device, torch.bfloat16 if device.type == "cuda" else torch.float32
    return device, torch.bfloat16 if config.dtype == "bfloat16" else torch.float32


def choose_way(
    config: LearnerConfig, device: torch.device, *, sharded: bool = False, split: SequenceGroup | None = None
) -> Way:
    """How a learner runs its models on this device. Blocks that are put together as they run are not compiled."""
    if config.attention == "flex" and device.type != "cuda":
        raise LearnerError("learner.attention is flex, which trains on GPUs only. Fix: set it to auto or blocks")
    flex = device.type == "cuda" and config.attention != "blocks"
    compile = flex and config.compile and not sharded
    return Way("flex" if flex else "blocks", recompute=config.gradient_checkpointing, compile=compile, split=split)


def load(folder: str | Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """The model in `folder`, without dropout, with attention that understands token trees (and plain masks).

    Raises `ModelError` with a sentence if it cannot be had or cannot be trained.
    """
    folder = Path(folder)
    if not (folder / "config.json").is_file():
        raise ModelError(f"{folder} holds no model. Fix: give a folder in Hugging Face format, with config.json in it")
    logging.disable_progress_bar()
    try:
        config = read_config(folder)
        model, info = AutoModelForCausalLM.from_pretrained(
            folder,
            config=config,
            dtype=dtype,
            attn_implementation=NAME,
            local_files_only=True,
            output_loading_info=True,
        )  # pyright: ignore[reportGeneralTypeIssues]
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise ModelError(f"the model in {folder} cannot be loaded: {str(error).splitlines()[0]}") from error
    if info["missing_keys"] or info["mismatched_keys"]:
        name = sorted(str(key) for key in [*info["missing_keys"], *info["mismatched_keys"]])[0]
        raise ModelError(f"the weights in {folder} do not fit its config.json: {name} is missing or has another shape")
    model.eval()  # nothing random is left, and nothing may come back through a module's own default
    _probe(model, folder)
    return model


def read_config(folder: Path) -> Any:
    """The configuration of the model in `folder`, without dropout."""
    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    _refuse(config, folder)
    for name in [n for n in vars(config) if n.endswith(("dropout", "pdrop"))]:
        setattr(config, name, 0.0)
    return config


def load_frozen(folder: str | Path, config: LearnerConfig) -> PreTrainedModel:
    """The model in `folder` as a learner would compute with it, to be served only: nothing of it can be trained."""
    device, dtype = place(config)
    model = load(folder, torch.promote_types(dtype, torch.float32)).requires_grad_(False)
    lower(model, dtype)
    nn.Module.to(model, device)
    return model


def _refuse(config: Any, folder: Path) -> None:
    experts = max((getattr(config, n, None) or 0) for n in ("num_experts", "num_local_experts", "n_routed_experts"))
    if experts > 1:
        raise ModelError(
            f"the model in {folder} is a mixture of experts, which cannot be trained yet. Fix: use a dense one"
        )
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    if rope.get("rope_type") == "longrope":
        raise ModelError(
            f"the model in {folder} turns positions by the longest path of a pass (longrope), so that a turn would "
            "depend on its neighbours. Fix: use another model"
        )
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    sliding = getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True)
    if kinds != {"full_attention"} or (sliding and getattr(config, "layer_types", None) is None):
        raise ModelError(
            f"the model in {folder} has layers that are not full attention. Fix: use one where all of them are"
        )


def find_broken_kind(folder: Path) -> None:
    """Raises `ModelError` where models of this architecture are not known; random weights tell it as well."""
    config = read_config(folder)
    config.num_hidden_layers, config.vocab_size, config.pad_token_id = PROBED_BLOCKS, PROBED_IDS, None
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:PROBED_BLOCKS]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=NAME)
    _probe(model.eval(), folder)


def refuse_not_finite(values: Tensor, folder: Path) -> None:
    if not torch.isfinite(values).all():
        raise ModelError(
            f"the weights in {folder} are not all finite numbers: they are broken. Fix: use another checkpoint"
        )


@torch.no_grad()
def _probe(model: PreTrainedModel, folder: Path) -> None:
    """Compare a small tree with stock rows: catches models that do more in attention or after the head than we know."""
    rows = torch.tensor([[1, 2, 3, 4], [1, 2, 5, 6]]) % model.config.vocab_size
    model.set_attn_implementation("eager")
    try:
        stock = model(input_ids=rows, use_cache=False).logits
    finally:
        model.set_attn_implementation(NAME)
    ids, pos, end = np.append(rows[0], rows[1, 2:]), np.array([0, 1, 2, 3, 2, 3]), np.array([6, 6, 4, 4, 6, 6])
    tree = find_head(model)(compute_hidden_states(model, ids, pos, end))
    ours = torch.stack([tree[[0, 1, 2, 3]], tree[[0, 1, 4, 5]]])
    refuse_not_finite(stock, folder)
    limit = 1e-4 if torch.finfo(model.dtype).bits >= 32 else 5e-2
    if not (ours - stock).abs().max() <= limit * stock.abs().max():
        kind = type(model).__name__
        raise ModelError(
            f"{kind} in {folder} gives other logits when laid out as a tree: this architecture is not known"
        )
