"""A gateway on a real socket, for agents that run as programs of their own."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from strop.engines.scripted import Scripted
from strop.gateway.template import Renderer
from tests import chatml
from tests.frameworks.model import THOUGHT, play
from tests.frameworks.place import Place, open_place

collect_ignore = ["agents"]  # programs for other environments than this one


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chatml.make(tmp_path_factory.mktemp("chatml"))


@pytest.fixture(scope="session")
def renderer(folder: Path) -> Renderer:
    return Renderer.from_folder(folder)


@pytest.fixture
async def place(renderer: Renderer, tmp_path: Path) -> AsyncIterator[Place]:
    async with open_place(renderer, Scripted(play, renderer, context=32_768), tmp_path) as place:
        yield place


@pytest.fixture
async def thinking(folder: Path, tmp_path: Path) -> AsyncIterator[Place]:
    """The same with a model that thinks before it speaks, and a template that shows it no earlier thoughts."""
    renderer = Renderer.from_parts(folder, chatml.TEMPLATE + "{# thoughts end with </think> #}")
    engine = Scripted(lambda asked: THOUGHT + play(asked), renderer, context=32_768)
    async with open_place(renderer, engine, tmp_path) as place:
        yield place
