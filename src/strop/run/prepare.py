"""A run before anything of it starts: what is wrong with its settings is said here.

    prepare_run        algorithms, teachers and policies, made of settings that go together
    prepare_policies   each policy's model in its folder, and its chat template
    group_by_process   which policies one process holds, or the same ranks

What is prepared is opened by runtime.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from strop import algorithms
from strop.algorithms import Algorithm, PromptOptimizer
from strop.algorithms.offline import Offline
from strop.config import (
    Config,
    PolicyConfig,
    answers_outside,
    default_policy,
    refuse_frozen_adapters,
    resolve_policies,
    serves_no_agent,
    trained_policies,
)
from strop.engines.registry import engine_class, engine_name
from strop.errors import ConfigError
from strop.gateway.template import Renderer
from strop.models.names import prepare_folder
from strop.monitor.writers import check
from strop.net.secrets import hide_keys
from strop.run.opponents import PoolSource, find_pool_source, keep_copies
from strop.run.prompts.improve import make_prompt_optimizer
from strop.run.settings import check_agents
from strop.run.teacher import find_teachers, make_renderer, refuse_unfit


@dataclass(frozen=True)
class PreparedRun:
    """A run before anything of it starts: its algorithms by policy, who improves its prompts, the teachers of its
    policies by name, and the policies."""

    made: Mapping[str, Algorithm]
    optimizer: PromptOptimizer | None
    teachers: Mapping[str, str]
    policies: Sequence[PreparedPolicy]


async def prepare_run(config: Config) -> PreparedRun:
    """What is wrong with the settings is said here, before anything starts."""
    made = {name: make_algorithm(own) for name, own in trained_policies(config).items()}
    check(config.monitor.writers)
    check_agents(config)
    refuse_frozen_adapters(config)
    optimizer, teachers = make_prompt_optimizer(config), find_teachers(made, resolve_policies(config))
    prepared: list[PreparedPolicy] = []
    if not answers_outside(config):
        prepared = find_opponents(await prepare_policies(config, teachers=teachers.values()))
    renderers, models = ({one.name: getattr(one, part) for one in prepared} for part in ("renderer", "model"))
    refuse_unfit(made, teachers, renderers, models)
    return PreparedRun(made, optimizer, teachers, prepared)


@dataclass(frozen=True, kw_only=True)
class PreparedPolicy:
    """A policy before anything of it runs: its configuration as if it were the only one, the folder with its model, its
    chat template, and where past versions come from that answer in its place. `is_slot`: it is itself one of these."""

    name: str
    config: Config
    model: Path
    renderer: Renderer
    opponents: PoolSource | None = None
    is_slot: bool = False

    @property
    def rank(self) -> int:
        """How large its adapter is; 0: it is the model as it is, or all of its weights are trained."""
        return self.config.learner.lora.rank if self.is_slot or not self.config.policy.frozen else 0


async def prepare_policies(
    config: Config,
    *,
    find_model: Callable[[PolicyConfig], Path] = prepare_folder,
    teachers: Collection[str] = (),
) -> list[PreparedPolicy]:
    """Every policy of a configuration that answers agents or is among the `teachers`, with `find_model` for the folder
    of its model."""
    hide_keys(config)
    found: list[PreparedPolicy] = []
    for name, own in resolve_policies(config).items():
        policy = own.policy
        if config.policies and serves_no_agent(own) and name not in teachers:
            continue
        model = await asyncio.to_thread(find_model, policy)
        found.append(PreparedPolicy(name=name, config=own, model=model, renderer=make_renderer(policy, model)))
    return found


def find_opponents(prepared: Sequence[PreparedPolicy]) -> list[PreparedPolicy]:
    """The same with where their past versions come from, which answer in training. Raises `ConfigError` where there are
    none, or nobody could serve them."""
    policies = {one.name: one.config for one in prepared}
    return [replace(one, opponents=find_pool_source(one.name, policies, one.model)) for one in prepared]


def keep_opponents(policy: PreparedPolicy, folder: Path) -> PreparedPolicy:
    """The policy with an earlier run's checkpoints, where those are its opponents, copied into this run's folder."""
    if policy.opponents is None:
        return policy
    return replace(policy, opponents=keep_copies(policy.name, policy.opponents, folder))


def prepare_slots(policy: PreparedPolicy) -> list[PreparedPolicy]:
    """The places for past versions of a policy, served as what they are versions of is."""
    if policy.opponents is None:
        return []
    source = policy.opponents.config
    own = msgspec.structs.replace(source, policy=msgspec.structs.replace(source.policy, frozen=True))
    return [
        replace(policy, name=f"{policy.name}.{n}", config=own, opponents=None, is_slot=True)
        for n in range(1, (len(policy.opponents.checkpoints) or policy.config.policy.past.size) + 1)
    ]


def default_config(config: Config) -> Config:
    """The configuration of the policy that answers agents that no other one does."""
    every = resolve_policies(config)
    policies = {name: own for name, own in every.items() if not serves_no_agent(own)} or every
    return policies[default_policy(policies)]


def group_by_process(prepared: Sequence[PreparedPolicy], *, train: bool) -> list[list[PreparedPolicy]]:
    """Policies whose weights the same process holds, or the same ranks do, stand together."""
    if not train:
        return [[one] for one in prepared]
    return group_by_base([*prepared, *(slot for one in prepared for slot in prepare_slots(one))])


def count_ranks(group: Sequence[PreparedPolicy], *, train: bool) -> int:
    """How many processes hold the weights of these policies: in training as many as there are ranks; none where nothing
    is trained and another engine serves."""
    trains = train and not all(one.config.policy.frozen for one in group)
    if not trains and not engine_class(group[0].config.engine).shares_weights:
        return 0
    return max(one.config.learner.ranks for one in group) if train else 1


def group_by_base(prepared: Sequence[PreparedPolicy]) -> list[list[PreparedPolicy]]:
    """Policies that are one model, which is in memory once, stand together: each an adapter on it, or the model as it
    is."""
    groups: list[list[PreparedPolicy]] = []
    for one in prepared:
        found = next((group for group in groups if shares_base(one, group[0])), None)
        groups.append([one]) if found is None else found.append(one)
    return groups


def shares_base(one: PreparedPolicy, other: PreparedPolicy) -> bool:
    ours, theirs = one.config, other.config
    return (
        one.model == other.model
        and all(each.rank or (each.config.policy.frozen and not each.is_slot) for each in (one, other))
        and (ours.engine, ours.learner.device, ours.learner.dtype)
        == (theirs.engine, theirs.learner.device, theirs.learner.dtype)
    )


def find_adapters(group: Sequence[PreparedPolicy]) -> dict[str, int]:
    """How large each policy's adapter is, 0 of one that is the model as it is, where one engine serves all of them;
    otherwise none, and each has an engine of its own."""
    config, ranks = group[0].config.engine, {one.name: one.rank for one in group}
    return ranks if engine_class(config).serves_adapters(config) and any(ranks.values()) else {}


def make_algorithm(config: Config) -> Algorithm:
    """A policy's algorithm. Raises `ConfigError` where other settings of the policy contradict it."""
    algorithm = algorithms.make(config.algorithm, config.learner, config.policy)
    refuse_contradictions(config, algorithm)
    offline = isinstance(algorithm, Offline)
    if config.loop.steps and not offline and not config.policy.train.sampling().exact:
        raise ConfigError(
            "policy.train draws greedily, or with cuts or penalties: such turns cannot be trained on. Fix: set its "
            "temperature above 0 and leave the rest as it is by default, or set loop.steps=0"
        )
    return algorithm


