"""A run with every room open, and the rollouts that belong to it.

Together with run.py, the loop, and lineage.py, the way back, this is what knows every room; the rooms know none of it.
"""

from __future__ import annotations

import asyncio
import os
import shlex
import time
from collections import defaultdict
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

import msgspec

from strop import algorithms
from strop.algorithms import Algorithm
from strop.config import Config, EngineConfig
from strop.engines.base import Engine
from strop.engines.embedded.engine import Embedded
from strop.engines.sglang.engine import Sglang
from strop.engines.vllm.engine import Vllm
from strop.errors import ConfigError, PlaceError, TaskError
from strop.gateway.app import Gateway
from strop.gateway.limits import Limits
from strop.gateway.replicas import Replicas
from strop.gateway.route import PolicyRoute, Routes
from strop.gateway.template import Renderer
from strop.learner.process import LearnerProcess
from strop.learner.verbs import LearnerSettings
from strop.models.names import folder_of
from strop.monitor.console import View
from strop.monitor.metrics import MetricsFile, Scores
from strop.monitor.writers import Writers, check
from strop.net.addresses import AddressApp
from strop.net.secrets import hide_keys
from strop.net.server import serve
from strop.run.folder import RunFolder
from strop.run.group_reward import Relative
from strop.run.group_reward import load as load_relative
from strop.runners.agents import is_python, near_miss
from strop.runners.pool import Pool
from strop.store import open_store
from strop.store.base import Store
from strop.tasks.load import load
from strop.tasks.sampling import evaluation, group, group_number, hold_out
from strop.trajectory import Sample
from strop.types import Policy, Rollout, Sampling, Step, Task, lineage_of, version
from strop.weights.base import Transfer
from strop.weights.files import FolderTransfer
from strop.weights.ipc import IpcTransfer
from strop.weights.nccl import NcclTransfer
from strop.weights.publisher import Publisher
from strop.weights.shared import SharedMemory

POLICY = "main"
WEIGHTS = "weights"
"""The folder of a run through which new weights reach engines that read them from files."""


@dataclass
class Collected:
    """What a step is made from: ended rollouts with their turns, and those that it replaces."""

    samples: list[Sample]
    dropped: dict[str, str] = field(default_factory=dict[str, str])
    seconds: float = 0.0


@dataclass
class Run:
    """Every room, open, and where the run stands.

    `names` are the versions the present weights have been served under: more than one after a replay that made the very
    same weights again. Only rollouts sampled from them may be trained on. `left_behind` are steps of earlier lineages.
    """

    config: Config
    folder: RunFolder
    tasks: list[Task]
    view: View
    store: Store
    learner: LearnerProcess
    engine: Engine
    publisher: Publisher
    algorithm: Algorithm
    gateway: Gateway
    pool: Pool
    writers: Writers
    relative: Relative | None = None
    metrics: MetricsFile | None = None
    lineage: int = 1
    step: int = 0
    names: list[str] = field(default_factory=lambda: [version(1, 0)])
    cursor: int = 0
    steps: list[Step] = field(default_factory=list[Step])
    left_behind: list[Step] = field(default_factory=list[Step])
    scores: Scores = field(default_factory=Scores)
    stop: asyncio.Event = field(default_factory=asyncio.Event)
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
        return lineage_of(self.names[0])

    @property
    def overlaps(self) -> bool:
        """Whether rollouts go on while the learner works, and may be trained on by later weights than sampled them."""
        return self.config.loop.staleness > 0

    @property
    def finished(self) -> bool:
        return self.step >= self.config.loop.steps

    @property
    def next_group(self) -> int:
        """Steps take groups in sampling order: the number behind the last one that a step took."""
        return 1 + max(group_number(id) for id in self.steps[-1].rollouts) if self.steps else 0

    def names_of(self, step: Step) -> list[str]:
        """Every version whose weights are those of `step`, bit for bit, the first one first."""
        same = [old.version for old in self.left_behind if old.number == step.number and old.digest == step.digest]
        return sorted({step.version, *(same if step.digest else ())}, key=lineage_of)

    @property
    def groups_ahead(self) -> int:
        """How many groups, from the next one on, may be sampled with the present weights."""
        return (self.config.loop.groups_most or self.config.loop.groups) + self.groups_of_later_steps

    @property
    def groups_of_later_steps(self) -> int:
        """How many groups behind those of the next step may be sampled already."""
        loop = self.config.loop
        return loop.groups * max(0, min(loop.staleness, loop.steps - self.step - 1))

    def next_rollouts(self, groups: int | None = None, origin: int | None = None) -> list[Rollout]:
        """The rollouts of so many groups from the next one on (default: as many as a step takes), in sampling order,
        under the names they have in lineage `origin` (default: the present one). Groups that are sampled anew in a
        later lineage have its number behind their name; where rollouts may lag behind none is."""
        origin = 1 if self.overlaps else origin or self.origin
        first, loop = self.next_group, self.config.loop
        tasks = [task for task in self.tasks if task.split == "train"]
        return [
            rollout
            for n in range(first, first + (groups or loop.groups))
            for rollout in group(
                tasks,
                seed=self.config.seed,
                n=n,
                members=loop.members,
                retries=self.config.runner.retries.by_cause(),
                suffix=f"~{origin}" if origin > 1 else "",
            )
        ]

    def evaluations(self, step: int, version: str) -> dict[str, list[Rollout]]:
        """The rollouts of every evaluation of a version, by split, with `-greedy` where they are."""
        loop = self.config.loop
        return {
            f"{split}-greedy" if greedy else split: evaluation(
                self.tasks,
                seed=self.config.seed,
                version=version,
                step=step,
                split=split,
                greedy=greedy,
                samples=1 if greedy else loop.eval_samples,
                retries=self.config.runner.retries.by_cause(),
            )
            for split in loop.eval_splits
            for greedy in ((False, True) if loop.eval_greedy else (False,))
        }


