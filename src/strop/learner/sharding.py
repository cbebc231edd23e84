"""A model whose parameters are sharded over ranks (FSDP2), and the whole of it where somebody needs that.

    shard           each parameter is in equal parts on all ranks; so are its gradient and the optimizer's state
    gather          the whole of a tensor; all ranks ask for it at once
    iterate_whole   the same of many, one after the other: what checkpoints and engines get
    fill            the other way round

Parameters are in float32 and are put together in the dtype that is computed in, block by block; gradients are summed in
float32. Left out: torch.compile of sharded blocks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers.modeling_layers import GradientCheckpointingLayer

from strop.errors import ModelError
from strop.learner.ranks import Ranks


def shard(
    module: nn.Module,
    ranks: Ranks,
    dtype: torch.dtype,
    *,
    wide: Sequence[nn.Module] = (),
    offload: bool = False,
) -> None:
    """Shard the parameters of a module that is called as a whole, in place. Its blocks are put together one by one,
    what is around them for the whole of a pass. `wide` parts of it compute in float32 at least. Parameters that have no
    memory yet (sharded_loading.py) have some afterwards, whatever is in it."""
    blocks = [each for each in module.modules() if isinstance(each, GradientCheckpointingLayer)]
    if not blocks:
        raise ModelError(
            f"{type(module).__name__} has no blocks that are known, so that it cannot be sharded. Fix: set "
            "learner.ranks=1"
        )
    for each in (*blocks, *wide, module):
        reduced = torch.promote_types(dtype, torch.float32)
        policy = MixedPrecisionPolicy(
            param_dtype=reduced if each in wide else dtype, reduce_dtype=reduced, cast_forward_inputs=False
        )
        give_memory(each, ranks.device)
        fully_shard(
            each, mesh=ranks.mesh, mp_policy=policy, offload_policy=CPUOffloadPolicy() if offload else OffloadPolicy()
        )
        assert isinstance(each, FSDPModule)
        each.set_gradient_divide_factor(1.0)  # sums, not means
        each.set_force_sum_reduction_for_comms(True)


def gather(tensor: Tensor) -> Tensor:
    """The whole of a tensor, which all ranks ask for at once; what is not sharded is whole."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def iterate_whole(tensors: Iterable[Tensor], dtype: torch.dtype | None = None) -> Iterator[Tensor]:
    """The whole of each tensor in turn, in `dtype` if one is given. All ranks go through all of them, in one order."""
    for tensor in tensors:
        part = tensor.detach()
        yield gather(part.to(dtype or part.dtype))


def exhaust(rest: Iterator[Tensor]) -> None:
    """Go through what is left, with nobody to use it: the other ranks do as well."""
    deque(rest, maxlen=0)


def give_memory(module: nn.Module, device: torch.device) -> None:
    """To parameters that have none. What is one parameter in several places stays one."""
    made: dict[nn.Parameter, nn.Parameter] = {}
    for part in module.modules():
        for name, parameter in part.named_parameters(recurse=False):
            if parameter.is_meta:
                if parameter not in made:
                    made[parameter] = nn.Parameter(torch.empty_like(parameter, device=device), parameter.requires_grad)
                setattr(part, name, made[parameter])


@torch.no_grad()
def fill(target: Tensor, whole: Tensor) -> None:
    """Copy a whole tensor, which every rank has, into one that may be sharded; or one that is sharded alike."""
    if isinstance(whole, DTensor):
        target.copy_(whole)
    elif isinstance(target, DTensor):
        target.to_local().copy_(lay_out(whole, target).to_local())
    else:
        target.copy_(whole)


def lay_out(whole: Tensor, like: Tensor) -> Any:
    """A whole tensor, which every rank has, sharded like another of its shape; or as it is where that is whole, or of
    another shape."""
    if not isinstance(like, DTensor) or isinstance(whole, DTensor) or whole.shape != like.shape:
        return whole
    return distribute_tensor(whole.to(like.device), like.device_mesh, like.placements, src_data_rank=None)


def reshard(module: nn.Module) -> None:
    """Forget parameters that were put together: the sharded ones have changed since."""
    for each in module.modules():
        if isinstance(each, FSDPModule):
            each.reshard()
