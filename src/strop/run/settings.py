"""What a run's settings mean on this machine: whole paths, defaults that depend on others, its tasks."""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import Any, cast

import msgspec

from strop import algorithms
from strop.config import Config, PromptConfig
from strop.config.prompts import refuse_prompts
from strop.errors import ConfigError, TaskError
from strop.run.data.prepare import find_offline, needs_agents
from strop.run.teacher import add_teacher_policies
from strop.runners import agents
from strop.runners.agents import explain_near_miss, is_python
from strop.tasks.load import load
from strop.tasks.sampling import hold_out
from strop.types import Task


def settle(config: Config) -> Config:
    """The configuration with what depends on this machine and folder written out, so that a resumed run does the same
    from anywhere. Left as they are: the words of a command, and package.module:function."""
    engine = msgspec.structs.replace(config.engine, threads=config.engine.threads or os.cpu_count() or 1)
    algorithm = msgspec.structs.replace(config.algorithm, name=make_function_absolute(config.algorithm.name))
    algorithm = msgspec.structs.replace(
        algorithm,
        settings=_fill_algorithm(config, algorithm.name, algorithm.settings),
        improves=algorithms.find(algorithm.name).improves,
    )
    policy = msgspec.structs.replace(
        config.policy, model=make_absolute(config.policy.model), template=make_absolute(config.policy.template)
    )
    runner = msgspec.structs.replace(config.runner, python=make_absolute(config.runner.python))
    tasks = config.tasks
    settled = msgspec.structs.replace(
        config,
        engine=engine,
        algorithm=algorithm,
        policy=policy,
        policies={name: _settle_policy(config, table) for name, table in config.policies.items()},
        runner=runner,
        agent=make_agent_absolute(config.agent),
        agents={name: make_agent_absolute(spec) for name, spec in config.agents.items()},
        reward=make_absolute(config.reward),
        group_reward=make_absolute(config.group_reward),
        prompts={name: read_prompt(name, prompt) for name, prompt in config.prompts.items()},
        tasks=make_absolute(tasks)
        if isinstance(tasks, str)
        else {split: make_absolute(spec) for split, spec in tasks.items()},
    )
    return add_teacher_policies(settled)


def _fill_algorithm(config: Config, name: str, settings: dict[str, Any]) -> dict[str, Any]:
    """An algorithm's settings, with those that follow from the loop's where it has them."""
    unset, found = set(algorithms.setting_names(name)) - settings.keys(), dict[str, Any]()
    if config.loop.staleness and "correction" in unset:
        found["correction"] = "token"
    if config.loop.max_groups and "filter_groups" in unset:  # what is replaced is not counted either
        found["filter_groups"] = ["zero_variance", "group_of_one"]
    for sources in ("runs", "transcripts", "mix"):
        if sources in settings and sources not in unset:
            found[sources] = _make_sources_absolute(settings[sources])
    return settings | found


def _make_sources_absolute(named: Any) -> Any:
    """Where stored data comes from: a name, a list of names, or a table by name."""
    if isinstance(named, str):  # under one name, however it is written: what is named twice is refused
        place = Path(named).expanduser()
        return str(place.resolve()) if place.exists() else named
    if isinstance(named, dict):
        return {_make_sources_absolute(name): value for name, value in cast("dict[str, Any]", named).items()}
    several = isinstance(named, list | tuple)
    return [_make_sources_absolute(name) for name in cast("list[Any]", named)] if several else named


def _settle_policy(config: Config, table: dict[str, Any]) -> dict[str, Any]:
    """The table of one of several policies, the same way."""
    found = table | {name: make_absolute(table[name]) for name in ("model", "template") if name in table}
    if "of" in (past := table.get("past", {})):  # a run's folder, or a policy's name
        found["past"] = past | {"of": past["of"] if past["of"] in config.policies else make_absolute(past["of"])}
    if "name" in (own := table.get("algorithm", {})):  # it has none of the settings of the algorithm at the top
        name = make_function_absolute(own["name"])
        found["algorithm"] = own | {"name": name, "settings": _fill_algorithm(config, name, own.get("settings", {}))}
    return found


def read_prompt(name: str, prompt: PromptConfig) -> PromptConfig:
    """A prompt with the text of its file, so that a run keeps what it began with."""
    if not prompt.file:
        return prompt
    try:
        text = Path(prompt.file).expanduser().read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"prompts.{name}.file: cannot read {prompt.file} ({error}). Fix: check the path") from None
    if not text.strip():
        raise ConfigError(f"prompts.{name}.file: {prompt.file} is empty. Fix: write the first version into it")
    found = msgspec.structs.replace(prompt, text=text.strip("\n"), file="")
    refuse_prompts({name: found})
    return found


def make_absolute(spec: str) -> str:
    """FILE.py:name, a file or a folder by its whole path; anything else as it is."""
    place, colon, name = spec.rpartition(":") if ".py:" in spec else (spec, "", "")
    if not place:
        return spec
    return f"{Path(place).expanduser().absolute()}{colon}{name}" if Path(place).expanduser().exists() else spec


def make_function_absolute(spec: str) -> str:
    """The same of FILE.py:name only: what has no colon is a name, whatever folder is called so."""
    return make_absolute(spec) if ":" in spec else spec


def make_agent_absolute(spec: str) -> str:
    """The same of an agent. A command is split into words once more, so its path is quoted if it has to be; what is no
    agent at all is refused later, as it was written."""
    whole = make_absolute(spec)
    if is_python(whole):
        return whole
    return spec if explain_near_miss(spec) or not Path(whole).exists() else shlex.quote(whole)


def check_agents(config: Config) -> None:
    """Raises `AgentError` for an agent that cannot be one, before anything is loaded or made."""
    if not needs_agents(config):
        return
    if not config.runner.workers and not config.runner.remote:
        raise ConfigError(
            "runner.workers is 0, so nobody runs agents. Fix: raise it, or let runners join with runner.remote=true"
        )
    if config.runner.workers:
        for spec in (config.agent, *config.agents.values()):
            agents.check(spec)
            agents.check_container(spec, config.runner.container)


def load_tasks(config: Config) -> list[Task]:
    """The run's tasks, with everything that would fail later refused now."""
    if not needs_agents(config):
        return []
    tasks = hold_out(load(config.tasks, **config.tasks_args), config.hold_out, seed=config.seed)
    there = sorted({task.split for task in tasks})
    if config.loop.steps and "train" not in there and find_offline(config) is None:
        raise TaskError(
            f"{config.tasks} has no task of split 'train', only {', '.join(there)}, so there is nothing to train on. "
            "Fix: add tasks of that split"
        )
    for split in config.loop.eval_splits:
        if split not in there:
            raise TaskError(
                f"{config.tasks} has no task of split {split!r}, only {', '.join(there)}. Fix: set loop.eval_splits "
                "(or --split of `strop eval`) to splits it has, or keep tasks aside for test with `--set hold_out=0.3`"
            )
    if lost := next((task for task in tasks if task.agent is not None and task.agent not in config.agents), None):
        raise TaskError(f"task {lost.id!r} picks the agent {lost.agent!r}, which is not there. Fix: add it to `agents`")
    return tasks