@asynccontextmanager
async def open_run(config: Config, view: View, *, resume: bool) -> AsyncGenerator[Run]:
    """Start every room in the order data walks through them; whatever happens, close them in reverse."""
    hide_keys(config)
    algorithm = algorithms.make(config.algorithm, config.learner, config.policy)
    refuse_contradictions(config, algorithm)
    check(config.monitor.writers)
    if config.loop.steps and not config.policy.train.sampling().exact:
        raise ConfigError(
            "policy.train draws greedily, or with cuts or penalties: such turns cannot be trained on. Set its "
            "temperature above 0 and leave the rest as it is by default, or set loop.steps=0"
        )
    model = await asyncio.to_thread(folder_of, config.policy)
    policy = config.policy
    renderer = Renderer.from_folder(model, variables=policy.chat_template_kwargs, tools=policy.tools)
    if renderer.tooling.note:
        view.note(renderer.tooling.note)
    tasks = tasks_of(config)
    relative = load_relative(config.group_reward)
    async with AsyncExitStack() as rooms:
        folder = RunFolder.open(config.folder) if resume else RunFolder.create(config.folder)
        rooms.callback(folder.close)
        store = await open_store(config.store.url or folder.path, synchronous=config.store.synchronous)
        rooms.push_async_callback(store.close)
        if not resume:
            if await store.list(limit=1):
                raise PlaceError("the store holds rollouts of another run: give this one a schema or folder of its own")
            await store.put_policy(Policy(name=POLICY, version=version(1, 0), model=config.policy.model))
        view.phase("loading the model")
        learner = LearnerProcess(folder.learner_log)
        rooms.push_async_callback(learner.close)
        served = engine_of(config, model, folder.path, learner)
        engine = Replicas([served], patience=config.gateway.pause_patience)
        rooms.push_async_callback(engine.close)
        gateway = gateway_of(config, store, engine, renderer)
        rooms.push_async_callback(gateway.routes.close)
        await gateway.routes.recall(store)
        app = AddressApp(gateway)
        place = config.gateway
        server = await serve(app, host=place.host, port=place.port, hosts=place.hosts, log=folder.gateway_log)
        rooms.push_async_callback(server.close)
        pool = Pool(
            store,
            {None: config.agent, **config.agents},
            config.runner,
            gateway_url=server.url,
            model=config.policy.model,
            reward=config.reward,
            log=folder.agents_log,
            sampling=partial(sampling_for, config),
            wait_for_calls=gateway.wait_until_idle,
        )
        rooms.push_async_callback(pool.close)
        settings = LearnerSettings.of(config, model, serve=isinstance(served, Embedded))
        loading = asyncio.gather(learner.start(settings), served.start())
        rooms.callback(loading.cancel)
        await pool.start()
        await loading
        writers = await Writers.open(rooms, config, folder.path, view.note)
        rooms.enter_context(app.announce(server.url, config.policy.model, folder.path))
        if not resume:
            folder.keep(config)  # from here on there is a run to resume
        yield Run(
            config=config,
            folder=folder,
            tasks=tasks,
            view=view,
            store=store,
            learner=learner,
            engine=engine,
            publisher=publisher_of(config, folder.path, learner, engine),
            algorithm=algorithm,
            gateway=gateway,
            pool=pool,
            writers=writers,
            relative=relative,
        )


