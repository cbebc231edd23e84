"""Several servers of one model on this machine, each with GPUs of its own.

    engine.replicas = 3, engine.vllm.tensor_parallel = 2, learner on GPU 0    ──▶    1,2   3,4   5,6
    engine.replicas = 3, engine.vllm.weights = ipc                            ──▶    all on the learner's GPU

The learner keeps the first GPU to itself where the others are enough. `CUDA_VISIBLE_DEVICES` in the engine's `env`
names the GPUs to share out instead. Without GPUs nothing is shared out. Several servers on one GPU pay where the model
is so small that a server's own work, one process in Python, takes longer than the GPU's.

Servers on other machines get theirs from who starts them there (`ServerLauncher.elsewhere`).
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path

from msgspec.structs import replace

from strop.config import EngineConfig, SglangConfig, VllmConfig
from strop.engines.base import EngineSetup
from strop.engines.registry import engine_name
from strop.errors import ConfigError

VISIBLE = "CUDA_VISIBLE_DEVICES"
GIVEN_CACHE = "--kv-cache-memory-bytes"
"""Tells vLLM how large its KV cache is, which it otherwise makes of the memory that it finds."""


def place_replicas(setup: EngineSetup, *, beside_learner: bool) -> list[EngineSetup]:
    """What each of the configured replicas is made with. The first one's logs lie in `setup.folder`, those of others in
    folders below it. Raises `ConfigError` where there cannot be so many."""
    count, kind = setup.config.replicas, engine_name(setup.config)
    if count == 1:
        return [setup]
    settings = _find_settings(setup.config, kind)
    given = settings.env.get(VISIBLE)
    gpus = [] if setup.servers.elsewhere else _split(given) if given is not None else list_gpus()
    if share_one_gpu(setup.config) and not setup.servers.elsewhere:
        refuse_too_much_memory(count, settings.gpu_memory)
        shared = [list[str]()] * count
    else:
        shared = share_gpus(gpus, count, settings.tensor_parallel, beside_learner=beside_learner and given is None)
    return [
        replace(
            setup,
            folder=setup.folder if number == 0 else setup.folder / f"replica-{number + 1}",
            config=replace(setup.config, **{kind: replace(settings, env=_name_gpus(settings.env, own))}),
        )
        for number, own in enumerate(shared)
    ]


def share_one_gpu(config: EngineConfig) -> bool:
    """Whether there are several servers and all are on the learner's GPU, whose memory they read."""
    return config.replicas > 1 and engine_name(config) == "vllm" and config.vllm.weights == "ipc"


def must_start_in_turn(config: EngineConfig) -> bool:
    """Whether its servers measure how much memory the GPU that they share has left: only one of them may at a time."""
    return share_one_gpu(config) and not any(one.startswith(GIVEN_CACHE) for one in config.vllm.args)


def refuse_too_much_memory(count: int, each: float) -> None:
    if count * each > 1:
        raise ConfigError(
            f"engine.replicas={count} share the learner's GPU (engine.vllm.weights=ipc), and "
            f"engine.vllm.gpu_memory={each:g} of its memory for each is more than there is. Fix: set it to at most "
            f"{math.floor(80 / count) / 100:g}, or engine.vllm.weights to nccl or files for GPUs of their own"
        )


def share_gpus(gpus: Sequence[str], count: int, each: int, *, beside_learner: bool) -> list[list[str]]:
    """The GPUs of each replica; none of each where there are none at all."""
    if not gpus:
        return [[] for _ in range(count)]
    needed = count * each
    if needed > len(gpus):
        raise ConfigError(
            f"engine.replicas={count} with {each} GPU{'s' if each > 1 else ''} each needs {needed}, and there "
            f"{'is' if len(gpus) == 1 else 'are'} {len(gpus)}. Fix: ask for at most {max(1, len(gpus) // each)}"
        )
    first = 1 if beside_learner and needed < len(gpus) else 0
    return [list(gpus[first + n * each : first + (n + 1) * each]) for n in range(count)]


def list_gpus() -> list[str]:
    """The GPUs that this process may use, as CUDA names them."""
    if (visible := os.environ.get(VISIBLE)) is not None:
        return _split(visible)
    return [str(n) for n in range(len(list(Path("/dev").glob("nvidia[0-9]*"))))]


def _find_settings(config: EngineConfig, kind: str) -> VllmConfig | SglangConfig:
    settings = getattr(config, kind, None)
    if not isinstance(settings, VllmConfig | SglangConfig):
        raise ConfigError(
            f"engine.replicas={config.replicas} are servers, and engine.name is {kind}, which has none. Fix: set it to "
            "vllm or sglang, or engine.replicas=1"
        )
    if settings.url:
        raise ConfigError(
            f"engine.replicas={config.replicas} are started here, and engine.{kind}.url is one server that was started "
            "elsewhere. Fix: leave one of them out"
        )
    return settings


def _name_gpus(env: dict[str, str], gpus: Sequence[str]) -> dict[str, str]:
    return {**env, VISIBLE: ",".join(gpus)} if gpus else env


def _split(visible: str) -> list[str]:
    return [one.strip() for one in visible.split(",") if one.strip()]
