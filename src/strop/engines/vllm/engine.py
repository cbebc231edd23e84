"""vLLM as an engine: what is its own beside `RemoteEngine`. While it is paused its GPU memory may be the learner's. Its
control endpoints know no key: who can reach the port can change the weights."""

from __future__ import annotations

import sys
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import Literal

import msgspec

from strop.config import EngineConfig, VllmConfig
from strop.engines.base import EngineSetup
from strop.engines.receiver import ModelTensors
from strop.engines.remote import RemoteEngine, ServedModel
from strop.engines.server_events import SampledTokens
from strop.engines.vllm.protocol import MODEL, VllmApi
from strop.engines.vllm.receiver import VllmReceiver
from strop.errors import ConfigError
from strop.net.client import Client
from strop.net.secrets import child_environment
from strop.types import Sampling

ENTRY = "vllm.entrypoints.openai.api_server"
"""What `vllm serve` runs; packages of other builds lack that command."""
SEVERAL = "vllm.entrypoints.cli.main"
"""The command itself, which alone can have several processes take requests."""


class Vllm(RemoteEngine[VllmApi, VllmConfig]):
    """One server and the policy it serves.

        engine = Vllm(folder, config.engine.vllm, log=run / "vllm.log", renewed=True)
        await engine.start()

    `version` is what the weights in the model's folder are called. `renewed`: others will come.
    """

    name = "vLLM"

    def __init__(
        self,
        model: Path,
        settings: VllmConfig,
        *,
        log: Path,
        renewed: bool = False,
        context: int | None = None,
        version: str = "1.0",
    ) -> None:
        if settings.weights == "ipc" and settings.tensor_parallel > 1:
            raise ConfigError(
                "engine.vllm.weights=ipc reaches one GPU, and engine.vllm.tensor_parallel asks for "
                f"{settings.tensor_parallel}: set it to nccl or files"
            )
        if settings.servers > 1 and settings.lora_rank:
            raise ConfigError(
                "engine.vllm.lora_rank is set, and every process of engine.vllm.servers would have to be told of each "
                "adapter: set one of them back"
            )
        about = ServedModel.of(model, context)
        self._dtype = about.dtype if settings.dtype == "auto" else settings.dtype
        super().__init__(
            about,
            settings,
            log=log,
            env=environment(settings),
            renewed=renewed,
            version=version,
        )

    @classmethod
    def make(cls, setup: EngineSetup) -> Vllm:
        log, settings = setup.folder / "vllm.log", setup.config.vllm
        return cls(setup.model, settings, log=log, renewed=setup.renewed, context=setup.context)

    @classmethod
    def choose_transfer(cls, config: EngineConfig) -> Literal["files", "ipc", "nccl"]:
        return config.vllm.weights

    def _command(self, port: int) -> list[str]:
        return [*command(self._model.folder, self._settings, self._context, self._dtype), "--port", str(port)]

    async def _meet(self, client: Client) -> VllmApi:
        return await VllmApi.of(client)

    def _stream(
        self, api: VllmApi, prompt_ids: Sequence[int], sampling: Sampling, stop_ids: Sequence[int], max_tokens: int
    ) -> AsyncGenerator[SampledTokens]:
        model = self._served_name or api.base
        return api.generate(prompt_ids, sampling, stop_ids, model=model, max_tokens=max_tokens)

    def _make_receiver(self, api: VllmApi, tensors: ModelTensors) -> VllmReceiver:
        return VllmReceiver(api, tensors, self._dtype)

    async def _rest(self, api: VllmApi) -> None:
        """While it is paused, its GPU memory is the learner's, if that was asked for."""
        if self._settings.sleep and not api.asleep:
            await api.sleep()

    async def _wake(self, api: VllmApi) -> None:
        if api.asleep:
            await api.wake()


def command(model: Path, settings: VllmConfig, context: int, dtype: str) -> list[str]:
    """How the server is started, but for its port."""
    python = [settings.python or sys.executable, "-m"]
    given = [*python, ENTRY, "--model", str(model)]
    if settings.servers > 1:
        given = [*python, SEVERAL, "serve", str(model), "--api-server-count", str(settings.servers)]
    given += ["--served-model-name", MODEL]
    given += ["--host", "127.0.0.1", "--dtype", dtype, "--max-model-len", str(context)]
    given += ["--max-num-seqs", str(settings.max_sequences), "--tensor-parallel-size", str(settings.tensor_parallel)]
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
    return {**child_environment(), **ours, **settings.env}
