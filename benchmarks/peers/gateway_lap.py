"""The load of the gateway's benchmark: C programs, compiled when needed, and what one lap of them is."""

from __future__ import annotations

import json
import subprocess
import urllib.request
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from peers import gateway_conversation as conversation
from peers.gateway_sides import HOMES, Gateway, Same
from peers.processes import PEERS, running

TURNS = 6
"""Of a rollout: 2, 4, ..., 12 messages."""
Lap = dict[str, Any]


def build(name: str) -> Path:
    """Compile one of the C programs, unless that was done since it last changed."""
    source, program = PEERS / f"{name}.c", HOMES / name
    if not program.is_file() or program.stat().st_mtime < source.stat().st_mtime:
        HOMES.mkdir(exist_ok=True)
        try:
            subprocess.run(["cc", "-O2", "-o", program, source], check=True)
        except FileNotFoundError:
            raise SystemExit("a C compiler is needed: install gcc or clang, so that `cc` runs") from None
    return program


class Load:
    """Agents that ask as fast as they are answered."""

    def __init__(self, folder: Path, num_turns: int = TURNS) -> None:
        self._program = build("gateway_load")
        self._conversation = folder / f"conversation-{num_turns}"
        self._conversation.write_bytes(conversation.requests(num_turns))
        self._targets = folder / "targets"

    def run(
        self,
        gateway: Gateway,
        rollouts: int,
        concurrent: int,
        *,
        seconds: float = 0,
        by_turn: bool = False,
        ramp: float = 0,
    ) -> Lap:
        """One lap: new rollouts, the load, their end. Without `seconds` until all of them are through. They begin one
        after the other within `ramp` seconds."""
        targets = gateway.make(rollouts)
        self._targets.write_text("".join(f"{path}\tBearer {key}\n" for path, key in targets))
        command = [self._program, str(gateway.port), self._conversation, self._targets, str(concurrent), str(seconds)]
        before = gateway.cpu()
        command += [str(gateway.pid if by_turn else 0), str(ramp)]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE)
        lap: Lap = json.loads(done.stdout)
        lap["cpu_ms"] = (gateway.cpu() - before) / max(1, lap["requests"]) * 1000
        lap["rss_mb"] = gateway.memory()
        lap["counts"] = gateway.end()
        if lap["errors"]:
            raise SystemExit(f"{gateway.url}: {lap['errors']} of {lap['requests']} failed, as {lap['first_error']}")
        return lap


@contextmanager
def mock(folder: Path) -> Generator[Gateway]:
    """The model server behind the peers."""
    (folder / "answer").write_bytes(conversation.answer())
    with running(build("gateway_mock"), folder / "answer", stdout=subprocess.PIPE) as process:
        assert process.stdout
        yield Same(process, f"http://127.0.0.1:{int(process.stdout.readline())}", "none")


def check(gateway: Gateway) -> None:
    """One request, looked at closely: everybody has to deliver the tool call and every token's logprob."""
    ((path, key),) = gateway.make(1)
    body = conversation.requests(1).replace(conversation.NUMBER.encode(), b"0")
    headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(gateway.url + path, body, headers), timeout=60) as answered:
        (choice,) = json.load(answered)["choices"]
    gateway.end()
    tokens = len(choice["logprobs"]["content"])
    if tokens != conversation.NUM_TOKENS or not choice["message"]["tool_calls"]:
        raise SystemExit(f"{gateway.url} answers with {tokens} logprobs and the message {choice['message']}")
