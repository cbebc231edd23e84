"""Metrics: names and reductions declared once, and the jsonl file anyone can read.

Names are those of the field's dashboards. A metric that is not declared here is refused by `check`, so that a typing
error does not become a new curve. Where a run has several policies, what each of them learnt is under
`policies/<name>/`, and what is told of the whole run stands beside it under the plain name.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from numbers import Real
from pathlib import Path
from statistics import fmean

import msgspec

from strop.errors import ConfigError
from strop.files import private
from strop.monitor.writers import Writers
from strop.types import Step

Scores = dict[tuple[int, str], dict[str, float]]
"""Evaluations: (step, split, with `-greedy` if it was) -> mean of each named reward; of what agents and turns got too,
as `agents/<role>/reward/<name>` and `turns/reward/<name>`."""

NAMES: dict[str, str] = {
    "actor/pg_loss": "the batch loss",
    "actor/{sft,dpo}_loss": "the batch loss: negative log-likelihood of a token (SFT), or of a preference (DPO)",
    "actor/dpo_{accuracy,margin}": "share of pairs whose better rollout gained more on the reference; how much more",
    "actor/entropy": "mean entropy of the policy where it sampled",
    "actor/ppo_kl": "how far this step's updates moved the policy on its own samples",
    "actor/pg_clipfrac": "share of sampled tokens whose ratio was clipped",
    "actor/grad_norm": "gradient norm before clipping",
    "actor/lr": "learning rate",
    "actor/pg_clipfrac_lower": "share of sampled tokens whose loss dual clipping bounded",
    "actor/kl_loss": "distance from the reference policy",
    "actor/reward_kl_penalty": "mean distance from the reference policy that was taken off the rewards",
    "actor/kl_coef": "its weight in the next step",
    "actor/skipped": "1 if nothing carried loss and the weights stayed",
    "distill/kl/{mean,max,min}": "student's logprob less the teacher's, of sampled tokens; the mean is by weight",
    "critic/rewards/{mean,max,min}": "total reward of rollouts, with what trained agents got",
    "critic/{advantages,returns,values}/{mean,max,min}": "of sampled tokens",
    "critic/{vf_loss,vf_clipfrac,vf_explained_var,grad_norm,lr}": "the critic's own, where there is one",
    "response_length/{mean,max,min,clip_ratio}": "sampled tokens per turn; the share that ended by length",
    "prompt_length/{mean,max,min}": "prompt tokens per turn",
    "num_turns/{mean,max,min}": "turns per rollout",
    "tool_call_counts/{mean,max,min}": "tool calls per rollout",
    "reward/*": "mean of each named reward",
    "agents/*": "by role, where several agents speak: turns, tokens, tokens that carried loss, rewards",
    "past/*": "by policy and past version that was an opponent: rollouts that met it, and what was got in them",
    "filter/*": "rollouts that carried no loss, by reason",
    "filter_turns/*": "turns without tokens, by reason",
    "filter_tokens/*": "sampled tokens of turns that carried no loss, by reason",
    "tokens/{sampled,trained}": "sampled tokens of the step's rollouts, and those of them that carried loss",
    "tokens/left_out/*": "the others, by reason: with those that carried loss they are all that were sampled",
    "filter_rewards/*": "rewards that reach nobody: a name without weight, an unknown turn or agent, nothing sampled",
    "failed/*": "rollouts that failed, by cause",
    "session/*": "turns that extended a served context exactly, and branches by reason",
    "tree/*": "tokens in turns, tokens laid out once, micro-batches",
    "training/rollout_{logprobs,probs}_diff_{mean,max,p99}": "engine against learner, under the weights that sampled",
    "training/rollout_logprobs_checked": "sampled tokens that were compared",
    "training/rollout_logprobs_off": "those of them that differ by more than learner.logprob_limit",
    "training/off_policy/*": "ratios of learner to engine where they are corrected; staleness of rollouts",
    "prompts/*": "where prompts are improved: the best version's score on validation tasks, versions, those that win a "
    "task, proposals rejected by reason, and what is spent: calls of the optimiser model (failed and lost ones too), "
    "its tokens and cost, rollouts",
    "algorithm/*": "what an algorithm of your own reports beside these",
    "timing_s/*": "seconds by phase",
    "perf/*": "tokens and rollouts per second, the learner's share of the time, tokens in a micro-batch",
    "val-core/*": "evaluation: val-core/<split>/<reward>/{mean,pass,best}@k, greedy splits as <split>-greedy; of "
    "trained agents and of turns the reward is agents/<role>/reward/<reward>, turns/reward/<reward>",
}


def _pattern(name: str) -> str:
    choices = re.sub(r"\{([^}]*)\}", lambda m: "(" + m[1].replace(",", "|") + ")", name)
    return choices.replace("*", ".+")


_KNOWN = re.compile("|".join(f"(?:{_pattern(name)})" for name in NAMES))


_POLICY = re.compile(r"policies/([^/]+)/")


def check(metrics: Iterable[str]) -> None:
    """Crash on a metric nobody declared. Algorithms outside the package have algorithm/ for theirs."""
    for name in metrics:
        assert _KNOWN.fullmatch(plain_name(name)), f"metric {name!r} is not declared in strop.monitor.metrics.NAMES"


def refuse_undeclared(metrics: Mapping[str, object]) -> None:
    """What an algorithm measured is looked at before its step is committed. Raises `ConfigError`.

    >>> refuse_undeclared({"algorithm/share": 0.5})
    >>> refuse_undeclared({"share": 0.5})
    Traceback (most recent call last):
    strop.errors.ConfigError: the algorithm measures 'share', which nobody declared. Fix: call it 'algorithm/share'
    """
    for name, value in metrics.items():
        if not _KNOWN.fullmatch(name):
            own = f"algorithm/{name}"
            raise ConfigError(f"the algorithm measures {name!r}, which nobody declared. Fix: call it {own!r}")
        if not isinstance(value, Real):
            raise ConfigError(f"the algorithm measures {name!r} as {value!r}, not a number. Fix: give it as a float")


def plain_name(name: str) -> str:
    """What a metric of one of several policies is called where there is one.

    >>> plain_name("policies/writer/actor/lr"), plain_name("actor/lr")
    ('actor/lr', 'actor/lr')
    """
    return _POLICY.sub("", name, count=1)


def combine(found: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """The metrics of a step from those of its policies, by name: as they are where there is one. Of several each has
    its own, and the whole run those that say how it is doing.

    >>> combine({"main": {"actor/lr": 0.1}}), combine({"a": {"actor/lr": 0.1}, "b": {"actor/skipped": 1.0}})
    ({'actor/lr': 0.1}, {'policies/a/actor/lr': 0.1, 'policies/b/actor/skipped': 1.0, 'actor/skipped': 1.0})
    """
    if len(found) == 1:
        return dict(*found.values())
    combined = {f"policies/{policy}/{name}": value for policy, own in found.items() for name, value in own.items()}
    for name, reduce in _SHARED.items():
        if values := [own[name] for own in found.values() if name in own]:
            combined[name] = reduce(values)
    return combined


def metrics_of(metrics: Mapping[str, float], policy: str, policies: Collection[str]) -> Mapping[str, float]:
    """The part of a step's metrics that is one policy's."""
    return metrics if len(policies) == 1 else split_policies(metrics).get(policy, {})


def split_policies(metrics: Mapping[str, float]) -> dict[str, dict[str, float]]:
    """What each of several policies measured, by its name; nothing of a run that has one.

    >>> split_policies({"policies/a/actor/lr": 0.1, "policies/b/actor/skipped": 1.0, "actor/skipped": 0.0})
    {'a': {'actor/lr': 0.1}, 'b': {'actor/skipped': 1.0}}
    """
    found: dict[str, dict[str, float]] = {}
    for name, value in metrics.items():
        if part := _POLICY.match(name):
            found.setdefault(part[1], {})[name[part.end() :]] = value
    return found


_SHARED: dict[str, Callable[[list[float]], float]] = {
    "actor/skipped": min,
    **{f"critic/{what}/mean": fmean for what in ("rewards", "advantages")},
    **{f"critic/{what}/max": max for what in ("rewards", "advantages")},
    **{f"critic/{what}/min": min for what in ("rewards", "advantages")},
    "training/rollout_logprobs_diff_max": max,
    "training/rollout_logprobs_checked": sum,
    "training/rollout_logprobs_off": sum,
    "perf/total_num_tokens": sum,
}
"""What is told of a whole run of several policies, and how it comes from theirs."""


class MetricsFile:
    """metrics.jsonl: one object per step and per evaluation. It is made from the store, which is the truth: a resumed
    run writes it anew, so its numbers go on without a seam. `writers` are told the same."""

    def __init__(
        self, path: Path, steps: Iterable[Step], scores: Scores, writers: Writers | None = None, samples: int = 1
    ) -> None:
        self._path, self._writers = path, writers
        lines = [(step.number, 0, step.metrics) for step in steps]
        lines += [(step, 1, flat(split, means, samples)) for (step, split), means in scores.items()]
        points = [(step, metrics) for step, _, metrics in sorted(lines, key=lambda at: at[:2])]
        with open(path, "wb", opener=private) as file:
            file.writelines(_line(step, metrics) for step, metrics in points)
        if writers is not None:
            writers.write_past(points)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        with self._path.open("ab") as file:
            file.write(_line(step, metrics))
        if self._writers is not None:
            self._writers.write(step, metrics)


def _line(step: int, metrics: Mapping[str, float]) -> bytes:
    check(metrics)
    return msgspec.json.encode({"step": step, **metrics}) + b"\n"


def flat(split: str, means: Mapping[str, float], samples: int = 1) -> dict[str, float]:
    """An evaluation with so many samples of every task as metrics. Greedily there is one.

    >>> flat("test", {"reward": 0.5}, 4), flat("test-greedy", {"reward": 0.5}, 4)
    ({'val-core/test/reward/mean@4': 0.5}, {'val-core/test-greedy/reward/mean@1': 0.5})
    """
    k = 1 if split.endswith("-greedy") else samples
    return {f"val-core/{split}/{name}/mean@{k}": value for name, value in means.items()}


_PART = re.compile(r"(?:agents/[^/]+|turns)/reward/(.+)")


def is_part(name: str) -> bool:
    """Whether it is the name of what agents or turns got, not whole rollouts."""
    return bool(_PART.fullmatch(name))


def weigh(means: Mapping[str, float], weights: Mapping[str, float]) -> float | None:
    """What an evaluation came to: the weighted sum of the rewards that count, or None where there are none of them.
    Where whole rollouts got none that has a weight, it is the sum of what agents and turns got.

    >>> weigh({"correct": 0.5, "style": 1.0}, {"correct": 2.0, "tidy": 1.0}), weigh({"style": 1.0}, {"tidy": 1.0})
    (1.0, None)
    >>> weigh({"reward": 0.5, "agents/wolf/reward/win": 0.75, "agents/seer/reward/win": 0.5}, {"reward": 0, "win": 1})
    1.25
    """
    found = {name: weight * means[name] for name, weight in weights.items() if name in means}
    parts = None if any(weights[name] for name in found) else weigh_parts(means, weights)
    return parts if parts is not None else sum(found.values()) if found else None


def weigh_parts(means: Mapping[str, float], weights: Mapping[str, float]) -> float | None:
    """The weighted sum of what agents, by role, and turns got; None where they got nothing that counts. A sum, so that
    an agent which got nothing counts as one that got 0."""
    parts = ((part[1], mean) for name, mean in means.items() if (part := _PART.fullmatch(name)))
    found = [weights[name] * mean for name, mean in parts if weights.get(name)]
    return sum(found) if found else None
