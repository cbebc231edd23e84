"""The learner's verbs: what the process that holds the weights can be asked to do, with types.

    ProcessVerbs                of the whole process (child.py)
    LearnerVerbs, WeightVerbs   of one policy in it, where the weights are (child.py, model_weights.py)
    LearnerClient               the same verbs as coroutines, for everybody else (client.py)

A process holds one model. That is one policy's, or several policies' that are LoRA adapters on it.

Nothing here imports torch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

from msgspec import Struct

from strop.config import MAIN, AlgorithmConfig, Config, EngineConfig, LearnerConfig, PolicyConfig
from strop.engines.base import GivenAnswer
from strop.engines.receiver import LogprobProbe, TensorSpec
from strop.trajectory import Batch, Entries


class RankPlace(Struct, frozen=True, kw_only=True):
    """Which of the processes that train one model together this one is, and where they meet: an `init_method` of
    torch.distributed's, such as file:///tmp/ranks or tcp://10.0.0.1:29500. `gpu` is the one it computes on, of those
    that it may use. `address` is the one by which other machines reach this one, where there are others.

    >>> RankPlace(index=1, count=4, rendezvous="file:///tmp/ranks").count
    4
    """

    index: int = 0
    count: int = 1
    rendezvous: str = ""
    gpu: int = 0
    address: str = ""


class LearnerSettings(Struct, frozen=True, kw_only=True):
    """What a process is started with for one policy.

    `folder` holds the model. `serve`: the embedded engine serves it there. `train`: it is trained; a model that is only
    served has no learner, and its weights stay as they are, or are taken `from_checkpoints`, by `take`.
    `overlap`: rollouts go on while the learner works, so that the engine needs a copy of the weights. `steps` is how
    many a whole run has.
    """

    name: str = MAIN
    folder: Path
    policy: PolicyConfig
    learner: LearnerConfig
    algorithm: AlgorithmConfig
    engine: EngineConfig
    seed: int
    steps: int
    overlap: bool
    serve: bool
    train: bool
    from_checkpoints: bool = False

    @property
    def gives_memory(self) -> bool:
        """Whether an engine's server has the GPU's memory while this process does not train."""
        return self.engine.name == "vllm" and self.engine.vllm.sleep

    @staticmethod
    def of(
        config: Config,
        folder: Path,
        *,
        name: str = MAIN,
        serve: bool = True,
        train: bool = True,
        from_checkpoints: bool = False,
    ) -> LearnerSettings:
        """Those of a policy, from the configuration that it would have as the only one."""
        return LearnerSettings(
            name=name,
            folder=folder,
            policy=config.policy,
            learner=config.learner,
            algorithm=config.algorithm,
            engine=config.engine,
            seed=config.seed,
            steps=config.loop.steps,
            overlap=config.loop.staleness > 0,
            serve=serve,
            train=train,
            from_checkpoints=from_checkpoints,
        )


class IpcHandles(Struct, frozen=True):
    """`specs` are the tensors of a model. `sent` are those that there are handles of, in their order: the model's, or
    what an engine makes of them. `handles` is a pickled list of {GPU: how to open it}."""

    specs: dict[str, TensorSpec]
    sent: dict[str, TensorSpec]
    handles: bytes


class WeightVerbs(ABC):
    """How weights leave the process that holds them."""

    @abstractmethod
    def specs(self) -> dict[str, TensorSpec]:
        """Every parameter's type and shape."""

    @abstractmethod
    def probe(self) -> LogprobProbe:
        """What an engine must find once it has these weights."""

    @abstractmethod
    def write(self, folder: Path) -> None:
        """Write the weights as a model's folder in Hugging Face format, which is there whole or not at all."""

    @abstractmethod
    def write_adapter(self, folder: Path) -> None:
        """Write the adapter that is trained as a folder in PEFT's format, which is there whole or not at all."""

    @abstractmethod
    def refuse_broken(self) -> None:
        """Raises `WeightsRefused` if a value is not a finite number."""

    @abstractmethod
    def export_handles(self, fused: dict[str, tuple[str, ...]] | None) -> IpcHandles:
        """Handles of the tensors in GPU memory, which stay good while the tensors stay where they are. `fused` names
        tensors that others are part of, one after the other by rows: those are put together in memory first."""

    @abstractmethod
    def listen(self) -> tuple[str, int]:
        """The address and port at which an engine's workers are to meet this process."""

    @abstractmethod
    def meet(self, port: int, num_workers: int) -> None:
        """Wait for them there."""

    @abstractmethod
    def broadcast(self, port: int) -> None:
        """Send every parameter, in the order of `specs`, to those who were met at `port`."""


class ProcessVerbs(ABC):
    """What is asked of the process as a whole."""

    @abstractmethod
    def start(self, settings: list[LearnerSettings], place: RankPlace) -> int:
        """Load the model of these policies; returns the longest context. All ranks are started at once: each waits for
        the others."""

    @abstractmethod
    def compile_ahead(self) -> bool:
        """Begin to compile what the first update will need, beside everything else; returns whether there is any."""


class LearnerVerbs(ABC):
    """What the process does for one policy beside drawing tokens and giving weights away."""

    @abstractmethod
    def load(self, version: str) -> None:
        """The embedded engine serves the present weights, and calls them `version`."""

    @abstractmethod
    def find_masks(self, batch: Batch) -> list[int]:
        """What grammars allowed of the batch's tokens, for `score` and `update`; returns the turns, counted from 0, of
        which it cannot be said."""

    @abstractmethod
    def score(self, batch: Batch) -> tuple[Entries, dict[str, float]]:
        """The batch's entries with what the algorithm needs of the model, and how long that took."""

    @abstractmethod
    def score_answers(self, answers: list[GivenAnswer]) -> list[list[float]]:
        """The logprob of every response token under the policy's present weights, whether it is trained or not."""

    @abstractmethod
    def update(self, batch: Batch) -> dict[str, float]:
        """Train on the batch and return metrics."""

    @abstractmethod
    def begin_save(self, folder: Path, meta: dict[str, Any]) -> None:
        """Take a copy of what a checkpoint holds, and write its folder, whole or not at all, beside what follows."""

    @abstractmethod
    def finish_save(self) -> None:
        """Returns once what was begun is whole, and on the disk. Raises what kept it from being written."""

    @abstractmethod
    def restore(self, folder: Path) -> dict[str, Any]:
        """Take weights and optimizer state from a checkpoint, and return the meta it was saved with."""

    @abstractmethod
    def take(self, folder: Path) -> None:
        """Take the weights of a checkpoint, and nothing else of it: of a policy that is not trained."""

    @abstractmethod
    def digest(self) -> str:
        """A fingerprint of every parameter of the policy, bit for bit."""
