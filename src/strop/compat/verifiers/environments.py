"""Environments with `load_environment`: single and several turns, tools, tools with a state, groups of environments.

    run(environment, name, args, row, llm)    one rollout, its rewards
    read_rows(name, args, limit)              rows of its data sets, for training and for evaluation

A rollout that ends with an error of verifiers' own (the model could not answer, a tool of the environment broke)
has failed: the rubric's 0 for it is not a reward.
"""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Generator
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any, cast

import msgspec

from strop.agent.llm import LLM
from strop.compat.verifiers.gateway import NO_KEY, TRY, read_scores, write_url
from strop.errors import AgentError
from strop.imports import one_line
from strop.types import Reward

Json = dict[str, Any]
LOADER = "load_environment"


def is_one(name: str) -> bool:
    """Whether verifiers loads it so: it has a loader, and the environment's module too."""
    if not hasattr(import_module("verifiers"), LOADER):
        return False
    module = _module_of(name)
    if find_spec(module) is None:
        raise AgentError(f"there is no environment {name!r} (module {module}). Fix: install its package")
    return hasattr(import_module(module), LOADER)


async def run(environment: Any, name: str, args: Json, row: Json, llm: LLM) -> list[Reward]:
    types = import_module("verifiers.types")
    client = types.ClientConfig(
        api_key_var=NO_KEY, api_base_url=write_url(llm), extra_headers={"x-strop-agent": "main"}
    )
    said = await environment.run_rollout(dict(row), client, llm.model, dict(environment.sampling_args or {}))
    if said.get("error"):
        raise AgentError(f"verifiers' environment {name}: {_describe(said['error'])}. {TRY}")
    return read_scores(said["reward"], said.get("metrics") or {})


def read_rows(name: str, args: Json, limit: int | None) -> tuple[list[Json], list[Json]]:
    environment = load(name, args)
    most = -1 if limit is None else limit
    train: list[Json] = environment.get_dataset(most).to_list() if _has(environment, "dataset") else []
    test: list[Json] = environment.get_eval_dataset(most).to_list() if _has(environment, "eval_dataset") else []
    return train, test


def _has(environment: Any, kind: str) -> bool:
    return any(getattr(environment, place, None) is not None for place in (kind, f"{kind}_source"))


def load_once(name: str, args: Json) -> Any:
    """The environment, made when this process needs it first."""
    return _load_once(name, msgspec.json.encode(args, order="sorted").decode())


@cache
def _load_once(name: str, args: str) -> Any:
    return load(name, json.loads(args))


def load(name: str, args: Json) -> Any:
    """Raises `AgentError` for one that cannot be loaded, or whose rubric looks at several rollouts at once."""
    verifiers = import_module("verifiers")
    with _keep_signals():
        try:
            environment = verifiers.load_environment(name, **args)
        except Exception as error:  # whatever its author's code raises
            raise AgentError(
                f"verifiers' environment {name} was not loaded: {one_line(error)}. Fix: see what it takes in args"
            ) from None
    if not hasattr(environment, "run_rollout"):
        raise AgentError(f"{name} is not an environment of verifiers 0.1.10 or newer. Fix: pip install -U verifiers")
    if functions := _find_comparing(environment.rubric):
        named = ", ".join(getattr(function, "__name__", "?") for function in functions)
        raise AgentError(
            f"the rubric of {name} compares rollouts with each other ({named}), which run apart here. Fix: leave these "
            "out of the rubric, and write what they do as a group_reward"
        )
    return environment


def _find_comparing(rubric: Any) -> list[Any]:
    """Its functions that look at several rollouts. A group of environments or of rubrics has them in its parts."""
    inner: list[Any] = list(getattr(rubric, "rubrics", ()))
    inner += [one.rubric for one in getattr(rubric, "env_map", {}).values()]
    find = getattr(rubric, "_get_group_reward_funcs", None)
    own: list[Any] = list(find()) if find is not None and not inner else []
    return own + [function for one in inner for function in _find_comparing(one)]


@contextmanager
def _keep_signals() -> Generator[None]:
    """An environment takes SIGINT and SIGTERM for itself when it is made; who runs it has plans of its own for them."""
    if threading.current_thread() is not threading.main_thread():
        raise AgentError("verifiers makes environments in a main thread only. Fix: set runner.agents_in to processes")
    kept = {kind: signal.getsignal(kind) for kind in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for kind, handler in kept.items():
            signal.signal(kind, handler)


def _module_of(name: str) -> str:
    return name.replace("-", "_").split("/")[-1]


def _describe(error: Any) -> str:
    if isinstance(error, dict):
        said = cast("Json", error)
        error = said.get("error_chain_str") or said.get("error_chain_repr") or said.get("error")
    return " ".join(str(error).split())[:500]
