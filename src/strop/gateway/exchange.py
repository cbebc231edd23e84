"""One model call over one HTTP exchange: sample, watch for a client that goes away, record, answer.

    sampling ──deltas──▶ client        (streams only; headers wait for the first delta, so early errors have a status)
    sampling done ──▶ turns durable ──▶ finish reason, [DONE]   or   the whole body

A client that leaves before sampling is done ends the engine's work; its turn is recorded as `abandoned` with what was
sampled. One that leaves later cannot be told from one that read everything.
"""

from __future__ import annotations

import asyncio
from functools import partial

from starlette.types import Receive, Send

from strop.errors import ContextOverflow, StoreError
from strop.gateway.api_errors import deadline_exceeded, to_api_error
from strop.gateway.dialects.base import ApiError, Delta, Dialect, Stream
from strop.gateway.generate import ModelCall
from strop.gateway.limits import Limits
from strop.gateway.record import Recorder
from strop.net.asgi import JSON, Header
from strop.net.cycle import answer_at_once, watch_disconnect
from strop.net.interruption import Interruption

EVENTS: Header = (b"content-type", b"text/event-stream; charset=utf-8")
NO_CACHE: Header = (b"cache-control", b"no-cache")
LAST = 30.0
"""Seconds that a client gets to take the end of an answer."""


class Exchange:
    def __init__(
        self,
        call: ModelCall,
        dialect: Dialect,
        recorder: Recorder,
        receive: Receive,
        send: Send,
        *,
        deadline: float = Limits().deadline,
    ) -> None:
        """`deadline` is how many seconds sampling may take."""
        self._call, self._dialect, self._recorder = call, dialect, recorder
        self._receive, self._send = receive, send
        self._stream = dialect.stream(call.request) if call.request.stream else None
        self._begun = False
        self._deadline = deadline

    async def run(self) -> ApiError | None:
        """Raises while nothing has been sent; later errors go into the stream, and are returned."""
        try:
            if not await self._sample():
                return None
            await self._record()
        except Exception as error:
            if not self._begun or self._stream is None:
                raise
            refused = to_api_error(error)
            await self._recorder.record_error(self._call.session, self._call.agent, refused)
            await self._last(self._stream.error(refused))
            return refused
        call = self._call
        done = [choice.done for choice in call.choices]
        if self._stream is not None:
            await self._begin(self._stream)
            await self._last(self._stream.closing(call.answer, done))
        else:
            await self._answer(self._dialect.write(call.answer, done, call.request))
        return None

    async def _sample(self) -> bool:
        """Draw every choice to its end. False: the client has gone, and what was sampled is recorded."""
        call = self._call
        try:
            with Interruption(self._deadline) as interruption:
                unwatch = watch_disconnect(self._receive, lambda: interruption.end_for("gone"))
                try:
                    await call.run(None if self._stream is None else partial(self._emit, self._stream))
                finally:
                    unwatch()
        except asyncio.CancelledError:  # the server is being stopped
            await self._recorder.record_undelivered(call, "abandoned")
            raise
        except ContextOverflow as error:  # no engine saw the prompt
            raise to_api_error(error) from None
        except Exception as error:
            await self._recorder.record_undelivered(call, "error")
            raise to_api_error(error) from None
        if interruption.cause is None:
            return True
        await self._recorder.record_undelivered(call, "error" if interruption.cause == "late" else "abandoned")
        if interruption.cause == "late":
            raise deadline_exceeded(self._deadline, "this request")
        return False

    async def _record(self) -> None:
        try:
            await self._recorder.record_turns(self._call)
        except StoreError as error:  # a stream that has begun ends with it
            raise to_api_error(error) from None

    async def _emit(self, stream: Stream, delta: Delta) -> None:
        await self._begin(stream)
        await self._body(stream.delta(self._call.answer, delta), more=True)

    async def _begin(self, stream: Stream) -> None:
        if not self._begun:
            self._begun = True
            await self._start([EVENTS, NO_CACHE, *self._name_turns()])
            await self._body(stream.opening(self._call.answer), more=True)

    async def _answer(self, body: bytes) -> None:
        """All of an answer that is not streamed."""
        headers = [JSON, (b"content-length", b"%d" % len(body)), *self._name_turns()]
        if not answer_at_once(self._send, headers, body):
            await self._start(headers)
            await self._last(body)

    def _name_turns(self) -> list[Header]:
        """`x-strop-turn` is the first choice's turn; with n > 1 `x-strop-turns` has them all, in order."""
        turns = [choice.turn for choice in self._call.choices]
        headers = [(b"x-strop-turn", turns[0].encode())]
        if len(turns) > 1:
            headers.append((b"x-strop-turns", ",".join(turns).encode()))
        return headers

    async def _start(self, headers: list[Header]) -> None:
        await self._send({"type": "http.response.start", "status": 200, "headers": headers})

    async def _last(self, data: bytes) -> None:
        """The end of an answer. A client that does not take it is left alone: the server closes its connection."""
        with Interruption(min(LAST, self._deadline)):
            await self._body(data, more=False)

    async def _body(self, data: bytes, *, more: bool) -> None:
        await self._send({"type": "http.response.body", "body": data, "more_body": more})
