"""What a run recorded, gone through again: with another reward, or as training. Nothing of the run is changed.

    rescore   stored rollouts ──▶ another reward function ──▶ old totals against new ones
    retrain   checkpoint before step N ──▶ the recorded batches up to N ──▶ metrics and weights against those recorded

A reward function gets (task, answer) as in training, except that what an agent returned is not recorded: `answer` is
the text of the rollout's last turn. With a third parameter `turns` it gets all turns. There is no model to ask, so one
that wants the agent's `llm` is refused.
"""

from __future__ import annotations

import asyncio
import inspect
import tempfile
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from itertools import combinations
from pathlib import Path
from typing import Any, cast

import msgspec
import numpy as np
from msgspec import Struct

from strop import algorithms
from strop.agent.llm import LLM
from strop.algorithms.rewards import total_reward
from strop.config import Config, resolve_policies, trained_policies, weigh_rewards
from strop.engines.embedded.engine import Embedded
from strop.engines.registry import engine_class, engine_name
from strop.errors import AgentError, PlaceError
from strop.imports import resolve as find
from strop.learner.process import LearnerProcess
from strop.learner.verbs import LearnerSettings
from strop.models.names import prepare_folder
from strop.monitor.metrics import metrics_of, plain_name
from strop.monitor.transcripts import list_message_texts
from strop.run.collect import take_last_line
from strop.run.folder import find_parts
from strop.run.learn import learn_all, take_digest
from strop.run.opponents import describe_opponents
from strop.run.state import PolicyLearner
from strop.run.teacher import Teacher, find_teacher, make_renderer
from strop.runners.base import Job, Outcome
from strop.runners.rewards import RewardFunction, compute_outcome_now, load_reward_function
from strop.store.base import Store
from strop.trajectory import Sample
from strop.types import DATA, Mode, Rollout, Step, Turn, version

UNLIKE = ("timing_s/", "perf/")
"""Metrics that are no property of what was learnt."""


# -- another reward ----------------------------------------------------------------------------------------------------


class Scored(Struct, frozen=True, kw_only=True):
    """A rollout's total as it was and as it would be."""

    rollout: str
    group: str
    mode: Mode
    old: float
    new: float


class Rescored(Struct, kw_only=True):
    """`agreement` is Spearman's rank correlation over all rollouts; `pairs` counts pairs of one group that the old
    reward tells apart, `alike` those of them that the new one orders the same way, `reversed` those it turns round (the
    rest it does not tell apart). `failed` has what went wrong, by rollout; `without` counts those that had no total."""

    scored: list[Scored]
    means: dict[str, tuple[int, float, float]]
    agreement: float | None
    pairs: int
    alike: int
    reversed: int
    failed: dict[str, str]
    without: int


async def rescore(store: Store, config: Config, reward: str) -> Rescored:
    """Score every rollout that succeeded with the function that `reward` names."""
    judge, weights = _judge(reward), weigh_rewards(config)
    scored: list[Scored] = []
    failed: dict[str, str] = {}
    named: set[str] = set()
    without, after = 0, None
    while page := await store.list(status="succeeded", after=after):
        for rollout in page:
            outcome = await asyncio.to_thread(_again, rollout, await store.turns(rollout.id), judge)
            old, new = total_reward(rollout, weights), total_reward(_with(rollout, outcome), weights)
            named |= {reward.name for reward in outcome.rewards}
            if outcome.cause:
                failed[rollout.id] = outcome.detail or outcome.cause
            elif old is None or new is None:
                without += 1
            else:
                scored.append(Scored(rollout=rollout.id, group=rollout.group, mode=rollout.mode, old=old, new=new))
        after = page[-1].id
    if not scored:
        raise AgentError(_nothing(reward, failed, without))
    if not named & weights.keys():
        raise AgentError(
            f"reward: {reward} gives {', '.join(sorted(named)) or 'nothing'}, and algorithm.rewards of the run counts "
            f"{', '.join(weights)}. Fix: return one of those"
        )
    return _compared(scored, failed, without)


def _judge(spec: str) -> Callable[[Sequence[Turn]], RewardFunction]:
    """The reward function for a rollout with these turns."""
    judge = load_reward_function(spec)
    if judge is None:
        raise AgentError("reward: no function is named. Fix: write FILE.py:function or package.module:function")
    third = list(inspect.signature(cast("Callable[..., Any]", find(spec, "agent"))).parameters)[2:3]
    if third == ["llm"]:
        raise AgentError(
            f"reward: {spec} asks for `llm`, and no model is served here. Fix: take (task, answer) or turns"
        )
    if third == ["turns"]:
        function = cast("Callable[..., Any]", find(spec, "agent"))
        return lambda turns: lambda task, answer, llm: function(task, answer, turns)
    return lambda turns: judge


