"""Loading a model that is to be sharded: no rank has more of it at any time than its part and one block.

    outline       the model without values: its parameters have shapes, and no memory (torch's meta device)
    shard         block by block: memory for all of it, then for this rank's part only (sharding.py)
    read_parts    this rank's rows of every tensor, out of the files

Left out: files in another format than safetensors, and models whose tensors have other names in their files. Every rank
reads all of those before it is sharded.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from transformers import AutoModelForCausalLM, PreTrainedModel

from strop.engines.receiver import WeightsRefused
from strop.engines.weight_files import list_files
from strop.learner.model import find_broken_kind, read_config, refuse_not_finite
from strop.learner.ranks import Ranks
from strop.learner.tree_attention import NAME


def outline(folder: str | Path, dtype: torch.dtype) -> PreTrainedModel | None:
    """The model in `folder` without its values; None where those cannot be read in parts."""
    folder = Path(folder)
    try:
        shapes = {name: shape for name, (_, shape) in find_tensors(folder).items()}
        config = read_config(folder)
        with torch.random.fork_rng(devices=[]), parameters_without_memory():
            model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=NAME)
    except (OSError, ValueError, KeyError, SafetensorError, WeightsRefused):  # loading it will say what is wrong
        return None
    if any(shapes.get(name) != list(parameter.shape) for name, parameter in model.named_parameters()):
        return None
    find_broken_kind(folder)
    return model.eval()


def find_tensors(folder: Path) -> dict[str, tuple[Path, list[int]]]:
    """In which file each tensor is, and its shape."""
    found: dict[str, tuple[Path, list[int]]] = {}
    for file in list_files(folder):
        with safe_open(file, "pt") as opened:
            found |= {name: (file, opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118
    return found


@contextmanager
def parameters_without_memory() -> Iterator[None]:
    """Modules that are made in the block have parameters without values; their buffers are as ever."""
    register = nn.Module.register_parameter

    def register_outline(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and not param.is_meta:
            param = nn.Parameter(param.to("meta"), param.requires_grad)
        register(self, name, param)

    nn.Module.register_parameter = register_outline
    try:
        yield
    finally:
        nn.Module.register_parameter = register


@torch.no_grad()
def read_parts(model: nn.Module, folder: Path, ranks: Ranks) -> None:
    """Fill this rank's part of every parameter. Raises `ModelError` where a value is not a finite number."""
    parameters = dict(model.named_parameters())
    files: dict[Path, list[str]] = {}
    for name, (file, _) in find_tensors(folder).items():
        if name in parameters:
            files.setdefault(file, []).append(name)
    for file, names in files.items():
        with safe_open(file, "pt") as opened:
            for name in names:
                whole = parameters[name]
                assert isinstance(whole, DTensor)
                assert whole.placements == (Shard(0),)
                mine, local = find_rows(len(whole), ranks), whole.to_local()
                assert len(local) == len(mine)
                if len(mine):
                    part = opened.get_slice(name)[mine.start : mine.stop]
                    refuse_not_finite(part, folder)
                    local.copy_(part)


def find_rows(count: int, ranks: Ranks) -> range:
    """Those of so many that this rank has, as torch shares them out."""
    each = -(-count // ranks.count)
    return range(min(ranks.index * each, count), min((ranks.index + 1) * each, count))


@torch.no_grad()
def copy_parts(of: Mapping[str, Tensor], to: nn.Module) -> None:
    """The values of one model into another of its shapes, which is sharded alike."""
    for name, parameter in to.named_parameters():
        parameter.copy_(of[name])
