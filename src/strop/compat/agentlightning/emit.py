"""What an agent says of its rollout while it runs: rewards, messages, objects, errors.

The rollout is the one whose agent called, or else that of the process, by the variables that a runner sets; where there
is none, as in a script that tries an agent out, nothing is sent.
"""

from __future__ import annotations

import functools
import inspect
import os
import traceback
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from typing import Any, TypeVar, cast

from strop.agent.llm import LLM
from strop.errors import BadReward
from strop.types import Task

F = TypeVar("F", bound=Callable[..., Any])
current: ContextVar[LLM | None] = ContextVar("strop_agentlightning", default=None)
"""The model of the rollout at hand, which knows where events go."""


def find_llm() -> LLM | None:
    """Threads that an agent starts have no context of ours, and programs neither: they have the variables."""
    url, key = os.environ.get("STROP_EVENTS_URL"), os.environ.get("OPENAI_API_KEY")
    if (llm := current.get()) is not None or not url or not key:
        return llm
    rollout = os.environ.get("STROP_ROLLOUT", "")
    return LLM(
        base_url=os.environ.get("OPENAI_BASE_URL", ""),
        api_key=key,
        model=os.environ.get("STROP_MODEL", ""),
        trace_id=key,
        events_url=url,
        rollout=rollout,
        task=Task(id=rollout),
    )


def emit_reward(
    reward: float | Mapping[str, float],
    *,
    primary_key: str | None = None,
    attributes: Mapping[str, Any] | None = None,
    propagate: bool = True,
) -> float:
    """Say a reward, or several by name, of which `primary_key` is the one that counts. Returns that."""
    named = {"reward": reward} if not isinstance(reward, Mapping) else dict(reward)
    first = "reward" if not isinstance(reward, Mapping) else primary_key
    if first is None or first not in named:
        there = ", ".join(named)
        raise BadReward(f"primary_key is {first!r}, and the rewards are {there}. Fix: name one of them")
    value = float(named[first])
    if propagate and (llm := find_llm()) is not None:
        for name, number in {**named, "reward": value}.items():
            llm.reward(name, number)
    return value


def emit_message(message: str, attributes: Mapping[str, Any] | None = None, propagate: bool = True) -> None:
    if not isinstance(message, str):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"a message is text, not {type(message).__name__}. Fix: use emit_object")
    _say("message", {"stream": "agent", "text": message, **_more(attributes)}, propagate)


def emit_object(object: Any, attributes: Mapping[str, Any] | None = None, propagate: bool = True) -> None:
    """Anything that JSON can hold."""
    _say("span", {"name": "object", "object": object, **_more(attributes)}, propagate)


def emit_annotation(annotation: Mapping[str, Any], propagate: bool = True) -> None:
    _say("span", {"name": "annotation", "attributes": dict(annotation)}, propagate)


def emit_exception(
    exception: BaseException, attributes: Mapping[str, Any] | None = None, propagate: bool = True
) -> None:
    text = "".join(traceback.format_exception(exception))
    _say(
        "error",
        {"message": f"{type(exception).__name__}: {exception}", "traceback": text, **_more(attributes)},
        propagate,
    )


def reward(function: F) -> F:
    """What the function returns is said as a reward, and returned."""
    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def later(*args: Any, **values: Any) -> Any:
            return _said(await function(*args, **values))

        return cast("F", later)

    @functools.wraps(function)
    def now(*args: Any, **values: Any) -> Any:
        return _said(function(*args, **values))

    return cast("F", now)


def _said(value: Any) -> Any:
    emit_reward(value)
    return value


def _more(attributes: Mapping[str, Any] | None) -> dict[str, Any]:
    return {"attributes": dict(attributes)} if attributes else {}


def _say(kind: Any, data: dict[str, Any], propagate: bool) -> None:
    if propagate and (llm := find_llm()) is not None:
        llm.event(kind, data)
