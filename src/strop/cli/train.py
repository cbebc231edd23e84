"""`strop train`: train the model behind an agent, or resume a run."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from strop import config as configs
from strop.cli.commands import Commands
from strop.cli.output import MODELS, print_json
from strop.cli.training_run import add_options, choose_folder, print_summary, run_training
from strop.errors import ConfigError
from strop.learner.spawn import start_ahead
from strop.run.folder import RunFolder


def add(commands: Commands) -> None:
    train = commands.add_parser("train", help="train the model behind an agent, or resume a run")
    train.add_argument("agent", nargs="?", metavar="AGENT", help="FILE.py:function, a command, or a service's URL")
    train.add_argument("--tasks", help="a .jsonl, .csv or .parquet file, a folder, a data set, or FILE.py:function")
    train.add_argument("--data", metavar="PATH", help="where the data is, for a tasks function that takes `data`")
    train.add_argument("--reward", metavar="FILE.py:function", help="turns (task, answer) into rewards")
    train.add_argument("--model", help=MODELS)
    train.add_argument("--config", metavar="TOML", help="settings from a file")
    train.add_argument("--seed", type=int, help="fixes the order of tasks (default: 0)")
    train.add_argument(
        "--from", dest="source", metavar="RUN[:STEP]", help="a new run from the weights of this one, with its settings"
    )
    train.add_argument(
        "--resume", metavar="RUN", help="go on with the run in this folder; --set changes its steps, rate, evaluation"
    )
    train.add_argument(
        "--cluster", metavar="ADDRESS", help="on a Ray cluster: HOST:PORT of its head, or auto (cluster.address)"
    )
    add_options(train, folder=None)
    train.set_defaults(command=_train)


def _train(arguments: argparse.Namespace) -> int:
    if arguments.resume:
        return _resume(arguments)
    before, checkpoint = _find_source(arguments.source)
    config = configs.load(
        base=RunFolder.config(before) if before else None,
        toml=arguments.config,
        sets=arguments.set,
        agent=arguments.agent,
        tasks=arguments.tasks,
        data=arguments.data,
        reward=arguments.reward,
        folder=arguments.folder,
        seed=arguments.seed,
        policy={"model": arguments.model} if arguments.model else None,
        cluster=None if arguments.cluster is None else {"address": arguments.cluster},
    )
    start_ahead(config, train=True)
    from strop.run import start_from
    from strop.run.data.prepare import needs_agents
    from strop.run.settings import settle

    if before:
        config = start_from.drop_other_settings(config, RunFolder.config(before))
    if before and arguments.model:
        raise ConfigError(f"--from {arguments.source} brings its model. Fix: leave out --model")
    alone = not needs_agents(config)
    if not config.agent and not alone and config.runner.workers:
        raise ConfigError("which agent? strop train FILE.py:function --tasks tasks.jsonl (or --resume RUN)")
    if not config.tasks and not alone:
        raise ConfigError("which tasks? --tasks tasks.jsonl, or --tasks FILE.py:function")
    with choose_folder(config, arguments, before) as config:
        config = settle(config)
        if checkpoint is not None:
            config = start_from.begin_from(checkpoint, config)
        summary = run_training(config, arguments)
    return print_summary(summary, Path(config.folder), arguments)


def _find_source(source: str | None) -> tuple[Path | None, Path | None]:
    """The run and the checkpoint that a new run begins from, if it does."""
    if not source:
        return None, None
    from strop.run import start_from

    return start_from.find_source(source)


def _resume(arguments: argparse.Namespace) -> int:
    from strop.run import start_from

    names = ("agent", "tasks", "data", "reward", "model", "config", "folder", "seed", "source", "overwrite")
    if given := [name for name in names if getattr(arguments, name) not in (None, False)]:
        given = [{"agent": "AGENT", "source": "--from"}.get(name, f"--{name}") for name in given]
        raise ConfigError(
            f"a resumed run keeps what it began with. Fix: leave out {', '.join(given)}; --set changes what may "
            f"change, and `strop train --from {arguments.resume}` begins a new run from its weights"
        )
    folder = Path(arguments.resume)
    cluster = {} if arguments.cluster is None else {"cluster": {"address": arguments.cluster}}
    config, changes = start_from.change_settings(folder, sets=arguments.set, **cluster)
    if done := start_from.find_summary(folder, changes):
        said = f"all {done.steps} steps of {folder} are done. Fix: --steps {done.steps + 10} for more"
        if config.algorithm.improves == "prompts" and done.steps < config.loop.steps:
            raised = "--set algorithm.settings.max_calls=N or another budget"
            said = f"{folder} was done after {done.steps} steps, see {folder}/prompts.json. Fix: for more, {raised}"
        print_json(done) if arguments.json else print(said)
        return 0
    start_ahead(config, train=True)
    if changes and (warning := start_from.warn_of_rate(config)):
        print(f"strop: {warning}", file=sys.stderr)
    return print_summary(run_training(config, arguments, resume=True, changes=changes), folder, arguments)
