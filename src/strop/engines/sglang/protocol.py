"""What is said to sglang over HTTP, and nothing else of sglang. Written from the source of 0.5.23, spoken to any 0.5.

    api = await SglangApi.of(client)          its version is known, or `EngineError` says what is wrong
    async for piece in api.generate(...)

A message of a stream has the tokens since the last one, or all of them so far, as the server was started; how many
there are in all stands beside them, so both are understood. Each token comes twice, as an id and beside its logprob.

Left out: other ways to bring new weights than a folder, adapters, grammars, several answers to one request.
"""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any, Literal

import msgspec
from msgspec import Struct

from strop.engines.server_events import MOVED, BrokenOff, SampledTokens, ServerClient
from strop.errors import EngineError
from strop.net.client import Client
from strop.types import Sampling

OLDEST, NEWEST = (0, 5), (0, 5)


class SglangTokens(SampledTokens, frozen=True):
    """Some sampled tokens, and what the server calls the weights they are from."""

    weights: str | None


class SglangApi:
    """A server that answers. Made by `SglangApi.of`."""

    def __init__(self, connection: ServerClient, version: str, context: int | None, weights: str | None) -> None:
        self._connection = connection
        self.version = version
        self.context = context
        self.weights = weights

    @staticmethod
    async def of(client: Client) -> SglangApi:
        """Find out whom we talk to. Raises `EngineError` for a version that is not known, by name."""
        connection = ServerClient("sglang", client)
        server, model = await _about(connection, "server_info"), await _about(connection, "model_info")
        version = str(server.get("version"))
        refuse_unknown(version)
        length = server.get("context_length")
        return SglangApi(connection, version, length if isinstance(length, int) else None, model.get("weight_version"))

    # -- tokens --------------------------------------------------------------------------------------------------------

    async def generate(
        self, rid: str, prompt_ids: Sequence[int], sampling: Sampling, stop_ids: Sequence[int], max_tokens: int
    ) -> AsyncGenerator[SglangTokens]:
        """Sampled tokens as they come. Raises `EngineError` if they are refused, `strop.net.client`'s errors if the
        connection breaks. Who closes it early should also `abort`: the server sees that only seconds later."""
        body = {
            "rid": rid,
            "input_ids": list(prompt_ids),
            "sampling_params": sampling_params(sampling, stop_ids, max_tokens),
            "return_logprob": True,
            "stream": True,
        }
        given, finished = 0, False
        async with aclosing(self._connection.events("/generate", body)) as events:
            async for event in events:
                piece = _piece(self._connection, event, given)
                given += len(piece.ids)
                finished = piece.finish is not None
                if piece.ids or finished:
                    yield piece
        if not finished:
            raise BrokenOff("sglang broke the answer off without saying why")

    async def abort(self, rid: str) -> None:
        await self._connection.ask("POST", "/abort_request", {"rid": rid})

    async def score(self, ids: Sequence[int]) -> list[float]:
        """The logprob of every id but the first, given those before it."""
        sampling = {"temperature": 1.0, "max_new_tokens": 1}
        body = {"input_ids": list(ids), "sampling_params": sampling, "return_logprob": True, "logprob_start_len": 0}
        answer = await self._connection.ask("POST", "/generate", body, timeout=MOVED)
        places = msgspec.json.decode(answer.body, type=_Message).meta_info.input_token_logprobs
        if [place[1] for place in places] != list(ids):
            raise EngineError(f"sglang {self.version} gives no logprobs of a prompt")
        return [float("nan") if place[0] is None else place[0] for place in places[1:]]

    # -- weights -------------------------------------------------------------------------------------------------------

    async def pause(self) -> None:
        """Draw no tokens from now on. Whatever is at work waits, and is prefilled again afterwards."""
        await self._connection.ask("POST", "/pause_generation", {"mode": "retract"}, timeout=MOVED)

    async def go_on(self) -> None:
        await self._connection.ask("POST", "/continue_generation", {})

    async def reload(self, folder: str, weights: str) -> None:
        """Load the weights of a folder in Hugging Face format in place of the present ones, and drop all prefixes."""
        body = {"model_path": folder, "weight_version": weights, "flush_cache": True}
        answer = await self._connection.ask("POST", "/update_weights_from_disk", body, timeout=MOVED)
        done: dict[str, Any] = msgspec.json.decode(answer.body)
        if not done.get("success"):
            raise EngineError(f"sglang could not load {folder}: {done.get('message')}")
        served = (await _about(self._connection, "model_info")).get("weight_version")
        if served != weights:
            raise EngineError(f"sglang says that it serves the weights {served!r} after those of {weights} were loaded")
        self.weights = weights


