"""`strop replay`: stored rollouts under another reward, or a step of training again."""

from __future__ import annotations

import argparse
import asyncio
import sys
from pathlib import Path

from rich.table import Table
from rich.text import Text

from strop.cli.commands import Commands
from strop.cli.output import get_program, make_console, print_json
from strop.cli.rollouts import open_run
from strop.errors import ConfigError
from strop.monitor import console as views
from strop.run.folder import RunFolder

SHOWN = 10
"""Rollouts and metrics shown that differ most."""


def add(commands: Commands) -> None:
    replay = commands.add_parser("replay", help="score stored rollouts with another reward, or repeat a training step")
    replay.add_argument("run", metavar="RUN", help="a run's folder; nothing in it is changed")
    replay.add_argument("--reward", metavar="FILE.py:function", help="score with this: f(task, answer[, turns])")
    replay.add_argument("--step", type=int, metavar="N", help="train this step again and compare what comes of it")
    replay.add_argument("--json", action="store_true", help="everything as one JSON object")
    replay.set_defaults(command=_replay)


def _replay(arguments: argparse.Namespace) -> int:
    if (arguments.reward is None) == (arguments.step is None):
        raise ConfigError("replay what? give --reward FILE.py:function or --step N")
    return asyncio.run(_rescore(arguments) if arguments.step is None else _retrain(arguments))


async def _rescore(arguments: argparse.Namespace) -> int:
    from strop.run.collect import take_last_line
    from strop.run.replay import rescore

    config = RunFolder.config(Path(arguments.run))
    store = await open_run(arguments.run)
    try:
        found = await rescore(store, config, arguments.reward)
    finally:
        await store.close()
    if arguments.json:
        print_json(found)
        return 0
    out = make_console()
    table = Table(box=None, pad_edge=False)
    for column in ("mode", "rollouts", "old mean", "new mean"):
        table.add_column(column, justify="left" if column == "mode" else "right")
    for mode, (count, old, new) in found.means.items():
        table.add_row(mode, str(count), views.format_figure(old), views.format_figure(new))
    out.print(table)
    ranks = "one of them is the same everywhere" if found.agreement is None else views.format_figure(found.agreement)
    tied = found.pairs - found.alike - found.reversed
    out.print(f"\nrank agreement (Spearman): {ranks}")
    out.print(
        f"of {found.pairs} pairs in training groups that the old reward tells apart, the new one orders "
        f"{found.alike} alike, {found.reversed} the other way, and {tied} not at all"
    )
    most = sorted(found.scored, key=lambda one: -abs(one.new - one.old))[:SHOWN]
    if most := [one for one in most if one.new != one.old]:
        table = Table(box=None, pad_edge=False, title="\nwhere they differ most", title_justify="left")
        for column in ("rollout", "old", "new"):
            table.add_column(column, justify="left" if column == "rollout" else "right")
        for one in most:
            table.add_row(Text(one.rollout), views.format_figure(one.old), views.format_figure(one.new))
        out.print(table)
        out.print(f"look at one: {get_program()} rollouts {arguments.run} {most[0].rollout}", markup=False)
    if found.failed:
        id, why = next(iter(found.failed.items()))
        out.print(
            f"failed on {len(found.failed)} rollouts, left out above; on {id}: {take_last_line(why)}", markup=False
        )
    if found.without:
        out.print(f"{found.without} rollouts have no reward that algorithm.rewards counts, and are left out")
    return 0


async def _retrain(arguments: argparse.Namespace) -> int:
    from strop.run.replay import retrain

    config = RunFolder.config(Path(arguments.run), arguments.step)
    store = await open_run(arguments.run)
    try:
        made = await retrain(store, config, arguments.step, lambda text: print(text, file=sys.stderr, flush=True))
    finally:
        await store.close()
    differ = made.differ
    same = made.digest is None or made.digest[0] == made.digest[1]
    if arguments.json:
        print_json({"differ": differ, "same_weights": None if made.digest is None else same, "replay": made})
        return 0 if same else 1
    out, began = make_console(), f"the checkpoint of step {made.base}" if made.base else "the model the run began with"
    out.print(f"step {made.step} again: {made.rollouts} recorded rollouts, from {began}")
    out.print(f"{len(made.metrics) - len(differ)} of {len(made.metrics)} metrics are the same")
    if differ:
        table = Table(box=None, pad_edge=False)
        for column in ("metric", "recorded", "now"):
            table.add_column(column, justify="left" if column == "metric" else "right")
        worst = sorted(differ.items(), key=lambda item: -_gap(*item[1]))
        for name, (old, new) in worst[:SHOWN]:
            table.add_row(Text(name), *("-" if value is None else f"{value:.9g}" for value in (old, new)))
        out.print(table)
    if made.digest is None:
        out.print("the run is not deterministic: its weights were not fingerprinted, and small differences are usual")
    else:
        out.print("the weights are the same, bit for bit" if same else "the weights are not those that were recorded")
    return 0 if same else 1


def _gap(old: float | None, new: float | None) -> float:
    """Relative, so that large metrics do not hide small ones."""
    if old is None or new is None:
        return float("inf")
    return abs(old - new) / max(abs(old), abs(new), 1e-12)
