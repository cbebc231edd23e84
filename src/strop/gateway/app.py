"""The gateway: model APIs on one side, engines on the other, everything recorded in between.

    gateway = Gateway(store, Routes({"*": PolicyRoute(policy="main", ...)}))
    server = await serve(gateway, host="127.0.0.1", port=0)

    POST /r/{rollout}/{attempt}/agents/{name}/v1/{path}      a dialect's path: chat/completions, messages, ...
    POST .../v1/{count_path}                                 where it counts tokens
    GET  .../v1/models, .../v1/models/{name}
    .../openai/..., .../openai/deployments/{model}/...       the same for Azure's clients
    GET  /health
    POST /proxy/rollout/{rollout}/attempt/{n}/mode/{mode}/openai/v1/{path}     Agent Lightning's for the same

and, from the store's own routes, what an attempt may say about itself: POST /r/{rollout}/{attempt}/events.

The attempt's key is the API key; it opens that attempt and nothing else. A client with one base URL for all rollouts
(an agent service) leaves the first part of the path out and sends the key alone, also as header `trace_id`; header
`x-strop-agent` names the agent then. A client that sends no key, or one of its own, has it in the address, which begins
with /k/{key} then.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import msgspec
from msgspec.structs import replace
from starlette.routing import Router
from starlette.types import Receive, Scope, Send

from strop.config import PromptConfig
from strop.gateway.api_errors import STALE, to_api_error
from strop.gateway.auth import RequestAddress
from strop.gateway.dialects.base import ApiError, Dialect, ModelRequest
from strop.gateway.dialects.registry import BY_PATH, DIALECTS, is_model_path
from strop.gateway.exchange import Exchange
from strop.gateway.generate import ModelCall, check_length, read_conversations
from strop.gateway.limits import InFlight, Limits, RequestCounter
from strop.gateway.marked_prompts import PromptReplacer
from strop.gateway.outside import OutsideRoute, name_model
from strop.gateway.proxy import ProxiedRequest
from strop.gateway.record import Recorder
from strop.gateway.route import PolicyRoute, Routes
from strop.gateway.session import Session, is_conversation
from strop.gateway.sessions import Sessions
from strop.net import asgi
from strop.net.cycle import take_body
from strop.net.handover import Switch
from strop.net.interruption import Interruption
from strop.store.base import AttemptStore
from strop.store.server.attempts import make_attempt_routes
from strop.store.server.keys import hide_key
from strop.types import Turn

MAX_BODY = 16 << 20
MANY = 10_000
"""Lists and tables in a body from which on they are counted: millions of them would hold up everybody else."""


class OtherSessions(ABC):
    """What is done to sessions of this gateway in other processes; see `Gateway`."""

    @property
    def switch(self) -> Switch | None:
        """Has connections to this process go to those others, if they are answered there."""
        return None

    @abstractmethod
    async def open(self) -> None:
        """The engines are loaded: answer from now on."""

    @abstractmethod
    def set_server_key(self, key: str) -> None:
        """What is asked with this key is answered here."""

    @abstractmethod
    async def watch(self) -> None:
        """Waits until they cannot be kept alive, and raises that."""

    @abstractmethod
    def forget(self, rollout: str) -> None: ...

    @abstractmethod
    async def wait_until_idle(self, rollout: str, attempt: int, *, limit: float) -> None: ...

    @abstractmethod
    async def count(self) -> Counter[str]:
        """What happened there, and how many `sessions` there are."""


class Gateway:
    """An ASGI app. `routes` says who answers whom; `counts` has what happened so far. `prompts` are those that are
    replaced in requests by the version that a rollout has.

    Sessions live while their attempt does: call `forget` when a rollout has ended. Should that be forgotten, the least
    recently used ones go once there are `max_sessions`; one that is needed again is rebuilt from the store.
    """

    def __init__(
        self,
        store: AttemptStore,
        routes: Routes,
        *,
        limits: Limits | None = None,
        max_sessions: int = 4096,
        prompts: Mapping[str, PromptConfig] | None = None,
        in_flight: InFlight | None = None,
    ) -> None:
        self.workers: OtherSessions | None = None
        """Other processes that hold sessions of this gateway, if there are any."""
        self._store = store
        self._prompts = PromptReplacer(prompts or {})
        self.routes = routes
        self.sessions = Sessions(store, max_sessions)
        self.recorder = Recorder(store)
        self._limits = limits or Limits()
        self._requests = RequestCounter(self._limits, self.counts, in_flight or InFlight())
        self._others = Router(make_attempt_routes(store), redirect_slashes=False, default=_no_such_route)
        self._posts: dict[str, tuple[Dialect, Callable[..., Awaitable[None]]]] = {}
        for dialect in DIALECTS:
            self._posts[dialect.path] = dialect, self._answer
            if dialect.count_path is not None:
                self._posts[dialect.count_path] = dialect, self._count

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        address = RequestAddress.of(scope["path"], scope["headers"])
        if address is None:
            if scope["path"] == "/health":
                return await self._health(send)
            return await self._others(scope, receive, send)
        dialect, serve = self._endpoint(scope, address)
        try:
            await serve(scope, receive, send)
        except asgi.ClientDisconnected:
            pass  # there is nobody to answer
        except Exception as error:
            await _refuse(send, dialect, to_api_error(error))

    def _endpoint(
        self, scope: Scope, address: RequestAddress
    ) -> tuple[Dialect, Callable[[Scope, Receive, Send], Awaitable[None]]]:
        path, method = address.path, scope["method"]
        if (found := self._posts.get(path)) and method == "POST":
            return found[0], partial(found[1], found[0], address)
        spoken = _dialect_of(scope, path)
        if method == "GET" and _is_models_path(path):
            return spoken, partial(self._models, address)
        return spoken, partial(self._refuse_unserved, address)

    def serves(self, path: str) -> bool:
        """Whether an address is a model API's: below /v1/ others may have theirs beside it."""
        address = RequestAddress.of(path)
        return address is not None and (address.is_attempts or is_model_path(address.path))

    def is_model_call(self, method: str, address: RequestAddress) -> bool:
        """Whether a request is a model call that names no rollout."""
        return method == "POST" and not address.is_attempts and address.path in self._posts

    async def show_models(self, scope: Scope, send: Send, started: float) -> bool:
        """Answer a question for the models there are from somebody who needs no attempt for it. Whether it was one."""
        address = RequestAddress.of(scope["path"], scope["headers"])
        if address is None or scope["method"] != "GET" or not _is_models_path(address.path):
            return False
        try:
            await self._show_models(address, scope, send, started)
        except ApiError as refused:
            await _refuse(send, _dialect_of(scope, address.path), refused)
        return True

    async def refuse(self, scope: Scope, send: Send, refused: ApiError) -> None:
        """As clients of the API at this address understand it."""
        address = RequestAddress.of(scope["path"])
        await _refuse(send, _dialect_of(scope, address.path if address else ""), refused)

    @property
    def counts(self) -> Counter[str]:
        return self.recorder.counts

    def share_limits(self, in_flight: InFlight) -> None:
        """Requests in flight are counted together with those of other processes. Before any is."""
        self._requests = RequestCounter(self._limits, self.counts, in_flight)

    # -- sessions ----------------------------------------------------------------------------------------------------

    def forget(self, rollout: str) -> None:
        """Drop the sessions of a rollout that has ended."""
        self.sessions.forget(rollout)
        if self.workers is not None:
            self.workers.forget(rollout)

    async def wait_until_idle(self, rollout: str, attempt: int, *, limit: float = 5.0) -> None:
        """Wait until an attempt's calls in flight have ended and been recorded, but not for ever."""
        if not await self.sessions.wait_until_idle((rollout, attempt), limit):
            self.counts["unsettled"] += 1
        if self.workers is not None:
            await self.workers.wait_until_idle(rollout, attempt, limit=limit)

    async def session(self, scope: Scope, address: RequestAddress) -> Session:
        """The session of the attempt that the request's address and key open. `ApiError` otherwise."""
        if address.rollout is None:
            return await self.sessions.by_key(scope)
        try:
            return await self.sessions.at(address.rollout, address.attempt, scope)
        except ApiError as refused:
            if refused.status == 401:  # whose key it is learns that it was used at a wrong address
                with suppress(ApiError):
                    await self.recorder.record_error(await self.sessions.by_key(scope), address.agent, refused)
            raise

    async def _refused(self, session: Session, agent: str, error: Exception) -> ApiError:
        """What a client is told of an error, which is recorded, unless the attempt is over."""
        refused = to_api_error(error)
        self._drop_if_over(session, refused)
        if refused.status != 409:
            await self.recorder.record_error(session, agent, refused)
        return refused

    # -- model calls -------------------------------------------------------------------------------------------------

    async def _answer(
        self, dialect: Dialect, address: RequestAddress, scope: Scope, receive: Receive, send: Send
    ) -> None:
        session = await self.session(scope, address)
        await self._work(session, address.agent, self._sample, dialect, address, session, scope, receive, send)

    async def _work(self, session: Session, agent: str, do: Callable[..., Awaitable[None]], *given: Any) -> None:
        """One request of a session, which is counted; what goes wrong is recorded, and raised as the client is told."""
        self._requests.begin(session)
        try:
            await do(*given)
        except asgi.ClientDisconnected:
            raise
        except Exception as error:
            raise await self._refused(session, agent, error) from None
        finally:
            self._requests.end(session)

    async def _sample(
        self, dialect: Dialect, address: RequestAddress, session: Session, scope: Scope, receive: Receive, send: Send
    ) -> None:
        agent, deadline = address.agent, self._limits.deadline
        body = await self._read_body(address, session, receive)
        if (outside := self.routes.outside(agent, body, session.rollout)) is not None:
            return await self._proxy(outside, dialect, address, body, session, scope, receive, send)
        request = dialect.read(body)
        if address.foreign:
            request = replace(request, token_ids=True)
        if request.previous is not None or request.refers:
            request = await self._resume(dialect, session, request)
        call = self._call(session, agent, request)
        if call.request.dropped:
            await self.recorder.record_dropped(session, agent, call.request.dropped)
        ended = await Exchange(call, dialect, self.recorder, receive, send, deadline=deadline).run()
        self._drop_if_over(session, ended)

    async def _read_body(self, address: RequestAddress, session: Session, receive: Receive) -> bytes:
        body = await _body(receive, self._limits.deadline)
        if address.model:
            body = name_model(body, address.model, always=False)
        return self._prompts.replace(body, session.rollout.prompts)

    async def _proxy(
        self,
        route: OutsideRoute,
        dialect: Dialect,
        address: RequestAddress,
        body: bytes,
        session: Session,
        scope: Scope,
        receive: Receive,
        send: Send,
    ) -> None:
        route.check(dialect, address.path)
        proxied = ProxiedRequest(
            route, dialect, address.path, body, session, address.agent, self.recorder, scope, receive, send
        )
        self._drop_if_over(session, await proxied.run(self._limits.deadline))

    def _drop_if_over(self, session: Session, ended: ApiError | None) -> None:
        """An attempt that is over has no session any more. Nor has one that another gateway has answered meanwhile: the
        next request finds all of it in the store. A stream that is broken off by either has said so itself."""
        if ended is not None and (ended.status == 409 or ended.code == STALE):
            self.sessions.drop(session)

    async def _resume(self, dialect: Dialect, session: Session, request: ModelRequest) -> ModelRequest:
        """A request that goes on from a turn it names, or names what turns have said, with what was said there."""
        answers, turns = session.answers, dict[str, Turn]()
        if request.previous is not None or not answers.keys() >= set(request.refers):  # reading all of them takes long
            recorded = await self._store.turns(session.rollout.id, attempt=session.attempt.number)
            turns = {turn.id: turn for turn in recorded if is_conversation(turn)}
            answers = {id: turn.answer for id, turn in turns.items()}
        for named, param in [(request.previous, "previous_response_id"), *((turn, "input") for turn in request.refers)]:
            if named is not None and named not in answers:
                raise ApiError(
                    f"there is no previous response {named!r} in this rollout. Fix: send the whole conversation",
                    status=404,
                    param=param,
                    code="previous_response_not_found",
                )
        if request.refers:
            request = dialect.recall(request, {turn: answers[turn] for turn in request.refers})
        return request if request.previous is None else dialect.continue_from(request, turns[request.previous])

    def _call(self, session: Session, agent: str, request: ModelRequest) -> ModelCall:
        route = self.routes.find(agent, request.requested.get("model"), session.rollout).of(session.rollout)
        return ModelCall(session, agent, route, request)

    async def _count(
        self, dialect: Dialect, address: RequestAddress, scope: Scope, receive: Receive, send: Send
    ) -> None:
        """How many tokens a request's prompt has. Nothing is sampled and no turn recorded."""
        session = await self.session(scope, address)
        await self._work(session, address.agent, self._count_tokens, dialect, address, session, scope, receive, send)

    async def _count_tokens(
        self, dialect: Dialect, address: RequestAddress, session: Session, scope: Scope, receive: Receive, send: Send
    ) -> None:
        agent = address.agent
        body = await self._read_body(address, session, receive)
        if (outside := self.routes.outside(agent, body, session.rollout)) is not None:
            return await self._proxy(outside, dialect, address, body, session, scope, receive, send)
        request = dialect.read_count(body)
        if request.previous is not None or request.refers:
            request = await self._resume(dialect, session, request)
        found = self.routes.find(agent, request.requested.get("model"), session.rollout)
        route = found.asked_by(request)
        contexts = session.contexts(agent, route.policy)
        (conversation,) = read_conversations(request, route, contexts)
        check_length(conversation, route)
        count = len(contexts.prompt(route.renderer, conversation, route.history, remember=False).ids)
        await _answer_json(send, dialect.write_count(count))

    # -- the rest ----------------------------------------------------------------------------------------------------

    async def _models(self, address: RequestAddress, scope: Scope, receive: Receive, send: Send) -> None:
        session = await self.session(scope, address)
        try:
            await self._show_models(address, scope, send, session.attempt.started)
        except Exception as error:
            raise await self._refused(session, address.agent, error) from None

    async def _show_models(self, address: RequestAddress, scope: Scope, send: Send, started: float) -> None:
        """The one model that answers an agent, alone or as a list; by name also those it may ask for."""
        route = self.routes.any(address.agent, None)
        name = route.model or route.policy  # an outside model may be called as the agent likes
        _, listed, asked = address.path.partition("/")
        if listed and asked != name:
            if asked not in self.routes.models:
                message = f"there is no model {asked!r} here. Fix: ask for {name!r}, the one that answers"
                raise ApiError(message, status=404, param="model", code="model_not_found")
            route, name = self.routes.models[asked], asked
        dialect = _dialect_of(scope, address.path)
        context = route.context if isinstance(route, PolicyRoute) else 0
        model = dialect.write_model(name, created=started, context=context)
        await _answer_json(send, model if listed else dialect.write_models([model]))

    async def _refuse_unserved(self, address: RequestAddress, scope: Scope, receive: Receive, send: Send) -> None:
        allowed = "POST" if address.path in self._posts else "GET" if _is_models_path(address.path) else None
        refused = _no_such(scope, address.path, allowed)
        with suppress(ApiError):  # a client without a key is told the same
            await self.recorder.record_error(await self.session(scope, address), address.agent, refused)
        headers = [(b"allow", allowed.encode())] if allowed else []
        await _refuse(send, _dialect_of(scope, address.path), refused, headers)

    async def _health(self, send: Send) -> None:
        counts = self.counts + (await self.workers.count() if self.workers is not None else Counter[str]())
        sessions = len(self.sessions) + counts.pop("sessions", 0)
        await _answer_json(send, {"status": "ok", "sessions": sessions, "counts": counts})


