"""One request on its way to an outside model and back: the body goes on as it is, and so does what comes back.

    agent ──body──▶ gateway ──body, with the provider's key and model──▶ provider
    agent ◀──status, body or stream, x-strop-turn── gateway ◀── ...         recorded on the way: messages, answer, usage

Such a turn has no token ids and is never trained. Two secrets are kept apart: the provider never sees the attempt's
key, the agent never sees the provider's. While nothing has reached the agent, a provider that is busy or failing is
asked again. As with our own models, the end of an answer is sent once its turn is durable. Counting tokens goes the
same way, but is not a turn.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from urllib.parse import quote

from starlette.types import Receive, Scope, Send

from strop.errors import StoreError
from strop.gateway.answer_reader import AnswerReader, read_request
from strop.gateway.api_errors import deadline_exceeded, to_api_error
from strop.gateway.dialects.base import ApiError, Dialect, Json
from strop.gateway.outside import OutsideRoute
from strop.gateway.record import Recorder
from strop.gateway.session import Session
from strop.net.asgi import Header, wait_for_disconnect
from strop.net.client import Broken, Lost, StreamedResponse, TooLarge, Unreachable, retry_after
from strop.types import Finish, Turn

AGAIN = frozenset({408, 429, 500, 502, 503, 504, 529})
"""What providers answer that are busy or failing."""
REFUSED = frozenset({401, 402, 403, *AGAIN})
"""What they answer for reasons that are not the agent's: a wrong key, no credit, or nothing but failures."""
TRIES = 4
WAIT = 0.5
"""Seconds before the second try, each further one waiting twice as long."""
LAST = 1.0
"""Seconds that a reader gets to take a stream's last words."""
QUERY = "!$%&'()*+,/:;=?@[]~"
"""What may stand in a query as it is, beside letters and digits."""
MAX_BODY = 64 << 20
MAX_CHOICES = 128
OURS = {"connection", "keep-alive", "transfer-encoding", "content-length", "set-cookie", "upgrade", "trailer", "date"}
"""Headers that do not come back: those of the provider's own connection."""


