"""The whole loop, readable top to bottom. Only this file knows every room.

    collect groups → assemble → score → credit → update → checkpoint if due → commit_step → publish → evaluate if due

Synchronous for now: a step is collected once the one before it has been published (staleness 0).

A run lives in a folder (`strop.folder`) and may be killed at any moment. Resuming goes back to the last checkpoint,
replays the steps committed after it from what the store recorded, without sampling again, and goes on. Group n of a run
is always the same task with the same seeds, so nothing needs remembering but the number of the step.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import Counter
from collections.abc import AsyncGenerator, Coroutine, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from strop import algorithms
from strop.algorithms import Algorithm
from strop.algorithms.credit import spread
from strop.config import Config
from strop.engines.base import Engine
from strop.engines.embedded.engine import Embedded
from strop.engines.models import resolve
from strop.errors import AgentError, ConfigError, TaskError
from strop.folder import RunFolder
from strop.gateway.app import Gateway
from strop.gateway.render import Renderer
from strop.gateway.sample import PolicyRoute
from strop.gateway.server import serve
from strop.learner.process import LearnerProcess
from strop.monitor.metrics import MetricsFile, Scores, flat
from strop.monitor.summary import Summary, failures, summarize
from strop.monitor.view import View
from strop.runners.pool import Pool
from strop.store.base import Store
from strop.store.sqlite import SqliteStore
from strop.tasks.load import load
from strop.tasks.sampling import evaluation, group
from strop.trajectory import Batch, Sample, assemble, explain
from strop.types import TERMINAL, Policy, Rollout, Sampling, Step, Task, lineage_of, version
from strop.weights.base import Weights
from strop.weights.shared import Shared

POLICY = "main"


@dataclass
class Run:
    """Every room, open, and where the run stands.

    `names` are the versions the present weights have been served under: more than one after a replay that made the very
    same weights again. Only rollouts sampled from them may be trained on.
    """

    config: Config
    folder: RunFolder
    tasks: list[Task]
    view: View
    store: Store
    learner: LearnerProcess
    engine: Engine
    weights: Weights
    algorithm: Algorithm
    gateway: Gateway
    pool: Pool
    metrics: MetricsFile | None = None
    lineage: int = 1
    step: int = 0
    names: list[str] = field(default_factory=lambda: [version(1, 0)])
    cursor: int = 0
    steps: list[Step] = field(default_factory=list[Step])
    scores: Scores = field(default_factory=Scores)

    @property
    def origin(self) -> int:
        """The lineage in which the present weights were first made; groups and evaluations are named after it."""
        return lineage_of(self.names[0])


@dataclass
class Collected:
    """What a step is made from: ended rollouts with their turns, and those that it replaces."""

    samples: list[Sample]
    dropped: dict[str, str] = field(default_factory=dict[str, str])
    seconds: float = 0.0


# -- the loop ----------------------------------------------------------------------------------------------------------


async def train(config: Config, view: View, *, resume: bool = False) -> Summary:
    """Train as configured, or go on with the run in `config.folder`."""
    view.title(f"{config.folder} · {config.policy.model} · {config.algorithm.name}", config.loop.steps)
    async with open_rooms(config, view, resume=resume) as run:
        if resume:
            await go_back(run)
        run.pool.work()  # not before: rollouts are queued that only the restored weights may sample
        return await beside(loop(run), run.learner.watch(), run.pool.watch())


async def loop(run: Run) -> Summary:
    began, config = time.monotonic(), run.config
    before = sum(step.metrics["timing_s/step"] for step in run.steps)  # what was spent before the run was resumed
    run.view.past([(step.number, step.metrics) for step in run.steps])
    run.metrics = MetricsFile(run.folder.metrics, run.steps, run.scores)
    await evaluate_if_due(run)
    while not finished(run):
        await advance(run, await collect(run))
        stop_if_hopeless(run)
        await evaluate_if_due(run)
    seconds = before + time.monotonic() - began
    return summarize(config, run.folder.path, run.steps, run.scores, seconds=seconds)


async def advance(run: Run, collected: Collected) -> Step:
    """One step: consumes collected rollouts, produces a committed and published version."""
    number, began = run.step + 1, time.monotonic()
    run.view.phase(f"training step {number}")
    await run.engine.pause()
    batch = assemble(collected.samples, agents=run.config.policy.agents, budget=run.config.learner.token_budget)
    if run.algorithm.needs:
        batch.entries = await run.learner.call("score", batch)
    metrics = run.algorithm.credit(batch) | describe(batch) | await run.learner.call("update", batch)
    saved = await checkpoint(run, number)
    seconds = time.monotonic() - began + collected.seconds
    metrics |= {"timing_s/gen": collected.seconds, "timing_s/step": seconds}
    metrics["perf/rollouts"] = len(batch.samples) / seconds
    metrics["perf/throughput"] = metrics["perf/total_num_tokens"] / seconds
    step = Step(
        lineage=run.lineage,
        number=number,
        rollouts=[sample.rollout.id for sample in batch.samples],
        dropped=batch.dropped | collected.dropped,
        metrics=metrics,
        checkpoint=saved,
        digest=await run.learner.call("digest") if run.config.engine.deterministic else None,
        time=time.time(),
    )
    await run.store.commit_step(step, policy=POLICY)
    await publish(run, step)
    return step


async def collect(run: Run) -> Collected:
    """Consumes tasks; waits for the next step's rollouts to end or for their deadline; produces them as samples."""
    began, wanted = time.monotonic(), next_rollouts(run)
    dropped = await superseded(run, wanted)
    ended = await ended_of(run, wanted, f"collecting step {run.step + 1}")
    samples = [Sample(rollout, await run.store.turns(rollout.id)) for rollout in ended]
    sampled_by = {name for sample in samples for turn in sample.turns for _, name in turn.versions}
    assert sampled_by <= set(run.names), f"sampled from {sampled_by}, but the weights are {run.names}"
    return Collected(samples, dropped, time.monotonic() - began)


