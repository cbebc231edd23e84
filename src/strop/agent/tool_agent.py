"""A tool-calling loop that is an agent already.

    @strop.tool
    def calculator(expression: str) -> str:
        ...

    def score(task, episode):
        return float(episode.answer == task.data["answer"])

    agent = strop.ToolAgent(tools=[calculator], reward=score, max_turns=4)

`strop.train(agent, tasks)` trains the model behind it, and so does `strop train FILE.py:agent`. In processes, threads
and the loop (`runner.agents_in`) it is the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from strop.agent.episode import Action, EpisodeLimits, ExecutedCall, Transition, build_first_messages, play
from strop.agent.functions import Caller, function_caller
from strop.agent.llm import LLM
from strop.agent.tool import Observation
from strop.agent.toolbox import ToolSource, check_tools, open_tools
from strop.types import Task

CALL = "call"
"""The name of what `on_call` gives."""


class ToolAgent:
    """Asks the model, runs the tools it calls, at once where it calls several, and asks again until it answers.

    tools       functions and tools; or a function of the task that makes them for one rollout: a list, an object whose
                methods are tools, or a context manager that gives one of these. They are closed when the rollout ends
    reward      reward(task, episode), sync or async: what an agent may return. Without it the episode is returned, for
                the run's own reward function (`--reward`)
    system      a system message
    prompt      prompt(task): the first message as text, or all of them. Default: the task's text (`question`, ...)
    max_turns, max_tokens, seconds
                limits of one episode: model calls, tokens sampled by all of them, time. At a limit the episode is over
                and rewarded as it stands; `episode.ended` says which one it was
    on_call     on_call(task, call, result) -> number or None, after each call. What the calls of one answer get is
                added up and is that turn's own reward, called `call`; it counts by `algorithm.rewards.call`
    """

    def __init__(
        self,
        tools: ToolSource = (),
        reward: Callable[..., Any] | None = None,
        *,
        system: str = "",
        prompt: Callable[[Task], Any] | None = None,
        max_turns: int = 8,
        max_tokens: int | None = None,
        seconds: float | None = None,
        on_call: Callable[[Task, ExecutedCall, Observation], Any] | None = None,
    ) -> None:
        self.tools, self.reward, self.on_call = check_tools(tools), reward, on_call
        self.system, self.prompt = system, prompt
        self.limits = EpisodeLimits(max_turns=max_turns, max_tokens=max_tokens, seconds=seconds)

    async def __call__(self, task: Task, llm: LLM) -> Any:
        with function_caller(llm) as call:
            first = None if self.prompt is None else await call(self.prompt, task)

            async def react(action: Action) -> Transition:
                return Transition(reward=await self._worth(task, action, call))

            async with open_tools(self.tools, task, call) as tools:
                episode = await play(
                    llm, build_first_messages(task, self.system, first), tools, self.limits, react, CALL
                )
                if self.on_call is not None and not episode.rewards:
                    llm.reward(CALL, 0.0)  # a reward that counts and was never given would have the rollout left out
                return episode if self.reward is None else await call(self.reward, task, episode)

    async def _worth(self, task: Task, action: Action, call: Caller) -> float | None:
        if self.on_call is None:
            return None
        given = [await call(self.on_call, task, made, made.result) for made in action.calls]
        told = [float(value) for value in given if value is not None]
        return sum(told) if told else None
