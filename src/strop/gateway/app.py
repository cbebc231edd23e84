"""The gateway: model APIs on one side, engines on the other, everything recorded in between.

    gateway = Gateway(store, {"*": PolicyRoute(policy="main", ...)})
    server = await serve(gateway.app, host="127.0.0.1", port=0)

    POST /r/{rollout}/{attempt}/agents/{name}/v1/chat/completions
    GET  /r/{rollout}/{attempt}/agents/{name}/v1/models
    GET  /health

and, from the store's own routes, what an attempt may say about itself: POST /r/{rollout}/{attempt}/events.

The attempt's key is the API key; it opens that attempt and nothing else.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, OrderedDict
from collections.abc import Mapping
from types import ModuleType
from typing import Any, cast

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from strop.errors import ContextOverflow, Fenced, StoreError, UnknownId
from strop.gateway.dialects import chat
from strop.gateway.dialects.base import Dialect, Refused, Request
from strop.gateway.record import Recorder
from strop.gateway.render import BadTemplate
from strop.gateway.sample import Call, PolicyRoute
from strop.gateway.session import Session
from strop.gateway.stream import Exchange, fenced, overflow
from strop.store.base import Store
from strop.store.http.attempts import attempt_routes
from strop.store.http.keys import bearer, same

ANY = "*"
"""The route for agents that have none of their own."""

PATH = "/r/{rollout}/{attempt}"
MAX_BODY = 16 << 20


class Gateway:
    """`routes` says which policy answers for which agent name, "*" for all others. `counts` has what happened so far.

    Sessions live while their attempt does: call `forget` when a rollout has ended. Should that be forgotten, the least
    recently used ones go once there are `max_sessions`; one that is needed again is rebuilt from the store.
    """

    def __init__(self, store: Store, routes: Mapping[str, PolicyRoute], *, max_sessions: int = 4096) -> None:
        self._store = store
        self._routes = routes
        self._sessions: OrderedDict[tuple[str, int], Session] = OrderedDict()
        self._max_sessions = max_sessions
        self.recorder = Recorder(store)
        self.app = Starlette(
            routes=[
                Route(PATH + "/agents/{agent}/v1/chat/completions", ModelCalls(self, chat), methods=["POST"]),
                Route(PATH + "/agents/{agent}/v1/models", self._models, methods=["GET"]),
                *attempt_routes(store),
                Route("/health", self._health, methods=["GET"]),
            ],
            exception_handlers={
                Refused: _refused,
                HTTPException: _no_such_route,
                ClientDisconnect: _nobody,
                StoreError: _broken_store,
                RecursionError: _too_deep,
            },
        )

    @property
    def counts(self) -> Counter[str]:
        return self.recorder.counts

    def forget(self, rollout: str) -> None:
        """Drop the sessions of a rollout that has ended."""
        for key in [key for key in self._sessions if key[0] == rollout]:
            del self._sessions[key]

    def drop(self, session: Session) -> None:
        """An attempt is over. Others of the same rollout may be at work."""
        self._sessions.pop((session.rollout.id, session.attempt.number), None)

    async def settled(self, rollout: str, attempt: int, *, limit: float = 5.0) -> None:
        """Wait until an attempt's calls in flight have ended and been recorded, but not for ever."""
        deadline = time.monotonic() + limit
        while (session := self._sessions.get((rollout, attempt))) and session.in_flight:
            if time.monotonic() > deadline:
                self.counts["unsettled"] += 1
                return
            await asyncio.sleep(0.01)

    async def session(self, request: HttpRequest) -> Session:
        """The session of the attempt in the path, if the key is that attempt's. `Refused` otherwise."""
        rollout, attempt = request.path_params["rollout"], request.path_params["attempt"]
        if not (attempt.isascii() and attempt.isdigit() and len(attempt) < 10):
            raise _unauthorized()
        number = int(attempt)
        key = bearer(request.scope["headers"])
        session = self._sessions.get((rollout, number)) or await self._open(rollout, number, key)
        if not same(key, session.attempt.key.encode()):
            raise _unauthorized()
        self._sessions.move_to_end((rollout, number))
        return session

    def route(self, agent: str) -> PolicyRoute:
        route = self._routes.get(agent) or self._routes.get(ANY)
        if route is None:
            known = ", ".join(sorted(self._routes))
            raise Refused(f"no model answers for agent {agent!r}; known: {known}", status=404, code="model_not_found")
        return route

    async def _open(self, rollout: str, number: int, key: bytes) -> Session:
        try:
            attempts = await self._store.attempts(rollout)
        except UnknownId:
            raise _unauthorized() from None
        attempt = next((attempt for attempt in attempts if attempt.number == number), None)
        if attempt is None or not same(key, attempt.key.encode()):
            raise _unauthorized()
        if attempt.ended is not None:
            raise fenced(Fenced(f"attempt {number} of rollout {rollout} is over"))
        session = Session(await self._store.get(rollout), attempt)
        session.restore(await self._store.turns(rollout, attempt=number))
        self._sessions.pop((rollout, number - 1), None)
        while len(self._sessions) >= self._max_sessions:
            idle = next((key for key, session in self._sessions.items() if not session.in_flight), None)
            if idle is None:
                break
            del self._sessions[idle]
        # Another request may have opened it while this one waited for the store.
        return self._sessions.setdefault((rollout, number), session)

    async def _models(self, request: HttpRequest) -> Response:
        session = await self.session(request)
        model = {"id": self.route(request.path_params["agent"]).model, "object": "model", "owned_by": "strop"}
        return _json({"object": "list", "data": [model | {"created": int(session.attempt.started)}]})

    async def _health(self, request: HttpRequest) -> Response:
        return _json({"status": "ok", "sessions": len(self._sessions), "counts": self.counts})


