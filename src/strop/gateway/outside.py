"""Outside models: a provider that answers for some agents, or for some models that agents ask for.

    [gateway.outside.judge]
    url = "https://api.openai.com/v1"
    model = "gpt-5"
    key_env = "OPENAI_API_KEY"
    agents = ["judge"]

For opponents, judges and helpers, never trained. proxy.py is how a request gets there and back.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import deque
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import msgspec
from msgspec import Struct
from starlette.types import Scope

from strop.config import OutsideConfig
from strop.errors import ConfigError
from strop.gateway.budget import Budget
from strop.gateway.dialects.base import ApiError, Dialect
from strop.gateway.dialects.registry import DIALECTS
from strop.net.client import Client

FORWARDED = frozenset({b"content-type", b"accept", b"idempotency-key"}).union(*(api.forwarded for api in DIALECTS))
"""Headers that go on to the provider. All others are about the connection, or about who asks."""


class Pace:
    """Lets so many requests begin per minute, and so many run at once; the others wait in line. 0: no limit."""

    def __init__(self, per_minute: int, at_once: int) -> None:
        self._per_minute = per_minute
        self._begun: deque[float] = deque()
        self._line = asyncio.Lock()
        self._room = asyncio.Semaphore(at_once) if at_once else None

    @asynccontextmanager
    async def one(self) -> AsyncGenerator[None]:
        if self._room is not None:
            await self._room.acquire()
        try:
            await self._turn()
            yield
        finally:
            if self._room is not None:
                self._room.release()

    async def _turn(self) -> None:
        if not self._per_minute:
            return
        async with self._line:
            if len(self._begun) == self._per_minute:
                await asyncio.sleep(max(0.0, self._begun[0] + 60.0 - time.monotonic()))
                self._begun.popleft()
            self._begun.append(time.monotonic())


class OutsideRoute(Struct, frozen=True, kw_only=True):
    """A provider, and how it is asked. `policy` is the name its turns are recorded under. `url` ends where `dialects`
    (paths of model APIs; empty for all) begin. An empty `model` leaves what the agent asks for as it is."""

    policy: str
    url: str
    model: str
    key: str
    dialects: tuple[str, ...]
    timeout: float
    pace: Pace
    budget: Budget
    client: Client

    @classmethod
    def of(cls, name: str, config: OutsideConfig) -> OutsideRoute:
        """As configured under `gateway.outside.<name>`. Raises `ConfigError`."""
        if config.key_env and not os.environ.get(config.key_env):
            raise ConfigError(
                f"gateway.outside.{name}: the environment has no {config.key_env}. Fix: export the provider's key "
                "under that name, or set key_env to the name it has"
            )
        if config.max_cost and not (config.price_in or config.price_out):
            raise ConfigError(
                f"gateway.outside.{name}: max_cost is set without prices. Fix: set price_in and price_out"
            )
        return cls(
            policy=name,
            url=config.url,
            model=config.model,
            key=os.environ.get(config.key_env, "") if config.key_env else "",
            dialects=config.dialects,
            timeout=config.timeout,
            pace=Pace(config.requests_per_minute, config.max_concurrency),
            budget=Budget(name, config),
            client=Client(config.url),
        )

    def check(self, dialect: Dialect, path: str) -> None:
        if self.dialects and dialect.path not in self.dialects:
            speaks = ", ".join(self.dialects)
            message = (
                f"{self.policy} is an outside model and does not speak {path}, only {speaks}. Fix: use such a client"
            )
            raise ApiError(message, status=404, code="model_not_found")

    def body(self, body: bytes) -> bytes:
        """The request as it goes on: byte for byte, unless another model is to be asked for."""
        return name_model(body, self.model) if self.model else body

    def headers(self, scope: Scope, dialect: Dialect) -> dict[str, str]:
        """A header that came several times goes on as one with several values, which means the same."""
        on: dict[str, str] = {}
        for name, value in scope["headers"]:
            if name in FORWARDED:
                key, text = name.decode(), value.decode("latin-1")
                on[key] = f"{on[key]}, {text}" if key in on else text
        return on | dialect.key_headers(self.key) if self.key else on


def name_model(body: bytes, model: str, *, always: bool = True) -> bytes:
    """A request that asks for a certain model, `always` or where it names none."""
    try:
        fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return body  # whoever answers says what is wrong with it
    if not always and bytes(fields.get("model", b"null")) != b"null":
        return body
    return msgspec.json.encode(fields | {"model": msgspec.Raw(msgspec.json.encode(model))})
