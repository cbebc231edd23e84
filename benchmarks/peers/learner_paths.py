"""Depth-first execution of a token tree: every token is computed once, and only the path to where one is is kept.

    a segment with branches below it    forward; its keys and values stay, as leaves of the graphs below
    a subtree of at most `unit` tokens  forward and backward at once; gradients of the path's keys and values add up
    back at the segment                 backward, from its own loss and from those gradients

So no prefix is repeated, however small the memory: at its peak it holds the longest path and one subtree. In exchange
a tree is many short passes, each of which launches every kernel and adds to every weight's gradient. This is what
AReaL's DTA does ("dynamic tree training"), written anew in its simplest form to be compared with.

Left out: losses over whole turns, whose entries may be in two segments; compiled blocks; FlexAttention, which would be
compiled for each length of a path (on a GPU attention is torch's own, under a mask; on a CPU it is that of
tree_attention.py).
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from strop.learner.learner import Learner, _view  # pyright: ignore[reportPrivateUsage]
from strop.learner.logprobs import read
from strop.learner.tree_attention import for_all_heads, visible
from strop.trajectory import Batch, MicroBatch


@dataclass
class Segment:
    """One on the path. `kept` are its keys and values, layer by layer, as they were computed; `leaves` the same for
    what is below, which leaves their gradients there."""

    size: int
    loss: Tensor | None
    kept: list[Tensor]
    leaves: list[Tensor]


class PathAttention:
    """A learner's `Tree`: tokens see all of the path, and of their own subtree what the rule says."""

    def __init__(self, end: np.ndarray, path: list[Segment], device: torch.device) -> None:
        self.size = len(end)
        self.path = path
        self.kept: list[Tensor] = []
        rows = np.arange(len(end))
        before = np.ones((len(end), sum(segment.size for segment in path)), bool)
        self.mask = torch.from_numpy(np.concatenate([before, visible(rows, rows, end)], 1)).to(device)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        at = len(self.kept)
        self.kept += [key, value]
        key = torch.cat([*(segment.leaves[at] for segment in self.path), key], 2)
        value = torch.cat([*(segment.leaves[at + 1] for segment in self.path), value], 2)
        key, value = for_all_heads(query, key, value)
        if query.is_cuda:
            return torch.nn.functional.scaled_dot_product_attention(query, key, value, self.mask, scale=scaling)
        scores = torch.matmul(query * scaling, key.transpose(2, 3)) + torch.where(self.mask, 0.0, -torch.inf)
        return torch.matmul(scores.softmax(-1), value)


class DepthFirst:
    """The gradients of a batch, by depth-first execution; `passes` and `held`, the most tokens at once, are counted."""

    def __init__(self, learner: Learner, batch: Batch, tree: MicroBatch, unit: int) -> None:
        self.learner, self.batch, self.tree, self.unit = learner, batch, tree, unit
        self.path: list[Segment] = []
        self.passes = self.held = 0

    def run(self) -> None:
        for start, stop, below in find_units(self.tree.end, self.unit):
            if below is None:
                self._leave()
                continue
            segment = self._forward(start, stop, keep=below)
            self.path.append(segment)
            self.held = max(self.held, sum(one.size for one in self.path))
            if not below:
                self._leave()

    def _forward(self, start: int, stop: int, keep: bool) -> Segment:
        model: Any = self.learner.model
        tree, device = self.tree, model.device
        attention = PathAttention(tree.end[start:stop] - start, self.path, device)
        hidden = model.base_model(
            input_ids=torch.from_numpy(tree.ids[start:stop])[None].to(device),
            position_ids=torch.from_numpy(tree.pos[start:stop])[None].to(device),
            attention_mask=torch.zeros(1, 1, 1, 1, device=device),
            use_cache=False,
            tree=attention,
        ).last_hidden_state[0]
        self.passes += 1
        loss = self._loss(hidden, start, stop)
        kept = attention.kept if keep else []
        return Segment(stop - start, loss, kept, [tensor.detach().requires_grad_() for tensor in kept])

    def _loss(self, hidden: Tensor, start: int, stop: int) -> Tensor | None:
        inside = np.flatnonzero((start <= self.tree.at) & (self.tree.at < stop))
        if not len(inside):
            return None
        entry, at = self.tree.entry[inside], self.tree.at[inside] - start
        piece = MicroBatch(self.tree.ids, self.tree.pos, self.tree.end, entry, at)
        states = hidden.index_select(0, torch.from_numpy(at).to(hidden.device))
        logp, entropy = read(self.learner.model, states, piece, self.batch.entries)
        view = _view(self.batch, piece, logp)
        per_entry, _ = self.learner.algorithm.compute_loss(logp, entropy, None, view)
        return (view.weight * per_entry).sum()

    def _leave(self) -> None:
        """Backward through the last segment of the path, all below it being done."""
        segment = self.path.pop()
        known = [
            (kept, leaf.grad) for kept, leaf in zip(segment.kept, segment.leaves, strict=True) if leaf.grad is not None
        ]
        tensors, grads = [kept for kept, _ in known], [grad for _, grad in known]
        if segment.loss is not None:
            tensors, grads = [segment.loss, *tensors], [torch.ones_like(segment.loss), *grads]
        if tensors:
            torch.autograd.backward(tensors, grads)


def find_units(end: np.ndarray, unit: int) -> Iterator[tuple[int, int, bool | None]]:
    """What to run, in order: (start, stop, False) for subtrees of together at most `unit` tokens or a segment with
    nothing below it, (start, stop, True) for a segment that is returned to, (.., .., None) where that is.

    >>> list(find_units(np.array([6, 6, 4, 4, 6, 6]), 2))
    [(0, 2, True), (2, 4, False), (4, 6, False), (0, 2, None)]
    """
    cuts = np.append(np.flatnonzero(np.diff(end)) + 1, len(end))  # a chain without branches has one `end`
    todo: list[tuple[int, int, bool]] = [(0, len(end), True)]  # the last comes first; False: a segment to return to
    while todo:
        start, stop, is_forest = todo.pop()
        if not is_forest:
            yield start, stop, None
            continue
        at = start
        while at < stop and int(end[at]) - start <= unit:
            at = int(end[at])
        if at > start:
            yield start, at, False
            todo += [(at, stop, True)] * (at < stop)
            continue
        last, segment = int(end[start]), int(cuts[np.searchsorted(cuts, start, "right")])
        todo += [(last, stop, True)] * (last < stop)
        yield start, segment, segment < last
        if segment < last:
            todo += [(start, segment, False), (segment, last, True)]


class PeakBytes(TorchDispatchMode):
    """The most bytes that tensors made since it began had at any time: for CPUs, whose allocator does not say."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor) and (storage := tensor.untyped_storage())._cdata not in self.known:
                self.known.add(storage._cdata)
                self.now += storage.nbytes()
                self.peak = max(self.peak, self.now)
                weakref.finalize(storage, self._forget, storage._cdata, storage.nbytes())
        return out

    def _forget(self, place: int, size: int) -> None:
        self.known.discard(place)
        self.now -= size
