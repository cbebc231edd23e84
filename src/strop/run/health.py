"""Whether a run has collapsed: it had learnt something, lost it, and learns nothing any more.

Two kinds are told apart from bad luck, both only after `patience` steps in a row:

    nothing to compare, and no rollout as good as the average was before: too many of them for chance
    rewards down by half or more, and answers that are all cut off, or all alike, or figures that have exploded

A run that never earned anything has lost nothing, and one whose rewards are all high has solved its tasks: neither is
a collapse. Left out: rewards that only turns or agents get, which are no part of a rollout's total.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean, median

from msgspec import Struct
from msgspec.structs import replace

from strop.monitor.metrics import split_policies
from strop.types import Step

MEAN, MAX, MIN = (f"critic/rewards/{name}" for name in ("mean", "max", "min"))
NANO = "strop/nano"
CUT_OFF, ENTROPY = "response_length/clip_ratio", "actor/entropy"
CHANCE = 1e-6
"""So unlikely must it be that a model which is as good as before earned so little."""
EXPLODED = {
    ENTROPY: ("entropy", 1.0, 3.0),
    "actor/ppo_kl": ("the KL divergence of an update", 1.0, 10.0),
    "actor/kl_loss": ("the KL divergence from the reference policy", 5.0, 10.0),
    "training/rollout_logprobs_diff_mean": ("the gap between engine and learner logprobs", 0.1, 10.0),
}
"""metric -> what it is called, the least value that is suspicious, and how many times the highest before it must be."""
LOOKED_AT = (
    *(MEAN, MAX, MIN, CUT_OFF, *EXPLODED),
    *("critic/advantages/min", "critic/advantages/max", "critic/values/mean", "actor/skipped"),
)


class Collapse(Struct, frozen=True):
    """`since` is the first step whose rollouts show it: what sampled them was broken already."""

    since: int
    why: str


def find_collapse(steps: Sequence[Step], patience: int) -> Collapse | None:
    """What the steps of a run say, the last one above all: of the first of its policies that has collapsed. A patience
    of 0 never finds anything."""
    policies = split_policies(steps[-1].metrics) if steps else {}
    for policy in policies:
        if found := _find_collapse([_of_policy(step, policy) for step in steps], patience):
            return Collapse(found.since, f"the policy {policy}: {found.why}")
    return None if policies else _find_collapse(steps, patience)


def _of_policy(step: Step, policy: str) -> Step:
    """A step with the metrics that a policy has of its own, as far as they are looked at, in the place of the run's."""
    found = {name: step.metrics.get(f"policies/{policy}/{name}", step.metrics.get(name)) for name in LOOKED_AT}
    return replace(step, metrics={name: value for name, value in found.items() if value is not None})


def _find_collapse(steps: Sequence[Step], patience: int) -> Collapse | None:
    known = [step for step in steps if MEAN in step.metrics]
    if not patience or len(known) <= patience:
        return None
    return _nothing_earned(known, patience) or _fallen(known, patience)


def warn_of_nothing_yet(steps: Sequence[Step], patience: int, model: str = "") -> str | None:
    """What to say, once, of a run that has had one and the same reward from its beginning: there is nothing to learn
    from, and what has never been there cannot collapse."""
    if not patience or len(steps) != patience or any(MEAN not in step.metrics for step in steps):
        return None
    got = {step.metrics[name] for step in steps for name in (MIN, MAX)}
    if len(got) > 1 or not all(_flat(step.metrics) for step in steps):
        return None
    (value,) = got
    said = f"every rollout of the first {patience} steps got {value:.3g}, so nothing is learnt"
    if value > 0:
        return f"{said}. Fix: take harder tasks"
    return f"{said}. Fix: {suggest_easier(model)}, or show examples"


def suggest_easier(model: str) -> str:
    """What to do where a model earns nothing."""
    nano = "strop/nano knows one tool only, the demo's calculator: take smollm2-135m for another; or " * (model == NANO)
    return f"{nano}take easier tasks, give part of the reward for part of the way"