def next_rollouts(run: Run) -> list[Rollout]:
    """The next step's rollouts, in sampling order."""
    first, loop = run.step * run.config.loop.groups, run.config.loop
    tasks = [task for task in run.tasks if task.split == "train"]
    return [
        rollout
        for n in range(first, first + loop.groups)
        for rollout in group(
            tasks,
            seed=run.config.seed,
            n=n,
            members=loop.members,
            max_attempts=run.config.runner.max_attempts,
            suffix=suffix(run.origin),
        )
    ]


async def publish(run: Run, step: Step) -> None:
    """Engines serve the step's version from here on."""
    run.step, run.names = step.number, [step.version]
    run.steps.append(step)
    kept = [step.checkpoint for step in run.steps if step.checkpoint]
    run.folder.prune(kept[-run.config.loop.keep_checkpoints :])
    await run.weights.publish(step.version)
    await run.engine.resume()
    run.view.step(step.number, step.metrics)
    if run.metrics is not None:
        run.metrics.write(step.number, step.metrics)
    gap, limit = step.metrics.get("training/rollout_logprobs_diff_max", 0.0), run.config.learner.logprob_limit
    if gap > limit:
        run.view.note(f"step {step.number}: engine and learner logprobs differ by {gap:.1e}, more than {limit:.0e}")
    if step.metrics["actor/skipped"]:
        reasons = "; ".join(f"{n} {explain(reason)}" for reason, n in Counter(step.dropped.values()).most_common())
        run.view.note(f"step {step.number} had nothing to train on: {reasons}")
    if (failed := failures(step.metrics)).total() > len(step.rollouts) / 10:
        reasons = ", ".join(f"{cause} {count}" for cause, count in failed.items())
        run.view.note(f"step {step.number}: {failed.total()} of {len(step.rollouts)} rollouts failed ({reasons})")


def stop_if_hopeless(run: Run, patience: int = 3) -> None:
    """Some failures are data; step after step of nothing else is an outage."""
    last = run.steps[-patience:]
    if len(last) == patience and all(failures(step.metrics).total() == len(step.rollouts) for step in last):
        raise AgentError(
            f"all rollouts of the last {patience} steps failed ({', '.join(failures(last[-1].metrics))}): look at them "
            f"with `strop rollouts {run.folder.path} --status failed`, mend the cause, then resume"
        )


def finished(run: Run) -> bool:
    return run.step >= run.config.loop.steps


# -- evaluation --------------------------------------------------------------------------------------------------------


async def evaluate_if_due(run: Run) -> None:
    every = run.config.loop.eval_every
    if run.step == 0 or finished(run) or (every and run.step % every == 0):
        for split in run.config.loop.eval_splits:
            for greedy in (False, True) if run.config.loop.eval_greedy else (False,):
                await evaluate(run, run.step, run.names[0], split, greedy=greedy)


