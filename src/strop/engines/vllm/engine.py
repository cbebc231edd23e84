"""vLLM as an engine: many requests over HTTP to one server, which is kept running and kept at the current version.

    start ──▶ server answers ──▶ version and endpoints known ──▶ current weights delivered and probed ──▶ requests
                 ▲                                                                                          │
                 └────────────── back-off ◀── it died: answers that had begun fail, others wait ◀───────────┘

A new version is loaded while nothing is in flight, so every answer is of one version. What can be seen to be wrong with
it is refused before the server hears of it. If the server does not end up with what was sent, it is started again with
the version before.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any

from strop.config import VllmConfig
from strop.engines.base import Chunk, Engine
from strop.engines.delivery import Delivered, Delivery, Refused
from strop.engines.folders import tensors_of
from strop.engines.process import Process
from strop.engines.vllm.protocol import Api, BrokenOff
from strop.engines.vllm.server import server
from strop.errors import ConfigError, ContextOverflow, EngineError, ModelError
from strop.http import Client
from strop.types import Sampling

TRIES = 3
"""How often a request is sent that got no token because the server broke down."""
FIRST_WAIT, LONGEST_WAIT = 1.0, 60.0
"""Seconds before a server that died is started again: twice as many each time in a row."""
NOTICE = 5.0
"""Seconds until those who watch the server must have seen that it is gone."""
LIMITS = {"float32": 1e-3, "bfloat16": 0.1, "float16": 0.03}
"""Mean difference of a probe's logprobs that two implementations may have, by the type the server computes in."""