def refuse_unknown(version: str) -> None:
    """
    >>> refuse_unknown("0.5.23.post1")
    """
    numbers = re.match(r"(\d+)\.(\d+)", version)
    if numbers is None or not OLDEST <= (int(numbers[1]), int(numbers[2])) <= NEWEST:
        raise EngineError(
            f"sglang {version} is not known here, only 0.5. Fix: install one of those, such as sglang==0.5.23"
        )


def sampling_params(sampling: Sampling, stop_ids: Sequence[int], max_tokens: int) -> dict[str, Any]:
    """`Sampling` in sglang's words. Stop strings are the gateway's. sglang ends answers at the model's own ends of turn
    as well; it cannot be told otherwise while it minds `stop_ids`.

    >>> sampling_params(Sampling(temperature=0.0, stop=("END",)), [2], 8)["stop_token_ids"]
    [2]
    """
    return {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or -1,
        "min_p": sampling.min_p,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "repetition_penalty": sampling.repetition_penalty,
        "sampling_seed": sampling.seed,
        "max_new_tokens": max_tokens,
        "stop_token_ids": list(stop_ids),
        "skip_special_tokens": False,
        "spaces_between_special_tokens": False,
        "no_stop_trim": True,
    }


# -- what comes back ---------------------------------------------------------------------------------------------------

_Place = tuple[float | None, int, Any]
"""A logprob, the token it belongs to, and its text if that was asked for."""


class _Finish(Struct, frozen=True):
    type: str
    matched: int | list[int] | str | None = None
    message: str | None = None
    status_code: int | None = None


class _Meta(Struct, frozen=True):
    finish_reason: _Finish | None = None
    completion_tokens: int = 0
    output_token_logprobs: list[_Place] = []
    input_token_logprobs: list[_Place] = []
    weight_version: str | None = None


class _Message(Struct, frozen=True):
    meta_info: _Meta = _Meta()
    output_ids: list[int] = []
    error: dict[str, Any] | None = None


_message = msgspec.json.Decoder(_Message)


def _piece(connection: ServerClient, data: bytes, given: int) -> SglangTokens:
    """What is new in a message, after `given` tokens."""
    try:
        message = _message.decode(data)
    except msgspec.DecodeError as error:
        raise EngineError(f"sglang said something that is not understood ({error})") from None
    if message.error is not None:
        status = message.error.get("code")
        raise connection.make_error(status if isinstance(status, int) else 500, data)
    about = message.meta_info
    new = about.completion_tokens - given
    ids = message.output_ids[-new:] if new > 0 else []
    places = about.output_token_logprobs[-new:] if new > 0 else []
    logprobs = [place[0] for place in places if place[0] is not None]
    if len(ids) != max(new, 0) or [place[1] for place in places] != ids:
        raise EngineError("sglang gave tokens and logprobs that do not belong together")
    if len(logprobs) != len(ids):
        raise EngineError("sglang gave no logprob for a token that it drew: are the weights finite numbers?")
    return SglangTokens(ids, logprobs, _finish(about.finish_reason), about.weight_version)


def _finish(reason: _Finish | None) -> Literal["stop", "length"] | None:
    if reason is None:
        return None
    if reason.type == "abort":
        kind = EngineError if reason.status_code is not None and reason.status_code < 500 else BrokenOff
        raise kind(f"sglang broke the answer off: {reason.message}")
    if reason.type not in ("stop", "length") or isinstance(reason.matched, str):  # no strings were given to match
        raise EngineError(f"sglang ended the answer for a reason that is not known: {reason.matched or reason.type}")
    return reason.type


async def _about(connection: ServerClient, what: str) -> dict[str, Any]:
    """Older servers have `get_` before these names."""
    answer = await connection.send("GET", f"/{what}")
    if answer.status == 404:
        answer = await connection.send("GET", f"/get_{what}")
    try:
        if answer.status != 200:
            raise ValueError
        return msgspec.json.decode(answer.body, type=dict[str, Any])
    except ValueError:  # msgspec's are too
        raise EngineError(f"{connection.url} is not an sglang server: it has no /{what}") from None