async def evaluate(run: Run, step: int, version: str, split: str, *, greedy: bool) -> None:
    """Mean of every named reward over a split; rollouts that failed count as 0. What the store has is not run again."""
    wanted = evaluated(run, step, version, split, greedy=greedy)
    label = f"{split}-greedy" if greedy else split
    ended = await ended_of(run, wanted, f"evaluating {label}")
    if failed := Counter(rollout.cause for rollout in ended if rollout.cause):
        reasons = ", ".join(f"{cause} {count}" for cause, count in failed.items())
        run.view.note(f"evaluating {label} after step {step}: failed rollouts count as 0 ({reasons})")
    names = sorted({r.name for rollout in ended for r in rollout.rewards if r.target == (r.name, None, None)})
    means = {name: sum(rollout.reward(name) or 0.0 for rollout in ended) / len(ended) for name in names}
    if step == 0:
        check_rewards(run, ended)
    run.scores[step, label] = means
    run.view.evaluation(step, {f"{label} {name}": value for name, value in means.items()})
    if run.metrics is not None:
        run.metrics.write(step, flat(label, means))


def check_rewards(run: Run, ended: Sequence[Rollout]) -> None:
    """Before anything is trained: the rewards that count must be among those the agent gives."""
    given = {reward.name for rollout in ended for reward in rollout.rewards}
    wanted = set(run.config.algorithm.rewards)
    if missing := sorted(wanted - given):
        said = f"gave only {', '.join(sorted(given))}" if given else "gave no reward"
        raise ConfigError(
            f"algorithm.rewards counts {', '.join(missing)}, but the agent {said}: return it, or begin a run with "
            f"--set algorithm.rewards.{sorted(given)[0] if given else 'NAME'}=1"
        )


def evaluated(run: Run, step: int, version: str, split: str, *, greedy: bool) -> list[Rollout]:
    """The rollouts of an evaluation."""
    return evaluation(
        run.tasks,
        seed=run.config.seed,
        version=version,
        step=step,
        split=split,
        greedy=greedy,
        max_attempts=run.config.runner.max_attempts,
    )


async def ended_of(run: Run, wanted: Sequence[Rollout], phase: str) -> list[Rollout]:
    """Queue rollouts (those already there stay as they are) and wait until all have ended; past the deadline the rest
    is cancelled as late. Returned in the order they were wanted."""
    await run.store.enqueue(wanted)
    ids = [rollout.id for rollout in wanted]
    now = {rollout.id: rollout for rollout in [await run.store.get(id) for id in ids]}
    deadline = time.monotonic() + run.config.loop.group_deadline
    while open := [id for id in ids if now[id].status not in TERMINAL]:
        run.view.phase(phase, len(ids) - len(open), len(ids))
        if time.monotonic() > deadline:
            await run.store.cancel(open, cause="late", detail=f"past loop.group_deadline in {phase}")
        run.cursor, changed = await run.store.wait(run.cursor, timeout=1.0)
        for rollout in changed:
            if rollout.id in now:
                now[rollout.id] = rollout
            if rollout.status in TERMINAL:
                run.gateway.forget(rollout.id)
    run.view.phase(phase, len(ids), len(ids))
    failed = [rollout for rollout in now.values() if rollout.status == "failed"]
    if len(failed) == len(ids) and run.step == 0:  # later it is a bad step, not a bad agent
        cause, count = Counter(rollout.cause for rollout in failed).most_common(1)[0]
        example = next(rollout for rollout in failed if rollout.cause == cause)
        raise AgentError(
            f"all {len(ids)} rollouts failed while {phase}, {count} with {cause}: {last_line(example.detail)} "
            f"(look: strop rollouts {run.folder.path} {example.id}; the agent's output: {run.folder.agents_log})"
        )
    return [now[id] for id in ids]


def last_line(text: str | None) -> str:
    """What an error says, without the traceback above it."""
    return (text or "no reason given").strip().splitlines()[-1]


# -- going back --------------------------------------------------------------------------------------------------------


async def go_back(run: Run) -> None:
    """Open a new lineage at the last checkpoint, replay what was committed after it, and clear the queue of what the
    present weights will not be asked for."""
    await run.store.reclaim(everything=True)
    line = await unbroken_line(run)
    live = [step for step in line if not step.superseded]
    kept = [step for step in live if step.checkpoint and run.folder.checkpoint(step.checkpoint).is_dir()]
    base = kept[-1].number if kept else 0
    run.steps, run.step = line[:base], base
    run.lineage = await run.store.open_lineage(POLICY, after=base)
    run.folder.prune([step.checkpoint for step in run.steps if step.checkpoint])
    if kept:
        meta = await run.learner.call("restore", run.folder.checkpoint(str(kept[-1].checkpoint)))
        assert meta["version"] == kept[-1].version, f"checkpoint {meta} is not that of step {kept[-1].version}"
        run.names = names_of(kept[-1], await run.store.steps(superseded=True))
        await run.weights.publish(kept[-1].version)
    for old in line[base:]:
        rollouts = [await run.store.get(id) for id in old.rollouts]
        step = await advance(run, Collected([Sample(r, await run.store.turns(r.id)) for r in rollouts]))
        run.names = names_of(step, await run.store.steps(superseded=True))
    await recall_evaluations(run)
    await cancel_leftovers(run)


