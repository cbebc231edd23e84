"""An agent that calls as two: each works on the demo's task by itself, and the reward is the mean of what they did."""

from typing import Any

from strop import demo
from strop.types import Task


def agent(task: Task, llm: Any) -> dict[str, float]:
    done = [demo.agent(task, llm.as_agent(name))["right_call"] for name in ("writer", "critic")]
    return {"reward": sum(done) / len(done)}


def alone(task: Task, llm: Any) -> dict[str, float]:
    """Only one of the two says anything."""
    return {"reward": demo.agent(task, llm.as_agent("writer"))["right_call"]}


def with_partner(task: Task, llm: Any) -> dict[str, float]:
    """The two, and a third that counts for nothing."""
    demo.agent(task, llm.as_agent("partner"))
    return agent(task, llm)
