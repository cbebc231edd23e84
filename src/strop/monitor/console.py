"""What a user sees while a run goes on: a live panel on a terminal, plain lines elsewhere, nothing for machines."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from typing import TextIO

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from strop.monitor.metrics import split_policies
from strop.monitor.screen import Screen
from strop.printable import escape_text

CURVES = {
    "prompts/best": "best version",
    "critic/rewards/mean": "reward",
    "actor/sft_loss": "loss",
    "actor/dpo_loss": "loss",
}
"""What is drawn as a curve, and its label: the first that a run measures. Stored data has no reward that rises,
and what versions of prompts get that are tried goes up and down."""
BARS = "▁▂▃▄▅▆▇█"
SHOWN = {
    "prompts/best_version": "version",
    "prompts/versions": "versions",
    "prompts/calls": "calls",
    "prompts/tokens": "tokens",
    "prompts/cost": "cost",
    "actor/dpo_accuracy": "right pairs",
    "distill/kl/mean": "KL to teacher",
    "actor/entropy": "entropy",
    "actor/grad_norm": "grad norm",
    "actor/pg_clipfrac": "clipped",
    "training/rollout_logprobs_diff_max": "logprob gap",
    "response_length/mean": "tokens/turn",
    "training/off_policy/staleness/mean": "staleness",
    "session/exact_share": "exact",
    "perf/rollouts": "rollouts/s",
    "perf/throughput": "tokens/s",
    "perf/learner_busy": "learner busy",
    "timing_s/step": "s/step",
}

COUNTS = ("prompts/best_version", "prompts/versions", "prompts/calls", "prompts/tokens")
PATIENCE = 5.0
"""Seconds after which a rollout is worth a word."""
Slow = tuple[str, float]
"""A rollout, and the seconds that it has been at work."""


class View:
    """Told of everything, in this order: title, then phases, steps, evaluations and notes as they happen. What a view
    does not show it ignores."""

    def title(self, text: str, steps: int) -> None: ...

    def phase(self, name: str, done: int = 0, total: int = 0, slowest: Sequence[Slow] = ()) -> None:
        """What is being done, how much of it is, and what it waits for longest."""

    def step(self, number: int, metrics: Mapping[str, float]) -> None: ...

    def evaluation(self, step: int, scores: Mapping[str, float]) -> None: ...

    def note(self, text: str) -> None: ...

    def plan(self, lines: Sequence[str]) -> None:
        """What will run where, before it does."""

    def show_past(self, steps: Sequence[tuple[int, Mapping[str, float]]]) -> None:
        """Steps that were made before the run was resumed."""

    def __enter__(self) -> View:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        return None


class Silent(View):
    """For machines: `--json` prints the summary and nothing else."""


class Lines(View):
    """A line per step and per evaluation."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._steps = 0

    def title(self, text: str, steps: int) -> None:
        self._steps = steps
        self._print(text)

    def step(self, number: int, metrics: Mapping[str, float]) -> None:
        label, value = find_curve(metrics)
        line = "  ".join([f"step {number}/{self._steps}", f"{label} {format_figure(value)}", *facts(metrics)])
        self._print(line)
        for policy, own in facts_by_policy(metrics).items():
            self._print("  ".join([f"  {policy}:", *own]))

    def evaluation(self, step: int, scores: Mapping[str, float]) -> None:
        self._print(f"evaluation after step {step}  " + "  ".join(f"{k} {format_figure(v)}" for k, v in scores.items()))

    def note(self, text: str) -> None:
        self._print(f"note: {text}")

    def plan(self, lines: Sequence[str]) -> None:
        for line in lines:
            self.note(f"plan: {line}")

    def _print(self, text: str) -> None:
        print(escape_text(text), file=self._out, flush=True)