def refuse_contradictions(config: Config, algorithm: Algorithm) -> None:
    """Settings that each make sense, but not together."""
    loop, engine = config.loop, config.engine
    if loop.staleness and engine.deterministic:
        raise ConfigError(
            f"loop.staleness is {loop.staleness}, so that what is sampled depends on what happens to be done first, "
            "and engine.deterministic is true: set one of them back"
        )
    if loop.staleness and engine_name(engine) == "vllm" and engine.vllm.sleep:
        raise ConfigError(
            f"loop.staleness is {loop.staleness}, so that the engine works while the learner does, and "
            "engine.vllm.sleep gives its memory away meanwhile: set one of them back"
        )
    if loop.groups_most is not None and ("value" in algorithm.needs or config.algorithm.settings.get("kl") == "reward"):
        raise ConfigError(
            "loop.groups_most replaces groups that teach nothing, which cannot be told before a critic or a reference "
            "has read them: leave it out, or use another algorithm or kl = loss"
        )
    if loop.groups_most is not None and loop.groups_most < loop.groups:
        raise ConfigError(
            f"loop.groups_most is {loop.groups_most}, less than loop.groups, which is {loop.groups}: raise it"
        )


def engine_of(config: Config, model: Path, folder: Path, learner: LearnerProcess | None) -> Engine:
    """The engine that serves a run's policy, not started yet. Without a learner its weights stay as they are."""
    name, context = engine_name(config.engine), config.policy.context
    if name == "embedded":
        assert learner is not None, "the embedded engine lives where the weights are"
        return Embedded(learner)
    renewed = learner is not None
    if name == "sglang":
        return Sglang(model, config.engine.sglang, log=folder / "sglang.log", renewed=renewed, context=context)
    return Vllm(model, config.engine.vllm, log=folder / "vllm.log", renewed=renewed, context=context)


def publisher_of(config: Config, folder: Path, learner: LearnerProcess, engine: Engine) -> Publisher:
    """How new weights reach the engine."""
    name = engine_name(config.engine)
    way = "shared" if name == "embedded" else config.engine.vllm.weights if name == "vllm" else "files"
    transfers: dict[str, Callable[[], Transfer]] = {
        "shared": SharedMemory,
        "files": lambda: FolderTransfer(folder / WEIGHTS, learner),
        "ipc": lambda: IpcTransfer(learner),
        "nccl": lambda: NcclTransfer(learner),
    }
    return Publisher(engine, transfers[way]())


def engine_name(config: EngineConfig) -> Literal["embedded", "vllm", "sglang"]:
    """What `auto` means on this machine."""
    if config.name != "auto":
        if config.deterministic and config.name != "embedded":
            raise ConfigError(
                f"engine.deterministic is the embedded engine's, and engine.name is {config.name}: leave one out"
            )
        return config.name
    there = config.vllm.url or (Path("/dev/nvidiactl").exists() and find_spec("vllm"))
    return "vllm" if there and not config.deterministic else "embedded"


