"""`strop eval`."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING

import uvloop
from rich.table import Table
from rich.text import Text

from strop import config as configs
from strop.cli.commands import Commands
from strop.cli.output import get_program, make_console, print_json
from strop.cli.training_run import run_until_signal
from strop.config import Config, describe_models
from strop.errors import ConfigError, PlaceError
from strop.learner.spawn import start_ahead
from strop.monitor import console as views
from strop.monitor.statistics import Difference, Score
from strop.run.folder import RunFolder, find_free

if TYPE_CHECKING:
    from strop.monitor.evaluations import EvaluationReport, Way

START = "start"
FOLDER = "runs/eval"


def add(commands: Commands) -> None:
    command = commands.add_parser("eval", help="evaluate a model behind an agent, or compare two, without training")
    command.add_argument(
        "agent", nargs="?", metavar="AGENT", help="FILE.py:function, a command, a service's URL, or the folder of a run"
    )
    command.add_argument("--tasks", help="a .jsonl, .csv or .parquet file, a folder, a data set, or FILE.py:function")
    command.add_argument("--data", metavar="PATH", help="where the data is, for a tasks function that takes `data`")
    command.add_argument("--reward", metavar="FILE.py:function", help="turns (task, answer) into rewards")
    command.add_argument("--model", help="strop/nano, a folder, a run or one of its checkpoints (default: the run's)")
    command.add_argument(
        "--compare", metavar="MODEL", help=f"another one, on the same tasks and seeds; {START}: what the run began with"
    )
    command.add_argument("--best", action="store_true", help="of runs: the checkpoint with the best score")
    command.add_argument("-k", type=int, default=1, metavar="N", help="samples of every task (default: 1)")
    command.add_argument("--split", action="append", default=[], help="may be given again (default: loop.eval_splits)")
    command.add_argument("--greedy", action="store_true", help="at temperature 0, not as policy.eval says")
    command.add_argument(
        "--as",
        dest="ways",
        choices=["trained", "deployed", "both"],
        default="trained",
        help="what the model is shown of its own words: what it was trained with, or what an ordinary server shows it",
    )
    command.add_argument("--success", type=float, default=1.0, metavar="R", help="the least reward of one (default: 1)")
    command.add_argument("--seed", type=int, help="fixes what is sampled, where it can be (default: 0, or the run's)")
    command.add_argument("--config", metavar="TOML", help="settings from a file")
    command.add_argument("--set", action="append", default=[], metavar="a.b=c", help="any setting; see `strop config`")
    command.add_argument("--folder", help=f"where it is kept (default: {FOLDER}, or {FOLDER}-2 ...)")
    command.add_argument("--json", action="store_true", help="print the report as JSON and nothing else")
    command.set_defaults(command=_eval)


def _eval(arguments: argparse.Namespace) -> int:
    config, models = _read_arguments(arguments)
    start_ahead(config, train=False)
    from strop.run.evaluate import evaluate

    ways: tuple[Way, ...] = ("trained", "deployed") if arguments.ways == "both" else (arguments.ways,)
    with views.choose(json=arguments.json, out=sys.stdout) as view:
        wanted = evaluate(
            config,
            models,
            folder=arguments.folder or find_free(Path(FOLDER)),
            view=view,
            splits=arguments.split,
            samples=arguments.k,
            greedy=arguments.greedy,
            ways=ways,
            threshold=arguments.success,
            best=arguments.best,
        )
        try:
            report = uvloop.run(run_until_signal(wanted))
        except asyncio.CancelledError:
            raise KeyboardInterrupt from None
    print_json(report) if arguments.json else _print_report(report)
    return 0


def _read_arguments(arguments: argparse.Namespace) -> tuple[Config, list[str]]:
    """The configuration, a run's or the defaults with what was given on top, and the models."""
    found = RunFolder.parse_name(arguments.agent) if arguments.agent else None
    run = arguments.agent if found or os.path.isdir(arguments.agent or "") else None  # what holds none is refused
    base = RunFolder.config(found[0] if found else Path(run)) if run else Config()
    config = configs.load(
        base=base,
        toml=arguments.config,
        sets=arguments.set,
        agent=None if run else arguments.agent,
        tasks=arguments.tasks,
        data=arguments.data,
        reward=arguments.reward,
        seed=arguments.seed,
    )
    if not config.agent and run:
        raise ConfigError(
            f"{run} has no agent: it learnt from stored data. Fix: name one with --set agent=FILE.py:function, and "
            "--tasks tasks.jsonl"
        )
    if not config.agent:
        raise ConfigError("which agent? strop eval FILE.py:function --tasks tasks.jsonl (or strop eval RUN)")
    if not config.tasks:
        raise ConfigError(
            f"which tasks? --tasks tasks.jsonl, or FILE.py:function ({config.agent} is not a run's folder)"
        )
    models = [arguments.model or run or describe_models(config)]
    if arguments.compare == START:
        if not run:
            raise ConfigError(f"--compare {START} is what a run began with. Fix: name the run, or the other model")
        models.append(describe_models(base))
    elif arguments.compare:
        if run and not Path(arguments.compare).exists() and get_close_matches(arguments.compare, [START], 1):
            raise ConfigError(f"--compare {arguments.compare} is not a model. Fix: write --compare {START}")
        models.append(arguments.compare)
    if arguments.best and not any(map(RunFolder.is_run, models)):
        raise PlaceError(f"--best needs a run's checkpoints, and {models[0]} is not a run. Fix: leave it out")
    return config, models


