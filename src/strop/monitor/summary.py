"""What is left of a run when it ends: summary.json and the curve."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
from msgspec import Struct

from strop.config import Config
from strop.folder import write_whole
from strop.monitor.metrics import Scores
from strop.monitor.plot import reward_curve
from strop.types import Step


class Summary(Struct, kw_only=True):
    """A run in one object, also written as summary.json.

    `start` and `end` are the mean reward on the first evaluated split before and after training, sampled; `_greedy`
    the same, greedily. `before` and `after` have every split and every named reward, `scores` the evaluations between.
    `failed` counts rollouts of training by the cause of their failure. `max_logprob_diff` is the largest gap between
    engine and learner over every token of the run (`tokens_checked`).
    """

    start: float | None
    end: float | None
    start_greedy: float | None
    end_greedy: float | None
    seconds: float
    steps: int
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
    scores: dict[str, dict[str, list[tuple[int, float]]]]


def summarize(config: Config, folder: Path, steps: Sequence[Step], scores: Scores, *, seconds: float) -> Summary:
    """Make the summary, write it as summary.json and draw curve.png into `folder`."""
    first = config.loop.eval_splits[0] if config.loop.eval_splits else ""
    start, end = ends(scores, first, "reward")
    start_greedy, end_greedy = ends(scores, f"{first}-greedy", "reward")
    last = steps[-1] if steps else None
    mean = "critic/rewards/mean"
    rewards = [(step.number, step.metrics[mean]) for step in steps if mean in step.metrics]
    evaluated = {split: means["reward"] for split, means in curves(scores).items() if "reward" in means}
    reward_curve(folder / "curve.png", rewards, evaluated, f"{config.policy.model}, {config.algorithm.name}")
    points = curves(scores)
    summary = Summary(
        start=start,
        end=end,
        start_greedy=start_greedy,
        end_greedy=end_greedy,
        seconds=round(seconds, 2),
        steps=len(steps),
        seeds=[config.seed],
        model=config.policy.model,
        version=last.version if last else "1.0",
        digest=last.digest if last else None,
        checkpoint=last.checkpoint if last else None,
        failed=dict(sum((failures(step.metrics) for step in steps), Counter[str]())),
        max_logprob_diff=max((s.metrics.get("training/rollout_logprobs_diff_max", 0.0) for s in steps), default=0.0),
        tokens_checked=int(sum(s.metrics.get("training/rollout_logprobs_checked", 0.0) for s in steps)),
        before={split: {name: at[0][1] for name, at in rewards.items()} for split, rewards in points.items()},
        after={split: {name: at[-1][1] for name, at in rewards.items()} for split, rewards in points.items()},
        scores=points,
    )
    write_whole(folder / "summary.json", msgspec.json.format(msgspec.json.encode(summary), indent=2) + b"\n")
    return summary


def failures(metrics: Mapping[str, float]) -> Counter[str]:
    """Failed rollouts of a step by cause."""
    return Counter({name.removeprefix("failed/"): int(n) for name, n in metrics.items() if name.startswith("failed/")})


def curves(scores: Scores) -> dict[str, dict[str, list[tuple[int, float]]]]:
    """split -> reward name -> points in order of steps; splits in the order they were evaluated in.

    >>> curves({(0, "test"): {"reward": 0.1}, (9, "test"): {"reward": 0.9}})
    {'test': {'reward': [(0, 0.1), (9, 0.9)]}}
    """
    out: dict[str, dict[str, list[tuple[int, float]]]] = {}
    for (step, split), means in sorted(scores.items(), key=lambda item: item[0][0]):
        for name, value in means.items():
            out.setdefault(split, {}).setdefault(name, []).append((step, value))
    return out


def ends(scores: Scores, split: str, name: str) -> tuple[float | None, float | None]:
    """The first and the last mean of a reward on a split."""
    points: Sequence[tuple[int, float]] = curves(scores).get(split, {}).get(name, [])
    return (points[0][1], points[-1][1]) if points else (None, None)
