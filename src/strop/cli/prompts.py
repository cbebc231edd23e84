"""`strop prompts`: the versions of a run's prompts, which task each wins, and what changed from one to the next."""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.table import Table
from rich.text import Text

from strop.cli.commands import Commands
from strop.cli.output import print_json
from strop.errors import PlaceError
from strop.monitor.console import format_figure
from strop.monitor.screen import Screen
from strop.run.folder import RunFolder
from strop.run.prompts.ledger import list_calls
from strop.run.prompts.model import CALLS
from strop.run.prompts.pool import PromptPool, PromptVersion, list_differences, read_pool

STYLES = {"+": "green", "-": "red", "@": "cyan"}


def add(commands: Commands) -> None:
    command = commands.add_parser("prompts", help="versions of a run's prompts: scores, diffs, who wins which task")
    command.add_argument("run", metavar="RUN", help="a run that improves prompts (algorithm.name = gepa or apo)")
    command.add_argument("version", nargs="?", type=int, help="show this version whole, and its diff to its parent")
    command.add_argument("--diff", nargs=2, type=int, metavar=("A", "B"), help="what changed from version A to B")
    command.add_argument("--tasks", action="store_true", help="for every validation task, the versions that win it")
    command.add_argument("--calls", action="store_true", help="every call of the optimiser model, and what it came to")
    command.add_argument("--json", action="store_true", help="print all of it as JSON")
    command.set_defaults(command=_prompts)


def _prompts(arguments: argparse.Namespace) -> int:
    folder = Path(arguments.run)
    config = RunFolder.config(folder)
    if arguments.calls and (folder / CALLS).exists():
        return _show_calls(folder, as_json=arguments.json)
    pool = read_pool(folder)
    if pool is None or not pool.versions:
        why = "its first version is not evaluated yet. Fix: let it go on"
        if config.algorithm.improves != "prompts":
            why = f"{config.algorithm.name} improves weights. Fix: name a run with algorithm.name = gepa or apo"
        raise PlaceError(f"{folder} has no versions of prompts: {why}")
    if arguments.json:
        print_json({"best": pool.best.number, "versions": pool.versions, "winners": pool.find_winners()})
        return 0
    screen = Screen(highlight=False)
    if arguments.diff:
        first, second = (_find(pool, number) for number in arguments.diff)
        _print_diff(screen, first, second)
    elif arguments.version is not None:
        _show_version(screen, pool, _find(pool, arguments.version))
    elif arguments.tasks:
        _show_tasks(screen, pool)
    else:
        _show_versions(screen, pool, folder)
    return 0


def _find(pool: PromptPool, number: int) -> PromptVersion:
    if not 0 <= number < len(pool.versions):
        raise PlaceError(f"there is no version {number}. Fix: name one from 0 to {len(pool.versions) - 1}")
    return pool.versions[number]


def _show_versions(screen: Screen, pool: PromptPool, folder: Path) -> None:
    winners, best = pool.find_winners(), pool.best
    table = Table(title=f"{len(pool.versions)} versions of {folder}", title_justify="left")
    columns = ("version", "step", "from", "validation", "unbeaten on", "alone", "changed")
    for column in columns:
        table.add_column(column, justify="left" if column in ("from", "changed") else "right")
    for version in pool.versions:
        won = [task for task, numbers in winners.items() if version.number in numbers]
        alone = [task for task in won if winners[task] == [version.number]]
        style = "bold green" if version is best else ""
        table.add_row(
            Text(f"{version.number}{' (best)' * (version is best)}", style=style),
            str(version.step),
            ", ".join(map(str, version.parents)) or "the beginning",
            format_figure(version.score),
            f"{len(won)}/{len(winners)}",
            str(len(alone)),
            _count_changes(pool, version),
        )
    screen.print(table)
    _print_diff(screen, pool.versions[0], best)
    screen.print(Text(f"one version whole: strop prompts {folder} {best.number}; who wins which task: --tasks"))


def _count_changes(pool: PromptPool, version: PromptVersion) -> str:
    if not version.parents:
        return ""
    lines = list_differences(pool.versions[version.parents[0]].prompts, version.prompts)
    added = sum(line.startswith("+") and not line.startswith("+++") for line in lines)
    removed = sum(line.startswith("-") and not line.startswith("---") for line in lines)
    return f"+{added} -{removed} lines"


def _show_version(screen: Screen, pool: PromptPool, version: PromptVersion) -> None:
    screen.print(Text(f"version {version.number}, step {version.step}, {format_figure(version.score)} on validation"))
    for name, text in version.prompts.items():
        screen.print(Text(f"\n{name}", style="bold"))
        screen.print(Text(text), soft_wrap=True)
    for parent in version.parents:
        _print_diff(screen, pool.versions[parent], version)


def _show_tasks(screen: Screen, pool: PromptPool) -> None:
    table = Table(title="validation tasks, and the versions that nobody beats there", title_justify="left")
    for column in ("task", "best", "versions"):
        table.add_column(column, justify="right" if column == "best" else "left")
    for task, numbers in pool.find_winners().items():
        best = format_figure(pool.versions[numbers[0]].scores[task])
        everybody = len(numbers) == len(pool.versions)
        table.add_row(Text(task), best, "all" if everybody else ", ".join(map(str, numbers)))
    screen.print(table)


def _print_diff(screen: Screen, before: PromptVersion, after: PromptVersion) -> None:
    labels = [f"version {before.number}", f"version {after.number}"]
    lines = list_differences(before.prompts, after.prompts, labels)
    screen.print(Text(f"\nfrom version {before.number} to {after.number}" + (":" if lines else ": nothing changed")))
    for line in lines:
        screen.print(Text(line, style=STYLES.get(line[:1], "")), soft_wrap=True)


def _show_calls(folder: Path, *, as_json: bool) -> int:
    calls = list_calls(folder / CALLS)
    if as_json:
        print_json(calls)
        return 0
    screen = Screen(highlight=False)
    table = Table(title=f"calls of the optimiser model, {folder / CALLS}", title_justify="left")
    for column in ("call", "attempt", "tokens", "cost", "what came of it"):
        table.add_column(column, justify="left" if column == "what came of it" else "right")
    settled = {(call["call"], call["attempt"]): call for call in calls if not call.get("key")}
    for call in calls:
        if not call.get("key"):
            continue
        came = settled.get((call["call"], call["attempt"]))
        last = came or call
        said = "lost: it stays spent" if came is None else came.get("error") or str(came.get("answer", ""))
        table.add_row(
            str(call["call"]),
            str(call["attempt"]),
            f"{last.get('tokens', 0):,}",
            f"{last.get('cost', 0.0):.4g}",
            Text(" ".join(said.split())[:80]),
        )
    screen.print(table)
    return 0
