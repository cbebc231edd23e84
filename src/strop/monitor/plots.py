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
GREY = "#9ca3af"
PANELS = 12
"""Rewards of agents that are drawn at most."""


def plot_rewards(
    path: Path,
    rewards: Points,
    evaluations: Mapping[str, Points],
    title: str,
    losses: Points = (),
    *,
    name: str = "training reward, mean of a step",
) -> None:
    """Mean training reward per step, or where there is none the loss, on an axis of its own; and every evaluation as
    points. Needs matplotlib (the `train` extra)."""
    unit = bool(rewards or evaluations) and all(map(_unit, [rewards, *evaluations.values()]))
    label = "reward" if rewards or evaluations or not losses else "loss"
    with _picture(path, title, unit=unit, label=label) as axes:
        if rewards:
            axes.plot(
                *zip(*rewards, strict=True),
                color="#2563eb",
                linewidth=2,
                marker=_mark(rewards),
                label=name,
            )
        marks = iter("osD^vP*X" * 4)
        for split, points in evaluations.items():
            style = ":" if len(points) > 2 else "none"  # a line between two points would claim what nobody measured
            axes.plot(*zip(*points, strict=True), marker=next(marks), linestyle=style, linewidth=1, label=split)
        if losses:
            other = axes if label == "loss" else axes.twinx()
            other.plot(*zip(*losses, strict=True), color=GREY, linewidth=2, marker=_mark(losses))
            other.set(ylabel="loss", ylim=(0.0, None))
            other.spines["top"].set_visible(False)
            axes.plot([], [], color=GREY, linewidth=2, label="training loss, mean of a step")


def draw_curves(path: Path, runs: Mapping[str, tuple[Points, Points]], title: str) -> None:
    """The training reward of several runs as lines, their evaluations as points of the same colour."""
    with _picture(path, title, unit=all(_unit(points) for both in runs.values() for points in both)) as axes:
        for number, (name, (trained, evaluated)) in enumerate(runs.items()):
            colour = f"C{number % 10}"
            if trained:
                axes.plot(*zip(*trained, strict=True), color=colour, linewidth=2, marker=_mark(trained), label=name)
            if evaluated:
                label = f"{name}, evaluated" if trained else name
                axes.plot(*zip(*evaluated, strict=True), color=colour, marker="o", linestyle="none", label=label)


def draw_agents(path: Path, rewards: Mapping[str, Mapping[str, Points]]) -> None:
    """A panel for every reward that agents were given, with a line for each role; a role has one colour in all."""
    rewards = dict([*sorted(rewards.items())][:PANELS])
    roles = sorted({role for lines in rewards.values() for role in lines})
    colours = {role: f"C{number % 10}" for number, role in enumerate(roles)}
    columns = min(len(rewards), 2)
    rows = -(-len(rewards) // columns)
    with _figure(path, rows, columns, size=(4.6 * columns, 2.9 * rows + 0.4)) as (figure, panels):
        for axes, (name, lines) in zip(panels, rewards.items(), strict=False):
            for role, points in lines.items():
                axes.plot(*zip(*points, strict=True), color=colours[role], linewidth=2, marker=_mark(points))
            _finish(axes, name, unit=all(_unit(points) for points in lines.values()))
        for axes in panels[len(rewards) :]:
            axes.set_visible(False)
        handles = [figure.axes[0].plot([], [], color=colours[role], linewidth=2, label=role)[0] for role in roles]
        figure.legend(handles=handles, loc="outside lower center", ncols=min(len(roles), 6), frameon=False, fontsize=8)


@contextmanager
def _picture(path: Path, title: str, *, unit: bool, label: str = "reward") -> Generator[Any]:
    """Axes to draw rewards over steps on; the picture is saved when they are left."""
    with _figure(path, 1, 1, size=(7.5, 4.2)) as (_, (axes,)):
        yield axes
        _finish(axes, title, unit=unit, label=label)
        if axes.lines:
            axes.legend(frameon=False, fontsize=8, loc="best")


@contextmanager
def _figure(path: Path, rows: int, columns: int, size: tuple[float, float]) -> Generator[tuple[Any, list[Any]]]:
    """A figure and its panels; saved when it is left."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, panels = plt.subplots(rows, columns, figsize=size, dpi=140, layout="constrained", squeeze=False)
    try:
        yield figure, list(panels.flat)
        figure.savefig(path)
    finally:
        plt.close(figure)


def _finish(axes: Any, title: str, *, unit: bool, label: str = "reward") -> None:
    from matplotlib.ticker import MaxNLocator

    axes.set(xlabel="step", ylabel=label, title=title.replace("$", r"\$"), ylim=(-0.03, 1.05) if unit else None)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)


def _mark(points: Points) -> str:
    """A line through one point would not be seen."""
    return "o" if len(points) == 1 else ""


def _unit(rewards: Points) -> bool:
    return all(0 <= value <= 1 for _, value in rewards)
