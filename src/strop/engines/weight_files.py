"""A folder of weights, looked at without torch before an engine hears of it: its tensors by name, shape and values."""

from __future__ import annotations

import json
import mmap
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from strop.engines.receiver import LogprobProbe, ModelTensors, TensorSpec, WeightsRefused

DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
"""Names of floating-point types in safetensors files."""
LARGEST_HEADER = 100 << 20
EXPONENT = {"F64": ("<u8", 0x7FF << 52), "F32": ("<u4", 0x7F800000), "F16": ("<u2", 0x7C00), "BF16": ("<u2", 0x7F80)}
"""As integers, and which bits are all set in what is not a finite number."""
CHUNK = 1 << 22


def read_tensors(folder: Path) -> ModelTensors:
    """What a model's folder must have."""
    tied = json.loads((folder / "config.json").read_text()).get("tie_word_embeddings", False)
    return ModelTensors(read_specs(folder), bool(tied))


def read_specs(folder: Path) -> dict[str, TensorSpec]:
    """The tensors that are in a folder, read from the heads of its safetensors files."""
    return {name: spec for file in list_files(folder) for name, (spec, _) in _head(file).items()}


def refuse_bad(folder: Path, model: ModelTensors) -> None:
    """Refuse a folder whose tensors are not those of the model, or not all finite numbers."""
    what = f"the weights in {folder}"
    model.refuse_misfits(read_specs(folder), what)
    for file in list_files(folder):
        if name := next(find_broken(file), None):
            raise WeightsRefused(
                f"{what} are broken: {name} has values that are not finite numbers; nothing was changed"
            )


def read_probe(folder: Path) -> LogprobProbe | None:
    try:
        return msgspec.json.decode((folder / "probe.json").read_bytes(), type=LogprobProbe)
    except FileNotFoundError:
        return None


def list_files(folder: Path) -> list[Path]:
    """Those that hold the weights: some folders have the same ones again in another format."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        names: dict[str, str] = json.loads(index.read_text())["weight_map"]
        return [folder / name for name in sorted(set(names.values()))]
    whole = folder / "model.safetensors"
    files = [whole] if whole.is_file() else sorted(folder.glob("*.safetensors"))
    if not files:
        raise WeightsRefused(f"{folder} holds no weights: there is no .safetensors file in it")
    return files


def _head(file: Path) -> dict[str, tuple[TensorSpec, tuple[str, int, int]]]:
    """Per tensor: what it is; its type, and where its bytes begin and end in the file."""
    try:
        with file.open("rb") as handle:
            size = int.from_bytes(handle.read(8), "little")
            if not 0 < size <= LARGEST_HEADER:
                raise ValueError("its head is too large")
            head: dict[str, Any] = msgspec.json.decode(handle.read(size))
            whole = handle.seek(0, 2)
        found: dict[str, tuple[TensorSpec, tuple[str, int, int]]] = {}
        for name, about in head.items():
            if name == "__metadata__":
                continue
            kind, shape, (start, end) = about["dtype"], tuple(about["shape"]), about["data_offsets"]
            if 8 + size + end > whole:
                raise ValueError(f"it ends in the middle of {name}")
            found[name] = TensorSpec(DTYPES.get(str(kind), str(kind)), shape), (kind, 8 + size + start, 8 + size + end)
    except (OSError, ValueError, KeyError, TypeError) as error:  # msgspec's errors are ValueErrors
        raise WeightsRefused(f"{file} cannot be read as safetensors: {error}; nothing was changed") from None
    return found


def find_broken(file: Path) -> Iterator[str]:
    """Names of tensors with values that are not finite numbers."""
    heads = _head(file)
    with file.open("rb") as handle, mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ) as data:
        for name, (spec, (kind, start, _)) in heads.items():
            if kind not in EXPONENT or not prod(spec.shape):
                continue
            numbers, bits = EXPONENT[kind]
            values = np.frombuffer(data, numbers, prod(spec.shape), start)
            bad = any(bool(((values[at : at + CHUNK] & bits) == bits).any()) for at in range(0, len(values), CHUNK))
            del values  # the map cannot be closed while somebody looks at it
            if bad:
                yield name
