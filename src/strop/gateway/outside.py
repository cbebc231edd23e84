"""Outside models: what an agent asks goes to a provider as it is, what the provider says comes back as it is.

    agent ──body──▶ gateway ──body, with the provider's key and model──▶ provider
    agent ◀──status, body or stream, x-strop-turn── gateway ◀── ...         recorded on the way: messages, answer, usage

For opponents, judges and helpers, never trained: such a turn has no token ids. Two secrets are kept apart: the provider
never sees the attempt's key, the agent never sees the provider's. While nothing has reached the agent, a provider that
is busy or failing is asked again.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import deque
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from urllib.parse import quote

import msgspec
from msgspec import Struct
from starlette.types import Receive, Scope, Send

from strop.config import OutsideConfig
from strop.errors import ConfigError, Fenced
from strop.gateway.dialects.base import Dialect, Json, Refused, Request
from strop.gateway.limits import late
from strop.gateway.listen import Listening, asked
from strop.gateway.record import Recorder
from strop.gateway.session import Session
from strop.gateway.stream import fenced
from strop.http import Broken, Client, Lost, Streamed, TooLarge, Unreachable, retry_after
from strop.store.http.asgi import Header, until_gone
from strop.types import Finish, Turn

AGAIN = frozenset({408, 429, 500, 502, 503, 504, 529})
"""What providers answer that are busy or failing."""
TRIES = 4
WAIT = 0.5
"""Seconds before the second try, each further one waiting twice as long."""
MAX_BODY = 64 << 20
ON = (b"content-type", b"accept", b"anthropic-version", b"anthropic-beta", b"openai-beta", b"idempotency-key")
"""Headers that go on to the provider. All others are about the connection, or about who asks."""
OURS = frozenset({"connection", "keep-alive", "transfer-encoding", "content-length", "set-cookie", "upgrade", "trailer"})
"""Headers that do not come back: those of the provider's own connection."""


class Pace:
    """Lets so many requests begin per minute, and so many run at once; the others wait in line. 0: no limit."""

    def __init__(self, per_minute: int, at_once: int) -> None:
        self._per_minute = per_minute
        self._begun: deque[float] = deque()
        self._line = asyncio.Lock()
        self._room = asyncio.Semaphore(at_once) if at_once else None

    @asynccontextmanager
    async def one(self) -> AsyncGenerator[None]:
        if self._room is not None:
            await self._room.acquire()
        try:
            await self._turn()
            yield
        finally:
            if self._room is not None:
                self._room.release()

    async def _turn(self) -> None:
        if not self._per_minute:
            return
        async with self._line:
            if len(self._begun) == self._per_minute:
                await asyncio.sleep(max(0.0, self._begun[0] + 60.0 - time.monotonic()))
                self._begun.popleft()
            self._begun.append(time.monotonic())


class OutsideRoute(Struct, frozen=True, kw_only=True):
    """A provider, and how it is asked. `policy` is the name its turns are recorded under. `url` ends where `dialects`
    (the ends of model APIs' addresses) begin. An empty `model` leaves what the agent asks for as it is."""

    policy: str
    url: str
    model: str
    key: str
    dialects: tuple[str, ...]
    timeout: float
    pace: Pace
    client: Client

    @classmethod
    def of(cls, name: str, config: OutsideConfig) -> OutsideRoute:
        """As configured under `gateway.outside.<name>`. Raises `ConfigError`."""
        if config.key_env and not os.environ.get(config.key_env):
            raise ConfigError(
                f"gateway.outside.{name}: the environment has no {config.key_env}: export the provider's key under "
                "that name, or set key_env to the name it has"
            )
        return cls(
            policy=name,
            url=config.url,
            model=config.model,
            key=os.environ.get(config.key_env, "") if config.key_env else "",
            dialects=config.dialects,
            timeout=config.timeout,
            pace=Pace(config.per_minute, config.at_once),
            client=Client(config.url),
        )

    def check(self, path: str) -> None:
        if path.removesuffix("/count_tokens").removesuffix("/input_tokens") not in self.dialects:
            speaks = ", ".join(self.dialects)
            message = f"{self.policy} is an outside model and does not speak {path}, only {speaks}: use such a client"
            raise Refused(message, status=404, code="model_not_found")

    def body(self, body: bytes) -> bytes:
        """The request as it goes on: byte for byte, unless another model is to be asked for."""
        if not self.model:
            return body
        try:
            fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
        except (msgspec.MsgspecError, UnicodeError):
            return body  # the provider says what is wrong with it
        return msgspec.json.encode(fields | {"model": msgspec.Raw(msgspec.json.encode(self.model))})

    def headers(self, scope: Scope, path: str) -> dict[str, str]:
        on = {name.decode(): value.decode("latin-1") for name, value in scope["headers"] if name in ON}
        if not self.key:
            return on
        return on | ({"x-api-key": self.key} if path.startswith("messages") else {"authorization": f"Bearer {self.key}"})


