"""CUDA graphs of a small model's update: passes through its blocks, recorded once and replayed for any tree of a size.

    forward    ids, positions and the tree, as one array ──▶ where the recording reads them ──▶ hidden states
    backward   the hidden states' gradient ──▶ where it is read likewise ──▶ every parameter's, added to its master's

An update of a small model is three thousand kernels, and the host takes four times as long to launch them as the GPU to
run them. Played again they are two launches. What is recorded is padded to a size for which attention has a kernel;
padding sees only itself and gets no gradient. A recording keeps the memory of its pass, so there are few sizes of them,
and none where there is not plenty of memory. It knows tensors by their addresses: where parameters have moved it is
thrown away. Where a pass cannot be recorded it is run one operation after the other, as a larger model's is.

Left out: adapters, recomputed blocks and offloaded masters.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from strop.engines.embedded.graphs import unwinding
from strop.learner.blocks import Way
from strop.learner.device import send
from strop.learner.flex_attention import BLOCK, COARSE, kernel_size, list_blocks, make_flex_tree
from strop.learner.logprobs import run_blocks
from strop.learner.masters import Masters
from strop.trajectory import MicroBatch

log = logging.getLogger(__name__)

MOST_WORK = 2**42
"""Parameters times tokens of a pass, above which the GPU takes longer than the host does."""
MEMORY = 8
"""A pass may keep one part in so many of the GPU's memory."""


class PassRecorder(Protocol):
    """How passes are recorded."""

    def warm_up(self, function: Callable[[], None]) -> None:
        """Run it once; what is made is not kept."""
        ...

    def record(self, function: Callable[[], None]) -> Callable[[], None]:
        """What runs it again, on the same tensors."""
        ...


class TrunkGraphs:
    """The recordings of one model. How they are made and `size_of` (a piece's tokens to those of its recording) are
    given where there is no GPU."""

    def __init__(
        self,
        model: PreTrainedModel,
        masters: Masters,
        *,
        recorder: Callable[[], PassRecorder] | None = None,
        size_of: Callable[[int], int] = kernel_size,
        block: int = BLOCK,
    ) -> None:
        self._model, self._masters = model, masters
        self._make_recorder = recorder or _GpuRecorder
        self._size_of, self._block = size_of, block
        self._parameters = list(masters.of)
        self._work = sum(parameter.numel() for parameter in self._parameters)
        self._recorder: PassRecorder | None = None
        self._recorded: dict[tuple[int, Way], _Recording] = {}
        self._addresses: list[int] = []
        self._anchor = torch.zeros(1, device=model.device, requires_grad=True)
        self._passes = 0
        self._too_large = COARSE + 1

    def run(self, piece: MicroBatch, way: Way) -> Tensor | None:
        """The hidden state of every token and of those that fill the recording up, [tokens and more, width], until the
        next pass; None where this one is not recorded. Parameters' gradients go to the masters, not to `grad`."""
        size = self._size_of(len(piece.ids))
        if size >= self._too_large or self._work * size > MOST_WORK:
            return None
        addresses = [parameter.data_ptr() for parameter in self._parameters]
        if addresses != self._addresses:
            self._forget()
            self._addresses = addresses
        if (size, way) not in self._recorded and not self._record(size, way, piece):
            return None
        recording = self._recorded[size, way]
        recording.take(piece)
        found: Any = _Played.apply(self._anchor, self, recording)
        return found

    def refuse(self) -> None:
        """Record nothing from now on, and give the memory back."""
        self._forget()
        self._too_large = 0

    def play(self, recording: _Recording) -> tuple[Tensor, int]:
        """A forward pass, and its number: only the last one can be followed by a backward pass, since all share their
        memory."""
        self._passes += 1
        return recording.forward(), self._passes

    def play_back(self, recording: _Recording, number: int, slope: Tensor) -> None:
        assert number == self._passes, "another pass has written over what this one kept"
        self._masters.add(recording.backward(slope))

    def _forget(self) -> None:
        self._recorded.clear()
        self._recorder = None

    def _record(self, size: int, way: Way, piece: MicroBatch) -> bool:
        recording = _Recording(self._model, self._parameters, way, size, self._block)
        recording.take(piece)
        self._recorder = self._recorder or self._make_recorder()
        try:
            with torch.enable_grad():
                recording.make(self._recorder)
        except torch.OutOfMemoryError as error:
            log.warning("updates of %d tokens are not recorded: %s", size, str(error).splitlines()[0])
            self._too_large = size
            return False
        except RuntimeError as error:
            log.warning("updates cannot be recorded, which makes them slower: %s", str(error).splitlines()[0])
            self.refuse()
            return False
        self._recorded[size, way] = recording
        return True