class ProxiedRequest:
    """One request on its way to a provider and back. `path` is the end of the API's address."""

    def __init__(
        self,
        route: OutsideRoute,
        dialect: Dialect,
        path: str,
        body: bytes,
        session: Session,
        agent: str,
        recorder: Recorder,
        scope: Scope,
        receive: Receive,
        send: Send,
    ) -> None:
        self._route, self._dialect, self._path, self._body = route, dialect, path, body
        self._session, self._agent, self._recorder = session, agent, recorder
        self._scope, self._receive, self._send = scope, receive, send
        self._started = time.time()
        self._conversations, self._requested = read_request(dialect, body)
        self._reader = AnswerReader(dialect)
        n = self._requested.get("n")
        self._n = n if isinstance(n, int) and 0 < n <= MAX_CHOICES else 1
        num_turns = 0 if path == dialect.count_path else min(len(self._conversations) * self._n, MAX_CHOICES)
        self._turns = [session.next_turn() for _ in range(num_turns)]
        self._begun = self._recorded = False

    async def run(self, deadline: float) -> ApiError | None:
        """Raises while nothing has been sent; later errors go into the stream, and are returned."""
        seconds = min(deadline, self._route.timeout)
        work = asyncio.create_task(self._forward(time.monotonic() + seconds))
        gone = asyncio.create_task(wait_for_disconnect(self._receive))
        too_late = False
        try:
            done, _ = await asyncio.wait({work, gone}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            too_late = not done
        finally:  # also when the server is being stopped
            gone.cancel()
            if not work.done():
                work.cancel()
                await asyncio.wait({work})
                await self._record_undelivered("error" if too_late else "abandoned")
        try:
            if not work.cancelled():
                await work
            elif too_late:
                raise deadline_exceeded(seconds, f"the outside model {self._route.policy}")
        except Exception as error:
            if not self._begun:
                raise
            refused = to_api_error(error)
            await self._recorder.record_error(self._session, self._agent, refused)
            await self._send_error(refused)
            return refused

    async def _forward(self, until: float) -> None:
        """Ask, again if need be, until an answer can be passed back."""
        self._route.budget.check()
        route, body = self._route, self._route.body(self._body)
        query = quote(self._scope["query_string"], safe=QUERY)
        path = f"/{quote(self._path)}" + (f"?{query}" if query else "")
        headers = route.headers(self._scope, self._dialect)
        for number in range(1, TRIES + 1):
            pause = WAIT * 2 ** (number - 1)
            try:
                async with route.pace.one(), route.client.stream("POST", path, body, headers=headers) as answer:
                    pause = max(pause, retry_after(answer.headers.get("retry-after", "")))
                    if answer.status not in AGAIN or number == TRIES or time.monotonic() + pause > until:
                        return await self._deliver(answer)
            except (Unreachable, Lost) as error:
                if number == TRIES:
                    raise self._count_unreachable(error) from None
            except Broken as error:
                await self._record_undelivered("error")
                raise self._count_unreachable(error) from None
            await asyncio.sleep(pause)

    async def _deliver(self, answer: StreamedResponse) -> None:
        streamed = answer.headers.get("content-type", "").startswith("text/event-stream")
        if not streamed or answer.status >= 400:
            return await self._deliver_whole(answer)
        await self._start(answer, [])
        async for piece in answer:
            self._reader.feed(piece)
            if self._reader.answer.ended:
                await self._record()
            await self._send({"type": "http.response.body", "body": piece, "more_body": True})
        await self._record()
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _deliver_whole(self, answer: StreamedResponse) -> None:
        whole = bytearray()
        async for piece in answer:
            whole += piece
            if len(whole) > MAX_BODY:
                raise TooLarge(f"the answer of {self._route.url} is larger than {MAX_BODY} bytes")
        body = bytes(whole)
        if answer.status < 300:
            self._reader.read(body)
            await self._record()
        elif answer.status >= 400:
            text = body[:2000].decode(errors="replace")
            code = "outside_refused" if answer.status in REFUSED else "outside"
            said = ApiError(f"{self._route.url} answered {answer.status}: {text}", status=answer.status, code=code)
            await self._recorder.record_error(self._session, self._agent, said)
        await self._start(answer, [(b"content-length", b"%d" % len(body))])
        await self._send({"type": "http.response.body", "body": body, "more_body": False})

    async def _start(self, answer: StreamedResponse, headers: list[Header]) -> None:
        self._begun = True
        back = [(name.encode(), value.encode("latin-1")) for name, value in answer.headers.items() if name not in OURS]
        if answer.status < 300 and self._turns:
            headers.append((b"x-strop-turn", self._turns[0].encode()))
            if len(self._turns) > 1:
                headers.append((b"x-strop-turns", ",".join(self._turns).encode()))
        await self._send({"type": "http.response.start", "status": answer.status, "headers": back + headers})

    async def _send_error(self, refused: ApiError) -> None:
        """A stream that cannot go on says why, if its reader takes it."""
        body = self._dialect.error_event(refused)
        with suppress(TimeoutError):
            async with asyncio.timeout(LAST):
                await self._send({"type": "http.response.body", "body": body, "more_body": False})

    def _count_unreachable(self, error: Exception) -> ApiError:
        self._recorder.counts["outside_unreachable"] += 1
        named = self._route.policy
        message = (
            f"the outside model {named} gave no answer ({error}). Fix: check gateway.outside.{named} and the provider"
        )
        return ApiError(message, status=502, kind="server_error", code="outside_unreachable")

    # -- the record --------------------------------------------------------------------------------------------------

    async def _record(self, finish: Finish | None = None) -> None:
        if self._recorded or not self._turns:
            return
        self._recorded = True
        turns = [self._turn(choice, finish) for choice in range(len(self._turns))]
        self._route.budget.charge(turns)
        try:
            await asyncio.shield(self._recorder.record_proxied(turns))  # an agent that leaves at this very moment
        except StoreError as error:
            raise to_api_error(error) from None
        if self._reader.unread:
            self._recorder.counts["outside_unread"] += 1

    async def _record_undelivered(self, finish: Finish) -> None:
        try:
            await self._record(finish)
        except ApiError as refused:
            self._recorder.counts["fenced" if refused.status == 409 else "unrecorded"] += len(self._turns)

    def _turn(self, choice: int, finish: Finish | None) -> Turn:
        said, route = self._reader.answer.choice(choice), self._route
        outside: Json = {"url": route.url, "model": route.model or self._requested.get("model")}
        return Turn(
            id=self._turns[choice],
            rollout=self._session.rollout.id,
            attempt=self._session.attempt.number,
            agent=self._agent,
            policy=route.policy,
            prompt_ids=[],
            response_ids=[],
            logprobs=[],
            versions=[],
            requested=self._requested | {"outside": outside | {"usage": self._reader.usage}},
            finish=finish or said.finish or ("stop" if self._reader.answer.ended else "error"),
            choice=choice,
            choices=len(self._turns),
            messages=self._conversations[choice // self._n],
            answer=self._reader.message(choice),
            started=self._started,
            ended=time.time(),
        )
