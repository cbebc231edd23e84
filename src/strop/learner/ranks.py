"""Ranks: several processes that train one model together, each on its share of the micro-batches.

    every rank   the same batch ──pack──▶ the same micro-batches ──share──▶ its own, as many as everybody has
                 forward and backward passes over those ──▶ gradients and readings, summed over all ranks

All of them are sums over the whole batch, whose weights were normalised before it was packed: an update does not depend
on how many ranks there are, up to rounding. A rank with fewer micro-batches than others repeats one with no loss, since
a sharded model (sharding.py) is put together by all ranks at once, in every pass.

Left out: going on when one rank runs out of memory, since the others are in the middle of a pass that needs it. The run
ends with the reason and is resumed with smaller micro-batches, on a cluster by itself.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from strop.config import LearnerConfig
from strop.errors import LearnerError
from strop.learner.sequence_parallel import SequenceGroup
from strop.learner.verbs import RankPlace
from strop.trajectory import Batch, MicroBatch, pack
from strop.trajectory.batch import Floats, Ints

LOOPBACK = "lo"
GRACE = 30.0
"""Seconds that torch allows a collective beyond `learner.collective_timeout`, after which whoever watches over the
ranks ends them with a reason (heartbeat.py)."""


class Ranks:
    """This process among the ranks; `mesh` is all of them. There is one of each place in a process. Each
    `sequence_parallel` ranks in a row, the group of `sequence`, run a piece together."""

    def __init__(
        self,
        place: RankPlace,
        device: torch.device,
        sequence_parallel: int = 1,
        *,
        collective_timeout: float = LearnerConfig().collective_timeout,
    ) -> None:
        self.index, self.count, self.device = place.index, place.count, device
        self.address = place.address
        self.num_groups = self.count // sequence_parallel
        self.sequence: SequenceGroup | None = None
        if self.alone:
            return
        if device.type == "cuda":
            _choose_gpu(place)
        if place.rendezvous.startswith("file:"):  # all of them are on this machine
            os.environ.setdefault("GLOO_SOCKET_IFNAME", LOOPBACK)
            os.environ.setdefault("NCCL_SOCKET_IFNAME", LOOPBACK)
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        how: dict[str, Any] = {"timeout": timedelta(seconds=collective_timeout + GRACE)}
        dist.init_process_group(backend, init_method=place.rendezvous, rank=self.index, world_size=self.count, **how)
        self.mesh: DeviceMesh = init_device_mesh(device.type, (self.count,))
        self.cpu_mesh: DeviceMesh = init_device_mesh("cpu", (self.count,))
        # For the threads that write checkpoints:
        self.saving: Any = dist.new_group(backend="gloo", **how)
        self.saving_mesh: DeviceMesh = DeviceMesh.from_group(self.saving, "cpu")
        if sequence_parallel > 1:
            group, _ = dist.new_subgroups(sequence_parallel, **how)
            self.sequence = SequenceGroup(group, self.index % sequence_parallel, sequence_parallel)

    @property
    def alone(self) -> bool:
        return self.count == 1

    @property
    def leads(self) -> bool:
        """Whether this is the rank that writes files and speaks to engines."""
        return self.index == 0

    def share(self, pieces: Sequence[MicroBatch], width: int) -> list[tuple[MicroBatch, bool]]:
        """What this rank runs of the pieces, `width` being the model's: as many as every other rank, with whether it is
        its own or only repeated."""
        own = share_work([measure_work(piece, width) for piece in pieces], self.num_groups)
        most = max((len(each) for each in own), default=0)
        mine = [(pieces[k], True) for k in own[self.index * self.num_groups // self.count]]
        spare = min(pieces, key=lambda piece: len(piece.ids)) if pieces else None
        return mine + [(spare, False)] * (most - len(mine)) if spare is not None else []

    def sum(self, *tensors: Tensor) -> None:
        """Sum over all ranks, in place. All tensors have one dtype and one device."""
        if self.alone or not tensors:
            return
        flat = torch.cat([tensor.detach().reshape(-1) for tensor in tensors])
        dist.all_reduce(flat)
        for tensor, total in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
            tensor.copy_(total.view_as(tensor))

    def sum_gradients(self, parameters: Iterable[Tensor]) -> None:
        """Of parameters that every rank has whole; those of sharded ones are summed by their backward pass."""
        if self.alone:
            return
        gradients: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
        for parameter in parameters:
            if not isinstance(parameter, DTensor):
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                gradients.setdefault((parameter.dtype, parameter.device), []).append(parameter.grad)
        for each in gradients.values():
            self.sum(*each)

    def merge(self, column: Floats) -> Floats:
        """What ranks have found of one column, each some rows of it and NaN elsewhere; of a row all find the same."""
        if self.alone:
            return column
        known = ~np.isnan(column)
        both = torch.from_numpy(np.stack([np.where(known, column, 0.0), known.astype(np.float64)]))
        dist.all_reduce(both)
        total, count = both.numpy()
        return np.where(count > 0, total / np.maximum(count, 1), np.nan)

    def sum_dicts(self, found: Mapping[str, float]) -> dict[str, float]:
        """The sum of what ranks have by each name. One may have none of it; what ranks find together counts once."""
        if self.alone:
            return dict(found)
        every: list[Any] = [None] * self.count
        dist.all_gather_object(every, dict(found))
        names = {name: None for each in every for name in each}
        return {name: sum(each.get(name, 0.0) for each in every) * self.num_groups / self.count for name in names}


def _choose_gpu(place: RankPlace) -> None:
    if place.gpu >= (there := torch.cuda.device_count()):
        raise LearnerError(
            f"learner.ranks={place.count} needs as many GPUs, and there {'is' if there == 1 else 'are'} {there}. Fix: "
            f"set learner.ranks={there}"
        )
    torch.cuda.set_device(place.gpu)


def pack_evenly(batch: Batch, budget: int, turns: Ints | None, count: int) -> list[MicroBatch]:
    """`pack`, with pieces of equal size, as many for each of `count` ranks as for any other, where that repeats
    little."""
    pieces = pack(batch, budget, turns)
    if count == 1 or not pieces:
        return pieces
    wanted = -(-len(pieces) // count) * count
    longest = max(len(batch.paths[t]) for t in (range(len(batch.turns)) if turns is None else turns))
    smaller = -(-sum(len(piece.ids) for piece in pieces) // wanted)
    while (smaller := max(longest, smaller)) < budget:
        found = pack(batch, smaller, turns)
        if len(found) <= wanted:
            return found
        smaller += -(-smaller // 10)
    return pieces


def measure_work(piece: MicroBatch, width: int) -> float:
    """What a pass over a piece takes, in any unit: a token's products of matrices cost as much as 6 * width tokens that
    it sees."""
    return float(6 * width * len(piece.ids) + piece.pos.sum() + len(piece.pos))


def share_work(work: Sequence[float], count: int) -> list[list[int]]:
    """Who does what of some pieces of work, so that the most that anybody has is little: the largest pieces first, each
    to whoever has least.

    >>> share_work([5.0, 3.0, 3.0, 2.0], 2)
    [[0, 3], [1, 2]]
    """
    own: list[list[int]] = [[] for _ in range(count)]
    total = [0.0] * count
    for k in sorted(range(len(work)), key=lambda k: (-work[k], k)):
        least = min(range(count), key=lambda rank: (total[rank], len(own[rank]), rank))
        own[least].append(k)
        total[least] += work[k]
    return own


ALONE = Ranks(RankPlace(), torch.device("cpu"))
"""One process that trains by itself."""
