"""The clients that `llm.client()` and `llm.async_client()` give: those of the `openai` package, for less CPU time.

    create(messages=..., tools=...)  the package goes through each of them by its type, to rename keys and encode files;
                                     what is JSON already, or messages it gave out itself, needs none of that, and goes
                                     around it as `extra_body`, which is sent as it is
    http://HOST:PORT                 a transport of our own for the gateway and no other server (`transports`)

What is sent and what comes back is the same (tests compare both with the package's own). Measured for a chat of seven
messages and one tool on loopback, in one process: 1.3 to 1.4 ms of CPU a call by the package's own client, 0.5 ms here;
1.6 and 0.5 ms for the async one (openai 3.51, Python 3.11). benchmarks/agents.py has whole rollouts.

Left out: the other APIs (`responses`, `completions.parse`), which take the package's way with our transport. Whoever
patched `Completions.create`, as tracing does, gets the messages as they were given.
"""

from __future__ import annotations

import asyncio
import os
from functools import cached_property, lru_cache, wraps
from typing import Any, cast
from urllib.parse import urlsplit
from weakref import WeakKeyDictionary, WeakSet

import openai
from openai.resources.chat import AsyncChat, Chat
from openai.resources.chat.completions import AsyncCompletions, Completions
from pydantic import BaseModel

from strop.agent.transports import AsyncGatewayTransport, GatewayTransport, httpx
from strop.net.client import ssl_context

_ATOMS = frozenset({str, int, float, bool, type(None)})
_CREATE, _ASYNC_CREATE = Completions.create, AsyncCompletions.create


class _NotPlain(Exception):
    """A value that only the package knows how to send."""


def to_plain(value: Any) -> Any:
    """The same as JSON's own types, with the package's own objects written as it writes them."""
    kind = cast("type[Any]", type(value))
    if kind in _ATOMS:
        return value
    if kind is dict:
        return {key: to_plain(of) for key, of in cast("dict[Any, Any]", value).items()}
    if kind is list or kind is tuple:
        return [to_plain(of) for of in cast("list[Any]", value)]
    if isinstance(value, BaseModel):
        return value.model_dump(exclude_unset=True, mode="json", exclude=getattr(value, "__api_exclude__", None))
    raise _NotPlain


def _go_around(given: dict[str, Any]) -> dict[str, Any]:
    """The arguments of `create` with what is plain in `extra_body`; as they are where something is not."""
    extra: Any = given.get("extra_body") or {}
    messages, tools = given.get("messages"), given.get("tools")
    if type(extra) is not dict or type(messages) is not list:
        return given
    try:
        plain: dict[str, Any] = {"messages": to_plain(messages)}
        if type(tools) is list:
            plain["tools"] = to_plain(tools)
            given = {name: value for name, value in given.items() if name != "tools"}
    except _NotPlain:
        return given
    return given | {"messages": [], "extra_body": plain | cast("dict[str, Any]", extra)}


class _Completions(Completions):
    @wraps(Completions.create)
    def create(self, **given: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride] - all that it takes
        create: Any = super().create
        return create(**(_go_around(given) if Completions.create is _CREATE else given))


class _AsyncCompletions(AsyncCompletions):
    @wraps(AsyncCompletions.create)
    async def create(self, **given: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride] - the same
        patched = AsyncCompletions.create is not _ASYNC_CREATE
        create: Any = super().create
        return await create(**(given if patched else _go_around(given)))


class _Chat(Chat):
    @cached_property
    def completions(self) -> Completions:  # pyright: ignore[reportIncompatibleMethodOverride] - cached there too
        return _Completions(self._client)


class _AsyncChat(AsyncChat):
    @cached_property
    def completions(self) -> AsyncCompletions:  # pyright: ignore[reportIncompatibleMethodOverride]
        return _AsyncCompletions(self._client)


class AttemptClient(openai.OpenAI):
    """What `llm.client()` gives."""

    @cached_property
    def chat(self) -> Chat:  # pyright: ignore[reportIncompatibleMethodOverride]
        return _Chat(self)


