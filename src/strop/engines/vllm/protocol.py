"""What is said to vLLM over HTTP: the endpoints of the versions that were tested, and nothing else of vLLM.

    api = await VllmApi.of(client)   its version is known and every endpoint is there, or `EngineError` says what is not
    async for piece in generate(api.server, ...)

Tested: 0.24 (one H200) and 0.32 (CPU). What differs between them and is spoken here so that both understand it:

    tokens in, tokens out   0.32 has the endpoint only with --tokens-only or --enable-scale-out; 0.24 always
    a sampled token         {"token": "token_id:7", ...} in 0.24, {"token_id": 7, ...} in 0.32: ids are read beside it
    an aborted answer       0.24 ends its stream without a reason, 0.32 with "abort"
    a weight update         0.24 wants a JSON body for /start_weight_update; packed transfers are announced per update
                            in 0.24 and at the beginning in 0.32, so tensors are sent one by one; only 0.24 takes its
                            own tensors (fused.py) as well as the model's
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any, Literal, cast

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from strop.engines.server_events import ASKED, MOVED, BrokenOff, RequestRefused, Said, SampledTokens, ServerClient
from strop.engines.vllm.adapters import AdapterLimits
from strop.engines.vllm.held import HeldAnswer
from strop.errors import EngineError
from strop.models.grammar import UNFORCED, VERSION, close_grammar
from strop.net.client import Client, Response
from strop.types import AnswerGrammar, Sampling

LOG = logging.getLogger("strop.engines")
TESTED = ((0, 24), (0, 32))
"""The oldest and the newest version that are spoken to."""
MODEL = "strop"
"""What a server of ours calls its model."""
GENERATE = "/inference/v1/generate"
NEEDED = (GENERATE, "/pause", "/resume", "/collective_rpc", "/v1/models")
"""Endpoints without which nothing works here; others are missed when they are needed."""
LOAD = "/v1/load_lora_adapter"
UNLIKELY = AnswerGrammar(text=f"{UNFORCED}\nstart: <[5]> <[5]> <[3]>", ends=(4,), version=VERSION)
"""An answer that no model gives unless it has to."""
FINAL_ONLY = 2
"""An answer that is not streamed is put together once, when it ends: 0.32 does so anyway, 0.24 where it is asked to."""
LOWEST = -9999.0
"""What vLLM writes for a logprob that is not a number, or lower than this."""


class VllmApi:
    """A server that answers, with the endpoints that are needed. Made by `VllmApi.of`."""

    def __init__(self, connection: ServerClient, version: str, paths: frozenset[str], base: str, context: int) -> None:
        self.server = connection
        self.base = base  # what it calls the model that it serves
        self.version = version
        self.context = context
        self._paths = paths
        self._pausing: asyncio.Future[Response] | None = None  # it is paused, or will be
        self.asleep = False  # its weights or its KV cache are not in GPU memory

    @staticmethod
    async def of(client: Client) -> VllmApi:
        """Find out whom we talk to. Raises `EngineError` for a version outside the tested range, by name."""
        connection = ServerClient("vLLM", client)
        version = str((await _about(connection, "/version")).get("version"))
        refuse_untested(version)
        paths = frozenset(cast("dict[str, Any]", (await _about(connection, "/openapi.json")).get("paths") or {}))
        if missing := [path for path in NEEDED if path not in paths]:
            raise EngineError(
                f"vLLM {version} at {client.url} has no {', '.join(missing)}. Fix: start it with "
                "VLLM_SERVER_DEV_MODE=1 in its environment and --tokens-only"
            )
        models: list[dict[str, Any]] = (await _about(connection, "/v1/models")).get("data") or [{}]
        return VllmApi(connection, version, paths, str(models[0].get("id")), int(models[0].get("max_model_len") or 0))

    # -- tokens --------------------------------------------------------------------------------------------------------

    async def score(self, ids: Sequence[int], *, model: str) -> list[float]:
        """The logprob of every id but the first, given those before it."""
        sampling = {"temperature": 1.0, "max_tokens": 1, "prompt_logprobs": 0, "detokenize": False}
        body = {"model": model, "token_ids": list(ids), "sampling_params": sampling}
        answer = await self._ask("POST", GENERATE, body, timeout=MOVED)
        places: list[Any] = msgspec.json.decode(answer.body).get("prompt_logprobs") or []
        if len(places) != len(ids):
            raise EngineError(f"vLLM {self.version} gives no logprobs of a prompt")
        return [float(place[str(id)]["logprob"]) for id, place in zip(ids[1:], places[1:], strict=True)]

    async def holds(self) -> bool:
        """Whether it holds an answer to a grammar from its first token on."""
        params = sampling_params(Sampling(grammar=UNLIKELY), UNLIKELY.ends, 4) | {"output_kind": FINAL_ONLY}
        body = {"model": self.base, "token_ids": [5], "stream": False, "sampling_params": params}
        try:
            answer = await self._ask("POST", GENERATE, body)
            return _piece(answer.body).ids == [5, 5, 3, 4]
        except EngineError as error:
            LOG.info("vLLM at %s holds no answers to grammars: %s", self.server.url, error)
            return False

    # -- between answers -----------------------------------------------------------------------------------------------

    @property
    def paused(self) -> bool:
        """Also where it will be in a moment."""
        return self._pausing is not None

    def begin_pause(self) -> None:
        """Have it pause, without waiting for it. All of its processes pause, since the scheduler does."""
        if self._pausing is None:
            asked = self._ask("POST", "/pause", query={"mode": "wait", "clear_cache": "true"}, timeout=MOVED)
            self._pausing = asyncio.ensure_future(asked)
            self._pausing.add_done_callback(lambda done: done.cancelled() or done.exception())  # `pause` raises it

    async def pause(self) -> None:
        """Return when no request is at work; new ones wait from now on. Drops the caches."""
        self.begin_pause()
        assert self._pausing is not None
        try:
            await asyncio.shield(self._pausing)
        except EngineError:
            self._pausing = None
            raise

    async def resume(self) -> None:
        if self._pausing is not None:
            await self.pause()  # one that is on its way would come after this
            self._pausing = None  # whatever becomes of this: the next pause is a pause
            await self._ask("POST", "/resume")

    async def sleep(self) -> None:
        """Move the weights to the CPU's memory and drop the KV cache."""
        await self._ask("POST", "/sleep", query={"level": "1", "mode": "wait"}, timeout=MOVED)
        self.asleep = True

    async def wake(self, part: Literal["weights", "kv_cache"] | None = None) -> None:
        """Take GPU memory again, for all of it or for a part. Requests are taken up again once all of it is there."""
        try:
            await self._ask("POST", "/wake_up", query={"tags": part} if part else {}, timeout=MOVED)
        except EngineError as error:
            if "out of memory" not in str(error):
                raise
            raise EngineError(
                "vLLM cannot wake: what the learner keeps between steps leaves it too little of the GPU's memory. Fix: "
                "lower engine.vllm.gpu_memory, or set learner.offload=true"
            ) from error
        self.asleep = part == "weights"

    # -- weights -------------------------------------------------------------------------------------------------------

    async def reload(self, folder: str) -> None:
        """Load the weights of a folder in Hugging Face format in place of the present ones."""
        body = {"method": "reload_weights", "kwargs": {"weights_path": folder}}
        await self._ask("POST", "/collective_rpc", body, timeout=MOVED)

    async def num_workers(self) -> int:
        answer = await self._ask("GET", "/get_world_size")
        return int(msgspec.json.decode(answer.body)["world_size"])

    async def begin_transfer(self, about: Said) -> None:
        await self._ask("POST", "/init_weight_transfer_engine", {"init_info": about}, timeout=MOVED)

    @property
    def takes_fused(self) -> bool:
        """Whether it can be given its own tensors in place of the model's: 0.24 can, 0.32 cannot over HTTP."""
        return self.version.startswith("0.24.")

    async def start_update(self, *, fused: bool = False) -> None:
        about = {"is_checkpoint_format": False} if fused else {}
        await self._ask("POST", "/start_weight_update", about, timeout=MOVED)

    async def update(self, about: Said) -> None:
        await self._ask("POST", "/update_weights", {"update_info": about}, timeout=MOVED)

    async def finish_update(self) -> None:
        await self._ask("POST", "/finish_weight_update", timeout=MOVED)

    async def adapter_limits(self) -> AdapterLimits | None:
        """What it was started with for adapters; None if it takes none."""
        if LOAD not in self._paths:
            return None
        if "/server_info" not in self._paths:
            return AdapterLimits()
        answer = await self._ask("GET", "/server_info", query={"config_format": "json"})
        about = msgspec.json.decode(answer.body, type=_ServerInfo).vllm_config.lora_config
        return about and AdapterLimits(about.max_lora_rank, about.max_loras, about.max_cpu_loras)

    async def load_adapter(self, name: str, folder: str) -> None:
        await self._ask("POST", LOAD, {"lora_name": name, "lora_path": folder}, timeout=MOVED)

    async def unload_adapter(self, name: str) -> None:
        await self._ask("POST", "/v1/unload_lora_adapter", {"lora_name": name}, timeout=MOVED)

    # ------------------------------------------------------------------------------------------------------------------

    async def _ask(
        self, method: str, path: str, body: Said | None = None, *, query: Said | None = None, timeout: float = ASKED
    ) -> Response:
        if path not in self._paths:
            raise EngineError(
                f"vLLM {self.version} as it was started has no {path}. Fix: see engine.vllm in `strop config`"
            )
        return await self.server.ask(method, path, body, query=query, timeout=timeout)


