"""The gateway: model APIs on one side, engines on the other, everything recorded in between.

    gateway = Gateway(store, Routes({"*": PolicyRoute(policy="main", ...)}))
    server = await serve(gateway, host="127.0.0.1", port=0)

    POST /r/{rollout}/{attempt}/agents/{name}/v1/{chat/completions, completions, responses, messages}
    POST .../v1/messages/count_tokens, .../v1/responses/input_tokens
    GET  .../v1/models
    GET  /health

and, from the store's own routes, what an attempt may say about itself: POST /r/{rollout}/{attempt}/events.

The attempt's key is the API key; it opens that attempt and nothing else. Whoever has one base URL for all rollouts
(an agent service) leaves the first part of the path out and sends the key alone, also as header `trace_id`; header
`x-strop-agent` names the agent then.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from types import ModuleType
from typing import Any, cast

import msgspec
from msgspec import Struct
from msgspec.structs import replace
from starlette.routing import Router
from starlette.types import Receive, Scope, Send

from strop.errors import ContextOverflow
from strop.gateway.dialects import chat, completions, messages, responses
from strop.gateway.dialects.base import Dialect, Refused, Request
from strop.gateway.limits import Flights, Limits
from strop.gateway.passing import Passing
from strop.gateway.record import Recorder
from strop.gateway.route import PolicyRoute, Routes
from strop.gateway.sample import Call, check_length, conversations
from strop.gateway.session import Session
from strop.gateway.sessions import Sessions
from strop.gateway.stream import Exchange, overflow, own
from strop.gateway.templates import BadTemplate
from strop.store.base import Store
from strop.store.http import asgi
from strop.store.http.attempts import attempt_routes

MAX_BODY = 16 << 20
AGENT = "main"
"""The name of agents that say none."""
AGENT_HEADER = b"x-strop-agent"

DIALECTS: dict[str, ModuleType] = {
    "chat/completions": chat,
    "completions": completions,
    "responses": responses,
    "messages": messages,
}
"""Every model API, by the end of its address."""


class Address(Struct, frozen=True, kw_only=True):
    """Who speaks, as the request says: `path` is what follows /v1/. Without a rollout the key must say it."""

    rollout: str | None = None
    attempt: str = ""
    agent: str = AGENT
    path: str

    @classmethod
    def of(cls, path: str, headers: Sequence[asgi.Header] = ()) -> Address | None:
        """Without a rollout in the path, a header names the agent.

        >>> Address.of("/r/g1.0/1/agents/main/v1/chat/completions").path
        'chat/completions'
        >>> Address.of("/v1/models").rollout is None, Address.of("/health") is None
        (True, True)
        """
        if path.startswith("/v1/"):
            named = next((value.decode("latin-1") for name, value in headers if name == AGENT_HEADER), AGENT)
            return cls(agent=named, path=path[4:])
        parts = path.split("/", 7)
        if len(parts) == 8 and (parts[1], parts[4], parts[6]) == ("r", "agents", "v1"):
            return cls(rollout=parts[2], attempt=parts[3], agent=parts[5], path=parts[7])
        return None


class Gateway:
    """An ASGI app. `routes` says who answers whom; `counts` has what happened so far.

    Sessions live while their attempt does: call `forget` when a rollout has ended. Should that be forgotten, the least
    recently used ones go once there are `max_sessions`; one that is needed again is rebuilt from the store.
    """

    def __init__(self, store: Store, routes: Routes, *, limits: Limits | None = None, max_sessions: int = 4096) -> None:
        self._store = store
        self.routes = routes
        self.sessions = Sessions(store, max_sessions)
        self.recorder = Recorder(store)
        self._limits = limits or Limits()
        self._flights = Flights(self._limits, self.counts)
        self._others = Router(attempt_routes(store), redirect_slashes=False, default=_no_such_route)
        self._posts: dict[str, tuple[Dialect, Callable[..., Awaitable[None]]]] = {
            path: (cast(Dialect, dialect), self._answer) for path, dialect in DIALECTS.items()
        }
        self._posts["messages/count_tokens"] = (cast(Dialect, messages.Counting), self._count_tokens)
        self._posts["responses/input_tokens"] = (cast(Dialect, responses), self._input_tokens)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        address = Address.of(scope["path"], scope["headers"])
        if address is None:
            if scope["path"] == "/health":
                return await self._health(send)
            return await self._others(scope, receive, send)
        dialect, serve = self._endpoint(scope, address)
        try:
            await serve(scope, receive, send)
        except asgi.Gone:
            pass  # there is nobody to answer
        except Exception as error:
            await _refuse(send, dialect, _told(error))

    def _endpoint(
        self, scope: Scope, address: Address
    ) -> tuple[Dialect, Callable[[Scope, Receive, Send], Awaitable[None]]]:
        if (found := self._posts.get(address.path)) and scope["method"] == "POST":
            return found[0], partial(found[1], found[0], address)
        if address.path == "models" and scope["method"] == "GET":
            return _spoken(scope), partial(self._models, address)
        return _spoken(scope), _no_such_route

    def answers(self, path: str) -> bool:
        """Whether an address is a model API's: below /v1/ others may have theirs beside it."""
        address = Address.of(path)
        return address is not None and (
            address.rollout is not None or address.path in self._posts or address.path == "models"
        )

    @property
    def counts(self) -> Counter[str]:
        return self.recorder.counts

    # -- sessions ----------------------------------------------------------------------------------------------------

    def forget(self, rollout: str) -> None:
        """Drop the sessions of a rollout that has ended."""
        self.sessions.forget(rollout)

    async def settled(self, rollout: str, attempt: int, *, limit: float = 5.0) -> None:
        """Wait until an attempt's calls in flight have ended and been recorded, but not for ever."""
        if not await self.sessions.settled((rollout, attempt), limit):
            self.counts["unsettled"] += 1

    async def session(self, scope: Scope, address: Address) -> Session:
        """The session of the attempt that the request's address and key open. `Refused` otherwise."""
        if address.rollout is None:
            return await self.sessions.by_key(scope)
        return await self.sessions.at(address.rollout, address.attempt, scope)

    # -- model calls -------------------------------------------------------------------------------------------------

    async def _answer(self, dialect: Dialect, address: Address, scope: Scope, receive: Receive, send: Send) -> None:
        session, agent, deadline = await self.session(scope, address), address.agent, self._limits.deadline
        with self._flights.one(session):
            try:
                body = await _body(receive, deadline)
                if (outside := self.routes.outside(agent, body)) is not None:
                    outside.check(address.path)
                    passing = Passing(
                        outside, dialect, address.path, body, session, agent, self.recorder, scope, receive, send
                    )
                    return await passing.run(deadline)
                call = self._call(session, agent, await self._read(dialect, session, body))
                await Exchange(call, dialect, self.recorder, receive, send, deadline=deadline).run()
            except asgi.Gone:
                raise
            except Exception as error:
                refused = _told(error)
                if refused.status == 409:
                    self.sessions.drop(session)
                else:
                    await self.recorder.refused(session, agent, refused)
                raise refused from None

    async def _read(self, dialect: Dialect, session: Session, body: bytes) -> Request:
        request = dialect.read(body)
        if request.previous is None:
            return request
        turns = await self._store.turns(session.rollout.id, attempt=session.attempt.number)
        turn = next((turn for turn in turns if turn.id == request.previous), None)
        if turn is None or turn.messages[0]["role"] == "prompt":  # a raw prompt is no conversation
            raise Refused(
                f"there is no previous response {request.previous!r} in this rollout",
                status=404,
                param="previous_response_id",
                code="previous_response_not_found",
            )
        # Instructions are for one response: the old ones go, the new ones stand before everything.
        old, new = "instructions" in turn.requested, "instructions" in request.requested
        joined = [*request.messages[:new], *turn.messages[old:], turn.answer, *request.messages[new:]]
        responses.check_results(joined)
        return replace(request, messages=joined)

    def _call(self, session: Session, agent: str, request: Request) -> Call:
        try:
            route = self.routes.find(agent, request.requested.get("model")).of(session.rollout)
            return Call(session, agent, route, request)
        except BadTemplate as error:
            raise Refused(str(error), param="messages") from None
        except ContextOverflow as error:
            raise overflow(error) from None

    async def count(self, dialect: Dialect, address: Address, scope: Scope, receive: Receive) -> int:
        """How many tokens a request's prompt has. Nothing is sampled and nothing recorded."""
        session = await self.session(scope, address)
        try:
            with self._flights.one(session):
                request = await self._read(dialect, session, await _body(receive, self._limits.deadline))
                route = self.routes.find(address.agent, request.requested.get("model"))
                (asked,) = conversations(request, route)
                check_length(asked, route)
                contexts = session.contexts(address.agent, route.policy)
                return len(contexts.prompt(route.renderer, asked, route.history, remember=False).ids)
        except BadTemplate as error:
            raise Refused(str(error), param="messages") from None
        except ContextOverflow as error:
            raise overflow(error) from None

    # -- the rest ----------------------------------------------------------------------------------------------------

    async def _models(self, address: Address, scope: Scope, receive: Receive, send: Send) -> None:
        session = await self.session(scope, address)
        route, started = self.routes.any(address.agent, None), session.attempt.started
        name = route.model or route.policy  # an outside model may be called as the agent likes
        if _spoken(scope) is messages:
            context = route.engine.context if isinstance(route, PolicyRoute) else 0
            return await _answer_json(send, messages.model_page(name, created=started, context=context))
        model = {"id": name, "object": "model", "owned_by": "strop", "created": int(started)}
        await _answer_json(send, {"object": "list", "data": [model]})

    async def _count_tokens(
        self, dialect: Dialect, address: Address, scope: Scope, receive: Receive, send: Send
    ) -> None:
        await _answer_json(send, {"input_tokens": await self.count(dialect, address, scope, receive)})

    async def _input_tokens(
        self, dialect: Dialect, address: Address, scope: Scope, receive: Receive, send: Send
    ) -> None:
        count = await self.count(dialect, address, scope, receive)
        await _answer_json(send, {"object": "response.input_tokens", "input_tokens": count})

    async def _health(self, send: Send) -> None:
        await _answer_json(send, {"status": "ok", "sessions": len(self.sessions), "counts": self.counts})


