"""What a server serves: its model, and its policies, each of which is that model or an adapter on it.

    load 1.2   ──▶ deliver ──▶ new answers are of 1.2        those that began with 1.1 go on
    load 1.3   waits for the last answer of 1.1, which is unloaded then ──▶ deliver ...

A version of an adapter is a model of its own on the server, loaded while others answer. Of each policy two may be at
work at a time, so that a server can be started with room for all of them. What was loaded and is then not what was sent
is unloaded at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from strop.engines.base import Chunk, Engine, GivenAnswer
from strop.engines.receiver import WeightReceiver, WeightSource
from strop.errors import EngineError, ModelError
from strop.types import Sampling

if TYPE_CHECKING:
    from strop.engines.remote import RemoteEngine


class ServedModel(Struct, frozen=True):
    """What an engine must know of a model, from its folder."""

    folder: Path
    context: int
    vocabulary: int
    dtype: str

    @staticmethod
    def of(folder: Path, context: int | None) -> ServedModel:
        """Sequences may have `context` tokens, or as many as the model takes if those are fewer."""
        try:
            about: dict[str, Any] = json.loads((folder / "config.json").read_text())
            about |= about.get("text_config") or {}
            longest = int(about.get("max_position_embeddings") or context or 0)
            vocabulary = int(about.get("vocab_size") or 0)
        except (OSError, ValueError, TypeError, AttributeError) as error:
            raise ModelError(f"{folder} holds no model in Hugging Face format: {error}") from None
        if not longest or not vocabulary:
            lacks = "vocab_size" if longest else "max_position_embeddings, and policy.context is not set"
            raise ModelError(f"{folder} holds no model that can be served: its config.json has no {lacks}")
        dtype = str(about.get("dtype") or about.get("torch_dtype") or "bfloat16")
        return ServedModel(folder, min(context or longest, longest), vocabulary, dtype)


@dataclass
class ServedVersion:
    """What a policy is served with: by which name the server knows it, or None for the model it was started with, who
    gives it again, which server has it, and how many answers are under way by name."""

    version: str
    source: WeightSource | None = None
    name: str | None = None
    holder: WeightReceiver | None = None
    at_work: Counter[str | None] = field(default_factory=Counter[str | None])
    _ended: asyncio.Event = field(default_factory=asyncio.Event)

    def begin_answer(self) -> tuple[str, str | None]:
        """The version that an answer is of, and its name; `end_answer` is told that name."""
        self.at_work[self.name] += 1
        return self.version, self.name

    def end_answer(self, name: str | None) -> None:
        self.at_work[name] -= 1
        self._ended.set()

    async def load(self, version: str, source: WeightSource, receiver: WeightReceiver) -> None:
        """Be served with `version` from now on. What goes wrong leaves the one before as it is."""
        name = await deliver(version, source, receiver)
        self.at_work.setdefault(self.name, 0)
        self.version, self.source, self.name, self.holder = version, source, name, receiver

    async def restore(self, receiver: WeightReceiver) -> None:
        """Have a server that was started again take the version that was served."""
        if self.source is not None and self.holder is not receiver:
            await self.load(self.version, self.source, receiver)

    async def wait_for_older(self) -> None:
        """Until no adapter but the one that is served has answers under way."""
        while any(count and name not in (None, self.name) for name, count in self.at_work.items()):
            self._ended.clear()
            await self._ended.wait()

    async def retire(self, receiver: WeightReceiver) -> None:
        """Adapters that are no longer served go once their last answer has ended."""
        for name in [name for name, count in self.at_work.items() if not count and name != self.name]:
            del self.at_work[name]
            if name is not None:
                await _unload(name, receiver)


async def deliver(version: str, source: WeightSource, receiver: WeightReceiver) -> str:
    """Have a server take a version; returns what the server calls it."""
    before = set(receiver.adapters)
    try:
        return await source.deliver(version, receiver)
    except BaseException:  # given up in the middle, too
        for name in receiver.adapters - before:
            await _unload(name, receiver)
        raise


async def _unload(name: str, receiver: WeightReceiver) -> None:
    with contextlib.suppress(EngineError):  # a server that is gone has none
        await receiver.unload_adapter(name)


class PolicyEngine(Engine):
    """One of several policies that a server serves."""

    def __init__(self, server: RemoteEngine[Any, Any], policy: str) -> None:
        self._server, self._policy = server, policy

    @property
    def context(self) -> int:
        return self._server.context

    @property
    def holds_to_schemas(self) -> bool:
        return self._server.holds_to_schemas

    @property
    def serving(self) -> bool:
        return self._server.serving

    async def start(self) -> None:
        await self._server.start()

    def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, *, stop_ids: Sequence[int]
    ) -> AsyncGenerator[Chunk]:
        return self._server.generate(prompt_ids, sampling, stop_ids=stop_ids, policy=self._policy)

    def give_way(self, can_others: Callable[[], bool]) -> None:
        self._server.give_way(can_others)

    async def score(self, answers: Sequence[GivenAnswer]) -> list[list[float]]:
        return await self._server.score(answers, policy=self._policy)

    async def pause(self) -> None:
        await self._server.pause()

    async def resume(self) -> None:
        await self._server.resume()

    async def load(self, version: str, weights: WeightSource | None = None) -> None:
        await self._server.load(version, weights, policy=self._policy)

    async def close(self) -> None:
        await self._server.close()