async def generate(
    server: ServerClient,
    prompt_ids: Sequence[int],
    sampling: Sampling,
    stop_ids: Sequence[int],
    *,
    model: str,
    max_tokens: int,
    stream_interval: int,
    seeds: bool,
    folder: Path,
    vocabulary: int,
) -> AsyncGenerator[SampledTokens]:
    """Sampled tokens as they come, `stream_interval` at a time; in one piece, which costs less, where there are no
    more. Grammars are over the tokenizer in `folder`. Raises `EngineError` if the request is refused, `BrokenOff` or an
    error of `net.client` if the answer is cut off. Closing it early closes the connection, and vLLM drops the
    request."""
    whole = max_tokens <= stream_interval
    held = sampling.grammar and await HeldAnswer.begin(folder, vocabulary, sampling.grammar, server.url)
    params = sampling_params(sampling if seeds else replace(sampling, seed=None), stop_ids, max_tokens)
    body = {"model": model, "token_ids": list(prompt_ids), "stream": not whole, "sampling_params": params}
    if whole:
        params["output_kind"] = FINAL_ONLY
    finished = False
    try:
        async with aclosing(_ask_once(server, body) if whole else server.events(GENERATE, body)) as events:
            async for event in events:
                piece = _piece(event)
                finished = piece.finish is not None
                if held is not None:
                    await held.check(piece.ids)
                yield piece
    except RequestRefused as error:
        if held is None:
            raise
        raise held.explain(error) from None
    if not finished:
        raise BrokenOff("vLLM broke the answer off: the request was aborted there")


