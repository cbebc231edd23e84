"""Every client and agent of the guide's table, run as it is against a gateway: what it does is its row.

STROP_TEST_WRITE=1 writes what is seen into the guide.
"""

import os
import shutil
from pathlib import Path

import pytest

from strop.gateway.template import Renderer
from tests.frameworks import environments
from tests.frameworks.clients import CLIENTS, Client
from tests.frameworks.clients_table import Row, describe, read_rows, write_rows
from tests.frameworks.engine import HeldScript, open_random
from tests.frameworks.place import Ended, open_place

pytestmark = pytest.mark.frameworks

AGENTS = Path(__file__).parent / "agents"
CONTEXT = 1_000_000
"""Tokens. The tokenizer here makes several of a word, and coding agents begin with tens of thousands of words."""


async def observe(client: Client, model: Path, folder: Path) -> tuple[Row, Ended]:
    renderer = Renderer.from_folder(model)
    async with open_random(model, renderer.tokenizer.get_vocab_size()) as drawn:
        engine = HeldScript(client.script, renderer, model, drawn, CONTEXT)
        async with open_place(renderer, engine, folder) as place:
            ended = await place.run(*_command(client), path=_programs(client), check=False)
    return describe(client, ended), ended


def _command(client: Client) -> list[str]:
    name, *arguments = client.command.split()
    script = AGENTS / name
    if script.suffix == ".mjs":  # Node looks for packages where a script lies
        for file in script.parent.glob("*.mjs"):
            shutil.copy(file, environments.PLACE / client.environment)
        script = environments.PLACE / client.environment / script.name
    runner = "sh" if script.suffix == ".sh" else str(environments.program(client.environment))
    return [runner, str(script), *arguments]


def _programs(client: Client) -> Path:
    """Where an environment has its programs."""
    inside = "node_modules/.bin" if client.environment in environments.NODE else "bin"
    return environments.PLACE / client.environment / inside


@pytest.mark.parametrize("client", CLIENTS, ids=[f"{c.environment}:{c.command}" for c in CLIENTS])
async def test_a_client_does_what_its_row_says(client: Client, folder: Path, tmp_path: Path) -> None:
    if not environments.ready(client.environment):
        pytest.skip(f"{client.environment} is not installed: run `make frameworks`")
    row, _ = await observe(client, folder, tmp_path)
    rows, place = read_rows(), CLIENTS.index(client)
    if os.environ.get("STROP_TEST_WRITE"):
        rows[place : place + 1] = [row]
        write_rows(rows)
    assert rows[place] == row
    assert row.works.startswith("yes")
