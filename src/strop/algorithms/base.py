"""The seam between algorithms and the learner: neither knows the other."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from types import ModuleType
from typing import Any

from msgspec import Struct, structs

from strop.config import DECLARED, AlgorithmConfig, Config, LearnerConfig, PolicyConfig, Setting, section, walk
from strop.config import settings as common_settings
from strop.errors import ConfigError
from strop.trajectory import Batch

Tensor = Any
"""A torch tensor, known here only by its methods: this room runs without torch."""


@dataclass(frozen=True)
class View:
    """The entries of one piece as tensors, given to `loss`; columns as in `strop.trajectory.Entries`.

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


class Algorithm(ABC):
    """What a learner asks of an algorithm. `needs` says which columns `score` fills: proximal, ref, value. Where it
    compares `within_groups`, a group whose members all got the same teaches nothing."""

    needs: frozenset[str] = frozenset()
    within_groups: bool = True

    @abstractmethod
    def credit(self, batch: Batch) -> dict[str, float]:
        """Fill advantage, ret and weight of the batch's entries and return metrics.

        Every normaliser is folded into weight over the whole batch here, so that neither packing nor the number of
        ranks can change a result. Weight stays 0 where an entry is not trainable or its rollout is dropped.
        """

    @abstractmethod
    def loss(
        self, logp: Tensor, entropy: Tensor, value: Tensor | None, entries: View
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """One loss per entry, and per-entry metrics that the learner averages by weight under the names given.

        `logp` and `entropy` are the policy's now, `value` the critic's now (None without a critic); gradients flow
        through all three. Use methods of the tensors only: `(logp - entries.proximal).exp()`.
        """

    def resume(self, metrics: Mapping[str, float]) -> None:  # noqa: B027 - most algorithms remember nothing
        """Take up what the last committed step's metrics say, where an algorithm carries something across steps."""


def make(config: AlgorithmConfig, learner: LearnerConfig, policy: PolicyConfig | None = None) -> Algorithm:
    """The algorithm called `config.name`: its file has a Struct `Settings` and a function `make`. A `horizon` that is
    not set is the most tokens that the policy may sample in one turn of training."""
    chosen = settings(config)
    if getattr(chosen, "horizon", 0) is None:
        chosen = structs.replace(chosen, horizon=(policy or PolicyConfig()).train.max_tokens)
    algorithm = _file(config.name).make(config.rewards, chosen, learner)
    assert isinstance(algorithm, Algorithm)
    return algorithm


def settings(config: AlgorithmConfig) -> Struct:
    """The algorithm's own settings, checked. Raises `ConfigError`."""
    return section(config.settings, _file(config.name).Settings, "algorithm.settings.")


def every_setting(config: Config) -> Iterator[Setting]:
    """All settings of a run, the algorithm's own behind the others."""
    yield from common_settings(config)
    yield from walk(settings(config.algorithm), "algorithm.settings.")


def own_settings() -> Iterator[Setting]:
    """The settings of every algorithm, with their defaults; those of one name come once for each that has it."""
    for name in names():
        yield from walk(settings(AlgorithmConfig(name=name)), "algorithm.settings.")


DECLARED.append(own_settings)


def names() -> list[str]:
    """Every algorithm there is."""
    return [name for name in _files() if _is_algorithm(import_module(f"strop.algorithms.{name}"))]


def _file(name: str) -> ModuleType:
    """The algorithm's module. The other files of this folder are parts that algorithms share."""
    if name in _files() and _is_algorithm(file := import_module(f"strop.algorithms.{name}")):
        return file
    raise ConfigError(f"there is no algorithm {name!r}: algorithm.name is one of {', '.join(names())}")


def _files() -> list[str]:
    return [found.name for found in iter_modules([str(Path(__file__).parent)])]


def _is_algorithm(file: ModuleType) -> bool:
    return hasattr(file, "Settings") and hasattr(file, "make")
