"""`strop demo`, `strop train` and `strop export`."""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

import uvloop
from rich.console import Console
from rich.table import Table
from rich.text import Text

from strop import config as configs
from strop.cli.printing import json_line, me
from strop.config import Config
from strop.errors import ConfigError, PlaceError
from strop.folder import RunFolder
from strop.monitor import view as views
from strop.monitor.summary import Summary

T = TypeVar("T")


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    demo = commands.add_parser("demo", help="watch a small model learn to use a calculator, on this machine")
    demo.add_argument("--task", choices=["calc", "chain"], default="calc", help="one tool call, or two chained ones")
    demo.add_argument("--seed", type=int, default=0, help="another seed is another run (default: 0)")
    _common(demo, folder="runs/demo")
    demo.set_defaults(command=_demo)

    train = commands.add_parser("train", help="train the model behind an agent, or resume a run")
    train.add_argument("agent", nargs="?", metavar="AGENT", help="FILE.py:function, a command, or a service's URL")
    train.add_argument("--tasks", help="a .jsonl, .csv or .parquet file, a folder, a data set, or FILE.py:function")
    train.add_argument("--data", metavar="PATH", help="where the data is, for a tasks function that takes `data`")
    train.add_argument("--reward", metavar="FILE.py:function", help="turns (task, answer) into rewards")
    train.add_argument("--model", help="strop/nano, or a folder in Hugging Face format")
    train.add_argument("--config", metavar="TOML", help="settings from a file")
    train.add_argument("--seed", type=int, help="fixes the order of tasks (default: 0)")
    train.add_argument("--resume", metavar="RUN", help="go on with the run in this folder")
    _common(train, folder=None)
    train.set_defaults(command=_train)

    export = commands.add_parser("export", help="write a trained model as a plain Hugging Face folder")
    export.add_argument("source", metavar="RUN", help="a run, for its last checkpoint, or a checkpoint's folder")
    export.add_argument("to", metavar="FOLDER", help="where the model is written; it must not be there yet")
    export.add_argument("--best", action="store_true", help="of a run: the checkpoint with the best score instead")
    export.add_argument("--adapter", action="store_true", help="a LoRA adapter by itself, in PEFT's format")
    export.add_argument("--dtype", choices=["float32", "bfloat16"], help="default: as it was trained")
    export.add_argument("--json", action="store_true", help="print what was done as JSON")
    export.set_defaults(command=_export)


def _common(command: argparse.ArgumentParser, *, folder: str | None) -> None:
    command.add_argument("--folder", default=folder, help=f"where the run is kept (default: {folder or 'runs/run'})")
    command.add_argument("--set", action="append", default=[], metavar="a.b=c", help="any setting; see `strop config`")
    command.add_argument("--json", action="store_true", help="print the summary as JSON and nothing else")


def _demo(arguments: argparse.Namespace) -> int:
    from strop import demo

    folder = Path(arguments.folder)
    _move_aside(folder)
    config = configs.load(base=demo.config(arguments.task), folder=str(folder), seed=arguments.seed, sets=arguments.set)
    if not arguments.json:
        Console().print(demo.INTRODUCTION, highlight=False)
    summary = _run(config, arguments)
    return _tell(summary, folder, arguments)


def _move_aside(folder: Path) -> None:
    """An earlier demo makes room for the next one; nothing of it is lost."""
    if (folder / "config.json").exists():
        if RunFolder.held(folder):
            raise PlaceError(f"another process is at work in {folder}: wait for it, or choose another --folder")
        n = next(n for n in range(1, 10_000) if not folder.with_name(f"{folder.name}-{n}").exists())
        try:
            folder.rename(folder.with_name(f"{folder.name}-{n}"))
        except OSError as error:
            raise PlaceError(f"cannot move {folder} aside ({error.strerror}): choose another --folder") from None


