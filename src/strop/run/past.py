"""Opponents from the past: a policy that answers with checkpoints of another one, or of an earlier run (self-play).

    [policies.right]
    past = { of = "left", size = 4, sample = "recency" }

The pool of `left` is the newest checkpoints of this run, and until there are enough of them the model it began with;
`loop.checkpoint_every` says how often one is added. It follows from the steps alone: a resumed run has the same one.
The pool of a run's folder is that run's newest checkpoints, and stays as it is. All members of a group of rollouts meet
the same version; which one, is drawn by weights that fall as 1, 1/2, 1/3, ... from the newest, or from the one against
whom least was won. What was won is in the metrics, `past/<policy>/<version>/reward`.

Left out: versions that are whole models cost a process and a copy of the model each, and only the embedded engine
serves them; adapters cost next to nothing.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import Struct
from msgspec.structs import replace

from strop.algorithms.rewards import select_last_rewards
from strop.config import Config, LoraConfig, PastConfig, trained_policies
from strop.engines.base import Engine
from strop.engines.registry import engine_class, engine_name
from strop.errors import ConfigError
from strop.gateway.past_versions import PastVersions, PoolMember
from strop.learner.process import PolicyClient
from strop.run.folder import RunFolder, find_parts, list_versions
from strop.trajectory import Sample
from strop.types import version
from strop.weights.checkpoints import CheckpointTransfer
from strop.weights.publisher import Publisher

if TYPE_CHECKING:
    from strop.run.state import Run


class PoolSource(Struct, frozen=True):
    """Where a pool's versions come from: `config` is that of the policy they are versions of, and `checkpoints` are
    those of an earlier run, by version, oldest first."""

    config: Config
    checkpoints: dict[str, Path] = {}


def find_source(name: str, policies: Mapping[str, Config], model: Path) -> PoolSource | None:
    """What the pool of a policy, whose model is in the folder `model`, is made of, if it has one. Raises `ConfigError`
    where that is nothing, or cannot be served. Asked before anything starts."""
    own = policies[name]
    past = own.policy.past
    if not past.of or not own.loop.steps:  # in evaluations it is the model itself that answers
        return None
    if past.of in policies:
        source = PoolSource(policies[past.of])
    else:
        checkpoints = find_checkpoints(name, past)
        lora = read_lora(name, checkpoints, model)
        source = PoolSource(replace(own, learner=replace(own.learner, lora=lora)), checkpoints)
    if not source.config.learner.lora.rank and not engine_class(own.engine).shares_weights:
        raise ConfigError(
            f"policies.{name}.past.of is {past.of!r}, whose versions are whole models, and {engine_name(own.engine)} "
            "serves one. Fix: set learner.lora.rank of what is trained, or engine.name=embedded"
        )
    return source


def find_checkpoints(name: str, past: PastConfig) -> dict[str, Path]:
    """The pool that an earlier run's folder is, oldest first."""
    place = Path(past.of).expanduser()
    if not RunFolder.is_run(past.of):
        raise ConfigError(
            f"policies.{name}.past.of is {past.of!r}, which is neither a policy nor the folder of a run. Fix: name a "
            "policy that is trained, or a run"
        )
    found = {name: RunFolder.choose_part(checkpoint) for name, checkpoint in list_versions(place).items()}
    if not found:
        raise ConfigError(
            f"policies.{name}.past.of is {past.of!r}, a run without a checkpoint, so that the pool is empty. Fix: name "
            "a run that has one, or a policy that is trained here"
        )
    return dict([*found.items()][-past.size :])


def read_lora(name: str, checkpoints: Mapping[str, Path], model: Path) -> LoraConfig:
    """How the adapters of a pool are made, all alike; rank 0 where its versions are whole models."""
    found: dict[LoraConfig, Path] = {}
    for place in checkpoints.values():
        file = place / "adapter_config.json"
        said = json.loads(file.read_text()) if file.is_file() else None
        lora = LoraConfig()
        if said is not None:
            lora = LoraConfig(rank=said["r"], alpha=int(said["lora_alpha"]), targets=tuple(said["target_modules"]))
        base = Path(said["base_model_name_or_path"]) if said is not None else model
        if base.resolve() != model.resolve():
            raise ConfigError(
                f"policies.{name}.past: {place} is an adapter on {base}, and the policy's model is {model}. Fix: give "
                f"policies.{name}.model the same model"
            )
        found.setdefault(lora, place)
    if len(found) > 1:
        ranks = " and ".join(f"{place.name} has rank {lora.rank}" for lora, place in found.items())
        raise ConfigError(
            f"policies.{name}.past: the checkpoints of the pool are not alike ({ranks}; 0 is a whole model). Fix: name "
            "a run whose learner.lora stayed the same"
        )
    return next(iter(found))


