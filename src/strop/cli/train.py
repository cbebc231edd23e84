"""`strop demo`, `strop train` and `strop export`."""

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

from strop import config as configs
from strop.cli.output import MODELS, json_line, me
from strop.config import Config
from strop.errors import ConfigError
from strop.monitor import console as views
from strop.monitor.screen import Screen
from strop.monitor.summary import Summary
from strop.run.api import export
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
    train.add_argument("--model", help=MODELS)
    train.add_argument("--config", metavar="TOML", help="settings from a file")
    train.add_argument("--seed", type=int, help="fixes the order of tasks (default: 0)")
    train.add_argument(
        "--from", dest="source", metavar="RUN[:STEP]", help="a new run from the weights of this one, with its settings"
    )
    train.add_argument(
        "--resume", metavar="RUN", help="go on with the run in this folder; --set changes its steps, rate, evaluation"
    )
    _common(train, folder=None)
    train.set_defaults(command=_train)

    export = commands.add_parser("export", help="write a trained model as a plain Hugging Face folder")
    export.add_argument(
        "source", metavar="RUN", help="a run, for its last checkpoint, RUN:STEP, or a checkpoint's folder"
    )
    export.add_argument("to", metavar="FOLDER", help="where the model is written; it must not be there yet")
    export.add_argument("--best", action="store_true", help="of a run: the checkpoint with the best score instead")
    export.add_argument("--adapter", action="store_true", help="a LoRA adapter by itself, in PEFT's format")
    export.add_argument("--dtype", choices=["float32", "bfloat16"], help="default: as it was trained")
    export.add_argument("--json", action="store_true", help="print what was done as JSON")
    export.set_defaults(command=_export)


def _common(command: argparse.ArgumentParser, *, folder: str | None) -> None:
    where = f"where the run is kept (default: {folder or 'runs/run'}), with a number behind it if a run is there"
    command.add_argument("--folder", default=folder, help=where)
    command.add_argument("--overwrite", action="store_true", help="delete the run that is there instead")
    command.add_argument("--set", action="append", default=[], metavar="a.b=c", help="any setting; see `strop config`")
    for flag, (setting, what) in SHORT.items():
        said = f"{what}: --set {setting}=N"
        command.add_argument(flag, action=_Short, const=setting, dest="set", metavar="N", help=said)
    command.add_argument("--json", action="store_true", help="print the summary as JSON and nothing else")


def _demo(arguments: argparse.Namespace) -> int:
    from strop import demo
    from strop.run.runtime import settled

    config = configs.load(
        base=demo.config(arguments.task), folder=arguments.folder, seed=arguments.seed, sets=arguments.set
    )
    with _placed(config, arguments) as config:
        if not arguments.json:
            Screen().print(demo.INTRODUCTION, highlight=False)
        summary = _run(settled(config), arguments)
    return _tell(summary, Path(config.folder), arguments)


@contextmanager
def _placed(config: Config, arguments: argparse.Namespace, beside: Path | None = None) -> Generator[Config]:
    """In a folder where no run is, and says which if it is not the one that was asked for."""
    from strop.run.start_from import placed

    with placed(Path(config.folder), overwrite=arguments.overwrite, beside=beside) as folder:
        if str(folder) != config.folder and folder != Path(config.folder):
            print(f"strop: {config.folder} holds a run: this one is kept in {folder}", file=sys.stderr)
        yield replace(config, folder=str(folder))