def _train(arguments: argparse.Namespace) -> int:
    if arguments.resume:
        given = [
            name
            for name in ("agent", "tasks", "data", "reward", "model", "config", "folder", "seed")
            if getattr(arguments, name) is not None
        ]
        if given or arguments.set:
            raise ConfigError(
                f"a resumed run keeps the settings it began with: leave out {', '.join(given or ['--set'])}"
            )
        folder = Path(arguments.resume)
        return _tell(_run(RunFolder.config(folder), arguments, resume=True), folder, arguments)
    config = configs.load(
        toml=arguments.config,
        sets=arguments.set,
        agent=arguments.agent,
        tasks=arguments.tasks,
        data=arguments.data,
        reward=arguments.reward,
        folder=arguments.folder,
        seed=arguments.seed,
        policy={"model": arguments.model} if arguments.model else None,
    )
    if not config.agent:
        raise ConfigError("which agent? strop train FILE.py:function --tasks tasks.jsonl (or --resume RUN)")
    if not config.tasks:
        raise ConfigError("which tasks? --tasks tasks.jsonl, or --tasks FILE.py:function")
    return _tell(_run(config, arguments), Path(config.folder), arguments)


def _export(arguments: argparse.Namespace) -> int:
    from strop.learner.export import export

    checkpoint = source = Path(arguments.source).expanduser()
    if RunFolder.is_run(arguments.source):
        checkpoint = RunFolder.chosen_checkpoint(source, best=arguments.best)
    elif arguments.best:
        raise PlaceError(f"--best chooses among the checkpoints of a run, and {source} is none: leave it out")
    export(checkpoint, arguments.to, merge=not arguments.adapter, dtype=arguments.dtype)
    if arguments.json:
        json_line({"checkpoint": str(checkpoint), "folder": arguments.to})
    else:
        print(
            f"{arguments.to} holds the model of {checkpoint}: use it with Hugging Face, vLLM, or --model {arguments.to}"
        )
    return 0


def _run(config: Config, arguments: argparse.Namespace, *, resume: bool = False) -> Summary:
    from strop.rooms import settled
    from strop.run import train

    stop = asyncio.Event()

    def interrupted(cancel: Callable[[], object]) -> None:
        if stop.is_set():
            cancel()
        stop.set()
        view.note("stopping behind this step, with a checkpoint, or in an evaluation; Ctrl-C again stops at once")

    with views.choose(json=arguments.json, out=sys.stdout) as view:
        try:
            run = train(config if resume else settled(config), view, resume=resume, stop=stop)
            summary = uvloop.run(until_told(run, interrupted))
            if summary.done:
                return summary
            raise KeyboardInterrupt
        except (KeyboardInterrupt, asyncio.CancelledError):
            if (Path(config.folder) / "config.json").exists():
                view.note(f"stopped; go on with: {me()} train --resume {config.folder}")
            raise KeyboardInterrupt from None


async def until_told(
    run: Coroutine[Any, Any, T], interrupted: Callable[[Callable[[], object]], None] | None = None
) -> T:
    """The result of `run`. Whoever ends the process politely cancels it, and so does Ctrl-C, unless `interrupted` is
    given: it is called then, with what cancels."""
    task, loop = asyncio.create_task(run), asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, task.cancel)
    if interrupted is not None:
        loop.add_signal_handler(signal.SIGINT, interrupted, task.cancel)
    return await task


def _tell(summary: Summary, folder: Path, arguments: argparse.Namespace) -> int:
    if arguments.json:
        json_line(summary)
        return 0
    console = Console(highlight=False)
    steps = f"{summary.steps} step{'s' * (summary.steps != 1)}"
    table = Table(title=f"{steps} in {views.minutes(summary.seconds)}", title_justify="left")
    for column in ("evaluated on", "reward", "before", "after"):
        table.add_column(column, justify="left" if column in ("evaluated on", "reward") else "right")
    for split, rewards in summary.scores.items():
        for name, points in rewards.items():
            before, after = points[0][1], points[-1][1]
            style = "bold green" if after > before else "red" if after < before else ""
            table.add_row(Text(split), Text(name), views.figure(before), Text(views.figure(after), style=style))
    console.print(table)
    places = {
        f"{folder}/curve.png": "the curve",
        f"{folder}/summary.json": "these figures",
        f"{folder}/transcripts.md": "the best and worst rollouts of the last steps, to read",
        f"{me()} rollouts {folder}": "every rollout, with its turns and rewards",
    }
    if summary.checkpoint:
        places[f"{folder}/checkpoints/{summary.checkpoint}"] = (
            "the trained model; `strop export` makes a plain folder of it"
        )
    width = max(map(len, places))
    for place, what in places.items():
        console.print(Text.assemble("  ", (place.ljust(width), "bold"), "  ", what), soft_wrap=True)
    return 0
