"""The command line: parse, call, print. Everything it does can be done from Python as well."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import uvloop
from rich.console import Console
from rich.table import Table
from rich.text import Text

import strop
from strop import algorithms
from strop import config as configs
from strop.config import Config
from strop.errors import ConfigError, PlaceError, StropError
from strop.folder import RunFolder
from strop.monitor import view as views
from strop.monitor.summary import Summary
from strop.store.sqlite import SqliteStore
from strop.types import Event, Rollout, Turn


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code. Errors meant for people are one sentence on stderr."""
    arguments = parser().parse_args(argv)
    command: Callable[[argparse.Namespace], int] = arguments.command
    try:
        return command(arguments)
    except StropError as error:
        print(f"strop: {error}", file=sys.stderr)
        return error.code
    except KeyboardInterrupt:
        print("strop: stopped; what was collected is kept", file=sys.stderr)
        return 130
    except BrokenPipeError:  # `strop rollouts | head`
        sys.stderr.close()
        return 0


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="strop", description="Train the model behind any agent.")
    top.add_argument("--version", action="version", version=f"strop {strop.__version__}")
    commands = top.add_subparsers(required=True, metavar="COMMAND")

    demo = commands.add_parser("demo", help="watch a small model learn to use a calculator, on this machine")
    demo.add_argument("--task", choices=["calc", "chain"], default="calc", help="one tool call, or two chained ones")
    demo.add_argument("--seed", type=int, default=0, help="another seed is another run (default: 0)")
    _common(demo, folder="runs/demo")
    demo.set_defaults(command=_demo)

    train = commands.add_parser("train", help="train the model behind an agent, or resume a run")
    train.add_argument("agent", nargs="?", metavar="FILE:agent", help="FILE.py:function or package.module:function")
    train.add_argument("--tasks", help="a .jsonl file, or FILE.py:function")
    train.add_argument("--model", help="strop/nano, or a folder in Hugging Face format")
    train.add_argument("--config", metavar="TOML", help="settings from a file")
    train.add_argument("--seed", type=int, help="fixes the order of tasks (default: 0)")
    train.add_argument("--resume", metavar="RUN", help="go on with the run in this folder")
    _common(train, folder=None)
    train.set_defaults(command=_train)

    rollouts = commands.add_parser("rollouts", help="list the rollouts of a run, or show one with its turns")
    rollouts.add_argument("run", nargs="?", default="runs/demo", help="the run's folder (default: runs/demo)")
    rollouts.add_argument("id", nargs="?", help="the rollout to show")
    statuses = ["queued", "running", "succeeded", "failed", "cancelled"]
    rollouts.add_argument("--status", choices=statuses, help="only those with this status")
    rollouts.add_argument("--mode", choices=["train", "eval", "greedy"], help="only those that sampled this way")
    rollouts.add_argument("--limit", type=_positive, default=50, help="how many to list (default: 50)")
    rollouts.add_argument("--after", metavar="ID", help="continue after this rollout")
    rollouts.add_argument("--json", action="store_true", help="one JSON object per line")
    rollouts.set_defaults(command=_rollouts)

    config = commands.add_parser("config", help="every setting, its value and what it means")
    config.add_argument("run", nargs="?", help="a run's folder; without it the defaults are shown")
    config.add_argument("--json", action="store_true", help="as JSON")
    config.set_defaults(command=_config)
    return top


def _positive(text: str) -> int:
    if (number := int(text)) < 1:
        raise ValueError
    return number


def _common(command: argparse.ArgumentParser, *, folder: str | None) -> None:
    command.add_argument("--folder", default=folder, help=f"where the run is kept (default: {folder or 'runs/run'})")
    command.add_argument("--set", action="append", default=[], metavar="a.b=c", help="any setting; see `strop config`")
    command.add_argument("--json", action="store_true", help="print the summary as JSON and nothing else")


# -- training ------------------------------------------------------------------------------------------------------


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
        RunFolder.open(folder)  # refuses if it is still at work
        n = next(n for n in range(1, 10_000) if not folder.with_name(f"{folder.name}-{n}").exists())
        try:
            folder.rename(folder.with_name(f"{folder.name}-{n}"))
        except OSError as error:
            raise PlaceError(f"cannot move {folder} aside ({error.strerror}): choose another --folder") from None


def _train(arguments: argparse.Namespace) -> int:
    if arguments.resume:
        given = [
            name
            for name in ("agent", "tasks", "model", "config", "folder", "seed")
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
        folder=arguments.folder,
        seed=arguments.seed,
        policy={"model": arguments.model} if arguments.model else None,
    )
    if not config.agent:
        raise ConfigError("which agent? strop train FILE.py:function --tasks tasks.jsonl (or --resume RUN)")
    if not config.tasks:
        raise ConfigError("which tasks? --tasks tasks.jsonl, or --tasks FILE.py:function")
    return _tell(_run(config, arguments), Path(config.folder), arguments)


def _run(config: Config, arguments: argparse.Namespace, *, resume: bool = False) -> Summary:
    from strop.rooms import settled
    from strop.run import train

    with views.choose(json=arguments.json, out=sys.stdout) as view:
        try:
            return uvloop.run(train(config if resume else settled(config), view, resume=resume))
        except KeyboardInterrupt:
            if (Path(config.folder) / "config.json").exists():
                view.note(f"stopped; go on with: {_me()} train --resume {config.folder}")
            raise


