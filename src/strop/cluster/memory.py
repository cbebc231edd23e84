"""How much memory a rank will take on its node, counted there before anything starts (learner/memory.py)."""

from __future__ import annotations

import sys
from typing import Any, cast

import msgspec
from msgspec import Struct

from strop.algorithms import make
from strop.config import Config


class MemoryQuestion(Struct, frozen=True):
    """`config` is a policy's, as if it were the only one; `model` the folder of its model. `taken` is the share of its
    GPU's memory that others have meanwhile."""

    config: Config
    model: str
    ranks: int
    taken: float = 0.0


class RankMemory(Struct, frozen=True):
    """Bytes that each rank takes at its peak, and that are free on the node. `gpu`: of the GPU's memory. `advice` is
    how it could be less, where that is too much."""

    peak: int
    free: int
    gpu: bool
    advice: str = ""

    def describe(self, ranks: int) -> str:
        """
        >>> RankMemory(peak=2**30, free=2**34, gpu=False).describe(2)
        'an update takes about 1 GiB of memory per rank (2 ranks), and 16 GiB are free there'
        """
        kind = "GPU memory" if self.gpu else "memory"
        each = f" ({ranks} ranks)" if ranks > 1 else ""
        return f"an update takes about {gib(self.peak)} of {kind} per rank{each}, and {gib(self.free)} are free there"


def gib(size: int) -> str:
    return f"{size / 2**30:.2g} GiB"


def foresee(asked: MemoryQuestion) -> RankMemory:
    """Where the packages and the model are."""
    import torch
    from transformers import AutoConfig

    from strop.learner.memory import available_memory, plan
    from strop.learner.model import place

    config = asked.config
    needs = make(config.algorithm, config.learner, config.policy).needs
    device = place(config.learner)[0]
    free = available_memory()
    if device.type == "cuda":
        unused, size = torch.cuda.mem_get_info(device)
        free = max(int(unused - asked.taken * size), 0)
    model = cast("Any", AutoConfig).from_pretrained(asked.model)
    found = plan(model, config.learner, free, reference="ref" in needs, critic="value" in needs)
    return RankMemory(found.peak, free, device.type == "cuda", found.advice)


def answer() -> None:
    """From standard input to standard output."""
    asked = msgspec.json.decode(sys.stdin.buffer.read(), type=MemoryQuestion)
    sys.stdout.buffer.write(msgspec.json.encode(foresee(asked)))
