"""A checkpoint is a folder that is there whole or not at all. The whole model is a plain Hugging Face folder:

config.json, tokenizer files    copied from the folder the model came from; `dtype` is that of the weights
model.safetensors               every parameter, in the dtype it is trained in

or, where only an adapter is trained, a PEFT folder:

adapter_config.json             how it is put into which model
adapter_model.safetensors       its matrices, in the dtype they are trained in

with what training needs to go on beside it:

optimizer.pt                    optimizer states, the critic's weights where there is one, states of random numbers
strop.json                      what the caller wants to know when it resumes: version, step
SHA256SUMS                      what the files were when they were written, to tell one that was damaged since

Files are written and summed at once, straight from where the tensors lie (summed_file.py).
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from strop.errors import DamagedCheckpoint, LearnerError, ModelError
from strop.files import sync_folder
from strop.learner.lora import name_in_file
from strop.learner.sharding import fill
from strop.learner.summed_file import write_state, write_tensors
from strop.models.checksums import SUMS, TRAINING, WEIGHTS, describe_damage, verify, write_sums

MODEL, ADAPTER = WEIGHTS
_WRITING = re.compile("inline_container|PytorchStreamWriter|os error", re.IGNORECASE)
"""What torch and safetensors say when a file takes no more."""
_COPIED = (".json", ".jinja", ".txt", ".model")
_NOT_COPIED = ("strop.json", ".index.json", "adapter_config.json")


def save(
    folder: str | Path,
    *,
    weights: Mapping[str, Tensor],
    adapter: dict[str, Any] | None,
    state: dict[str, Any],
    meta: dict[str, Any],
    source: Path,
    values: Iterable[Tensor] | None = None,
    beside: Callable[[Path], None] | None = None,
) -> None:
    """A crash at any moment leaves the whole folder or none. `adapter` describes one, if the weights are one's.
    `values` are those of weights that have none (summed_file.py); `beside` writes more into it."""
    try:
        with write_whole(Path(folder)) as fresh:
            with ThreadPoolExecutor(1, "optimizer.pt") as thread:
                writing = thread.submit(write_state, fresh / "optimizer.pt", state)
                sums = write(fresh, weights, adapter, source, values)
                (fresh / "strop.json").write_text(json.dumps(meta, indent=2))
                sums["optimizer.pt"] = writing.result()
            if beside is not None:
                beside(fresh)
            write_sums(fresh, sums)
    except (OSError, RuntimeError) as error:
        raise LearnerError(
            f"the checkpoint {folder} cannot be written: {explain_unwritten(error)}. Fix: free some space there, then "
            "resume: nothing else is lost"
        ) from error


def restore(
    folder: str | Path, *, weights: Mapping[str, Tensor], adapter: bool
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Copy the weights in place and return (state, meta) as they were saved. Raises `DamagedCheckpoint`, with nothing
    copied, where a file is missing or not what was written."""
    folder = Path(folder)
    if not any((folder / name).exists() for name in (SUMS, *TRAINING)):
        raise DamagedCheckpoint(f"{folder} is not a checkpoint: {', '.join(TRAINING)} are missing")
    verify(folder)
    with report_damage(folder / "strop.json") as file:
        meta = json.loads(file.read_text())
    with report_damage(folder / "optimizer.pt") as file:
        state = torch.load(file, map_location="cpu", weights_only=True)
    read(folder, weights, adapter=adapter)
    return state, meta


@contextmanager
def report_damage(file: Path) -> Iterator[Path]:
    """What cannot be read is damaged, whatever the library that reads it has to say about that; unless its checksum
    was found to be right."""
    try:
        yield file
    except FileNotFoundError:
        raise describe_damage(file, "it is missing") from None
    except (OSError, EOFError, ValueError, RuntimeError, KeyError, UnpicklingError, SafetensorError) as error:
        if (file.parent / SUMS).exists():
            raise
        why = "it is empty" if file.is_file() and not file.stat().st_size else "it cannot be read"
        raise describe_damage(file, why) from error


def write(
    folder: Path,
    weights: Mapping[str, Tensor],
    adapter: dict[str, Any] | None,
    source: Path,
    values: Iterable[Tensor] | None = None,
) -> dict[str, str]:
    """Fill `folder` with weights and what belongs to them, as Hugging Face's libraries read them. Returns the checksum
    of the weights' file, by its name."""
    for file in sorted(source.iterdir()):
        if file.suffix in _COPIED and not file.name.endswith(_NOT_COPIED):
            shutil.copyfile(file, folder / file.name)
    if adapter is None:
        config = json.loads((folder / "config.json").read_text())
        config["dtype"] = str(next(iter(weights.values())).dtype).removeprefix("torch.")
        config.pop("torch_dtype", None)
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        return {MODEL: write_tensors(folder / MODEL, weights, values)}
    (folder / "config.json").unlink()  # it is not the whole model's folder, and must not be taken for it
    (folder / "adapter_config.json").write_text(json.dumps(adapter, indent=2) + "\n")
    return {ADAPTER: write_tensors(folder / ADAPTER, {name_in_file(name): t for name, t in weights.items()})}


@torch.no_grad()
def read(folder: Path, weights: Mapping[str, Tensor], *, adapter: bool) -> None:
    """Copy the weights in `folder` into the tensors given."""
    if not (folder / (ADAPTER if adapter else MODEL)).exists() and (folder / (MODEL if adapter else ADAPTER)).exists():
        found, wanted = ("the whole model", "an adapter") if adapter else ("an adapter", "the whole model")
        raise ModelError(f"{folder} is a checkpoint of {found}, and {wanted} is trained. Fix: check learner.lora.rank")
    names = {name: name_in_file(name) if adapter else name for name in weights}
    with report_damage(folder / (ADAPTER if adapter else MODEL)) as path, safe_open(path, "pt") as file:
        there = set(file.keys())
        for name, saved in names.items():
            if saved not in there or file.get_slice(saved).get_shape() != list(weights[name].shape):
                what = "another shape of" if saved in there else "no"
                raise ModelError(f"{folder} holds {what} {name}: it is a checkpoint of another model")
        for name, saved in names.items():
            fill(weights[name], file.get_tensor(saved))


def fresh_folder(folder: Path) -> Path:
    """Where it is written before it has its name."""
    return folder.with_name(f".{folder.name}.new")


@contextmanager
def write_whole(folder: Path) -> Iterator[Path]:
    """A sibling to write into: once the block ends it is fsynced and takes the name `folder`."""
    fresh = fresh_folder(folder)
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir(parents=True)
    try:
        yield fresh
    except BaseException:  # the next one needs the space
        shutil.rmtree(fresh, ignore_errors=True)
        raise
    sync_folder(fresh, whole=True)
    fresh.rename(folder)
    sync_folder(folder.parent)


def explain_unwritten(error: Exception) -> str:
    """What a place had against being written to. Raises an error that is about something else."""
    if not isinstance(error, OSError) and not _WRITING.search(str(error)):
        raise error
    return error.strerror if isinstance(error, OSError) and error.strerror else "the disk is full, or gone"
