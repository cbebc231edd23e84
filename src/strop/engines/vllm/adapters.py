"""Adapters on a vLLM server: what it is started with for them, and what is refused because it could not serve them.

A policy has two versions on the server while answers of the one before end, and both may be in one batch: that is what
there is room for on the GPU. vLLM never lets go of an adapter that is unloaded until another one takes its place in the
CPU's memory, and then of the one that was not used for longest, which may be one whose requests are still waiting. It
reads that one again from its folder, and ends if the folder is gone. So there is room for twice as many there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

from msgspec import Struct

from strop.errors import ConfigError, EngineError

RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""The largest ranks that a server can be started for."""
AT_WORK, KEPT = 2, 4
"""Versions of an adapter that there is room for: in a batch, and in the CPU's memory."""


class AdapterLimits(Struct, frozen=True):
    """What a server was started with: the largest rank, and how many adapters it keeps; None where that is not known.

    >>> AdapterLimits.in_arguments(["--max-lora-rank", "16", "--max_loras=3"])
    AdapterLimits(rank=16, batch=3, kept=None)
    """

    rank: int | None = None
    batch: int | None = None
    kept: int | None = None

    @staticmethod
    def in_arguments(given: Sequence[str]) -> AdapterLimits:
        """Those that are among the arguments of `vllm serve`."""
        words = [word for one in given for word in one.split("=", 1)]
        found = {name.replace("_", "-"): value for name, value in pairwise(words)}
        names = ("--max-lora-rank", "--max-loras", "--max-cpu-loras")
        rank, batch, kept = (int(found[name]) if found.get(name, "").isdigit() else None for name in names)
        return AdapterLimits(rank, batch, kept)


def choose_rank(ranks: Mapping[str, int], given: int) -> int:
    """The largest rank that a server is started for: the one that was set, or the smallest that holds all adapters;
    either way one that vLLM takes.

    >>> choose_rank({"a": 4, "b": 24}, 0), choose_rank({"a": 4}, 12), choose_rank({}, 0)
    (32, 16, 0)
    """
    name, largest = find_largest(ranks)
    if given and largest > given:
        raise ConfigError(
            f"the adapter of {name} has rank {largest}, and engine.vllm.lora_rank allows {given}. Fix: raise "
            "engine.vllm.lora_rank, or leave it out"
        )
    if largest > RANKS[-1]:
        raise ConfigError(
            f"the adapter of {name} has rank {largest}, and vLLM takes {RANKS[-1]} at most. Fix: lower "
            "learner.lora.rank"
        )
    if given > RANKS[-1]:
        raise ConfigError(f"engine.vllm.lora_rank is {given}, and vLLM takes {RANKS[-1]} at most. Fix: lower it")
    return next(rank for rank in (0, *RANKS) if rank >= (given or largest))


def find_largest(ranks: Mapping[str, int]) -> tuple[str, int]:
    """The policy whose adapter has the largest rank, and that."""
    return max(ranks.items(), key=lambda item: item[1], default=("", 0))


def make_arguments(rank: int, num_adapters: int, args: Sequence[str]) -> list[str]:
    """What `vllm serve` is told of adapters, before the `args` that the user gives it."""
    batch = AT_WORK * max(num_adapters, 1)
    kept = max(KEPT * max(num_adapters, 1), AdapterLimits.in_arguments(args).batch or 0)
    given = ["--enable-lora", "--max-lora-rank", str(rank)]
    return [*given, "--max-loras", str(batch), "--max-cpu-loras", str(kept)]


def refuse_arguments(args: Sequence[str], ranks: Mapping[str, int]) -> None:
    """Raises `ConfigError` where the arguments that the user gives leave too little for these adapters."""
    if what := _find_lack(AdapterLimits.in_arguments(args), ranks):
        raise ConfigError(f"engine.vllm.args has {what}. Fix: leave it out, since it is set to what is needed")


def refuse_server(url: str, limits: AdapterLimits | None, ranks: Mapping[str, int]) -> None:
    """Raises `EngineError` for somebody else's server that cannot serve these adapters; None is one that takes none."""
    num_adapters, (_, rank) = count_adapters(ranks), find_largest(ranks)
    needed = f"VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 {' '.join(make_arguments(choose_rank(ranks, 0), num_adapters, ()))}"
    if limits is None:
        raise EngineError(
            f"vLLM at {url} takes no LoRA adapters, and learner.lora.rank is {rank}. Fix: start it with {needed}"
        )
    if what := _find_lack(limits, ranks):
        raise EngineError(f"vLLM at {url} was started with {what}. Fix: start it with {needed}")


def count_adapters(ranks: Mapping[str, int]) -> int:
    return sum(rank > 0 for rank in ranks.values())


def _find_lack(limits: AdapterLimits, ranks: Mapping[str, int]) -> str:
    """
    >>> _find_lack(AdapterLimits(16, 2, 4), {"a": 24})
    '--max-lora-rank 16, and the adapter of a has rank 24'
    """
    (name, rank), needed = find_largest(ranks), AT_WORK * count_adapters(ranks)
    if limits.rank is not None and limits.rank < rank:
        return f"--max-lora-rank {limits.rank}, and the adapter of {name} has rank {rank}"
    if limits.kept is not None and limits.kept < needed:
        return f"--max-cpu-loras {limits.kept}, and two versions of every adapter are {needed}"
    return ""
