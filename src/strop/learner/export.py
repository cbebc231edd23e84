"""From a checkpoint to what others use: a Hugging Face folder without anything of the training, or an adapter's."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from strop.errors import ConfigError, ModelError, PlaceError
from strop.learner import lora
from strop.learner.checkpoint import ADAPTER, MODEL, explain_unwritten, read, report_damage, write, write_whole
from strop.learner.model import load
from strop.models.adapter_config import read_adapter
from strop.models.checksums import SUMS, is_for_training, verify


def export(
    checkpoint: str | Path,
    to: str | Path,
    *,
    merge: bool = True,
    dtype: Literal["float32", "bfloat16"] | None = None,
) -> None:
    """Write the model in a checkpoint into the new folder `to`, which is there whole or not at all.

    An adapter is merged into the model it was trained on, or with `merge=False` (--adapter) written as a PEFT folder.
    Weights are written in `dtype`; by default as the checkpoint has them, merged ones as the model had them before.
    """
    checkpoint, to = Path(checkpoint), Path(to)
    if os.path.exists(to):
        raise PlaceError(f"{to} is there already. Fix: choose another place")
    if not merge and dtype:
        raise ConfigError("an adapter by itself is written as it was trained. Fix: leave out --dtype, or --adapter")
    verify(checkpoint, training=False)
    wanted = getattr(torch, dtype) if dtype else None
    if (checkpoint / ADAPTER).exists():
        if not merge:
            _copy(checkpoint, to)
            return
        base, config = read_adapter(checkpoint)
        if not base.is_dir():
            raise ModelError(
                f"the adapter in {checkpoint} belongs to the model in {base}, which is not there. Fix: name its "
                "place in adapter_config.json, as base_model_name_or_path"
            )
        model = load(base, torch.float32)
        lora.attach(model, config)
        adapter = {name: p for name, p in model.named_parameters() if p.requires_grad}
        read(checkpoint, adapter, adapter=True)
        weights, source, wanted = dict(lora.iterate_merged(model)), base, wanted or _dtype_of(base)
    elif (checkpoint / MODEL).exists():
        if not merge:
            raise ModelError(f"{checkpoint} is a whole model, without an adapter. Fix: leave out --adapter")
        with report_damage(checkpoint / MODEL) as file:
            weights, source = load_file(file), checkpoint
    else:
        raise ModelError(f"{checkpoint} is not a checkpoint: it holds neither {MODEL} nor {ADAPTER}")
    with _made(to) as fresh:
        write(fresh, {name: tensor.to(wanted or tensor.dtype) for name, tensor in weights.items()}, None, source)


@contextmanager
def _made(to: Path) -> Iterator[Path]:
    """The folder to write into, as `write_whole` has it."""
    try:
        with write_whole(to) as fresh:
            yield fresh
    except (OSError, SafetensorError, RuntimeError) as error:
        raise PlaceError(f"{to} cannot be written: {explain_unwritten(error)}. Fix: choose another place") from error


def _copy(checkpoint: Path, to: Path) -> None:
    with _made(to) as fresh:
        for file in checkpoint.iterdir():
            if file.name != SUMS and not is_for_training(file.name):
                shutil.copyfile(file, fresh / file.name)


def _dtype_of(folder: Path) -> torch.dtype:
    """What a model's folder says its weights are in."""
    config = json.loads((folder / "config.json").read_text())
    return getattr(torch, config.get("dtype") or config.get("torch_dtype") or "float32")
