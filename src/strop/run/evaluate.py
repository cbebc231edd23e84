"""Evaluate a model behind an agent, without training; compare it with others on the very same tasks and seeds.

    models × ways ──▶ each a run of no steps, in a folder of its own ──▶ rewards per task ──▶ scores, differences

    runs/eval/
      evaluation.json   the `EvaluationReport` (monitor/evaluations.py)
      1-trained/        the first model, with every rollout: strop rollouts runs/eval/1-trained
      1-deployed/       the same one, shown its history as an ordinary server would show it
      2-trained/        the model it is compared with

Left out: going on with an evaluation that was interrupted; servers that somebody else started, which keep the weights
they have; as deployed, servers that make other tokens of the very same text.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
from msgspec.structs import replace

from strop.config import (
    AlgorithmConfig,
    Config,
    LoraConfig,
    MonitorConfig,
    RunnerConfig,
    answers_outside,
    describe_models,
    replace_models,
    resolve_policies,
    trained_policies,
    weigh_rewards,
)
from strop.engines.registry import engine_name
from strop.errors import ConfigError, PlaceError, TaskError
from strop.files import private_folder, write_whole
from strop.models.names import resolve
from strop.monitor.console import Silent, View
from strop.monitor.evaluations import Evaluation, EvaluationReport, Way, report
from strop.run.collect import stop_if_all_failed, wait_until_ended
from strop.run.folder import BEST, RunFolder, find_parts, list_parts
from strop.run.prompts.pool import read_prompts, replace_prompts
from strop.run.runtime import open_run
from strop.run.scoring import collect_rewards
from strop.run.settings import check_agents, load_tasks, settle
from strop.run.start_from import find_checkpoint, refuse_missing_parts
from strop.run.state import Run
from strop.run.supervise import run_with_agents
from strop.tasks.sampling import evaluation
from strop.types import Rollout, version

FOREVER = 1e9
"""Seconds. Each rollout has its runner.timeout; all of them together may take as long as they take."""


async def evaluate(
    config: Config,
    models: Sequence[str] = (),
    *,
    folder: str | Path = "runs/eval",
    view: View | None = None,
    splits: Sequence[str] = (),
    samples: int = 1,
    greedy: bool = False,
    ways: Sequence[Way] = ("trained",),
    threshold: float = 1.0,
    best: bool = False,
) -> EvaluationReport:
    """Evaluate the first of `models`, and compare it with each of the others.

    A model is what `policy.model` may be, a run's folder (for its newest checkpoint, or its `best`) or a checkpoint's.
    Agent, tasks, rewards, seed and sampling (`policy.eval`) are the configuration's, and so are model and splits
    (`loop.eval_splits`) where none are given. A reward of `threshold` or more is a success.
    """
    folder, view, began = Path(folder), view or Silent(), time.monotonic()
    config = configure_evaluation(settle(config), tuple(dict.fromkeys(splits or config.loop.eval_splits)))
    models = models or [describe_models(config)]
    _refuse(config, samples, folder)
    histories = {own.policy.history for own in resolve_policies(config).values()}
    found = [find_model(config, model, best=best) for model in models]
    done = [
        Evaluation(
            number=number,
            model=model,
            weights=found[number - 1],
            way=way,
            history="sampled" if way == "trained" and "sampled" in histories else "template",
            folder=str(folder / f"{number}-{way}"),
        )
        for number, model in enumerate(models, 1)
        for way in (ways if "sampled" in histories else ways[:1])
    ]
    tasks = load_tasks(config)
    with TemporaryDirectory(prefix="strop-eval-") as spare:
        given = [
            await asyncio.to_thread(give_models, config, name, Path(spare) / str(n)) for n, name in enumerate(found)
        ]
        private_folder(folder)  # only now: a model that is not there leaves nothing behind
        for one in done:
            view.title(one.name, 0)
            shown = given[one.number - 1]
            shown = shown if one.way == "trained" else show_as_deployed(shown)
            wanted = replace(shown, folder=one.folder)
            async with open_run(wanted, view, resume=False) as run:
                if run.tasks != tasks:
                    raise TaskError(f"{config.tasks} gave other tasks the second time. Fix: have it give the same ones")
                await run_with_agents(run, _collect(run, one, samples=samples, greedy=greedy, first=one is done[0]))
    told = report(config, done, samples=samples, threshold=threshold)
    if len(ways) > 1 and histories == {"template"}:
        told.warnings.append("as trained and as deployed are the same here, since policy.history is template")
    if greedy and samples > 1:
        told.warnings.append("drawn greedily, the samples of a task differ only by what the agent and its tools do")
    told.folder, told.seconds = str(folder), round(time.monotonic() - began, 2)
    write_whole(folder / "evaluation.json", msgspec.json.format(msgspec.json.encode(told), indent=2) + b"\n")
    return told


async def _collect(run: Run, one: Evaluation, *, samples: int, greedy: bool, first: bool) -> None:
    """Waits for every rollout of every split, and fills in what came of them. Where all fail the agent is at fault,
    unless it has worked with the `first` model: then it is the other one's result."""
    began = time.monotonic()
    for split in run.config.loop.eval_splits:
        wanted = evaluation(
            run.tasks,
            seed=run.config.seed,
            version=version(1, 0),
            step=0,
            split=split,
            greedy=greedy,
            samples=samples,
            retries=run.config.runner.retries.by_cause(),
        )
        wanted = [run.give_prompts(rollout) for rollout in wanted]
        ended = await wait_until_ended(run, wanted, f"evaluating {split}")
        if first:
            await stop_if_all_failed(run, ended, f"evaluating {split}")
        one.rewards[f"{split}-greedy" if greedy else split] = _rewards(run.config, ended)
        one.failed = dict(Counter(one.failed) + Counter(rollout.cause for rollout in ended if rollout.cause))
        for rollout in ended:
            turns = await run.store.turns(rollout.id)
            one.turns += len(turns)
            one.branches = dict(Counter(one.branches) + Counter(turn.branch for turn in turns if turn.branch))
    one.seconds = round(time.monotonic() - began, 2)


