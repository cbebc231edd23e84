"""Tensors into files, each byte once: a file is hashed by one thread while another writes it, straight from the memory
in which the tensors lie.

    write_tensors(folder / "model.safetensors", weights)    the bytes that safetensors' own `save_file` would write
    write_state(folder / "optimizer.pt", state)             what `torch.save` writes, but without its CRC-32

Both return the SHA-256 of what was to be written, so that nothing has to be read again, and a disk that wrote something
else is found out when the checkpoint is verified. Beside that a CRC-32 is of no use, and `torch.load` does not look at
it.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

assert sys.byteorder == "little", "safetensors are little-endian"

PIECE = 2**26
"""Bytes that are written at a time; the system takes at most 2 GiB."""
SMALL = 2**16
"""Bytes that are hashed sooner than another thread would have begun."""

_NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
"""What safetensors call a dtype."""


class SummedFile:
    """A file that is written from its beginning to its end. `checksum` is that of what was written so far; `error` is
    what the disk had against it."""

    def __init__(self, path: Path) -> None:
        self.error: OSError | None = None
        self._file = path.open("wb", buffering=0)
        self._sum = hashlib.sha256()
        self._hashing = ThreadPoolExecutor(1, path.name)

    def __enter__(self) -> SummedFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._hashing.shutdown()
        self._file.close()

    @property
    def checksum(self) -> str:
        return self._sum.hexdigest()

    def write(self, data: Any) -> int:
        whole = memoryview(data).cast("B")
        if len(whole) < SMALL:
            self._sum.update(whole)
            self._write(whole)
        else:
            hashing = self._hashing.submit(self._sum.update, whole)
            try:
                self._write(whole)
            finally:
                hashing.result()  # the memory may be another's once this returns
        return len(whole)

    def _write(self, whole: memoryview) -> None:
        done = 0
        try:
            while done < len(whole):
                done += self._file.write(whole[done : done + PIECE]) or 0
        except OSError as error:
            self.error = error
            raise

    def flush(self) -> None:
        """Nothing is held back."""

    def sync(self) -> None:
        """Returns once the disk has it."""
        os.fsync(self._file.fileno())


def order_tensors(tensors: Mapping[str, Tensor]) -> list[str]:
    """Their names, as the file has them one after the other."""
    return sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))


def write_tensors(path: Path, tensors: Mapping[str, Tensor], values: Iterable[Tensor] | None = None) -> str:
    """Write a safetensors file and return its checksum. Where tensors have no values (torch's meta device), `values`
    gives those, one after the other in their order."""
    order = order_tensors(tensors)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in order:
        tensor, begin = tensors[name], end
        end += tensor.nbytes
        header[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)  # the data are aligned
    with SummedFile(path) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, tensor in zip(order, values or (tensors[name] for name in order), strict=True):
            assert tensor.nbytes == tensors[name].nbytes, f"{name} has another size than was said"
            if tensor.nbytes:
                file.write(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())
        file.sync()
        return file.checksum


def write_state(path: Path, state: Any) -> str:
    """Write a file that `torch.load` reads and return its checksum."""
    torch.serialization.set_crc32_options(False)
    with SummedFile(path) as file:
        try:
            torch.save(state, file)  # pyright: ignore[reportArgumentType] - what it asks of a file is `write`
        except RuntimeError:
            if file.error is not None:  # torch says nothing of what went wrong
                raise file.error from None
            raise
        file.sync()
        return file.checksum
