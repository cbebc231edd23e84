"""sglang as an engine: what is its own beside `RemoteEngine`. New weights are loaded from their folder.

Untested: it was written from sglang's source and is tested against a stand-in that speaks its protocol, never against
sglang itself.

The logprob of a token is after penalties and temperature. Where an answer is also cut by top_p, top_k or min_p, sglang
has it before that cut; such turns carry no loss anyway (`Sampling.exact`).
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing, asynccontextmanager
from pathlib import Path

from strop.config import SglangConfig
from strop.engines.base import EngineSetup
from strop.engines.receiver import ModelTensors, WeightReceiver
from strop.engines.remote import RemoteEngine
from strop.engines.served_policies import ServedModel
from strop.engines.server_events import BrokenOff, SampledTokens
from strop.engines.server_process import HERE, ServerLauncher
from strop.engines.sglang.protocol import SglangApi
from strop.errors import EngineError
from strop.net.client import Client
from strop.types import Sampling

LIMIT = 0.1
"""Mean difference that the logprobs of a probe may have: sglang computes in 16 bits."""
LAST_ABORTS = 5.0
"""Seconds for the server to hear of answers that nobody wants any more, before the engine is closed."""


class Sglang(RemoteEngine[SglangApi, SglangConfig]):
    """One server and the policy it serves.

        engine = Sglang(folder, SglangConfig(), log=run / "sglang.log", renewed=True)
        await engine.start()

    `version` is what the weights in the model's folder are called. `renewed`: others will come.
    """

    name = "sglang"

    def __init__(
        self,
        model: Path,
        settings: SglangConfig,
        *,
        log: Path,
        renewed: bool = False,
        context: int | None = None,
        version: str = "1.0",
        servers: ServerLauncher = HERE,
    ) -> None:
        # This variable would have it give logprobs without the temperature.
        env = {"SGLANG_RETURN_ORIGINAL_LOGPROB": None}
        self._aborts: set[asyncio.Task[None]] = set()
        super().__init__(
            ServedModel.of(model, context),
            settings,
            log=log,
            env={**env, "HF_HUB_OFFLINE": "1", **settings.env},
            renewed=renewed,
            version=version,
            servers=servers,
        )

    @classmethod
    def make(cls, setup: EngineSetup) -> Sglang:
        return cls(
            setup.model,
            setup.config.sglang,
            log=setup.folder / "sglang.log",
            renewed=setup.renewed,
            context=setup.context,
            servers=setup.servers,
        )

    def _command(self) -> list[str]:
        return command(self._model.folder, self._settings, self._context, self.version)

    async def _meet(self, client: Client) -> SglangApi:
        return await SglangApi.of(client)

    async def _stream(
        self,
        api: SglangApi,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        stop_ids: Sequence[int],
        max_tokens: int,
        model: str | None,
    ) -> AsyncGenerator[SampledTokens]:
        rid, weights, ended = secrets.token_hex(16), api.weights, False
        try:
            async with aclosing(api.generate(rid, prompt_ids, sampling, stop_ids, max_tokens)) as pieces:
                async for piece in pieces:
                    if piece.weights != weights:
                        raise EngineError(
                            f"somebody else has changed sglang's weights, from {weights} to {piece.weights}. Fix: "
                            "give it to one run only"
                        )
                    ended = piece.finish is not None
                    yield piece
        except (ConnectionError, TimeoutError, BrokenOff):
            ended = True  # there
            raise
        finally:
            if not ended:
                self._abort(api, rid)

    def _abort(self, api: SglangApi, rid: str) -> None:
        """Who closes an answer does not wait for the server to hear of it."""

        async def abort() -> None:
            with contextlib.suppress(EngineError):
                await api.abort(rid)

        task = asyncio.create_task(abort())
        self._aborts.add(task)
        task.add_done_callback(self._aborts.discard)

    async def _score(self, api: SglangApi, ids: Sequence[int], model: str | None) -> list[float]:
        return await api.score(ids)

    def _make_receiver(self, api: SglangApi, tensors: ModelTensors) -> SglangReceiver:
        return SglangReceiver(api, tensors)

    async def close(self) -> None:
        if self._aborts:
            await asyncio.wait(self._aborts, timeout=LAST_ABORTS)
        await super().close()


class SglangReceiver(WeightReceiver):
    """The end of the server that takes new weights, which it reads from a folder."""

    def __init__(self, api: SglangApi, tensors: ModelTensors) -> None:
        super().__init__("sglang", "", tensors, limit=LIMIT)  # it serves one model, which has no name
        self._api = api

    @asynccontextmanager
    async def hold(self) -> AsyncGenerator[None]:
        await self._api.pause()
        try:
            yield
        finally:
            await self._api.go_on()

    async def score(self, ids: Sequence[int], *, model: str) -> list[float]:
        return await self._api.score(ids)

    async def load_folder(self, folder: Path, version: str) -> None:
        await self._api.reload(str(folder), version)


def command(model: Path, settings: SglangConfig, context: int, version: str) -> list[str]:
    """How Python is told to start the server, but for where it listens. Messages carry only what is new, and nothing is
    turned into text."""
    given = ["-m", "sglang.launch_server", "--model-path", str(model), "--context-length", str(context)]
    given += [
        "--tensor-parallel-size",
        str(settings.tensor_parallel),
        "--max-running-requests",
        str(settings.max_sequences),
    ]
    given += ["--mem-fraction-static", str(settings.gpu_memory), "--weight-version", version]
    given += ["--incremental-streaming-output", "--skip-tokenizer-init", "--sampling-defaults", "openai"]
    if settings.deterministic:
        given += ["--enable-deterministic-inference"]
    return [*given, *settings.args]
