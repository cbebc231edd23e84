"""Inside the process that holds the weights: learners, and beside them the embedded engine on the same parameters.

    one thread, one loop: while busy, an engine step, then whatever messages have arrived

A verb such as `update` runs between decode steps, never beside one, unless rollouts go on while the learner works
(`LearnerSettings.overlap`): then the engine has a copy of the weights, renewed between two decode steps, and the
learner works in a thread beside it. A checkpoint is written by a thread too, from a copy of its own (snapshot.py).
"""

from __future__ import annotations

import contextlib
import gc
import os
import pickle
import threading
import traceback
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from strop.engines.base import GivenAnswer
from strop.engines.embedded.outbox import Outbox
from strop.errors import LearnerError, StropError
from strop.imports import one_line
from strop.learner import spawn
from strop.learner.heartbeat import Heartbeat
from strop.learner.verbs import LearnerSettings, LearnerVerbs, ProcessVerbs, RankPlace, WeightVerbs
from strop.net.process_group import die_with_parent
from strop.trajectory import Batch, Entries

if TYPE_CHECKING:  # heavy: they are imported once there is a model to load
    from strop.engines.embedded.core import Core
    from strop.learner.compile_ahead import CompileAhead
    from strop.learner.learner import Learner
    from strop.learner.model_copy import ServedCopy
    from strop.learner.ranks import Ranks

LEARNING = frozenset(
    verb.__name__
    for verb in (
        *(LearnerVerbs.find_masks, LearnerVerbs.score, LearnerVerbs.score_answers, LearnerVerbs.update),
        *(LearnerVerbs.begin_save, LearnerVerbs.restore, LearnerVerbs.digest),
    )
)
"""The verbs that take the learner's time, and need nothing of the engine."""
HEAVY = (
    "strop.engines.embedded.core",
    "strop.learner.learner",
    "strop.learner.model_copy",
    "strop.learner.sharded_weights",
)
"""Modules that need torch and transformers."""

WAITING = LearnerVerbs.finish_save.__name__
"""The verb that only waits, for another thread: whatever else is asked goes on meanwhile."""


