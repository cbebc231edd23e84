"""`strop demo`: watch a small model learn to use a calculator."""

from __future__ import annotations

import argparse
from pathlib import Path

from strop import config as configs
from strop.cli.commands import Commands
from strop.cli.training_run import add_options, choose_folder, print_summary, run_training
from strop.learner.spawn import start_ahead
from strop.monitor.screen import Screen


def add(commands: Commands) -> None:
    demo = commands.add_parser("demo", help="watch a small model learn to use a calculator, on this machine")
    demo.add_argument("--task", choices=["calc", "chain"], default="calc", help="one tool call, or two chained ones")
    demo.add_argument("--seed", type=int, default=0, help="another seed is another run (default: 0)")
    add_options(demo, folder="runs/demo")
    demo.set_defaults(command=_demo)


def _demo(arguments: argparse.Namespace) -> int:
    from strop import demo

    config = configs.load(
        base=demo.config(arguments.task), folder=arguments.folder, seed=arguments.seed, sets=arguments.set
    )
    start_ahead(config, train=True)
    from strop.run.settings import settle

    with choose_folder(config, arguments) as config:
        if not arguments.json:
            Screen().print(demo.INTRODUCTION, highlight=False)
        summary = run_training(settle(config), arguments)
    return print_summary(summary, Path(config.folder), arguments)