async def unbroken_line(run: Run) -> list[Step]:
    """The present line, and where an earlier replay was cut off, the steps it had not come to again."""
    line = await run.store.steps()
    newest = {step.number: step for step in await run.store.steps(superseded=True) if step.superseded}
    while (following := newest.get(len(line) + 1)) is not None:
        line.append(following)
    return line


def names_of(step: Step, history: list[Step]) -> list[str]:
    """Every version whose weights are those of `step`, bit for bit, the first one first."""
    same = [old for old in history if old.number == step.number and old.digest and old.digest == step.digest]
    return sorted({old.version for old in same} | {step.version}, key=lineage_of)


async def recall_evaluations(run: Run) -> None:
    """The scores of evaluations that were finished before the run was interrupted."""
    history = await run.store.steps(superseded=True)
    versions = {0: version(1, 0)} | {step.number: names_of(step, history)[0] for step in run.steps}
    for number, name in versions.items():
        for split in run.config.loop.eval_splits:
            for greedy in (False, True):
                wanted = evaluated(run, number, name, split, greedy=greedy)
                stored = await run.store.list(group=wanted[0].group, limit=len(wanted))
                if len(stored) == len(wanted) and all(rollout.status in TERMINAL for rollout in stored):
                    await evaluate(run, number, name, split, greedy=greedy)


async def cancel_leftovers(run: Run) -> None:
    """Queued rollouts that belong neither to the next step nor to an evaluation of the present weights."""
    wanted = {rollout.group for rollout in next_rollouts(run)}
    for split in run.config.loop.eval_splits:
        wanted |= {evaluated(run, run.step, run.names[0], split, greedy=greedy)[0].group for greedy in (False, True)}
    after: str | None = None
    while page := await run.store.list(status="queued", after=after):
        left = [rollout.id for rollout in page if rollout.group not in wanted]
        await run.store.cancel(left, detail="superseded: sampled anew after the run was resumed")
        after = page[-1].id


async def superseded(run: Run, wanted: Sequence[Rollout]) -> dict[str, str]:
    """Earlier rollouts in the place of these, sampled from weights that are no more: left out, and counted by name."""
    dropped: dict[str, str] = {}
    for name in sorted({rollout.group for rollout in wanted}) if run.origin > 1 else ():
        bare = name.removesuffix(suffix(run.origin))
        for lineage in range(1, run.origin):
            old = await run.store.list(group=bare + suffix(lineage))
            dropped |= {rollout.id: "superseded" for rollout in old}
    return dropped


def suffix(lineage: int) -> str:
    """What the names of groups end with that are sampled anew in a later lineage."""
    return f"~{lineage}" if lineage > 1 else ""


async def checkpoint(run: Run, number: int) -> str | None:
    """Write a checkpoint if one is due; it counts once the step that names it is committed."""
    loop = run.config.loop
    if number % loop.checkpoint_every and number < loop.steps:
        return None
    name = f"step-{number:06d}-{run.lineage}"
    await run.learner.call("save", run.folder.checkpoint(name), {"version": version(run.lineage, number)})
    return name


def describe(batch: Batch) -> dict[str, float]:
    """What was collected, as metrics."""
    turns = [turn for sample in batch.samples for turn in sample.turns]
    metrics = spread("response_length", np.array([len(turn.response_ids) for turn in turns], float))
    metrics |= spread("prompt_length", np.array([len(turn.prompt_ids) for turn in turns], float))
    metrics |= spread("num_turns", np.array([len(sample.turns) for sample in batch.samples], float))
    if turns:
        metrics["response_length/clip_ratio"] = sum(turn.finish == "length" for turn in turns) / len(turns)
    metrics["session/exact"] = float(sum(turn.parent is not None and turn.branch is None for turn in turns))
    for reason, count in Counter(turn.branch for turn in turns if turn.branch).items():
        metrics[f"session/{reason}"] = float(count)
    rollouts = [sample.rollout for sample in batch.samples]
    for name in sorted({reward.name for rollout in rollouts for reward in rollout.rewards}):
        given = [value for rollout in rollouts if (value := rollout.reward(name)) is not None]
        metrics |= {f"reward/{name}": sum(given) / len(given)} if given else {}
    for cause, count in Counter(rollout.cause for rollout in rollouts if rollout.cause).items():
        metrics[f"failed/{cause}"] = float(count)
    return metrics


