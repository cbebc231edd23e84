"""An agent against scripted answers, for users' own tests: no model, no GPU, no server to start.

    def test_my_agent():
        done = strop.testing.run(agent, {"question": "What is 3 * 4?"}, answers=["It is 12."])
        assert done.reward() == 1.0

Everything but the model is real: the gateway on a port of this machine, the store in a folder that is deleted at the
end, the runner that calls the agent and reads its rewards. Answers are written as strop/nano writes them; `call` writes
a tool call. It happens in a thread with an event loop of its own, so that it works in async tests and notebooks too.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import json
import sys
import tempfile
from collections.abc import Callable, Coroutine, Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import msgspec
from msgspec import Struct
from starlette.types import Receive, Scope, Send

from strop.agent.functions import is_async
from strop.config import Config, PolicyConfig, RunnerConfig
from strop.engines.scripted import Answer as ScriptedAnswer
from strop.engines.scripted import Scripted, ScriptedRequest
from strop.errors import AgentError, ConfigError
from strop.net import asgi
from strop.net.server import serve
from strop.run.gateway import make_gateway
from strop.run.prepare import prepare_policies
from strop.run.runtime import ServedPolicy, open_pool
from strop.store import open_store
from strop.types import TERMINAL, Event, Reward, Rollout, Task, Turn

__all__ = ["Trial", "call", "run", "serve_chat"]

T = TypeVar("T")
Script = Sequence[ScriptedAnswer] | Mapping[str, ScriptedAnswer] | Callable[[ScriptedRequest], ScriptedAnswer]
MODEL = "strop/nano"
"""Its chat template and tokenizer are used; its weights are not."""
CONTEXT = 32_768
FUNCTIONS = "strop_testing_functions"
"""The module under which the runner finds the functions that are being tested."""

_numbers = itertools.count()


class Trial(Struct, frozen=True, kw_only=True):
    """What came of an agent's run on one task: its model calls, its rewards, and what else it reported."""

    rollout: Rollout
    turns: list[Turn]
    events: list[Event]

    @property
    def rewards(self) -> tuple[Reward, ...]:
        return self.rollout.rewards

    def reward(self, name: str = "reward") -> float | None:
        """The reward called `name` of the whole rollout, or None if there is none."""
        return self.rollout.reward(name)


def call(name: str, **arguments: Any) -> str:
    """An answer that calls a tool.

    >>> print(call("calculator", expression="3 * 4"))
    <tool_call>
    {"name": "calculator", "arguments": {"expression": "3 * 4"}}
    </tool_call>
    """
    return "<tool_call>\n" + json.dumps({"name": name, "arguments": arguments}) + "\n</tool_call>"


def run(
    agent: Callable[..., Any] | str,
    task: Task | Any,
    answers: Script,
    *,
    reward: Callable[..., Any] | str = "",
    timeout: float = 60.0,
) -> Trial:
    """Run `agent` on `task` once, with a model that gives `answers`, and return its turns and rewards.

    `agent` and `reward` are what `strop.train` takes. Functions are called in a thread of this process; what is named
    by a text runs as in training, in a process of its own, with OPENAI_BASE_URL and OPENAI_API_KEY set. `task` is a
    Task, or its data. `answers` are given one after the other; a table or a function gives them by what the prompt says
    (`strop.Scripted`). What the agent raises is raised here, with its traceback; an agent that asks for more answers
    than there are, takes longer than `timeout` seconds or returns what is not a reward raises `AgentError`.
    """
    if isinstance(agent, str) and not isinstance(reward, str):
        raise ConfigError(
            f"the agent {agent!r} runs in a process of its own, which does not find {reward!r}. Fix: name the reward "
            "function by a text as well, as FILE.py:function"
        )
    whole = task if isinstance(task, Task) else Task(id="task", data=task)
    raised: list[BaseException] = []
    with _named(agent, raised) as agent_spec, _named(reward, raised) as reward_spec:
        trial, engine = _in_thread(_run(agent_spec, reward_spec, whole, answers, timeout))
    num_answers = None if callable(answers) or isinstance(answers, Mapping) else len(answers)
    if num_answers is not None and len(engine.calls) > num_answers:
        asked = engine.calls[num_answers].asked.prompt
        raise AgentError(
            f"the agent asked for more answers than there are: there are {num_answers}. Fix: add to `answers` what "
            f"the model says to a prompt that ends with {asked[-200:]!r}"
        ) from (raised[0] if raised else None)
    if raised:
        raise raised[0]
    if trial.rollout.cause is not None:
        raise AgentError(f"the agent failed ({trial.rollout.cause}): {trial.rollout.detail}")
    return trial


