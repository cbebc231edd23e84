"""What a user sees while a run goes on: a live panel on a terminal, plain lines elsewhere, nothing for machines."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from strop.monitor.screen import Screen
from strop.printable import escape_text

REWARD = "critic/rewards/mean"
BARS = "▁▂▃▄▅▆▇█"
SHOWN = {
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

PATIENCE = 5.0
"""Seconds after which a rollout is worth a word."""
Slow = tuple[str, float]
"""A rollout, and the seconds that it has been at work."""


class View(ABC):
    """Told of everything, in this order: title, then phases, steps, evaluations and notes as they happen."""

    @abstractmethod
    def title(self, text: str, steps: int) -> None: ...

    @abstractmethod
    def phase(self, name: str, done: int = 0, total: int = 0, slowest: Sequence[Slow] = ()) -> None:
        """What is being done, how much of it is, and what it waits for longest."""

    @abstractmethod
    def step(self, number: int, metrics: Mapping[str, float]) -> None: ...

    @abstractmethod
    def evaluation(self, step: int, scores: Mapping[str, float]) -> None: ...

    @abstractmethod
    def note(self, text: str) -> None: ...

    def show_past(self, steps: Sequence[tuple[int, Mapping[str, float]]]) -> None:
        """Steps that were made before the run was resumed."""
        return None

    def __enter__(self) -> View:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        return None


class Silent(View):
    """For machines: `--json` prints the summary and nothing else."""

    def title(self, text: str, steps: int) -> None: ...

    def phase(self, name: str, done: int = 0, total: int = 0, slowest: Sequence[Slow] = ()) -> None: ...

    def step(self, number: int, metrics: Mapping[str, float]) -> None: ...

    def evaluation(self, step: int, scores: Mapping[str, float]) -> None: ...

    def note(self, text: str) -> None: ...


class Lines(View):
    """A line per step and per evaluation."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._steps = 0

    def title(self, text: str, steps: int) -> None:
        self._steps = steps
        self._print(text)

    def phase(self, name: str, done: int = 0, total: int = 0, slowest: Sequence[Slow] = ()) -> None: ...

    def step(self, number: int, metrics: Mapping[str, float]) -> None:
        reward = figure(metrics.get(REWARD, float("nan")))
        line = "  ".join([f"step {number}/{self._steps}", f"reward {reward}", *facts(metrics)])
        self._print(line.replace("\u00a0", " "))

    def evaluation(self, step: int, scores: Mapping[str, float]) -> None:
        self._print(f"evaluation after step {step}  " + "  ".join(f"{k} {figure(v)}" for k, v in scores.items()))

    def note(self, text: str) -> None:
        self._print(f"note: {text}")

    def _print(self, text: str) -> None:
        print(escape_text(text), file=self._out, flush=True)