class Passing:
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
        self._messages, self._requested = asked(dialect, body)
        self._listening = Listening(path)
        n = self._requested.get("n")
        self._turns = [session.next_turn() for _ in range(n if isinstance(n, int) and 0 < n <= 128 else 1)]
        self._begun = self._recorded = False

    async def run(self, deadline: float) -> None:
        """Raises `Refused` while nothing has been sent; later errors go into the stream."""
        seconds = min(deadline, self._route.timeout)
        work = asyncio.create_task(self._pass())
        gone = asyncio.create_task(until_gone(self._receive))
        try:
            await asyncio.wait({work, gone}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        finally:  # also when the server is being stopped
            left = gone.done()
            gone.cancel()
            if not work.done():
                work.cancel()
                await asyncio.wait({work})
                await self._undelivered("abandoned" if left else "error")
        try:
            if work.cancelled():
                if not left:
                    raise late(seconds, f"the outside model {self._route.policy}")
                return
            await work
        except Refused as refused:
            if not self._begun:
                raise
            await self._recorder.refused(self._session, self._agent, refused)
            await self._cut(refused)

    async def _pass(self) -> None:
        """Ask, again if need be, until an answer can be passed back."""
        route, body = self._route, self._route.body(self._body)
        query = self._scope["query_string"].decode("latin-1")
        path = f"/{quote(self._path)}" + (f"?{query}" if query else "")
        headers = route.headers(self._scope, self._path)
        for number in range(1, TRIES + 1):
            pause = WAIT * 2 ** (number - 1)
            try:
                async with route.pace.one(), route.client.stream("POST", path, body, headers=headers) as answer:
                    if answer.status not in AGAIN or number == TRIES:
                        return await self._deliver(answer)
                    pause = max(pause, retry_after(answer.headers.get("retry-after", "")))
            except (Unreachable, Lost) as error:
                if number == TRIES:
                    raise self._unreachable(error) from None
            except Broken as error:
                await self._undelivered("error")
                raise self._unreachable(error) from None
            await asyncio.sleep(pause)

    async def _deliver(self, answer: Streamed) -> None:
        streamed = answer.headers.get("content-type", "").startswith("text/event-stream")
        if not streamed or answer.status >= 400:
            return await self._whole(answer)
        await self._start(answer, [])
        async for piece in answer:
            self._listening.feed(piece)
            if self._listening.ended:
                await self._record()
            await self._send({"type": "http.response.body", "body": piece, "more_body": True})
        await self._record()
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _whole(self, answer: Streamed) -> None:
        pieces: list[bytes] = []
        async for piece in answer:
            pieces.append(piece)
            if sum(map(len, pieces[-1:])) + len(pieces) > MAX_BODY:
                raise TooLarge(f"the answer of {self._route.url} is larger than {MAX_BODY} bytes")
        body = b"".join(pieces)
        if answer.status < 300 and self._path in self._route.dialects:
            self._listening.whole(body)
            await self._record()
        elif answer.status >= 400:
            text = body[:2000].decode(errors="replace")
            said = Refused(f"{self._route.url} answered {answer.status}: {text}", status=answer.status, code="outside")
            await self._recorder.refused(self._session, self._agent, said)
        await self._start(answer, [(b"content-length", b"%d" % len(body))])
        await self._send({"type": "http.response.body", "body": body, "more_body": False})

    async def _start(self, answer: Streamed, headers: list[Header]) -> None:
        self._begun = True
        back = [(name.encode(), value.encode("latin-1")) for name, value in answer.headers.items() if name not in OURS]
        if answer.status < 300 and self._path in self._route.dialects:
            headers.append((b"x-strop-turn", self._turns[0].encode()))
            if len(self._turns) > 1:
                headers.append((b"x-strop-turns", ",".join(self._turns).encode()))
        await self._send({"type": "http.response.start", "status": answer.status, "headers": back + headers})

    async def _cut(self, refused: Refused) -> None:
        """A stream that cannot go on says why, if its reader takes it."""
        body = self._dialect.stream(Request(options={"include_usage": False})).error(refused)
        async with asyncio.timeout(1.0):
            await self._send({"type": "http.response.body", "body": body, "more_body": False})

    def _unreachable(self, error: Exception) -> Refused:
        self._recorder.counts["outside_unreachable"] += 1
        message = f"the outside model {self._route.policy} gave no answer ({error}): check gateway.outside and the provider"
        return Refused(message, status=502, kind="server_error", code="outside_unreachable")

    # -- the record --------------------------------------------------------------------------------------------------

    async def _record(self, finish: Finish | None = None) -> None:
        if self._recorded:
            return
        self._recorded = True
        try:
            await self._recorder.outside([self._turn(choice, finish) for choice in range(len(self._turns))])
        except Fenced as error:
            raise fenced(error) from None
        if self._listening.unread:
            self._recorder.counts["outside_unread"] += 1

    async def _undelivered(self, finish: Finish) -> None:
        if self._path in self._route.dialects:
            try:
                await self._record(finish)
            except Refused:
                self._recorder.counts["fenced"] += len(self._turns)

    def _turn(self, choice: int, finish: Finish | None) -> Turn:
        said, route = self._listening.said(choice), self._route
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
            requested=self._requested | {"outside": outside | {"usage": self._listening.usage}},
            finish=finish or said.finish or "error",
            choice=choice,
            choices=len(self._turns),
            messages=self._messages,
            answer=said.message,
            started=self._started,
            ended=time.time(),
        )
