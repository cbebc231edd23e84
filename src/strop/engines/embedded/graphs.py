"""Passes recorded on the GPU and played again: one launch instead of a thousand small ones.

A recording is made for a size of pass when it first comes, and holds for that size only. It knows tensors by their
addresses, so it is thrown away when weights or cache move; weights changed in place are seen by the next pass.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Recording:
    graph: torch.cuda.CUDAGraph
    given: tuple[Tensor, ...]
    logits: Tensor


class Graphs:
    """`forward(size, *given)` is what is recorded. It may not wait for the device; if it does, nothing is recorded and
    passes are run one operation after the other."""

    def __init__(self, forward: Callable[..., Tensor], model: Any) -> None:
        self._forward = forward
        self._model = model
        self._weights: list[int] = []
        self._others: list[int] = []
        self._recorded: dict[Hashable, Recording] = {}
        self._refused = False
        self._pool = torch.cuda.graph_pool_handle()
        self.refresh()

    def refresh(self) -> None:
        """Weights may have moved."""
        weights = _addresses([*self._model.parameters(), *self._model.buffers()])
        if weights != self._weights:
            self._forget()
            self._weights = weights

    def run(self, size: Hashable, given: Sequence[Tensor], *, beside: Sequence[Tensor]) -> Tensor:
        """The logits of a pass, which the next one writes over. `beside`: what it reads that is not a weight."""
        with torch.cuda.device(self._model.device):
            return self._run(size, given, beside)

    def _run(self, size: Hashable, given: Sequence[Tensor], beside: Sequence[Tensor]) -> Tensor:
        others = _addresses(beside)
        if others != self._others:
            self._forget()
            self._others = others
        if size not in self._recorded and not self._refused:
            try:
                self._recorded[size] = self._record(size, [tensor.to(self._model.device) for tensor in given])
            except RuntimeError as error:
                log.warning("passes cannot be recorded, which makes them slower: %s", str(error).splitlines()[0])
                self._refused = True
                self._recorded.clear()
        if self._refused:
            return self._forward(size, *(tensor.to(self._model.device) for tensor in given))
        recording = self._recorded[size]
        for there, here in zip(recording.given, given, strict=True):
            there.copy_(here)
        recording.graph.replay()
        return recording.logits

    def _forget(self) -> None:
        """Throw all recordings away. Their memory pool goes with the last of them: the next ones need another."""
        self._recorded.clear()
        self._pool = torch.cuda.graph_pool_handle()

    def _record(self, size: Hashable, given: Sequence[Tensor]) -> Recording:
        here = torch.cuda.current_stream()
        aside = torch.cuda.Stream()
        aside.wait_stream(here)
        with torch.cuda.stream(aside):  # libraries make their plans in a first pass, which cannot be recorded
            self._forward(size, *given)
        here.wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        # One memory pool for all: they are played one after the other. thread_local: a learner may be at work.
        with unwinding(self._pool), torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            logits = self._forward(size, *given)
        return Recording(graph, tuple(given), logits)


@contextmanager
def unwinding(pool: Any) -> Iterator[None]:
    """A recording that fails leaves the device's random numbers and its allocator as they were.

    torch 2.11 unwinds neither: no random number can be drawn in this process any more, and memory that two streams
    have used is never given out again.
    """
    device = torch.cuda.current_device()
    random = torch.cuda.default_generators[device]
    before = random.clone_state()
    try:
        yield
    except RuntimeError:
        random.graphsafe_set_state(before)
        with suppress(RuntimeError):  # a torch that unwinds by itself has ended it, and gives the pool back too
            torch._C._cuda_endAllocateToPool(device, pool)
            torch._C._cuda_releasePool(device, pool)
        raise


def _addresses(tensors: Sequence[Tensor]) -> list[int]:
    return [tensor.data_ptr() for tensor in tensors]
