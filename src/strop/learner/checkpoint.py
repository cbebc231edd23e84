"""A checkpoint is a folder that is there whole or not at all, and a plain Hugging Face folder.

config.json, tokenizer files    copied from the folder the model came from; `dtype` is that of the weights
model.safetensors               every parameter, in the dtype it is trained in
optimizer.pt                    optimizer states, and the critic's weights where there is one
strop.json                      what the caller wants to know when it resumes: version, step
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

from strop.errors import ModelError

_NOT_COPIED = ("strop.json", ".index.json")


def save(folder: str | Path, *, model: nn.Module, state: dict[str, Any], meta: dict[str, Any], source: Path) -> None:
    """Write into a sibling, fsync, rename: a crash at any moment leaves the whole folder or none."""
    folder = Path(folder)
    fresh = folder.with_name(f".{folder.name}.new")
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir(parents=True)
    for file in sorted(source.iterdir()):
        if file.suffix in (".json", ".jinja", ".txt", ".model") and not file.name.endswith(_NOT_COPIED):
            shutil.copyfile(file, fresh / file.name)
    config = json.loads((fresh / "config.json").read_text())
    config["dtype"] = str(next(model.parameters()).dtype).removeprefix("torch.")
    config.pop("torch_dtype", None)
    (fresh / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    # named_parameters names tied weights once, which is how Hugging Face stores them.
    weights = {name: p.detach().cpu().contiguous() for name, p in model.named_parameters()}
    save_file(weights, fresh / "model.safetensors", metadata={"format": "pt"})
    (fresh / "model.safetensors").chmod(0o644)
    torch.save(state, fresh / "optimizer.pt")
    (fresh / "strop.json").write_text(json.dumps(meta, indent=2))
    for file in sorted(fresh.iterdir()):
        _fsync(file)
    _fsync(fresh)
    fresh.rename(folder)
    _fsync(folder.parent)


def restore(folder: str | Path, *, model: nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    """Copy the weights into `model` in place and return (state, meta) as they were saved."""
    folder = Path(folder)
    try:
        meta = json.loads((folder / "strop.json").read_text())
        state = torch.load(folder / "optimizer.pt", map_location="cpu", weights_only=True)
        with safe_open(folder / "model.safetensors", "pt") as file, torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(file.get_tensor(name))
    except FileNotFoundError as error:
        raise ModelError(f"{folder} is not a checkpoint: {error.filename or error} is missing") from None
    return state, meta


def _fsync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