# -- the rooms ---------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def open_rooms(config: Config, view: View, *, resume: bool) -> AsyncGenerator[Run]:
    """Start every room in the order data walks through them; whatever happens, close them in reverse."""
    algorithm = algorithms.make(config.algorithm, config.learner)
    model = resolve(config.policy.model)
    renderer = Renderer.from_folder(model)
    tasks = load(config.tasks, **config.tasks_args)
    if not any(task.split == "train" for task in tasks):
        raise TaskError(f"{config.tasks} has no task of split 'train': nothing to train on")
    for split in config.loop.eval_splits:
        if not any(task.split == split for task in tasks):
            raise TaskError(f"{config.tasks} has no task of split {split!r}: set loop.eval_splits to splits it has")
    if several := next((task for task in tasks if task.agent is not None), None):
        raise TaskError(f"task {several.id!r} picks the agent {several.agent!r}: a run has one agent; remove `agent`")
    async with AsyncExitStack() as rooms:
        folder = RunFolder.open(config.folder) if resume else RunFolder.create(config.folder)
        store = await SqliteStore.open(folder.store, config.store.synchronous)
        rooms.push_async_callback(store.close)
        if not resume:
            await store.put_policy(Policy(name=POLICY, version=version(1, 0), model=config.policy.model))
        view.phase("loading the model")
        learner = LearnerProcess(folder.learner_log)
        rooms.push_async_callback(learner.close)
        engine = Embedded(learner)
        rooms.push_async_callback(engine.close)
        route = PolicyRoute(
            policy=POLICY,
            model=config.policy.model,
            engine=engine,
            renderer=renderer,
            sampling_for=lambda rollout: sampling_for(config, rollout),
        )
        gateway = Gateway(store, {"*": route})
        server = await serve(gateway.app, host=config.gateway.host, port=config.gateway.port, log=folder.gateway_log)
        rooms.push_async_callback(server.close)
        pool = Pool(
            store,
            config.agent,
            config.runner,
            gateway_url=server.url,
            model=config.policy.model,
            log=folder.agents_log,
            sampling=route.sampling_for,
            settled=gateway.settled,
        )
        rooms.push_async_callback(pool.close)
        loading = asyncio.create_task(learner.start(config, model))
        rooms.callback(loading.cancel)
        await pool.start()
        await loading
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
            weights=Shared(engine),
            algorithm=algorithm,
            gateway=gateway,
            pool=pool,
        )


def sampling_for(config: Config, rollout: Rollout) -> Sampling:
    """How a rollout samples, by its mode: a policy's settings win over what the agent asks for."""
    if rollout.mode == "train":
        return config.policy.train.sampling()
    sampling = config.policy.eval.sampling()
    return msgspec.structs.replace(sampling, temperature=0.0) if rollout.mode == "greedy" else sampling


async def beside(main: Coroutine[Any, Any, Summary], *watches: Coroutine[Any, Any, None]) -> Summary:
    """The result of `main`, unless one of `watches` raises first: then that, with `main` cancelled."""
    first = asyncio.create_task(main)
    tasks: list[asyncio.Task[Any]] = [first, *map(asyncio.create_task, watches)]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in reversed(tasks):  # a watch that raised says why main may have failed too
            if task in done:
                task.result()
        return first.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def settled(config: Config) -> Config:
    """The configuration with what depends on this machine and folder written out, so that a resumed run does the same
    from anywhere."""
    engine = msgspec.structs.replace(config.engine, threads=config.engine.threads or os.cpu_count() or 1)
    policy = msgspec.structs.replace(config.policy, model=absolute(config.policy.model))
    return msgspec.structs.replace(
        config, engine=engine, policy=policy, agent=absolute(config.agent), tasks=absolute(config.tasks)
    )


def absolute(spec: str) -> str:
    """FILE.py:name, a file or a folder by its whole path; anything else as it is."""
    place, colon, name = spec.rpartition(":") if ".py:" in spec else (spec, "", "")
    return f"{Path(place).expanduser().absolute()}{colon}{name}" if Path(place).expanduser().exists() else spec
