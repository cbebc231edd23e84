"""`strop completion`: what a shell needs to complete commands, options, choices and the names of settings.

Scripts are made from the parser once, when a shell starts, and ask nobody afterwards: a key press must not wait for
Python. Whatever has no words of its own is completed as a file.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Iterator
from typing import Any, cast

from msgspec import Struct

from strop import algorithms
from strop.cli.commands import Commands
from strop.config import Config

HOW = {
    "bash": 'eval "$(strop completion bash)", in ~/.bashrc',
    "zsh": 'eval "$(strop completion zsh)", in ~/.zshrc after compinit',
    "fish": "strop completion fish | source, in ~/.config/fish/config.fish",
}


def add(commands: Commands) -> None:
    command = commands.add_parser(
        "completion",
        help="a script that has a shell complete commands, options and settings",
        description="Have a shell complete commands, options and settings: " + "; ".join(HOW.values()) + ".",
    )
    command.add_argument("shell", choices=list(HOW), help="which shell it is for")
    command.set_defaults(command=_completion)


def _completion(arguments: argparse.Namespace) -> int:
    from strop.cli import parser

    made = {"bash": _bash, "zsh": _zsh, "fish": _fish}[arguments.shell]
    sys.stdout.write(made(list(_commands(parser()))))
    return 0


class OptionWords(Struct, frozen=True):
    """`words` are what may follow it: none, for a file or anything else; or nothing at all, for a switch."""

    flags: list[str]
    help: str
    words: list[str]
    takes: bool


class CommandWords(Struct, frozen=True):
    """`words` are what its first argument may be, where that can be told."""

    name: str
    help: str
    options: list[OptionWords]
    words: list[str]


def _commands(top: argparse.ArgumentParser) -> Iterator[CommandWords]:
    verbs = _verbs(top)
    assert verbs is not None
    helps = {action.dest: action.help or "" for action in verbs._choices_actions}  # pyright: ignore[reportPrivateUsage]
    for name, parser in verbs.choices.items():
        below = _verbs(parser)
        parsers = [parser, *(below.choices.values() if below else ())]
        options = [_option(action) for one in parsers for action in one._actions if action.option_strings]  # pyright: ignore[reportPrivateUsage]
        shown = {option.flags[-1]: option for option in options if option.help != argparse.SUPPRESS}
        yield CommandWords(name, helps[name], list(shown.values()), _first_words(name, parser))


def _verbs(parser: argparse.ArgumentParser) -> Commands | None:
    kind: Any = argparse._SubParsersAction  # pyright: ignore[reportPrivateUsage]
    return cast("Commands | None", next((a for a in parser._actions if isinstance(a, kind)), None))  # pyright: ignore[reportPrivateUsage]


def _option(action: argparse.Action) -> OptionWords:
    words = _settings() if action.option_strings == ["--set"] else [str(choice) for choice in action.choices or ()]
    return OptionWords(list(action.option_strings), (action.help or "").replace("%%", "%"), words, action.nargs != 0)


def _first_words(name: str, parser: argparse.ArgumentParser) -> list[str]:
    if name == "config":
        sections = {setting.removesuffix("=").rpartition(".")[0] for setting in _settings()} - {""}
        return [*sorted(sections), *algorithms.names()]
    first = next((action for action in parser._actions if not action.option_strings), None)  # pyright: ignore[reportPrivateUsage]
    return [str(choice) for choice in first.choices or ()] if first else []


def _settings() -> list[str]:
    """As --set begins. Of algorithms those of all, since it is not known yet which one is meant."""
    found = [*algorithms.every_setting(Config()), *algorithms.registered_settings()]
    return [f"{key}=" for key in dict.fromkeys(setting.key for setting in found) if key != "algorithm.settings"]


# -- shells ------------------------------------------------------------------------------------------------------------


def _cases(commands: list[CommandWords]) -> Iterator[tuple[str, list[str]]]:
    """COMMAND --OPTION, and the words that may follow."""
    for command in commands:
        for option in command.options:
            for flag in option.flags if option.words else ():
                yield f"{command.name} {flag}", option.words


def _flags(command: CommandWords) -> list[str]:
    return [flag for option in command.options for flag in option.flags]


def _bash(commands: list[CommandWords]) -> str:
    names = " ".join(command.name for command in commands)
    settings = " ".join(_settings())
    after = "\n".join(
        f'    "{case}") words="{" ".join(words)}" ;;' for case, words in _cases(commands) if not case.endswith(" --set")
    )
    options = "\n".join(f'    {command.name}) words="{" ".join(_flags(command))}" ;;' for command in commands)
    first = "\n".join(f'    {c.name}) words="{" ".join(c.words)}" ;;' for c in commands if c.words)
    return f"""_strop() {{
  local current="${{COMP_WORDS[COMP_CWORD]}}" previous="${{COMP_WORDS[COMP_CWORD-1]}}"
  local command="${{COMP_WORDS[1]}}" words=""
  COMPREPLY=()
  if [[ $COMP_CWORD -eq 1 ]]; then
    COMPREPLY=($(compgen -W "{names} --help --version" -- "$current"))
    return
  fi
  if [[ $previous == --set ]]; then
    COMPREPLY=($(compgen -W "{settings}" -- "$current"))
    compopt -o nospace
    return
  fi
  case "$command $previous" in
{after}
  esac
  if [[ -z $words && $current == -* ]]; then
    case "$command" in
{options}
    esac
  elif [[ -z $words && $COMP_CWORD -eq 2 ]]; then
    case "$command" in
{first}
    esac
  fi
  COMPREPLY=($(compgen -W "$words" -- "$current"))
}}
complete -o default -F _strop strop
"""


def _zsh(commands: list[CommandWords]) -> str:
    def describe(pairs: Iterator[tuple[str, str]]) -> str:
        return " ".join(shlex.quote(f"{name}:{help}".replace("\n", " ")) for name, help in pairs)

    names = describe((command.name, command.help) for command in commands)
    after = "\n".join(
        f"    ({shlex.quote(case)}) compadd -- {' '.join(words)}; return ;;"
        for case, words in _cases(commands)
        if not case.endswith(" --set")
    )
    options = "\n".join(
        f"    ({c.name}) found=({describe((flag, option.help) for option in c.options for flag in option.flags)}) ;;"
        for c in commands
    )
    first = "\n".join(f"    ({c.name}) compadd -- {' '.join(c.words)} ;;" for c in commands if c.words)
    return f"""_strop() {{
  local command=$words[2] previous=$words[CURRENT-1]
  local -a found
  if (( CURRENT == 2 )); then
    found=({names})
    _describe command found
    return
  fi
  if [[ $previous == --set ]]; then
    compadd -S '' -- {" ".join(_settings())}
    return
  fi
  case "$command $previous" in
{after}
  esac
  if [[ $PREFIX == -* ]]; then
    case $command in
{options}
    esac
    _describe option found
    return
  fi
  if (( CURRENT == 3 )); then
    case $command in
{first}
    esac
  fi
  _files
}}
compdef _strop strop
"""


def _fish(commands: list[CommandWords]) -> str:
    lines = [
        f"complete -c strop -n __fish_use_subcommand -f -a {command.name} -d {_quote(command.help)}"
        for command in commands
    ]
    for command in commands:
        begin = f"complete -c strop -n '__fish_seen_subcommand_from {command.name}'"
        if command.words:
            lines.append(f"{begin} -a {_quote(' '.join(command.words))}")
        for option in command.options:
            flags = " ".join(f"-l {flag[2:]}" if flag.startswith("--") else f"-s {flag[1:]}" for flag in option.flags)
            words = f" -x -a {_quote(' '.join(option.words))}" if option.words else " -r" * option.takes
            lines.append(f"{begin} {flags}{words} -d {_quote(option.help)}")
    return "\n".join(lines) + "\n"


def _quote(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"
