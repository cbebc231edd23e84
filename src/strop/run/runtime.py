"""The wiring, once: what stands between agents and weights, for training, serving, chat, evaluation and doctor alike.
What is opened was prepared before (prepare.py).

    open_policies      processes, engines and the gateway before them; for training with learners, otherwise without
    load_policies      the models are loaded
    open_pool          what runs agents
    open_run           all of it in a run's folder, with everything that training needs

Nothing of what is opened here knows this module; loop.py and resume.py use what it opens.
"""

from __future__ import annotations

import asyncio
import os
import shlex
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import msgspec

from strop.algorithms import Algorithm
from strop.config import Config, RunnerConfig
from strop.engines.base import Engine, EngineSetup
from strop.engines.gpus import must_start_in_turn, place_replicas
from strop.engines.registry import engine_class
from strop.errors import PlaceError
from strop.files import private_folder
from strop.gateway.app import Gateway
from strop.gateway.past_versions import PastVersions
from strop.gateway.replicas import Replicas
from strop.gateway.template import Renderer
from strop.learner.launcher import Launcher
from strop.learner.process import LearnerProcess, PolicyClient
from strop.learner.rank_processes import LearnerRanks
from strop.learner.verbs import LearnerSettings
from strop.monitor.console import View
from strop.monitor.writers import Writers
from strop.net.addresses import AddressApp
from strop.net.server import HttpServer, name_from_elsewhere, serve
from strop.run.data.prepare import open_data
from strop.run.folder import RunFolder
from strop.run.gateway import choose_sampling, open_gateway
from strop.run.group_reward import load as load_group_reward
from strop.run.machines import THIS_MACHINE, Machines
from strop.run.opponents import OpponentPool
from strop.run.prepare import (
    PreparedPolicy,
    count_ranks,
    default_config,
    find_adapters,
    group_by_process,
    keep_opponents,
    prepare_run,
    prepare_slots,
)
from strop.run.serve import StoreServer, serve_store
from strop.run.settings import load_tasks
from strop.run.state import Run, TrainedPolicy
from strop.run.teacher import Teacher
from strop.runners.pool import Pool
from strop.store import open_store
from strop.store.base import Store
from strop.store.server.keys import run_key
from strop.types import Policy, version
from strop.weights.base import Transfer
from strop.weights.files import AdapterTransfer, FolderTransfer
from strop.weights.ipc import IpcTransfer
from strop.weights.nccl import NcclTransfer
from strop.weights.publisher import Publisher
from strop.weights.shared import SharedMemory

WEIGHTS = "weights"
"""The folder of a run through which new weights reach engines that read them from files."""


@dataclass(frozen=True, kw_only=True)
class ServedPolicy:
    """A policy that an engine serves. `learner` leads to the process that holds its weights: of every policy that is
    trained, and where the embedded engine serves. `place` is where its logs and weights lie. `slots` have its past
    versions, which answer in its place."""

    prepared: PreparedPolicy
    engine: Engine
    learner: PolicyClient | None
    place: Path
    slots: Sequence[ServedPolicy] = ()

    @property
    def name(self) -> str:
        return self.prepared.name

    @property
    def config(self) -> Config:
        return self.prepared.config

    @property
    def model(self) -> Path:
        return self.prepared.model

    @property
    def renderer(self) -> Renderer:
        return self.prepared.renderer


