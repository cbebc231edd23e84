"""Two processes that call each other: frames of MessagePack over a socket, of one machine or TCP, many in one write.

    link = await ProcessLink.open(sock, {"get": Handler(tuple[str], store.get)}, lost=end)
    rollout = await link.call("get", ("g1.0",), Rollout)      answered by the other side's handler
    link.send("forget", ("g1.0",))                             the same without an answer

A handler's `StropError` is raised where it was called. Handlers begin in the order their calls came, and those that are
coroutines run side by side.
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
import logging
import socket
import struct
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar, cast

import msgspec

from strop.errors import StropError

T = TypeVar("T")
LENGTH = struct.Struct("<I")
LOG = logging.getLogger("strop.link")

Frame = tuple[int, str, msgspec.Raw]
_PACKED, _JSON = b"\0", b"\1"
"""What a frame is written in: JSON where a number is too large for MessagePack."""
_pack = msgspec.msgpack.Encoder().encode
_unpack = msgspec.msgpack.Decoder(Frame).decode
_read_json = msgspec.json.Decoder(Frame).decode


def _encode(message: Any) -> bytes:
    try:
        return _PACKED + _pack(message)
    except OverflowError:
        return _JSON + msgspec.json.encode(message)


class LinkLost(ConnectionError):
    """The process at the other end is gone."""


class Handler:
    """What is done when the other side calls: `do` gets what was sent, as `takes` says it is."""

    __slots__ = ("_read_json", "_unpack", "do")

    def __init__(self, takes: Any, do: Callable[..., Any]) -> None:
        self._unpack = msgspec.msgpack.Decoder(takes).decode
        self._read_json = msgspec.json.Decoder(takes).decode
        self.do = do

    def decode(self, given: msgspec.Raw, packed: bool) -> Any:
        return self._unpack(given) if packed else self._read_json(given)


class ProcessLink(asyncio.Protocol):
    """One end. `lost` is called once, when the other end is gone."""

    def __init__(self, handlers: Mapping[str, Handler], lost: Callable[[], None] = lambda: None) -> None:
        self._handlers, self._lost = handlers, lost
        self._loop = asyncio.get_running_loop()
        self._ids = itertools.count(1)
        self._calls: dict[int, tuple[asyncio.Future[Any], Any]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._out: list[bytes] = []
        self._in = bytearray()
        self._transport: asyncio.Transport | None = None

    @classmethod
    async def open(
        cls, sock: socket.socket, handlers: Mapping[str, Handler], lost: Callable[[], None] = lambda: None
    ) -> ProcessLink:
        link = cls(handlers, lost)
        sock.setblocking(False)
        loop = asyncio.get_running_loop()
        connect = loop.create_unix_connection if sock.family == socket.AF_UNIX else loop.create_connection
        await connect(lambda: link, sock=sock)
        return link

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    async def wait_until_done(self) -> None:
        """What the other side has asked for so far is done, whether anybody hears of it or not."""
        if self._tasks:
            await asyncio.wait(self._tasks)

    # -- calling -------------------------------------------------------------------------------------------------------

    async def call(self, verb: str, given: Any, gives: type[T] | None) -> T:
        """Raises what the handler raised, or `LinkLost`."""
        id, future = next(self._ids), self._loop.create_future()
        self._calls[id] = future, gives
        try:
            self._write((id, verb, given))
            return cast(T, await future)
        finally:
            self._calls.pop(id, None)

    def send(self, verb: str, given: Any) -> None:
        """Nobody hears what became of it."""
        self._write((0, verb, given))

    def _write(self, message: Any) -> None:
        if self._transport is None or self._transport.is_closing():
            raise LinkLost("the process at the other end is gone")
        data = _encode(message)
        if not self._out:
            self._loop.call_soon(self._flush)
        self._out.append(LENGTH.pack(len(data)))
        self._out.append(data)

    def _flush(self) -> None:
        data, self._out = b"".join(self._out), []
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(data)

    # -- being called --------------------------------------------------------------------------------------------------

    def _arrive(self, data: bytes) -> None:
        packed = data[:1] == _PACKED
        id, verb, given = (_unpack if packed else _read_json)(data[1:])
        if id < 0:
            return self._end_call(-id, verb, given, packed)
        handler = self._handlers[verb]
        try:
            done = handler.do(*handler.decode(given, packed))
        except Exception as error:
            return self._answer(id, _explain(error))
        if inspect.isawaitable(done):
            task = self._loop.create_task(self._run(id, done))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        else:
            self._answer(id, done)

    async def _run(self, id: int, work: Awaitable[Any]) -> None:
        try:
            self._answer(id, await work)
        except Exception as error:
            self._answer(id, _explain(error))

    def _answer(self, id: int, done: Any) -> None:
        if not id or self._transport is None or self._transport.is_closing():
            return
        if isinstance(done, StropError):
            self._write((-id, type(done).__name__, str(done)))
        else:
            self._write((-id, "", done))

    def _end_call(self, id: int, error: str, given: msgspec.Raw, packed: bool) -> None:
        future, gives = self._calls.pop(id, (None, None))
        if future is None or future.done():
            return
        decode = msgspec.msgpack.decode if packed else msgspec.json.decode
        if error:
            future.set_exception(make_error(error, decode(given, type=str)))
        else:
            future.set_result(decode(given, type=gives))

    # -- asyncio -------------------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._in += data
        at, size = 0, len(self._in)
        while size - at >= LENGTH.size:
            (length,) = LENGTH.unpack_from(self._in, at)
            end = at + LENGTH.size + length
            if end > size:
                break
            self._arrive(bytes(self._in[at + LENGTH.size : end]))
            at = end
        del self._in[:at]

    def connection_lost(self, exc: Exception | None) -> None:
        for future, _ in self._calls.values():
            if not future.done():
                future.set_exception(LinkLost("the process at the other end is gone"))
        self._lost()


def _explain(error: Exception) -> StropError:
    """What the other side is told. What nobody thought of goes to the log."""
    if isinstance(error, StropError):
        return error
    LOG.error("a call failed", exc_info=error)
    return StropError("the server ran into an error of its own: its log says more")


def make_error(name: str, message: str) -> StropError:
    """The error of that name. One that is not known here is a plain `StropError`."""
    return _find_errors().get(name, StropError)(message)


def _find_errors() -> dict[str, type[StropError]]:
    found: dict[str, type[StropError]] = {}
    kinds: list[type[StropError]] = [StropError]
    while kinds:
        kind = kinds.pop()
        found[kind.__name__] = kind
        kinds += kind.__subclasses__()
    return found
