"""vLLM as an engine: what is its own beside `RemoteEngine`. While it is paused its GPU memory may be the learner's. Its
control endpoints know no key: who can reach the port can change the weights."""

from __future__ import annotations

import secrets
from collections.abc import AsyncGenerator, Mapping, Sequence
from pathlib import Path
from typing import Literal

import msgspec
from msgspec.structs import replace

from strop.config import MAIN, EngineConfig, VllmConfig
from strop.engines.base import EngineSetup
from strop.engines.direct_line import DirectLine
from strop.engines.receiver import ModelTensors
from strop.engines.remote import RemoteEngine
from strop.engines.served_policies import ServedModel
from strop.engines.server_events import SampledTokens
from strop.engines.server_process import HERE, ServerLauncher
from strop.engines.vllm.adapters import choose_rank, count_adapters, make_arguments, refuse_arguments, refuse_server
from strop.engines.vllm.fused import is_fusable
from strop.engines.vllm.protocol import MODEL, VllmApi, generate
from strop.engines.vllm.receiver import VllmReceiver
from strop.errors import ConfigError
from strop.net.client import Client
from strop.types import Sampling

ENTRY = "vllm.entrypoints.openai.api_server"
"""What `vllm serve` runs; packages of other builds lack that command."""
SEVERAL = "vllm.entrypoints.cli.main"
"""The command itself, which alone can have several processes take requests."""
LAUNCH = Path(__file__).with_name("launch.py")
"""What starts either where the model has a tokenizer, over which answers can be held to grammars."""