def gateway_of(config: Config, store: Store, engine: Engine, renderer: Renderer) -> Gateway:
    """The gateway of a run's policy."""
    route = PolicyRoute(
        policy=POLICY,
        model=config.policy.model,
        engine=engine,
        renderer=renderer,
        sampling_for=partial(sampling_for, config),
        history=config.policy.history,
    )
    given = config.gateway
    limits = Limits(in_flight=given.in_flight, per_attempt=given.in_flight_per_attempt, deadline=given.deadline)
    return Gateway(store, Routes.of(route, given.outside), limits=limits)


def tasks_of(config: Config) -> list[Task]:
    """The run's tasks, with everything that would fail later refused now."""
    tasks = hold_out(load(config.tasks, **config.tasks_args), config.hold_out, seed=config.seed)
    there = sorted({task.split for task in tasks})
    if config.loop.steps and "train" not in there:
        raise TaskError(f"{config.tasks} has no task of split 'train', only {', '.join(there)}: nothing to train on")
    for split in config.loop.eval_splits:
        if split not in there:
            raise TaskError(
                f"{config.tasks} has no task of split {split!r}, only {', '.join(there)}: set loop.eval_splits (or "
                "--split of `strop eval`) to splits it has, or keep some aside with hold_out"
            )
    if lost := next((task for task in tasks if task.agent is not None and task.agent not in config.agents), None):
        raise TaskError(f"task {lost.id!r} picks the agent {lost.agent!r}, which is not there: add it to `agents`")
    return tasks


def sampling_for(config: Config, rollout: Rollout) -> Sampling:
    """How a rollout samples, by its mode: a policy's settings win over what the agent asks for."""
    if rollout.mode == "train":
        return config.policy.train.sampling()
    sampling = config.policy.eval.sampling()
    return msgspec.structs.replace(sampling, temperature=0.0) if rollout.mode == "greedy" else sampling


def settled(config: Config) -> Config:
    """The configuration with what depends on this machine and folder written out, so that a resumed run does the same
    from anywhere. Left as they are: the words of a command, and package.module:function."""
    engine = msgspec.structs.replace(config.engine, threads=config.engine.threads or os.cpu_count() or 1)
    algorithm = msgspec.structs.replace(config.algorithm, name=absolute(config.algorithm.name))
    unset = set(algorithms.setting_names(algorithm.name)) - set(algorithm.settings)
    if config.loop.staleness and "correction" in unset:
        algorithm = msgspec.structs.replace(algorithm, settings={**algorithm.settings, "correction": "token"})
    if config.loop.groups_most and "filter_groups" in unset:  # what is replaced is not counted either
        filtered = ["zero_variance", "group_of_one"]
        algorithm = msgspec.structs.replace(algorithm, settings={**algorithm.settings, "filter_groups": filtered})
    policy = msgspec.structs.replace(
        config.policy, model=absolute(config.policy.model), template=absolute(config.policy.template)
    )
    runner = msgspec.structs.replace(config.runner, python=absolute(config.runner.python))
    tasks = config.tasks
    return msgspec.structs.replace(
        config,
        engine=engine,
        algorithm=algorithm,
        policy=policy,
        runner=runner,
        agent=absolute_agent(config.agent),
        agents={name: absolute_agent(spec) for name, spec in config.agents.items()},
        reward=absolute(config.reward),
        group_reward=absolute(config.group_reward),
        tasks=absolute(tasks) if isinstance(tasks, str) else {split: absolute(spec) for split, spec in tasks.items()},
    )


def absolute(spec: str) -> str:
    """FILE.py:name, a file or a folder by its whole path; anything else as it is."""
    place, colon, name = spec.rpartition(":") if ".py:" in spec else (spec, "", "")
    if not place:
        return spec
    return f"{Path(place).expanduser().absolute()}{colon}{name}" if Path(place).expanduser().exists() else spec


def absolute_agent(spec: str) -> str:
    """The same of an agent. A command is split into words once more, so its path is quoted if it has to be; what is no
    agent at all is refused later, as it was written."""
    whole = absolute(spec)
    if is_python(whole):
        return whole
    return spec if near_miss(spec) or not Path(whole).exists() else shlex.quote(whole)