def _again(rollout: Rollout, turns: Sequence[Turn], judge: Callable[[Sequence[Turn]], RewardFunction]) -> Outcome:
    nowhere = LLM(base_url="", api_key="", model="", trace_id="", events_url="", rollout=rollout.id, task=rollout.task)
    answer = "\n".join(list_message_texts(turns[-1].answer)) if turns else ""
    return compute_outcome_now(answer, Job(llm=nowhere, seed=rollout.seed, task_file=""), judge(turns))


def _with(rollout: Rollout, outcome: Outcome) -> Rollout:
    """What the function gave in the place of what was given under the same name; other rewards stay."""
    new = {reward.target: reward for reward in [*rollout.rewards, *outcome.rewards]}
    return msgspec.structs.replace(rollout, rewards=tuple(new.values()))


def _nothing(reward: str, failed: dict[str, str], without: int) -> str:
    if failed:
        id, why = next(iter(failed.items()))
        said = f"reward: {reward} failed on all {len(failed)} rollouts; on {id}: {take_last_line(why)}"
        return f"{said}. Fix: correct the function"
    if without:
        return (
            f"reward: none of {without} rollouts has a reward that algorithm.rewards counts, so there is nothing to "
            "compare. Fix: name a run whose agent gave one"
        )
    return "no rollout has succeeded yet, so there is nothing to score. Fix: wait for one, or name another run"


def _compared(scored: list[Scored], failed: dict[str, str], without: int) -> Rescored:
    modes = {mode: [s for s in scored if s.mode == mode] for mode in dict.fromkeys(s.mode for s in scored)}
    groups: dict[str, list[Scored]] = defaultdict(list)
    for one in scored:
        groups[one.group].append(one)
    signs = [
        (a.new - b.new) * (a.old - b.old)
        for members in groups.values()
        for a, b in combinations(members, 2)
        if members[0].mode == "train" and a.old != b.old
    ]
    return Rescored(
        scored=scored,
        means={
            mode: (len(some), float(np.mean([s.old for s in some])), float(np.mean([s.new for s in some])))
            for mode, some in modes.items()
        },
        agreement=spearman([s.old for s in scored], [s.new for s in scored]),
        pairs=len(signs),
        alike=sum(sign > 0 for sign in signs),
        reversed=sum(sign < 0 for sign in signs),
        failed=failed,
        without=without,
    )


def spearman(one: Sequence[float], other: Sequence[float]) -> float | None:
    """Correlation of ranks, equal values sharing theirs; None where one of them is the same everywhere.

    >>> round(spearman([1, 2, 3], [10, 30, 20]), 6), spearman([1, 1], [1, 2])
    (0.5, None)
    """
    first, second = _ranks(one), _ranks(other)
    if np.ptp(first) == 0 or np.ptp(second) == 0:
        return None
    return float(np.corrcoef(first, second)[0, 1])


def _ranks(values: Sequence[float]) -> np.ndarray[Any, Any]:
    _, place, counts = np.unique(np.asarray(values, float), return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts - 1) / 2)[place]


# -- a step of training ------------------------------------------------------------------------------------------------


class Retrained(Struct, kw_only=True):
    """A step made again. `base` is the step whose checkpoint it began from, 0 for the model the run began with.
    `metrics` are those recorded and those now, `digest` the same of the weights, where the run is deterministic."""

    step: int
    base: int
    rollouts: int
    metrics: dict[str, tuple[float | None, float | None]]
    digest: tuple[str, str] | None

    @property
    def differ(self) -> dict[str, tuple[float | None, float | None]]:
        return {name: pair for name, pair in self.metrics.items() if pair[0] != pair[1]}


