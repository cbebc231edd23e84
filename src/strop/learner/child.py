"""Inside the process that holds the weights: the learner, and beside it the embedded engine on the same parameters.

    one thread, one loop: while busy, an engine step, then whatever messages have arrived

A verb such as `update` runs between decode steps, never beside one, unless rollouts go on while the learner works
(`LearnerSettings.overlap`): then the engine has a copy of the weights, renewed between two decode steps, and the
learner works in a thread beside it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import threading
import traceback
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from strop.engines.embedded.outbox import Outbox
from strop.engines.receiver import LogprobProbe, TensorSpec
from strop.errors import LearnerError, StropError
from strop.imports import one_line
from strop.learner.verbs import IpcHandles, LearnerSettings, LearnerVerbs
from strop.trajectory import Batch, Entries

if TYPE_CHECKING:  # heavy: they are imported once there is a model to load
    from strop.engines.embedded.core import Core
    from strop.learner.learner import Learner
    from strop.learner.model_copy import ModelCopy
    from strop.learner.model_weights import ModelWeights

LEARNING = frozenset(
    verb.__name__
    for verb in (LearnerVerbs.score, LearnerVerbs.update, LearnerVerbs.save, LearnerVerbs.restore, LearnerVerbs.digest)
)
"""The verbs that take the learner's time, and need nothing of the engine."""


class LearnerChild(LearnerVerbs):
    """The model, its learner and its engine, and the connection to whom they work for."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.core: Core | None = None  # none where another engine serves
        self.outbox = Outbox()
        self.copy: ModelCopy | None = None
        self.aside: ThreadPoolExecutor | None = None
        self._learner: Learner | None = None  # none where nothing is trained
        self._weights: ModelWeights | None = None  # none before `start`
        self.started = False
        self._sending = threading.Lock()

    @property
    def busy(self) -> bool:
        return self.core is not None and self.core.busy

    def run(self) -> None:
        self.handle(self.connection.recv())
        while self.started:
            # Waiting costs nothing when idle; when busy, only what has already arrived is looked at.
            while self.connection.poll(0 if self.busy else None):
                self.handle(self.connection.recv())
            if self.core is not None and self.core.busy:
                with self.copy.stream() if self.copy else contextlib.nullcontext():
                    chunks = self.core.step()
                if due := self.outbox.take(chunks):
                    self.send("chunks", due)

    def send(self, *message: Any) -> None:
        with self._sending:
            self.connection.send(message)

    def handle(self, message: tuple[Any, ...]) -> None:
        match message:
            case ("generate", id, prompt_ids, sampling, stop_ids):
                assert self.core is not None
                try:
                    self.core.add(id, prompt_ids, sampling, stop_ids)
                except StropError as error:
                    self.send("chunks", [(id, error)])
            case ("cancel", id):
                assert self.core is not None
                self.core.cancel(id)
                self.outbox.forget(id)
            case ("call", id, verb, args):
                if self.aside is not None and verb in LEARNING:
                    self.aside.submit(self.call, id, verb, args)
                else:
                    self.call(id, verb, args)
            case _:
                raise AssertionError(f"unknown message: {message[0]}")

    def call(self, id: int, verb: str, args: tuple[Any, ...]) -> None:
        try:
            assert hasattr(LearnerVerbs, verb), verb
            self.send("result", id, getattr(self, verb)(*args))
        except StropError as error:
            self.send("error", id, error)
        except Exception as error:
            with contextlib.suppress(OSError):  # the log may be on a disk that is full
                traceback.print_exc()
            self.send("error", id, LearnerError(f"the learner could not {verb}: {one_line(error)}"))

    # -- the verbs -----------------------------------------------------------------------------------------------------

    @property
    def learner(self) -> Learner:
        if self._learner is None:
            raise LearnerError("the model is only served here, not trained: start a run with `strop train`")
        return self._learner

    @property
    def weights(self) -> ModelWeights:
        assert self._weights is not None, "there is no model before `start`"
        return self._weights

    def start(self, settings: LearnerSettings) -> int:
        import torch

        from strop.algorithms import make
        from strop.engines.embedded.core import Core
        from strop.learner.learner import Learner
        from strop.learner.model import frozen
        from strop.learner.model_copy import ModelCopy
        from strop.learner.model_weights import ModelWeights

        folder, engine = settings.folder, settings.engine
        torch.set_num_threads(engine.threads or os.cpu_count() or 1)
        torch.use_deterministic_algorithms(engine.deterministic)
        if settings.train:
            algorithm = make(settings.algorithm, settings.learner, settings.policy)
            steps = max(settings.steps, 1)
            self._learner = Learner(folder, settings.learner, algorithm, seed=settings.seed, steps=steps)
            model, plain = self._learner.model, self._learner.plain
        else:
            model = plain = frozen(folder, settings.learner)
        longest = int(model.config.max_position_embeddings)
        context = min(settings.policy.context or longest, longest)
        self._weights = ModelWeights(plain, folder)
        if settings.serve:
            if settings.overlap and settings.train:
                self.copy, self.aside = ModelCopy(model), ThreadPoolExecutor(1, "learner")
            self.core = Core(self.copy.model if self.copy else model, engine, context=context)
            context = self.core.context
        self.started = True
        return context

    def load(self, version: str) -> None:
        assert self.core is not None
        if self.copy is not None:
            self.copy.refresh()
        self.core.load(version)

    def score(self, batch: Batch) -> tuple[Entries, dict[str, float]]:
        seconds = self.learner.score(batch)
        return batch.entries, seconds

    def update(self, batch: Batch) -> dict[str, float]:
        return self.learner.update(batch)

    def save(self, folder: Path, meta: dict[str, Any]) -> None:
        self.learner.save(folder, meta)

    def restore(self, folder: Path) -> dict[str, Any]:
        return self.learner.restore(folder)

    def digest(self) -> str:
        return self.learner.digest()

    def specs(self) -> dict[str, TensorSpec]:
        return self.weights.specs()

    def probe(self) -> LogprobProbe:
        return self.weights.probe()

    def write(self, folder: Path) -> None:
        self.weights.write(folder)

    def refuse_broken(self) -> None:
        self.weights.refuse_broken()

    def export_handles(self) -> IpcHandles:
        return self.weights.export_handles()

    def release_handles(self) -> None:
        self.weights.release_handles()

    def listen(self) -> tuple[str, int]:
        return self.weights.listen()

    def meet(self, port: int, num_workers: int) -> None:
        self.weights.meet(port, num_workers)

    def broadcast(self, port: int) -> None:
        self.weights.broadcast(port)


def die_with_parent() -> None:
    """Ask Linux to kill this process when its parent ends, however it ends; elsewhere the closed connection does it."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # 1: PR_SET_PDEATHSIG


def serve(fd: int) -> None:
    """The child's life: until its parent goes."""
    die_with_parent()
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        LearnerChild(Connection(fd)).run()
