"""OpenEnv's environments, where they are served, as agents.

    strop.compat.openenv:agent     plays at the server that a task names, over a WebSocket of its own
    strop.compat.openenv:tasks     one task for each seed, or for each set of arguments of `reset`

    agent = "strop.compat.openenv:agent"
    tasks = "strop.compat.openenv:tasks"
    tasks_args = { url = "http://127.0.0.1:8000", count = 64, held = 16 }

What the server's schema says of an action decides how the model acts: where one text is all that it needs, what the
model says is that text; otherwise it says a JSON object. Or it calls a tool with these fields (`calls = true`). An
observation is shown by the one text in it, or as JSON. Each step's reward is its turn's own, `step`; their sum is the
`reward`. An action that the server refuses costs a turn, and the model is told why.

Left out: starting servers and containers, tasks that a server lists, MCP servers (`strop.agent.mcp` has those).
"""

from __future__ import annotations

import asyncio
import json
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import import_module
from typing import Any, cast

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from strop.agent.environment import Environment, EnvironmentAgent
from strop.agent.episode import Action, Transition
from strop.agent.llm import LLM
from strop.agent.tool import Tool
from strop.compat.acts import find_act, make_act
from strop.compat.tasks import read_task, split_rows
from strop.errors import AgentError
from strop.imports import one_line
from strop.types import Task

Json = dict[str, Any]
SECONDS = 30.0
"""Until a server has said what its actions are."""
INVALID = "VALIDATION_ERROR"
"""What is in the client's error where the action is at fault, and not the server."""
ABOUT = ("metadata", "done", "reward")
"""Fields that every action or observation has, and that say nothing to a model."""


class ServedEpisode(Struct, kw_only=True):
    """What a task says: where the environment is, and what its episode is reset with."""

    url: str
    reset: dict[str, Any] = {}
    max_turns: int = 16
    calls: bool = False
    system: str = ""


class ServedSchema(Struct):
    """What a server says of its actions."""

    action: dict[str, Any]


async def agent(task: Task, llm: LLM) -> Any:
    given = read_task(task, ServedEpisode, "OpenEnv", "strop.compat.openenv:tasks")
    schema = await asyncio.to_thread(read_schema, given.url)
    plays = EnvironmentAgent(
        lambda: ServedEnvironment(given, schema),
        system=given.system or describe_action(schema, given.calls),
        max_turns=given.max_turns,
    )
    return await plays(task, llm)


def tasks(
    url: str,
    count: int = 64,
    held: int = 16,
    seed: int = 0,
    resets: Sequence[Mapping[str, Any]] = (),
    max_turns: int = 16,
    calls: bool = False,
    system: str = "",
) -> list[Task]:
    """
    url            where the environment is served
    count, held    seeds to train on, and others to evaluate on
    resets         arguments of `reset` instead of seeds, one task each; the last `held` are the split `test`
    max_turns      turns of an episode at most
    calls          the model acts by calling a tool
    system         the system message; default: what an action is
    """
    given: Sequence[Mapping[str, Any]] = resets
    if given:
        first = len(split_rows(given, held, "resets")[0])
    else:
        given, first = [{"seed": at} for at in range(seed, seed + count + held)], count
    splits = ["train" if place < first else "test" for place in range(len(given))]
    said = ServedEpisode(url=url, max_turns=max_turns, calls=calls, system=system)
    return [
        Task(id=f"{split}-{place}", split=split, data=msgspec.to_builtins(replace(said, reset=dict(one))))
        for place, (split, one) in enumerate(zip(splits, given, strict=True))
    ]


class ServedEnvironment(Environment):
    """One episode in an environment that is served."""

    def __init__(self, given: ServedEpisode, schema: Json) -> None:
        self._given, self._schema = given, schema
        self._client: Any = None

    def list_tools(self) -> list[Tool]:
        return [make_act(self._schema)] if self._given.calls else []

    async def reset(self, task: Task) -> str:
        try:
            generic = import_module("openenv.core.generic_client")
        except ImportError as error:
            raise AgentError(
                f"openenv cannot be imported here ({one_line(error)}). Fix: pip install openenv, or set runner.python "
                "to an environment that has it"
            ) from None
        self._client = generic.GenericEnvClient(base_url=self._given.url)
        await self._client.connect()
        return show((await self._client.reset(**self._given.reset)).observation)

    async def step(self, action: Action) -> Transition:
        try:
            chosen = self._choose(action)
        except ValueError as error:
            return Transition(observation=f"error: {error}")
        try:
            after = await self._client.step(chosen)
        except RuntimeError as error:
            if INVALID not in str(error):
                raise
            return Transition(observation=f"error: {one_line(error)}")
        return Transition(observation=show(after.observation), reward=float(after.reward or 0.0), done=after.done)

    async def close(self) -> None:
        if self._client is not None:
            await self._client.close()

    def _choose(self, action: Action) -> Json:
        if not self._given.calls:
            return read_action(self._schema, action.text)
        return find_act(action)


# -- actions and observations as text ----------------------------------------------------------------------------------


@cache
def read_schema(url: str) -> Json:
    """Which actions there are."""
    try:
        with urllib.request.urlopen(f"{url.rstrip('/')}/schema", timeout=SECONDS) as answer:
            schema = msgspec.json.decode(answer.read(), type=ServedSchema).action
    except (OSError, ValueError, urllib.error.URLError, msgspec.MsgspecError) as error:
        raise AgentError(
            f"{url} does not say what its actions are ({one_line(error)}). Fix: see whether an environment of OpenEnv "
            "is served there"
        ) from None
    fields = {name: value for name, value in schema.get("properties", {}).items() if name not in ABOUT}
    return {**schema, "properties": fields}


def find_text(schema: Json) -> str | None:
    """The one field that an action needs, if that is a text.

    >>> find_text({"properties": {"message": {"type": "string"}, "n": {"type": "integer"}}, "required": ["message"]})
    'message'
    """
    needed = cast("list[str]", schema.get("required") or list(schema["properties"]))
    is_text = len(needed) == 1 and schema["properties"].get(needed[0], {}).get("type") == "string"
    return needed[0] if is_text else None


def describe_action(schema: Json, calls: bool) -> str:
    if calls:
        return "Call act in each turn."
    if (name := find_text(schema)) is not None:
        return f"What you say is your action's {name}."
    fields = {name: value.get("type", "any") for name, value in schema["properties"].items()}
    return f"Say your action as a JSON object with these fields: {json.dumps(fields)}"


def read_action(schema: Json, text: str) -> Json:
    """The action that a text says; of an object among other words, the object. Raises `ValueError`.

    >>> read_action({"properties": {"x": {"type": "integer"}}}, 'I take {"x": 1}.')
    {'x': 1}
    """
    if (name := find_text(schema)) is not None:
        return {name: text}
    begins = text.find("{")
    try:
        said = json.JSONDecoder().raw_decode(text[begins:])[0] if begins >= 0 else None
    except ValueError:
        said = None
    if not isinstance(said, dict):
        raise ValueError(f"there is no JSON object in it. {describe_action(schema, calls=False)}")
    return cast("Json", said)


def show(seen: Mapping[str, Any]) -> str:
    """An observation as text.

    >>> show({"text": "A door.", "reward": 0.0, "done": False}), show({"at": [0, 1], "metadata": {}})
    ('A door.', '{"at": [0, 1]}')
    """
    told = {name: value for name, value in seen.items() if name not in ABOUT}
    (only,) = told.values() if len(told) == 1 else (None,)
    return only if isinstance(only, str) else json.dumps(told, ensure_ascii=False)