class LearnerChild(ProcessVerbs):
    """A model, the learners of its policies and its engine, and the connection to whom they work for."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.core: Core | None = None  # none where another engine serves
        self.outbox = Outbox()
        self.copy: ServedCopy | None = None  # none where the engine serves the very model that is trained
        self.aside: ThreadPoolExecutor | None = None
        self.waiting = ThreadPoolExecutor(1, "waiting")
        self.policies: dict[str, HeldPolicy] = {}  # none before `start`
        self._trained: list[LearnerSettings] = []
        self._ranks: Ranks
        self._compiling: CompileAhead | None = None
        self._sending = threading.Lock()
        self.heartbeat = Heartbeat(lambda seconds, where: self.send("beat", seconds, where))

    @property
    def busy(self) -> bool:
        return self.core is not None and self.core.busy

    def run(self) -> None:
        first = self.connection.recv()
        if first[0] == spawn.LOG:
            _write_to(first[1])
            first = self.connection.recv()
        self.handle(first)
        while True:  # also where it could not start: whoever asked reads why, rather than that it is gone
            # Waiting costs nothing when idle; when busy, only what has already arrived is looked at.
            while self.connection.poll(0 if self.busy else None):
                self.handle(self.connection.recv())
            if self.core is not None and self.core.busy:
                with self.heartbeat.work(), self.copy.stream() if self.copy else contextlib.nullcontext():
                    chunks = self.core.step()
                if due := self.outbox.take(chunks):
                    self.send("chunks", due)

    def send(self, *message: Any) -> None:
        with self._sending:
            self.connection.send(message)

    def handle(self, message: tuple[Any, ...]) -> None:
        match message:
            case ("generate", id, policy, prompt_ids, sampling, stop_ids):
                assert self.core is not None
                try:
                    self.core.add(id, prompt_ids, sampling, stop_ids, policy)
                except StropError as error:
                    self.send("chunks", [(id, error)])
            case ("cancel", id):
                assert self.core is not None
                self.core.cancel(id)
                self.outbox.forget(id)
            case ("call", id, policy, verb):
                pickled = self.connection.recv_bytes()
                if verb == WAITING:
                    self.waiting.submit(self.call, id, policy, verb, pickled)
                elif self.aside is not None and verb in LEARNING:
                    self.aside.submit(self.call, id, policy, verb, pickled)
                else:
                    self.call(id, policy, verb, pickled)
            case _:
                raise AssertionError(f"unknown message: {message[0]}")

    def call(self, id: int, policy: str | None, verb: str, pickled: bytes) -> None:
        try:
            with self.heartbeat.work(by_others=verb == WAITING):
                result = getattr(self._find_owner(policy, verb), verb)(*pickle.loads(pickled))
            self.send("result", id, result)
        except StropError as error:
            self.send("error", id, error)
        except Exception as error:
            with contextlib.suppress(OSError):  # the log may be on a disk that is full
                traceback.print_exc()
            self.send("error", id, LearnerError(f"the learner could not {verb}: {one_line(error)}"))

    def _find_owner(self, policy: str | None, verb: str) -> ProcessVerbs | LearnerVerbs | WeightVerbs:
        """Who does a verb."""
        if policy is None:
            assert hasattr(ProcessVerbs, verb), verb
            return self
        held = self.policies[policy]
        assert hasattr(LearnerVerbs, verb) or hasattr(WeightVerbs, verb), verb
        return held.weights if hasattr(WeightVerbs, verb) else held

    def compile_ahead(self) -> bool:
        from strop.learner.compile_ahead import CompileAhead, KernelsAsked

        if not self._trained or not self._ranks.alone:
            return False
        first = self._trained[0]
        scores = bool(self.policies[first.name].learner.algorithm.needs)
        self._compiling = CompileAhead()
        return self._compiling.start(KernelsAsked(str(first.folder), first.learner, scores))

    def stop_compiling(self) -> None:
        if self._compiling is not None:
            self._compiling.stop()
            self._compiling = None

    def start(self, settings: list[LearnerSettings], place: RankPlace) -> int:
        import torch

        from strop.learner.model import place as place_learner
        from strop.learner.ranks import Ranks

        self._trained = [one for one in settings if one.train]
        first = settings[0]
        engine, train = first.engine, any(one.train for one in settings)
        torch.set_num_threads(engine.threads or max(1, (os.cpu_count() or 1) // place.count))
        torch.use_deterministic_algorithms(engine.deterministic)
        device, _ = place_learner(first.learner)
        patience = max(one.learner.collective_timeout for one in settings)
        self._ranks = Ranks(place, device, first.learner.sequence_parallel, collective_timeout=patience)
        several = len(settings) > 1 or (train and first.learner.lora.rank)
        model = self._load_adapters(settings) if several else self._load_model(first)
        longest = int(model.config.max_position_embeddings)
        context = min(max(one.policy.context or longest for one in settings), longest)
        if first.overlap and train and first.serve:
            self.aside = ThreadPoolExecutor(1, "learner")
        if first.serve:
            context = self._serve(model, first, context)
        return context

    def _load_model(self, settings: LearnerSettings) -> Any:
        """The model of one policy, all of which is trained, or nothing."""
        from strop.learner.model import load_frozen
        from strop.learner.model_copy import ModelCopy

        learner = _make_learner(settings, self._ranks) if settings.train else None
        model = learner.model if learner is not None else load_frozen(settings.folder, settings.learner)
        if learner is not None and learner.sharded:
            self.copy = learner.whole
        elif settings.overlap and learner is not None and settings.serve:
            self.copy = ModelCopy(model)
            learner.graphs = None  # two threads cannot record at the same time
        self._hold(settings, learner, learner.plain if learner is not None else model)
        self.policies[settings.name].served = model if settings.from_checkpoints else None
        return model

    def _load_adapters(self, settings: list[LearnerSettings]) -> Any:
        """One model, and the adapters of its policies."""
        from strop.learner import lora
        from strop.learner.model import load_frozen
        from strop.learner.model_copy import AdapterCopy

        base = load_frozen(settings[0].folder, settings[0].learner)
        for one in settings:
            learner = _make_learner(one, self._ranks, base) if one.train else None
            self._hold(one, learner, learner.plain if learner is not None else base)
            if one.from_checkpoints:
                self.policies[one.name].served = lora.make_served(base, one.learner.lora)
        if settings[0].serve:
            adapted = {name: held.model for name, held in self.policies.items()}
            self.copy = AdapterCopy(base, adapted, rows=settings[0].engine.max_sequences + 1)
        return base

    def _hold(self, settings: LearnerSettings, learner: Learner | None, plain: Any) -> None:
        from strop.learner.model_weights import FollowingRank, ModelWeights
        from strop.learner.sharded_weights import ShardedWeights

        if learner is not None and learner.sharded:
            weights = ShardedWeights(learner, settings.folder)
        else:
            address = self._ranks.address
            weights = ModelWeights(plain, settings.folder, address) if self._ranks.leads else FollowingRank()
        self.policies[settings.name] = HeldPolicy(self, settings, learner, plain, weights)

    def _serve(self, model: Any, settings: LearnerSettings, context: int) -> int:
        """Put the embedded engine before the model; returns the longest context that it takes."""
        from strop.engines.embedded.core import Core
        from strop.learner.model_copy import AdapterCopy

        adapters = self.copy.adapters if isinstance(self.copy, AdapterCopy) else None
        served = self.copy.model if self.copy is not None else model
        self.core = Core(served, settings.engine, context=context, adapters=adapters, folder=settings.folder)
        return self.core.context


class HeldPolicy(LearnerVerbs):
    """One policy of the process: what trains it, if anything does, the model as others know it, and its weights for
    engines elsewhere. `served` is the model of a policy that takes its weights from checkpoints."""

    def __init__(
        self, child: LearnerChild, settings: LearnerSettings, learner: Learner | None, plain: Any, weights: WeightVerbs
    ) -> None:
        self._child, self._name, self._learner, self.weights = child, settings.name, learner, weights
        self._config, self._plain, self._gives_memory = settings.learner, plain, settings.gives_memory
        self.served: Any = None

    @property
    def learner(self) -> Learner:
        if self._learner is None:
            raise LearnerError("the model is only served here, not trained. Fix: start a run with `strop train`")
        return self._learner

    @property
    def model(self) -> Any:
        """What has weights of the policy's own; None where that is the plain model."""
        return self._learner.model if self._learner is not None else self.served

    def load(self, version: str) -> None:
        assert self._child.core is not None
        if self._child.copy is not None:
            self._child.copy.refresh(self._name)
        self._child.core.load(version, self._name)

    def find_masks(self, batch: Batch) -> list[int]:
        return self.learner.find_masks(batch)

    def score(self, batch: Batch) -> tuple[Entries, dict[str, float]]:
        seconds = self.learner.score(batch)
        return batch.entries, seconds

    def score_answers(self, answers: list[GivenAnswer]) -> list[list[float]]:
        from strop.learner.answers import read_with, score_answers
        from strop.learner.model import choose_way

        model = self.model if self.model is not None else self._plain
        if self._learner is not None and self._learner.whole is not None:
            model = self._learner.whole.model
        read = read_with(model, choose_way(self._config, model.device))
        return score_answers(read, answers, self._config.token_budget)

    def update(self, batch: Batch) -> dict[str, float]:
        self._child.stop_compiling()
        metrics = self.learner.update(batch)
        if self._gives_memory:
            self.learner.release_memory()
        return metrics

    def begin_save(self, folder: Path, meta: dict[str, Any]) -> None:
        self.learner.begin_save(folder, meta)

    def finish_save(self) -> None:
        self.learner.finish_save()

    def restore(self, folder: Path) -> dict[str, Any]:
        return self.learner.restore(folder)

    def take(self, folder: Path) -> None:
        from strop.learner import checkpoint
        from strop.models.checksums import verify

        assert self.served is not None, "what is trained keeps its weights"
        verify(folder)
        own = dict(self.served.named_parameters())
        adapter = {name: tensor for name, tensor in own.items() if ".lora_" in name}
        checkpoint.read(folder, adapter or own, adapter=bool(adapter))

    def digest(self) -> str:
        return self.learner.digest()


def _make_learner(settings: LearnerSettings, ranks: Ranks, base: Any = None) -> Learner:
    from strop.algorithms import make
    from strop.learner.learner import Learner

    algorithm = make(settings.algorithm, settings.learner, settings.policy)
    steps = max(settings.steps, 1)
    return Learner(
        settings.folder,
        settings.learner,
        algorithm,
        seed=settings.seed,
        steps=steps,
        base=base,
        ranks=ranks,
        serves=settings.serve,
    )


def preload() -> None:
    """Import what loading a model needs while the run still gets ready. What is missing is said by `start`."""
    with contextlib.suppress(ImportError):
        for name in HEAVY:
            import_module(name)
    gc.freeze()  # what was imported stays: the collector need not look at it again
    gc.enable()


def _write_to(path: str) -> None:
    """From now on what this process prints goes to a file."""
    out = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.dup2(out, 1)
    os.dup2(out, 2)
    os.close(out)


def serve(fd: int) -> None:
    """The child's life: until its parent goes."""
    die_with_parent()
    child = LearnerChild(Connection(fd))
    child.heartbeat.start()
    preload()
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        child.run()