def _is_models_path(path: str) -> bool:
    return path == "models" or path.startswith("models/")


def _dialect_of(scope: Scope, path: str) -> Dialect:
    """Whose errors a client understands, where the address may not say it."""
    headers = scope["headers"]
    by_header = (dialect for dialect in DIALECTS if dialect.is_spoken(headers))
    by_path = (dialect for dialect in DIALECTS if path.startswith(dialect.path))
    return next(by_header, None) or next(by_path, DIALECTS[0])


async def _body(receive: Receive, deadline: float) -> bytes:
    try:
        body = take_body(receive)
        if body is None:
            body = await _wait_for_body(receive, deadline)
        asgi.check_size(len(body), MAX_BODY)
        if len(body) > MANY and body.count(b"[") + body.count(b"{") > MANY:
            with suppress(msgspec.MsgspecError, UnicodeError):  # its API says what is wrong with it
                asgi.check_depth(body)
        return body
    except asgi.Refusal as error:
        raise ApiError(str(error), status=error.status, code="request_too_large") from None


async def _wait_for_body(receive: Receive, deadline: float) -> bytes:
    with Interruption(deadline):
        return await asgi.read_body(receive, MAX_BODY)
    message = f"the request was not sent whole within {deadline:g} s"
    raise ApiError(f"{message}. Fix: send it faster, or raise gateway.deadline", status=408)


