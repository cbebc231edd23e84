"""What every dialect is turned into and made from: the neutral request, the pieces of an answer, the refusal.

A dialect is one file: `read` turns a body into a `Request`, the rest turns an `Answer` into that API's objects. Adding
one adds a file here and a line to the routes; nothing behind this seam knows which API was spoken.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Literal, Protocol

from msgspec import Struct

from strop.types import Finish

Json = dict[str, Any]


class Request(Struct, frozen=True, kw_only=True):
    """A model call, whatever API it came through.

    `messages` are plain: content is always text, tool calls are {"id", "type", "function": {"name", "arguments"}} with
    the arguments as parsed JSON, the way chat templates want them. Those of the assistant may have the thoughts before
    it as `reasoning_content` and, where the agent names it, the `turn` that said it. An API without messages gives
    `prompts` instead, as text or as token ids, each answered `n` times. `tools` are in the chat API's shape.

    `tool` is the one that must be called, where `tool_choice` is "required" for a certain one. `prefill` is the
    beginning of the answer, which the model goes on from. `previous` is the turn whose conversation `messages` go on
    from, for APIs that keep it for the agent. `variables` are for the chat template; `thinking` and `effort` say
    whether and how much the model should think, which matters where the template has a variable for it. `requested` is
    kept on the turn: what was asked for, granted or not (how tokens are drawn is the policy's affair). `options` are
    the dialect's own, for writing its answer.

    >>> Request(messages=[{"role": "user", "content": "hi"}]).n
    1
    """

    messages: list[Json] = []
    prompts: list[str | list[int]] = []
    tools: list[Json] = []
    tool_choice: Literal["auto", "none", "required"] = "auto"
    tool: str | None = None
    one_call: bool = False
    prefill: str = ""
    previous: str | None = None
    variables: Json = {}
    thinking: bool | None = None
    effort: str | None = None
    stop: tuple[str, ...] = ()
    max_tokens: int | None = None
    n: int = 1
    logprobs: bool = False
    stream: bool = False
    requested: Json = {}
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
    arguments: Json


class Delta(Struct, frozen=True, kw_only=True):
    """What some new tokens added to one choice, in this order: reasoning, text, calls."""

    choice: int = 0
    reasoning: str = ""
    text: str = ""
    calls: tuple[ToolCall, ...] = ()
    tokens: tuple[SampledToken, ...] = ()


class ChoiceDone(Struct, frozen=True, kw_only=True):
    """One finished choice, whole. `stopped_by` is the stop string that ended it, if one did."""

    choice: int
    text: str
    reasoning: str = ""
    calls: tuple[ToolCall, ...] = ()
    tokens: tuple[SampledToken, ...] = ()
    finish: Finish
    stopped_by: str | None = None


class Answer(Struct, frozen=True, kw_only=True):
    """What is told about an answer as a whole. `id` is the first choice's turn. Of the prompt's tokens `cached_tokens`
    were served before, of the response's `reasoning_tokens` are reasoning."""

    id: str
    model: str
    created: int
    prompt_tokens: int
    cached_tokens: int = 0
    response_tokens: int = 0
    reasoning_tokens: int = 0


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


class Stream(Protocol):
    """One answer on its way, event by event."""

    def opening(self, answer: Answer) -> bytes:
        """The first bytes. They wait for the first delta, so that early errors have a status."""
        ...

    def delta(self, answer: Answer, delta: Delta) -> bytes: ...

    def closing(self, answer: Answer, choices: Sequence[ChoiceDone]) -> bytes:
        """The end: finish reasons, usage, the last byte. Sent only once the turns are durable."""
        ...

    def error(self, refused: Refused) -> bytes:
        """An error after the stream began."""
        ...


class Dialect(Protocol):
    """A module of this package, seen as an object."""

    def read(self, body: bytes) -> Request:
        """The neutral request, or `Refused` with a sentence that names the parameter."""
        ...

    def whole(self, answer: Answer, choices: Sequence[ChoiceDone], request: Request) -> bytes: ...

    def stream(self, request: Request) -> Stream: ...

    def error(self, refused: Refused) -> bytes: ...
