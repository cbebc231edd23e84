"""Which process answers an attempt's requests: a hash of its rollout, so that its session is in one place.

    /r/g1.0/1/agents/main/v1/...    the address says it
    /v1/...  with a key             the attempt that the key opens says it
    /k/{key}/v1/...                 the same, whatever key is sent besides
    everything else                 the process that owns the store, also what is asked with the server's own key

Addresses do not name a process: they stay the same however many there are.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Awaitable, Sequence
from urllib.parse import unquote

import httptools

from strop.errors import UnknownId
from strop.gateway.auth import RequestAddress, read_keys
from strop.gateway.dialects.registry import is_model_path
from strop.net.asgi import Header
from strop.store.base import AttemptStore
from strop.types import stable_hash

OWNER = 0
"""The process that owns the store; workers are 1, 2, ..."""
KNOWN = 65536
"""How many keys are remembered."""


class Placement:
    def __init__(self, store: AttemptStore, num_workers: int) -> None:
        self._store, self._num_workers = store, num_workers
        self._by_key: OrderedDict[bytes, int] = OrderedDict()
        self.server_key = b""
        """What is asked with it, wherever that is, the process answers that owns the store."""

    def of_rollout(self, rollout: str) -> int:
        return 1 + stable_hash(rollout) % self._num_workers

    def find(self, head: bytes) -> int | Awaitable[int] | None:
        """The place of a request by its first bytes; None if more of them are needed."""
        line, ended, _ = head.partition(b"\r\n")
        if not ended:
            return None
        path = _read_path(line)
        address = RequestAddress.of(path)
        if address is None or not (address.is_attempts or is_model_path(address.path)):
            return OWNER
        if address.key is not None:
            return self._of_keys([address.key.encode()])
        if address.rollout is not None and not self.server_key:
            return self.of_rollout(address.rollout)
        fields, ended, _ = head.partition(b"\r\n\r\n")
        if not ended:
            return None
        if self.server_key and self.server_key in fields:
            return OWNER
        if address.rollout is not None:
            return self.of_rollout(address.rollout)
        return self._of_keys(read_keys({"path": path, "headers": _read_headers(fields)}, trace_first=True))

    def _of_keys(self, keys: Sequence[bytes]) -> int | Awaitable[int]:
        known = self._by_key.get(keys[0]) if keys else OWNER  # the first that opens an attempt counts
        return self._ask(keys) if known is None else known

    async def _ask(self, keys: Sequence[bytes]) -> int:
        for key in keys:
            try:
                attempt = await self._store.attempt(key.decode("latin-1"))
            except UnknownId:
                continue
            self._by_key[key] = place = self.of_rollout(attempt.rollout)
            if len(self._by_key) > KNOWN:
                self._by_key.popitem(last=False)
            return place
        return OWNER


def _read_path(line: bytes) -> str:
    """The path of a request line, or nothing where that cannot be read."""
    parts = line.split(b" ")
    try:
        path = httptools.parse_url(parts[1]).path if len(parts) == 3 else None
    except httptools.HttpParserInvalidURLError:
        path = None
    text = (path or b"").decode("latin-1")
    return unquote(text) if "%" in text else text


def _read_headers(fields: bytes) -> list[Header]:
    lines = (line.partition(b":") for line in fields.split(b"\r\n")[1:])
    return [(name.strip().lower(), value.strip()) for name, _, value in lines]
