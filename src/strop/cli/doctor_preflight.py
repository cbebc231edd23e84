"""What `strop doctor` says of a run before there is one: the memory that an update takes, and whether a few groups of
rollouts would teach anything."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from pathlib import Path
from typing import Any, cast

import uvloop

from strop import config as configs
from strop.algorithms import find, make
from strop.cli.training_run import run_until_signal
from strop.config import Config
from strop.errors import ConfigError
from strop.monitor import console
from strop.run.folder import RunFolder
from strop.run.preflight import PreflightResult, probe

GROUPS = 4
"""How many are run where nothing else is said."""


def add(doctor: argparse.ArgumentParser) -> None:
    doctor.add_argument("--tasks", help="with an AGENT: its tasks; a few groups of them are run")
    doctor.add_argument("--data", metavar="PATH", help="where the data is, for a tasks function that takes `data`")
    doctor.add_argument("--reward", metavar="FILE.py:function", help="turns (task, answer) into rewards")
    doctor.add_argument("--model", help="strop/nano, or a folder in Hugging Face format")
    doctor.add_argument("--config", metavar="TOML", help="settings from a file")
    doctor.add_argument("--set", action="append", default=[], metavar="a.b=c", help="any setting; see `strop config`")
    doctor.add_argument(
        "--probe", type=int, metavar="N", help=f"groups that are run (default: {GROUPS}, of a run: none)"
    )


def read_config(arguments: argparse.Namespace) -> Config:
    """A run's configuration, or the defaults, with what was given on top."""
    run = arguments.run if os.path.isdir(arguments.run or "") else None
    return configs.load(
        base=RunFolder.config(Path(run)) if run else None,
        toml=arguments.config,
        sets=arguments.set,
        agent=None if run else arguments.run,
        tasks=arguments.tasks,
        data=arguments.data,
        reward=arguments.reward,
        policy={"model": arguments.model} if arguments.model else None,
    )


def run_probe(config: Config, arguments: argparse.Namespace) -> PreflightResult | None:
    groups = arguments.probe
    if groups is None:
        groups = 0 if RunFolder.is_run(arguments.run or "") else GROUPS
    if not config.agent or groups < 1 or find(config.algorithm.name).improves == "prompts":
        return None
    if not config.tasks:
        raise ConfigError(
            f"which tasks? --tasks tasks.jsonl, or FILE.py:function ({config.agent} is not a run's folder)"
        )
    with console.choose(json=arguments.json, out=sys.stdout) as view:
        try:
            return uvloop.run(run_until_signal(probe(config, view, groups=groups)))
        except asyncio.CancelledError:
            raise KeyboardInterrupt from None


def describe_probe(found: PreflightResult) -> list[str]:
    """As sentences."""
    failed = ", ".join(f"{cause} {count}" for cause, count in found.failed.items())
    return [
        f"probe: {found.groups} groups of {found.members}, rewards {found.lowest:g} to {found.highest:g}, "
        f"{found.mean:.3g} in the mean; a rollout took {found.seconds:.2g} s",
        *(f"probe of {name}: {one.verdict}" for name, one in found.policies.items()),
        *([] if found.policies else [f"probe: {found.verdict}"]),
        *([f"probe: rollouts failed ({failed})"] if failed else []),
    ]


def describe_memory(config: Config, folder: Path) -> str:
    """What an update takes of what is free here; empty where the model cannot be trained by this machine's packages."""
    try:
        import torch
        from transformers import AutoConfig

        from strop.learner.memory import available_memory, plan
        from strop.learner.model import place
    except ImportError:
        return ""
    if find(config.algorithm.name).improves == "prompts":
        return ""
    needs = make(config.algorithm, config.learner, config.policy).needs
    device = place(config.learner)[0]
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else available_memory()
    model = cast("Any", AutoConfig).from_pretrained(folder)
    found = plan(model, config.learner, free, reference="ref" in needs, critic="value" in needs)
    gpu = device.type == "cuda"
    left = available_memory() if gpu else free - found.peak
    copied = f"a copy of what a checkpoint holds takes {found.snapshot / 2**30:.2g} GiB of the CPU's memory"
    if found.snapshot > left:
        copied += f" and {max(left, 0) / 2**30:.2g} are left: training waits until checkpoints are written"
    return found.advice or (
        f"an update of {config.learner.token_budget} tokens takes about {found.peak / 2**30:.2g} of the "
        f"{free / 2**30:.3g} GiB that {'the GPU' if gpu else 'the CPU'} has free; {copied}"
    )
