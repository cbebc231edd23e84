"""A copy of what a checkpoint holds, in the CPU's memory: it is written from there while training goes on.

    memory = SnapshotMemory(device)
    memory.reserve(size)               in the background, before it is needed
    copied = memory.copy(tensors)      with a GPU a fraction of a second; nothing changes the copies any more
    ... write `copied`, and only then copy again: the memory is kept, and the next copy lies in the same place

Pinned memory takes what a GPU sends at the speed of the bus. It is allocated in one piece and registered, since torch
rounds what it pins up to a power of two.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import threading
import weakref
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

import numpy as np
import torch
from torch import Tensor

from strop.learner.memory import available_memory

log = logging.getLogger(__name__)
T = TypeVar("T")
ALIGN = 64
PORTABLE = 1  # pinned for every GPU


class SnapshotMemory:
    """Memory for one snapshot at a time, of tensors that are on `device` or the CPU's."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._bytes = np.empty(0, np.uint8)
        self._allocating: threading.Thread | None = None
        self._unpin: Callable[[], Any] = lambda: None

    def reserve(self, size: int) -> None:
        """Allocate and pin so many bytes beside what follows. Asked again it does nothing; a CPU has no need of it."""
        if self._allocating is None and self._device.type == "cuda":
            self._allocating = threading.Thread(target=self._allocate, args=(size,), name="snapshot", daemon=True)
            self._allocating.start()

    @torch.no_grad()
    def copy(self, tensors: T) -> T | None:
        """The same dicts, lists and tuples with a copy of every tensor in them; the copies before are gone. None where
        there is too little memory for it, which the log says."""
        if self._allocating is not None:
            self._allocating.join()
        size = measure(tensors)
        if size > len(self._bytes):
            self._allocate(size)
        if size > len(self._bytes):
            return None
        end = 0

        def copy_one(tensor: Tensor) -> Tensor:
            nonlocal end
            begin, end = end, end + _pad(tensor.nbytes)
            # Each in a storage of its own: torch.save writes whole storages.
            place = torch.from_numpy(self._bytes[begin : begin + tensor.nbytes])
            return place.view(tensor.dtype).view(tensor.shape).copy_(tensor, non_blocking=True)

        copied = change_tensors(tensors, copy_one)
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
        return copied

    def _allocate(self, size: int) -> None:
        """Have `size` bytes, or none at all."""
        self._unpin()
        self._bytes, self._unpin = np.empty(0, np.uint8), lambda: None
        if size > (free := available_memory()):
            log.warning(
                "a copy of what a checkpoint holds takes %.3g GiB of the CPU's memory and %.3g are free: training "
                "waits until checkpoints are written",
                *(size / 2**30, free / 2**30),
            )
            return
        memory = mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):  # a kernel without them
                memory.madvise(mmap.MADV_HUGEPAGE)
        found = np.frombuffer(memory, np.uint8)
        if self._device.type == "cuda":
            self._pin(found)
        self._bytes = found

    def _pin(self, found: Any) -> None:
        torch.from_numpy(found).zero_()  # memory that is really there is pinned sooner
        runtime: Any = torch.cuda.cudart()
        with torch.cuda.device(self._device):
            code = int(runtime.cudaHostRegister(found.ctypes.data, len(found), PORTABLE))
        if code:  # copies are slower, and as good
            log.warning("the memory for copies of checkpoints cannot be pinned (CUDA error %d)", code)
        else:
            self._unpin = weakref.finalize(self, _unpin, runtime, found)


def _unpin(runtime: Any, found: Any) -> None:
    runtime.cudaHostUnregister(found.ctypes.data)


def measure(tensors: Any) -> int:
    """The bytes that a snapshot of these tensors takes."""
    sizes: list[int] = []
    change_tensors(tensors, lambda tensor: sizes.append(_pad(tensor.nbytes)))
    return sum(sizes)


def change_tensors(found: T, change: Callable[[Tensor], Any]) -> T:
    """The same dicts, lists and tuples, and what `change` makes of the tensors in them."""
    made: Any = found
    if isinstance(found, Tensor):
        made = change(found)
    elif isinstance(found, Mapping):
        made = {name: change_tensors(one, change) for name, one in cast("Mapping[Any, Any]", found).items()}
    elif isinstance(found, list | tuple):
        made = type(found)(change_tensors(one, change) for one in cast("list[Any]", found))
    return made


def _pad(size: int) -> int:
    return -(-size // ALIGN) * ALIGN
