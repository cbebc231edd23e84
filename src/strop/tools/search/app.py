"""An index over HTTP, as Search-R1's retrieval server has it.

    POST /retrieve  {"queries": ["who directed Ed Wood?"], "topk": 3, "return_scores": true}
                    {"result": [[{"document": {"id": "7", "contents": "..."}, "score": 12.3}, ...]]}
    POST /access    {"titles": ["Ed Wood"]}, or "ids", or "urls"
                    {"result": [{"title": "Ed Wood", "text": "...", "ids": ["7", ...]}]}, null for what is not there
    GET  /health    {"status": "ok", "passages": 14980, "by": "words"}

Without `return_scores` the documents stand in the lists themselves. By words, fewer than `topk` come where fewer
passages have any of them. A URL that no passage has is taken for one that ends in a title, as Wikipedia's do.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import unquote, urlsplit

import msgspec
from msgspec import Struct
from starlette.types import Receive, Scope, Send

from strop.net.asgi import ByMethod, FixedResponse, Refusal, answer, encode, malformed, read_body, refuse
from strop.net.server import HttpServer, serve
from strop.tools.search.batches import Batches
from strop.tools.search.documents import KINDS, Kind, Page
from strop.tools.search.index import Index

TOPK = 3
MAX_TOPK = 1000
MAX_NAMES = 1000
"""Queries or names in one request."""
MAX_BODY = 4 << 20
MAX_WAITING = 10_000
"""Queries that wait; more are told to come again."""


class Retrieve(Struct):
    queries: list[str]
    topk: int | None = None
    return_scores: bool = False


class Access(Struct):
    ids: list[str | int] | None = None
    titles: list[str] | None = None
    urls: list[str] | None = None


_retrieve = msgspec.json.Decoder(Retrieve).decode
_access = msgspec.json.Decoder(Access).decode


class SearchApp:
    """The routes, as one ASGI app. `topk` counts where a request names none."""

    def __init__(self, index: Index, topk: int = TOPK) -> None:
        self._index, self._topk = index, topk
        by_words = index.about.dense is None
        self._batches = Batches(index.search, threads=os.cpu_count() or 1 if by_words else 1)
        health = {"status": "ok", "passages": index.about.passages, "by": "words" if by_words else "meaning"}
        self._routes = {
            "/retrieve": ByMethod({"POST": self._retrieve}),
            "/access": ByMethod({"POST": self._access}),
            "/health": ByMethod({"GET": FixedResponse(health)}),
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            route = self._routes.get(scope["path"])
            if route is None:
                what = f"{scope['method']} {scope['path']} is not served here: ask {', '.join(self._routes)}"
                raise Refusal(what, 404, "NoSuchRoute", "not_found")
            await route(scope, receive, send)
        except Exception as error:
            await refuse(send, error)

    def close(self) -> None:
        self._batches.close()

    async def _retrieve(self, scope: Scope, receive: Receive, send: Send) -> None:
        asked = _retrieve(await read_body(receive, MAX_BODY))
        topk = self._topk if asked.topk is None else asked.topk
        if not 1 <= topk <= MAX_TOPK:
            raise malformed(f"topk is how many passages a query gets: from 1 to {MAX_TOPK}, not {topk}")
        _check_count(len(asked.queries), "queries")
        if self._batches.waiting + len(asked.queries) > MAX_WAITING:
            what = f"{self._batches.waiting} queries wait already: come again in a moment"
            raise Refusal(what, 503, "Busy", "busy", [(b"retry-after", b"1")])
        found = await self._batches.ask(asked.queries, topk) if asked.queries else []
        if asked.return_scores:
            await answer(send, encode({"result": found}))
        else:
            await answer(send, encode({"result": [[one.document for one in some] for some in found]}))

    async def _access(self, scope: Scope, receive: Receive, send: Send) -> None:
        asked = _access(await read_body(receive, MAX_BODY))
        given: dict[Kind, list[Any]] = {kind: names for kind in KINDS if (names := getattr(asked, kind)) is not None}
        if len(given) != 1:
            raise malformed('say which pages: {"titles": [...]}, {"ids": [...]} or {"urls": [...]}, one of them')
        ((kind, names),) = given.items()
        _check_count(len(names), kind)
        pages = await asyncio.to_thread(lambda: [self._page(kind, str(name)) for name in names])
        await answer(send, encode({"result": pages}))

    def _page(self, kind: Kind, name: str) -> Page | None:
        page = self._index.page(kind, name)
        if page is None and kind == "urls":
            return self._index.page("titles", _title(name))
        return page


def _check_count(count: int, what: str) -> None:
    if count > MAX_NAMES:
        raise malformed(f"{count} {what} in one request are too many. Fix: send at most {MAX_NAMES} at once")


def _title(url: str) -> str:
    """
    >>> _title("https://en.wikipedia.org/wiki/Ed_Wood_%28film%29")
    'Ed Wood (film)'
    """
    try:
        path = urlsplit(url).path
    except ValueError:
        return ""
    return unquote(path.rpartition("/")[2]).replace("_", " ")


@asynccontextmanager
async def serve_index(
    index: Index, *, host: str = "127.0.0.1", port: int = 0, hosts: Sequence[str] = (), topk: int = TOPK
) -> AsyncGenerator[HttpServer]:
    """Serve an index as long as the block lasts. Raises `PlaceError` if the address cannot be had."""
    app = SearchApp(index, topk)
    server = await serve(app, host=host, port=port, hosts=hosts, settings=("--host", "--port"))
    try:
        yield server
    finally:
        await server.close()
        app.close()
