"""Where agents run as programs of their own: a gateway on a real socket, and nothing but a gateway."""

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from starlette.types import Message, Receive, Scope, Send

from strop.agent.llm import LLM
from strop.engines.base import Engine
from strop.gateway.app import Gateway
from strop.gateway.route import PolicyRoute, Routes
from strop.gateway.template import Renderer
from strop.net.server import serve
from strop.store.sqlite import SqliteStore
from strop.types import Event, Rollout, Sampling, Task, Turn

QUIET = {
    "OPENAI_AGENTS_DISABLE_TRACING": "1",
    "LANGSMITH_TRACING": "false",
    "CREWAI_DISABLE_TELEMETRY": "true",
    "CREWAI_DISABLE_TRACKING": "true",
    "CREWAI_TRACING_ENABLED": "false",
    "OTEL_SDK_DISABLED": "true",
    "LITELLM_LOCAL_MODEL_COST_MAP": "true",
    "ANONYMIZED_TELEMETRY": "false",
    "OPENCODE_DISABLE_MODELS_FETCH": "1",
    "OPENCODE_DISABLE_AUTOUPDATE": "1",
    "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
}
"""What keeps frameworks from reporting to their makers."""


class Ended:
    """What is left of an agent's run: its exit status, what it printed, the bodies it sent, what was recorded."""

    def __init__(
        self, status: int, output: str, bodies: list[dict[str, Any]], turns: list[Turn], events: list[Event]
    ) -> None:
        self.status, self.output, self.bodies, self.turns, self.events = status, output, bodies, turns, events

    @property
    def answers(self) -> list[str]:
        return self.said("answer: ")

    def said(self, word: str) -> list[str]:
        """The lines that begin with a word, without it."""
        return [line.removeprefix(word) for line in self.output.splitlines() if line.startswith(word)]


class Place:
    """`url` is the gateway's. Requests to anywhere else go to `proxy`, which lets nobody out: `outside` has the first
    line of each."""

    def __init__(self, store: SqliteStore, gateway: Gateway, folder: Path) -> None:
        self._store, self._gateway, self._folder = store, gateway, folder
        self.bodies: list[dict[str, Any]] = []
        self.outside: list[str] = []
        self.url = self.proxy = ""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The gateway, with the bodies of requests written down."""
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
        self.outside.append((await reader.readline()).decode("latin1").strip())
        writer.close()

    async def run(self, *command: str, path: Path | None = None, check: bool = True, limit: float = 100) -> Ended:
        """Run a program as the agent of a rollout, with the environment that a runner gives it; `path` is looked at
        for programs first. With `check` it must end well."""
        rollout = Rollout(id="r1", group="r1", member=0, task=Task(id="t"), created=0.0)
        await self._store.enqueue([rollout])
        (lease,) = await self._store.lease("w0", seconds=600)
        out = self._folder / "output"
        with out.open("wb") as file:
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=file,
                stderr=asyncio.subprocess.STDOUT,
                cwd=self._folder,
                start_new_session=True,
                env=QUIET
                | {"PATH": os.pathsep.join([*([str(path)] if path else []), os.environ["PATH"]])}
                | {"HOME": str(self._folder), "NO_PROXY": "127.0.0.1"}
                | dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"), self.proxy)
                | LLM.at(self.url, lease, model="strop").environment(""),
            )
        try:
            await asyncio.wait_for(process.wait(), limit)
        except TimeoutError:
            print(f"it was stopped after {limit:g} s")
        finally:
            with suppress(ProcessLookupError):  # it, and what it has left running
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
        output = out.read_text(errors="replace")
        sys.stdout.write(output)  # shown if the test fails
        assert process.returncode == 0 or not check, output[-3000:]
        turns, events = await self._store.turns("r1"), await self._store.events("r1")
        return Ended(process.returncode or 0, output, self.bodies, turns, events)


@asynccontextmanager
async def open_place(renderer: Renderer, engine: Engine, folder: Path) -> AsyncIterator[Place]:
    store = await SqliteStore.open(folder / "store.sqlite")
    route = PolicyRoute(
        policy="p",
        model="strop",
        engine=engine,
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