class ModelCalls:
    """The endpoint of one dialect."""

    def __init__(self, gateway: Gateway, dialect: ModuleType) -> None:
        self._gateway = gateway
        self._dialect = cast(Dialect, dialect)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = HttpRequest(scope, receive)
        try:
            session = await self._gateway.session(request)
            session.in_flight += 1
            try:
                await self._answer(session, request, send)
            finally:
                session.in_flight -= 1
        except Refused as refused:
            await _error(self._dialect, refused)(scope, receive, send)

    async def _answer(self, session: Session, request: HttpRequest, send: Send) -> None:
        agent = request.path_params["agent"]
        try:
            call = self._call(session, agent, self._dialect.read(await read_body(request)))
            await Exchange(call, self._dialect, self._gateway.recorder, request.receive, send).run()
        except Refused as refused:
            if refused.status == 409:
                self._gateway.drop(session)
            else:
                await self._gateway.recorder.refused(session, agent, refused)
            raise
        except ClientDisconnect:  # before the request was whole: there is nobody to answer and nothing to record
            pass

    def _call(self, session: Session, agent: str, neutral: Request) -> Call:
        try:
            return Call(session, agent, self._gateway.route(agent), neutral)
        except BadTemplate as error:
            raise Refused(str(error), param="messages") from None
        except ContextOverflow as error:
            raise overflow(error) from None


async def read_body(request: HttpRequest) -> bytes:
    """The body, unless it is larger than any conversation: one agent must not take everybody's memory and time."""
    parts = bytearray()
    async for part in request.stream():
        parts += part
        if len(parts) > MAX_BODY:
            raise Refused(
                f"the body is larger than {MAX_BODY >> 20} MiB: send less", status=413, code="request_too_large"
            )
    return bytes(parts)


def _json(data: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(data), status, media_type="application/json")


def _error(dialect: Dialect, refused: Refused) -> Response:
    # OpenAI's clients retry a 409; one that says that the attempt is over will not change.
    headers = {"x-should-retry": "false"} if refused.status == 409 else None
    return Response(dialect.error(refused), refused.status, headers, media_type="application/json")


async def _refused(request: HttpRequest, refused: Exception) -> Response:
    return _error(cast(Dialect, chat), cast(Refused, refused))


async def _nobody(request: HttpRequest, error: Exception) -> Response:
    return Response(status_code=499)  # there is nobody to read it


async def _broken_store(request: HttpRequest, error: Exception) -> Response:
    return _error(cast(Dialect, chat), Refused(str(error), status=503, kind="server_error", code="store_error"))


async def _too_deep(request: HttpRequest, error: Exception) -> Response:
    return _error(cast(Dialect, chat), Refused("the request is nested too deeply"))


async def _no_such_route(request: HttpRequest, error: Exception) -> Response:
    status = cast(HTTPException, error).status_code
    message = f"{request.method} {request.url.path} is not served here: an agent's base URL ends in /agents/<name>/v1"
    message += ", and of the model APIs only chat completions are spoken"
    return _error(cast(Dialect, chat), Refused(message, status=status, code="not_found"))


def _unauthorized() -> Refused:
    return Refused(
        "this key does not open this attempt: use the api_key the agent was given, with the base_url it was given",
        status=401,
        code="invalid_api_key",
    )
