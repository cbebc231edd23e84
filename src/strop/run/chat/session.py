"""The session a chat takes place in: a model behind its gateway, a store, and what is said there."""

from __future__ import annotations

import asyncio
import itertools
import tempfile
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, get_args

from msgspec import Struct
from msgspec.structs import replace

from strop.config import Config, PolicyConfig
from strop.engines.base import Engine
from strop.errors import PlaceError
from strop.gateway.app import Gateway
from strop.models.names import prepare_folder
from strop.net.server import serve
from strop.run.prepare import prepare_policies
from strop.run.runtime import open_pool
from strop.run.serve import hold_folder, load_model
from strop.store import open_store
from strop.store.base import Store
from strop.types import Event, Rollout, Status, Task, Turn, stable_hash

T = TypeVar("T")


class TextDelta(Struct, frozen=True):
    """Some more of an answer, or of what the model thinks before it."""

    text: str
    thought: bool = False


class ToolCallStarted(Struct, frozen=True):
    """A tool call that is about to be run."""

    name: str
    arguments: str


class ToolCallDone(Struct, frozen=True):
    """A tool call that was run."""

    name: str
    arguments: str
    result: str


class TurnRecorded(Struct, frozen=True):
    """A turn of an agent, and those of its messages that no turn before it had."""

    turn: Turn
    messages: list[dict[str, Any]]


Shown = TextDelta | ToolCallStarted | ToolCallDone | TurnRecorded | Event
Show = Callable[[Shown], None]


class ChatAnswer(Struct, frozen=True, kw_only=True):
    """What came of a question: its turns, one for every model call, and the tool calls between them. `open` says that
    the last turn's calls were run and the model was not asked again: `rounds` were over."""

    rollout: str
    turns: list[Turn]
    calls: list[ToolCallDone] = []
    open: bool = False

    @property
    def text(self) -> str:
        return self.turns[-1].answer["content"] if self.turns else ""

    @property
    def branches(self) -> list[str]:
        """Why turns did not extend the session exactly; none if all of them did."""
        return [turn.branch for turn in self.turns if turn.branch]


class ChatSession(Struct, frozen=True, kw_only=True):
    """What a chat needs, open. Each of `watches` raises when a process that everything depends on dies."""

    config: Config
    store: Store
    gateway: Gateway
    url: str
    watches: Sequence[Callable[[], Awaitable[None]]]
    numbers: Iterator[int]

    @property
    def engine(self) -> Engine:
        return self.gateway.routes.find("main", None).engine

    def rollout(self, task: Task) -> Rollout:
        """A new one, counted on from those that the folder has already."""
        id = f"{task.id}-{(number := next(self.numbers)):06d}"
        seed = stable_hash(self.config.seed, task.id, number)
        prompts = {name: prompt.text for name, prompt in self.config.prompts.items()}
        made = Rollout(id=id, group=id, member=0, task=task, mode="eval", seed=seed, retries={}, created=time.time())
        return replace(made, prompts=prompts)

    async def alive(self, work: Coroutine[Any, Any, T]) -> T:
        """Do it, unless what answers dies meanwhile: that is raised then."""
        doing = asyncio.ensure_future(work)
        dead = [asyncio.ensure_future(watch()) for watch in self.watches]
        try:
            done, _ = await asyncio.wait({doing, *dead}, return_when=asyncio.FIRST_COMPLETED)
            for task in done - {doing}:
                task.result()
            return await doing
        finally:
            for task in (doing, *dead):
                task.cancel()
            await asyncio.gather(doing, *dead, return_exceptions=True)


@asynccontextmanager
async def open_chat(config: Config, folder: Path, *, agent: bool = False) -> AsyncGenerator[ChatSession]:
    """Load the policy of `config` behind a gateway of its own, with its records in `folder`; with `agent`, also run the
    configured agents on what is queued there."""
    if (folder / "config.json").exists():
        raise PlaceError(
            f"{folder} holds a run or a model, and a chat would write into it. Fix: choose another --folder"
        )
    async with AsyncExitStack() as stack:
        prepared = await prepare_policies(config, find_model=partial(_find_model, stack))
        stack.enter_context(hold_folder(folder, alone=True))
        store = await open_store(folder)
        stack.push_async_callback(store.close)
        left = [rollout.id for status in ("queued", "running") for rollout in await store.list(status=status)]
        await store.cancel(left, detail="the chat that it belonged to is over")
        gateway, learners = await load_model(stack, config, prepared, store, folder)
        server = await serve(gateway, log=folder / "gateway.log")
        stack.push_async_callback(server.close)
        watches: list[Callable[[], Awaitable[None]]] = [learner.watch for learner in learners]
        if agent:
            runner = replace(config.runner, workers=1, lease=1.0)  # often looked at: Ctrl-C ends the rollout at once
            pool = open_pool(config, runner, store, gateway, server.url, folder / "agents.log")
            stack.push_async_callback(pool.close)
            await pool.start()
            pool.work()
            watches.append(pool.watch)
        stats = await store.stats()
        numbers = itertools.count(1 + sum(stats.get(status, 0) for status in get_args(Status)))
        yield ChatSession(config=config, store=store, gateway=gateway, url=server.url, watches=watches, numbers=numbers)


def _find_model(stack: AsyncExitStack, policy: PolicyConfig) -> Path:
    """The folder to load. A checkpoint of an adapter is merged into a whole model for as long as it is served."""
    if not (Path(policy.model) / "adapter_config.json").is_file():
        return prepare_folder(policy)
    from strop.learner.export import export

    place = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="strop-chat-"))) / "model"
    export(policy.model, place)  # with the template that it was trained with
    return place