class Vllm(Engine):
    """One server and the policy it serves.

        engine = Vllm(folder, config.engine.vllm, delivery=Folders(root), log=run / "vllm.log")
        await engine.start()

    `version` is what the weights in the model's folder are called. `delivery` says how others come.
    """

    def __init__(
        self,
        model: Path,
        settings: VllmConfig,
        *,
        log: Path,
        delivery: Delivery | None = None,
        context: int | None = None,
        version: str = "1.0",
    ) -> None:
        if settings.weights == "ipc" and settings.tensor_parallel > 1:
            raise ConfigError(
                "engine.vllm.weights=ipc reaches one GPU, and engine.vllm.tensor_parallel asks for "
                f"{settings.tensor_parallel}: set it to nccl or files"
            )
        about = _read_config(model)
        longest = int(about.get("max_position_embeddings") or 0) or context or 0
        self._context = min(context or longest, longest)
        self._vocabulary = int(about.get("vocab_size") or 0)
        own_dtype = str(about.get("dtype") or about.get("torch_dtype") or "bfloat16")
        self._dtype = own_dtype if settings.dtype == "auto" else settings.dtype
        self._settings = settings
        self._delivery = delivery
        self._tensors = tensors_of(model) if delivery is not None else None
        self._server = server(model, settings, log=log, context=self._context, dtype=self._dtype)
        self._client: Client | None = None
        self._api: Api | None = None
        self._version = version
        self._loaded: Delivered | None = None  # None: the weights that the server was started with
        self._asleep = False
        self._in_flight = 0
        self._idle = asyncio.Event()
        self._open = asyncio.Event()  # not paused
        self._serving = asyncio.Event()  # the server is up and has the current version
        self._failing = asyncio.Event()  # the opposite
        self._settled = asyncio.Event()  # serving, or given up
        self._up = asyncio.Event()  # the server is up, or there is no hope that it will be
        self._loading = asyncio.Lock()
        self._reason = "vLLM was not started"
        self._keeper: asyncio.Task[None] | None = None
        self._idle.set()
        self._open.set()

    async def start(self) -> None:
        """Returns once requests are answered. A server that does not come up the first time is not tried again."""
        try:
            await self._bring_up()
        except BaseException:
            await self.close()
            raise
        self._keeper = asyncio.create_task(self._keep(), name="strop-vllm")

    @property
    def context(self) -> int:
        return self._context

    @property
    def version(self) -> str:
        return self._version

    @property
    def url(self) -> str:
        """Where the server is: for those who may speak to it directly."""
        return self._server.url

    # -- tokens --------------------------------------------------------------------------------------------------------

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, *, stop_ids: Sequence[int]
    ) -> AsyncGenerator[Chunk]:
        self._refuse(prompt_ids)
        room = self._context - len(prompt_ids)
        for left in reversed(range(TRIES)):
            api = await self._ready()
            version, given = self._version, False
            self._in_flight += 1
            self._idle.clear()
            try:
                stream = api.generate(
                    prompt_ids,
                    sampling,
                    stop_ids,
                    model=api.base if self._loaded is None else self._loaded.model,
                    max_tokens=min(sampling.max_tokens, room),
                )
                async with aclosing(stream) as pieces:
                    async for piece in pieces:
                        given = True
                        yield Chunk(ids=piece.ids, logprobs=piece.logprobs, version=version, finish=piece.finish)
                return
            except (ConnectionError, TimeoutError, BrokenOff) as error:
                if given or not left:
                    why = self._reason if await self._fell() else error
                    raise EngineError(f"vLLM broke down in the middle of an answer: {why}") from None
            finally:
                self._in_flight -= 1
                if not self._in_flight:
                    self._idle.set()
            await self._fell()

    def _refuse(self, prompt_ids: Sequence[int]) -> None:
        if not prompt_ids:
            raise EngineError("the prompt is empty: send at least one token")
        if len(prompt_ids) >= self._context:
            raise ContextOverflow(
                f"the prompt has {len(prompt_ids)} tokens and the context holds {self._context}: shorten the history "
                "or raise policy.context"
            )
        # One id too large ends vLLM with all that is in flight.
        if min(prompt_ids) < 0 or max(prompt_ids) >= self._vocabulary:
            raise EngineError(
                f"a prompt id is outside the vocabulary of {self._vocabulary}: is it the right tokenizer?"
            )

    async def _ready(self) -> Api:
        """Wait while paused, and while the server is started again, but not for ever."""
        while True:
            await self._open.wait()
            if not self._settled.is_set():
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._settled.wait(), self._settings.patience)
            if not self._serving.is_set():
                raise EngineError(self._reason)
            if self._open.is_set():  # it may have been closed again meanwhile
                assert self._api is not None
                return self._api

    async def _answering(self) -> None:
        """Wait until there is a server, whatever it serves."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._up.wait(), self._settings.patience)
        if self._api is None:
            raise EngineError(self._reason)

    async def _fell(self) -> bool:
        """Something went wrong: is it that the server is gone? Then `_reason` says how."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._failing.wait(), NOTICE)
        return self._failing.is_set()

    async def health(self) -> None:
        if not self._serving.is_set():
            raise EngineError(self._reason)
        assert self._api is not None
        await self._api.health()

    # -- pauses and versions -------------------------------------------------------------------------------------------

    async def pause(self) -> None:
        self._open.clear()
        await self._idle.wait()
        async with self._loading:
            if self._api is not None and not self._asleep:
                try:
                    await self._rest(self._api)
                except EngineError:
                    if not await self._fell():  # otherwise it is started again, and rests then
                        raise

    async def _rest(self, api: Api) -> None:
        """While it is paused, its GPU memory is the learner's, if that was asked for."""
        if self._settings.sleep and not self._open.is_set():
            await api.sleep()
            self._asleep = True

    async def resume(self) -> None:
        async with self._loading:
            if self._asleep and self._api is not None:
                await self._api.wake()
            self._asleep = False
        self._open.set()

    async def load(self, version: str) -> None:
        """Have the server take `version` from where its delivery puts it, and make sure that it did."""
        if self._delivery is None:
            raise EngineError(f"vLLM cannot load version {version}: it was started without a way to get new weights")
        was_open = self._open.is_set()
        self._open.clear()
        try:
            await self._idle.wait()
            await self._answering()
            async with self._loading:
                await self._load(version)
        finally:
            if was_open:
                self._open.set()

    async def _load(self, version: str) -> None:
        api = self._api
        if api is None:
            raise EngineError(self._reason)
        try:
            self._loaded = await self._deliver(api, version)
        except Refused:
            await self._answer_again(api)
            raise
        except BaseException as error:  # nobody knows what the server holds by now
            self._fails(f"version {version} could not be loaded: {error or 'it was given up'}")
            if isinstance(self._server, Process):
                await self._server.end()
            elif self._loaded is not None:
                self._loaded = await self._deliver(api, self._version)
                self._serves()
            raise
        self._version = version
        self._serves()

    async def _deliver(self, api: Api, version: str) -> Delivered:
        assert self._delivery is not None
        assert self._tensors is not None
        if self._asleep:
            await api.wake("weights")
        else:
            await api.pause()
        delivered = await self._delivery.deliver(api, version, self._tensors)
        await self._answer_again(api)
        await api.drop_prefixes()
        if delivered.probe is not None:
            far = delivered.probe.distance(await api.score(delivered.probe.ids, model=delivered.model))
            if not far <= (limit := LIMITS.get(self._dtype, LIMITS["bfloat16"])):
                raise EngineError(
                    f"the engine does not serve what was sent as version {version}: the logprobs of a probe differ by "
                    f"{far:.2g} in the mean, more than {limit:g}; it is started again with the version before (vLLM on "
                    "CPUs cannot load a model anew whose output layer is its embedding: use the embedded engine there)"
                )
        return delivered

    async def _answer_again(self, api: Api) -> None:
        if self._asleep:
            await api.wake("kv_cache")
            self._asleep = False
        else:
            await api.resume()

    # -- the server ----------------------------------------------------------------------------------------------------

    async def _bring_up(self) -> None:
        """Start the server and have it serve the current version."""
        await self._server.start()
        if self._client is not None:
            await self._client.close()
        self._client = Client(self._server.url)
        api = await Api.of(self._client)
        if api.context < self._context and self._settings.url:
            self._context = api.context
        self._api, self._asleep = api, False
        self._up.set()
        if self._loaded is not None:
            self._loaded = await self._deliver(api, self._version)
        await self._rest(api)
        self._serves()

    def _serves(self) -> None:
        self._serving.set()
        self._settled.set()
        self._failing.clear()

    def _fails(self, reason: str) -> None:
        self._reason = reason
        self._serving.clear()
        self._settled.clear()
        self._failing.set()

    def _give_up(self) -> None:
        """Nobody need wait any more."""
        self._settled.set()
        self._up.set()

    def _is_down(self, reason: str) -> None:
        self._fails(reason)
        self._api = None
        self._up.clear()

    async def _keep(self) -> None:
        """Start the server again when it dies, again and again if need be, until that seems to lead nowhere."""
        loop, failed = asyncio.get_running_loop(), 0
        while failed <= self._settings.restarts:
            if self._api is not None:
                since = loop.time()
                how = await self._server.gone()
                self._is_down(f"{how}; it is being started again")
                failed = failed + 1 if loop.time() - since < LONGEST_WAIT else 0
            await asyncio.sleep(min(FIRST_WAIT * 2**failed, LONGEST_WAIT))
            try:
                async with self._loading:
                    await self._bring_up()
            except Refused as error:  # it answers, and waits for a version that can be had
                self._fails(str(error))
            except EngineError as error:
                failed += 1
                self._is_down(f"vLLM cannot be started again: {error}")
                await self._server.end()
        self._give_up()

    async def close(self) -> None:
        if self._keeper is not None:
            self._keeper.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._keeper
        self._is_down("vLLM was closed")
        self._give_up()
        if self._client is not None:
            await self._client.close()
        await self._server.close()


def _read_config(model: Path) -> dict[str, Any]:
    try:
        about = json.loads((model / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise ModelError(f"{model} holds no model in Hugging Face format: {error}") from None
    return {**about, **(about.get("text_config") or {})}
