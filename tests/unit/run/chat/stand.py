"""A chat whose model plays what a script says; the gateway, the store and the terminal are the real ones."""

from __future__ import annotations

import itertools
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from strop.config import MAIN, Config, PolicyConfig
from strop.engines.scripted import Scripted
from strop.gateway.template import Renderer
from strop.models.names import resolve
from strop.net.server import serve
from strop.run.chat import ChatSession
from strop.run.gateway import make_gateway
from strop.run.prepare import PreparedPolicy
from strop.run.runtime import ServedPolicy
from strop.store import open_store

CONFIG = Config(policy=PolicyConfig(model="scripted"))


def call(**arguments: Any) -> str:
    """The words with which strop/nano calls the calculator."""
    import json

    return "<tool_call>\n" + json.dumps({"name": "calculator", "arguments": arguments}) + "\n</tool_call>"


@asynccontextmanager
async def scripted(folder: Path, script: Any, **options: Any) -> AsyncGenerator[ChatSession]:
    renderer = Renderer.from_folder(resolve("strop/nano"))
    store = await open_store(folder)
    prepared = PreparedPolicy(name=MAIN, config=CONFIG, model=folder, renderer=renderer)
    engine = Scripted(script, renderer, **options)
    policy = ServedPolicy(prepared=prepared, engine=engine, learner=None, place=folder)
    gateway = make_gateway(CONFIG, store, [policy])
    server = await serve(gateway)
    try:
        yield ChatSession(
            config=CONFIG, store=store, gateway=gateway, url=server.url, watches=[], numbers=itertools.count(1)
        )
    finally:
        await server.close()
        await store.close()
