"""The tools of MCP servers, started here (stdio) or reached by an address (streamable HTTP).

    with mcp.Server(["uvx", "mcp-server-time"]) as tools:                     in a sync agent: a list of Tool
        tools[0].run_now('{"timezone": "Europe/Amsterdam"}').text

    async with mcp.Server(url="http://127.0.0.1:8000/mcp") as tools:          in an async one
        (await tools[0].run("{}")).text

    strop.ToolAgent(tools=lambda task: mcp.Server([...]), ...)                a server, or a session, for each rollout

A server that cannot be started, or that does not answer in the beginning, is a `ToolError` of one sentence. Afterwards
nothing is raised: a call that is not answered within `timeout`, or whose server dies, has that as its result.

The connection lives in a thread with an event loop of its own, so that it serves sync and async agents alike and may be
opened in one task and closed in another.

Left out: one connection for several rollouts (a server at an address is shared, and each rollout has its own session);
what servers offer besides tools; servers that ask back.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import os
import shlex
import tempfile
import threading
from collections.abc import Collection, Mapping, Sequence
from typing import Any, cast

import msgspec

from strop.agent.tool import LIMIT, TIMEOUT, Observation, Tool
from strop.errors import ConfigError, ToolError
from strop.imports import one_line, to_install

CLOSE_SECONDS = 10.0
"""Seconds a server has to end by itself, or by force, when it is closed."""
PAGES = 100
"""Most pages of a list of tools that are asked for."""


class Server:
    """One MCP server: `command` starts it, or `url` says where it is. Opened, it is the list of its tools.

    `env` is added to the few variables that a server gets besides (PATH, HOME, ...): an attempt's keys are not among
    them. `headers` go with every request to `url`. `only` names the tools that are wanted (default: all). `timeout` is
    for the start and for every call, in seconds; `limit` cuts results, in characters.
    """

    def __init__(
        self,
        command: str | Sequence[str] = (),
        *,
        url: str = "",
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        headers: Mapping[str, str] | None = None,
        only: Collection[str] | None = None,
        timeout: float = TIMEOUT,
        limit: int = LIMIT,
    ) -> None:
        self.command = shlex.split(command) if isinstance(command, str) else list(command)
        if bool(self.command) == bool(url):
            raise ConfigError("an MCP server has a command that starts it, or a url where it is. Fix: give one of them")
        self.url, self.env, self.cwd, self.headers, self.only = url, env, cwd, headers, only
        self.timeout, self.limit = timeout, limit
        self._link: _Link | None = None

    @property
    def name(self) -> str:
        return f"the MCP server {self.url or shlex.join(self.command)!r}"

    def open(self) -> list[Tool]:
        """Connect, and say what tools there are. Raises `ToolError`."""
        link = self._begin()
        try:
            found = link.ready.result(self.timeout)
        except BaseException as error:
            self.close()
            if isinstance(error, Exception):
                raise self._to_error(link, error) from error
            raise
        return self._tools(link, found)

    def close(self) -> None:
        """End the connection, and the server if it was started here. Once is enough; twice does no harm."""
        link, self._link = self._link, None
        if link is not None:
            link.close()

    def __enter__(self) -> list[Tool]:
        return self.open()

    def __exit__(self, *raised: object) -> None:
        self.close()

    async def __aenter__(self) -> list[Tool]:
        link = self._begin()
        try:
            found = await asyncio.wait_for(asyncio.wrap_future(link.ready), self.timeout)
        except BaseException as error:
            await asyncio.to_thread(self.close)
            if isinstance(error, Exception):
                raise self._to_error(link, error) from error
            raise
        return self._tools(link, found)

    async def __aexit__(self, *raised: object) -> None:
        await asyncio.to_thread(self.close)

    def _begin(self) -> _Link:
        if self._link is not None:
            raise ToolError(f"{self.name} is open already. Fix: make another Server for another rollout")
        _client()  # a missing package is said here, not in the thread
        self._link = _Link(self)
        return self._link

    def _tools(self, link: _Link, found: list[Any]) -> list[Tool]:
        names = [tool.name for tool in found]
        if self.only is not None and (missing := [name for name in self.only if name not in names]):
            self.close()
            raise ToolError(f"{self.name} has no tool {missing[0]}: it has {', '.join(names) or 'none'}")
        return [self._tool(link, tool) for tool in found if self.only is None or tool.name in self.only]

    def _tool(self, link: _Link, about: Any) -> Tool:
        async def call(**arguments: Any) -> Observation:
            try:
                return await asyncio.wrap_future(link.submit(about.name, arguments))
            except Exception as error:
                return Observation(f"error: {self._to_error(link, error)}", "error")

        return Tool(
            call,
            name=about.name,
            description=about.description or "",
            parameters=about.input_schema,
            timeout=self.timeout,
            limit=self.limit,
        )

    def _to_error(self, link: _Link, error: Exception) -> ToolError:
        if isinstance(error, ToolError):
            return error
        if isinstance(error, TimeoutError):
            what = f"did not answer within {self.timeout:g} s"
        else:
            what = f"is gone or refused: {one_line(_first(error))}"
        last = link.last_words()
        return ToolError(f"{self.name} {what}" + (f"; it said last: {last}" if last else ""))


class _Link:
    """A connection, in a thread with an event loop of its own. `ready` comes to the server's tools."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self.ready: concurrent.futures.Future[list[Any]] = concurrent.futures.Future()
        self._loop = asyncio.SelectorEventLoop()
        self._stop = asyncio.Event()
        self._client: Any = None
        self._listed, self._last = False, ""
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self._thread = threading.Thread(target=self._run, name="strop-mcp", daemon=True)
        self._thread.start()

    def submit(self, name: str, arguments: dict[str, Any]) -> concurrent.futures.Future[Observation]:
        """A call, on its way; cancelling it cancels it there."""
        if not self._thread.is_alive():
            raise ToolError(f"{self._server.name} is closed")
        return asyncio.run_coroutine_threadsafe(self._call(name, arguments), self._loop)

    def last_words(self) -> str:
        """The last line that a server which was started here wrote to stderr."""
        if not self._errors.closed:
            size = os.fstat(self._errors.fileno()).st_size
            said = os.pread(self._errors.fileno(), 10_000, max(0, size - 10_000)).decode(errors="replace")
            self._last = next((line.strip()[:500] for line in reversed(said.splitlines()) if line.strip()), "")
        return self._last

    def close(self) -> None:
        with contextlib.suppress(RuntimeError):  # it has ended by itself
            self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(CLOSE_SECONDS)
        self.last_words()
        self._errors.close()

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._hold())
        except BaseException as error:
            if not self.ready.done():
                self.ready.set_exception(error)
        finally:
            self._loop.run_until_complete(self._end())
            self._loop.close()

    async def _end(self) -> None:
        left = asyncio.all_tasks() - {asyncio.current_task()}  # calls that are still waited for
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
        await self._loop.shutdown_asyncgens()

    async def _hold(self) -> None:
        """Keep the connection until it is to be closed, which may be while it is being made."""
        import anyio

        with anyio.CancelScope() as scope:  # unlike a task's own cancel(), it lets the server be ended in good order
            stopping = asyncio.ensure_future(self._stop.wait())
            stopping.add_done_callback(lambda _: None if self._listed else scope.cancel())
            async with contextlib.AsyncExitStack() as stack:
                client = _client()(await self._transport(stack))
                self._client = await stack.enter_async_context(client)
                found, self._listed = await self._list(), True
                with contextlib.suppress(concurrent.futures.InvalidStateError):  # the caller has given up
                    self.ready.set_result(found)
                await stopping

    async def _transport(self, stack: contextlib.AsyncExitStack) -> Any:
        given = self._server
        if given.command:
            from mcp.client.stdio import StdioServerParameters, stdio_client

            command, *args = given.command
            env = dict(given.env) if given.env else None
            return stdio_client(StdioServerParameters(command=command, args=args, env=env, cwd=given.cwd), self._errors)
        import httpx2
        from mcp.client.streamable_http import streamable_http_client

        # How long is waited is for the caller to say: streams may be silent for long.
        client = httpx2.AsyncClient(headers=dict(given.headers or {}), timeout=httpx2.Timeout(30.0, read=None))
        return streamable_http_client(given.url, http_client=await stack.enter_async_context(client))

    async def _list(self) -> list[Any]:
        found: list[Any] = []
        cursor: str | None = None
        for _ in range(PAGES):
            page = await self._client.list_tools(cursor=cursor)
            found += page.tools
            if (cursor := page.next_cursor) is None:
                break
        return found

    async def _call(self, name: str, arguments: dict[str, Any]) -> Observation:
        result = await self._client.call_tool(name, arguments)
        text = "\n".join(map(_text_of, result.content))
        if not result.content and result.structured_content is not None:
            text = msgspec.json.encode(result.structured_content, enc_hook=str).decode()
        return Observation(text, "error" if result.is_error else None)


def _client() -> Any:
    try:
        from mcp import Client
    except ImportError as error:
        raise ToolError(f"MCP servers need the package mcp, 2 or newer: {to_install('mcp')} ({error})") from None
    return Client


def _text_of(part: Any) -> str:
    """A part of a result as text; what is not text, as a sentence."""
    if part.type == "text":
        return part.text
    if part.type == "resource":
        inner = part.resource
        return inner.text if hasattr(inner, "text") else _binary(inner.mime_type, inner.blob)
    if part.type == "resource_link":
        return f"{part.name}: {part.uri}"
    return _binary(part.mime_type, part.data)


def _binary(kind: str | None, data: str) -> str:
    return (
        f"{len(data) * 3 // 4 - data[-2:].count('=')} bytes of {kind or 'binary data'}, which cannot be shown as text"
    )


def _first(error: BaseException) -> BaseException:
    """Of a group of errors, as task groups raise them, the first that is not a group."""
    if isinstance(error, BaseExceptionGroup):
        return _first(cast("BaseExceptionGroup[BaseException]", error).exceptions[0])
    return error
