"""Serves a store: its verbs under /v1/ with the run's key, what an attempt may say under /r/ with its own.

app = StoreApp(store, key)
server = await serve(app, host="127.0.0.1", port=8640)

request ──▶ key ──▶ body or question ──▶ verb of the store ──▶ JSON      any error on the way ──▶ {"error": {...}}
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any
from urllib.parse import parse_qsl

import msgspec
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from strop.errors import StoreError
from strop.net.asgi import (
    ByMethod,
    FixedResponse,
    answer,
    check_depth,
    encode,
    malformed,
    read_body,
    refuse,
)
from strop.store.base import Store
from strop.store.rpc import BATCH, VERBS, Verb
from strop.store.server.agentlightning import routes as agentlightning
from strop.store.server.attempts import UnservedPaths, make_attempt_routes
from strop.store.server.batch import BatchEndpoint
from strop.store.server.handlers import Handlers
from strop.store.server.keys import AttemptKeys, RunKey
from strop.store.server.openapi import describe
from strop.store.wire import Health
from strop.version import __version__

ABOUT = {
    "strop": __version__,
    "what": "a store of rollouts: runners lease them here and report what came of them",
    "description": "/openapi.json",
    "key": "every address below /v1/ wants the run's key, as `Authorization: Bearer <key>`",
}


_NOTHING: dict[str, str] = {}


class Endpoint:
    """One verb at its address."""

    def __init__(self, verb: Verb[Any], handlers: Handlers, key: RunKey) -> None:
        self._key, self._do = key, getattr(handlers, verb.name)
        self._decode: Callable[[bytes], Any] | None = None
        if verb.method != "GET":
            self._decode = msgspec.json.Decoder(verb.takes).decode
        self._asks = verb.takes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            self._key.check(scope["headers"])
            if self._decode is None:
                given = read_query(scope["query_string"], self._asks)
            else:
                body = await read_body(receive)
                check_depth(body)
                given = self._decode(body)
            body = encode(await self._do(given, scope.get("path_params", _NOTHING), receive))
        except Exception as error:
            return await refuse(send, error)
        await answer(send, body)


def read_query(query: bytes, asks: type[Any]) -> Any:
    """What stands after the `?`, by name."""
    if not query:
        return asks()
    pairs = parse_qsl(query.decode("latin-1"), keep_blank_values=True)
    given = dict(pairs)
    if len(given) < len(pairs):
        raise malformed("a name stands twice in the address. Fix: give each once")
    return msgspec.convert(given, asks, strict=False)


def store_routes(handlers: Handlers, key: RunKey) -> list[Route]:
    """Every verb, one route per address."""
    by_path: dict[str, dict[str, ASGIApp]] = {}
    for verb in VERBS:
        endpoint = BatchEndpoint(handlers, key) if verb is BATCH else Endpoint(verb, handlers, key)
        by_path.setdefault(verb.path, {})[verb.method] = endpoint
    return [Route(path, ByMethod(endpoints)) for path, endpoints in by_path.items()]


class StoreApp:
    """The ASGI app. Addresses without names in them, which are those asked for most, are found by one look-up."""

    def __init__(self, store: Store, key: str, *, model: bool = False) -> None:
        """`model`: whether a gateway answers beside it. As long as `refuses` is set, every request gets that error."""
        self.refuses: StoreError | None = None
        attempts = AttemptKeys(store)
        self.key = run_key = RunKey(key, attempts)
        self._handlers = Handlers(store, attempts)
        routes = [
            *make_attempt_routes(store, attempts, run_key, partial(agentlightning.take, store)),
            *agentlightning.make_routes(store, run_key),
            *store_routes(self._handlers, run_key),
            Route("/health", ByMethod({"GET": FixedResponse(Health("ok", __version__))})),
            Route("/openapi.json", ByMethod({"GET": FixedResponse(describe())})),
            Route("/", ByMethod({"GET": FixedResponse(ABOUT)})),
        ]
        self._plain: dict[str, ASGIApp] = {route.path: route.app for route in routes if "{" not in route.path}
        named = [route for route in routes if "{" in route.path]
        self._named = Router(
            named, redirect_slashes=False, default=UnservedPaths(store, attempts, run_key, model=model)
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self.refuses is not None:
            return await refuse(send, self.refuses)
        await self._plain.get(scope["path"], self._named)(scope, receive, send)

    def close(self) -> None:
        """End requests that wait for something to happen. Do it before the server is closed."""
        self._handlers.close()

    def end(self, why: StoreError) -> None:
        """From now on there is nothing to be had here; requests that wait are told so too."""
        self.refuses = why
        self._handlers.close(why)
