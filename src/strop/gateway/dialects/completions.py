"""OpenAI's completions: raw prompts, as text or as token ids, and what the model writes after them.

Parameters are treated as in `chat`. Two of OpenAI's habits are not followed: without `max_tokens` the policy's limit
counts, not 16 tokens; and the logprobs that can be had are those of sampled tokens, so `logprobs` is 0 or 1 and does
not go together with `echo`.

Where several prompts come at once, prompt i has the choices i * n to i * n + n - 1.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Annotated, Any, cast

import msgspec
from msgspec import Meta

from strop.gateway.dialects.base import AnswerInfo, ApiError, ChoiceDone, Delta, Json, ModelRequest, SampledToken
from strop.gateway.dialects.fields import read_fields, read_object, unsupported
from strop.gateway.dialects.openai import (
    DRAWN,
    TOKEN_IDS,
    OpenAIDialect,
    error_body,
    event,
    read_stop,
    read_stream_options,
    read_token_ids,
    write_token_ids,
)

FIELDS: Json = {
    "model": str,
    "prompt": Any,
    "stream": bool,
    "stream_options": dict[str, Any],
    "echo": bool,
    **DRAWN,
    "max_tokens": Annotated[int, Meta(ge=1)],
    "stop": str | list[str],
    "n": Annotated[int, Meta(ge=1, le=128)],
    "best_of": int,
    "logprobs": Annotated[int, Meta(ge=0)],
    "user": str,
    TOKEN_IDS: bool,
}

HARMLESS: dict[str, Any] = {"suffix": "", "logit_bias": {}}
"""Accepted with the one value that changes nothing, which some clients always send."""

RECORDED = (
    *DRAWN,
    "model",
    "max_tokens",
    "stop",
    "n",
)

MOST = 128
"""How many answers one request may ask for, over all its prompts."""

Ids = Annotated[list[Annotated[int, Meta(ge=0)]], Meta(min_length=1)]
Text = Annotated[str, Meta(min_length=1)]


class Completions(OpenAIDialect):
    path = "completions"

    def read(self, body: bytes) -> ModelRequest:
        return _read(body)

    def write(self, answer: AnswerInfo, choices: Sequence[ChoiceDone], request: ModelRequest) -> bytes:
        return _write(answer, choices, request)

    def stream(self, request: ModelRequest) -> CompletionChunks:
        return CompletionChunks(request)


# -- request -----------------------------------------------------------------------------------------------------------


def _read(body: bytes) -> ModelRequest:
    fields = read_fields(read_object(body), FIELDS, HARMLESS)
    if "prompt" not in fields:
        raise ApiError("prompt is required", param="prompt", code="missing_required_parameter")
    prompts, n = read_prompts(fields["prompt"]), fields.get("n", 1)
    if len(prompts) * n > MOST:
        raise ApiError(
            f"{len(prompts)} prompts with n = {n} are {len(prompts) * n} answers. Fix: ask for {MOST} at most",
            param="prompt",
        )
    if fields.get("best_of", n) != n:
        raise unsupported("best_of", "every answer is given out. Fix: ask for them with n, and choose yourself")
    if fields.get("logprobs", 0) > 1:
        raise unsupported("logprobs", "only the sampled token's logprob is known. Fix: use 0 or 1")
    if fields.get("echo"):
        _check_echo(prompts, "logprobs" in fields)
    return ModelRequest(
        prompts=prompts,
        stop=read_stop(fields.get("stop", ())),
        max_tokens=fields.get("max_tokens"),
        n=n,
        logprobs="logprobs" in fields,
        stream=fields.get("stream", False),
        requested={name: fields[name] for name in RECORDED if name in fields},
        options={
            "echo": fields.get("echo", False),
            "top_logprobs": fields.get("logprobs", 0) == 1,
            "include_usage": read_stream_options(fields.get("stream_options", {})),
            **read_token_ids(fields),
        },
    )


def read_prompts(prompt: Any) -> list[str | list[int]]:
    """One prompt or several, each as text or as ids; a list of numbers is one prompt.

    >>> read_prompts("Once"), read_prompts([5, 7]), read_prompts(["a", "b"]), read_prompts([[5, 7], [8]])
    (['Once'], [[5, 7]], ['a', 'b'], [[5, 7], [8]])
    """
    several = isinstance(prompt, list) and not any(isinstance(item, int) for item in cast(list[Any], prompt))
    try:
        return msgspec.convert(prompt if several else [prompt], Annotated[list[Text | Ids], Meta(min_length=1)])
    except msgspec.ValidationError as error:
        raise ApiError(
            f"prompt: {error}. Fix: give text, a list of token ids, or a list of such, never empty",
            param="prompt",
            code="invalid_value",
        ) from None


def _check_echo(prompts: Sequence[str | list[int]], logprobs: bool) -> None:
    if logprobs:
        raise unsupported(
            "echo", "not with logprobs: a prompt's tokens are not sampled and have none. Fix: leave one out"
        )
    if not all(isinstance(prompt, str) for prompt in prompts):
        raise unsupported("echo", "not for a prompt of token ids. Fix: send its text, or put the answer after it")


# -- answer ------------------------------------------------------------------------------------------------------------


def _write(answer: AnswerInfo, choices: Sequence[ChoiceDone], request: ModelRequest) -> bytes:
    body = _head(answer) | {
        "choices": [
            {
                "index": done.choice,
                "text": _echo(request, done.choice) + done.text,
                "logprobs": _logprobs(done.tokens, request, Offsets()) if request.logprobs else None,
                "finish_reason": done.finish,
                **write_token_ids(request, done),
                **({"prompt_token_ids": done.prompt_ids} if request.options.get(TOKEN_IDS) else {}),
            }
            for done in choices
        ],
        "usage": _usage(answer),
    }
    return msgspec.json.encode(body)


class CompletionChunks:
    """A stream of `text_completion` objects, each with a piece of one choice."""

    def __init__(self, request: ModelRequest) -> None:
        self._request = request
        self._offsets: defaultdict[int, Offsets] = defaultdict(Offsets)

    def opening(self, answer: AnswerInfo) -> bytes:
        if not self._request.options["echo"]:
            return b""
        choices = range(len(self._request.prompts) * self._request.n)
        return b"".join(self._chunk(answer, choice, _echo(self._request, choice)) for choice in choices)

    def delta(self, answer: AnswerInfo, delta: Delta) -> bytes:
        logprobs = None
        if delta.tokens:
            logprobs = _logprobs(delta.tokens, self._request, self._offsets[delta.choice])
        return self._chunk(answer, delta.choice, delta.text, logprobs=logprobs)

    def closing(self, answer: AnswerInfo, choices: Sequence[ChoiceDone]) -> bytes:
        events = [self._chunk(answer, done.choice, "", finish=done.finish) for done in choices]
        if self._request.options["include_usage"]:
            events.append(event(_head(answer) | {"choices": [], "usage": _usage(answer)}))
        return b"".join([*events, b"data: [DONE]\n\n"])

    def error(self, refused: ApiError) -> bytes:
        return event(error_body(refused))

    def _chunk(
        self, answer: AnswerInfo, choice: int, text: str, *, logprobs: Json | None = None, finish: str | None = None
    ) -> bytes:
        chunk = _head(answer) | {
            "choices": [{"index": choice, "text": text, "logprobs": logprobs, "finish_reason": finish}]
        }
        if self._request.options["include_usage"]:
            chunk["usage"] = None
        return event(chunk)


def _head(answer: AnswerInfo) -> Json:
    return {"id": answer.id, "object": "text_completion", "created": answer.created, "model": answer.model}


def _usage(answer: AnswerInfo) -> Json:
    return {
        "prompt_tokens": answer.prompt_tokens,
        "completion_tokens": answer.response_tokens,
        "total_tokens": answer.prompt_tokens + answer.response_tokens,
        "prompt_tokens_details": {"cached_tokens": answer.cached_tokens},
    }


def _echo(request: ModelRequest, choice: int) -> str:
    prompt = request.prompts[choice // request.n]
    return prompt if request.options["echo"] and isinstance(prompt, str) else ""


def _logprobs(tokens: Sequence[SampledToken], request: ModelRequest, offsets: Offsets) -> Json:
    return {
        "tokens": [token.token for token in tokens],
        "token_logprobs": [token.logprob for token in tokens],
        "top_logprobs": [{t.token: t.logprob} for t in tokens] if request.options["top_logprobs"] else None,
        "text_offset": [offsets.next(token) for token in tokens],
    }


class Offsets:
    """Where tokens begin in an answer, in characters. Parts of characters in a row count as one character.

    >>> a, part, b = SampledToken("a ", -1, [97, 32]), SampledToken("\\ufffd", -1, None), SampledToken("b", -1, [98])
    >>> offsets = Offsets()
    >>> [offsets.next(token) for token in (a, part, part, b)]
    [0, 2, 2, 3]
    """

    def __init__(self) -> None:
        self._at = 0
        self._within = False

    def next(self, token: SampledToken) -> int:
        whole = token.bytes is not None
        if whole and self._within:
            self._at += 1
        self._within = not whole
        start = self._at
        self._at += len(token.token if whole else token.token.replace("\ufffd", ""))
        return start
