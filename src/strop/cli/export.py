"""`strop export`: write a trained model as a plain Hugging Face folder."""

from __future__ import annotations

import argparse
from pathlib import Path

from strop.cli.commands import Commands
from strop.cli.output import print_json
from strop.run.api import export


def add(commands: Commands) -> None:
    command = commands.add_parser("export", help="write a trained model as a Hugging Face folder, or prompts as files")
    command.add_argument(
        "source", metavar="RUN", help="a run, for its last checkpoint, RUN:STEP, or a checkpoint's folder"
    )
    command.add_argument("to", metavar="FOLDER", help="where the model is written; it must not be there yet")
    command.add_argument("--best", action="store_true", help="of a run: the checkpoint with the best score instead")
    command.add_argument("--policy", default="", metavar="NAME", help="of a run's several policies: this one")
    command.add_argument("--adapter", action="store_true", help="a LoRA adapter by itself, in PEFT's format")
    command.add_argument("--dtype", choices=["float32", "bfloat16"], help="default: as it was trained")
    command.add_argument("--json", action="store_true", help="print what was done as JSON")
    command.set_defaults(command=_export)


def _export(arguments: argparse.Namespace) -> int:
    checkpoint = export(
        arguments.source,
        arguments.to,
        best=arguments.best,
        policy=arguments.policy,
        adapter=arguments.adapter,
        dtype=arguments.dtype,
    )
    if arguments.json:
        print_json({"checkpoint": str(checkpoint), "folder": arguments.to})
    else:
        if (texts := sorted(Path(arguments.to).glob("*.md"))) and (Path(arguments.to) / "prompts.json").is_file():
            print(f"{arguments.to} holds the prompts of {checkpoint}: {', '.join(text.name for text in texts)}")
            return 0
        print(
            f"{arguments.to} holds the model of {checkpoint}: use it with Hugging Face, vLLM, or --model {arguments.to}"
        )
    return 0