def warn_of_nothing_since(steps: Sequence[Step], patience: int, rates: Mapping[str, float]) -> str | None:
    """What to say, once, of a run that earned something and for `patience` steps has earned the least there is: too few
    rollouts, perhaps, to call it a collapse. `rates` are the learning rates by the names of their settings."""
    known = [step for step in steps if MEAN in step.metrics]
    if not patience or len(known) <= patience or known[-1] is not steps[-1]:
        return None
    lowest = min(step.metrics[MIN] for step in known)
    earned = [step.metrics[MAX] > lowest for step in known]
    if any(earned[-patience:]) or not earned[-patience - 1] or find_collapse(steps, patience):
        return None
    return (
        f"nothing earned since step {known[-patience - 1].number}: the learning rate may be too high "
        f"({', '.join(f'{name}={rate:g}' for name, rate in rates.items())}), or there are too few rollouts to a "
        "step for rewards this rare. Fix: begin again with a tenth of that rate, or raise loop.groups or "
        "loop.group_size"
    )


def _nothing_earned(steps: Sequence[Step], patience: int) -> Collapse | None:
    found, highest = None, max(step.metrics[MAX] for step in steps)
    for begin in range(len(steps) - 1, 0, -1):
        if not _flat(steps[begin].metrics):
            break
        before, last = steps[:begin], steps[begin:]
        level, top = _level(before), max(step.metrics[MAX] for step in last)
        if level <= top:
            break
        if len(last) >= patience and _chance(before, last, (level - top) / (highest - top)) < CHANCE:
            why = f"no rollout of {_span(last)} got more than {top:.3g}, after {level:.3g} on average before"
            found = Collapse(last[0].number, why)
    return found


def _chance(before: Sequence[Step], last: Sequence[Step], share: float) -> float:
    """That all rollouts of one kind came before, were all steps alike. At least `share` of those before are of it."""
    earlier, later = (sum(len(step.rollouts) for step in part) for part in (before, last))
    return (earlier / (earlier + later)) ** (share * earlier)


def _fallen(steps: Sequence[Step], patience: int) -> Collapse | None:
    before, last = steps[:-patience], steps[-patience:]
    lowest, level = min(step.metrics[MIN] for step in steps), _level(before)
    if level <= lowest or any(step.metrics[MEAN] > (lowest + level) / 2 for step in last):
        return None
    sign = _sign([step.metrics for step in before], [step.metrics for step in last])
    fell = f"the reward fell from {level:.3g} to {_level(last):.3g} on average"
    return None if sign is None else Collapse(last[0].number, f"in {_span(last)} {sign}, and {fell}")


def _sign(before: Sequence[Mapping[str, float]], last: Sequence[Mapping[str, float]]) -> str | None:
    """What all of the last steps show and those before did not."""
    past = {name: [abs(m[name]) for m in before if name in m] for name in (CUT_OFF, *EXPLODED)}
    if past[CUT_OFF] and median(past[CUT_OFF]) <= 0.5 and all(m.get(CUT_OFF, 0.0) >= 0.95 for m in last):
        return "nearly all answers were cut off (policy.train.max_tokens)"
    if past[ENTROPY] and all(m.get(ENTROPY, 1.0) < median(past[ENTROPY]) / 100 for m in last):
        return "all answers were alike"
    for name, (called, least, times) in EXPLODED.items():
        limit = max(least, times * max(past[name], default=0.0))
        if past[name] and all(abs(m.get(name, 0.0)) > limit for m in last):
            return f"{called} was over {limit:.2g}, before at most {max(past[name]):.2g}"
    return None


def _flat(metrics: Mapping[str, float]) -> bool:
    """Whether no reward said what to change: all members of each group got the same. A critic, which expects something
    of its own, always finds something to change; there it is for the rewards alone to tell."""
    advantages = [metrics.get(f"critic/advantages/{name}", 0.0) for name in ("min", "max")]
    return bool(metrics.get("actor/skipped")) or not any(advantages) or "critic/values/mean" in metrics


def _level(steps: Sequence[Step]) -> float:
    return fmean(step.metrics[MEAN] for step in steps)


def _span(steps: Sequence[Step]) -> str:
    return f"steps {steps[0].number} to {steps[-1].number}"