@dataclass
class PastPool:
    """A policy's pool while it runs. `holders` lead to the process of each slot, where the embedded engine serves."""

    policy: str
    config: PastConfig
    source: PoolSource
    engine: PastVersions
    holders: Sequence[PolicyClient | None]
    _places: dict[str, Path] = field(default_factory=dict[str, Path])
    _loaded: list[str | None] = field(default_factory=list[str | None])

    def __post_init__(self) -> None:
        self._loaded = [None for _ in self.engine.slots]
        self._publishers = [
            Publisher(engine, CheckpointTransfer(f"{self.policy}-{n}", self._places.__getitem__, holder))
            for n, (engine, holder) in enumerate(zip(self.engine.slots, self.holders, strict=True))
        ]

    async def refresh(self, run: Run) -> None:
        """Serve the versions that are in the pool by now, each in a slot; those that stay keep theirs."""
        wanted = self.list_members(run)
        self._places |= {name: place for name, place in wanted.items() if place is not None}
        for name, place in wanted.items():
            if place is not None and name not in self._loaded:
                slot = next(n for n, there in enumerate(self._loaded) if there is None or there not in wanted)
                self._loaded[slot] = None  # if it fails, nobody knows what is there
                await self._publishers[slot].publish(name)
                self._loaded[slot] = name
        weights = weigh_versions([*wanted], self.config.sample, self.count_won(run))
        self.engine.members = [
            PoolMember(name, self._engine_of(name, place), weights[name]) for name, place in wanted.items()
        ]

    def _engine_of(self, name: str, place: Path | None) -> Engine:
        return self.engine.own if place is None else self.engine.slots[self._loaded.index(name)]

    def list_members(self, run: Run) -> dict[str, Path | None]:
        """The versions in the pool, oldest first, and where they lie; None: the model that the run began with."""
        if self.source.checkpoints:
            return dict(self.source.checkpoints)
        found: dict[str, Path | None] = {version(1, 0): None}
        for step in run.steps:
            if step.checkpoint and (place := run.folder.checkpoint(step.checkpoint)).is_dir():
                found[step.version] = find_parts(place, run.policies)[self.config.of]
        return dict([*found.items()][-self.config.size :])

    def count_won(self, run: Run) -> dict[str, float]:
        """What was got against each version, in the mean over all rollouts that met it so far."""
        sums, counts = defaultdict[str, float](float), defaultdict[str, float](float)
        for step in run.steps:
            for key, mean in step.metrics.items():
                if key.startswith(f"past/{self.policy}/") and key.endswith("/reward"):
                    name, count = key.split("/")[2], step.metrics[key.replace("/reward", "/rollouts")]
                    sums[name] += mean * count
                    counts[name] += count
        return {name: sums[name] / counts[name] for name in sums}


def weigh_versions(names: Sequence[str], sample: str, won: Mapping[str, float]) -> dict[str, float]:
    """How likely each version, given oldest first, is drawn: as 1, 1/2, 1/3, ... from the newest, or from the one
    against whom least was won; one that nobody has met yet comes before those.

    >>> weigh_versions(["1.0", "1.4", "1.8"], "recency", {})
    {'1.8': 1.0, '1.4': 0.5, '1.0': 0.3333333333333333}
    >>> weigh_versions(["1.0", "1.4", "1.8"], "score", {"1.0": 0.2, "1.8": 0.9})
    {'1.4': 1.0, '1.0': 0.5, '1.8': 0.3333333333333333}
    """
    order = [*reversed(names)]
    if sample == "score":
        order.sort(key=lambda name: won.get(name, -math.inf))
    return {name: 1.0 if sample == "uniform" else 1.0 / rank for rank, name in enumerate(order, 1)}


def describe_past(pools: Sequence[PastPool], samples: Sequence[Sample], config: Config) -> dict[str, float]:
    """Metrics of a step: by pool and version, how many rollouts met it and what those who are trained got in them."""
    trained, metrics = trained_policies(config), dict[str, float]()
    for pool in pools:
        rival = trained.get(pool.config.of) or next(iter(trained.values()))
        got: dict[str, list[float]] = defaultdict(list)
        for sample in samples:
            met = next((turn.versions[0][1] for turn in sample.turns if turn.policy == pool.policy), None)
            if met is not None and (won := sum_rewards(sample, rival)) is not None:
                got[met].append(won)
        for name, values in sorted(got.items()):
            metrics[f"past/{pool.policy}/{name}/reward"] = math.fsum(values) / len(values)
            metrics[f"past/{pool.policy}/{name}/rollouts"] = float(len(values))
    return metrics


def sum_rewards(sample: Sample, config: Config) -> float | None:
    """What a policy got in a rollout, weighted: as a whole, and for its agents and their turns. None: nothing."""
    weights, agents = config.algorithm.rewards, {turn.id: turn.agent for turn in sample.turns}
    found = [
        weights[reward.name] * reward.value
        for reward in select_last_rewards(sample.rollout)
        if reward.name in weights
        and ((who := reward.agent or agents.get(reward.turn or "")) is None or _is_of(who, config))
    ]
    return math.fsum(found) if found else None


def _is_of(agent: str, config: Config) -> bool:
    return any(fnmatchcase(agent, pattern) for pattern in config.policy.agents)
