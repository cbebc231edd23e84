"""One worker process: it runs one agent at a time and says what came of it.

A worker leads a process group of its own, so that ending the group also ends whatever the agent started. It ends
itself, in the middle of an agent if need be, as soon as the connection to its pool closes: a pool that is killed leaves
nothing behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import os
import queue
import random
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Generator, Iterable, Mapping
from pathlib import Path
from typing import Any, cast

import msgspec

from strop.errors import AgentError, BadReward
from strop.imports import resolve
from strop.runners.llm import LLM
from strop.runners.wire import Job, Outcome, Ready, Start, pack, receive_bytes
from strop.types import Reward

Agent = Callable[..., Any]
MAX_DETAIL = 4000


def serve(connection: socket.socket) -> None:
    """The life of a worker: load the agent, then run jobs until the pool is gone."""
    inbox: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(connection, inbox), name="strop-worker-listen", daemon=True).start()
    start = msgspec.json.decode(inbox.get(), type=Start)
    sys.path[:] = start.sys_path
    try:
        agent = load_agent(start.agent)
    except AgentError as error:
        connection.sendall(pack(Ready(error=str(error))))
        return
    connection.sendall(pack(Ready()))
    worker = os.getpid()
    while True:
        job = msgspec.json.decode(inbox.get(), type=Job)
        outcome = run(agent, job)
        if os.getpid() != worker:  # a child that the agent forked and that came back: the answer is not its to give
            os._exit(0)
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        connection.sendall(pack(outcome))


def _listen(connection: socket.socket, inbox: queue.SimpleQueue[bytes]) -> None:
    """The one reader of the connection, so that its end is noticed while an agent runs."""
    while (message := receive_bytes(connection)) is not None:
        inbox.put(message)
    if os.getpgrp() == os.getpid():
        os.killpg(os.getpid(), signal.SIGKILL)
    os._exit(1)


def load_agent(spec: str) -> Agent:
    agent = resolve(spec, "agent")
    if not callable(agent):
        raise AgentError(f"agent: {spec} is {type(agent).__name__}, not a function: name one that takes (task, llm)")
    return agent


def run(agent: Agent, job: Job) -> Outcome:
    """Run the agent on one job. Whatever it does wrong is an outcome, never an exception."""
    Path(job.task_file).write_bytes(msgspec.json.encode(job.llm.task))
    random.seed(job.seed)  # an agent that draws its own numbers draws the same ones when a run is repeated
    try:
        with _environment(job.llm, job.task_file):
            result = agent(job.llm.task, job.llm)
            if inspect.isawaitable(result):
                result = asyncio.run(_wait(result))
        return Outcome(rewards=rewards_of(result))
    except BadReward as error:
        return Outcome(cause="bad_reward", detail=str(error))
    except BaseException as error:  # sys.exit in an agent must not end its worker
        return Outcome(cause="agent_error", detail=_last_lines(error))


async def _wait(result: Any) -> Any:
    return await result


def _last_lines(error: BaseException) -> str:
    """The end of the traceback, without the frames of this module."""
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename == __file__:
        frames = frames.tb_next
    text = "".join(traceback.format_exception(type(error), error, frames)).strip()
    text = text.encode(errors="replace").decode()  # what cannot be written as UTF-8 must not hide the error
    return text if len(text) <= MAX_DETAIL else "... " + text[-MAX_DETAIL:]


@contextlib.contextmanager
def _environment(llm: LLM, task_file: str) -> Generator[None]:
    """The addresses, for agents and their subprocesses that read them from the environment."""
    given = {
        "OPENAI_BASE_URL": llm.base_url,
        "OPENAI_API_KEY": llm.api_key,
        "ANTHROPIC_BASE_URL": llm.base_url.removesuffix("/v1"),
        "ANTHROPIC_API_KEY": llm.api_key,
        "STROP_TASK": task_file,
        "STROP_ROLLOUT": llm.rollout,
        "STROP_EVENTS_URL": llm.events_url,
        "AGL_OPENAI_BASE_URL": llm.base_url,
        "AGL_EVENT_URL": llm.events_url,
        "AGL_KEY": llm.api_key,
    }
    before = dict(os.environ)
    os.environ.update(given)
    try:
        yield
    finally:
        for name in given:
            if name in before:
                os.environ[name] = before[name]
            else:
                os.environ.pop(name, None)


def rewards_of(value: Any) -> list[Reward]:
    """What an agent returned, as rewards. `BadReward` says what is wrong with it.

    >>> rewards_of({"reward": True, "format": 0.5})
    [Reward(name='reward', value=1.0, turn=None, agent=None), Reward(name='format', value=0.5, turn=None, agent=None)]
    >>> rewards_of(None)
    []
    """
    if value is None:
        return []
    if isinstance(value, Reward):
        return [_named(value.name, value.value, value)]
    if isinstance(value, Mapping):
        return [_named(str(name), number) for name, number in cast("Mapping[Any, Any]", value).items()]
    if isinstance(value, (list, tuple)):
        items = list(cast("Iterable[Any]", value))
        if not all(isinstance(item, Reward) for item in items):
            raise BadReward(
                "the agent returned a list of something else than Reward: return a number or a dict of them"
            )
        return [_named(item.name, item.value, item) for item in items]
    return [_named("reward", value)]


def _named(name: str, value: Any, given: Reward | None = None) -> Reward:
    # float() also reads text, which would hide a mistake; numpy and torch scalars have __float__, text has not.
    if not hasattr(value, "__float__") and not hasattr(value, "__index__"):
        raise BadReward(
            f"the agent returned {_shown(value)} as {name!r}: return a number, a bool, a dict of named numbers or None"
        )
    try:
        number = float(value)
    except (TypeError, ValueError) as error:
        raise BadReward(f"the agent returned {_shown(value)} as {name!r}, which is no single number: {error}") from None
    reward = Reward(name=name, value=number) if given is None else msgspec.structs.replace(given, value=number)
    if reward.wrong:
        raise BadReward(f"the agent returned a bad reward: {reward.wrong}")
    return reward


def _shown(value: Any) -> str:
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 80 else text[:77] + '...'}"
