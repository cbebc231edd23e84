"""Prompts as policies: steps of a run that improves texts, beside those of loop.py, which improve weights.

The optimiser (algorithms/gepa.py, apo.py) decides what is tried next, and so drives its own steps; everything around it
is the run's: agents, tasks, rewards, store, evaluation, checkpoints, budgets, resume. A step is an iteration of the
optimiser, and its version is the best prompts known after it.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress

from strop.algorithms import PromptOptimizer, make_improver
from strop.algorithms.prompt_optimizer import OptimizationOver
from strop.config import Config
from strop.errors import ConfigError, DamagedCheckpoint, PlaceError, StoreError, TaskError
from strop.run.folder import FIRST
from strop.run.prompts.ledger import CallLedger
from strop.run.prompts.model import CALLS, OptimizerModel, find_provider
from strop.run.prompts.pool import PromptCheckpoint, read_pool, read_prompts, write_prompts
from strop.run.prompts.session import RunSession
from strop.run.resume import refuse_loss
from strop.run.scoring import evaluate_if_due
from strop.run.state import Run
from strop.types import version


def make_prompt_optimizer(config: Config) -> PromptOptimizer | None:
    """The prompt optimiser of a run, if it has one. Raises `ConfigError` where it could not work."""
    if config.algorithm.improves != "prompts" or not config.loop.steps:
        return None
    optimizer = make_improver(config.algorithm)
    assert isinstance(optimizer, PromptOptimizer), "settle says what an algorithm improves"
    if not config.prompts:
        raise ConfigError(
            f"algorithm.name is {config.algorithm.name}, which improves prompts, and there are none. Fix: set "
            "prompts.system.text, and have the agent use llm.prompts['system']"
        )
    if own := [name for name, table in config.policies.items() if "algorithm" in table]:
        raise ConfigError(
            f"policies.{own[0]}.algorithm would train weights, and {config.algorithm.name} improves prompts: a run "
            "does one of them. Fix: leave one out"
        )
    if config.group_reward:
        raise ConfigError("group_reward compares rollouts of one policy, not prompts. Fix: leave it out")
    if 0 < optimizer.max_calls < optimizer.min_calls:
        raise ConfigError(
            f"algorithm.settings.max_calls is {optimizer.max_calls}, and the first step takes {optimizer.min_calls}. "
            "Fix: raise it"
        )
    find_provider(config, optimizer)
    return optimizer


async def improve_prompts(run: Run) -> None:
    """Step after step, until all are made, the budget is spent or the run is told to stop."""
    assert run.optimizer is not None
    if run.finished or run.stop.is_set():
        return
    split = run.optimizer.validation
    if split and not any(task.split == split for task in run.tasks):
        raise TaskError(f"algorithm.settings.validation is {split!r}, and no task has that split. Fix: name one")
    model = OptimizerModel(run.config, run.optimizer, run.folder.path, run.stop)
    try:
        refuse_lost_calls(run, model.ledger)
    except StoreError:
        await model.close()
        raise
    session = RunSession(run, run.optimizer, model, list(run.steps))
    working = asyncio.get_running_loop().run_in_executor(None, _work, run.optimizer, session)
    try:
        await asyncio.shield(working)
    finally:
        session.abort()
        await asyncio.wait([working])
        await model.close()
    if session.error is not None:
        raise session.error
    if not run.finished and not run.stop.is_set():
        run.over = True
        why = session.over or "the optimiser has nothing left to try"
        run.view.note(f"{why}: ending after step {run.step}{session.describe_rest()}")
        await evaluate_if_due(run)


def _work(optimizer: PromptOptimizer, session: RunSession) -> None:
    """In a thread of its own."""
    try:
        optimizer.optimize(session)
    except OptimizationOver as over:
        cause = over.__cause__
        session.error = session.error or (cause if isinstance(cause, Exception) else None)


def refuse_lost_calls(run: Run, ledger: CallLedger) -> None:
    """Raises `StoreError` if calls.jsonl has fewer calls than were once counted: it would allow them once more."""
    counted = int(run.steps[-1].metrics.get("prompts/calls", 0)) if run.steps else 0
    if ledger.spent.calls < counted:
        raise StoreError(
            f"{run.folder.path / CALLS} has {ledger.spent.calls} calls of the optimiser model, and step {run.step} had "
            f"counted {counted}: it was lost or replaced, and without it nobody knows what was spent. Fix: put it back"
        )


def keep_first_prompts(run: Run) -> None:
    """The prompts that a run begins with, under the name RUN:0."""
    place = run.folder.path / FIRST
    if run.optimizer is not None and not place.exists():
        write_prompts(place, PromptCheckpoint(version=version(1, 0), prompts=run.prompts))


async def go_back_to_prompts(run: Run) -> None:
    """Put a run back to where it was. Nothing is superseded: steps come out as they did, so the line goes on."""
    await refuse_loss(run)
    await run.store.reclaim(everything=True)
    run.steps = await run.store.steps()
    if run.steps:
        last = run.steps[-1]
        run.step, run.lineage, run.versions = last.number, last.lineage, [last.version]
        run.prompts = _find_prompts(run)
        run.folder.prune([str(step.checkpoint) for step in run.steps])


def _find_prompts(run: Run) -> dict[str, str]:
    """Those of the last step: in its checkpoint, or else among all versions."""
    last, pool = run.steps[-1], None
    place = run.folder.checkpoint(str(last.checkpoint))
    try:
        if (found := read_prompts(place)) is not None:
            return found
    except DamagedCheckpoint:
        run.folder.set_aside(place.name)
    with suppress(DamagedCheckpoint):
        pool = read_pool(run.folder.path)
    known = [one for one in pool.versions if one.step <= last.number] if pool else []
    if not known:
        raise PlaceError(
            f"{place} and {run.folder.path / 'prompts.json'} are missing or damaged, so that nobody knows the prompts "
            f"of step {last.number}. Fix: put one of them back"
        )
    run.view.note(f"{place} is missing or damaged: its prompts are taken from prompts.json")
    return max(known, key=lambda one: (one.score, -one.number)).prompts
