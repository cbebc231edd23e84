"""`strop search`: build an index over passages, serve it to agents, or ask it a question."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import uvloop
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.text import Text

from strop.cli.commands import Commands
from strop.cli.output import HOSTS, get_program, make_console, print_json
from strop.errors import ConfigError
from strop.monitor.screen import Screen

if TYPE_CHECKING:
    from strop.tools.search import base
    from strop.tools.search.dense import Dense

PORT = 8000


def add(commands: Commands) -> None:
    search = commands.add_parser("search", help="build and serve a search index for question-answering agents")
    verbs = search.add_subparsers(required=True, metavar="VERB")

    build = verbs.add_parser("build", help="make an index of a corpus of passages")
    build.add_argument(
        "corpus", metavar="CORPUS.jsonl", help='a line per passage: {"id", "contents"} or {"id", "title", "text"}'
    )
    build.add_argument("index", metavar="INDEX", help="the folder to make; it must not be there yet")
    build.add_argument("--dense", action="store_true", help="search by meaning (vectors) instead of by words (BM25)")
    build.add_argument("--model", help="of --dense: a folder or a Hugging Face name (default: all-minilm-l6-v2)")
    build.add_argument("--pooling", choices=["mean", "cls"], help="of --dense (default: what the model's folder says)")
    build.add_argument("--query-prefix", default="", metavar="TEXT", help='put before queries, as "query: " for e5')
    build.add_argument("--passage-prefix", default="", metavar="TEXT", help='before passages, as "passage: " for e5')
    build.add_argument("--json", action="store_true", help="one JSON object")
    build.set_defaults(command=_build)

    serve = verbs.add_parser("serve", help="answer /retrieve and /access, as Search-R1's server does")
    serve.add_argument("index", metavar="INDEX", help="a folder that `strop search build` made")
    serve.add_argument("--host", default="127.0.0.1", help="address to listen on (default: this machine only)")
    serve.add_argument("--port", type=int, default=PORT, help=f"port to listen on (default: {PORT}; 0: a free one)")
    serve.add_argument("--hosts", action="append", default=[], metavar="NAME", help=HOSTS)
    serve.add_argument("--topk", type=int, default=3, help="passages per query that names no number (default: 3)")
    serve.add_argument("--json", action="store_true", help="say where it is as one JSON object")
    serve.set_defaults(command=_serve)

    ask = verbs.add_parser("ask", help="ask an index a question, without a server")
    ask.add_argument("index", metavar="INDEX", help="a folder that `strop search build` made")
    ask.add_argument("query", help="what to look for")
    ask.add_argument("--topk", type=int, default=3, help="passages to show (default: 3)")
    ask.add_argument("--json", action="store_true", help="as /retrieve answers")
    ask.set_defaults(command=_ask)


def _build(arguments: argparse.Namespace) -> int:
    from strop.tools.search.index import build

    by = _dense(arguments)
    began = time.monotonic()
    try:
        with _progress(hidden=arguments.json) as progress:
            about = build(arguments.corpus, arguments.index, by=by, progress=progress)
    except KeyboardInterrupt:
        print("strop: stopped; no index was made", file=sys.stderr)
        return 130
    seconds = time.monotonic() - began
    if arguments.json:
        said = {"index": arguments.index, "passages": about.passages, "by": "meaning" if by else "words"}
        print_json(said | {"seconds": seconds})
    else:
        out = make_console()
        out.print(f"{about.passages} passages in {arguments.index}, {seconds:.1f} s", markup=False)
        out.print(f"serve it: {get_program()} search serve {arguments.index}", markup=False, soft_wrap=True)
    return 0


def _dense(arguments: argparse.Namespace) -> Dense | None:
    if not arguments.dense:
        if arguments.model or arguments.pooling or arguments.query_prefix or arguments.passage_prefix:
            raise ConfigError(
                "--model, --pooling and the prefixes are for vectors. Fix: add --dense, or leave them out"
            )
        return None
    from strop.run.settings import make_absolute
    from strop.tools.search.dense import Dense
    from strop.tools.search.encoder import DEFAULT

    return Dense(
        model=make_absolute(arguments.model or DEFAULT),
        pooling=arguments.pooling,
        query_prefix=arguments.query_prefix,
        passage_prefix=arguments.passage_prefix,
    )


@contextmanager
def _progress(*, hidden: bool) -> Generator[base.Progress]:
    """A bar on a terminal, nothing elsewhere."""
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    out = Screen(stderr=True)
    with Progress(*columns, console=out, transient=True, disable=hidden or not out.is_terminal) as bar:
        shown = bar.add_task("", total=None)

        def tell(what: str, done: int, total: int) -> None:
            bar.update(shown, description=what, completed=done, total=total)

        yield tell


def _serve(arguments: argparse.Namespace) -> int:
    from strop.tools.search.app import MAX_TOPK

    _check_topk(arguments.topk, MAX_TOPK)
    return uvloop.run(_serve_index(arguments))


async def _serve_index(arguments: argparse.Namespace) -> int:
    from strop.run.serve import watch_stop_signals
    from strop.tools.search.app import serve_index
    from strop.tools.search.index import Index

    with watch_stop_signals() as stop:
        index = await asyncio.to_thread(Index.open, arguments.index)
        async with serve_index(
            index, host=arguments.host, port=arguments.port, hosts=arguments.hosts, topk=arguments.topk
        ) as server:
            if arguments.json:
                print_json({"url": server.url, "pid": os.getpid(), "passages": index.about.passages})
            else:
                out = make_console()
                where = f"serving {arguments.index} at {server.url}; Ctrl-C ends it"
                out.print(where, markup=False, soft_wrap=True)
                out.print(f'  for agents: strop.tools.search.Search("{server.url}")', markup=False, soft_wrap=True)
            await stop.wait()
    return 0


def _ask(arguments: argparse.Namespace) -> int:
    from strop.tools.search.app import MAX_TOPK
    from strop.tools.search.corpus import split_title
    from strop.tools.search.index import Index

    _check_topk(arguments.topk, MAX_TOPK)
    (found,) = Index.open(arguments.index).search([arguments.query], arguments.topk)
    if arguments.json:
        print_json({"result": [found]})
        return 0
    out = make_console()
    for one in found:
        title, text = split_title(one.passage.contents)
        out.print(Text.assemble((f"{one.score:.3f} ", "cyan"), (title or one.passage.id, "bold")), soft_wrap=True)
        out.print(text, markup=False, soft_wrap=True)
    if not found:
        print("strop: nothing was found: ask for other words", file=sys.stderr)
    return 0


def _check_topk(topk: int, most: int) -> None:
    if not 1 <= topk <= most:
        raise ConfigError(f"--topk is how many passages a query gets: from 1 to {most}")
