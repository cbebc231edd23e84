"""Python agents inside the runner's own process: thousands at once, for agents that mostly wait for the model.

    loop:     an `async` agent is a task of the runner's own event loop; it must never block it
    threads:  an agent has a thread to itself, and an event loop too if it is `async`

What processes give has to do without here. There is one environment for all, so addresses come through `llm` only
(`llm.base_url`, `llm.client()`), not through variables. What agents print goes where the runner prints, and no rollout
gets it as events; `llm.event` does. Python's random numbers are everybody's. And an agent that will not end cannot be
killed: it is left behind and counted, its attempt is over all the same.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec

from strop.agent.functions import is_async
from strop.agent.llm import LLM, bypass_proxy
from strop.config import RunnerConfig
from strop.errors import AgentError, StropError
from strop.net.secrets import without_secrets
from strop.runners.base import Agent, Job, Outcome, Say
from strop.runners.rewards import compute_outcome, load_reward_function
from strop.runners.worker import call, load_agent, make_failed_outcome
from strop.types import EventKind

if TYPE_CHECKING:
    import openai

GRACE = 2.0
"""Seconds a task that is cancelled has for its last words."""


class InProcessAgent(Agent):
    """The function `spec`, in threads or in the loop as `config.agents_in` says.

    `stuck` are those that were told to stop and go on all the same. Once there are more of them than `config.workers`,
    `run` raises `AgentError`.
    """

    def __init__(self, spec: str, config: RunnerConfig, *, reward: str = "", host: str = "") -> None:
        self._spec = spec
        self._config = config
        self._reward = reward
        self._host = host
        self._hiding = contextlib.ExitStack()
        self.stuck: set[object] = set()

    async def start(self) -> None:
        bypass_proxy(self._host, os.environ)
        self._hiding.enter_context(without_secrets())
        self._function = load_agent(self._spec)
        self._reward_function = load_reward_function(self._reward)
        if self._config.agents_in == "loop" and not is_async(self._function):
            raise AgentError(
                f'agent: {self._spec} is not async. Fix: write it as `async def`, or set runner.agents_in to "threads"'
            )

    async def run(self, job: Job, say: Say) -> Outcome:
        if len(self.stuck) > self._config.workers:
            raise AgentError(
                f"agent: {len(self.stuck)} runs of {self._spec} were told to stop and did not:"
                ' give its calls time limits, or set runner.agents_in to "processes"'
            )
        if self._config.agents_in == "loop":
            return await self._in_loop(job, say)
        return await self._in_thread(job)

    async def close(self) -> None:
        self._hiding.close()
        for task in self.stuck:
            if isinstance(task, asyncio.Task):
                task.cancel()

    async def _in_loop(self, job: Job, say: Say) -> Outcome:
        outbox = _Outbox(say)
        given = {name: getattr(job.llm, name) for name in LLM.__struct_fields__}
        task = asyncio.create_task(self._call(msgspec.structs.replace(job, llm=LoopLLM(**given, outbox=outbox))))
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError:
            task.cancel()
            await asyncio.wait([task], timeout=GRACE)
            if not task.done():
                self.stuck.add(task)
                task.add_done_callback(self.stuck.discard)
            await outbox.close()
            raise
        await outbox.close()
        return task.result()

    async def _call(self, job: Job) -> Outcome:
        """What the agent came to. Hardly anything may escape from here: sys.exit in a task would end the loop."""
        try:
            return await compute_outcome(await self._function(job.llm.task, job.llm), job, self._reward_function)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            return make_failed_outcome(error)

    async def _in_thread(self, job: Job) -> Outcome:
        loop = asyncio.get_running_loop()
        done: asyncio.Future[Outcome] = loop.create_future()

        def settle(outcome: Outcome) -> None:
            self.stuck.discard(thread)
            if not done.done():
                done.set_result(outcome)

        def work() -> None:
            outcome = call(self._function, job, self._reward_function)
            with contextlib.suppress(RuntimeError):  # the loop has closed: nobody is left to hear it
                loop.call_soon_threadsafe(settle, outcome)

        thread = threading.Thread(target=work, name=f"strop-agent-{job.llm.rollout}", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            raise AgentError(f"agent: {error}. Fix: have fewer with runner.workers") from None
        try:
            return await done
        except asyncio.CancelledError:
            self.stuck.add(thread)
            raise


class LoopLLM(LLM, frozen=True, kw_only=True):
    """What agents in the loop are handed: nothing in it blocks. Events are recorded before the attempt ends."""

    shares_loop: ClassVar[bool] = True
    outbox: Any

    def client(self) -> openai.OpenAI:
        """Only for threads that the agent starts; in the loop itself it would stop every other agent."""
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return super().client()
        raise StropError(
            "llm.client() would stop every agent in the loop until it is answered. Fix: use llm.async_client(),"
            ' or set runner.agents_in to "processes" or "threads"'
        )

    def event(self, kind: EventKind, data: dict[str, Any]) -> None:
        try:  # a copy, since the agent may go on to change its own; and what cannot be stored is told here, not later
            said = msgspec.json.decode(msgspec.json.encode((kind, data)), type=tuple[EventKind, dict[str, Any]])
        except (TypeError, ValueError, RecursionError) as error:  # msgspec's and Unicode's are ValueErrors
            raise StropError(f"an event is a kind and a dict: {error}") from None
        self.outbox.put(*said)


class _Outbox:
    """Events on their way to the store, in order and from any thread, while nobody waits for them."""

    def __init__(self, say: Say) -> None:
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[tuple[EventKind, dict[str, Any]] | None] = asyncio.Queue()
        self._sending = asyncio.create_task(self._send(say))

    def put(self, kind: EventKind, data: dict[str, Any]) -> None:
        self._loop.call_soon_threadsafe(self._queue.put_nowait, (kind, data))

    async def close(self) -> None:
        """Returns once all are recorded; raises what the store says about them."""
        self._loop.call_soon_threadsafe(self._queue.put_nowait, None)
        await self._sending

    async def _send(self, say: Say) -> None:
        while (event := await self._queue.get()) is not None:
            await say(*event)