class Panelled(View):
    """A live panel: where the run is, the reward's curve, the figures worth watching."""

    def __init__(self, console: Console) -> None:
        self._title, self._steps, self._number = "", 0, 0
        self._phase, self._done, self._total = "", 0, 0
        self._slowest: list[Slow] = []
        self._rewards: list[float] = []
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
        self._rewards.append(metrics.get(REWARD, 0.0))
        self._seconds.append(metrics["timing_s/step"])

    def show_past(self, steps: Sequence[tuple[int, Mapping[str, float]]]) -> None:
        self._rewards = [metrics.get(REWARD, 0.0) for _, metrics in steps]
        self._number = steps[-1][0] if steps else 0

    def evaluation(self, step: int, scores: Mapping[str, float]) -> None:
        for name, value in scores.items():
            self._scores.setdefault(name, []).append(value)

    def note(self, text: str) -> None:
        self._notes = [*self._notes, text][-4:]

    def _draw(self) -> Panel:
        head = Table.grid(expand=True)
        head.add_column(no_wrap=True, overflow="ellipsis")
        head.add_column(justify="right", no_wrap=True)
        head.add_row(Text(self._title, style="bold"), Text(self._clock(), style="dim"))
        body: list[Table | Text] = [head, self._bar()]
        width = max([20, *(len(name) + 2 for name in self._scores)])
        if self._rewards:
            line = Text(f"{'reward':<{width}}")
            line.append(figure(self._rewards[0]), style="dim")
            line.append(f" {curve(self._rewards)} ", style="green")
            line.append(figure(self._rewards[-1]), style="bold green")
            body.append(line)
        splits = dict.fromkeys(name.rpartition(" ")[0] for name in self._scores)
        by_split = [{k: v for k, v in self._scores.items() if k.rpartition(" ")[0] == split} for split in splits]
        for name, values in [row for scores in by_split for row in distinct(scores).items()]:
            line = Text(f"{name:<{width}}", style="dim")
            line.append(" → ".join(figure(value) for value in values[-6:]), style="cyan")
            body.append(line)
        if self._metrics:
            body.append(Text("   ".join(facts(self._metrics)), style="dim"))
        if self._slowest:
            waits = ", ".join(f"{rollout} for {minutes(seconds)}" for rollout, seconds in self._slowest)
            body.append(Text(f"{'at work longest':<{width}}{waits}", style="dim"))
        body += [Text(f"! {note}", style="yellow") for note in self._notes]
        return Panel(Group(*body), border_style="blue", padding=(0, 1))

    def _clock(self) -> str:
        clock = minutes(time.monotonic() - self._began)
        if self._steps:
            clock = f"step {self._number}/{self._steps} · {clock}"
        if self._seconds:
            recent = self._seconds[-5:]
            # What came before the first step, mostly an evaluation, comes again after the last one.
            left = sum(recent) / len(recent) * (self._steps - self._number) + self._before
            clock += f" · about {minutes(left)} left"
        return clock

    def _bar(self) -> Table:
        row = Table.grid(padding=(0, 1))
        bar = ProgressBar(total=self._total, completed=self._done, width=40) if self._total else Text("")
        row.add_row(Text(f"{self._phase:<20}"), bar, Text(f"{self._done}/{self._total}" if self._total else ""))
        return row


def facts(metrics: Mapping[str, float]) -> list[str]:
    """The figures worth watching; a label and its value never part at the end of a line."""
    shown = [f"{label}\u00a0{figure(metrics[name])}" for name, label in SHOWN.items() if name in metrics]
    failed = sum(value for name, value in metrics.items() if name.startswith("failed/"))
    return [*shown, f"failed\u00a0{failed:.0f}"] if failed else shown


def distinct(scores: Mapping[str, Sequence[float]]) -> dict[str, Sequence[float]]:
    """Without rewards whose figures are those of one before them: they say nothing more.

    >>> distinct({"reward": [0.25, 1.0], "right_call": [0.25, 1.0], "style": [0.5, 0.5]})
    {'reward': [0.25, 1.0], 'style': [0.5, 0.5]}
    """
    shown: dict[tuple[str, ...], str] = {}
    for name, values in scores.items():
        shown.setdefault(tuple(map(figure, values)), name)
    return {name: scores[name] for name in shown.values()}


def curve(values: Sequence[float], width: int = 60) -> str:
    """A line of bars for the last `width` values, between 0 and 1 if they lie there.

    >>> curve([0.0, 0.5, 1.0]), curve([0.1, 0.2])
    ('▁▅█', '▂▂')
    """
    values = values[-width:]
    low, high = min(0.0, *values), max(1.0, *values)
    scale = (len(BARS) - 1) / (high - low)
    return "".join(BARS[round((value - low) * scale)] for value in values)


def figure(value: float) -> str:
    """Three digits that mean something.

    >>> figure(0.12345), figure(1234.5), figure(2e-6)
    ('0.123', '1234', '2.0e-06')
    """
    if value != 0 and abs(value) < 1e-3:
        return f"{value:.1e}"
    return f"{value:.3f}" if abs(value) < 10 else f"{value:.1f}" if abs(value) < 100 else f"{value:.0f}"


def minutes(seconds: float) -> str:
    """
    >>> minutes(75)
    '1:15'
    """
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


def choose(*, json: bool, out: TextIO) -> View:
    """The view that fits: silent for machines, a panel on a terminal, lines otherwise."""
    if json:
        return Silent()
    console = Screen(file=out)
    return Panelled(console) if console.is_terminal else Lines(out)