def _tell(summary: Summary, folder: Path, arguments: argparse.Namespace) -> int:
    if arguments.json:
        sys.stdout.write(msgspec.json.encode(summary).decode() + "\n")
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
        f"{_me()} rollouts {folder}": "every rollout, with its turns and rewards",
    }
    if summary.checkpoint:
        places[f"{folder}/checkpoints/{summary.checkpoint}"] = "the trained model, a Hugging Face folder"
    width = max(map(len, places))
    for place, what in places.items():
        console.print(Text.assemble("  ", (place.ljust(width), "bold"), "  ", what), soft_wrap=True)
    return 0


def _me() -> str:
    """How this command was called, for sentences that tell what to type next."""
    return sys.argv[0] if Path(sys.argv[0]).name == "strop" else "strop"


# -- looking -------------------------------------------------------------------------------------------------------


def _rollouts(arguments: argparse.Namespace) -> int:
    folder = Path(arguments.run)
    RunFolder.config(folder)  # a sentence if there is no run
    return asyncio.run(_show_one(folder, arguments) if arguments.id else _show_all(folder, arguments))


async def _show_all(folder: Path, arguments: argparse.Namespace) -> int:
    store = await SqliteStore.open(folder / "store.sqlite")
    try:
        found = await store.list(
            status=arguments.status, mode=arguments.mode, after=arguments.after, limit=arguments.limit
        )
    finally:
        await store.close()
    if arguments.json:
        for rollout in found:
            sys.stdout.write(msgspec.json.encode(rollout).decode() + "\n")
        return 0
    table = Table(box=None, pad_edge=False)
    for column in ("rollout", "task", "mode", "status", "attempts", "rewards", "why"):
        table.add_column(column, overflow="fold")
    for r in found:
        rewards = "  ".join(f"{reward.name} {views.figure(reward.value)}" for reward in r.rewards)
        row = (r.id, r.task.id, r.mode, _status(r), str(r.attempts), rewards, r.cause or "")
        table.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in row))
    _console().print(table)
    if len(found) == arguments.limit:
        print(f"more: --after {found[-1].id} (or --limit)")
    return 0


async def _show_one(folder: Path, arguments: argparse.Namespace) -> int:
    store = await SqliteStore.open(folder / "store.sqlite")
    try:
        rollout = await store.get(arguments.id)
        turns, events = await store.turns(rollout.id), await store.events(rollout.id)
    finally:
        await store.close()
    if arguments.json:
        whole: dict[str, Any] = {"rollout": rollout, "turns": turns, "events": events}
        sys.stdout.write(msgspec.json.encode(whole).decode() + "\n")
    else:
        _transcript(rollout, turns, events)
    return 0


def _transcript(rollout: Rollout, turns: list[Turn], events: list[Event]) -> None:
    console = Console(highlight=False)
    console.print(Text.assemble((rollout.id, "bold"), f"  task {rollout.task.id}  ", _status(rollout)))
    for reward in rollout.rewards:
        target = f" (turn {reward.turn})" if reward.turn else f" (agent {reward.agent})" if reward.agent else ""
        console.print(f"  {reward.name} = {views.figure(reward.value)}{target}", markup=False)
    seen = 0
    for turn in turns:
        for message in turn.messages[seen:]:
            _message(console, message)
        how = (
            f"branch: {turn.branch}" if turn.branch else f"{turn.shared} of {len(turn.prompt_ids)} prompt tokens shared"
        )
        console.print(
            Text(
                f"── turn {turn.id} · {turn.agent} · version {turn.versions[0][1] if turn.versions else '-'} · "
                f"{len(turn.response_ids)} tokens · {turn.finish} · {how}",
                style="dim",
            )
        )
        _message(console, turn.answer)
        seen = len(turn.messages) + 1
    for event in events:
        console.print(Text(f"event {event.kind}: {msgspec.json.encode(event.data).decode()}", style="dim"))
    if rollout.detail:
        console.print(Text(rollout.detail, style="red"))


def _message(console: Console, message: dict[str, Any]) -> None:
    role, content = str(message.get("role", "assistant")), str(message.get("content") or "")
    lines = [content] if content else []
    for call in message.get("tool_calls") or ():
        arguments = call["function"]["arguments"]
        text = arguments if isinstance(arguments, str) else msgspec.json.encode(arguments).decode()
        lines.append(f"{call['function']['name']}({text})")
    for number, line in enumerate(lines or [""]):
        style = "magenta" if line is not content else ""
        console.print(Text.assemble((f"{role if number == 0 else '':>9}  ", "cyan"), (line, style)))


def _console() -> Console:
    """Tables fit the terminal; into a pipe they are as wide as they like, so that no id is cut."""
    return Console() if sys.stdout.isatty() else Console(width=1000)


def _status(rollout: Rollout) -> Text:
    style = {"succeeded": "green", "failed": "red", "cancelled": "yellow"}.get(rollout.status, "")
    return Text(rollout.status, style=style)


def _config(arguments: argparse.Namespace) -> int:
    config = RunFolder.config(Path(arguments.run)) if arguments.run else Config()
    if arguments.json:
        sys.stdout.write(configs.to_json(config).decode() + "\n")
        return 0
    table = Table(box=None, pad_edge=False)
    for column in ("setting", "value", "what it is"):
        table.add_column(column, overflow="fold")
    own = configs.walk(algorithms.settings(config.algorithm), "algorithm.settings.")
    for setting in [*configs.settings(config), *own]:
        table.add_row(Text(setting.key, style="bold"), Text(str(setting.value), style="cyan"), setting.doc)
    _console().print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
