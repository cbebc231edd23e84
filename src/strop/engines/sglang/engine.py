"""sglang as an engine: requests go to its `/generate` as token ids, and come back as ids with their logprobs.

    start ──▶ server answers ──▶ its version is known ──▶ current weights loaded and probed ──▶ requests
                 ▲                                                                                │
                 └───────── back-off ◀── it died: answers that had begun fail, others wait ◀──────┘

A new version is loaded from its folder while nothing is in flight, so every answer is of one version. The logprob of a
token is after penalties and temperature. Where an answer is also cut by top_p, top_k or min_p, sglang has it before
that cut; such turns carry no loss anyway (`Sampling.exact`).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from pathlib import Path

from strop.config import SglangConfig
from strop.engines.base import Chunk, Engine
from strop.engines.delivery import Refused
from strop.engines.folders import probe_of, refuse_bad, tensors_of
from strop.engines.process import Elsewhere, Process, Server
from strop.engines.sglang.protocol import Api, BrokenOff
from strop.errors import ContextOverflow, EngineError, ModelError
from strop.http import Client
from strop.types import Sampling

TRIES = 3
"""How often a request is sent that got no token because the server broke down."""
FIRST_WAIT, LONGEST_WAIT = 1.0, 60.0
"""Seconds before a server that died is started again: twice as many each time in a row."""
LIMIT = 0.1
"""Mean difference that the logprobs of a probe may have: sglang computes in 16 bits."""


class Sglang(Engine):
    """One server and the policy it serves.

        engine = Sglang(folder, SglangConfig(), log=run / "sglang.log", weights=run / "weights")
        await engine.start()

    `version` is what the weights in the model's folder are called; that of version 1.7 is loaded from `weights`/1.7.
    """

    def __init__(
        self,
        model: Path,
        settings: SglangConfig,
        *,
        log: Path,
        weights: Path | None = None,
        context: int | None = None,
        version: str = "1.0",
    ) -> None:
        longest, self._vocabulary = _sizes(model)
        self._context = min(context or longest, longest)
        self._model, self._settings, self._weights = model, settings, weights
        self._tensors = tensors_of(model) if weights is not None else None
        self._server: Server = self._elsewhere() if settings.url else self._process(log)
        self._client: Client | None = None
        self._api: Api | None = None
        self._version, self._folder = version, model
        self._in_flight = 0
        self._idle, self._open = asyncio.Event(), asyncio.Event()
        self._idle.set()
        self._open.set()
        self._serving, self._failing = asyncio.Event(), asyncio.Event()  # one of them is set
        self._loading = asyncio.Lock()
        self._reason = "sglang was not started"
        self._given_up = False
        self._keeper: asyncio.Task[None] | None = None
        self._aborts: set[asyncio.Task[None]] = set()

    def _elsewhere(self) -> Elsewhere:
        settings = self._settings
        return Elsewhere("sglang", settings.url, timeout=settings.start_timeout, setting="engine.sglang.url")

    def _process(self, log: Path) -> Process:
        # This variable would have it give logprobs without the temperature.
        env = {name: value for name, value in os.environ.items() if name != "SGLANG_RETURN_ORIGINAL_LOGPROB"}
        return Process(
            "sglang",
            lambda port: command(self._model, self._settings, self._context, self._version, port),
            log=log,
            env={**env, "HF_HUB_OFFLINE": "1", **self._settings.env},
            timeout=self._settings.start_timeout,
            settings="engine.sglang",
        )

    async def start(self) -> None:
        """Returns once requests are answered. A server that does not come up the first time is not tried again."""
        try:
            await self._bring_up()
        except BaseException:
            await self.close()
            raise
        self._keeper = asyncio.create_task(self._keep(), name="strop-sglang")

    @property
    def context(self) -> int:
        return self._context

    @property
    def version(self) -> str:
        return self._version

    # -- tokens --------------------------------------------------------------------------------------------------------

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, *, stop_ids: Sequence[int]
    ) -> AsyncIterator[Chunk]:
        self._refuse(prompt_ids)
        most = min(sampling.max_tokens, self._context - len(prompt_ids))
        for left in reversed(range(TRIES)):
            api = await self._ready()
            rid, version, weights = secrets.token_hex(16), self._version, api.weights
            given = ended = False
            self._in_flight += 1
            self._idle.clear()
            try:
                async with aclosing(api.generate(rid, prompt_ids, sampling, stop_ids, most)) as pieces:
                    async for piece in pieces:
                        if piece.weights != weights:
                            raise EngineError(
                                f"somebody else has changed sglang's weights, from {weights} to {piece.weights}: give "
                                "it to one run only"
                            )
                        given, ended = True, piece.finish is not None
                        yield Chunk(ids=piece.ids, logprobs=piece.logprobs, version=version, finish=piece.finish)
                return
            except (ConnectionError, TimeoutError, BrokenOff) as error:
                ended = True  # there
                if given or not left:
                    raise EngineError(
                        f"sglang broke down in the middle of an answer: {await self._why(error)}"
                    ) from None
            finally:
                if not ended:
                    self._abort(api, rid)
                self._in_flight -= 1
                if not self._in_flight:
                    self._idle.set()
            await asyncio.sleep(0.1)  # who watches the process needs a moment to see that it is gone

    def _refuse(self, prompt_ids: Sequence[int]) -> None:
        if not prompt_ids:
            raise EngineError("the prompt is empty: send at least one token")
        if len(prompt_ids) >= self._context:
            raise ContextOverflow(
                f"the prompt has {len(prompt_ids)} tokens and the context holds {self._context}: shorten the history "
                "or raise policy.context"
            )
        if min(prompt_ids) < 0 or max(prompt_ids) >= self._vocabulary:
            raise EngineError(
                f"a prompt id is outside the vocabulary of {self._vocabulary}: is it the right tokenizer?"
            )

    def _abort(self, api: Api, rid: str) -> None:
        """Who closes an answer does not wait for the server to hear of it."""

        async def abort() -> None:
            with contextlib.suppress(EngineError):
                await api.abort(rid)

        task = asyncio.create_task(abort())
        self._aborts.add(task)
        task.add_done_callback(self._aborts.discard)

    async def _ready(self) -> Api:
        """Wait while paused, and while the server is started again, but not for ever."""
        while True:
            await self._open.wait()
            try:
                async with asyncio.timeout(0 if self._given_up else self._settings.patience):
                    await self._serving.wait()
            except TimeoutError:
                raise EngineError(self._reason) from None
            if self._open.is_set() and self._serving.is_set() and self._api is not None:
                return self._api

    async def _why(self, error: Exception) -> str:
        """The reason, once those who watch the process know it."""
        if isinstance(error, ConnectionError) and isinstance(self._server, Process):
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._failing.wait(), 2.0)
        return self._reason if self._failing.is_set() else str(error)

    async def health(self) -> None:
        if not self._serving.is_set() or self._api is None:
            raise EngineError(self._reason)
        await self._api.health()

    # -- pauses and versions -------------------------------------------------------------------------------------------

    async def pause(self) -> None:
        self._open.clear()
        await self._idle.wait()

    async def resume(self) -> None:
        self._open.set()

    async def load(self, version: str) -> None:
        """Have the server load the folder of `version`, and make sure that it did."""
        if self._weights is None:
            raise EngineError(f"sglang cannot load version {version}: it was started without a folder of weights")
        was_open = self._open.is_set()
        self._open.clear()
        try:
            await self._idle.wait()
            async with self._loading:
                if self._api is None:
                    raise EngineError(self._reason)
                folder = self._weights / version
                assert self._tensors is not None
                try:
                    await asyncio.to_thread(refuse_bad, folder, self._tensors)
                except OSError as error:
                    raise Refused(f"{folder} cannot be read: {error.strerror}; nothing was changed") from None
                await self._load(self._api, version, folder)
                self._version, self._folder = version, folder
                self._serves()
        finally:
            if was_open:
                self._open.set()

    async def _load(self, api: Api, version: str, folder: Path) -> None:
        """After an error nobody knows what the server holds: it is started again, or not asked any more."""
        try:
            await api.pause()
            try:
                await api.reload(str(folder), version)
            finally:
                await api.go_on()
            if (probe := await asyncio.to_thread(probe_of, folder)) is not None:
                far = probe.distance(await api.score(probe.ids))
                if not far <= LIMIT:
                    raise EngineError(f"a probe's logprobs differ by {far:.2g} in the mean, more than {LIMIT:g}")
        except (EngineError, asyncio.CancelledError) as error:
            reason = f"sglang could not load version {version}: {error or 'it was given up'}"
            self._fails(reason)
            await self._server.end()
            if isinstance(error, EngineError):
                raise EngineError(reason) from error
            raise

    # -- the server ----------------------------------------------------------------------------------------------------

    async def _bring_up(self) -> None:
        """Start the server and have it serve the current version."""
        await self._server.start()
        if self._client is not None:
            await self._client.close()
        self._client = Client(self._server.url)
        api = await Api.of(self._client)
        self._context = min(self._context, api.context or self._context)
        if self._folder != self._model:
            await self._load(api, self._version, self._folder)
        self._api = api
        self._serves()

    def _fails(self, reason: str) -> None:
        self._reason = reason
        self._serving.clear()
        self._failing.set()

    def _serves(self) -> None:
        self._serving.set()
        self._failing.clear()

    async def _keep(self) -> None:
        """Start the server again when it dies, again and again if need be, until that seems to lead nowhere."""
        loop, failed = asyncio.get_running_loop(), 0
        while failed <= self._settings.restarts:
            if self._serving.is_set():
                since = loop.time()
                how = await self._server.gone()
                failed = failed + 1 if loop.time() - since < LONGEST_WAIT else 0
                self._fails(f"{how}; it is being started again")
                self._api = None
            await asyncio.sleep(min(FIRST_WAIT * 2**failed, LONGEST_WAIT))
            try:
                async with self._loading:
                    await self._bring_up()
            except EngineError as error:
                failed += 1
                self._fails(f"sglang cannot be started again: {error}")
                await self._server.end()
        self._given_up = True

    async def close(self) -> None:
        if self._keeper is not None:
            self._keeper.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._keeper
        self._fails("sglang was closed")
        self._given_up = True
        if self._aborts:
            await asyncio.wait(self._aborts, timeout=5.0)
        if self._client is not None:
            await self._client.close()
        await self._server.close()


def command(model: Path, settings: SglangConfig, context: int, version: str, port: int) -> list[str]:
    """How the server is started. Messages carry only what is new, and nothing is turned into text."""
    given = [settings.python or sys.executable, "-m", "sglang.launch_server", "--model-path", str(model)]
    given += ["--host", "127.0.0.1", "--port", str(port), "--context-length", str(context)]
    given += ["--tensor-parallel-size", str(settings.tensor_parallel), "--max-running-requests", str(settings.rows)]
    given += ["--mem-fraction-static", str(settings.gpu_memory), "--weight-version", version]
    given += ["--incremental-streaming-output", "--skip-tokenizer-init", "--sampling-defaults", "openai"]
    if settings.deterministic:
        given += ["--enable-deterministic-inference"]
    return [*given, *settings.args]


def _sizes(model: Path) -> tuple[int, int]:
    """The longest sequence and the number of tokens, as the model's folder has them."""
    try:
        about = json.loads((model / "config.json").read_text())
        return int(about["max_position_embeddings"]), int(about["vocab_size"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(f"{model} is no model in Hugging Face format: config.json {error}") from None
