"""What `processes` and its workers say to each other: JSON messages, each after its length, over a socket pair.

    Start ──▶ worker ──▶ Ready, then again and again   Job ──▶ worker ──▶ JobDone

A worker that many rollouts share takes RunJob and StopJob instead, and says Said, PrintedText, Finished, Stuck and
Blocked, each with the rollout's number.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from typing import Any, TypeVar

import msgspec
from msgspec import Struct

from strop.runners.base import Job, Outcome
from strop.types import EventKind

T = TypeVar("T")
_LENGTH = struct.Struct("!I")


class Preload(Struct, frozen=True, kw_only=True):
    """What to import: the agent and the reward function with it, and where to look for them (nothing: where its Python
    looks anyway)."""

    agent: str
    reward: str
    sys_path: list[str]
    shares_loop: bool = False


class Start(Preload, frozen=True, kw_only=True):
    """To the worker, first: what to import, the file that takes what is printed, and the secret that stands in the
    environment of whatever its agents start; where rollouts share a loop, the seconds that one may block it for."""

    output: str
    cookie: str
    block_limit: float = 10.0


class Ready(Struct, frozen=True, kw_only=True):
    """From the worker: the agent is loaded, or why it cannot be. `is_forkable`: a process that has imported it can be
    forked."""

    error: str | None = None
    is_forkable: bool = False


class JobDone(Struct, frozen=True, kw_only=True):
    """From the worker: what came of a job, and whether its output file has to be looked at and taken away."""

    outcome: Outcome
    printed: bool


class RunJob(Struct, frozen=True, kw_only=True, tag="run"):
    """To a worker that many share: begin this one."""

    number: int
    job: Job


class StopJob(Struct, frozen=True, kw_only=True, tag="stop"):
    """To a worker that many share: end this one."""

    number: int


class Said(Struct, frozen=True, kw_only=True, tag="said"):
    """An event that the agent reports."""

    number: int
    kind: EventKind
    data: dict[str, Any]


class PrintedText(Struct, frozen=True, kw_only=True, tag="printed"):
    number: int
    text: str


class Finished(Struct, frozen=True, kw_only=True, tag="finished"):
    number: int
    outcome: Outcome


class Stuck(Struct, frozen=True, kw_only=True, tag="stuck"):
    """It was told to stop, and goes on."""

    number: int


class Blocked(Struct, frozen=True, kw_only=True, tag="blocked"):
    """The loop is blocked, by this rollout; -1 if nobody knows by whom."""

    number: int


FromLoop = Said | PrintedText | Finished | Stuck | Blocked


def pack(message: Struct) -> bytes:
    body = msgspec.json.encode(message)
    return _LENGTH.pack(len(body)) + body


async def receive(reader: asyncio.StreamReader, kind: type[T]) -> T:
    """The next message. `asyncio.IncompleteReadError` or `ConnectionError`: the other side is gone."""
    return msgspec.json.decode(await _receive_body(reader), type=kind)


async def receive_from_loop(reader: asyncio.StreamReader) -> FromLoop:
    return msgspec.json.decode(await _receive_body(reader), type=FromLoop)


async def _receive_body(reader: asyncio.StreamReader) -> bytes:
    (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
    return await reader.readexactly(length)


def receive_bytes(connection: socket.socket) -> bytes | None:
    """The next message, undecoded, by blocking; None when the other side is gone."""
    header = _exactly(connection, _LENGTH.size)
    return None if header is None else _exactly(connection, _LENGTH.unpack(header)[0])


def _exactly(connection: socket.socket, size: int) -> bytes | None:
    parts = bytearray()
    while len(parts) < size:
        try:
            part = connection.recv(size - len(parts))
        except ConnectionError:
            return None
        if not part:
            return None
        parts += part
    return bytes(parts)
