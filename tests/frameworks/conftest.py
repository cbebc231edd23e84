"""A gateway on a real socket, for agents that run as programs of their own."""

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from starlette.types import Message, Receive, Scope, Send

from strop.engines.scripted import Scripted
from strop.gateway.app import Gateway
from strop.gateway.render import Renderer
from strop.gateway.route import PolicyRoute, Routes
from strop.runners.llm import LLM
from strop.server import serve
from strop.store.sqlite import SqliteStore
from strop.types import Event, Rollout, Sampling, Task, Turn
from tests import chatml
from tests.frameworks.model import play

collect_ignore = ["agents"]  # programs for other environments than this one

QUIET = {
    "OPENAI_AGENTS_DISABLE_TRACING": "1",
    "LANGSMITH_TRACING": "false",
    "CREWAI_DISABLE_TELEMETRY": "true",
    "CREWAI_DISABLE_TRACKING": "true",
    "CREWAI_TRACING_ENABLED": "false",
    "OTEL_SDK_DISABLED": "true",
    "PYTHONUNBUFFERED": "1",
}
"""What keeps frameworks from reporting to their makers."""


class Ended:
    """What is left of an agent's run: what it printed, the bodies it sent, what was recorded."""

    def __init__(self, output: str, bodies: list[dict[str, Any]], turns: list[Turn], events: list[Event]) -> None:
        self.output, self.bodies, self.turns, self.events = output, bodies, turns, events

    @property
    def answers(self) -> list[str]:
        return [line.removeprefix("answer: ") for line in self.output.splitlines() if line.startswith("answer: ")]


class Place:
    """Where agents run: a gateway, and nothing but a gateway. Requests to anywhere else end at `outside`."""

    def __init__(self, store: SqliteStore, gateway: Gateway, folder: Path) -> None:
        self._store, self._gateway, self._folder = store, gateway, folder
        self.bodies: list[dict[str, Any]] = []
        self.outside: list[str] = []
        self.url = self.proxy = ""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The gateway, with its requests written down."""
        body = b""

        async def read() -> Message:
            nonlocal body
            message = await receive()
            if message["type"] == "http.request":
                body += message.get("body", b"")
                if not message.get("more_body"):
                    self.bodies.append({"path": scope["path"], **json.loads(body or b"{}")})
            return message

        await self._gateway(scope, read, send)

    async def turn_away(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """A proxy that lets nobody out."""
        self.outside.append((await reader.readline()).decode("latin1").strip())
        writer.close()

    async def run(self, *command: str, limit: float = 120) -> Ended:
        """Run an agent as the agent of a rollout."""
        rollout = Rollout(id="r1", group="r1", member=0, task=Task(id="t"), created=0.0)
        await self._store.enqueue([rollout])
        (lease,) = await self._store.lease("w0", seconds=600)
        llm = LLM.at(self.url, lease, model="strop")
        process = await asyncio.create_subprocess_exec(
            *command,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            cwd=self._folder,
            env=QUIET
            | {"PATH": os.environ["PATH"], "HOME": str(self._folder), "NO_PROXY": "127.0.0.1"}
            | {name: self.proxy for name in ("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy")}
            | llm.environment(""),
        )
        try:
            out, _ = await asyncio.wait_for(process.communicate(), limit)
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        output = out.decode()
        sys.stdout.write(output)  # pytest shows it if the test fails
        assert process.returncode == 0, output[-3000:]
        return Ended(output, self.bodies, await self._store.turns("r1"), await self._store.events("r1"))


@pytest.fixture(scope="session")
def renderer(tmp_path_factory: pytest.TempPathFactory) -> Renderer:
    return Renderer.from_folder(chatml.make(tmp_path_factory.mktemp("chatml")))


@pytest.fixture
async def place(renderer: Renderer, tmp_path: Path) -> AsyncIterator[Place]:
    store = await SqliteStore.open(tmp_path / "store.sqlite")
    route = PolicyRoute(
        policy="p",
        model="strop",
        engine=Scripted(play, renderer, context=32_768),
        renderer=renderer,
        sampling_for=lambda rollout: Sampling(max_tokens=2000),
    )
    (home := tmp_path / "home").mkdir()
    place = Place(store, Gateway(store, Routes({"*": route})), home)
    server = await serve(place)
    proxy = await asyncio.start_server(place.turn_away, "127.0.0.1", 0)
    place.url, place.proxy = server.url, "http://127.0.0.1:{}".format(proxy.sockets[0].getsockname()[1])
    yield place
    proxy.close()
    await server.close()
    await store.close()