async def open_policies(
    stack: AsyncExitStack,
    config: Config,
    prepared: Sequence[PreparedPolicy],
    store: Store,
    folder: Path,
    *,
    train: bool,
    machines: Machines = THIS_MACHINE,
) -> tuple[list[ServedPolicy], Gateway]:
    """Start a process for every model's weights, and put engines and a gateway before them; `stack` closes all of it.
    Nothing is loaded yet."""
    served: list[ServedPolicy] = []
    for group in group_by_process(prepared, train=train):
        places = {one.name: folder if len(prepared) == 1 else folder / "policies" / one.name for one in group}
        for place in places.values():
            private_folder(place)
        process, here = None, engine_class(group[0].config.engine).shares_weights
        if ranks := count_ranks(group, train=train):
            log = places[group[0].name] / "learner.log"
            process = await make_process(log, ranks, machines.launcher)
            stack.push_async_callback(process.close)
        engines = make_engines(group, places[group[0].name], process, train=train, machines=machines)
        for one in group:
            in_turn = must_start_in_turn(one.config.engine)
            engine = Replicas(engines[one.name], patience=config.gateway.pause_timeout, in_turn=in_turn)
            stack.push_async_callback(engine.close)
            learner = process.of(one.name) if process is not None and (here or not one.is_slot) else None
            served.append(ServedPolicy(prepared=one, engine=engine, learner=learner, place=places[one.name]))
    by_name = {one.name: one for one in served}
    served = [put_past_before(by_name[one.name], by_name) for one in prepared]
    return served, await open_gateway(stack, config, served, store, folder, strict=train, machines=machines)


async def make_process(log: Path, ranks: int, launcher: Launcher) -> LearnerProcess:
    if ranks > 1:
        return await LearnerRanks.launch(log, ranks, launcher)
    return LearnerProcess(log, *await launcher.start([log]))


def put_past_before(policy: ServedPolicy, served: Mapping[str, ServedPolicy]) -> ServedPolicy:
    """The policy with the slots of its past versions, if it has some: they answer in its place."""
    if not (slots := [served[slot.name] for slot in prepare_slots(policy.prepared) if slot.name in served]):
        return policy
    engine = PastVersions(policy.name, policy.engine, [slot.engine for slot in slots])
    return replace(policy, engine=engine, slots=slots)


async def load_policies(policies: Sequence[ServedPolicy], gateway: Gateway, *, train: bool) -> None:
    """Load every model, all at once; from then on the gateway answers."""
    settings: dict[LearnerProcess, list[LearnerSettings]] = {}
    for policy in [one for each in policies for one in (each, *each.slots)]:
        if policy.learner is not None:
            here = engine_class(policy.config.engine).shares_weights
            taught = train and not policy.config.policy.frozen
            given = LearnerSettings.of(
                policy.config,
                policy.prepared.model,
                name=policy.name,
                serve=here,
                train=taught,
                from_checkpoints=policy.prepared.is_slot,
            )
            settings.setdefault(policy.learner.process, []).append(given)
    learners = [process.start(*serve_if_asked(given)) for process, given in settings.items()]
    await asyncio.gather(*learners, *(policy.engine.start() for policy in policies))
    if gateway.workers is not None:
        await gateway.workers.open()


async def compile_ahead(policies: Sequence[ServedPolicy], view: View) -> None:
    """Have learners compile what their first update needs while the first rollouts are sampled."""
    for process in {one.learner.process for one in policies if one.learner is not None}:
        if await process.compile_ahead():
            view.note("the learner's kernels are compiled beside the first rollouts; the next run finds them")


def serve_if_asked(settings: list[LearnerSettings]) -> list[LearnerSettings]:
    """The same without an engine where no agent asks: a teacher is only read."""
    if any(one.policy.agents or one.train or one.from_checkpoints for one in settings):
        return settings
    return [msgspec.structs.replace(one, serve=False) for one in settings]


def open_pool(config: Config, runner: RunnerConfig, store: Store, gateway: Gateway, url: str, log: Path) -> Pool:
    """What runs the configured agents. An agent is told the model and the sampling of the default policy."""
    main = default_config(config)
    return Pool(
        store,
        {None: config.agent, **config.agents} if config.agent and runner.workers else {},
        runner,
        gateway_url=url,
        model=main.policy.model,
        reward=config.reward,
        log=log,
        sampling=partial(choose_sampling, main),
        wait_for_calls=gateway.wait_until_idle,
        private=(log.parent,),
    )


