"""Checkpoints of a sharded model: each rank writes its part of the optimizer's state (torch.distributed.checkpoint).

    model.safetensors               the whole weights, as every checkpoint has them; the first rank writes them, and no
                                    rank has more of them meanwhile than its part and a tensor
    __<rank>_<n>.distcp, .metadata  moments and the critic's weights, by name; any number of ranks reads them
    optimizer.pt                    the rest, in which a name stands for each tensor that is there

The ranks write in threads of their own, beside training, and talk in a process group that nobody else uses.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load as load_shards
from torch.distributed.checkpoint.state_dict_saver import save as save_shards
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from strop.errors import DamagedCheckpoint, LearnerError
from strop.learner import checkpoint
from strop.learner.ranks import Ranks
from strop.learner.sharding import exhaust, iterate_whole
from strop.learner.summed_file import order_tensors
from strop.models.checksums import SHARDS

PLACE = "strop.shard:"
"""What stands in the place of a tensor that is among the shards, before its name."""


def copy_parts(weights: Mapping[str, Tensor], ranks: Ranks) -> dict[str, DTensor]:
    """Copies of this rank's parts, of which the thread that writes them makes the whole."""
    return {name: _copy_local(weights[name], ranks.saving_mesh) for name in order_tensors(weights)}


def take_shards(state: Any, ranks: Ranks, prefix: str = "") -> tuple[Any, dict[str, Tensor]]:
    """State without the sharded tensors in it, and copies of this rank's parts of those in the CPU's memory."""
    if isinstance(state, DTensor):
        name = prefix.rstrip("/")
        return f"{PLACE}{name}", {name: _copy_local(state, ranks.cpu_mesh)}
    if not isinstance(state, dict | list):
        return state.detach().cpu().clone() if isinstance(state, Tensor) else state, {}
    items = state.items() if isinstance(state, dict) else enumerate(state)
    found = {key: take_shards(value, ranks, f"{prefix}{key}/") for key, value in items}
    shards = {name: tensor for _, part in found.values() for name, tensor in part.items()}
    rest = {key: value for key, (value, _) in found.items()}
    return rest if isinstance(state, dict) else list(rest.values()), shards


def _copy_local(tensor: Tensor, mesh: DeviceMesh) -> DTensor:
    assert isinstance(tensor, DTensor)
    shape, stride = tensor.shape, tensor.stride()
    with torch.no_grad():
        local = tensor.to_local().cpu().clone()
    return DTensor.from_local(local, mesh, tensor.placements, run_check=False, shape=shape, stride=stride)


def save(folder: Path, weights: Mapping[str, DTensor], shards: dict[str, Tensor], ranks: Ranks, **rest: Any) -> None:
    """What every rank does at once to write a checkpoint. The first one writes the weights and the `rest`, and gives it
    its name."""
    values = iterate_whole(weights.values())
    if not ranks.leads:
        exhaust(values)
        if not _agree(ranks, True):
            raise LearnerError(f"the checkpoint {folder} was not written: the log of the first rank says why")
        return _write_shards(checkpoint.fresh_folder(folder), shards, ranks)
    told = False

    def beside(fresh: Path) -> None:
        nonlocal told
        told = True
        _agree(ranks, True)
        _write_shards(fresh, shards, ranks)

    try:
        outline = {name: torch.empty_like(tensor, device="meta") for name, tensor in weights.items()}
        checkpoint.save(folder, weights=outline, values=values, beside=beside, **rest)
    finally:
        exhaust(values)
        if not told:  # the others wait
            _agree(ranks, False)


def _agree(ranks: Ranks, ready: bool) -> bool:
    """What the first rank says of the folder: whether it is there."""
    said = [ready]
    dist.broadcast_object_list(said, 0, group=ranks.saving)
    return said[0]


def _write_shards(fresh: Path, shards: dict[str, Tensor], ranks: Ranks) -> None:
    try:
        save_shards(shards, checkpoint_id=fresh, process_group=ranks.saving)
    except CheckpointException as error:
        (first, _), *_ = error.failures.values()
        raise first from error


def has_shards(folder: Path) -> bool:
    return (folder / SHARDS).exists()


def fill_shards(state: Any, folder: Path, like: Mapping[str, Tensor]) -> Any:
    """State as it was before `take_shards`; the tensors are sharded as those of the same name in `like` are."""
    wanted = dict.fromkeys(_named(state))
    if missing := [name for name in wanted if name not in like]:
        raise DamagedCheckpoint(f"{folder} holds {missing[0]}, which is not trained: it is a checkpoint of another run")
    loaded: dict[str, Any] = {name: torch.empty_like(like[name].detach()) for name in wanted}
    try:
        load_shards(loaded, checkpoint_id=folder, no_dist=not dist.is_initialized())
    except CheckpointException as error:
        (first, _), *_ = error.failures.values()
        raise DamagedCheckpoint(f"{folder} cannot be read: {first}") from None
    return _replace(state, loaded.__getitem__)


def _named(state: Any) -> list[str]:
    names: list[str] = []
    _replace(state, names.append)
    return names


def _replace(state: Any, find: Callable[[str], Any]) -> Any:
    if isinstance(state, str) and state.startswith(PLACE):
        return find(state.removeprefix(PLACE))
    if isinstance(state, dict):
        return {key: _replace(value, find) for key, value in state.items()}
    return [_replace(value, find) for value in state] if isinstance(state, list) else state
