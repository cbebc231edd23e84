"""`strop serve`: serve a store, and a model, to runners on this or other machines."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from pathlib import Path
from typing import Any

import uvloop
from rich.text import Text

from strop import config as configs
from strop import demo
from strop.cli import keys
from strop.cli.commands import Commands
from strop.cli.output import HOSTS, MODELS, get_program, hide_password, make_console, print_json
from strop.cli.served_store import PORT, START_SECONDS, say_what_is_awaited
from strop.config import Config
from strop.errors import ConfigError
from strop.learner.spawn import start_ahead


def add(commands: Commands) -> None:
    serve = commands.add_parser("serve", help="serve a store, and a model, to runners on this or other machines")
    serve.add_argument("--folder", default="runs/served", help="where it is kept (default: runs/served)")
    serve.add_argument("--store", default="", metavar="URL", help="postgresql://...; default: SQLite in the folder")
    serve.add_argument("--model", help=f"serve this model to agents as well: {MODELS}")
    serve.add_argument("--config", metavar="TOML", help="settings from a file: policy, engine, gateway")
    serve.add_argument("--set", action="append", default=[], metavar="a.b=c", help="any setting; see `strop config`")
    serve.add_argument("--host", default="127.0.0.1", help="address to listen on (default: this machine only)")
    serve.add_argument("--port", type=int, default=PORT, help=f"port to listen on (default: {PORT}; 0: a free one)")
    serve.add_argument("--hosts", action="append", default=[], metavar="NAME", help=HOSTS)
    keys.add(serve, default="$STROP_KEY, or the folder's, made if it has none")
    serve.add_argument("--synchronous", choices=["NORMAL", "FULL"], default="NORMAL", help="FULL survives power loss")
    serve.add_argument(
        "--grace", type=float, default=10.0, metavar="S", help="seconds for runners to be heard of after a start (10)"
    )
    serve.add_argument("--json", action="store_true", help="say where it is as one JSON object")
    serve.set_defaults(command=_serve)


def _serve(arguments: argparse.Namespace) -> int:
    if arguments.store and not arguments.store.startswith(("postgresql://", "postgres://")):
        raise ConfigError(
            f"--store {hide_password(arguments.store)!r} is not a database. Fix: write postgresql://USER@HOST/DATABASE"
        )

    model = _model(arguments)
    if model and not arguments.json:
        print(f"loading {model.policy.model}", file=sys.stderr)
    from strop.run import serve

    def ready(url: str, key: str) -> None:
        if arguments.json:
            said = {"url": url, "key": key, "pid": os.getpid()}
            return print_json(said | ({"model": model.policy.model} if model else {}))
        where = hide_password(arguments.store) or f"{arguments.folder}/store.sqlite"
        where += f" and {model.policy.model}" if model else ""
        out = make_console()
        out.print(f"[bold]serving[/] {where} at [bold]{url}[/]; Ctrl-C ends it", soft_wrap=True)
        out.print(f"  export STROP_URL={url}\n  export STROP_KEY={key}", soft_wrap=True, markup=False)
        next_steps = {
            f"{get_program()} enqueue --tasks tasks.jsonl": "queue tasks",
            f"{get_program()} runner --agent agent.py:agent": "run an agent on them, on as many machines as you like",
            f"{get_program()} rollouts": "look at what came of them",
        }
        if model:
            ask = f'curl {url}/v1/chat/completions -H "Authorization: Bearer $STROP_KEY" -d '
            ask += shlex.quote(json.dumps(_example(model.policy.model)))
            out.print(Text.assemble("  ", (ask, "cyan")), soft_wrap=True)
        width = max(map(len, next_steps))
        for line, what in next_steps.items():
            out.print(Text.assemble("  ", (line.ljust(width), "cyan"), f"  {what}"), soft_wrap=True)

    uvloop.run(
        serve.main(
            Path(arguments.folder),
            store_url=arguments.store,
            model=model,
            host=arguments.host,
            port=arguments.port,
            hosts=[*arguments.hosts, *(model.gateway.hosts if model else ())],
            key=keys.read_key(arguments),
            synchronous=arguments.synchronous,
            grace=arguments.grace,
            on_ready=ready,
            patience=START_SECONDS,
            on_wait=say_what_is_awaited(hide_password(arguments.store), arguments.json),
        )
    )
    return 0


def _example(model: str) -> dict[str, Any]:
    """A request to begin with. The model in the box knows nothing but its calculator."""
    if model != demo.config().policy.model:
        return {"messages": [{"role": "user", "content": "Hello"}]}
    asked = [{"role": "user", "content": "Use the calculator: 12 + 30."}]
    return {"temperature": 0, "messages": asked, "tools": demo.TOOLS}


def _model(arguments: argparse.Namespace) -> Config | None:
    """What is served beside the store, if anything is."""
    if not arguments.model and not arguments.config:
        if arguments.set:
            raise ConfigError("--set says how a model is served. Fix: say which with --model")
        return None
    policy = {"model": arguments.model} if arguments.model else None
    config = configs.load(toml=arguments.config, sets=arguments.set, policy=policy)
    start_ahead(config, train=False)
    from strop.run.settings import settle

    return settle(config)
