"""A model API, as the gateway sees it: what a dialect must say, and what it is turned into and made from.

    body ──Dialect.read──▶ Request ──▶ gateway ──▶ Answer, Delta, ChoiceDone ──Dialect.write or .stream──▶ body

A dialect is one class, which owns its address, how a request is read, how an answer and a stream are written, how a
provider's answer is read that passes through, and the shape of its errors. Adding one adds a file to this folder and a
line to registry.py; nothing outside this folder knows which API was spoken.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal, Protocol

from msgspec import Struct
from msgspec.structs import replace

from strop.gateway.dialects.proxied import ProxiedAnswer
from strop.types import Finish, Turn

Json = dict[str, Any]


class AnswerSchema(Struct, frozen=True):
    """A JSON Schema that an answer's text must follow; `param` is what asks for it, for errors.

    >>> AnswerSchema({"type": "object"}, "response_format").param
    'response_format'
    """

    schema: Json
    param: str


class ModelRequest(Struct, frozen=True, kw_only=True):
    """A model call, whatever API it came through.

    `messages` are plain: content is always text, tool calls are {"id", "type", "function": {"name", "arguments"}} with
    the arguments as parsed JSON, the way chat templates want them, or as text where that is no JSON object. Those of
    the assistant may have the thoughts before it as `reasoning_content` and, where the agent names it, the `turn` that
    said it. An API without messages gives `prompts` instead, as text or as token ids, each answered `n` times. `tools`
    are in the chat API's shape.

    `tool` is the one that must be called, where `tool_choice` is "required" for a certain one; `strict` are those whose
    calls must follow their schemas. `prefill` is the
    beginning of the answer, which the model goes on from. `schema` is what its text must be. `previous` is the turn
    whose conversation `messages` go on from, and `refers` are turns whose answers they name and do not have, for APIs
    that keep them for the agent. `variables` are for the chat template; `thinking` and `effort` say whether and how
    much the model should think, which matters where the template has a variable for it. `requested` is kept on the
    turn: what was asked for, granted or not (how tokens are drawn is the policy's affair). `dropped` says of what the
    model is not told though it was sent, why. `options` are the dialect's own, for writing its answer.

    >>> ModelRequest(messages=[{"role": "user", "content": "hi"}]).n
    1
    """

    messages: list[Json] = []
    prompts: list[str | list[int]] = []
    tools: list[Json] = []
    tool_choice: Literal["auto", "none", "required"] = "auto"
    tool: str | None = None
    strict: frozenset[str] = frozenset()
    one_call: bool = False
    prefill: str = ""
    schema: AnswerSchema | None = None
    previous: str | None = None
    refers: tuple[str, ...] = ()
    variables: Json = {}
    thinking: bool | None = None
    effort: str | None = None
    stop: tuple[str, ...] = ()
    max_tokens: int | None = None
    n: int = 1
    logprobs: bool = False
    token_ids: bool = False
    stream: bool = False
    requested: Json = {}
    dropped: tuple[str, ...] = ()
    options: Json = {}

    @property
    def parse_tools(self) -> bool:
        """Whether calls are taken out of what the model says."""
        return bool(self.tools) and self.tool_choice != "none"


def turn_named(id: str | None) -> str | None:
    """What an agent sends back as an id, if it is a turn's: others have ids too.

    >>> turn_named("g1.0/1/4"), turn_named("EqQBCgIYAhIM1/d=="), turn_named(None)
    ('g1.0/1/4', None, None)
    """
    return id if id is not None and _TURN.fullmatch(id) else None


_TURN = re.compile(r".+/[0-9]+/[0-9]+")


class SampledToken(Struct, frozen=True, gc=False):
    """A token for those who ask for logprobs, as chat completions write it; `bytes` is None where a token is not whole
    characters. Other tokens than those sampled are not told."""

    token: str
    logprob: float
    bytes: list[int] | None
    top_logprobs: tuple[()] = ()


class ToolCall(Struct, frozen=True):
    """A tool call on its way to the agent; `position` counts from 0 within its answer."""

    position: int
    id: str
    name: str
    arguments: Json


class Delta(Struct, frozen=True, kw_only=True):
    """What some new tokens added to one choice, in this order: reasoning, text, calls; and their ids for those who ask
    for them."""

    choice: int = 0
    reasoning: str = ""
    text: str = ""
    calls: tuple[ToolCall, ...] = ()
    tokens: tuple[SampledToken, ...] = ()
    ids: tuple[int, ...] = ()


class ChoiceDone(Struct, frozen=True, kw_only=True):
    """One finished choice, whole. `stopped_by` is the stop string that ended it, if one did."""

    choice: int
    text: str
    reasoning: str = ""
    calls: tuple[ToolCall, ...] = ()
    tokens: tuple[SampledToken, ...] = ()
    ids: tuple[int, ...] = ()
    finish: Finish
    stopped_by: str | None = None


class AnswerInfo(Struct, frozen=True, kw_only=True):
    """What is told about an answer as a whole. `id` is the first choice's turn. Of the prompt's tokens `cached_tokens`
    were served before, of the response's `reasoning_tokens` are reasoning. `prompt_ids` has one list per prompt."""

    id: str
    model: str
    created: int
    prompt_tokens: int
    cached_tokens: int = 0
    response_tokens: int = 0
    reasoning_tokens: int = 0
    prompt_ids: Sequence[Sequence[int]] = ()


class ApiError(Exception):
    """A request that gets an error in its API's own shape. `kind`, `code` and `param` follow OpenAI's words."""

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        kind: str = "invalid_request_error",
        code: str | None = None,
        param: str | None = None,
    ) -> None:
        super().__init__(message)
        self.message, self.status, self.kind, self.code, self.param = message, status, kind, code, param


