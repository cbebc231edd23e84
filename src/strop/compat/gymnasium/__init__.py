"""Gymnasium's environments by their ids, as agents: what is seen as text, and what the model says as an action.

    strop.compat.gymnasium:agent     plays the environment that a task names
    strop.compat.gymnasium:tasks     one task for each seed

    agent = "strop.compat.gymnasium:agent"
    tasks = "strop.compat.gymnasium:tasks"
    tasks_args = { environment = "FrozenLake-v1", args = { is_slippery = false }, count = 64, held = 16 }

An environment that draws itself as text (render mode `ansi`) is shown so, any other by its observation alone, which has
to be small. Each step's reward is its turn's own, `step`; their sum is the `reward`. What is no action costs a turn and
is said. `spaces` has which actions and observations there are. For more than that there is
`strop.agent.environment.Gym`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

import msgspec
from msgspec import Struct

from strop.agent.environment import EnvironmentAgent, Gym
from strop.agent.episode import Action
from strop.agent.llm import LLM
from strop.agent.tool import Tool
from strop.compat.acts import find_act, make_act
from strop.compat.gymnasium.spaces import ActionSpace, is_small, show
from strop.compat.tasks import read_task
from strop.errors import AgentError
from strop.imports import one_line
from strop.types import Task

MAX_TURNS = 64
"""Where neither the task nor the environment says when an episode is over."""
COLOUR, PLAIN = re.compile("(?:\x1b\\[[0-9;]+m)+([^\x1b]*)\x1b\\[0?m"), re.compile("\x1b\\[[0-9;]*m")


class World(Struct, kw_only=True):
    """What a task says of its environment. `calls`: the model acts by calling the tool `act`, and not in words."""

    environment: str
    args: dict[str, Any] = {}
    seed: int | None = None
    actions: list[str] = []
    max_turns: int | None = None
    calls: bool = False
    system: str = ""


async def agent(task: Task, llm: LLM) -> Any:
    world = read_task(task, World, "Gymnasium", "strop.compat.gymnasium:tasks")
    made = _make(world)
    try:
        space = ActionSpace(made.action_space, world.actions)
    except AgentError:
        made.close()
        raise
    limit = getattr(made.spec, "max_episode_steps", None)
    plays = EnvironmentAgent(
        lambda: WorldEnvironment(made, space, world),
        system=world.system or f"You act in {world.environment}. {space.describe_actions(world.calls)}",
        max_turns=world.max_turns or limit or MAX_TURNS,
    )
    return await plays(task, llm)


def tasks(
    environment: str,
    args: Mapping[str, Any] | None = None,
    count: int = 64,
    held: int = 16,
    seed: int = 0,
    actions: Sequence[str] = (),
    max_turns: int | None = None,
    calls: bool = False,
    system: str = "",
) -> list[Task]:
    """
    environment    an id of Gymnasium's; "MODULE:ID" imports the module first, as there
    args           what `gymnasium.make` gets besides
    count, held    seeds to train on, and others to evaluate on
    actions        words for the actions 0, 1, ..., which the model says instead of the numbers
    max_turns      turns of an episode at most; default: the environment's own limit, or 64
    calls          the model acts by calling a tool
    system         the system message; default: which actions there are
    """
    given = World(
        environment=environment, args=dict(args or {}), actions=list(actions), max_turns=max_turns, calls=calls,
        system=system,
    )  # fmt: skip
    splits = ["train"] * count + ["test"] * held
    return [
        Task(id=f"{split}-{at}", split=split, data=msgspec.to_builtins(msgspec.structs.replace(given, seed=at)))
        for at, split in enumerate(splits, seed)
    ]


class WorldEnvironment(Gym):
    """One episode in an environment that Gymnasium made."""

    def __init__(self, made: Any, space: ActionSpace, world: World) -> None:
        self._is_drawn = made.render_mode == "ansi"
        super().__init__(lambda task: made, act=space.read, show=self._show)
        self._made, self._space, self._calls = made, space, world.calls

    def list_tools(self) -> list[Tool]:
        return [make_act(self._space.schema)] if self._calls else []

    def choose(self, action: Action) -> Any:
        if not self._calls:
            return super().choose(action)
        return self._space.read_value(find_act(action).get("action"))

    def close(self) -> None:
        """It was made before `reset`, which may not have been reached."""
        self._made.close()

    def _show(self, observation: Any) -> str:
        space = self._made.observation_space
        if not self._is_drawn:
            return show(space, observation)
        drawn = draw(self._made.render())  # colours may say more than brackets do: what is small is shown besides
        return f"{drawn}\n{show(space, observation)}" if is_small(space) else drawn


def draw(rendered: str) -> str:
    """Where colours say something, brackets do.

    >>> draw("S\\x1b[41mF\\x1b[0mFG\\n")
    'S[F]FG'
    """
    return PLAIN.sub("", COLOUR.sub(r"[\1]", rendered)).strip("\n")


def _make(world: World) -> Any:
    try:
        gymnasium = import_module("gymnasium")
    except ImportError as error:
        raise AgentError(
            f"gymnasium cannot be imported here ({one_line(error)}). Fix: pip install gymnasium, or set runner.python "
            "to an environment that has it"
        ) from None
    try:
        made = gymnasium.make(world.environment, **world.args)
        if "render_mode" not in world.args and "ansi" in made.metadata.get("render_modes", ()):
            made.close()
            made = gymnasium.make(world.environment, render_mode="ansi", **world.args)
        return made
    except Exception as error:  # of Gymnasium, of an environment, of what it needs
        raise AgentError(f"{world.environment} was not made: {one_line(error)}. Fix: see its id and args") from None