class Panelled(View):
    """A live panel: where the run is, the curve of the reward or the loss, the figures worth watching."""

    def __init__(self, console: Console) -> None:
        self._title, self._steps, self._number = "", 0, 0
        self._phase, self._done, self._total = "", 0, 0
        self._slowest: list[Slow] = []
        self._label, self._curve = "", list[float]()
        self._seconds: list[float] = []
        self._metrics: Mapping[str, float] = {}
        self._scores: dict[str, list[float]] = {}
        self._notes: list[str] = []
        self._began = time.monotonic()
        self._before = 0.0
        self._live = Live(console=console, get_renderable=self._draw, refresh_per_second=8)

    def __enter__(self) -> View:
        self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._phase, self._total, self._slowest = "stopped" if kind else "done", 0, []
        self._seconds = []
        self._live.stop()

    def title(self, text: str, steps: int) -> None:
        self._title, self._steps = text, steps

    def phase(self, name: str, done: int = 0, total: int = 0, slowest: Sequence[Slow] = ()) -> None:
        self._phase, self._done, self._total = name, done, total
        self._slowest = [slow for slow in slowest if slow[1] >= PATIENCE]

    def step(self, number: int, metrics: Mapping[str, float]) -> None:
        if not self._seconds:
            self._before = time.monotonic() - self._began - metrics["timing_s/step"]
        self._number, self._metrics = number, metrics
        self._draw_on(metrics)
        self._seconds.append(metrics["timing_s/step"])

    def show_past(self, steps: Sequence[tuple[int, Mapping[str, float]]]) -> None:
        self._curve = []
        for _, metrics in steps:
            self._draw_on(metrics)
        self._number = steps[-1][0] if steps else 0

    def _draw_on(self, metrics: Mapping[str, float]) -> None:
        self._label, value = find_curve(metrics)
        self._curve.append(0.0 if math.isnan(value) else value)

    def evaluation(self, step: int, scores: Mapping[str, float]) -> None:
        for name, value in scores.items():
            self._scores.setdefault(name, []).append(value)

    def note(self, text: str) -> None:
        self._notes = [*self._notes, text][-4:]

    def plan(self, lines: Sequence[str]) -> None:
        """It stays above the panel."""
        for line in lines:
            self._live.console.print(Text(escape_text(line), style="dim"))

    def _draw(self) -> Panel:
        head = Table.grid(expand=True)
        head.add_column(no_wrap=True, overflow="ellipsis")
        head.add_column(justify="right", no_wrap=True)
        head.add_row(Text(self._title, style="bold"), Text(self._clock(), style="dim"))
        body: list[Table | Text | Figures] = [head, self._bar()]
        width = max([20, *(len(name) + 2 for name in self._scores)])
        if self._curve:
            line = Text(f"{self._label:<{width}}")
            line.append(format_figure(self._curve[0]), style="dim")
            line.append(f" {draw_bars(self._curve)} ", style="green")
            line.append(format_figure(self._curve[-1]), style="bold green")
            body.append(line)
        splits = dict.fromkeys(name.rpartition(" ")[0] for name in self._scores)
        by_split = [{k: v for k, v in self._scores.items() if k.rpartition(" ")[0] == split} for split in splits]
        for name, values in [row for scores in by_split for row in drop_repeated(scores).items()]:
            line = Text(f"{name:<{width}}", style="dim")
            line.append(" → ".join(format_figure(value) for value in values[-6:]), style="cyan")
            body.append(line)
        if self._metrics:
            body.append(Figures(facts(self._metrics)))
            for policy, own in facts_by_policy(self._metrics).items():
                body.append(Figures(own, f"{policy:<{width}}"))
        if self._slowest:
            waits = ", ".join(f"{rollout} for {format_minutes(seconds)}" for rollout, seconds in self._slowest)
            body.append(Text(f"{'at work longest':<{width}}{waits}", style="dim"))
        body += [Text(f"! {note}", style="yellow") for note in self._notes]
        return Panel(Group(*body), border_style="blue", padding=(0, 1))

    def _clock(self) -> str:
        clock = format_minutes(time.monotonic() - self._began)
        if self._steps:
            clock = f"step {self._number}/{self._steps} · {clock}"
        if self._seconds:
            recent = self._seconds[-5:]
            # What came before the first step, mostly an evaluation, comes again after the last one.
            left = sum(recent) / len(recent) * (self._steps - self._number) + self._before
            clock += f" · about {format_minutes(left)} left"
        return clock

    def _bar(self) -> Table:
        row = Table.grid(padding=(0, 1))
        bar = ProgressBar(total=self._total, completed=self._done, width=40) if self._total else Text("")
        row.add_row(Text(f"{self._phase:<20}"), bar, Text(f"{self._done}/{self._total}" if self._total else ""))
        return row