def serve_chat(answer: Callable[[dict[str, Any]], str | dict[str, Any]], *, port: int = 0) -> None:
    """Stand in for a provider of models that costs money: serve OpenAI's chat completions on this machine for ever, and
    print the address once it is up. `answer` turns a request into what is said, or into a whole message with
    `tool_calls`."""

    async def complete(scope: Scope, receive: Receive, send: Send) -> None:
        request = msgspec.json.decode(await asgi.read_body(receive, 16 << 20), type=dict[str, Any])
        said = answer(request)
        message = {"role": "assistant", "content": said} if isinstance(said, str) else said
        asked, answered = len(str(request.get("messages"))) // 4, 1 + len(str(message)) // 4
        body: dict[str, Any] = {
            "id": "scripted",
            "object": "chat.completion",
            "created": 0,
            "model": request.get("model", ""),
            "choices": [
                {"index": 0, "finish_reason": "tool_calls" if message.get("tool_calls") else "stop", "message": message}
            ],
            "usage": {
                "prompt_tokens": asked, "completion_tokens": answered, "total_tokens": asked + answered,
            },
        }  # fmt: skip
        await asgi.answer(send, msgspec.json.encode(body))

    async def main() -> None:
        server = await serve(complete, port=port)
        print(server.url, flush=True)
        await asyncio.Event().wait()

    with suppress(KeyboardInterrupt):
        asyncio.run(main())


async def _run(agent: str, reward: str, task: Task, answers: Script, timeout: float) -> tuple[Trial, Scripted]:
    threads = agent.startswith(FUNCTIONS)
    runner = RunnerConfig(workers=1, timeout=timeout, agents_in="threads" if threads else "processes")
    config = Config(agent=agent, reward=reward, policy=PolicyConfig(model=MODEL), runner=runner)
    (prepared,) = await prepare_policies(config)
    engine = Scripted(answers, prepared.renderer, context=CONTEXT)
    with tempfile.TemporaryDirectory(prefix="strop-testing-") as folder:
        store = await open_store(folder)
        policy = ServedPolicy(prepared=prepared, engine=engine, learner=None, place=Path(folder))
        gateway = make_gateway(config, store, [policy])
        server = await serve(gateway)
        pool = open_pool(config, runner, store, gateway, server.url, Path(folder) / "runners.log")
        try:
            await pool.start()
            await store.enqueue([Rollout(id="g0.0", group="g0", member=0, task=task, created=0.0, retries={})])
            pool.work()
            cursor = 0
            while (rollout := await store.get("g0.0")).status not in TERMINAL:
                cursor, _ = await store.wait(cursor, timeout=1.0)
            return Trial(rollout=rollout, turns=await store.turns("g0.0"), events=await store.events("g0.0")), engine
        finally:
            await pool.close()
            await server.close()
            await store.close()


def _in_thread(coroutine: Coroutine[Any, Any, T]) -> T:
    with ThreadPoolExecutor(1, thread_name_prefix="strop-testing") as thread:
        return thread.submit(asyncio.run, coroutine).result()


@contextmanager
def _named(function: Callable[..., Any] | str, raised: list[BaseException]) -> Generator[str]:
    """The text by which a runner finds a function of this process. What the function raises is kept in `raised`."""
    if isinstance(function, str):
        yield function
        return
    if not callable(function):
        raise ConfigError(f"{function!r} is not a function. Fix: give a function, or its name as FILE.py:function")
    module = sys.modules.setdefault(FUNCTIONS, ModuleType(FUNCTIONS))
    name = f"function{next(_numbers)}"
    setattr(module, name, _watched(function, raised))
    try:
        yield f"{FUNCTIONS}:{name}"
    finally:
        delattr(module, name)


def _watched(function: Callable[..., Any], raised: list[BaseException]) -> Callable[..., Any]:
    @functools.wraps(function)
    def watched(*arguments: Any) -> Any:
        try:
            return function(*arguments)
        except BaseException as error:
            raised.append(error)
            raise

    @functools.wraps(function)
    async def watched_async(*arguments: Any) -> Any:
        try:
            return await function(*arguments)
        except BaseException as error:
            raised.append(error)
            raise

    return watched_async if is_async(function) else watched
