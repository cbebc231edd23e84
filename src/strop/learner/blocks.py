"""How a learner runs the blocks of a model: compiled, or so that what they compute is not kept but computed again.

Both go through the hook that Hugging Face's blocks have for it. It is in place only while a learner's pass runs: an
engine may run the same model, and must see nothing of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Literal

import torch
from torch import nn
from torch._dynamo.exc import TorchDynamoException
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from strop.errors import LearnerError, ModelError
from strop.learner.sequence_parallel import SequenceGroup


@dataclass(frozen=True)
class Way:
    """How a model is run over a piece. `recompute`: keep only what enters each block for the backward pass. `compile`:
    one kernel for the norms, rotations and activations between two products of matrices. `split`: the ranks that it is
    run by together."""

    attention: Literal["blocks", "flex"] = "blocks"
    recompute: bool = False
    compile: bool = False
    split: SequenceGroup | None = None


PLAIN = Way()


@contextmanager
def apply_way(model: nn.Module, way: Way) -> Iterator[None]:
    """Blocks of the model run this way until the end of the context."""
    recompute = way.recompute and torch.is_grad_enabled()
    wanted = recompute or way.compile
    blocks = [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)] if wanted else []
    if recompute and not blocks:
        raise ModelError(
            f"{type(model).__name__} does not know how to compute its blocks again. Fix: set "
            "learner.gradient_checkpointing to false"
        )
    for block in blocks:
        block.__dict__["_gradient_checkpointing_func"] = partial(_run, block, way.compile, recompute)
        block.gradient_checkpointing = block.training = True  # what the hook looks at
    try:
        yield
    except TorchDynamoException as error:
        what = str(error).strip().splitlines()[0]
        raise LearnerError(
            f"{type(model).__name__} cannot be compiled. Fix: set learner.compile to false ({what})"
        ) from error
    finally:
        for block in blocks:
            block.gradient_checkpointing = block.training = False
            del block.__dict__["_gradient_checkpointing_func"]


def _run(block: nn.Module, compile: bool, recompute: bool, call: Any, *args: Any) -> Any:
    """`call` is the block's own, with its keywords."""
    if compile:
        call = partial(_compiled(type(block)), block, **call.keywords)
    return checkpoint(call, *args, use_reentrant=False, preserve_rng_state=False) if recompute else call(*args)


@cache
def _compiled(kind: type[nn.Module]) -> Any:
    """Once for all blocks of a kind and pieces of any size."""
    return torch.compile(kind.forward, dynamic=True)
