"""`strop doctor`: is this model's chat template exact, is this machine fit to run, and would a run learn anything?"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.progress import track
from rich.table import Table

from strop.cli import doctor_preflight
from strop.cli.commands import Commands
from strop.cli.output import console, json_line
from strop.config import Config, PolicyConfig
from strop.errors import ConfigError
from strop.gateway.template import Renderer
from strop.gateway.template_check import Finding, TemplateReport, look_at, needs, samples
from strop.gateway.transcripts import Transcript, read_transcripts
from strop.imports import to_install
from strop.models.names import folder_of
from strop.monitor.screen import Screen


def add(commands: Commands) -> None:
    doctor = commands.add_parser("doctor", help="check prompts, memory and rewards before a run begins")
    doctor.add_argument(
        "run", nargs="?", metavar="AGENT", help="FILE.py:function, a command, a service's URL, or the folder of a run"
    )
    doctor.add_argument("--template", metavar="FILE", help="a chat template (default: the tokenizer folder's)")
    doctor.add_argument("--tokenizer", metavar="DIR", help="a folder with tokenizer.json, or tokenizer.json.gz")
    doctor.add_argument("--transcripts", metavar="FILE", help="JSON lines with `messages` and `tools` to replay")
    doctor_preflight.add(doctor)
    doctor.add_argument("--json", action="store_true", help="everything as JSON: every turn's ids and what was sampled")
    doctor.set_defaults(command=_doctor)


def _doctor(arguments: argparse.Namespace) -> int:
    config = doctor_preflight.config_of(arguments)
    folder = Path(arguments.tokenizer) if arguments.tokenizer else folder_of(config.policy)
    if arguments.template and not arguments.tokenizer:
        raise ConfigError("a template needs its tokenizer: add --tokenizer DIR, the folder with its tokenizer.json")
    renderer = _renderer(folder, arguments.template, config.policy)
    conversations = read_transcripts(Path(arguments.transcripts)) if arguments.transcripts else samples(renderer)
    found = _examine(renderer, conversations, quiet=arguments.json)
    if not any(one.sampled.turns or one.sampled.error for one in found):
        raise ConfigError("no conversation has an answer of the assistant's in it: there is nothing to replay")
    alone = arguments.template or arguments.transcripts or arguments.tokenizer
    environment = {} if alone else _environment(config, folder)
    probe = None if alone else doctor_preflight.run_probe(config, arguments)
    if arguments.json:
        about = _as_json(folder, arguments.template, renderer, found)
        json_line(about | {"environment": environment, "probe": probe})
    else:
        _print(folder, renderer, found, environment)
        for line in doctor_preflight.describe_probe(probe) if probe else ():
            console().print(line, markup=False)
    return _exit_code(found)


def _renderer(folder: Path, template: str | None, policy: PolicyConfig) -> Renderer:
    variables, tools = policy.chat_template_kwargs, policy.tools
    if template is None:
        return Renderer.from_folder(folder, variables=variables, tools=tools)
    try:
        return Renderer.from_parts(folder, Path(template).read_text("utf-8"), variables=variables, tools=tools)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {template}: {error}") from None


def _examine(renderer: Renderer, conversations: Sequence[Transcript], *, quiet: bool) -> list[Finding]:
    if not conversations:
        raise ConfigError("the transcripts hold no conversation: each line is an object with `messages`")
    shown = track(conversations, "replaying", console=Screen(stderr=True), disable=quiet, transient=True)
    return [look_at(renderer, one) for one in shown]


def _exit_code(found: Sequence[Finding]) -> int:
    """0: every conversation was exact; 1: some were not; 2: the template cannot render some."""
    if any(one.sampled.error is None and (one.exact is False or one.equal is False) for one in found):
        return 1
    return 2 if any(one.sampled.error for one in found) else 0


NOTHING = "no answer of the assistant's in it, so nothing was compared"

# -- what is shown -----------------------------------------------------------------------------------------------------


def _summary(report: TemplateReport) -> dict[str, Any]:
    return {
        "turns": len(report.turns),
        "extensions": report.extensions,
        "branches": report.branches,
        "exact": report.exact,
        "prefix_stable": report.stable,
        "equals_template": report.equal,
        "differences": report.differences,
        "wrong": report.wrong,
        "error": report.error,
        "note": None if report.turns or report.error else NOTHING,
    }


def _as_json(folder: Path, template: str | None, renderer: Renderer, found: Sequence[Finding]) -> dict[str, Any]:
    return {
        "template": template,
        "tokenizer": str(folder),
        "format": renderer.format.name,
        "tools": renderer.tooling.note or renderer.tooling.lost,
        "stop_ids": renderer.stop_ids,
        "stop_texts": renderer.stop_texts,
        "needs": needs(renderer, found),
        "exit": _exit_code(found),
        "conversations": [
            {
                "id": one.sampled.id,
                **_summary(one.sampled),
                "turn_reports": one.sampled.turns,
                "ended_otherwise": _summary(one.otherwise),
                "history_template": _summary(one.template),
            }
            for one in found
        ],
    }


def _print(folder: Path, renderer: Renderer, found: Sequence[Finding], environment: dict[str, str]) -> None:
    out = console()
    worst = sorted(found, key=lambda one: (one.exact is not False, one.equal is not False))
    out.print(_table(worst[:20]))
    if len(worst) > 20:
        out.print(f"and {len(worst) - 20} more")
    for one in [one for one in worst if one.wrong][:3]:
        out.print(f"\n{one.sampled.id}, {one.wrong[0]}", style="red", markup=False)
    exact = sum(bool(one.exact) for one in found)
    turns = sum(len(one.sampled.turns) for one in found)
    ends = [*map(repr, (renderer.decode([id]) for id in renderer.stop_ids)), *map(repr, renderer.stop_texts)]
    out.print(f"\n{exact} of {len(found)} conversations exact, {turns} turns")
    if any(one.wrong for one in found):
        out.print("prompts are not what the template writes: do not train with this template", style="red")
    if names := sum((one.differences for one in found), Counter[str]()):
        out.print(f"prompts differ from the template's own text by: {_reasons(names)}", markup=False)
    out.print(f"answers end with {', '.join(ends)}; calls are written as {renderer.format.name}")
    for about in [renderer.tooling.note or renderer.tooling.lost, *needs(renderer, found)]:
        if about:
            out.print(about, style="yellow", markup=False)
    if renderer.stop_texts:
        unknown = ", ".join(renderer.stop_texts)
        print(f"strop: the tokenizer in {folder} has no token {unknown}: is it this template's?", file=sys.stderr)
    for what, how in environment.items():
        out.print(f"{what}: {how}", markup=False)


def _table(found: Sequence[Finding]) -> Table:
    table = Table(box=None, pad_edge=False)
    for heading in ("conversation", "turns", "exact", "like the template", "branches", "with history = template"):
        table.add_column(heading, justify="right" if heading == "turns" else "left")
    for one in found:
        report = one.sampled
        if report.error or not report.turns:
            table.add_row(escape(report.id), "", "[red]no[/]" if report.error else "", escape(report.error or NOTHING))
            continue
        differs = "as named below" if report.stable else "it rewrites history"
        like = {True: "yes", False: "[red]no[/]", None: differs}[one.equal]
        table.add_row(
            escape(report.id),
            str(len(report.turns)),
            "[green]yes[/]" if one.exact else "[red]no[/]",
            like,
            _reasons(report.branches) or "none",
            _reasons(one.template.branches) or "no branches",
        )
    return table


def _reasons(branches: Counter[str]) -> str:
    return ", ".join(f"{reason} {count}" for reason, count in branches.most_common())


def _environment(config: Config, folder: Path) -> dict[str, str]:
    """What a run would use here."""
    found = {"python": sys.version.split()[0]}
    for package in ("torch", "vllm", "ray", "psycopg"):
        found[package] = "installed" if find_spec(package) else f"not installed: {to_install(package)}"
    if find_spec("torch"):
        import torch

        found["torch"] = f"{torch.__version__}, {'with' if torch.cuda.is_available() else 'without'} a GPU"
    if memory := doctor_preflight.describe_memory(config, folder):
        found["memory"] = memory
    return found