class Vllm(RemoteEngine[VllmApi, VllmConfig]):
    """One server and the policy it serves, or several that are adapters on its model.

        engine = Vllm(folder, config.engine.vllm, log=run / "vllm.log", renewed=True)
        await engine.start()

    `version` is what the weights in the model's folder are called. `renewed`: others will come. `ranks` are those of
    the policies that are adapters, by name, with 0 for one that is the model as it is.
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
        ranks: Mapping[str, int] | None = None,
        servers: ServerLauncher = HERE,
    ) -> None:
        self.adapters, self.gives_memory, self._ranks = bool(ranks), settings.sleep, ranks or {}
        settings = replace(settings, lora_rank=choose_rank(self._ranks, settings.lora_rank))
        if not settings.url:
            refuse_arguments(settings.args, self._ranks)
        if settings.weights == "ipc" and settings.tensor_parallel > 1:
            raise ConfigError(
                "engine.vllm.weights=ipc reaches one GPU, and engine.vllm.tensor_parallel asks for "
                f"{settings.tensor_parallel}. Fix: set it to nccl or files"
            )
        if settings.servers > 1 and settings.lora_rank:
            raise ConfigError(
                "engine.vllm.lora_rank is set, and every process of engine.vllm.servers would have to be told of each "
                "adapter. Fix: set one of them back"
            )
        about = ServedModel.of(model, context)
        self._dtype = about.dtype if settings.dtype == "auto" else settings.dtype
        self._is_holding = False
        super().__init__(
            about,
            settings,
            log=log,
            env=environment(settings),
            renewed=renewed,
            version=version,
            policies=tuple(ranks or (MAIN,)),
            servers=servers,
        )

    @classmethod
    def make(cls, setup: EngineSetup) -> Vllm:
        return cls(
            setup.model,
            setup.config.vllm,
            log=setup.folder / "vllm.log",
            renewed=setup.renewed,
            context=setup.context,
            ranks=setup.adapters or None,
            servers=setup.servers,
        )

    @classmethod
    def serves_adapters(cls, config: EngineConfig) -> bool:
        return config.vllm.servers == 1

    @classmethod
    def choose_transfer(cls, config: EngineConfig) -> Literal["files", "ipc", "nccl"]:
        return config.vllm.weights

    def _command(self) -> list[str]:
        return command(self._model.folder, self._settings, self._context, self._dtype, count_adapters(self._ranks))

    async def _meet(self, client: Client) -> VllmApi:
        api = await VllmApi.of(client)
        if self._settings.url and self.adapters:
            refuse_server(self._settings.url, await api.adapter_limits(), self._ranks)
        return api

    @property
    def holds_to_schemas(self) -> bool:
        """As the present server does, or did when it was last there."""
        return self._is_holding

    async def _find_abilities(self, api: VllmApi) -> None:
        self._is_holding = (self._model.folder / "tokenizer.json").is_file() and await api.holds()

    def _stream(
        self,
        api: VllmApi,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        stop_ids: Sequence[int],
        max_tokens: int,
        model: str | None,
    ) -> AsyncGenerator[SampledTokens]:
        return generate(
            api.server,
            prompt_ids,
            sampling,
            stop_ids,
            model=model or api.base,
            max_tokens=max_tokens,
            stream_interval=self._settings.stream_interval,
            seeds=self._settings.seeds,
            folder=self._model.folder,
            vocabulary=self._model.vocabulary,
        )

    def _make_line(self, api: VllmApi) -> DirectLine | None:
        if self.adapters:
            return None
        return DirectLine(
            url=self._server.url,
            model=api.base,
            version=self.version,
            context=self._context,
            vocabulary=self._model.vocabulary,
            stream_interval=self._settings.stream_interval,
            seeds=self._settings.seeds,
            folder=str(self._model.folder),
        )

    async def _score(self, api: VllmApi, ids: Sequence[int], model: str | None) -> list[float]:
        return await api.score(ids, model=model or api.base)

    def _make_receiver(self, api: VllmApi, tensors: ModelTensors) -> VllmReceiver:
        ours = not self._settings.url and self._settings.tensor_parallel == 1
        fusable = ours and is_fusable(self._model.folder, self._settings.args)
        return VllmReceiver(api, tensors, self._dtype, fusable=fusable)

    async def _rest(self, api: VllmApi) -> None:
        """While it is paused, its GPU memory is the learner's, if that was asked for. Where new weights replace the old
        ones the server must pause for them: it does so now, beside what the learner does."""
        if self._settings.sleep and not api.asleep:
            await api.sleep()
        elif not self._settings.sleep and self._tensors is not None and not self.adapters:
            api.begin_pause()

    async def _wake(self, api: VllmApi) -> None:
        if api.asleep:
            await api.wake()
        else:
            await api.resume()


def command(model: Path, settings: VllmConfig, context: int, dtype: str, num_adapters: int = 1) -> list[str]:
    """How Python is told to start the server, but for where it listens."""
    entry = [ENTRY, "--model", str(model)]
    if settings.servers > 1:
        entry = [SEVERAL, "serve", str(model), "--api-server-count", str(settings.servers)]
    held = (model / "tokenizer.json").is_file()
    given = ["-c", LAUNCH.read_text(), *entry] if held else ["-m", *entry, "--tokens-only"]
    given += ["--served-model-name", MODEL, "--dtype", dtype, "--max-model-len", str(context)]
    given += ["--max-num-seqs", str(settings.max_sequences), "--tensor-parallel-size", str(settings.tensor_parallel)]
    given += ["--gpu-memory-utilization", str(settings.gpu_memory), "--stream-interval", str(settings.stream_interval)]
    # Logprobs of the distribution that is drawn from; no text, no defaults of the model's own for sampling.
    given += ["--logprobs-mode", "processed_logprobs", "--generation-config", "vllm"]
    given += ["--disable-uvicorn-access-log", "--disable-log-stats"]
    if not any(one.startswith("--seed") for one in settings.args):  # or all servers would draw the same numbers
        given += ["--seed", str(secrets.randbelow(2**31))]
    if settings.weights in ("ipc", "nccl"):
        given += ["--weight-transfer-config", msgspec.json.encode({"backend": settings.weights}).decode()]
    if settings.sleep:
        given += ["--enable-sleep-mode"]
    if settings.lora_rank:
        given += make_arguments(settings.lora_rank, num_adapters, settings.args)
    return [*given, *settings.args]


def environment(settings: VllmConfig) -> dict[str, str]:
    """What is added to the environment that it is started in."""
    ours = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1"}
    if settings.weights == "ipc":  # handles of GPU memory travel pickled
        ours["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
    if settings.lora_rank:
        ours["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"
    return {**ours, **settings.env}