class Stream(Protocol):
    """One answer on its way, event by event."""

    def opening(self, answer: AnswerInfo) -> bytes:
        """The first bytes. They wait for the first delta, so that early errors have a status."""
        ...

    def delta(self, answer: AnswerInfo, delta: Delta) -> bytes: ...

    def closing(self, answer: AnswerInfo, choices: Sequence[ChoiceDone]) -> bytes:
        """The end: finish reasons, usage, the last byte. Sent only once the turns are durable."""
        ...

    def error(self, refused: ApiError) -> bytes:
        """An error after the stream began."""
        ...


class Dialect(ABC):
    """One model API. `path` is the end of its address, below /v1/.

    `count_path` is where it counts the tokens of a request, if it does. `not_offered` says of other addresses that the
    API has, by how they begin, why they are not served. `forwarded` are headers of its own that go on to a provider.
    """

    path: ClassVar[str]
    count_path: ClassVar[str | None] = None
    not_offered: ClassVar[Mapping[str, str]] = {}
    forwarded: ClassVar[tuple[bytes, ...]] = ()

    # -- requests and answers of our own models ------------------------------------------------------------------------

    @abstractmethod
    def read(self, body: bytes) -> ModelRequest:
        """The neutral request, or `ApiError` with a sentence that names the parameter."""

    @abstractmethod
    def write(self, answer: AnswerInfo, choices: Sequence[ChoiceDone], request: ModelRequest) -> bytes:
        """An answer that is not streamed."""

    @abstractmethod
    def stream(self, request: ModelRequest) -> Stream: ...

    @abstractmethod
    def error(self, refused: ApiError) -> bytes:
        """The body of an answer that is an error."""

    def continue_from(self, request: ModelRequest, turn: Turn) -> ModelRequest:
        """A request that names the turn before it (`ModelRequest.previous`), with that turn's conversation."""
        said = turn.answer | {"turn": turn.id}
        return replace(request, messages=[*turn.messages, said, *request.messages])

    def recall(self, request: ModelRequest, answers: Mapping[str, Json]) -> ModelRequest:
        """A request that names answers without having them (`ModelRequest.refers`), with those, by turn."""
        raise NotImplementedError

    def read_count(self, body: bytes) -> ModelRequest:
        """A request whose tokens are to be counted."""
        return self.read(body)

    def write_count(self, num_tokens: int) -> Json:
        return {"input_tokens": num_tokens}

    def is_spoken(self, headers: Sequence[tuple[bytes, bytes]]) -> bool:
        """Whether a request is this API's, as its headers say, where the address may be any API's."""
        return False

    def write_model(self, name: str, *, created: float, context: int) -> Json:
        return {"id": name, "object": "model", "owned_by": "strop", "created": int(created)}

    def write_models(self, models: list[Json]) -> Json:
        return {"object": "list", "data": models}

    # -- answers of providers, which pass through ----------------------------------------------------------------------

    @abstractmethod
    def read_answer(self, data: Json, answer: ProxiedAnswer) -> None:
        """Add to `answer` what a provider's body says, or one event of its stream. An error of Python's own for data
        that is not as it should be means that it was not read."""

    def error_event(self, refused: ApiError) -> bytes:
        """The last event of a provider's stream that breaks off."""
        return b"data: " + self.error(refused) + b"\n\n"

    def key_headers(self, key: str) -> dict[str, str]:
        """How clients of this API send a key."""
        return {"authorization": f"Bearer {key}"}
