"""Agent classes of Agent Lightning 1.0, which read what they need from variables: as a command, or from Python.

    strop train "python -m strop.compat.agentlightning.launch gsm8k_agent.ChatAgent QUESTION=question ANSWER=answer"
    strop.train(agl.launch("gsm8k_agent.ChatAgent", QUESTION="question", ANSWER="answer"), tasks)

Each variable has a place in the task's data, as in its `env_map`: `question`, or `input.question` as it is written
there; `input` is all of it. What begins with `=` is the value itself (`TOPK==3`).
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from strop.agent.llm import LLM
from strop.errors import AgentError
from strop.types import Task


class AgentLauncher:
    """Runs a class in the process at hand, which must be its rollout's own: it reads variables."""

    def __init__(self, agent: str, variables: Mapping[str, str]) -> None:
        self._agent, self._variables = agent, dict(variables)

    async def __call__(self, task: Task, llm: LLM) -> None:
        os.environ.update(read_variables(self._variables, task.data))
        await _run(self._agent)


def launch(agent: str, **variables: str) -> AgentLauncher:
    """An agent for `strop.train`: `agent` is package.module.Class."""
    return AgentLauncher(agent, variables)


def read_variables(places: Mapping[str, str], data: Any) -> dict[str, str]:
    """
    >>> read_variables({"QUESTION": "input.question", "N": "of.1", "K": "=3"}, {"question": "?", "of": [4, 5]})
    {'QUESTION': '?', 'N': '5', 'K': '3'}
    """
    found = {name: place[1:] if place.startswith("=") else _find(name, place, data) for name, place in places.items()}
    return {
        name: value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        for name, value in found.items()
    }


def _find(name: str, place: str, data: Any) -> Any:
    parts = place.split(".")
    for part in parts[1:] if parts[0] == "input" else parts:
        if isinstance(data, dict) and part in data:
            data = cast("dict[str, Any]", data)[part]
        elif isinstance(data, list) and part.isdigit() and int(part) < len(cast("list[Any]", data)):
            data = cast("list[Any]", data)[int(part)]
        else:
            raise AgentError(f"agent: the task's data has no {place!r} for {name}. Fix: name a field that is there")
    return data


async def _run(agent: str) -> None:
    module, _, name = agent.replace(":", ".").rpartition(".")
    if not module:
        raise AgentError(f"agent: {agent!r} names no class. Fix: write package.module.Class")
    sys.path.insert(0, os.getcwd())
    found: Any = getattr(importlib.import_module(module), name, None)
    if not isinstance(found, type) or not hasattr(found, "run"):
        raise AgentError(f"agent: {module} has no class {name} with a method run. Fix: check its name")
    said: Any = cast("Any", found)().run()
    if inspect.isawaitable(said):
        await said


def main(arguments: list[str]) -> None:
    agent, *pairs = arguments or [""]
    task = json.loads(Path(os.environ["STROP_TASK"]).read_text())
    variables = dict(cast("tuple[str, str]", tuple(pair.split("=", 1))) for pair in pairs)
    os.environ.update(read_variables(variables, task["data"]))
    asyncio.run(_run(agent))


if __name__ == "__main__":
    main(sys.argv[1:])
