"""How much memory an update will take, before it does, and which setting to change when that is too much.

Weights and activations are counted, not estimated: the model is built without memory (torch's meta device) with one
block and with two, run over a micro-batch, and what it keeps for the backward pass is added up. The tree is taken to be
one path of `token_budget` tokens, which is the worst there is.

With several ranks it is what each of them takes. Left out: what the allocator wastes, the embedded engine's keys and
values and its copy of the weights, where it has one; what FlexAttention's backward pass
makes, and what recorded passes keep (trunk_graphs.py), which there are only where memory is plenty. Compiled blocks
keep less than is counted here.
"""

from __future__ import annotations

import copy
import os
import sys
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PretrainedConfig

from strop.config import LearnerConfig, LoraConfig
from strop.learner import lora
from strop.learner.blocks import Way
from strop.learner.flex_attention import padded_size
from strop.learner.logprobs import CHUNK
from strop.learner.model import choose_way, place
from strop.learner.tree_attention import BLOCK, NAME, Tree, TreePlan

SMALLEST_BUDGET = 512


@dataclass(frozen=True)
class Memory:
    """Bytes, by what they are for. `logits` are a chunk and what is made of it; `block` is what is computed again, one
    block at a time, when no logits are left. `snapshot` is of the CPU's memory: a copy of what a checkpoint holds
    (snapshot.py). `advice` is empty where all but that fit into `available`."""

    weights: int
    gradients: int
    optimizer: int
    reference: int
    critic: int
    activations: int
    logits: int
    block: int
    snapshot: int
    offloaded: bool
    available: int
    tokens: int
    advice: str = ""

    @property
    def peak(self) -> int:
        """The larger of the backward pass and the optimizer step: neither needs all of what the other does."""
        held = self.weights + self.gradients + self.reference + self.critic
        passes = self.activations + max(self.logits, self.block) + (0 if self.offloaded else self.optimizer)
        return held + max(passes, self.optimizer)

    @property
    def fits(self) -> bool:
        return self.peak <= self.available


def plan(
    config: PretrainedConfig,
    learner: LearnerConfig,
    available: int,
    *,
    reference: bool = False,
    critic: bool = False,
    device: torch.device | None = None,
) -> Memory:
    """What an update takes of `available` bytes, on `device` (default: the one the learner will choose)."""
    where = device or place(learner)[0]

    def count(learner: LearnerConfig) -> Memory:
        return _count(config, learner, available, reference, critic, where)

    found = count(learner)
    if found.fits:
        return found
    needs = f"an update needs about {_gib(found.peak)} and {_gib(available)} are free"
    changes = _changes(learner, where)
    together: dict[str, Any] = {}
    for change in changes:
        if count(_with(learner, change)).fits:
            return replace(found, advice=f"{needs}: set {_said(change)}")
    for change in changes:
        together |= change
        if count(_with(learner, together)).fits:
            return replace(found, advice=f"{needs}: set {_said(together)}")
    return replace(found, advice=f"{needs}, which is too little whatever the settings: use a smaller model")


def available_memory() -> int:
    """Bytes of the CPU's memory that programs may still take."""
    lines = Path("/proc/meminfo").read_text().splitlines() if Path("/proc/meminfo").exists() else []
    found = next((line for line in lines if line.startswith("MemAvailable")), None)
    if found is None:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min(int(found.split()[1]) * 1024, _left_in_container())


def _left_in_container(group: Path = Path("/sys/fs/cgroup")) -> int:
    """What a control group's limit (cgroup v2) leaves; files that are only cached are given up for programs."""
    try:
        limit, used = (int((group / f"memory.{name}").read_text()) for name in ("max", "current"))
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):  # there is no limit
        return sys.maxsize
    return max(0, limit - used + int(stat.get("inactive_file", 0)))


def _changes(learner: LearnerConfig, device: torch.device) -> list[dict[str, Any]]:
    """What could be set otherwise, the cheapest first."""
    changes: list[dict[str, Any]] = []
    gpu = device.type == "cuda"
    if gpu and learner.dtype == "float32":
        changes.append({"dtype": "bfloat16"})
    if not learner.gradient_checkpointing:
        changes.append({"gradient_checkpointing": True})
    budget = learner.token_budget // 2
    while budget >= SMALLEST_BUDGET:
        changes.append({"token_budget": budget})
        budget //= 2
    if gpu and not learner.offload:
        changes.append({"offload": True})
    if not learner.lora.rank:
        changes.append({"lora": LoraConfig(rank=16)})
    return changes


def _with(learner: LearnerConfig, change: dict[str, Any]) -> LearnerConfig:
    return msgspec.structs.replace(learner, **change)


def _said(change: dict[str, Any]) -> str:
    """In the words of `--set`."""
    words = {name: str(value).lower() for name, value in change.items()}
    if "lora" in words:
        words["lora.rank"] = str(change["lora"].rank)
        del words["lora"]
    return " and ".join(f"learner.{name} to {value}" for name, value in words.items())


def _gib(size: int) -> str:
    return f"{size / 2**30:.3g} GiB"