class _GpuRecorder:
    """All recordings have one pool of memory: passes are played one after the other."""

    def __init__(self) -> None:
        self._pool: Any = torch.cuda.graph_pool_handle()

    def warm_up(self, function: Callable[[], None]) -> None:
        """Kernels are compiled, and libraries make their plans."""
        here, aside = torch.cuda.current_stream(), torch.cuda.Stream()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        aside.wait_stream(here)
        with torch.cuda.stream(aside):
            function()
        here.wait_stream(aside)
        kept, whole = torch.cuda.max_memory_allocated() - before, torch.cuda.mem_get_info()[1]
        if kept * MEMORY > whole:
            raise torch.OutOfMemoryError(f"a pass keeps {kept / 2**30:.3g} GiB of the GPU's {whole / 2**30:.3g}")

    def record(self, function: Callable[[], None]) -> Callable[[], None]:
        graph = torch.cuda.CUDAGraph()
        # thread_local: autograd launches from a thread of its own.
        with unwinding(self._pool), torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            function()
        return graph.replay


class _Recording:
    """Passes of one size. Whatever it reads and writes stays where it is."""

    def __init__(self, model: PreTrainedModel, parameters: list[nn.Parameter], way: Way, size: int, block: int) -> None:
        self._model, self._parameters, self._way = model, parameters, way
        self._size, self._block = size, block
        count = size // block
        self._shapes = [(size,)] * 3 + [(1, 1, count), (1, 1, count, count)] * 4
        self._given = torch.zeros(sum(int(np.prod(s)) for s in self._shapes), dtype=torch.int32, device=model.device)
        self._hidden: Tensor
        self._slope: Tensor
        self._found: tuple[Tensor | None, ...] = ()
        self._forward: Callable[[], None]
        self._backward: Callable[[], None]

    def take(self, piece: MicroBatch) -> None:
        """The piece that comes next."""
        missing = self._size - len(piece.ids)
        end = np.append(piece.end, np.arange(len(piece.end), self._size) + 1)
        arrays = [np.pad(piece.ids, (0, missing)), np.pad(piece.pos, (0, missing)), end, *list_blocks(end, self._block)]
        flat = np.concatenate([array.ravel() for array in arrays], dtype=np.int32, casting="same_kind")
        self._given.copy_(send(flat, self._given.device))

    def make(self, recorder: PassRecorder) -> None:
        recorder.warm_up(self._run_both)
        self._forward = recorder.record(self._run_forward)
        self._slope = torch.zeros_like(self._hidden)
        self._backward = recorder.record(self._run_backward)
        self._hidden = self._hidden.detach()  # without what autograd kept: the next recording may use that memory

    def forward(self) -> Tensor:
        self._forward()
        return self._hidden.detach()

    def backward(self, slope: Tensor) -> dict[nn.Parameter, Tensor]:
        self._slope.copy_(slope)
        self._backward()
        pairs = zip(self._parameters, self._found, strict=True)
        return {parameter: gradient for parameter, gradient in pairs if gradient is not None}

    def _run_forward(self) -> None:
        parts = self._given.split([int(np.prod(shape)) for shape in self._shapes])
        ids, pos, *of_tree = [part.view(shape).clone() for part, shape in zip(parts, self._shapes, strict=True)]
        tree = make_flex_tree(of_tree, self._size, self._size, self._block)
        self._hidden = run_blocks(self._model, ids[None].long(), pos[None].long(), tree, self._way)[0]

    def _run_backward(self) -> None:
        self._found = torch.autograd.grad(self._hidden, self._parameters, self._slope, allow_unused=True)

    def _run_both(self) -> None:
        self._run_forward()
        self._slope = torch.zeros_like(self._hidden)
        self._run_backward()
        self._hidden, self._found = self._hidden.detach(), ()


class _Played(torch.autograd.Function):
    """A recording as one operation. Nothing is returned to autograd: gradients are added to the masters'."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, graphs: TrunkGraphs, recording: _Recording) -> Tensor:
        hidden, ctx.number = graphs.play(recording)
        ctx.graphs, ctx.recording = graphs, recording
        return hidden

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, slope: Tensor) -> tuple[None, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.graphs.play_back(ctx.recording, ctx.number, slope)
        return None, None, None
