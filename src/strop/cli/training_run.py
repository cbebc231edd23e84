"""A training run as `strop train` and `strop demo` begin it: its options, its folder, Ctrl-C, its summary."""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
from collections.abc import Callable, Coroutine, Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import uvloop
from msgspec.structs import replace
from rich.table import Table
from rich.text import Text

from strop.cli.output import get_program, print_json
from strop.config import Config, trained_policies
from strop.monitor import console as views
from strop.monitor.screen import Screen
from strop.monitor.summary import Summary
from strop.run.folder import RunFolder

T = TypeVar("T")

SHORT = {
    "--steps": ("loop.steps", "steps to train"),
    "--lr": ("learner.optim.lr", "learning rate"),
    "--groups": ("loop.groups", "tasks per step"),
}
"""Settings that are asked for most, by an option of their own."""


class _Short(argparse.Action):
    """Stands for --set, in its place among others: the last one wins."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        namespace.set = [*namespace.set, f"{self.const}={values}"]


def add_options(command: argparse.ArgumentParser, *, folder: str | None) -> None:
    where = f"the run's folder (default: {folder or 'runs/run'}), with a number added if a run is there"
    command.add_argument("--folder", default=folder, help=where)
    command.add_argument("--overwrite", action="store_true", help="delete the run that is there instead")
    command.add_argument("--set", action="append", default=[], metavar="a.b=c", help="any setting; see `strop config`")
    for flag, (setting, what) in SHORT.items():
        said = f"{what}: --set {setting}=N"
        command.add_argument(flag, action=_Short, const=setting, dest="set", metavar="N", help=said)
    command.add_argument("--json", action="store_true", help="print the summary as JSON and nothing else")


@contextmanager
def choose_folder(config: Config, arguments: argparse.Namespace, beside: Path | None = None) -> Generator[Config]:
    """The configuration with a folder where no run is. Says which if it is not the one that was asked for."""
    from strop.run.start_from import choose_place

    with choose_place(Path(config.folder), overwrite=arguments.overwrite, beside=beside) as folder:
        if str(folder) != config.folder and folder != Path(config.folder):
            print(f"strop: {config.folder} holds a run: this one is kept in {folder}", file=sys.stderr)
        yield replace(config, folder=str(folder))


def run_training(
    config: Config,
    arguments: argparse.Namespace,
    *,
    resume: bool = False,
    changes: Mapping[str, tuple[Any, Any]] | None = None,
) -> Summary:
    if config.cluster.address:
        from strop.cluster.training import train
    else:
        from strop.run.loop import train

    stop = asyncio.Event()

    def has_begun() -> bool:
        return (Path(config.folder) / "config.json").exists()

    def interrupted(cancel: Callable[[], object]) -> None:
        if stop.is_set() or not has_begun():  # before that there is nothing to lose
            cancel()
            return
        stop.set()
        view.note(
            "stopping after this step, with a checkpoint (an evaluation is cut short, and --resume goes on with it); "
            "press Ctrl-C again to stop at once"
        )

    with views.choose(json=arguments.json, out=sys.stdout) as view:
        try:
            run = train(config, view, resume=resume, changes=changes, stop=stop)
            summary = uvloop.run(run_until_signal(run, interrupted))
            if summary.done:
                return summary
            raise KeyboardInterrupt
        except (KeyboardInterrupt, asyncio.CancelledError):
            if not has_begun():
                raise KeyboardInterrupt("the run had not begun, and nothing of it is kept") from None
            view.note(f"stopped; go on with: {get_program()} train --resume {config.folder}")
            raise KeyboardInterrupt from None


async def run_until_signal(
    run: Coroutine[Any, Any, T], interrupted: Callable[[Callable[[], object]], None] | None = None
) -> T:
    """The result of `run`. SIGTERM and SIGHUP cancel it, and so does Ctrl-C, unless `interrupted` is given: it is
    called then, with what cancels."""
    task, loop = asyncio.create_task(run), asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, task.cancel)
    if interrupted is not None:
        loop.add_signal_handler(signal.SIGINT, interrupted, task.cancel)
    return await task


def print_summary(summary: Summary, folder: Path, arguments: argparse.Namespace) -> int:
    from strop import demo

    if arguments.json:
        print_json(summary)
        return 0
    console = Screen(highlight=False)
    steps = f"{summary.steps} step{'s' * (summary.steps != 1)}"
    table = Table(title=f"{steps} in {views.format_minutes(summary.seconds)}", title_justify="left")
    for column in ("evaluated on", "reward", "before", "after"):
        table.add_column(column, justify="left" if column in ("evaluated on", "reward") else "right")
    for split, rewards in summary.scores.items():
        ends = {name: (points[0][1], points[-1][1]) for name, points in rewards.items()}
        for name, (before, after) in views.drop_repeated(ends).items():
            style = "bold green" if after > before else "red" if after < before else ""
            table.add_row(
                Text(split), Text(name), views.format_figure(before), Text(views.format_figure(after), style=style)
            )
    if summary.scores:
        console.print(table)
    places = {
        "the curve": f"{folder}/curve.png",
        **({"rewards by agent": f"{folder}/agents.png"} if (Path(folder) / "agents.png").is_file() else {}),
        "these figures": f"{folder}/summary.json",
        "some rollouts to read": f"{folder}/transcripts.md",
        "every rollout": f"{get_program()} rollouts {folder}",
    }
    config = RunFolder.config(folder)
    if summary.checkpoint and config.algorithm.improves == "prompts":
        places["the best prompts"] = f"{folder}/checkpoints/{summary.checkpoint}"
        places["versions, who wins what"] = f"{get_program()} prompts {folder}"
        places["as plain files"] = f"{get_program()} export {folder} FOLDER"
    elif summary.checkpoint:
        places["the trained model"] = f"{folder}/checkpoints/{summary.checkpoint}"
        one = f" --policy {next(iter(trained_policies(config)))}" if len(config.policies) > 1 else ""
        places["as a plain folder"] = f"{get_program()} export {folder} FOLDER{one}"
        places["to talk to it"] = (
            f"{get_program()} chat {folder}{one if config.agent in (demo.AGENT, '') else ' --agent'}"
        )
    width = max(map(len, places))
    for what, place in places.items():  # what is to be copied comes last, and is broken by no line end of ours
        console.print(Text.assemble("  ", what.ljust(width), "  ", (place, "bold")), soft_wrap=True)
    return 0