@asynccontextmanager
async def open_run(
    config: Config, view: View, *, resume: bool, machines: Machines = THIS_MACHINE
) -> AsyncGenerator[Run]:
    """Open everything in the order data walks through it; whatever happens, close it in reverse."""
    asked, config = config, machines.adapt(config)
    ready = await prepare_run(config)
    made, optimizer, teachers, prepared = ready.made, ready.optimizer, ready.teachers, list(ready.policies)
    for note in dict.fromkeys(one.renderer.tooling.note for one in prepared if one.renderer.tooling.note):
        view.note(note)
    tasks = load_tasks(config)
    group_reward = load_group_reward(config.group_reward)
    async with AsyncExitStack() as stack:
        folder = RunFolder.open(config.folder) if resume else RunFolder.create(config.folder)
        stack.callback(folder.close)
        store = await open_store(config.store.url or folder.path, synchronous=config.store.synchronous)
        stack.push_async_callback(store.close)
        if not resume:
            if await store.list(limit=1):
                raise PlaceError(
                    "the store holds rollouts of another run. Fix: give this one a schema or folder of its own"
                )
            for one in prepared:
                await store.put_policy(make_first_version(one))
            for name in config.prompts:
                model = config.algorithm.name if optimizer is not None else "given"
                await store.put_policy(Policy(name=name, version=version(1, 0), model=model, kind="prompt"))
        prepared = [keep_opponents(one, folder.path) for one in prepared]
        view.phase("loading the model" if prepared else "starting")
        served, gateway = await open_policies(
            stack, config, prepared, store, folder.path, train=True, machines=machines
        )
        server, app = await serve_run(config, store, gateway, folder)
        stack.push_async_callback(server.close)
        pool = open_pool(config, config.runner, store, gateway, server.url, folder.agents_log)
        stack.push_async_callback(pool.close)
        loading = asyncio.ensure_future(load_policies(served, gateway, train=True))
        stack.callback(loading.cancel)
        await pool.start()
        await loading
        await compile_ahead(served, view)
        by_name = {one.name: one for one in served}
        writers = await Writers.open(stack, config, folder.path, view.note)
        stack.enter_context(app.announce(server.url, default_config(config).policy.model, folder.path))
        if asked.runner.remote:
            view.note(describe_join(config, server.url))
        if not resume:
            folder.keep(asked)  # from here on there is a run to resume
        yield Run(
            config=config,
            folder=folder,
            tasks=tasks,
            view=view,
            store=store,
            policies={
                one.name: make_trained(one, made[one.name], by_name.get(teachers.get(one.name, "")))
                for one in served
                if one.name in made
            },
            engines=[one.engine for one in served],
            learners=[one.learner for each in served for one in (each, *each.slots) if one.learner is not None],
            gateway=gateway,
            pool=pool,
            shared=server if isinstance(server, StoreServer) else None,
            writers=writers,
            group_reward=group_reward,
            data=open_data(config, folder.path),
            opponents=[make_opponents(one) for one in served if one.slots],
            optimizer=optimizer,
            prompts={name: prompt.text for name, prompt in config.prompts.items()},
            machines=machines,
        )


async def serve_run(
    config: Config, store: Store, gateway: Gateway, folder: RunFolder
) -> tuple[HttpServer | StoreServer, AddressApp]:
    """Have the gateway's address answer: agents, and runners on other machines where they may join. Those wait until
    the run begins, since of what is queued only the restored weights may sample."""
    place, log = config.gateway, folder.gateway_log
    if not config.runner.remote:
        app = AddressApp(gateway)
        switch = gateway.workers.switch if gateway.workers is not None else None
        return await serve(app, host=place.host, port=place.port, hosts=place.hosts, log=log, switch=switch), app
    server = await serve_store(
        store,
        key=run_key(folder.path, os.environ.get("STROP_KEY")),
        gateway=gateway,
        host=place.host,
        port=place.port,
        hosts=place.hosts,
        settings=("gateway.host", "gateway.port"),
        lease_check=None,
        log=log,
    )
    server.hold()
    return server, server.addressed


