"""Agents of two turns that count their own CPU time, for benchmarks/agents.py. What they return is named rewards: where
they ran, and the milliseconds that a part of them took in this process.

    agent, agent_async      ask through `llm.client()` and `llm.async_client()`
    own, own_async          make a client of the `openai` package themselves, once a rollout, as most agents do

A module named in STROP_BENCHMARK_IMPORT is imported with this file, in the place of a framework.
"""

from __future__ import annotations

import importlib
import os
import time
from typing import Any

_begun = time.process_time()

import openai  # noqa: E402
from adding import BEFORE, TOOLS  # noqa: E402

for name in filter(None, os.environ.get("STROP_BENCHMARK_IMPORT", "").split(",")):
    importlib.import_module(name)
IMPORTED = (os.getpid(), 1e3 * (time.process_time() - _begun))


class Laps:
    """CPU milliseconds of this process since the last lap, by name."""

    def __init__(self) -> None:
        imported = IMPORTED[1] if IMPORTED[0] == os.getpid() else 0.0
        self.found = {"process": float(os.getpid()), "import": imported, "client": 0.0, "requests": 0.0}
        self._since = time.process_time()

    def lap(self, name: str) -> None:
        now = time.process_time()
        self.found[name] += 1e3 * (now - self._since)
        self._since = now


def begin(task: Any) -> list[Any]:
    return [*BEFORE, {"role": "user", "content": task.data["question"]}]


def go_on(messages: list[Any], said: Any) -> None:
    messages.append(said.model_dump(exclude_none=True))
    messages += [{"role": "tool", "tool_call_id": call.id, "content": "122"} for call in said.tool_calls or []]


def talk(task: Any, llm: Any, client: Any, laps: Laps) -> dict[str, float]:
    laps.lap("client")
    messages = begin(task)
    for _ in range(2):
        said = client.chat.completions.create(model=llm.model, messages=messages, tools=TOOLS).choices[0].message
        go_on(messages, said)
    laps.lap("requests")
    return laps.found


async def talk_async(task: Any, llm: Any, client: Any, laps: Laps) -> dict[str, float]:
    laps.lap("client")
    messages = begin(task)
    for _ in range(2):
        answer = await client.chat.completions.create(model=llm.model, messages=messages, tools=TOOLS)
        go_on(messages, answer.choices[0].message)
    laps.lap("requests")
    return laps.found


def agent(task: Any, llm: Any) -> dict[str, float]:
    laps = Laps()
    return talk(task, llm, llm.client(), laps)


async def agent_async(task: Any, llm: Any) -> dict[str, float]:
    laps = Laps()
    return await talk_async(task, llm, llm.async_client(), laps)


def own(task: Any, llm: Any) -> dict[str, float]:
    laps = Laps()
    with openai.OpenAI(base_url=llm.base_url, api_key=llm.api_key) as client:
        return talk(task, llm, client, laps)


async def own_async(task: Any, llm: Any) -> dict[str, float]:
    laps = Laps()
    async with openai.AsyncOpenAI(base_url=llm.base_url, api_key=llm.api_key) as client:
        return await talk_async(task, llm, client, laps)
