"""How an engine with a copy of the weights takes new ones: which tensors they must be, and the end that receives them.

    weights.Publisher ──load(version, source)──▶ Engine           holds requests back
                      ◀──source.deliver(version, receiver)──      now, and again whenever its server was started anew
                      ──hold, load_folder, score ...──▶ WeightReceiver

What is sent, and how, is the affair of weights/; an engine knows of no learner.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Protocol

from msgspec import Struct

from strop.errors import EngineError

PROBED = 32
"""How many tokens a probe has."""


class TensorSpec(Struct, frozen=True):
    """What is known of a tensor without its values.

    >>> TensorSpec("bfloat16", (448, 128)).shape
    (448, 128)
    """

    dtype: str
    shape: tuple[int, ...]


class LogprobProbe(Struct, frozen=True):
    """Some ids and the logprob of each but the first, as the weights of one version have them."""

    ids: list[int]
    logprobs: list[float]

    def distance(self, logprobs: list[float]) -> float:
        """The mean difference to what somebody else found; infinite if it is none.

        >>> LogprobProbe([1, 2, 3], [-1.0, -2.0]).distance([-1.0, -2.5])
        0.25
        """
        far = [abs(ours - theirs) for ours, theirs in zip(self.logprobs, logprobs, strict=True)]
        mean = sum(far) / len(far)
        return mean if mean == mean else float("inf")


def probe_ids(vocabulary: int) -> list[int]:
    """Always the same ones."""
    draw = random.Random(0)
    return [draw.randrange(vocabulary) for _ in range(PROBED)]


class ModelTensors(Struct, frozen=True):
    """The tensors that a model has. `tied`: its output layer is its embedding, and is not a tensor of its own."""

    specs: dict[str, TensorSpec]
    tied: bool

    def refuse_misfits(self, given: Mapping[str, TensorSpec], what: str) -> None:
        """What has other tensors, by name or shape, is refused before any engine sees it.

        >>> model = ModelTensors({"norm.weight": TensorSpec("float32", (64,))}, tied=False)
        >>> model.refuse_misfits({"norm.weight": TensorSpec("bfloat16", (64,))}, "these weights")
        """
        for name, spec in given.items():
            own = self.specs.get(name)
            if own is None and not self._optional(name):
                raise WeightsRefused(f"{what} do not fit the model: it has no tensor {name}; nothing was changed")
            if own is not None and own.shape != spec.shape:
                raise WeightsRefused(
                    f"{what} do not fit the model: {name} has shape {list(spec.shape)} and should have "
                    f"{list(own.shape)}; nothing was changed"
                )
        if missing := next((name for name in self.specs if name not in given and not self._optional(name)), None):
            raise WeightsRefused(f"{what} are not whole: {missing} is missing; nothing was changed")

    def _optional(self, name: str) -> bool:
        return name.endswith(".inv_freq") or (self.tied and name == "lm_head.weight")


class MeetingPlace(Struct, frozen=True):
    """Where an engine's workers and the sender of a broadcast meet."""

    address: str
    port: int
    num_workers: int


class WeightReceiver(ABC):
    """The end of one server that takes weights. A server that was started again has another one.

    `model` is what the server calls the model that it was started with, and `tensors` are those that the model has.
    `limit` is how far the logprobs of a probe may be from what the server finds, in the mean; `hint` says why they may
    be further off, to be put after a sentence. `adapters` are those that it has, as the server calls them.
    """

    def __init__(self, name: str, model: str, tensors: ModelTensors, *, limit: float, hint: str = "") -> None:
        self.name, self.model, self.tensors = name, model, tensors
        self.limit, self.hint = limit, hint
        self.adapters: set[str] = set()

    @property
    def asleep(self) -> bool:
        """Whether it cannot answer at the moment, or its memory is somebody else's, until it is held."""
        return False

    @abstractmethod
    def hold(self) -> AbstractAsyncContextManager[None]:
        """Inside it the server draws no tokens; after it nothing is used that other weights computed. Weights that were
        refused inside leave it as if nothing had been."""

    @abstractmethod
    async def score(self, ids: Sequence[int], *, model: str) -> list[float]:
        """The logprob of every id but the first, given those before it, by what the server calls `model`, or
        by an adapter that was loaded by that name."""

    @abstractmethod
    async def load_folder(self, folder: Path, version: str) -> None:
        """Take the weights of a folder in Hugging Face format in place of the present ones."""

    async def load_adapter(self, name: str, folder: Path) -> str:
        """Serve an adapter (PEFT format), as a model of its own. Returns what the server calls it, which begins with
        `name` and is never the same twice: one that was loaded by this name before stays."""
        raise self._refuse("LoRA adapters")

    async def unload_adapter(self, name: str) -> None:
        """Let go of what the server calls `name`."""
        raise self._refuse("LoRA adapters")

    async def num_workers(self) -> int:
        raise self._refuse("weights from another GPU")

    async def begin_transfer(self, place: MeetingPlace | None) -> None:
        """Get ready for weights from GPU to GPU: broadcast by the sender at `place`, or, without one, handles of memory
        on the same GPU."""
        raise self._refuse("weights from another GPU")

    def fuse(self, names: Sequence[str]) -> dict[str, tuple[str, ...]] | None:
        """Which of the model's tensors each of the server's own is made of, one after the other by rows, where those
        can be copied over as they are. None: it takes the model's, and makes its own of them."""
        return None

    async def start_update(self, *, fused: bool = False) -> None:
        """`fused`: what comes are the server's own tensors."""
        raise self._refuse("weights from another GPU")

    async def update(self, specs: Mapping[str, TensorSpec], handles: bytes | None = None) -> None:
        """Take these tensors, in their order: through `handles`, or as they are broadcast."""
        raise self._refuse("weights from another GPU")

    async def finish_update(self) -> None:
        raise self._refuse("weights from another GPU")

    def _refuse(self, what: str) -> WeightsRefused:
        return WeightsRefused(f"{self.name} does not take {what} here. Fix: have weights sent as files")


class WeightSource(Protocol):
    """Gives engines their weights: `weights.Publisher`."""

    async def deliver(self, version: str, receiver: WeightReceiver) -> str:
        """Send a version, and make sure that the server has it; returns what the server calls it, or the name that an
        adapter was loaded by. What can be refused is, as `WeightsRefused`, before the server changes anything; after
        any other error nobody knows what it holds."""
        ...


class WeightsRefused(EngineError):
    """New weights that no engine was told of: the version before is still served."""
