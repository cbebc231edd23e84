"""The curve at the end of a run, as a picture."""

# pyright: basic
# (matplotlib's types are partly unknown)
from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path


def reward_curve(
    path: Path, rewards: Sequence[tuple[int, float]], evaluations: Mapping[str, Sequence[tuple[int, float]]], title: str
) -> None:
    """Mean training reward per step, and every evaluation as points. Needs matplotlib (the `train` extra)."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7.5, 4.2), dpi=140)
    if rewards:
        axes.plot(*zip(*rewards, strict=True), color="#2563eb", linewidth=2, label="training reward, mean of a step")
    marks = iter("osD^vP*X" * 4)
    for name, points in evaluations.items():
        style = ":" if len(points) > 2 else "none"  # a line between two points would claim what nobody measured
        axes.plot(*zip(*points, strict=True), marker=next(marks), linestyle=style, linewidth=1, label=name)
    axes.set(xlabel="step", ylabel="reward", title=title, ylim=(-0.03, 1.05) if _unit(rewards) else None)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8, loc="best")
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)


def _unit(rewards: Sequence[tuple[int, float]]) -> bool:
    return all(0 <= value <= 1 for _, value in rewards)