async def retrain(store: Store, config: Config, number: int, tell: Callable[[str], None]) -> Retrained:
    """Make step `number` again from what is stored, in a learner of its own; its log is thrown away with it."""
    if config.algorithm.improves == "prompts":
        raise PlaceError(
            f"{config.folder} improves prompts: its steps train no weights that could be trained again. Fix: look at "
            f"its versions with `strop prompts {config.folder}`"
        )
    folder, line = Path(config.folder), await store.steps()
    wanted = _wanted(folder, line, number)
    base = _base(folder, line, number)
    async with AsyncExitStack() as stack:
        place = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="strop-replay-")))
        tell("loading the model")
        every = resolve_policies(config)
        policies = {name: await _start(stack, place, name, own) for name, own in trained_policies(config).items()}
        for policy in policies.values():
            policy.teacher = await _start_teacher(stack, place, policy, every)
        if base is not None:
            for name, part in find_parts(folder / "checkpoints" / str(base.checkpoint), policies).items():
                await policies[name].learner.restore(part)
                policies[name].algorithm.resume(metrics_of(base.metrics, name, policies))
        metrics: dict[str, float] = {}
        for step in line[base.number if base else 0 : number]:
            tell(f"replaying step {step.number}, up to {number}")
            samples = [Sample(await store.get(id), await store.turns(id)) for id in step.rollouts]
            versions = _versions(line, step, samples, overlap=config.loop.staleness > 0)
            metrics = (await learn_all(policies, samples, step=step.number, versions=versions)).metrics
            metrics |= describe_opponents(config, samples)
        digest = (wanted.digest, str(await take_digest(policies))) if wanted.digest else None
    names = sorted(name for name in {*wanted.metrics, *metrics} if not plain_name(name).startswith(UNLIKE))
    pairs = {name: (wanted.metrics.get(name), metrics.get(name)) for name in names}
    base_number = base.number if base else 0
    return Retrained(step=number, base=base_number, rollouts=len(wanted.rollouts), metrics=pairs, digest=digest)


async def _start(stack: AsyncExitStack, place: Path, name: str, config: Config) -> PolicyLearner:
    """A policy's learner, with the model that the run began with."""
    model = await asyncio.to_thread(prepare_folder, config.policy)
    process = LearnerProcess(place / f"{name}.log")
    stack.push_async_callback(process.close)
    await process.start(LearnerSettings.of(config, model, name=name, serve=False))
    algorithm = algorithms.make(config.algorithm, config.learner, config.policy)
    return PolicyLearner(name=name, config=config, algorithm=algorithm, learner=process.of(name))


async def _start_teacher(
    stack: AsyncExitStack, place: Path, policy: PolicyLearner, policies: Mapping[str, Config]
) -> Teacher | None:
    """Who taught a policy, with the weights that the run read it with."""
    source, name = policy.algorithm.teacher_source, find_teacher(policy.name, policy.algorithm, policies)
    if source is None or name is None:
        return None
    theirs = policies[name]
    if not engine_class(theirs.engine).shares_weights:
        raise PlaceError(
            f"the teacher {source.policy} was served by {engine_name(theirs.engine)}, and no server is started here. "
            "Fix: replay steps whose teacher the embedded engine served"
        )
    student, model = [await asyncio.to_thread(prepare_folder, one.policy) for one in (policy.config, theirs)]
    ours, reads = make_renderer(policy.config.policy, student), make_renderer(theirs.policy, model)
    learner = policy.learner
    if name != policy.name:
        process = LearnerProcess(place / f"{policy.name}-{name}.log")
        stack.push_async_callback(process.close)
        await process.start(LearnerSettings.of(theirs, model, name=name, serve=False, train=False))
        learner = process.of(name)
    return Teacher.of(source.prompt, ours, reads, Embedded(learner), theirs, model)


def _versions(line: Sequence[Step], step: Step, samples: Sequence[Sample], *, overlap: bool) -> set[str]:
    """The versions that the weights had before a step: where rollouts could not lag behind, all that sampled it.
    Stored data was sampled by none."""
    if overlap:
        return {line[step.number - 2].version if step.number > 1 else version(1, 0)}
    return {name for sample in samples for turn in sample.turns for _, name in turn.versions} - {DATA}


def _wanted(folder: Path, line: Sequence[Step], number: int) -> Step:
    if not line:
        raise PlaceError(f"{folder} has no step yet, so there is nothing to replay. Fix: wait for the first one")
    if not 1 <= number <= len(line):
        raise PlaceError(f"{folder} has no step {number}. Fix: choose one of 1 to {len(line)}")
    return line[number - 1]


def _base(folder: Path, line: Sequence[Step], number: int) -> Step | None:
    """The last step before `number` whose checkpoint is kept; None: the beginning."""
    kept = [s for s in line[: number - 1] if s.checkpoint and (folder / "checkpoints" / s.checkpoint).is_dir()]
    return kept[-1] if kept else None
