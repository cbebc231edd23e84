"""Metrics for other programs, beside metrics.jsonl: TensorBoard, Weights & Biases, MLflow.

    run ──write──▶ Writers ──a queue and a thread each──▶ TensorBoard: RUN/tensorboard
                                                          Wandb:       its server, or RUN/wandb with WANDB_MODE=offline
                                                          Mlflow:      MLFLOW_TRACKING_URI, or RUN/mlruns

Names, steps and values are those of metrics.jsonl. A library is imported only where it is asked for; one that is
missing, or that cannot begin, is an error before the run starts. What fails later is a note: the points wait and are
tried again with the next ones.

The store is the truth, and a resumed run goes on without doubled points: TensorBoard is told to forget what it had and
gets everything anew; a server of W&B or MLflow keeps the run it has and gets what it lacks. W&B offline knows no
earlier part: each has the whole story so far, so that the newest is the one to send.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from importlib import import_module
from pathlib import Path
from types import ModuleType

import msgspec

from strop.algorithms import every_setting
from strop.config import Config
from strop.errors import ConfigError
from strop.files import write_whole
from strop.imports import one_line, to_install
from strop.monitor.trackers import Begin, Mlflow, Point, TensorBoard, Tracker, Wandb

KINDS: dict[str, Callable[[Begin], Tracker]] = {"tensorboard": TensorBoard, "wandb": Wandb, "mlflow": Mlflow}
PATIENCE = 30.0
"""Seconds that points still on their way get when a run ends."""


def check(names: Iterable[str]) -> None:
    """Raise `ConfigError` if a library is not there."""
    for name in names:
        _library(name)


def _library(name: str) -> ModuleType:
    try:
        return import_module(name)
    except ImportError as error:
        raise ConfigError(
            f"monitor.writers names {name}, which cannot be imported ({one_line(error)}): "
            f"{to_install(name)}, or leave it out"
        ) from None


class Writers:
    """All that a configuration asks for; none cost nothing."""

    def __init__(self, posts: Sequence[Post]) -> None:
        self._posts = posts

    @classmethod
    async def open(cls, stack: AsyncExitStack, config: Config, folder: Path, note: Callable[[str], None]) -> Writers:
        """Have every writer begin, or go on with what it began before; they end with `stack`."""
        posts: list[Post] = []
        for name in dict.fromkeys(config.monitor.writers):
            try:
                writer = await asyncio.to_thread(_begin, name, config, folder)
            except Exception as error:
                raise ConfigError(
                    f"{name} could not begin: {one_line(error)}. Fix: correct that, or leave it out of monitor.writers"
                ) from error
            posts.append(post := Post(name, writer, note))
            stack.push_async_exit(post.end)
            note(f"metrics also go to {name}: {writer.where}")
        return cls(posts)

    def write_past(self, points: Sequence[Point]) -> None:
        for post in self._posts:
            post.put(lambda tracker: tracker.write_past(points))

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        for post in self._posts:
            post.put(lambda tracker: tracker.write(step, metrics))


def _begin(name: str, config: Config, folder: Path) -> Tracker:
    """Its earlier name, if it has one, is kept in monitor.json."""
    file = folder / "monitor.json"
    ids: dict[str, str] = msgspec.json.decode(file.read_bytes()) if file.exists() else {}
    settings = {setting.key: setting.value for setting in every_setting(config) if setting.key != "algorithm.settings"}
    begin = Begin(
        library=_library(name),
        project=config.monitor.project,
        name=config.monitor.name or folder.absolute().name,
        folder=folder.absolute(),
        settings=settings,
        id=ids.get(name),
    )
    writer = KINDS[name](begin)
    if writer.id is not None:
        write_whole(file, msgspec.json.encode(ids | {name: writer.id}))
    return writer


class Post:
    """A writer with a queue and a thread of its own: a server that answers slowly holds nobody up."""

    def __init__(self, name: str, writer: Tracker, note: Callable[[str], None]) -> None:
        self._name, self._writer, self._note = name, writer, note
        self._loop = asyncio.get_running_loop()
        self._queue: queue.SimpleQueue[Callable[[Tracker], None] | None] = queue.SimpleQueue()
        self._left: list[Callable[[Tracker], None]] = []
        self._thread = threading.Thread(target=self._serve, name=f"strop-{name}", daemon=True)
        self._thread.start()

    def put(self, deed: Callable[[Tracker], None]) -> None:
        self._queue.put(deed)

    def _serve(self) -> None:
        told = False
        while (deed := self._queue.get()) is not None:
            self._left.append(deed)
            try:
                while self._left:
                    self._left[0](self._writer)
                    del self._left[0]
            except Exception as error:
                if not told:
                    self._say(
                        f"{self._name} took no metrics ({one_line(error)}): they are tried again, and the run goes on"
                    )
                told = True

    def _say(self, text: str) -> None:
        self._loop.call_soon_threadsafe(self._note, text)

    async def end(self, kind: type[BaseException] | None, *_: object) -> None:
        """Deliver what is left, for a while, and close."""
        self._queue.put(None)
        closing = threading.Thread(target=self._close, args=(kind is not None,), daemon=True)
        closing.start()
        await asyncio.to_thread(closing.join, PATIENCE)
        if closing.is_alive() or self._left:
            self._note(f"{self._name} did not get every point; metrics.jsonl has them all")

    def _close(self, failed: bool) -> None:
        self._thread.join()
        try:
            self._writer.close(failed=failed)
        except Exception as error:
            self._say(f"{self._name} could not be closed: {one_line(error)}")