# -- counting ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Counted:
    """Of a model with some blocks: parameters, trained ones, bytes kept for the backward pass."""

    parameters: int
    trained: int
    kept: int

    def more(self, other: _Counted, blocks: int) -> _Counted:
        """With `blocks` blocks, this being one with one and `other` one with two."""
        of = [(one, two - one) for one, two in zip(astuple(self), astuple(other), strict=True)]
        return _Counted(*(one + (blocks - 1) * block for one, block in of))


def _count(
    config: PretrainedConfig,
    learner: LearnerConfig,
    available: int,
    reference: bool,
    critic: bool,
    device: torch.device,
) -> Memory:
    way = choose_way(learner, device)
    auto = torch.bfloat16 if device.type == "cuda" else torch.float32
    dtype = auto if learner.dtype == "auto" else getattr(torch, learner.dtype)
    size, blocks = dtype.itemsize, int(config.num_hidden_layers)
    tokens = learner.token_budget if way.attention == "blocks" else padded_size(learner.token_budget)
    one, two = (_measure(config, learner, way, dtype, tokens, num) for num in (1, 2))
    model = one.more(two, blocks)
    activations, block = model.kept, 0
    if way.recompute:
        block = two.kept - one.kept
        activations = one.kept - block + blocks * tokens * config.hidden_size * size
        # and the gradients of it, of which those of the widest layers are the most at a time
        block += tokens * (2 * config.hidden_size + 3 * config.intermediate_size) * size
    weights = model.parameters * size
    gradients = 4 * model.trained
    optimizer = (8 + (4 if dtype != torch.float32 else 0)) * model.trained
    own = critic and learner.critic_kind == "own"
    rows = min(tokens, max(1, CHUNK[device.type] // config.vocab_size))
    of_head = 0 if learner.lora.rank else config.vocab_size * config.hidden_size * (4 + size)
    # Sharded over ranks is all that has the size of a model, but for one block that is put together at a time.
    ranks = 1 if learner.lora.rank else learner.ranks
    together = 0 if ranks == 1 else (two.parameters - one.parameters) * size + of_head
    activations, block = activations // learner.sequence_parallel, block // learner.sequence_parallel
    if ranks > 1:
        weights, optimizer = model.parameters * max(size, 4), 8 * model.trained
    return Memory(
        weights=weights // ranks + together,
        gradients=gradients * (2 if own else 1) // ranks,
        optimizer=optimizer * (2 if own else 1) // ranks,
        reference=weights // ranks if reference and not learner.lora.rank else 0,
        critic=weights // ranks if own else 0,
        activations=activations * (2 if own else 1),
        logits=rows * config.vocab_size * (2 * size if way.compile else size + 4 * 4) + of_head,
        block=block * (2 if own else 1),
        snapshot=12 * model.trained * (2 if own else 1) // ranks,
        offloaded=learner.offload and device.type == "cuda",
        available=available,
        tokens=tokens,
    )


def _measure(
    config: PretrainedConfig, learner: LearnerConfig, way: Way, dtype: torch.dtype, tokens: int, blocks: int
) -> _Counted:
    config = copy.deepcopy(config)
    config.num_hidden_layers = blocks
    if kinds := getattr(config, "layer_types", None):
        config.layer_types = kinds[:blocks]
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=NAME).eval()
        if learner.lora.rank:
            lora.attach(model, learner.lora)
        tree: Tree = _Fused(tokens) if way.attention == "flex" else _one_path(tokens, dtype)
        kept = _kept(model, tree, tokens)
    parameters = list(model.parameters())
    trained = sum(p.numel() for p in parameters if p.requires_grad)
    return _Counted(sum(p.numel() for p in parameters), trained, kept)


def _kept(model: Any, tree: Tree, tokens: int) -> int:
    """Bytes that one pass keeps, beside the weights; each storage once."""
    weights = {p.untyped_storage()._cdata for p in model.parameters()}
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        if (storage := tensor.untyped_storage()._cdata) not in weights:
            kept[storage] = tensor
        return tensor

    places = torch.zeros(1, tokens, dtype=torch.long)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = model.base_model(
            input_ids=places, position_ids=places, attention_mask=torch.zeros(1, 1, 1, 1), use_cache=False, tree=tree
        )
    found = sum(tensor.untyped_storage().nbytes() for tensor in kept.values())
    return found + output.last_hidden_state.nbytes


def _one_path(tokens: int, dtype: torch.dtype) -> TreePlan:
    rows = [min(BLOCK, tokens - start) for start in range(0, tokens, BLOCK)]
    widths = [min(start + BLOCK, tokens) for start in range(0, tokens, BLOCK)]
    masks = [torch.zeros(row, width, dtype=dtype) for row, width in zip(rows, widths, strict=True)]
    return TreePlan(rows, widths, torch.zeros(sum(widths), dtype=torch.long), masks)


@dataclass(frozen=True)
class _Fused:
    """Keeps what a fused kernel keeps: what goes in, what comes out, and a number per query and head."""

    size: int

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        return _KeepAll.apply(query, key, value)  # pyright: ignore


class _KeepAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out = torch.empty_like(query)
        ctx.save_for_backward(query, key, value, out, torch.empty(query.shape[:-1], dtype=torch.float32))
        return out
