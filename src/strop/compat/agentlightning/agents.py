"""LitAgent and @rollout: agents as they are written for Agent Lightning, called as agents of ours are.

    @agl.rollout                                          class Calc(agl.LitAgent):
    async def calc(task, llm):                                def rollout(self, task, resources, rollout):
        ...                                                       return 1.0

    strop train calc.py:calc                              agl.Trainer(algorithm=agl.VERL(config)).fit(Calc(), tasks)

Arguments go by their names: task (the task's data), resources, llm, prompt_template, rollout, rollout_id.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from strop.agent.llm import LLM
from strop.compat.agentlightning.emit import current
from strop.compat.agentlightning.resources import (
    ModelEndpoint,
    NamedResources,
    PromptTemplate,
    make_resources,
    read_rollout,
)
from strop.errors import AgentError
from strop.types import Task

T = TypeVar("T")
ANY = ("rollout_async", "rollout")
TRAIN = ("training_rollout_async", "training_rollout", *ANY)
METHODS = {"train": TRAIN, "val": ("validation_rollout_async", "validation_rollout", *TRAIN)}
"""The methods that an agent may have, and which of them runs first."""


class NoTracer:
    """The gateway records every call: there is nothing for a tracer to do."""

    def get_langchain_handler(self, *args: Any, **values: Any) -> None:
        return None


class LitAgent(Generic[T]):
    """An agent with one of `rollout`, `training_rollout`, `validation_rollout`, or these with _async behind. What it
    returns is the reward; None if it has said it. `trained_agents` says which of its agents a `Trainer` trains, by the
    names that `llm.as_agent` gave them; elsewhere `policy.agents` does."""

    def __init__(self, *, trained_agents: str | None = None, **settings: Any) -> None:
        self.trained_agents = trained_agents
        self.tracer = NoTracer()

    def __call__(self, task: Task, llm: LLM) -> Any:
        """As a run calls it."""
        given = read_rollout(llm)
        method = next((found for name in METHODS[given.mode] if (found := getattr(self, name, None))), None)
        if method is None:
            raise AgentError(f"agent: {type(self).__name__} has no method rollout. Fix: write one")
        return _run(method, task.data, make_resources(llm), llm)


class AgentFunction(LitAgent[T]):
    """A function that @rollout stands above. It can still be called as itself."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self._function = function
        self.__name__, self.__doc__ = function.__name__, function.__doc__

    def __call__(self, *args: Any, **values: Any) -> Any:
        if len(args) == 2 and isinstance(args[0], Task) and isinstance(args[1], LLM):
            return _run(self._function, args[0].data, make_resources(args[1]), args[1])
        return self._function(*args, **values)


def rollout(function: Callable[..., Any]) -> AgentFunction[Any]:
    """Makes an agent of `function(task, llm)`, `function(task, prompt_template)` and the same with `rollout` behind."""
    names = list(inspect.signature(function).parameters)
    if not names or not {"llm", "prompt_template", "resources"} & set(names[1:]):
        raise AgentError(
            f"agent: {function.__name__} takes {', '.join(names) or 'nothing'}. Fix: write it as "
            f"{function.__name__}(task, llm) or {function.__name__}(task, prompt_template)"
        )
    return AgentFunction(function)


def _run(function: Callable[..., Any], data: Any, resources: NamedResources, llm: LLM) -> Any:
    names = list(inspect.signature(function).parameters)
    token = current.set(llm)
    try:
        said = function(*[_find(name, place, data, resources, llm) for place, name in enumerate(names)])
    finally:
        current.reset(token)
    return _later(said, llm) if inspect.isawaitable(said) else said


async def _later(said: Any, llm: LLM) -> Any:
    token = current.set(llm)
    try:
        return await said
    finally:
        current.reset(token)


def _find(name: str, place: int, data: Any, resources: NamedResources, llm: LLM) -> Any:
    """The argument of that name; the first is the task, whatever it is called."""
    if place == 0:
        return data
    kinds: dict[str, type[Any]] = {"llm": ModelEndpoint, "prompt_template": PromptTemplate}
    if name in kinds:
        found = next((one for one in resources.values() if isinstance(one, kinds[name])), None)
        if found is None:
            raise AgentError(f"agent: the run has no prompt, and {name} was asked for. Fix: set prompts.NAME.text")
        return found
    values: dict[str, Any] = {"resources": resources, "rollout": read_rollout(llm), "rollout_id": llm.rollout}
    if name not in values:
        raise AgentError(f"agent: nobody gives the argument {name!r}. Fix: take some of {', '.join([*kinds, *values])}")
    return values[name]
