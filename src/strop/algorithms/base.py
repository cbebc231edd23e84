"""The seam between algorithms and the learner: neither knows the other."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

from msgspec import Meta

from strop.algorithms.configurable import Configurable
from strop.config import LearnerConfig, PolicyConfig
from strop.config.algorithm import Weight
from strop.trajectory import Batch

Tensor = Any
"""A torch tensor, known here only by its methods: this package runs without torch."""


@dataclass(frozen=True)
class EntryTensors:
    """The entries of one micro-batch as tensors, given to `compute_loss`; columns as in `strop.trajectory.Entries`.

    A turn is never cut, so all its entries are here: an algorithm over sequences groups them by `turn`.
    """

    turn: Tensor
    index: Tensor
    target: Tensor
    behaviour: Tensor
    proximal: Tensor
    ref: Tensor
    value: Tensor
    advantage: Tensor
    ret: Tensor
    weight: Tensor
    temperature: Tensor
    rollout: Tensor
    agent: Tensor
    group: Tensor


@dataclass(frozen=True)
class TeacherSource:
    """Who teaches: the name of a policy of the run, or `self` for the policy's own present weights; and `prompt`, which
    only the teacher sees, in the system message."""

    policy: str
    prompt: str = ""


class Improver(Configurable, ABC):
    """What `algorithm.name` may name: an `Algorithm`, which improves weights, or a `PromptOptimizer`. The fields of a
    subclass are its settings: `algorithm.settings.NAME` in a TOML file, and keyword arguments of its constructor."""

    improves: ClassVar[Literal["weights", "prompts"]]

    rewards: Annotated[
        dict[str, Weight], Meta(description="weight of each named reward in a rollout's total: algorithm.rewards")
    ] = field(default_factory=lambda: {"reward": 1.0})


class Algorithm(Improver):
    """How rewards become a loss."""

    improves = "weights"

    @property
    def needs(self) -> frozenset[str]:
        """The columns of the entries that the learner fills before credit: any of proximal, ref, value."""
        return frozenset()

    @property
    def teacher_source(self) -> TeacherSource | None:
        """Whose logprobs the entries' `teacher` is filled with before credit; None: it stays NaN."""
        return None

    @property
    def needs_rewards(self) -> bool:
        """Whether a rollout without a reward teaches nothing."""
        return True

    @property
    def compares_groups(self) -> bool:
        """Whether a group whose members all got the same teaches nothing."""
        return True

    def prepare(self, learner: LearnerConfig, policy: PolicyConfig) -> None:
        """Take what the algorithm needs to know of the run's other settings. Called once, before anything else."""

    @abstractmethod
    def assign_credit(self, batch: Batch) -> dict[str, float]:
        """Fill advantage, ret and weight of the batch's entries and return metrics.

        Every normaliser is folded into weight over the whole batch here, so that neither packing nor the number of
        ranks can change a result. Weight stays 0 where an entry is not trainable or its rollout is dropped.
        """

    @abstractmethod
    def compute_loss(
        self, logp: Tensor, entropy: Tensor, value: Tensor | None, entries: EntryTensors
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """One loss per entry, and per-entry metrics that the learner averages by weight under the names given.

        `logp` and `entropy` are the policy's now, `value` the critic's now (None without a critic); gradients flow
        through all three. Use methods of the tensors only: `(logp - entries.proximal).exp()`.
        """

    def resume(self, metrics: Mapping[str, float]) -> None:
        """Take up what the last committed step's metrics say, where an algorithm carries something across steps."""
