"""Environments written for `verifiers` (PyPI), as agents: what they ask goes through the gateway, and what their rubric
says is the reward.

    strop.compat.verifiers:agent     runs the environment that a task names
    strop.compat.verifiers:tasks     the rows of an environment's data set, each of which names it

    agent = "strop.compat.verifiers:agent"
    tasks = "strop.compat.verifiers:tasks"
    tasks_args = { environment = "wordle", args = { num_train_examples = 100 } }

`environments` runs those with `load_environment` (verifiers 0.1.10 to 0.3), `tasksets` those of `verifiers.v1` (0.4).
Where verifiers has a Python of its own (`runner.python`), `tasks` is given it as `python`, or `python -m
strop.compat.verifiers` writes a file of tasks there.

Left out: rewards over a group (the loop compares rollouts itself, `group_reward`), saving and publishing of results,
environment servers.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import tempfile
import threading
from collections.abc import Mapping
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from typing import Any, cast

import msgspec

import strop
from strop.agent.llm import LLM
from strop.compat.tasks import split_rows
from strop.compat.verifiers import environments, tasksets
from strop.errors import AgentError, TaskError
from strop.imports import one_line
from strop.types import Reward, Task

Json = dict[str, Any]


async def agent(task: Task, llm: LLM) -> list[Reward]:
    """Run the environment that `task` names on its row. The rewards are the total, as `reward`, and what each function
    of the rubric gave, by its name."""
    name, args, row = _read_task(task)
    run = tasksets.run if _is_taskset(name) else partial(environments.run, environments.load_once(name, args))
    running = asyncio.run_coroutine_threadsafe(run(name, args, row, llm), _loop())
    return await asyncio.wrap_future(running)


def tasks(
    environment: str, args: Mapping[str, Any] | None = None, held: int = 0, limit: int | None = None, python: str = ""
) -> list[Task]:
    """
    environment    the name of an installed environment or taskset: a package or a module
    args           what it is loaded with: arguments of `load_environment`, or the fields of a taskset's env config
    held           rows kept aside in the split `test`, where the environment has no data set for evaluation
    limit          how many rows at most; a taskset without an end needs it
    python         the Python that has verifiers, where this one has not
    """
    if python:
        return _ask(python, environment, args or {}, held, limit)
    module = tasksets if _is_taskset(environment) else environments
    train, test = module.read_rows(environment, dict(args or {}), limit)
    if not test:
        train, test = split_rows(train, held, "rows")
    if not train and not test:
        raise TaskError(f"verifiers' environment {environment} has no rows. Fix: see what it takes in args")
    plain: Json = {"environment": environment, "args": dict(args or {})}
    return [
        Task(id=f"{split}-{place}", split=split, data={**plain, "row": msgspec.to_builtins(row, enc_hook=str)})
        for split, rows in (("train", train), ("test", test))
        for place, row in enumerate(rows)
    ]


def _read_task(task: Task) -> tuple[str, Json, Json]:
    data: Any = task.data
    if not isinstance(data, dict) or not {"environment", "row"} <= data.keys():
        raise AgentError(
            f"task {task.id} names no environment of verifiers. Fix: take tasks from strop.compat.verifiers:tasks"
        )
    named = cast("Json", data)
    return named["environment"], named.get("args") or {}, named["row"]


@cache
def _is_taskset(name: str) -> bool:
    """Whether it is one for `verifiers.v1`: it has no `load_environment`, or verifiers has none."""
    try:
        import_module("verifiers")
    except ImportError as error:
        raise AgentError(
            f"verifiers cannot be imported here ({one_line(error)}). Fix: pip install verifiers, or set runner.python, "
            "and tasks_args.python, to an environment that has it"
        ) from None
    return not environments.is_one(name)


@cache
def _loop() -> asyncio.AbstractEventLoop:
    """One event loop for all rollouts of this process: what an environment holds (clients, locks) belongs to it."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="verifiers", daemon=True).start()
    return loop


def _ask(python: str, environment: str, args: Mapping[str, Any], held: int, limit: int | None) -> list[Task]:
    """The tasks, as another Python reads them."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "tasks.jsonl"
        command = [python, "-m", __name__, environment, str(out), "--args", msgspec.json.encode(args).decode()]
        command += ["--held", str(held), *(["--limit", str(limit)] if limit is not None else [])]
        paths = [str(Path(strop.__file__).parents[1]), os.getcwd(), os.environ.get("PYTHONPATH", "")]
        here = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in paths if path)}
        try:
            done = subprocess.run(command, env=here, capture_output=True, text=True, check=False)
        except OSError as error:
            raise TaskError(f"tasks_args.python: {python} cannot be run ({error}). Fix: name a python") from None
        if done.returncode:
            said = (done.stderr.strip().splitlines() or [f"it ended with {done.returncode}"])[-1]
            fix = "" if "Fix: " in said else f". Fix: see whether {python} loads it"
            raise TaskError(f"verifiers' environment {environment} was not read by {python}: {said}{fix}")
        return [msgspec.json.decode(line, type=Task) for line in out.read_bytes().splitlines()]