class AsyncAttemptClient(openai.AsyncOpenAI):
    """What `llm.async_client()` gives. Its connections close with the last of those that share them."""

    sharing: WeakSet[AsyncAttemptClient] | None = None

    @cached_property
    def chat(self) -> AsyncChat:  # pyright: ignore[reportIncompatibleMethodOverride]
        return _AsyncChat(self)

    def copy(self, **given: Any) -> AsyncAttemptClient:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The same with other options; it shares what this one shares."""
        made = super().copy(**given)
        if self.sharing is not None and "http_client" not in given:
            made.sharing = self.sharing
            made.sharing.add(made)
        return made

    with_options = copy  # pyright: ignore[reportAssignmentType] - the package has it so too

    async def close(self) -> None:
        if self.sharing is not None:
            self.sharing.discard(self)
        if not self.sharing:
            await super().close()


# -- making them -------------------------------------------------------------------------------------------------------


def make_client(base_url: str, api_key: str) -> AttemptClient:
    """A client for one attempt. All of a process share their connections to the gateway."""
    origin = _origin(base_url)
    shared = _make_shared(origin)
    if shared.is_closed():  # an agent closed the one it was given
        _make_shared.cache_clear()
        shared = _make_shared(origin)
    return shared.with_options(base_url=base_url, api_key=api_key)


def make_async_client(base_url: str, api_key: str) -> AsyncAttemptClient:
    """A client for one attempt. All that are made in an event loop share their connections to the gateway."""
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:  # it may be used in any, later
        return _make_async(_origin(base_url)).with_options(base_url=base_url, api_key=api_key)
    origin, by_origin = _origin(base_url), _shared_async.setdefault(loop, {})
    shared = by_origin.get(origin)
    if shared is None or shared.is_closed():
        shared = by_origin[origin] = _make_async(origin)
        shared.sharing = WeakSet()
    return shared.with_options(base_url=base_url, api_key=api_key)


_shared_async: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[str, AsyncAttemptClient]] = WeakKeyDictionary()


def _make_async(origin: str) -> AsyncAttemptClient:
    mounts: dict[str, Any] = {}
    if origin.startswith("http://"):
        mounts[origin] = AsyncGatewayTransport(origin, httpx.AsyncHTTPTransport(verify=ssl_context()))
    http = openai.DefaultAsyncHttpxClient(verify=ssl_context(), mounts=mounts)
    return AsyncAttemptClient(base_url=origin, api_key="-", http_client=http)  # with_options puts in the real ones


@lru_cache(maxsize=4)
def _make_shared(origin: str) -> AttemptClient:
    mounts: dict[str, Any] = {}
    if origin.startswith("http://"):
        place = urlsplit(origin)
        mounts[origin] = GatewayTransport(place.hostname or "", place.port or 80)
    http = openai.DefaultHttpxClient(verify=ssl_context(), mounts=mounts)
    return AttemptClient(base_url=origin, api_key="-", http_client=http)  # with_options puts in the real ones


os.register_at_fork(after_in_child=_make_shared.cache_clear)  # two processes must not speak on one connection


def _origin(url: str) -> str:
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc}"


def warm_up() -> None:
    """Have the package import and build, with answers that come from nowhere, what it needs when it is first used, so
    that processes forked afterwards have it. No connection is made."""
    answer = {
        "id": "",
        "object": "chat.completion",
        "created": 0,
        "model": "",
        "choices": [{"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": ""}}],
        "usage": {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0},
    }
    nowhere: Any = httpx.MockTransport(lambda request: httpx.Response(200, json=answer))
    ask: dict[str, Any] = {"model": "", "messages": [{"role": "user", "content": ""}]}
    with openai.DefaultHttpxClient(transport=nowhere, verify=ssl_context()) as http:
        AttemptClient(base_url="http://nowhere", api_key="-", http_client=http).chat.completions.create(**ask)

    async def ask_async() -> None:
        async with openai.DefaultAsyncHttpxClient(transport=nowhere, verify=ssl_context()) as http:
            client = AsyncAttemptClient(base_url="http://nowhere", api_key="-", http_client=http)
            await client.chat.completions.create(**ask)

    asyncio.run(ask_async())
    _make_shared("http://127.0.0.1:1")
    _make_shared.cache_clear()
