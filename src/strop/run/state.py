"""A run as it stands: what it consists of, how far it is, and which rollouts come next."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from msgspec.structs import replace

from strop.algorithms import Algorithm, PromptOptimizer
from strop.config import Config
from strop.engines.base import Engine
from strop.gateway.app import Gateway
from strop.learner.process import PolicyClient
from strop.monitor.console import View
from strop.monitor.metrics import MetricsFile, Scores
from strop.monitor.writers import Writers
from strop.run.data.dataset import DataSet
from strop.run.folder import RunFolder
from strop.run.group_reward import GroupReward
from strop.run.machines import THIS_MACHINE, Machines
from strop.run.opponents import OpponentPool
from strop.run.serve import StoreServer
from strop.run.teacher import Teacher
from strop.runners.pool import Pool
from strop.store.base import Store
from strop.tasks.sampling import evaluation, group, group_number
from strop.trajectory import Sample
from strop.types import Rollout, Step, Task, parse_lineage, version
from strop.weights.publisher import Publisher


@dataclass
class Collected:
    """What a step is made from: ended rollouts with their turns, and those that it replaces."""

    samples: list[Sample]
    dropped: dict[str, str] = field(default_factory=dict[str, str])
    seconds: float = 0.0


@dataclass(kw_only=True)
class PolicyLearner:
    """A policy and what improves it. `config` is the whole configuration that it would have as the only one; `learner`
    leads to the process that holds its weights; `teacher` is who it learns from, if anybody."""

    name: str
    config: Config
    algorithm: Algorithm
    learner: PolicyClient
    teacher: Teacher | None = None


@dataclass(kw_only=True)
class TrainedPolicy(PolicyLearner):
    """One policy of a run, with the engine that samples it; `publisher` brings new weights to that."""

    engine: Engine
    publisher: Publisher


@dataclass(frozen=True)
class CheckpointWriting:
    """A checkpoint that is being written. `named` ends once it is whole and the store knows it."""

    name: str
    named: asyncio.Task[None]


@dataclass
class Run:
    """Everything that a run consists of, open, and where it stands. `policies` are those that are trained; they share
    one version, which rises with every step. `engines` and `learners` are those of frozen ones too.

    `versions` are those that the present weights have been served under: more than one after a replay that made the
    very same weights again. Only rollouts sampled from them may be trained on. `superseded` are steps of earlier
    lineages. `data` is what is learnt from where that is stored already; otherwise agents are at work. `prompts` are
    the texts that agents are given, by name; where an `optimizer` improves them, those that are best so far. `over`:
    there is nothing left to do before all steps are made. `shared` serves the store to runners on other machines;
    `machines` are where processes are that it has started.
    """

    config: Config
    folder: RunFolder
    tasks: list[Task]
    view: View
    store: Store
    policies: Mapping[str, TrainedPolicy]
    engines: Sequence[Engine]
    learners: Sequence[PolicyClient]
    gateway: Gateway
    pool: Pool
    writers: Writers
    shared: StoreServer | None = None
    group_reward: GroupReward | None = None
    data: DataSet | None = None
    opponents: Sequence[OpponentPool] = ()
    optimizer: PromptOptimizer | None = None
    prompts: dict[str, str] = field(default_factory=dict[str, str])
    machines: Machines = THIS_MACHINE
    over: bool = False
    metrics: MetricsFile | None = None
    lineage: int = 1
    step: int = 0
    versions: list[str] = field(default_factory=lambda: [version(1, 0)])
    cursor: int = 0
    steps: list[Step] = field(default_factory=list[Step])
    superseded: list[Step] = field(default_factory=list[Step])
    scores: Scores = field(default_factory=Scores)
    stop: asyncio.Event = field(default_factory=asyncio.Event)
    writing: CheckpointWriting | None = None
    spent: defaultdict[str, float] = field(default_factory=lambda: defaultdict[str, float](float))
    """Seconds by phase since the last step was committed; the next one's metrics have them."""

    @contextmanager
    def timed(self, phase: str) -> Generator[None]:
        began = time.monotonic()
        yield
        self.spent[phase] += time.monotonic() - began

    @property
    def origin(self) -> int:
        """The lineage in which the present weights were first made; groups and evaluations are named after it."""
        return parse_lineage(self.versions[0])

    @property
    def rewards(self) -> set[str]:
        """The names of the rewards that count for any of the policies which learn from rewards, or for prompts."""
        learning = [policy for policy in self.policies.values() if policy.algorithm.needs_rewards]
        improved = {name for policy in learning for name in policy.config.algorithm.rewards}
        return improved | {*(self.optimizer.rewards if self.optimizer is not None else ())}

    @property
    def overlaps(self) -> bool:
        """Whether rollouts go on while the learner works, and may be trained on by later weights than sampled them."""
        return self.config.loop.staleness > 0

    @property
    def finished(self) -> bool:
        return self.over or self.step >= self.config.loop.steps

    @property
    def next_group(self) -> int:
        """Steps take groups in sampling order: the number behind the last one that a step took."""
        return 1 + max(group_number(id) for id in self.steps[-1].rollouts) if self.steps else 0

    def versions_of(self, step: Step) -> list[str]:
        """Every version whose weights are those of `step`, bit for bit, the first one first."""
        same = [old.version for old in self.superseded if old.number == step.number and old.digest == step.digest]
        return sorted({step.version, *(same if step.digest else ())}, key=parse_lineage)

    @property
    def groups_ahead(self) -> int:
        """How many groups, from the next one on, may be sampled with the present weights."""
        return (self.config.loop.max_groups or self.config.loop.groups) + self.groups_of_later_steps

    @property
    def groups_of_later_steps(self) -> int:
        """How many groups behind those of the next step may be sampled already."""
        loop = self.config.loop
        return loop.groups * max(0, min(loop.staleness, loop.steps - self.step - 1))

    def next_rollouts(self, groups: int | None = None, origin: int | None = None, skip: int = 0) -> list[Rollout]:
        """The rollouts of so many groups (default: as many as a step takes) from the next one on, or from behind `skip`
        of them, in sampling order, under the names they have in lineage `origin` (default: the present one). Groups
        that are sampled anew in a later lineage have its number behind their name; where rollouts may lag behind none
        is, nor where they are stored data, which no weights sampled."""
        if self.data is not None:
            return self.data.rollouts(self.next_group)
        origin = 1 if self.overlaps else origin or self.origin
        first, loop = self.next_group + skip, self.config.loop
        tasks = [task for task in self.tasks if task.split == "train"]
        return [
            self.give_prompts(rollout)
            for n in range(first, first + (groups or loop.groups))
            for rollout in group(
                tasks,
                seed=self.config.seed,
                n=n,
                members=loop.group_size,
                retries=self.config.runner.retries.by_cause(),
                suffix=f"~{origin}" if origin > 1 else "",
            )
        ]

    def is_evaluated(self, step: int) -> bool:
        """Whether evaluations are due after a step."""
        loop = self.config.loop
        due = loop.eval_every and step % loop.eval_every == 0
        return step == 0 or step >= loop.steps or self.over or bool(due)

    def evaluations(self, step: int, version: str) -> dict[str, list[Rollout]]:
        """The rollouts of every evaluation of a version, by split, with `-greedy` where they are: not where outside
        models answer, which draw as they like."""
        loop = self.config.loop
        return {
            f"{split}-greedy" if greedy else split: [
                self.give_prompts(rollout)
                for rollout in evaluation(
                    self.tasks,
                    seed=self.config.seed,
                    version=version,
                    step=step,
                    split=split,
                    greedy=greedy,
                    samples=1 if greedy else loop.eval_samples,
                    retries=self.config.runner.retries.by_cause(),
                )
            ]
            for split in loop.eval_splits
            for greedy in ((False, True) if loop.eval_greedy and self.engines else (False,))
        }

    def give_prompts(self, rollout: Rollout) -> Rollout:
        """The rollout with the texts that its agent is given."""
        return replace(rollout, prompts=self.prompts) if self.prompts else rollout