# -- what came of it ---------------------------------------------------------------------------------------------------


def _print_report(report: EvaluationReport) -> None:
    out, k = make_console(), report.samples
    rewards = report.evaluations[0].rewards
    sizes = ", ".join(f"{len(next(iter(named.values())))} tasks of {split}" for split, named in rewards.items())
    each = f", {k} samples each" if k > 1 else ""
    table = _table(f"{sizes}{each}, in {views.format_minutes(report.seconds)}", "model", k)
    for one in report.evaluations:
        _rows(table, one.name, one.scores, report)
    out.print(table)
    table = _table("differences, task by task", "difference", k)
    for pair in report.comparisons:
        one, other = report.evaluations[pair.one], report.evaluations[pair.other]
        _rows(table, f"{one.name} minus {other.name}", pair.differences, report)
    if report.comparisons:
        out.print(table)
    figures = [one.scores for one in report.evaluations] + [pair.differences for pair in report.comparisons]
    brackets = "In brackets: where the true figure lies with 95 % confidence, going by how much tasks differ. "
    out.print(
        brackets * any(score.low is not None for one in figures for score in one.values())
        + f"mean@{k}: what a sample earns. pass@{k}: how likely one of {k} samples earns {report.threshold:g} or more.",
        style="dim",
    )
    for warning in report.warnings:
        out.print(Text(f"! {warning}", style="yellow"))
    out.print(Text(report.verdict, style="bold"))
    where = report.evaluations[0].folder
    out.print(
        f"{report.folder}/evaluation.json has every figure, `{get_program()} rollouts {where}` every rollout",
        style="dim",
    )


def _table(title: str, first: str, k: int) -> Table:
    table = Table(title=title, title_justify="left")
    for column in (first, "split", "reward", f"mean@{k}", f"pass@{k}"):
        table.add_column(column, justify="right" if "@" in column else "left", overflow="fold")
    return table


def _rows(table: Table, label: str, figures: Mapping[str, Score], report: EvaluationReport) -> None:
    for split, rewards in report.evaluations[0].rewards.items():
        for name in rewards:
            found = [figures[f"val-core/{split}/{name}/{measure}@{report.samples}"] for measure in ("mean", "pass")]
            table.add_row(Text(label), Text(split), Text(name), *map(_cell, found))


def _cell(score: Score) -> Text:
    sign, style = "", ""
    if isinstance(score, Difference):
        sign = "+"
        style = "" if score.zero_within is not False else "bold green" if score.value > 0 else "bold red"
    span = "" if score.low is None else f" [{score.low:{sign}.3f}, {score.high:{sign}.3f}]"
    return Text(f"{score.value:{sign}.3f}{span}", style=style)
