"""What every dialect is turned into and made from: the neutral request, the pieces of an answer, the refusal.

A dialect is one file: `read` turns a body into a `Request`, the rest turns an `Answer` into that API's objects. Adding
one adds a file here and a line to the routes; nothing behind this seam knows which API was spoken.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from msgspec import Struct

from strop.types import Finish


class Request(Struct, frozen=True, kw_only=True):
    """A model call, whatever API it came through.

    `messages` are plain: content is always text, tool calls are {"id", "type", "function": {"name", "arguments"}} with
    the arguments as parsed JSON, the way chat templates want them. `requested` is kept on the turn: what the agent
    asked for, whether it was granted or not.

    >>> Request(messages=[{"role": "user", "content": "hi"}]).n
    1
    """

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] = []
    parse_tools: bool = False
    one_call: bool = False
    stop: tuple[str, ...] = ()
    max_tokens: int | None = None
    n: int = 1
    logprobs: bool = False
    stream: bool = False
    include_usage: bool = False
    requested: dict[str, Any] = {}


class SampledToken(Struct, frozen=True):
    """A token for those who ask for logprobs; `bytes` is None where a token is not whole characters."""

    token: str
    logprob: float
    bytes: list[int] | None


class ToolCall(Struct, frozen=True):
    """A tool call on its way to the agent; `position` counts from 0 within its answer."""

    position: int
    id: str
    name: str
    arguments: dict[str, Any]


class Delta(Struct, frozen=True, kw_only=True):
    """What some new tokens added to one choice."""

    choice: int = 0
    text: str = ""
    calls: tuple[ToolCall, ...] = ()
    tokens: tuple[SampledToken, ...] = ()


class ChoiceDone(Struct, frozen=True, kw_only=True):
    """One finished choice, whole."""

    choice: int
    text: str
    calls: tuple[ToolCall, ...]
    tokens: tuple[SampledToken, ...]
    finish: Finish


class Answer(Struct, frozen=True, kw_only=True):
    """What is told about an answer as a whole. `id` is the first choice's turn."""

    id: str
    model: str
    created: int
    prompt_tokens: int
    response_tokens: int = 0


class Refused(Exception):
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


class Dialect(Protocol):
    """A module of this package, seen as an object."""

    def read(self, body: bytes) -> Request: ...

    def whole(self, answer: Answer, choices: Sequence[ChoiceDone], request: Request) -> bytes: ...

    def opening(self, answer: Answer, request: Request) -> bytes:
        """The first bytes of a stream."""
        ...

    def delta(self, answer: Answer, delta: Delta, request: Request) -> bytes: ...

    def closing(self, answer: Answer, choices: Sequence[ChoiceDone], request: Request) -> Iterable[bytes]:
        """The end of a stream: finish reasons, usage, the last byte. Sent only once the turns are durable."""
        ...

    def error(self, refused: Refused) -> bytes: ...

    def stream_error(self, refused: Refused) -> bytes:
        """An error after the stream began."""
        ...
