"""Opponents from the past: a policy that answers with checkpoints of another one, or of an earlier run (self-play).

    [policies.right]
    past = { of = "left", size = 4, sample = "recency" }

The pool of `left` is the newest of this run's checkpoints that were due (`loop.checkpoint_every`), and until there are
enough of them the model it began with. It follows from the steps alone: a resumed run has the same one. The pool of a
run's folder is that run's newest checkpoints, copied when this run begins. All members of a group of rollouts meet the
same version; which one, is drawn by weights that fall as 1, 1/2, 1/3, ... from the newest, or from the one against whom
least was won. What was won is in the metrics, `past/<policy>/<version>/reward`.

Left out: rollouts that go on while weights change (loop.staleness), in which a group would meet several versions.
Versions that are whole models cost a process and a copy of the model each, and only the embedded engine serves them;
adapters cost next to nothing.
"""

from __future__ import annotations

import json
import math
import shutil
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import Struct
from msgspec.structs import replace

from strop.algorithms.rewards import select_last_rewards
from strop.config import Config, LoraConfig, PastConfig, find_policy, resolve_policies, trained_policies
from strop.engines.base import Engine
from strop.engines.registry import engine_class, engine_name
from strop.errors import ConfigError, DamagedCheckpoint
from strop.files import private_folder, sync_folder
from strop.gateway.past_versions import PastVersions, PoolMember
from strop.learner.process import PolicyClient
from strop.models import adapter_config
from strop.models.checksums import SHARDS, SUMS, verify, write_sums
from strop.run.folder import RunFolder, find_parts, list_parts, list_versions
from strop.trajectory import Sample
from strop.types import Step, parse_version, version
from strop.weights.checkpoints import CheckpointTransfer
from strop.weights.publisher import Publisher

if TYPE_CHECKING:
    from strop.run.state import Run

KEPT = "past"
"""The folder of a run with copies of an earlier run's checkpoints, by policy and version."""


# -- before anything starts --------------------------------------------------------------------------------------------


class PoolSource(Struct, frozen=True):
    """Where a pool's versions come from: `config` is that of the policy they are versions of, and `checkpoints` are
    those of an earlier run, by version, oldest first."""

    config: Config
    checkpoints: dict[str, Path] = {}


def find_pool_source(name: str, policies: Mapping[str, Config], model: Path) -> PoolSource | None:
    """What the pool of a policy, whose model is in the folder `model`, is made of, if it has one. Raises `ConfigError`
    where that is nothing, or cannot be served."""
    own = policies[name]
    past, kind = own.policy.past, engine_class(own.engine)
    if not past.of or not own.loop.steps:  # in evaluations it is the model itself that answers
        return None
    if past.of in policies:
        if (trained := policies[past.of].policy.model) != own.policy.model:
            raise ConfigError(
                f"policies.{name}.past.of is {past.of!r}, and their models differ ({own.policy.model}, {trained}). "
                "Fix: give both the same model"
            )
        source = PoolSource(policies[past.of])
    else:
        checkpoints = find_checkpoints(name, past, kept=Path(own.folder) / KEPT / name)
        lora = read_lora(name, checkpoints, model)
        source = PoolSource(replace(own, learner=replace(own.learner, lora=lora)), checkpoints)
    rank = source.config.learner.lora.rank
    if not kind.shares_weights and not (rank and kind.serves_adapters(own.engine)):
        what = "adapters" if rank else "whole models"
        raise ConfigError(
            f"policies.{name}.past.of is {past.of!r}, whose versions are {what}, and {engine_name(own.engine)} serves "
            "none beside its model as it is set up here. Fix: set engine.name=embedded, or train adapters "
            "(learner.lora.rank) with vLLM and engine.vllm.servers=1"
        )
    return source


