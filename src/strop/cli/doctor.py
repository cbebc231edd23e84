"""`strop doctor`: is this model's chat template exact, is this machine fit to run, and would a run learn anything?"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.progress import track
from rich.table import Table

from strop.cli import doctor_preflight
from strop.cli.commands import Commands
from strop.cli.output import make_console, print_json
from strop.config import MAIN, Config, PolicyConfig, resolve_policies
from strop.errors import ConfigError
from strop.gateway.template import Renderer
from strop.gateway.template_check import Finding, TemplateReport, choose_samples, look_at, needs
from strop.gateway.transcripts import Transcript, read_transcripts
from strop.imports import to_install
from strop.models.names import prepare_folder
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
    config = doctor_preflight.read_config(arguments)
    if arguments.template and not arguments.tokenizer:
        raise ConfigError(
            "a template needs its tokenizer. Fix: add --tokenizer DIR, the folder with its tokenizer.json"
        )
    alone = bool(arguments.template or arguments.transcripts or arguments.tokenizer)
    own = {MAIN: config} if arguments.tokenizer else resolve_policies(config)
    examined = {name: _examine_policy(one, arguments) for name, one in own.items()}
    environment = {} if alone else _environment({name: (own[name], one.folder) for name, one in examined.items()})
    probe = None if alone else doctor_preflight.run_probe(config, arguments)
    if arguments.json:
        each = {name: _as_json(one, arguments.template) for name, one in examined.items()}
        about = {"policies": each} if len(each) > 1 else each.popitem()[1]
        print_json(about | {"environment": environment, "probe": probe})
    else:
        for name, one in examined.items():
            if len(examined) > 1:
                make_console().print(f"policy {name}: {own[name].policy.model}", style="bold", markup=False)
            _print(one)
        for what, how in environment.items():
            make_console().print(f"{what}: {how}", markup=False)
        for line in doctor_preflight.describe_probe(probe) if probe else ():
            make_console().print(line, markup=False)
    return max((_exit_code(one.found) for one in examined.values()), key=(0, 2, 1).index)


@dataclass(frozen=True)
class ExaminedTemplate:
    """A policy's chat template, and what came of conversations that it rendered."""

    folder: Path
    renderer: Renderer
    found: Sequence[Finding]


def _examine_policy(config: Config, arguments: argparse.Namespace) -> ExaminedTemplate:
    folder = Path(arguments.tokenizer) if arguments.tokenizer else prepare_folder(config.policy)
    renderer = _renderer(folder, arguments.template, config.policy)
    conversations = read_transcripts(Path(arguments.transcripts)) if arguments.transcripts else choose_samples(renderer)
    found = _examine(renderer, conversations, quiet=arguments.json)
    if not any(one.sampled.turns or one.sampled.error for one in found):
        raise ConfigError("no conversation has an answer of the assistant's in it: there is nothing to replay")
    return ExaminedTemplate(folder, renderer, found)


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


def _as_json(examined: ExaminedTemplate, template: str | None) -> dict[str, Any]:
    renderer, found = examined.renderer, examined.found
    return {
        "template": template,
        "tokenizer": str(examined.folder),
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


def _print(examined: ExaminedTemplate) -> None:
    out, folder, renderer, found = make_console(), examined.folder, examined.renderer, examined.found
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


def _environment(policies: Mapping[str, tuple[Config, Path]]) -> dict[str, str]:
    """What a run would use here. `policies` are their configurations and the folders of their models."""
    found = {"python": sys.version.split()[0]}
    for package in ("torch", "vllm", "ray", "psycopg"):
        found[package] = "installed" if find_spec(package) else f"not installed: {to_install(package)}"
    if find_spec("torch"):
        import torch

        found["torch"] = f"{torch.__version__}, {'with' if torch.cuda.is_available() else 'without'} a GPU"
    for name, (config, folder) in policies.items():
        if memory := doctor_preflight.describe_memory(config, folder):
            found["memory" if len(policies) == 1 else f"memory of {name}"] = memory
    return found