async def _answer_json(send: Send, data: Any) -> None:
    await asgi.answer(send, msgspec.json.encode(data))


async def _refuse(send: Send, dialect: Dialect, refused: ApiError, headers: Sequence[asgi.Header] = ()) -> None:
    # OpenAI's clients retry a 409; one that says that the attempt is over will not change.
    more = {409: [(b"x-should-retry", b"false")], 429: [(b"retry-after", b"1")]}.get(refused.status, [])
    await asgi.answer(send, dialect.error(refused), refused.status, [*headers, *more])


def _no_such(scope: Scope, path: str, allowed: str | None) -> ApiError:
    asked = f"{scope['method']} {hide_key(scope['path'])}"
    if allowed is not None:
        return ApiError(f"{asked} is not served. Fix: use {allowed}", status=405, code="method_not_allowed")
    known = (pair for dialect in DIALECTS for pair in dialect.not_offered.items())
    why = next((why for begins, why in known if path.startswith(begins)), None) or (
        "Fix: end an agent's base URL in /agents/<name>/v1 (without /v1 for Anthropic's clients, which add it), and "
        f"of the model APIs use {', '.join(BY_PATH)}, with POST"
    )
    return ApiError(f"{asked} is not served here. {why}", status=404, code="not_found")


async def _no_such_route(scope: Scope, receive: Receive, send: Send) -> None:
    await _refuse(send, _dialect_of(scope, ""), _no_such(scope, "", None))