def _train(arguments: argparse.Namespace) -> int:
    from strop.run import start_from
    from strop.run.runtime import settled

    if arguments.resume:
        return _resume(arguments)
    before, checkpoint = start_from.source(arguments.source) if arguments.source else (None, None)
    config = configs.load(
        base=RunFolder.config(before) if before else None,
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
    if before and arguments.model:
        raise ConfigError(f"--from {arguments.source} brings its model: leave out --model")
    if not config.agent:
        raise ConfigError("which agent? strop train FILE.py:function --tasks tasks.jsonl (or --resume RUN)")
    if not config.tasks:
        raise ConfigError("which tasks? --tasks tasks.jsonl, or --tasks FILE.py:function")
    with _placed(config, arguments, before) as config:
        config = settled(config)
        if checkpoint is not None:
            config = start_from.begun_from(checkpoint, config)
        summary = _run(config, arguments)
    return _tell(summary, Path(config.folder), arguments)


def _resume(arguments: argparse.Namespace) -> int:
    from strop.run import start_from

    names = ("agent", "tasks", "data", "reward", "model", "config", "folder", "seed", "source", "overwrite")
    if given := [name for name in names if getattr(arguments, name) not in (None, False)]:
        given = [{"agent": "AGENT", "source": "--from"}.get(name, f"--{name}") for name in given]
        raise ConfigError(
            f"a resumed run keeps what it began with: leave out {', '.join(given)}; --set changes what may change, and "
            f"`strop train --from {arguments.resume}` begins a new run from its weights"
        )
    folder = Path(arguments.resume)
    config, changes = start_from.resumed(folder, sets=arguments.set)
    if done := start_from.finished(folder, changes):
        more = f"Fix: --steps {done.steps + 10} for more"
        json_line(done) if arguments.json else print(f"all {done.steps} steps of {folder} are done. {more}")
        return 0
    if changes and (warning := start_from.rate_ends(config)):
        print(f"strop: {warning}", file=sys.stderr)
    return _tell(_run(config, arguments, resume=True, changes=changes), folder, arguments)


def _export(arguments: argparse.Namespace) -> int:
    checkpoint = export(
        arguments.source, arguments.to, best=arguments.best, adapter=arguments.adapter, dtype=arguments.dtype
    )
    if arguments.json:
        json_line({"checkpoint": str(checkpoint), "folder": arguments.to})
    else:
        print(
            f"{arguments.to} holds the model of {checkpoint}: use it with Hugging Face, vLLM, or --model {arguments.to}"
        )
    return 0


def _run(
    config: Config,
    arguments: argparse.Namespace,
    *,
    resume: bool = False,
    changes: Mapping[str, tuple[Any, Any]] | None = None,
) -> Summary:
    from strop.run.loop import train

    stop = asyncio.Event()

    def interrupted(cancel: Callable[[], object]) -> None:
        if stop.is_set():
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
    from strop import demo

    if arguments.json:
        json_line(summary)
        return 0
    console = Screen(highlight=False)
    steps = f"{summary.steps} step{'s' * (summary.steps != 1)}"
    table = Table(title=f"{steps} in {views.minutes(summary.seconds)}", title_justify="left")
    for column in ("evaluated on", "reward", "before", "after"):
        table.add_column(column, justify="left" if column in ("evaluated on", "reward") else "right")
    for split, rewards in summary.scores.items():
        ends = {name: (points[0][1], points[-1][1]) for name, points in rewards.items()}
        for name, (before, after) in views.distinct(ends).items():
            style = "bold green" if after > before else "red" if after < before else ""
            table.add_row(Text(split), Text(name), views.figure(before), Text(views.figure(after), style=style))
    if summary.scores:
        console.print(table)
    places = {
        "the curve": f"{folder}/curve.png",
        "these figures": f"{folder}/summary.json",
        "some rollouts to read": f"{folder}/transcripts.md",
        "every rollout": f"{me()} rollouts {folder}",
    }
    if summary.checkpoint:
        places["the trained model"] = f"{folder}/checkpoints/{summary.checkpoint}"
        places["as a plain folder"] = f"{me()} export {folder} FOLDER"
        places["to talk to it"] = f"{me()} chat {folder}" + " --agent" * (RunFolder.config(folder).agent != demo.AGENT)
    width = max(map(len, places))
    for what, place in places.items():  # what is to be copied comes last, and is broken by no line end of ours
        console.print(Text.assemble("  ", what.ljust(width), "  ", (place, "bold")), soft_wrap=True)
    return 0
