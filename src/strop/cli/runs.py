"""`strop runs`: the runs that are there, and several of them side by side."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from strop.cli.commands import Commands
from strop.cli.output import get_program, make_console, print_json
from strop.config import Config, describe_models, replace_models, resolve_policies
from strop.errors import ConfigError, PlaceError
from strop.imports import to_install
from strop.monitor import console as views
from strop.monitor.plots import draw_curves
from strop.run.history import PastRun, Record, find, find_differences, is_run, read

PLACE = "runs"


def add(commands: Commands) -> None:
    runs = commands.add_parser("runs", help="list runs, or compare two and more")
    runs.add_argument("places", nargs="*", metavar="RUN", help=f"runs, or folders of runs (default: {PLACE})")
    runs.add_argument("--plot", metavar="FILE.png", help="draw their curves into one picture")
    runs.add_argument("--json", action="store_true", help="a JSON object per run; of a comparison, one in all")
    runs.set_defaults(command=_runs)


def _runs(arguments: argparse.Namespace) -> int:
    places = list(map(Path, arguments.places))
    if arguments.plot and Path(arguments.plot).suffix != ".png":
        raise ConfigError(f"--plot {arguments.plot} is not the name of a picture. Fix: end it with .png")
    if not places and not Path(PLACE).is_dir():
        raise PlaceError(
            f"there is no folder {PLACE} here. Fix: name a run or a folder of runs, or start with `{get_program()} "
            "demo`"
        )
    side_by_side = len(places) > 1 and all(map(is_run, places))
    found = [read(place) for place in places] if side_by_side else _all(places or [Path(PLACE)])
    if arguments.plot:
        _draw(Path(arguments.plot), found)
    if side_by_side:
        _compare(found, arguments)
    else:
        _list(found, arguments)
    return 0


def _all(places: Sequence[Path]) -> list[PastRun]:
    """Those in folders that cannot be read are named and left out; one that was asked for by name is an error."""
    found: dict[Path, PastRun] = {}
    for place in places:
        folders = find(place)
        if not folders and place != Path(PLACE):
            raise PlaceError(
                f"{place} holds no run, nor does a folder below it (evaluations do not count). Fix: check the path"
            )
        for folder in folders:
            try:
                found[folder] = read(folder)
            except PlaceError as error:
                if folder == place:
                    raise
                print(f"strop: {error}", file=sys.stderr)
    return sorted(found.values(), key=lambda run: run.record.began)


def _draw(path: Path, found: Sequence[PastRun]) -> None:
    names = _short([run.record.name for run in found])
    curves = {name: (run.trained, run.evaluated) for name, run in zip(names, found, strict=True)}
    try:
        draw_curves(path, curves, "reward")
    except ModuleNotFoundError:
        raise ConfigError(f"drawing needs matplotlib: {to_install('matplotlib')}, or leave out --plot") from None
    except OSError as error:
        raise PlaceError(f"cannot write {path} ({error.strerror}). Fix: choose another file for --plot") from None


def _short(names: Sequence[str]) -> list[str]:
    """Folders by their last name, where that tells them apart.

    >>> _short(["runs/a", "runs/b"]), _short(["x/run", "y/run"])
    (['a', 'b'], ['x/run', 'y/run'])
    """
    last = [Path(name).name for name in names]
    return last if len(set(last)) == len(last) else list(names)


# -- a list ------------------------------------------------------------------------------------------------------------


def _list(found: Sequence[PastRun], arguments: argparse.Namespace) -> None:
    if arguments.json:
        for run in found:
            print_json(run.record)
        return
    table = Table(box=None, pad_edge=False)
    for column in ("run", "model", "algorithm", "steps", "state", "reward", "on", "time", "began"):
        table.add_column(column, overflow="fold", no_wrap=column in ("run", "reward", "began"))
    for run in found:
        table.add_row(*_cells(run))
    start = f"no runs: start one with `{get_program()} demo` or `{get_program()} train`"
    make_console().print(table if found else start)


def _cells(run: PastRun) -> list[Text]:
    record = run.record
    style = {"running": "green", "stopped": "yellow", "collapsed": "red"}.get(record.state, "")
    return [
        Text(record.name, style="bold"),
        Text(_short_models(run.config)),
        Text(record.algorithm),
        Text(f"{record.steps}/{record.of}"),
        Text(record.state, style=style),
        Text(f"{_figure(record.start)} → {_figure(record.end)}"),
        Text(record.on),
        Text(views.format_minutes(record.seconds)),
        Text(time.strftime("%Y-%m-%d %H:%M", time.localtime(record.began))),
    ]


def _short_models(config: Config) -> str:
    """Models by name; of a folder its last name."""
    models = {name: own.policy.model for name, own in resolve_policies(config).items()}
    return describe_models(replace_models(config, {n: _last(model) for n, model in models.items()}))


def _last(model: str) -> str:
    return Path(model).name if Path(model).is_absolute() else model


def _figure(value: float | None) -> str:
    return "-" if value is None else views.format_figure(value)


# -- side by side ------------------------------------------------------------------------------------------------------


def _compare(found: Sequence[PastRun], arguments: argparse.Namespace) -> None:
    records = [run.record for run in found]
    settings = find_differences([run.config for run in found])
    if arguments.json:
        print_json({"runs": records, "settings": settings, "plot": arguments.plot})
        return
    rows: dict[str, list[Any]] = {
        "state": [record.state for record in records],
        "steps": [f"{record.steps}/{record.of}" for record in records],
        "time": [views.format_minutes(record.seconds) for record in records],
        "reward of": [record.on for record in records],
        "at the start": [_figure(record.start) for record in records],
        "at the end": [_figure(record.end) for record in records],
        "best": [_best(record) for record in records],
    }
    out, names = make_console(), _short([record.name for record in records])
    out.print(_table("", names, rows))
    if settings:
        out.print(_table("settings that differ", names, settings))
    else:
        out.print("\nno setting differs")
    if arguments.plot:
        out.print(f"\ncurves: {arguments.plot}", markup=False)


def _best(record: Record) -> str:
    return "-" if record.best is None else f"{views.format_figure(record.best)} after step {record.best_step}"


def _table(title: str, names: Sequence[str], rows: dict[str, list[Any]]) -> Table:
    table = Table(box=None, pad_edge=False, title=f"\n{title}" if title else None, title_justify="left")
    for column in ("", *names):
        table.add_column(Text(column), overflow="fold")
    for name, values in rows.items():
        table.add_row(Text(name, style="bold"), *(Text("-" if value is None else str(value)) for value in values))
    return table
