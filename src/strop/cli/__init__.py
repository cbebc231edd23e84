"""The command line: parse, call, print. Everything it does can be done from Python as well."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence

import strop
from strop.cli import (
    chatting,
    comparing,
    completing,
    configuring,
    doctoring,
    evaluating,
    looking,
    replaying,
    searching,
    serving,
    training,
)
from strop.errors import StropError
from strop.secret import hide

BEGIN = "To begin: `strop demo`. Of a command more is said by `strop COMMAND --help`, of settings by `strop config`."


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code: 0 done, 1 it failed, 2 it was asked wrongly, 130 it was stopped. Errors
    meant for people are one sentence on stderr."""
    hide("STROP_KEY")
    top = parser()
    arguments = top.parse_args(argv)
    if arguments.command is None:
        top.print_help()
        return 0
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
    top = argparse.ArgumentParser(prog="strop", description="Train the model behind any agent.", epilog=BEGIN)
    top.add_argument("--version", action="version", version=f"strop {strop.__version__}")
    top.set_defaults(command=None)
    commands = top.add_subparsers(metavar="COMMAND", title="commands")
    for part in (
        training,
        evaluating,
        chatting,
        serving,
        looking,
        configuring,
        comparing,
        replaying,
        doctoring,
        searching,
        completing,
    ):
        part.add(commands)
    return top
