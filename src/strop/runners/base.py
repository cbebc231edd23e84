"""The seam between the pool and agents of every kind: a job goes in, an outcome comes out.

    pool ──Job──▶ Agent: processes (Python functions), inloop (async and threads), command, service ──Outcome──▶ pool

The pool knows no kinds. It bounds how many jobs run at once, keeps their leases alive, and cancels a job that takes too
long or that nobody wants any more; an agent that is cancelled ends everything the job started before it lets go.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from typing import Any

from msgspec import Struct

from strop.agent.llm import LLM
from strop.types import Cause, EventKind, Reward


class Job(Struct, frozen=True, kw_only=True):
    """One attempt to run. The task is also put into `task_file`, for programs in any language; a later attempt
    may write its own over it."""

    llm: LLM
    seed: int
    task_file: str


class Outcome(Struct, frozen=True, kw_only=True):
    """What came of a job, in the words of `Store.finish`. `clean` is False when something that belonged to it had to
    be killed or was lost, so that calls of it may still be in flight."""

    rewards: list[Reward] = []
    cause: Cause | None = None
    detail: str | None = None
    clean: bool = True


Say = Callable[[EventKind, dict[str, Any]], Awaitable[None]]
"""Records an event of the job."""


class Agent(ABC):
    """One agent, ready to be run many times, at once or one after the other."""

    @abstractmethod
    async def start(self) -> None:
        """Get ready. Raises `AgentError` if the agent cannot be had; then nothing has begun."""

    @abstractmethod
    async def run(self, job: Job, say: Say) -> Outcome:
        """Run it once. What the agent does wrong is an outcome, never an exception."""

    @abstractmethod
    async def close(self) -> None:
        """End everything."""