async def _ask_once(server: ServerClient, body: Said) -> AsyncGenerator[bytes]:
    yield await server.ask_once(GENERATE, body)


def refuse_untested(version: str) -> None:
    """
    >>> refuse_untested("0.24.0"), refuse_untested("0.32.1+cpu")
    (None, None)
    """
    oldest, newest = (f"{major}.{minor}" for major, minor in TESTED)
    numbers = re.match(r"(\d+)\.(\d+)", version)
    if numbers is None or not TESTED[0] <= (int(numbers[1]), int(numbers[2])) <= TESTED[1]:
        raise EngineError(
            f"vLLM {version} is not one of the versions that were tested, {oldest} to {newest}. Fix: install one of "
            f"those, such as vllm=={oldest}.0"
        )


def sampling_params(sampling: Sampling, stop_ids: Sequence[int], max_tokens: int) -> dict[str, Any]:
    """`Sampling` in vLLM's words. Only `stop_ids` end an answer, and the one that was drawn stays in it. Stop strings
    are the gateway's, and so is all text: vLLM makes none.

    >>> sampling_params(Sampling(temperature=0.0, stop=("END",)), [2], 8)["stop_token_ids"]
    [2]
    """
    grammar = sampling.grammar
    return {
        "structured_outputs": grammar and {"grammar": close_grammar(grammar)},
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or -1,
        "min_p": sampling.min_p,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "repetition_penalty": sampling.repetition_penalty,
        "seed": sampling.seed,
        "max_tokens": max_tokens,
        "stop_token_ids": list(stop_ids),
        "ignore_eos": True,
        "logprobs": 0,
        "detokenize": False,
        "skip_special_tokens": False,
    }


# -- what comes back ---------------------------------------------------------------------------------------------------


class _Logprob(Struct):
    logprob: float | None = None


class _Logprobs(Struct):
    content: list[_Logprob] | None = None


class _Choice(Struct):
    token_ids: list[int] | None = None
    logprobs: _Logprobs | None = None
    finish_reason: str | None = None


class _Event(Struct):
    choices: list[_Choice] = []
    error: dict[str, Any] | None = None


_event = msgspec.json.Decoder(_Event)


class _LoraConfig(Struct):
    max_lora_rank: int | None = None
    max_loras: int | None = None
    max_cpu_loras: int | None = None


class _ServerConfig(Struct):
    lora_config: _LoraConfig | None = None


class _ServerInfo(Struct):
    vllm_config: _ServerConfig


def _piece(data: bytes) -> SampledTokens:
    try:
        event = _event.decode(data)
        choice = event.choices[0]
    except (msgspec.DecodeError, IndexError):
        event = _event.decode(data) if data.startswith(b'{"error"') else _Event()
        said = (event.error or {}).get("message") or data[:200].decode(errors="replace")
        if 400 <= int((event.error or {}).get("code") or 0) < 500:  # of a stream, which begins before it is looked at
            raise RequestRefused(f"vLLM refused an answer: {said}") from None
        raise BrokenOff(f"vLLM could not go on with an answer: {said}") from None
    ids = choice.token_ids or []
    logprobs = [
        LOWEST if one.logprob is None else one.logprob for one in (choice.logprobs or _Logprobs()).content or []
    ]
    if len(logprobs) != len(ids) or (logprobs and min(logprobs) <= LOWEST):
        raise EngineError("vLLM gave no finite logprob for a token that it drew: are the weights finite numbers?")
    if choice.finish_reason not in (None, "stop", "length"):
        raise BrokenOff(f"vLLM broke the answer off: {choice.finish_reason}")
    return SampledTokens(ids, logprobs, choice.finish_reason)


async def _about(connection: ServerClient, path: str) -> dict[str, Any]:
    answer = await connection.ask("GET", path)
    try:
        return msgspec.json.decode(answer.body, type=dict[str, Any])
    except msgspec.DecodeError:
        raise EngineError(f"{connection.url} is not a vLLM server: its answer to {path} is not a JSON object") from None
