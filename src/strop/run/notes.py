"""What a step's metrics tell a user, and when they tell that a run must stop."""

from __future__ import annotations

import shlex
from collections import Counter
from typing import NoReturn

from strop.errors import AgentError, LearnerError
from strop.monitor.summary import failures, summarize
from strop.run.checkpoints import list_checkpoints, rank_steps
from strop.run.health import Collapse, nothing_since, nothing_yet
from strop.run.state import Run
from strop.trajectory import explain
from strop.types import Step


def note_trouble(run: Run, step: Step) -> None:
    """What a step's metrics say that a user should know of."""
    number, metrics, note = step.number, step.metrics, run.view.note
    if off := int(metrics.get("training/rollout_logprobs_off", 0)):
        gap, checked = (metrics[f"training/rollout_logprobs_{name}"] for name in ("diff_max", "checked"))
        note(
            f"step {number}: engine and learner logprobs of {off:,} of {checked:,.0f} tokens differ by more than "
            f"learner.logprob_limit, {gap:.1e} at most"
        )
    most = run.config.learner.token_budget
    budgets = [most, *(step.metrics.get("perf/token_budget", most) for step in run.steps[-2:])]
    if budgets[-1] < budgets[-2]:
        note(
            f"step {number}: a micro-batch of {budgets[-2]:.0f} tokens took more memory than the GPU has; going on "
            f"with {budgets[-1]:.0f}, which learner.token_budget could be set to"
        )
    patience, rate = run.config.loop.collapse_patience, run.config.learner.optim.lr
    if why := nothing_yet(run.steps, patience, run.config.policy.model) or nothing_since(run.steps, patience, rate):
        note(why)
    if metrics["actor/skipped"]:
        reasons = "; ".join(
            f"{n} rollouts {explain(reason)}" for reason, n in Counter(step.dropped.values()).most_common()
        )
        note(f"step {number} had nothing to train on: {reasons}")
    if (failed := failures(metrics)).total() > len(step.rollouts) / 10:
        reasons = ", ".join(f"{cause} {count}" for cause, count in failed.items())
        look = f"strop rollouts {run.folder.path} --status failed"
        note(f"step {number}: {failed.total()} of {len(step.rollouts)} rollouts failed ({reasons}): {look}")


def stop_if_hopeless(run: Run, patience: int = 3) -> None:
    """Some failures are data; step after step of nothing else is an outage."""
    last = run.steps[-patience:]
    if len(last) == patience and all(failures(step.metrics).total() == len(step.rollouts) for step in last):
        raise AgentError(
            f"all rollouts of the last {patience} steps failed ({', '.join(failures(last[-1].metrics))}): look at them "
            f"with `strop rollouts {run.folder.path} --status failed`, fix the cause, then resume"
        )


def stop_collapsed(run: Run, fallen: Collapse, seconds: float) -> NoReturn:
    """The run's result is the best checkpoint from before, if there is one. `best` leads to it from now on."""
    place, config = run.folder.path, run.config
    # Step n is sampled by the weights behind step n - 1, or behind one as far back as staleness allows.
    good = rank_steps(run, [s for s in list_checkpoints(run) if s.number < fallen.since - 1 - config.loop.staleness])
    result, rate = str(good[-1].checkpoint) if good else None, config.learner.optim.lr
    if result is not None:
        run.folder.name_best(result)
        kept = f"The result is {run.folder.checkpoint(result)}, the best checkpoint before that"
        again = f"strop train --from {shlex.quote(f'{place}:best')} --lr {rate / 10:g}"
    else:
        kept = "No checkpoint is left from before that (loop.checkpoint_every)"
        again = f"type what began this run, with --lr {rate / 10:g} behind it"
    why = (
        f"collapsed: {fallen.why}. {kept}. Fix: if agent and rewards are sound, lower learner.optim.lr (it was "
        f"{rate:g}) and begin again: {again}; with loop.collapse_patience=0 no run is stopped"
    )
    summarize(config, place, run.steps, run.scores, seconds=seconds, done=False, collapsed=why, result=result)
    raise LearnerError(why)
