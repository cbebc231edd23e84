"""An agent that is an HTTP service: it runs already, somewhere, and gets every task by POST.

    POST URL  trace_id: <the attempt's key>   x-strop-rollout: <id>
    {"task": {"id", "split", "data", "agent"}, "rollout", "model", "base_url", "api_key", "trace_id", "events_url"}

Its answer, as JSON, is what a Python function would return: a number, an object of named numbers, a list of
{"name", "value"}, or null or nothing if events give the reward. With a reward function it may be anything, also text.

    status                   what it means
    2xx                      it has succeeded
    429, 503                 later: it is asked again, after Retry-After if that is given, then it is `lost_runner`
    502, 504                 something between us and the service lost it: `lost_runner`
    anything else            it has failed: `agent_error`, with the beginning of the body

A service that cannot be reached is asked again as well. One that closes the connection before it has answered is
`lost_runner`: it may be at work still, and what two executions say must not mix in one attempt. The next attempt has a
key of its own. Left out: services with a request shape of their own. A Python function that posts to one does that.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any
from urllib.parse import urlsplit

import msgspec

from strop.errors import AgentError, ConfigError
from strop.net import client as http
from strop.net.client import Broken, Client, Lost, Response, Unreachable, retry_after
from strop.runners.base import Agent, Job, Outcome, Say
from strop.runners.rewards import RewardFunction, compute_outcome, load_reward_function

TRIES = 5
LATER = frozenset({429, 503})
BETWEEN = frozenset({502, 504})
"""What proxies answer that have no answer of the service."""


class ServiceAgent(Agent):
    """The service at `url`. `reward` names the reward function; `timeout` is for one answer, in seconds; `wait` is how
    long the second try waits, each further one waiting twice as long."""

    def __init__(self, url: str, *, reward: str = "", timeout: float | None = None, wait: float = 0.5) -> None:
        self._url = url
        self._reward = reward
        self._reward_function: RewardFunction | None = None
        self._timeout = timeout
        self._wait = wait
        self._client: Client | None = None
        base, question, query = url.partition("?")
        try:
            place = http.parse_url(base)
        except ConfigError as error:
            raise AgentError(f"agent: {error}") from None
        self._path = (place.path or "/") + question + query
        self._root = f"{urlsplit(base).scheme}://{place.netloc}"

    async def start(self) -> None:
        self._reward_function = load_reward_function(self._reward)
        self._client = Client(self._root)

    async def close(self) -> None:
        if self._client is not None:
            await self._client.close()
            self._client = None

    async def run(self, job: Job, say: Say) -> Outcome:
        wrong = ""
        for number in range(1, TRIES + 1):
            try:
                answer = await self._post(job)
            except Unreachable as error:
                wrong, pause = str(error), 0.0
            except (Lost, Broken, TimeoutError) as error:  # what was sent may be at work still
                cause = "timeout" if isinstance(error, TimeoutError) else "lost_runner"
                return Outcome(cause=cause, detail=str(error), clean=False)
            else:
                if answer.status not in LATER:
                    return await self._outcome(answer, job)
                wrong, pause = self._describe(answer), retry_after(answer.headers.get("retry-after", ""))
            if number < TRIES:
                await asyncio.sleep(max(pause, self._wait * 2 ** (number - 1)))
        detail = f"the service {self._url} took the task in none of {TRIES} tries, see whether it is up: {wrong}"
        return Outcome(cause="lost_runner", detail=detail)

    async def _post(self, job: Job) -> Response:
        assert self._client is not None, "not started"
        llm = job.llm
        body = {
            "task": llm.task,
            "rollout": llm.rollout,
            "model": llm.model,
            "base_url": llm.base_url,
            "api_key": llm.api_key,
            "trace_id": llm.trace_id,
            "events_url": llm.events_url,
            **({"prompts": llm.prompts} if llm.prompts else {}),
        }
        headers = {
            "content-type": "application/json",
            "accept": "application/json",
            "trace_id": llm.trace_id,
            "x-strop-rollout": llm.rollout,
        }
        return await self._client.request(
            "POST", self._path, msgspec.json.encode(body), headers=headers, timeout=self._timeout
        )

    async def _outcome(self, answer: Response, job: Job) -> Outcome:
        if 300 <= answer.status < 400:
            there = answer.headers.get("location", "elsewhere")
            return Outcome(
                cause="agent_error",
                detail=f"{self._url} answered {answer.status} and points to {there}: write that address instead",
            )
        if answer.status in BETWEEN:
            return Outcome(cause="lost_runner", detail=self._describe(answer), clean=False)
        if answer.status >= 400:
            return Outcome(cause="agent_error", detail=self._describe(answer))
        text = answer.body.decode(errors="replace")
        try:
            value: Any = json.loads(text) if text.strip() else None
        except (ValueError, RecursionError):
            if self._reward_function is None:
                detail = f"{self._describe(answer)}: answer with JSON: a number, an object of named numbers, or null"
                return Outcome(cause="bad_reward", detail=detail)
            value = text
        return await compute_outcome(value, job, self._reward_function)

    def _describe(self, answer: Response) -> str:
        text = answer.body[:2000].decode(errors="replace").replace("\0", "\ufffd").strip()[:500]
        return f"{self._url} answered {answer.status}" + (f": {text}" if text else "")
