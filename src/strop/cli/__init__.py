"""The command line: parse, call, print. Everything it does can be done from Python as well."""

from __future__ import annotations

import argparse
import difflib
import sys
import warnings
from collections.abc import Callable, Iterable, Sequence
from importlib import import_module
from typing import Any, cast

import strop
from strop.cli.commands import Commands
from strop.config import RenamedSetting
from strop.errors import StropError
from strop.learner import spawn
from strop.net.secrets import hide

COMMANDS = (
    "demo",
    "train",
    "export",
    "eval",
    "chat",
    "serve",
    "enqueue",
    "runner",
    "rollouts",
    "config",
    "runs",
    "prompts",
    "replay",
    "doctor",
    "search",
    "completion",
)
"""Modules of this package, each named like its command, in the order that `strop --help` shows."""
BEGIN = "Start with `strop demo`. `strop COMMAND --help` describes a command, `strop config` lists the settings."


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code: 0 done, 1 it failed, 2 it was asked wrongly, 130 it was stopped. Errors
    meant for people are one sentence on stderr."""
    hide("STROP_KEY")
    warnings.showwarning = _show_warning
    given = sys.argv[1:] if argv is None else list(argv)
    top = parser(given[0] if given and given[0] in COMMANDS else None)
    arguments = top.parse_args(given)
    if arguments.command is None:
        top.print_help()
        return 0
    command: Callable[[argparse.Namespace], int] = arguments.command
    try:
        return command(arguments)
    except StropError as error:
        print(f"strop: {error}", file=sys.stderr)
        return error.code
    except KeyboardInterrupt as stopped:
        print(f"strop: stopped; {str(stopped) or 'what was collected is kept'}", file=sys.stderr)
        return 130
    except BrokenPipeError:  # `strop rollouts | head`
        sys.stderr.close()
        return 0
    finally:
        spawn.discard()


def _show_warning(message: Warning | str, category: type[Warning], *where: Any) -> None:
    """What people should know as a sentence, other warnings as Python shows them."""
    if issubclass(category, RenamedSetting):
        print(f"strop: {message}", file=sys.stderr)
    else:
        _python_shows(message, category, *where)


_python_shows = warnings.showwarning


class CommandParser(argparse.ArgumentParser):
    """Refuses what it does not know by itself, with a command's own usage, and says what may have been meant."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            name = next((word for word in unknown if word.startswith("-")), unknown[0]).partition("=")[0]
            self.error(f"{name} is not an option here{_near(name, self._option_string_actions)}")
        return found, []

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        kind: Any = argparse._SubParsersAction  # pyright: ignore[reportPrivateUsage]
        if isinstance(action, kind):
            names = list(cast("Commands", action).choices)
            if value not in names:
                self.error(f"{value} is not a command{_near(value, names)}")
        super()._check_value(action, value)


def _near(word: str, words: Iterable[str]) -> str:
    found = difflib.get_close_matches(word, words, 1)
    return f". Fix: write {found[0]}" if found else ""


def parser(command: str | None = None) -> argparse.ArgumentParser:
    """Of all commands, or of one: the others need not be imported then."""
    top = CommandParser(prog="strop", description="Train the model behind any agent.", epilog=BEGIN)
    top.add_argument("--version", action="version", version=f"strop {strop.__version__}")
    top.set_defaults(command=None)
    commands = top.add_subparsers(metavar="COMMAND", title="commands")
    for name in [command] if command else COMMANDS:
        import_module(f"strop.cli.{name}").add(commands)
    return top
