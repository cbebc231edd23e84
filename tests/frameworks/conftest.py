"""A gateway on a real socket, for agents that run as programs of their own."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from strop.engines.scripted import Answer, Scripted, ScriptedRequest
from strop.gateway.app import Gateway
from strop.gateway.route import PolicyRoute, Routes
from strop.gateway.template import Renderer
from strop.net.server import serve
from strop.store.sqlite import SqliteStore
from strop.types import Sampling
from tests import chatml
from tests.frameworks.model import THOUGHT, play
from tests.frameworks.place import Place

collect_ignore = ["agents"]  # programs for other environments than this one


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chatml.make(tmp_path_factory.mktemp("chatml"))


@pytest.fixture(scope="session")
def renderer(folder: Path) -> Renderer:
    return Renderer.from_folder(folder)


@pytest.fixture
async def place(renderer: Renderer, tmp_path: Path) -> AsyncIterator[Place]:
    async with open_place(renderer, play, tmp_path) as place:
        yield place


@pytest.fixture
async def thinking(folder: Path, tmp_path: Path) -> AsyncIterator[Place]:
    """The same with a model that thinks before it speaks, and a template that shows it no earlier thoughts."""
    renderer = Renderer.from_parts(folder, chatml.TEMPLATE + "{# thoughts end with </think> #}")
    async with open_place(renderer, lambda asked: THOUGHT + play(asked), tmp_path) as place:
        yield place


@asynccontextmanager
async def open_place(
    renderer: Renderer, script: Callable[[ScriptedRequest], Answer], folder: Path
) -> AsyncIterator[Place]:
    store = await SqliteStore.open(folder / "store.sqlite")
    route = PolicyRoute(
        policy="p",
        model="strop",
        engine=Scripted(script, renderer, context=32_768),
        renderer=renderer,
        sampling_for=lambda rollout: Sampling(max_tokens=2000),
    )
    (home := folder / "home").mkdir()
    place = Place(store, Gateway(store, Routes({"*": route})), home)
    server = await serve(place)
    proxy = await asyncio.start_server(place.turn_away, "127.0.0.1", 0)
    place.url, place.proxy = server.url, f"http://127.0.0.1:{proxy.sockets[0].getsockname()[1]}"
    yield place
    proxy.close()
    await proxy.wait_closed()
    await server.close()
    await store.close()
