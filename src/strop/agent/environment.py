"""Environments: the other side of an episode, with rewards on the way.

    class Guess(strop.Environment):
        def reset(self, task):
            self.number = task.data["number"]
            return "I think of a number from 1 to 9. Which one?"

        def step(self, action):
            right = action.text.strip() == str(self.number)
            return strop.Transition(observation="No. Which one?", reward=float(right), done=right)

    agent = strop.EnvironmentAgent(Guess, max_turns=4)

Tools say what happened, the environment says what it means. An environment that has tools (methods under `@strop.tool`)
gets the calls of an action with their results, and judges them: reward, done, and something to add if need be.

A step's reward is the turn's own, called `step`, and the rollout's `reward` is their sum. By default the sum counts,
for all turns alike; `algorithm.rewards = {step = 1.0}` with `credit = "to_go"` gives each turn what came from it on.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from typing import Any, cast

from strop.agent.episode import Action, EpisodeLimits, Transition, build_first_messages, play
from strop.agent.functions import function_caller
from strop.agent.llm import LLM
from strop.agent.tool import Tool
from strop.agent.toolbox import Tools, find_tools, is_tool
from strop.imports import one_line
from strop.types import Task

STEP = "step"
"""The name of a step's own reward."""


class Environment(ABC):
    """What a model acts in, made anew for each rollout. Every method may be `async`; methods that are tools are what it
    may call."""

    @abstractmethod
    def reset(self, task: Task) -> Any:
        """Begin: the first message as text, or several as a list. None: what the task asks."""

    @abstractmethod
    def step(self, action: Action) -> Transition | Awaitable[Transition]:
        """What `action` led to: what the model said (`action.text`) and the calls it made, which have been run
        (`action.calls`). An answer without calls that gets no observation ends the episode."""

    def list_tools(self) -> list[Tool]:
        """What the model may call: the methods under `@strop.tool`."""
        has = any(is_tool(value) for kind in type(self).__mro__ for value in vars(kind).values())
        return find_tools(self) if has else []

    def close(self) -> Any:  # noqa: B027 (most hold nothing)
        """Let go of what it holds; called when the rollout ends, however it does."""


class EnvironmentAgent:
    """An agent that plays an episode in an environment: `make()` gives it, and may simply be its class.

    The limits are those of `ToolAgent`. `reward(task, episode)` may say something else than the sum of the steps'
    rewards.
    """

    def __init__(
        self,
        make: Callable[[], Environment],
        *,
        reward: Callable[..., Any] | None = None,
        system: str = "",
        max_turns: int = 8,
        max_tokens: int | None = None,
        seconds: float | None = None,
    ) -> None:
        self.make, self.reward, self.system = make, reward, system
        self.limits = EpisodeLimits(max_turns=max_turns, max_tokens=max_tokens, seconds=seconds)

    async def __call__(self, task: Task, llm: LLM) -> Any:
        environment = self.make()
        with function_caller(llm) as call:
            try:
                messages = build_first_messages(task, self.system, await call(environment.reset, task))

                async def react(action: Action) -> Transition:
                    return await call(environment.step, action)

                episode = await play(llm, messages, Tools(environment.list_tools()), self.limits, react, STEP)
            finally:
                await call(environment.close)
            if not episode.rewards:
                llm.reward(STEP, 0.0)  # a reward that counts and was never given would have the rollout left out
            if self.reward is not None:
                return await call(self.reward, task, episode)
        return math.fsum(episode.rewards.values())


class Gym(Environment):
    """An environment with Gymnasium's `reset` and `step`. `make(task)` gives it, `act(text)` turns what the model said
    into its action, `show(observation)` its observation into text. What `act` raises is told to the model, and costs
    a turn; so is an action that is not in its `action_space`, if it has one. A task's `seed` is what it is reset with.

        strop.EnvironmentAgent(lambda: Gym(lambda task: gymnasium.make("FrozenLake-v1"), act=int))
    """

    def __init__(
        self, make: Callable[[Task], Any], *, act: Callable[[str], Any], show: Callable[[Any], str] = str
    ) -> None:
        self._make, self._act, self._show = make, act, show
        self._inner: Any = None

    def reset(self, task: Task) -> str:
        self._inner = self._make(task)
        data: Any = task.data
        seed = cast("dict[str, Any]", data).get("seed") if isinstance(data, dict) else None
        return self._show((self._inner.reset() if seed is None else self._inner.reset(seed=seed))[0])

    def choose(self, action: Action) -> Any:
        """The environment's action. What is wrong with it is raised."""
        return self._act(action.text)

    def step(self, action: Action) -> Transition:
        try:
            chosen = self.choose(action)
            space = getattr(self._inner, "action_space", None)
            if space is not None and not space.contains(chosen):
                return Transition(observation=f"error: {chosen!r} is not in {space}")
        except Exception as error:
            return Transition(observation=f"error: {one_line(error)}")
        observation, reward, terminated, truncated, _ = self._inner.step(chosen)
        return Transition(observation=self._show(observation), reward=float(reward), done=terminated or truncated)

    def close(self) -> None:
        if self._inner is not None:
            self._inner.close()
