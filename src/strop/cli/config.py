"""`strop config`."""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from strop import algorithms
from strop.cli.commands import Commands
from strop.cli.output import make_console
from strop.config import RENAMED, AlgorithmConfig, Config, Setting, find_new_names, toml
from strop.errors import ConfigError
from strop.run.folder import RunFolder

WIDE = 100
"""Columns from which on a table of three fits."""


def add(commands: Commands) -> None:
    config = commands.add_parser(
        "config",
        help="every setting, its value and what it means",
        description="Every setting, its value and what it means: `strop config learner`, `strop config lr`, `strop "
        "config ppo`, `strop config runs/mine loop`.",
    )
    config.add_argument(
        "what",
        nargs="*",
        metavar="WHAT",
        help="a run's folder (default: the defaults); a section or part of a name; an algorithm, for its settings",
    )
    form = config.add_mutually_exclusive_group()
    form.add_argument("--toml", action="store_true", help="as a file for --config")
    form.add_argument("--json", action="store_true", help="as JSON")
    config.set_defaults(command=_config)


def _config(arguments: argparse.Namespace) -> int:
    runs = [word for word in arguments.what if (Path(word) / "config.json").is_file()]
    if len(runs) > 1:
        raise ConfigError(f"{runs[0]} and {runs[1]} are two runs: `strop runs` shows where they differ")
    config = RunFolder.config(Path(runs[0])) if runs else Config()
    words = [word for word in arguments.what if word not in runs]
    found = _chosen(config, words)
    if arguments.toml:
        given = {f"algorithm.settings.{name}" for name in config.algorithm.settings}
        own = [s.key for s in found if s.key.startswith("algorithm.settings.") and s.key not in given]
        sys.stdout.write(toml.dumps(found, unset=own))
    elif arguments.json:
        data = _nested(found) if words else msgspec.to_builtins(config)
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(data), indent=2).decode() + "\n")
    elif sys.stdout.isatty():
        _show(found)
    else:
        for setting in found:
            print(f"{setting.key} = {_value(setting)}  # {setting.doc}")
    return 0


def _chosen(config: Config, words: Sequence[str]) -> list[Setting]:
    """The settings that any of the words is about, each once; without words all of them."""
    every = [setting for setting in algorithms.every_setting(config) if setting.key != "algorithm.settings"]
    if not words:
        return every
    found: dict[str, Setting] = {}
    for word in words:
        found |= {setting.key: setting for setting in _about(word, every, config)}
    return list(found.values())


def _about(word: str, every: Sequence[Setting], config: Config) -> list[Setting]:
    """Those of an algorithm; or those with the word in their name, or in the name they had before; or in their line."""
    if ":" in word or word in algorithms.names():
        chosen = config.algorithm if config.algorithm.name == word else AlgorithmConfig(name=word)
        own = list(algorithms.own_settings(chosen))
        return [Setting("algorithm.name", word, next(s.doc for s in every if s.key == "algorithm.name")), *own]
    low = word.lower()
    if "." in low and (found := _renamed(low, every)):  # by its whole old name: some new ones begin like it
        return found
    if found := [s for s in every if low in s.key]:
        return found
    others = [s for s in algorithms.registered_settings() if low in s.key]
    if found := others or _renamed(low, every) or [s for s in every if low in s.doc.lower()]:
        return found
    if "/" in word:
        RunFolder.config(Path(word))  # a sentence, since there is no run
    near = _nearest(low, every)
    fix = f"write `strop config {near}`" if near else "choose from what `strop config` lists"
    raise ConfigError(f"no setting has {word!r} in its name, and no run is there. Fix: {fix}")


def _renamed(word: str, every: Sequence[Setting]) -> list[Setting]:
    """The settings that were called so once, with a note that names them."""
    new = find_new_names(word)
    if new:
        print(f"strop: {word} is called {' or '.join(new)} now", file=sys.stderr)
    known = {setting.key: setting for setting in (*algorithms.registered_settings(), *every)}
    # What stands in a table of the user's own (gateway.outside.NAME) is described with the table.
    return [setting for key, setting in known.items() if any(f"{name}.".startswith(f"{key}.") for name in new)]


def _nearest(word: str, every: Sequence[Setting]) -> str:
    """What is spelt most like a word: an algorithm, a setting or a part of its name, or a setting's old name, for which
    the new one is given."""
    if near := difflib.get_close_matches(word, algorithms.names(), 1, 0.75):
        return near[0]
    names = {part: part for setting in every for part in (setting.key, *setting.key.split("."))}
    old = [spelt for name in RENAMED if "*" not in name for spelt in (name, name.rpartition(".")[2])]
    names = {spelt: find_new_names(spelt)[0] for spelt in old} | names
    return next((names[near] for near in difflib.get_close_matches(word, sorted(names), 1)), "")


def _nested(found: Sequence[Setting]) -> dict[str, Any]:
    data: dict[str, Any] = {}
    for setting in found:
        *sections, name = setting.key.split(".")
        here = data
        for section in sections:
            here = here.setdefault(section, {})
        here[name] = msgspec.to_builtins(setting.value)
    return data


def _value(setting: Setting) -> str:
    return "none" if setting.value is None else toml.format_value(setting.value, setting.key)


def _show(found: Sequence[Setting]) -> None:
    """A table where it fits, otherwise each with its line below it."""
    out = make_console()
    if out.width < WIDE:
        for setting in found:
            out.print(Text.assemble((setting.key, "bold"), " = ", (_value(setting), "cyan")))
            out.print(Padding(Text(setting.doc, style="dim"), (0, 0, 0, 4)))
        return
    table = Table(box=None, pad_edge=False)
    table.add_column("setting", no_wrap=True)
    for column in ("value", "what it is"):
        table.add_column(column, overflow="fold")
    for setting in found:
        table.add_row(Text(setting.key, style="bold"), Text(_value(setting), style="cyan"), Text(setting.doc))
    out.print(table)