def _rewards(config: Config, ended: Sequence[Rollout]) -> dict[str, dict[str, list[float]]]:
    """Reward -> task -> one value per sample, of the rewards that are a whole rollout's, a trained agent's or a turn's;
    where none was given, 0."""
    found: dict[str, dict[str, list[float]]] = {}
    for name, values in collect_rewards(config, ended).items():
        by_task = found.setdefault(name, {})
        for rollout, value in zip(ended, values, strict=True):
            by_task.setdefault(rollout.task.id, []).append(value)
    return found


def configure_evaluation(config: Config, splits: tuple[str, ...]) -> Config:
    """A configuration without what only training needs: no steps, no adapter, no critic, no reference, nobody who is
    told of metrics, and a store of its own."""
    return replace(
        config,
        algorithm=AlgorithmConfig(rewards=weigh_rewards(config)),
        learner=replace(config.learner, lora=LoraConfig()),
        policies={name: _leave_out_training(table) for name, table in config.policies.items()},
        loop=replace(config.loop, steps=0, eval_splits=splits, group_deadline=FOREVER),
        store=replace(config.store, url=""),
        runner=run_here(config.runner),
        monitor=MonitorConfig(),
    )


def run_here(runner: RunnerConfig) -> RunnerConfig:
    """The same without runners on other machines."""
    return replace(runner, remote=False, workers=runner.workers or RunnerConfig().workers)


def _leave_out_training(table: dict[str, Any]) -> dict[str, Any]:
    """The same of one of several policies."""
    learner = {name: value for name, value in table.get("learner", {}).items() if name != "lora"}
    return {name: value for name, value in table.items() if name != "algorithm"} | {"learner": learner}


def _refuse(config: Config, samples: int, folder: Path) -> None:
    if samples < 1:
        raise ConfigError(f"{samples} samples per task make no score. Fix: give at least 1")
    if not config.loop.eval_splits:
        raise ConfigError(
            "there is nothing to evaluate. Fix: name a split of the tasks with --split, or set loop.eval_splits"
        )
    refuse_taken(folder)
    check_agents(config)
    for policy, own in resolve_policies(config).items():
        if getattr(getattr(own.engine, name := engine_name(own.engine), None), "url", ""):
            setting = f"policies.{policy}.engine.{name}.url" if config.policies else f"engine.{name}.url"
            raise ConfigError(f"{setting} is a server with weights of its own. Fix: leave it out, to have one started")


def refuse_taken(folder: Path) -> None:
    if folder.exists():
        raise PlaceError(f"{folder} is there already. Fix: choose another --folder")


def find_model(config: Config, name: str, *, best: bool) -> str:
    """What `name` stands for: of a run a checkpoint. Where the configuration has several policies that is a checkpoint
    with a part for each of them, or what it has itself."""
    if len(config.policies) > 1 and name in (describe_models(config), config.policy.model):
        return ""
    if len(trained_policies(config)) == 1:
        return str(find_checkpoint(name, best=best) or name)
    if (found := RunFolder.parse_name(name)) is not None:
        return str(refuse_missing_parts(RunFolder.chosen_checkpoint(found[0], BEST if best else found[1]), config))
    if list_parts(place := Path(name).expanduser()):
        return str(refuse_missing_parts(place, config))
    raise ConfigError(
        f"{name} is one model, and the configuration has several policies ({', '.join(config.policies)}). Fix: name a "
        "run that trained them, or each one's model in policies.NAME.model"
    )


def give_models(config: Config, name: str, spare: Path) -> Config:
    """The configuration with the weights that `find_model` found, or with the prompts."""
    if not name:
        return config
    if (prompts := read_prompts(Path(name))) is not None:
        return replace_prompts(config, prompts)
    if answers_outside(config):
        return config
    parts = find_parts(Path(name), trained_policies(config))
    return replace_models(config, {one: str(find_weights(str(part), spare / one)) for one, part in parts.items()})


def show_as_deployed(config: Config) -> Config:
    """The configuration with every policy shown its history as an ordinary server would show it."""
    tables = {name: {k: v for k, v in table.items() if k != "history"} for name, table in config.policies.items()}
    return replace(config, policy=replace(config.policy, history="template"), policies=tables)


def find_weights(name: str, spare: Path) -> Path:
    """The folder with the weights. An adapter is merged into its model first, in the new folder `spare`."""
    if not (Path(name).expanduser() / "adapter_model.safetensors").is_file():
        return resolve(name)
    from strop.learner.export import export

    export(Path(name).expanduser(), spare)
    return spare
