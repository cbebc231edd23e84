"""What `processes` and its workers say to each other: JSON messages, each after its length, over a socket pair.

Start ──▶ worker ──▶ Ready, then again and again   Job ──▶ worker ──▶ Outcome
"""

from __future__ import annotations

import asyncio
import socket
import struct
from typing import TypeVar

import msgspec
from msgspec import Struct

T = TypeVar("T")
_LENGTH = struct.Struct("!I")


class Start(Struct, frozen=True, kw_only=True):
    """To the worker, first: the agent to import and the reward function with it, where to look for them (nothing: where
    its Python looks anyway), and the file that takes what they print."""

    agent: str
    reward: str
    output: str
    sys_path: list[str]


class Ready(Struct, frozen=True, kw_only=True):
    """From the worker: the agent is loaded, or why it cannot be."""

    error: str | None = None


def pack(message: Struct) -> bytes:
    body = msgspec.json.encode(message)
    return _LENGTH.pack(len(body)) + body


async def receive(reader: asyncio.StreamReader, kind: type[T]) -> T:
    """The next message. `asyncio.IncompleteReadError` or `ConnectionError`: the other side is gone."""
    (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
    return msgspec.json.decode(await reader.readexactly(length), type=kind)


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
