"""One request and its answer on a connection, at less cost than uvicorn's own cycle.

    start ──held──┐
    body ─────────┴──▶ one write: head and body leave together (a head alone leaves when the loop comes round)

An app that wants to hear that its client has hung up says so (`watch_disconnect`), instead of waiting for it in a task
of its own. What need not be waited for is had at once: a body that is there (`take_body`), an answer that is whole
(`answer_at_once`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from starlette.types import Receive, Send
from uvicorn.protocols.http.httptools_impl import HEADER_RE, HEADER_VALUE_RE, STATUS_LINE, RequestResponseCycle

from strop.net.asgi import Header, wait_for_disconnect


def watch_disconnect(receive: Receive, call: Callable[[], None]) -> Callable[[], object]:
    """Have `call` called when the client hangs up, once the body was read. What is returned ends that."""
    cycle = getattr(receive, "__self__", None)
    if isinstance(cycle, RequestCycle):
        cycle.watch(call)
        return cycle.unwatch
    gone = asyncio.create_task(wait_for_disconnect(receive))
    gone.add_done_callback(lambda task: None if task.cancelled() else call())
    return gone.cancel


def take_body(receive: Receive) -> bytes | None:
    """A body of which nothing was read and that is there whole; None if `receive` has to be waited for."""
    cycle = getattr(receive, "__self__", None)
    return cycle.take_body() if isinstance(cycle, RequestCycle) else None


def answer_at_once(send: Send, headers: Sequence[Header], body: bytes) -> bool:
    """Send an answer that is a success. False if nothing was sent, since `send` has to be waited for."""
    cycle = getattr(send, "__self__", None)
    return isinstance(cycle, RequestCycle) and cycle.answer(headers, body)


class RequestCycle(RequestResponseCycle):
    """Sends what uvicorn's would, and refuses what it would."""

    def __init__(self, loop: asyncio.AbstractEventLoop, **given: Any) -> None:
        super().__init__(**given)
        self._loop = loop
        self._head = b""
        self._watcher: Callable[[], None] | None = None

    def take_body(self) -> bytes | None:
        if self.more_body or self.disconnected or self.response_complete or self.waiting_for_100_continue:
            return None
        self.flow.resume_reading()
        self.message_event.clear()
        body, self.body = bytes(self.body), bytearray()
        return body

    def answer(self, headers: Sequence[Header], body: bytes) -> bool:
        if self.flow.write_paused or self.disconnected or self.response_started:
            return False
        self.response_started, self.waiting_for_100_continue = True, False
        self._head = self._write_head(200, headers)
        self._send_body(body, False)
        return True

    def watch(self, call: Callable[[], None]) -> None:
        self._watcher = call
        if self.disconnected:
            call()
        else:
            self.flow.resume_reading()  # or nobody would notice

    def unwatch(self) -> None:
        self._watcher = None

    def tell_disconnect(self) -> None:
        """The connection is gone. A client that got its whole answer may leave."""
        if self.disconnected and self._watcher is not None:
            self._watcher()

    async def send(self, message: Any) -> None:
        if self.flow.write_paused and not self.disconnected:
            self._flush()
            await self.flow.drain()
        if self.disconnected or self.transport.is_closing():  # a write has failed, and the loop will say so
            return
        kind = message["type"]
        if not self.response_started:
            if kind != "http.response.start":
                raise RuntimeError(f"an answer begins with http.response.start, not with {kind}")
            self.response_started, self.waiting_for_100_continue = True, False
            self._head = self._write_head(message["status"], message.get("headers", ()))
            self._loop.call_soon(self._flush)
        elif self.response_complete or kind != "http.response.body":
            raise RuntimeError(f"{kind} does not belong here: the answer has begun, or is complete")
        else:
            self._send_body(message.get("body", b""), message.get("more_body", False))

    def _write_head(self, status: int, given: Iterable[Header]) -> bytes:
        headers = [*self.default_headers, *given]
        if HEADER_RE.search(b"".join([name for name, _ in headers])):
            raise RuntimeError("a header's name is not one")
        if HEADER_VALUE_RE.search(b" ".join([value for _, value in headers])):
            raise RuntimeError("a header's value is not one")
        lines, closes = [STATUS_LINE[status]], False
        for name, value in headers:
            name = name.lower()
            if name == b"content-length" and self.chunked_encoding is None:
                self.expected_content_length, self.chunked_encoding = int(value), False
            elif name == b"transfer-encoding" and value.lower() == b"chunked":
                self.expected_content_length, self.chunked_encoding = 0, True
            elif name == b"connection" and b"close" in [word.strip() for word in value.lower().split(b",")]:
                self.keep_alive, closes = False, True
            lines += (name, b": ", value, b"\r\n")
        if not self.keep_alive and not closes:
            lines.append(b"connection: close\r\n")
        if self.chunked_encoding is None and self.scope["method"] != "HEAD" and status not in (204, 304):
            self.chunked_encoding = True
            lines.append(b"transfer-encoding: chunked\r\n")
        lines.append(b"\r\n")
        return b"".join(lines)

    def _send_body(self, body: bytes, more: bool) -> None:
        data, self._head = self._head, b""
        if self.scope["method"] == "HEAD":
            self.expected_content_length = 0
        elif self.chunked_encoding:
            chunk = (b"%x\r\n" % len(body), body, b"\r\n") if body else ()
            data = b"".join((data, *chunk, b"" if more else b"0\r\n\r\n"))
        else:
            self.expected_content_length -= len(body)
            if self.expected_content_length < 0:
                raise RuntimeError("an answer is longer than its Content-Length")
            data += body
        if data:
            self.transport.write(data)
        if not more:
            if self.expected_content_length:
                raise RuntimeError("an answer is shorter than its Content-Length")
            self.response_complete = True
            self.message_event.set()
            if not self.keep_alive:
                self.transport.close()
            self.on_response()

    def _flush(self) -> None:
        """Send a head for which no body came at once."""
        head, self._head = self._head, b""
        if head and not self.transport.is_closing():
            self.transport.write(head)