def find_checkpoints(name: str, past: PastConfig, kept: Path) -> dict[str, Path]:
    """The pool that an earlier run's folder is, oldest first: what was `kept` of it when this run began."""
    if kept.is_dir():
        return {one.name: one for one in sorted(kept.iterdir(), key=lambda one: parse_version(one.name))}
    if not RunFolder.is_run(past.of):
        raise ConfigError(
            f"policies.{name}.past.of is {past.of!r}, which is neither a policy nor the folder of a run. Fix: name a "
            "policy that is trained, or a run"
        )
    found: dict[str, Path] = {}
    for number, place in list_versions(Path(past.of).expanduser()).items():
        parts = list_parts(place)
        if parts and name not in parts:
            raise ConfigError(
                f"policies.{name}.past.of is {past.of!r}, whose checkpoints have parts of {', '.join(parts)} and none "
                f"of {name}. Fix: call the policy like the one whose versions it answers with"
            )
        found[number] = place / name if parts else place
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
        lora, what = LoraConfig(), "a whole model of another shape"
        try:
            if (place / adapter_config.FILE).is_file():
                base, lora = adapter_config.read_adapter(place)
                same, what = base.resolve() == model.resolve(), f"an adapter on {base}"
            else:
                same = read_shape(place) == read_shape(model)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"policies.{name}.past: {place} cannot be read ({error}). Fix: delete that checkpoint, or name another "
                "run"
            ) from None
        if not same:
            raise ConfigError(
                f"policies.{name}.past: {place} is {what}, and the policy's model is {model}. Fix: give "
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


def read_shape(folder: Path) -> dict[str, object]:
    """What a model's weights depend on, from its config.json: its kind, and all that is counted."""
    about: dict[str, object] = json.loads((folder / "config.json").read_text())
    return {name: value for name, value in about.items() if isinstance(value, int) or name == "architectures"}


def keep_copies(name: str, source: PoolSource, folder: Path) -> PoolSource:
    """The same with an earlier run's checkpoints copied into the folder of this one: that run may go on, or be deleted.
    They are there all or not at all."""
    place = folder / KEPT / name
    if source.checkpoints and not place.is_dir():
        fresh = place.with_name(f".{name}.new")
        shutil.rmtree(fresh, ignore_errors=True)
        private_folder(fresh)
        for number, checkpoint in source.checkpoints.items():
            verify(checkpoint)
            shutil.copytree(
                checkpoint, fresh / number, ignore=shutil.ignore_patterns("optimizer.pt", "*.distcp", SHARDS, SUMS)
            )
            write_sums(fresh / number)
        sync_folder(fresh, whole=True)
        fresh.rename(place)
        sync_folder(place.parent)
    return PoolSource(source.config, {number: place / number for number in source.checkpoints})


# -- while it runs -----------------------------------------------------------------------------------------------------


@dataclass
class OpponentPool:
    """A policy's pool while it runs. `processes` lead to the process of each slot, where the embedded engine serves."""

    policy: str
    config: PastConfig
    source: PoolSource
    engine: PastVersions
    processes: Sequence[PolicyClient | None]
    _places: dict[str, Path] = field(default_factory=dict[str, Path])
    _loaded: list[str | None] = field(default_factory=list[str | None])
    _broken: set[str] = field(default_factory=set[str])

    def __post_init__(self) -> None:
        self._loaded = [None for _ in self.engine.slots]
        self._publishers = [
            Publisher(engine, CheckpointTransfer(f"{self.policy}-{n}", self._places.__getitem__, process))
            for n, (engine, process) in enumerate(zip(self.engine.slots, self.processes, strict=True))
        ]

    @property
    def grows(self) -> bool:
        """Whether checkpoints of this run are added to it."""
        return not self.source.checkpoints

    async def refresh(self, run: Run) -> None:
        """Serve the versions that are in the pool by now, each in a slot; those that stay keep theirs."""
        wanted = self.list_members(run)
        self._places |= {name: place for name, place in wanted.items() if place is not None}
        for name, place in [*wanted.items()]:
            if place is not None and name not in self._loaded and not await self._load(run, name, wanted):
                del wanted[name]
        weights = weigh_versions([*wanted], self.config.sample, self.count_won(run.steps))
        self.engine.members = [
            PoolMember(name, self._engine_of(name, place), weights[name]) for name, place in wanted.items()
        ]

    async def _load(self, run: Run, name: str, wanted: Mapping[str, Path | None]) -> bool:
        """Put a version into a slot that nobody needs; False if its checkpoint is damaged."""
        slot = next(n for n, there in enumerate(self._loaded) if there is None or there not in wanted)
        self._loaded[slot] = None  # if it fails, nobody knows what is there
        try:
            await self._publishers[slot].publish(name)
        except DamagedCheckpoint as error:
            if name not in self._broken:
                run.view.note(f"{error}: version {name} is not among the opponents of {self.policy}")
            self._broken.add(name)
            return False
        self._loaded[slot] = name
        return True

    def _engine_of(self, name: str, place: Path | None) -> Engine:
        return self.engine.own if place is None else self.engine.slots[self._loaded.index(name)]

    def list_members(self, run: Run) -> dict[str, Path | None]:
        """The versions in the pool, oldest first, and where they lie; None: the model that the run began with."""
        if not self.grows:
            return dict(self.source.checkpoints)
        found: dict[str, Path | None] = {version(1, 0): None}
        for step in self.list_steps(run):
            found[step.version] = find_parts(run.folder.checkpoint(str(step.checkpoint)), run.policies)[self.config.of]
        return dict([*found.items()][-self.config.size :])

    def list_steps(self, run: Run) -> list[Step]:
        """The steps whose checkpoints are, or were, in the pool and are still there. One that was made because the run
        was stopped is not: a run that was not stopped has none."""
        if not self.grows:
            return []
        due = [step for step in run.steps if step.checkpoint and step.number % run.config.loop.checkpoint_every == 0]
        there = [step for step in due if run.folder.checkpoint(str(step.checkpoint)).is_dir()]
        for step in due[-self.config.size :]:
            if step not in there and step.version not in self._broken:
                self._broken.add(step.version)
                run.view.note(
                    f"{step.checkpoint} is missing: version {step.version} is not among the opponents of {self.policy}"
                )
        return there

    def count_won(self, steps: Sequence[Step]) -> dict[int, float]:
        """What was got against the version of each step, in the mean over all rollouts that met it so far. A step that
        was made again after a resume has a new version, and the same weights or some that are as good."""
        sums, counts = defaultdict[int, float](float), defaultdict[int, float](float)
        for step in steps:
            for key, mean in step.metrics.items():
                if key.startswith(f"past/{self.policy}/") and key.endswith("/reward"):
                    count = step.metrics[key.replace("/reward", "/rollouts")]
                    _, number = parse_version(key.split("/")[2])
                    sums[number] += mean * count
                    counts[number] += count
        return {number: sums[number] / counts[number] for number in sums}


def weigh_versions(names: Sequence[str], sample: str, won: Mapping[int, float]) -> dict[str, float]:
    """How likely each version, given oldest first, is drawn: as 1, 1/2, 1/3, ... from the newest, or from the one
    against whom least was won, by the number of its step; one that nobody has met yet comes before those.

    >>> weigh_versions(["1.0", "1.4", "1.8"], "recency", {})
    {'1.8': 1.0, '1.4': 0.5, '1.0': 0.3333333333333333}
    >>> weigh_versions(["1.0", "1.4", "1.8"], "score", {0: 0.2, 8: 0.9})
    {'1.4': 1.0, '1.0': 0.5, '1.8': 0.3333333333333333}
    """
    order = [*reversed(names)]
    if sample == "score":
        order.sort(key=lambda name: won.get(parse_version(name)[1], -math.inf))
    return {name: 1.0 if sample == "uniform" else 1.0 / rank for rank, name in enumerate(order, 1)}


# -- metrics -----------------------------------------------------------------------------------------------------------


def describe_opponents(config: Config, samples: Sequence[Sample]) -> dict[str, float]:
    """Metrics of a step: by policy and past version, how many rollouts met it, and what those who are trained got in
    them."""
    trained, metrics = trained_policies(config), dict[str, float]()
    for name, own in resolve_policies(config).items():
        if not (past := own.policy.past).of:
            continue
        rival = past.of if past.of in trained else next(iter(trained))
        got: dict[str, list[float]] = defaultdict(list)
        for sample in samples:
            met = next((turn.versions[0][1] for turn in sample.turns if turn.policy == name and turn.versions), None)
            if met is not None and (won := sum_rewards(sample, rival, config)) is not None:
                got[met].append(won)
        for number, values in sorted(got.items()):
            metrics[f"past/{name}/{number}/reward"] = math.fsum(values) / len(values)
            metrics[f"past/{name}/{number}/rollouts"] = float(len(values))
    return metrics


def sum_rewards(sample: Sample, policy: str, config: Config) -> float | None:
    """What a policy got in a rollout, weighted: as a whole, and for its agents and their turns. None: nothing."""
    policies, agents = resolve_policies(config), {turn.id: turn.agent for turn in sample.turns}
    weights = policies[policy].algorithm.rewards
    found = [
        weights[reward.name] * reward.value
        for reward in select_last_rewards(sample.rollout)
        if reward.name in weights
        and ((who := reward.agent or agents.get(reward.turn or "")) is None or find_policy(who, policies) == policy)
    ]
    return math.fsum(found) if found else None
