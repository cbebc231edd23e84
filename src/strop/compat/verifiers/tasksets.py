"""Tasksets of `verifiers.v1`: a harness plays a task, its model calls go through verifiers' own interception to the
gateway, the task's @reward and @metric functions say what it is worth.

    run(name, args, row, llm)       one episode, its rewards
    read_rows(name, args, limit)    the tasks' data

`args` are the fields of the env's config, as `vf-eval` takes them under --env: {"taskset": {...}, "agent": {...}}. A
seat that is not told otherwise plays with the harness `null`, a plain chat with the task's tools, or the taskset's own,
and in the runtime `subprocess`: on this machine. A harness that runs what the model writes has to be told where.

A seat is an agent by its name, `agent` is `main`. An episode of one trace rewards the rollout; one of several rewards
each agent that verifiers would train with the mean of its traces.
"""

from __future__ import annotations

import itertools
from importlib import import_module
from statistics import fmean
from typing import Any, cast

from strop.agent.llm import LLM
from strop.compat.verifiers.gateway import NO_KEY, TRY, read_scores, write_url
from strop.errors import AgentError, TaskError
from strop.imports import one_line
from strop.types import Reward

Json = dict[str, Any]
SEAT, MAIN = "agent", "main"


async def run(name: str, args: Json, row: Json, llm: LLM) -> list[Reward]:
    v1 = import_module("verifiers.v1")
    environment = _load(name, args, llm)
    kind: Any = cast("Any", type(environment.taskset)).task_type()
    task = kind(kind.data_type().model_validate(row), environment.config.taskset.task)
    asked = v1.ModelContext(model=llm.model, client=_client(llm, MAIN))
    async with environment.serving():
        episode = await environment.run_episode(task, asked)
    if not episode.ok:
        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        said = f"{errors[-1].type}: {errors[-1].message}" if errors else "it did not end well, and does not say why"
        raise AgentError(f"verifiers' taskset {name}: {' '.join(said.split())[:500]}. {TRY}")
    return read_episode(episode)


def read_episode(episode: Any) -> list[Reward]:
    if len(episode.traces) == 1:
        return read_scores(episode.traces[0].reward, _scores(episode.traces[0]))
    rewards: list[Reward] = []
    trained = {seat: [trace for trace in traces if trace.agent.trainable] for seat, traces in episode.by_agent.items()}
    for seat, traces in trained.items():
        if not traces:
            continue
        scores = [_scores(trace) for trace in traces]
        names = {name: None for one in scores for name in one}
        means = {name: fmean(one[name] for one in scores if name in one) for name in names}
        rewards += read_scores(fmean(trace.reward for trace in traces), means, _agent_of(seat))
    return rewards


def _scores(trace: Any) -> dict[str, float]:
    given = {name: reward.score for name, reward in trace.rewards.items() if reward is not None}
    return {name: value for name, value in trace.metrics.items() if value is not None} | given


def read_rows(name: str, args: Json, limit: int | None) -> tuple[list[Json], list[Json]]:
    """A taskset has one data set."""
    taskset = _load(name, args, None).taskset
    if limit is None and not taskset.bounded:
        raise TaskError(f"verifiers' taskset {name} has no end. Fix: set tasks_args.limit")
    return [task.data.model_dump(mode="json") for task in itertools.islice(taskset, limit)], []


# -- the configuration -------------------------------------------------------------------------------------------------


def _load(name: str, args: Json, llm: LLM | None) -> Any:
    """The environment, whose seats ask as agents of `llm`."""
    loaders = import_module("verifiers.v1.utils.loaders")
    roles = import_module("verifiers.v1.configs.agent").agent_config_fields
    try:
        kind = loaders.env_config_type(name, args.get("id", ""))
        harness = name if loaders.default_harness_id(name) == name else "null"
        seats = {seat: _seat(seat, spec, args.get(seat) or {}, harness, llm) for seat, spec in roles(kind()).items()}
        config = loaders.resolve_env_config({**args, **seats, "taskset": {**(args.get("taskset") or {}), "id": name}})
        return loaders.load_environment(config)
    except AgentError:
        raise
    except Exception as error:  # of its author's code, of pydantic, of an import
        raise AgentError(
            f"verifiers' taskset {name} was not loaded: {one_line(error)}. Fix: see what it takes in args"
        ) from None


def _seat(seat: str, spec: Any, given: Json, usual: str, llm: LLM | None) -> Json:
    """What a seat is told beyond what its author and the user said."""
    told = dict(given)
    harness: Any = given.get("harness") or spec.harness
    if harness is None:
        told["harness"] = harness = {"id": usual}
    if "runtime" not in given and "runtime" not in spec.model_fields_set:
        _check_harness(_id_of(harness), seat)
        told["runtime"] = {"type": "subprocess"}
    if llm is not None and "client" not in given and spec.client is None:
        told["client"] = _client(llm, _agent_of(seat)).model_dump()
    return told


def _id_of(harness: Any) -> str:
    return cast("Json", harness)["id"] if isinstance(harness, dict) else harness.id


def _check_harness(name: str, seat: str) -> None:
    if import_module("verifiers.v1.utils.loaders").harness_class(name).EXECUTES_CODE:
        raise AgentError(
            f'the harness {name} runs what the model writes. Fix: say where, args.{seat}.runtime.type = "docker", or '
            '"subprocess" for this machine itself'
        )


def _client(llm: LLM, agent: str) -> Any:
    kind = import_module("verifiers.v1.configs.client").EvalClientConfig
    return kind(base_url=write_url(llm), api_key_var=NO_KEY, headers={"x-strop-agent": agent})


def _agent_of(seat: str) -> str:
    return MAIN if seat == SEAT else seat
