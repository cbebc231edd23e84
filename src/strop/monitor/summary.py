"""What is left of a run when it ends: summary.json and the curve."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
from msgspec import Struct

from strop.config import Config, describe_algorithms, describe_models, weigh_rewards
from strop.files import close_to_others, write_whole
from strop.monitor.metrics import Scores, weigh
from strop.monitor.plots import draw_agents, plot_rewards
from strop.types import Step

LOSSES = ("actor/sft_loss", "actor/dpo_loss")
Points = list[tuple[int, float]]
"""Step and value, in order of steps."""


class Summary(Struct, kw_only=True):
    """A run in one object, also written as summary.json.

    `start` and `end` are the mean total, of the rewards that count (algorithm.rewards), on the first evaluated split
    before and after training, sampled; `_greedy` the same, greedily. `before` and `after` have every split and every
    named reward, `scores` the evaluations between. `done` says whether all steps and the last evaluation were made.
    `collapsed` says why a run was stopped that had lost what it learnt; `checkpoint` is the best from before, then.
    `failed` counts rollouts of training by the cause of their failure. `max_logprob_diff` is the largest gap between
    engine and learner over every token of the run (`tokens_checked`). `prompts`, where those are improved, is what the
    last step says of them: the best version and its score, and what is spent. `folder` is where everything of it lies.
    """

    start: float | None
    end: float | None
    start_greedy: float | None
    end_greedy: float | None
    seconds: float
    steps: int
    done: bool
    collapsed: str | None
    seeds: list[int]
    model: str
    version: str
    digest: str | None
    checkpoint: str | None
    failed: dict[str, int]
    max_logprob_diff: float
    tokens_checked: int
    before: dict[str, dict[str, float]]
    after: dict[str, dict[str, float]]
    scores: dict[str, dict[str, Points]]
    prompts: dict[str, float] = {}
    folder: str = ""


def collect_agents(steps: Sequence[Step]) -> dict[str, dict[str, list[tuple[int, float]]]]:
    """The mean of every reward that agents were given, by its name and role, over the steps."""
    found: dict[str, dict[str, list[tuple[int, float]]]] = {}
    for step in steps:
        for name, value in step.metrics.items():
            if name.startswith("agents/") and "/reward/" in name:
                role, _, reward = name.removeprefix("agents/").partition("/reward/")
                found.setdefault(reward, {}).setdefault(role, []).append((step.number, value))
    return found


def summarize(
    config: Config,
    folder: Path,
    steps: Sequence[Step],
    scores: Scores,
    *,
    seconds: float,
    done: bool,
    collapsed: str | None = None,
    result: str | None = None,
) -> Summary:
    """Make the summary, write it as summary.json and draw curve.png into `folder`. `result` is the checkpoint that is
    left of a run that `collapsed`."""
    first = config.loop.eval_splits[0] if config.loop.eval_splits else ""
    evaluated = totals(scores, weigh_rewards(config))
    start, end = ends(evaluated.get(first, []))
    start_greedy, end_greedy = ends(evaluated.get(f"{first}-greedy", []))
    last = steps[-1] if steps else None
    mean = "critic/rewards/mean" if config.algorithm.improves == "weights" else "prompts/best"
    rewards = [(step.number, step.metrics[mean]) for step in steps if mean in step.metrics]
    losses = [(step.number, loss) for step in steps if not rewards and (loss := find_loss(step.metrics)) is not None]
    title = f"{describe_models(config)}, {describe_algorithms(config)}"
    named = {"name": "best version, on validation tasks"} if mean == "prompts/best" else {}
    plot_rewards(folder / "curve.png", rewards, evaluated, title, losses, **named)
    close_to_others(folder / "curve.png")
    if agents := collect_agents(steps):
        draw_agents(folder / "agents.png", agents)
        close_to_others(folder / "agents.png")
    points = curves(scores)
    told = last.metrics if last else {}
    summary = Summary(
        folder=str(folder),
        prompts={name.removeprefix("prompts/"): told[name] for name in told if name.startswith("prompts/")},
        start=start,
        end=end,
        start_greedy=start_greedy,
        end_greedy=end_greedy,
        seconds=round(seconds, 2),
        steps=len(steps),
        done=done,
        collapsed=collapsed,
        seeds=[config.seed],
        model=describe_models(config),
        version=last.version if last else "1.0",
        digest=last.digest if last else None,
        checkpoint=result if collapsed else last.checkpoint if last else None,
        failed=dict(sum((failures(step.metrics) for step in steps), Counter[str]())),
        max_logprob_diff=max((s.metrics.get("training/rollout_logprobs_diff_max", 0.0) for s in steps), default=0.0),
        tokens_checked=int(sum(s.metrics.get("training/rollout_logprobs_checked", 0.0) for s in steps)),
        before={split: {name: at[0][1] for name, at in rewards.items()} for split, rewards in points.items()},
        after={split: {name: at[-1][1] for name, at in rewards.items()} for split, rewards in points.items()},
        scores=points,
    )
    write_whole(folder / "summary.json", msgspec.json.format(msgspec.json.encode(summary), indent=2) + b"\n")
    return summary


def find_loss(metrics: Mapping[str, float]) -> float | None:
    """What a step on stored data is judged by."""
    return next((metrics[name] for name in LOSSES if name in metrics), None)


def failures(metrics: Mapping[str, float]) -> Counter[str]:
    """Failed rollouts of a step by cause."""
    return Counter({name.removeprefix("failed/"): int(n) for name, n in metrics.items() if name.startswith("failed/")})


def curves(scores: Scores) -> dict[str, dict[str, Points]]:
    """split -> reward name -> points in order of steps; splits in the order they were evaluated in.

    >>> curves({(0, "test"): {"reward": 0.1}, (9, "test"): {"reward": 0.9}})
    {'test': {'reward': [(0, 0.1), (9, 0.9)]}}
    """
    out: dict[str, dict[str, Points]] = {}
    for (step, split), means in sorted(scores.items(), key=lambda item: item[0][0]):
        for name, value in means.items():
            out.setdefault(split, {}).setdefault(name, []).append((step, value))
    return out


def totals(scores: Scores, weights: Mapping[str, float]) -> dict[str, Points]:
    """split -> the total of the rewards that count, in order of steps.

    >>> totals({(0, "test"): {"correct": 0.1, "style": 1.0}, (9, "test"): {"correct": 0.9}}, {"correct": 1.0})
    {'test': [(0, 0.1), (9, 0.9)]}
    """
    out: dict[str, Points] = {}
    for (step, split), means in sorted(scores.items(), key=lambda item: item[0][0]):
        if (total := weigh(means, weights)) is not None:
            out.setdefault(split, []).append((step, total))
    return out


def ends(points: Points) -> tuple[float | None, float | None]:
    """The first and the last."""
    return (points[0][1], points[-1][1]) if points else (None, None)
