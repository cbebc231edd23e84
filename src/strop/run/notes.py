"""What a step's metrics tell a user, and when they tell that a run must stop."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NoReturn

from strop.config import Config, trained_policies
from strop.errors import AgentError, LearnerError
from strop.monitor.metrics import metrics_of, split_policies
from strop.monitor.summary import failures, summarize
from strop.run.checkpoints import list_checkpoints, rank_steps
from strop.run.health import MAX, MEAN, MIN, Collapse, warn_of_nothing_since, warn_of_nothing_yet
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
    policies = trained_policies(run.config)
    for name in policies:
        if why := explain_budget(run.steps, name, policies):
            note(f"step {number}: {why}")
    patience, first = run.config.loop.collapse_patience, next(iter(policies.values()))
    model, rates = first.policy.model, list_rates(run.config)
    if why := warn_of_nothing_yet(run.steps, patience, model) or warn_of_nothing_since(run.steps, patience, rates):
        note(why)
    if metrics["actor/skipped"]:
        note(f"step {number} had nothing to train on: {explain_skipped(step)}")
    if unknown := int(metrics.get("filter_turns/excluded_unknown", 0)):
        note(
            f"step {number}: {unknown} exclusions name no turn of their rollout, so what they meant is trained. Fix: "
            "give the id of the model's answer"
        )
    for name, own in split_policies(metrics).items():
        if own["actor/skipped"] and not metrics["actor/skipped"]:
            note(f"step {number} had nothing to train {name} on, whose weights stay: {list_reasons(own)}")
    if (failed := failures(metrics)).total() > len(step.rollouts) / 10:
        reasons = ", ".join(f"{cause} {count}" for cause, count in failed.items())
        look = f"strop rollouts {run.folder.path} --status failed"
        note(f"step {number}: {failed.total()} of {len(step.rollouts)} rollouts failed ({reasons}): {look}")


def explain_skipped(step: Step) -> str:
    """Why a step trained nothing. Rewards that agree are no fault by themselves: their mean tells a solved task from a
    hopeless one."""
    mean, low, high = (step.metrics.get(name) for name in (MEAN, MIN, MAX))
    if mean is not None and set(step.dropped.values()) == {"zero_variance"}:
        where = "of the step" if low == high else "within each group"
        return f"all rewards {where} are equal (mean {mean:.3f}): nothing to compare"
    reasons = Counter(step.dropped.values()).most_common()
    return "; ".join(f"{n} rollouts {explain(reason)}" for reason, n in reasons)


def explain_budget(steps: Sequence[Step], policy: str, policies: Mapping[str, Config]) -> str:
    """What to say where the last step of a policy was made in smaller pieces than the one before."""
    most = policies[policy].learner.token_budget
    budgets = [most, *(metrics_of(s.metrics, policy, policies).get("perf/token_budget", most) for s in steps[-2:])]
    if budgets[-1] >= budgets[-2]:
        return ""
    section = f"policies.{policy}.learner" if len(policies) > 1 else "learner"
    return (
        f"a micro-batch of {budgets[-2]:.0f} tokens took more memory than the GPU has; going on with "
        f"{budgets[-1]:.0f}, which {section}.token_budget could be set to"
    )


def list_reasons(metrics: Mapping[str, float]) -> str:
    """Why rollouts carried no loss for a policy, by its metrics, the commonest first."""
    left = Counter({name.removeprefix("filter/"): int(n) for name, n in metrics.items() if name.startswith("filter/")})
    return "; ".join(f"{n} rollouts {explain(reason)}" for reason, n in left.most_common())


def list_rates(config: Config) -> dict[str, float]:
    """The learning rates of a run, by the whole names of the settings."""
    if not config.policies:
        return {"learner.optim.lr": config.learner.optim.lr}
    policies = trained_policies(config)
    return {f"policies.{name}.learner.optim.lr": own.learner.optim.lr for name, own in policies.items()}


def stop_if_hopeless(run: Run, patience: int = 3) -> None:
    """Some failures are data; step after step of nothing else is an outage."""
    last = run.steps[-patience:]
    if len(last) == patience and all(failures(step.metrics).total() == len(step.rollouts) for step in last):
        raise AgentError(
            f"all rollouts of the last {patience} steps failed ({', '.join(failures(last[-1].metrics))}). Fix: look at "
            f"them with `strop rollouts {run.folder.path} --status failed`, correct the cause, then resume"
        )


def stop_collapsed(run: Run, fallen: Collapse, seconds: float) -> NoReturn:
    """The run's result is the best checkpoint from before, if there is one. `best` leads to it from now on."""
    place, config = run.folder.path, run.config
    # Step n is sampled by the weights behind step n - 1, or behind one as far back as staleness allows.
    good = rank_steps(run, [s for s in list_checkpoints(run) if s.number < fallen.since - 1 - config.loop.staleness])
    result, rates = str(good[-1].checkpoint) if good else None, list_rates(config)
    lower = [f"--set {name}={rate / 10:g}" for name, rate in rates.items()]
    lower = lower if config.policies else [f"--lr {config.learner.optim.lr / 10:g}"]
    if result is not None:
        run.folder.name_best(result)
        kept = f"The result is {run.folder.checkpoint(result)}, the best checkpoint before that"
        again = f"strop train --from {shlex.quote(f'{place}:best')} {' '.join(lower)}"
    else:
        kept = "No checkpoint is left from before that (loop.checkpoint_every)"
        again = f"type what began this run, with {' '.join(lower)} behind it"
    why = (
        f"collapsed: {fallen.why}. {kept}. Fix: if agent and rewards are sound, lower "
        f"{' and '.join(f'{name} (it was {rate:g})' for name, rate in rates.items())} and begin again: {again}; with "
        "loop.collapse_patience=0 no run is stopped"
    )
    summarize(config, place, run.steps, run.scores, seconds=seconds, done=False, collapsed=why, result=result)
    raise LearnerError(why)
