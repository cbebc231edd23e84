"""What an engine is: it makes tokens from tokens. Text, messages and agents are the gateway's business."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal, TypeVar

import msgspec
from msgspec import Struct

from strop.config import EngineConfig
from strop.engines.direct_line import LineHolder
from strop.engines.receiver import WeightSource
from strop.engines.server_process import HERE, ServerLauncher
from strop.errors import ConfigError, EngineError
from strop.types import Rollout, Sampling

if TYPE_CHECKING:
    from strop.engines.embedded.engine import Link

SettingsT = TypeVar("SettingsT", bound=Struct)


class Chunk(Struct, frozen=True, kw_only=True):
    """Some sampled tokens with their logprobs, all from one version. The last chunk of an answer has `finish`.

    >>> Chunk(ids=[7, 8], logprobs=[-0.1, -0.7], version="1.4").finish is None
    True
    """

    ids: list[int]
    logprobs: list[float]
    version: str
    finish: Literal["stop", "length"] | None = None


class GivenAnswer(Struct, frozen=True, kw_only=True):
    """Tokens that somebody else sampled after a prompt, to be scored at a temperature.

    >>> GivenAnswer(prompt_ids=[1, 5, 2], response_ids=[7, 8]).ids
    [1, 5, 2, 7, 8]
    """

    prompt_ids: list[int]
    response_ids: list[int]
    temperature: float = 1.0

    @property
    def ids(self) -> list[int]:
        return self.prompt_ids + self.response_ids


class EngineSetup(Struct, frozen=True, kw_only=True):
    """What an engine that was chosen by name is made with.

    `model` is the model's folder, and `folder` a place for logs. `renewed`: new versions will come. `link` leads to the
    process that holds the weights, where there is one. `adapters` are the ranks of the policies that are adapters on
    the model, by name, with 0 for one that is the model as it is; none where the one policy is all of its weights.
    `servers` starts its server, where it is one.
    """

    model: Path
    config: EngineConfig
    folder: Path
    context: int | None = None
    renewed: bool = False
    link: Link | None = None
    adapters: dict[str, int] = {}
    servers: ServerLauncher = HERE

    def settings(self, type: type[SettingsT]) -> SettingsT:
        """engine.settings as a struct of the engine's own. Unknown names and wrong values are refused."""
        try:
            return msgspec.convert(self.config.settings, type)
        except msgspec.ValidationError as error:
            raise ConfigError(
                f"engine.settings is not right for {self.config.name}: {error}. Fix: its settings are "
                f"{', '.join(type.__struct_fields__) or 'none'}"
            ) from None


class Engine(ABC):
    """Streams tokens for many requests at once."""

    shares_weights: ClassVar[bool] = False
    """It lives in the process that holds the weights, and uses those."""

    @classmethod
    def make(cls, setup: EngineSetup) -> Engine:
        """The engine of a run, not started yet: for those that can be chosen by name (registry.py)."""
        raise ConfigError(f"{cls.__name__} cannot be chosen by name. Fix: give it a `make`")

    @classmethod
    def choose_transfer(cls, config: EngineConfig) -> Literal["shared", "files", "ipc", "nccl"]:
        """The way by which new weights reach it (weights/base.py)."""
        return "files"

    @classmethod
    def serves_adapters(cls, config: EngineConfig) -> bool:
        """Whether it takes LoRA adapters as they are, those of several policies side by side."""
        return False

    def of_policy(self, policy: str) -> Engine:
        """This engine for one of the policies that it was made with."""
        return self

    def of_rollout(self, rollout: Rollout) -> Engine:
        """This engine for the requests of one rollout."""
        return self

    @property
    @abstractmethod
    def context(self) -> int:
        """The most tokens (prompt and answer together) a sequence may have."""

    @property
    def holds_to_schemas(self) -> bool:
        """Whether it draws what `Sampling.grammar` allows alone. Known once it has started."""
        return False

    @property
    def serving(self) -> bool:
        """Whether a request that is sent now need not wait for something to be started again."""
        return True

    async def start(self) -> None:  # noqa: B027 - many have nothing to start
        """Returns once requests can be answered. Raises `EngineError` with the reason if they never will be."""

    @abstractmethod
    def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, *, stop_ids: Sequence[int]
    ) -> AsyncIterator[Chunk]:
        """Sample until one of `stop_ids` was drawn (it is part of the answer), `max_tokens` or the context is reached.

        Closing the iterator early cancels the work. Raises `ContextOverflow` if the prompt leaves no space for a single
        token, `EngineError` if the engine cannot go on.
        """

    def give_way(self, can_others: Callable[[], bool]) -> None:  # noqa: B027 - few have a server
        """Have requests fail rather than wait for a server that is being started again, while `can_others` says that
        somebody else can answer them."""

    def lend(self, holder: LineHolder) -> None:  # noqa: B027 - few have a server
        """Have others ask its server themselves, where there is one, whenever that is as good as asking here."""

    async def explain(self, error: str, replica: int = 0) -> str:
        """What to say of an answer that broke off in its middle, on a line that was lent."""
        return error

    @classmethod
    def refuse_scoring(cls, temperature: float) -> None:
        """Raises `ConfigError` where it cannot score tokens that were sampled at this temperature."""
        raise ConfigError(f"{cls.__name__} cannot score given tokens. Fix: use engine.name embedded, vllm or sglang")

    async def score(self, answers: Sequence[GivenAnswer]) -> list[list[float]]:
        """The logprob of every response token of each answer, log_softmax(logits / temperature), under the weights that
        are served. Also while it is paused. Raises `EngineError`."""
        raise EngineError(f"{type(self).__name__} cannot score given tokens")

    @abstractmethod
    async def pause(self) -> None:
        """Hold new requests back, without failing them, and return when none is in flight."""

    @abstractmethod
    async def resume(self) -> None: ...

    @abstractmethod
    async def load(self, version: str, weights: WeightSource | None = None) -> None:
        """Serve `version` from now on. An engine that has weights of its own has `weights` deliver them, now and when
        it lost them; one that shares the learner's needs none. Tokens drawn before this returns belong to the version
        before, those of a sequence in flight too. Returns once it is known that the version is served."""

    @abstractmethod
    async def close(self) -> None:
        """Let go of processes and memory."""