def describe_join(config: Config, url: str) -> str:
    """The command by which runners join."""
    agents = {"--agent": config.agent or "AGENT", "--reward": config.reward}
    words = [f"strop runner --url {name_from_elsewhere(url, config.gateway.host)}"]
    words += [f"{option} {shlex.quote(spec)}" for option, spec in agents.items() if spec]
    words += [f"--set {shlex.quote(f'agents.{name}={spec}')}" for name, spec in config.agents.items()]
    key = "this STROP_KEY" if os.environ.get("STROP_KEY") else f"STROP_KEY from {config.folder}/key"
    return f"runners join with {key}: {' '.join(words)}"


def make_trained(policy: ServedPolicy, algorithm: Algorithm, teacher: ServedPolicy | None) -> TrainedPolicy:
    assert policy.learner is not None, "what is trained has a process that holds its weights"
    return TrainedPolicy(
        name=policy.name,
        config=policy.config,
        algorithm=algorithm,
        learner=policy.learner,
        teacher=teacher and make_teacher(policy, algorithm, teacher),
        engine=policy.engine,
        publisher=make_publisher(policy.name, policy.config, policy.place, policy.learner, policy.engine),
    )


def make_teacher(student: ServedPolicy, algorithm: Algorithm, teacher: ServedPolicy) -> Teacher:
    source, theirs = algorithm.teacher_source, teacher.prepared
    assert source is not None, "who wants no teacher has none"
    ours = student.prepared.renderer
    return Teacher.of(source.prompt, ours, theirs.renderer, teacher.engine, theirs.config, theirs.model)


def make_opponents(policy: ServedPolicy) -> OpponentPool:
    """A policy's past versions, of which none is loaded yet."""
    assert policy.prepared.opponents is not None
    assert isinstance(policy.engine, PastVersions)
    return OpponentPool(
        policy=policy.name,
        config=policy.config.policy.past,
        source=policy.prepared.opponents,
        engine=policy.engine,
        processes=[slot.learner for slot in policy.slots],
    )


def make_first_version(policy: PreparedPolicy) -> Policy:
    """A policy as it is before any step."""
    return Policy(name=policy.name, version=version(1, 0), model=policy.config.policy.model)


def make_engines(
    group: Sequence[PreparedPolicy],
    folder: Path,
    process: LearnerProcess | None,
    *,
    train: bool,
    machines: Machines = THIS_MACHINE,
) -> dict[str, list[Engine]]:
    """The engines of policies on one model, not started yet: one that takes adapters serves all of them. Each has as
    many as there are replicas. Without a process that holds them the weights stay as they are."""
    first, adapters = group[0], find_adapters(group) if train else {}
    kind = engine_class(first.config.engine)
    contexts = [one.config.policy.context for one in group if one.config.policy.context is not None]

    def make(policy: str) -> list[Engine]:
        setup = EngineSetup(
            model=first.model,
            config=first.config.engine,
            folder=folder,
            context=max(contexts) if len(contexts) == len(group) else None,
            renewed=process is not None or any(one.is_slot for one in group),
            link=process.of(policy) if process is not None else None,
            adapters=adapters,
            servers=machines.servers,
        )
        setups = place_replicas(setup, beside_learner=process is not None)
        if process is not None and kind.shares_weights:
            setups = [msgspec.structs.replace(setup, link=link) for link in process.links(policy)]
        for one in setups:
            private_folder(one.folder)
        return [kind.make(one) for one in setups]

    if not adapters:
        return {one.name: make(one.name) for one in group}
    shared = make(first.name)
    return {one.name: [engine.of_policy(one.name) for engine in shared] for one in group}


def make_publisher(policy: str, config: Config, folder: Path, learner: PolicyClient, engine: Engine) -> Publisher:
    """How a policy's new weights reach the engine."""
    kind = engine_class(config.engine)
    if config.learner.lora.rank and kind.serves_adapters(config.engine):
        return Publisher(engine, AdapterTransfer(folder / WEIGHTS, policy, learner))
    transfers: dict[str, Callable[[], Transfer]] = {
        "shared": SharedMemory,
        "files": lambda: FolderTransfer(folder / WEIGHTS, learner),
        "ipc": lambda: IpcTransfer(learner),
        "nccl": lambda: NcclTransfer(learner),
    }
    return Publisher(engine, transfers[kind.choose_transfer(config.engine)]())