def _spoken(scope: Scope) -> Dialect:
    """Whose errors a client understands, where the address does not say it: Anthropic's clients name a version."""
    versioned = any(name == b"anthropic-version" for name, _ in scope["headers"])
    return cast(Dialect, messages if versioned else chat)


async def _body(receive: Receive, deadline: float) -> bytes:
    try:
        async with asyncio.timeout(deadline):
            return await asgi.read_body(receive, MAX_BODY)
    except TimeoutError:
        raise Refused(f"the request was not sent whole within {deadline:g} s", status=408) from None
    except asgi.Refusal as error:
        raise Refused(str(error), status=error.status, code="request_too_large") from None


def _told(error: Exception) -> Refused:
    return Refused("the request is nested too deeply") if isinstance(error, RecursionError) else own(error)


async def _answer_json(send: Send, data: Any) -> None:
    await asgi.answer(send, msgspec.json.encode(data))


async def _refuse(send: Send, dialect: Dialect, refused: Refused) -> None:
    # OpenAI's clients retry a 409; one that says that the attempt is over will not change.
    headers = {409: [(b"x-should-retry", b"false")], 429: [(b"retry-after", b"1")]}.get(refused.status, ())
    await asgi.answer(send, dialect.error(refused), refused.status, headers)


async def _no_such_route(scope: Scope, receive: Receive, send: Send) -> None:
    message = (
        f"{scope['method']} {scope['path']} is not served here: an agent's base URL ends in /agents/<name>/v1"
        " (without /v1 for Anthropic's clients, which add it), and of the model APIs"
        f" {', '.join(DIALECTS)} are spoken, with POST"
    )
    known = (address := Address.of(scope["path"])) and (address.path in DIALECTS or address.path == "models")
    status, code = (405, "method_not_allowed") if known else (404, "not_found")
    await _refuse(send, _spoken(scope), Refused(message, status=status, code=code))