def refuse_contradictions(config: Config, algorithm: Algorithm) -> None:
    """Settings that each make sense, but not together."""
    loop, engine = config.loop, config.engine
    if loop.staleness and engine.deterministic:
        raise ConfigError(
            f"loop.staleness is {loop.staleness}, so that what is sampled depends on what happens to be done first, "
            "and engine.deterministic is true. Fix: set one of them back"
        )
    if loop.staleness and engine_name(engine) == "vllm" and engine.vllm.sleep:
        raise ConfigError(
            f"loop.staleness is {loop.staleness}, so that the engine works while the learner does, and "
            "engine.vllm.sleep gives its memory away meanwhile. Fix: set one of them back"
        )
    if loop.max_groups is not None and ("value" in algorithm.needs or config.algorithm.settings.get("kl") == "reward"):
        raise ConfigError(
            "loop.max_groups replaces groups that teach nothing, which cannot be told before a critic or a reference "
            "has read them. Fix: leave it out, or use another algorithm or kl = loss"
        )
    ranks, split = config.learner.ranks, config.learner.sequence_parallel
    if ranks % split:
        raise ConfigError(
            f"learner.sequence_parallel is {split}, and learner.ranks, which is {ranks}, is no multiple of it. Fix: "
            f"set learner.ranks={max(1, ranks // split) * split}"
        )
    if ranks > 1 and not config.learner.lora.rank and engine_class(engine).choose_transfer(engine) == "ipc":
        raise ConfigError(
            f"learner.ranks is {ranks}, so that the model lies nowhere as a whole, and engine.vllm.weights is ipc. "
            "Fix: set engine.vllm.weights to files or nccl"
        )
    if loop.max_groups is not None and loop.max_groups < loop.groups:
        raise ConfigError(
            f"loop.max_groups is {loop.max_groups}, less than loop.groups, which is {loop.groups}. Fix: raise it"
        )
