"""How a vLLM server is started. Its control endpoints know no key: who can reach the port can change the weights."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import msgspec

from strop.config import VllmConfig
from strop.engines.process import Elsewhere, Process, Server
from strop.engines.vllm.protocol import MODEL

ENTRY = "vllm.entrypoints.openai.api_server"
"""What `vllm serve` runs; packages of other builds lack that command."""


def server(model: Path, settings: VllmConfig, *, log: Path, context: int, dtype: str) -> Server:
    """One that is started for us, or somebody else's."""
    timeout = settings.start_timeout
    if settings.url:
        return Elsewhere("vLLM", settings.url, timeout=timeout, setting="engine.vllm.url")
    return Process(
        "vLLM",
        lambda port: [*command(model, settings, context, dtype), "--port", str(port)],
        log=log,
        env=environment(settings),
        timeout=timeout,
        settings="engine.vllm",
    )


def command(model: Path, settings: VllmConfig, context: int, dtype: str) -> list[str]:
    """How the server is started, but for its port."""
    given = [settings.python or sys.executable, "-m", ENTRY, "--model", str(model), "--served-model-name", MODEL]
    given += ["--host", "127.0.0.1", "--dtype", dtype, "--max-model-len", str(context)]
    given += ["--max-num-seqs", str(settings.rows), "--tensor-parallel-size", str(settings.tensor_parallel)]
    given += ["--gpu-memory-utilization", str(settings.gpu_memory), "--stream-interval", str(settings.stream_interval)]
    # Logprobs of the distribution that is drawn from; no text, no defaults of the model's own for sampling.
    given += ["--logprobs-mode", "processed_logprobs", "--tokens-only", "--generation-config", "vllm"]
    given += ["--disable-uvicorn-access-log"]
    if settings.weights in ("ipc", "nccl"):
        given += ["--weight-transfer-config", msgspec.json.encode({"backend": settings.weights}).decode()]
    if settings.sleep:
        given += ["--enable-sleep-mode"]
    if settings.lora_rank:
        given += ["--enable-lora", "--max-lora-rank", str(settings.lora_rank), "--max-loras", "2"]
    return [*given, *settings.args]


def environment(settings: VllmConfig) -> dict[str, str]:
    ours = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1"}
    if settings.weights == "ipc":  # handles of GPU memory travel pickled
        ours["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
    if settings.lora_rank:
        ours["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"
    return {**os.environ, **ours, **settings.env}