class Figures:
    """Labels with their values behind `before`, as many to a line as fit: none is broken by a line's end. (Rich breaks
    lines at every space, one that is called non-breaking too.)"""

    def __init__(self, figures: Sequence[str], before: str = "") -> None:
        self._figures, self._before = figures, before

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        line = self._before
        for number, figure in enumerate(self._figures):
            joined = f"{line}   {figure}" if number else line + figure
            if number and cell_len(joined) > options.max_width:
                yield Text(line, style="dim")
                joined = " " * len(self._before) + figure
            line = joined
        yield Text(line, style="dim")


def find_curve(metrics: Mapping[str, float]) -> tuple[str, float]:
    """The figure of a step that is drawn as a curve, behind its label.

    >>> find_curve({"actor/sft_loss": 0.5}), find_curve({})
    (('loss', 0.5), ('reward', nan))
    """
    found = ((label, metrics[name]) for name, label in CURVES.items() if name in metrics)
    return next(found, ("reward", math.nan))


def facts(metrics: Mapping[str, float]) -> list[str]:
    """The figures worth watching, each behind its label."""
    shown = [f"{label} {_format_metric(name, metrics[name])}" for name, label in SHOWN.items() if name in metrics]
    failed = sum(value for name, value in metrics.items() if name.startswith("failed/"))
    rejected = sum(value for name, value in metrics.items() if name.startswith("prompts/rejected/"))
    shown += [f"rejected {rejected:.0f}"] if rejected else []
    return [*shown, f"failed {failed:.0f}"] if failed else shown


def _format_metric(name: str, value: float) -> str:
    """Numbers of things are whole."""
    return f"{value:,.0f}" if name in COUNTS else format_figure(value)


def facts_by_policy(metrics: Mapping[str, float]) -> dict[str, list[str]]:
    """Where a run has several policies, the same of each, without what is told of the whole run."""
    found: dict[str, list[str]] = {}
    for policy, own in split_policies(metrics).items():
        shown = {name: value for name, value in own.items() if name in SHOWN and name not in metrics}
        found[policy] = ["nothing to train on"] if own.get("actor/skipped") else facts(shown)
    return found


def drop_repeated(scores: Mapping[str, Sequence[float]]) -> dict[str, Sequence[float]]:
    """Without rewards whose figures are those of one before them: they say nothing more.

    >>> drop_repeated({"reward": [0.25, 1.0], "right_call": [0.25, 1.0], "style": [0.5, 0.5]})
    {'reward': [0.25, 1.0], 'style': [0.5, 0.5]}
    """
    shown: dict[tuple[str, ...], str] = {}
    for name, values in scores.items():
        shown.setdefault(tuple(map(format_figure, values)), name)
    return {name: scores[name] for name in shown.values()}


def draw_bars(values: Sequence[float], width: int = 60) -> str:
    """A line of bars for the last `width` values, between 0 and 1 if they lie there.

    >>> draw_bars([0.0, 0.5, 1.0]), draw_bars([0.1, 0.2])
    ('▁▅█', '▂▂')
    """
    values = values[-width:]
    low, high = min(0.0, *values), max(1.0, *values)
    scale = (len(BARS) - 1) / (high - low)
    return "".join(BARS[round((value - low) * scale)] for value in values)


def format_figure(value: float) -> str:
    """Three digits that mean something.

    >>> format_figure(0.12345), format_figure(1234.5), format_figure(2e-6)
    ('0.123', '1234', '2.0e-06')
    """
    if value != 0 and abs(value) < 1e-3:
        return f"{value:.1e}"
    return f"{value:.3f}" if abs(value) < 10 else f"{value:.1f}" if abs(value) < 100 else f"{value:.0f}"


def format_minutes(seconds: float) -> str:
    """
    >>> format_minutes(75)
    '1:15'
    """
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


def choose(*, json: bool, out: TextIO) -> View:
    """The view that fits: silent for machines, a panel on a terminal, lines otherwise."""
    if json:
        return Silent()
    console = Screen(file=out)
    return Panelled(console) if console.is_terminal else Lines(out)
