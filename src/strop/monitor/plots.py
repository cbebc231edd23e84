"""The curve at the end of a run, and the curves of several, as pictures."""

# pyright: basic
# (matplotlib's types are partly unknown)
from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

Points = Sequence[tuple[int, float]]
"""Step and value."""


def plot_rewards(path: Path, rewards: Points, evaluations: Mapping[str, Points], title: str) -> None:
    """Mean training reward per step, and every evaluation as points. Needs matplotlib (the `train` extra)."""
    with _picture(path, title, unit=_unit(rewards)) as axes:
        if rewards:
            axes.plot(
                *zip(*rewards, strict=True), color="#2563eb", linewidth=2, label="training reward, mean of a step"
            )
        marks = iter("osD^vP*X" * 4)
        for name, points in evaluations.items():
            style = ":" if len(points) > 2 else "none"  # a line between two points would claim what nobody measured
            axes.plot(*zip(*points, strict=True), marker=next(marks), linestyle=style, linewidth=1, label=name)


def draw_curves(path: Path, runs: Mapping[str, tuple[Points, Points]], title: str) -> None:
    """The training reward of several runs as lines, their evaluations as points of the same colour."""
    with _picture(path, title, unit=all(_unit(points) for both in runs.values() for points in both)) as axes:
        for number, (name, (trained, evaluated)) in enumerate(runs.items()):
            colour = f"C{number % 10}"
            if trained:
                axes.plot(*zip(*trained, strict=True), color=colour, linewidth=2, label=name)
            if evaluated:
                label = f"{name}, evaluated" if trained else name
                axes.plot(*zip(*evaluated, strict=True), color=colour, marker="o", linestyle="none", label=label)


@contextmanager
def _picture(path: Path, title: str, *, unit: bool) -> Generator[Any]:
    """Axes to draw rewards over steps on; the picture is saved when they are left."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7.5, 4.2), dpi=140)
    try:
        yield axes
        axes.set(xlabel="step", ylabel="reward", title=title, ylim=(-0.03, 1.05) if unit else None)
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        if axes.lines:
            axes.legend(frameon=False, fontsize=8, loc="best")
        figure.tight_layout()
        figure.savefig(path)
    finally:
        plt.close(figure)


def _unit(rewards: Points) -> bool:
    return all(0 <= value <= 1 for _, value in rewards)
