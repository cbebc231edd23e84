"""The optimiser model: any endpoint that speaks OpenAI's chat completions, asked within a budget.

    question ─▶ answered before? ─▶ affordable? ─▶ reserved on disk ─▶ sent ─▶ settled by what it came to
                                        ▲                               │ 429, 5xx, lost
                                        └────────── after a pause ◀─────┘

What is reserved is the most that a call may cost: no tokenizer makes more tokens of a text than it has bytes, and the
answer is capped. So a budget is never exceeded, whatever is in flight, unless a provider counts otherwise.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import random
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from strop.algorithms import PromptOptimizer
from strop.config import Config, OutsideConfig
from strop.errors import ConfigError, EngineError
from strop.gateway.outside import Pace
from strop.net.client import retry_after
from strop.run.prompts.ledger import CallLedger, CallRecord
from strop.types import stable_hash

PAUSES = (1.0, 20.0)
"""Seconds before the first call that is made again, twice as long each time, and at most."""
OVERHEAD = 64
"""Tokens that a chat template may add to a question."""
CALLS = "calls.jsonl"
AGAIN = (408, 409, 425, 429)
"""What is asked again after a pause."""
OURS = ("model", "messages", "n", "stream", "stream_options")
"""Fields of a request that options may not set: what is reserved would not be what is spent."""


class BudgetSpent(Exception):
    """The next call does not fit into the budget. Says which."""


class NothingLeft(Exception):
    """There is no next question. Says why."""


class _Garbled(Exception):
    """What came is not an answer of a model."""


class OptimizerModel:
    """Answers questions, each once: what the ledger has is not asked again."""

    def __init__(self, config: Config, optimizer: PromptOptimizer, folder: Path, stop: asyncio.Event) -> None:
        import openai

        self._stop = stop
        self._settings, self._seed = optimizer, config.seed if config.engine.deterministic else None
        self._outside = find_provider(config, optimizer)
        key = os.environ[self._outside.key_env] if self._outside.key_env else "-"  # the gateway has looked for it
        self._client: Any = openai.AsyncOpenAI(
            base_url=self._outside.url, api_key=key, max_retries=0, timeout=self._outside.timeout
        )
        self._pace = Pace(self._outside.requests_per_minute, self._outside.max_concurrency)
        self.ledger = CallLedger(folder / CALLS)
        self._under_way, self._settled = 0, asyncio.Event()
        self._cap = "max_tokens"
        self._calls = 0

    async def close(self) -> None:
        self.ledger.close()
        await self._client.close()

    async def ask(self, questions: Sequence[str]) -> list[str]:
        """The answers, all asked at once. Raises `BudgetSpent` once those that could be afforded are recorded."""
        first, self._calls = self._calls, self._calls + len(questions)
        asked = [self._answer(first + n, question) for n, question in enumerate(questions)]
        answers = await asyncio.gather(*asked, return_exceptions=True)
        for error in sorted((a for a in answers if isinstance(a, BaseException)), key=_is_budget):
            raise error
        return [str(answer) for answer in answers]

    async def _answer(self, call: int, question: str) -> str:
        # Options, prices and limits may change when a run is resumed; what was asked stays what was asked.
        key = hashlib.blake2b(f"{self._outside.model}\n{question}".encode(errors="replace"), digest_size=16).hexdigest()
        if (known := self.ledger.find(call, key)) is not None:
            return known
        asked = len(question.encode()) + OVERHEAD
        tokens, cost = asked + self._answer_tokens, self._cost(asked, self._answer_tokens)
        pause, deadline = PAUSES[0], time.monotonic() + self._settings.patience
        while True:
            async with self._pace.one():
                record = CallRecord(call=call, attempt=0, tokens=tokens, cost=cost)
                await self._reserve(record, key)
                wait = await self._send_reserved(self._request(call, question), record)
            if wait is None:
                assert record.answer is not None
                return record.answer
            wait = max(wait, pause * random.uniform(0.5, 1.0))
            if time.monotonic() + wait > deadline:
                raise EngineError(
                    f"the optimiser model at {self._outside.url} gave no answer for {self._settings.patience:g} s: "
                    f"{record.error.rstrip('.')}. Fix: see whether it is up, then resume: what was answered is kept"
                )
            with suppress(TimeoutError):
                await asyncio.wait_for(self._stop.wait(), wait)
                raise NothingLeft("the run was told to stop")
            pause = min(2 * pause, PAUSES[1])

    async def _reserve(self, record: CallRecord, key: str) -> None:
        """Returns once a call fits into the budget and is on disk. Those under way may come to less than was reserved
        for them. Raises `BudgetSpent` if it does not fit even then."""
        while why := self._explain_beyond(record.tokens, record.cost):
            if not self._under_way:
                raise BudgetSpent(why)
            self._settled.clear()
            await self._settled.wait()
        record.attempt = self.ledger.reserve(record.call, key, tokens=record.tokens, cost=record.cost, time=time.time())

    async def _send_reserved(self, request: dict[str, Any], record: CallRecord) -> float | None:
        self._under_way += 1
        try:
            wait = await self._send(request, record)
            record.time = time.time()
            self.ledger.settle(record)
            return wait
        finally:
            self._under_way -= 1
            self._settled.set()

    async def _send(self, request: dict[str, Any], record: CallRecord) -> float | None:
        """Fill in what came of a call. None: it was answered; otherwise the least seconds to wait before the next."""
        import openai

        try:
            answer = await self._client.chat.completions.create(**request)
            record.answer = _read_answer(answer)
            self._count(answer, record)
            return None
        except openai.APIStatusError as error:
            record.error = f"{error.status_code}: {str(error)[:300]}"
            record.tokens, record.cost = 0, 0.0  # nobody bills what was not answered
            return self._take_refusal(error, request, record)
        except (
            openai.APIConnectionError,
            openai.APIResponseValidationError,
            ValueError,
            RecursionError,
            _Garbled,
        ) as error:
            record.error = f"{type(error).__name__}: {error}"[:300]  # what was sent may have been answered, and billed
            return 0.0

    def _take_refusal(self, error: Any, request: dict[str, Any], record: CallRecord) -> float | None:
        """What is done about an answer of 4xx or 5xx: seconds to wait, or None where the question stays unanswered.
        Raises `EngineError` where no question would be answered."""
        if error.status_code in AGAIN or error.status_code >= 500:
            return retry_after(error.response.headers.get("retry-after", ""))
        capped = "max_tokens" in request and "max_tokens" not in self._settings.options
        if capped and "max_completion_tokens" in str(error):  # as newer models call it; others may be under way
            self._cap = "max_completion_tokens"
            return 0.0
        if error.status_code in (401, 402, 403, 404) or error.status_code < 400 or not self.ledger.answered:
            self.ledger.settle(record)
            name = self._settings.optimizer
            raise EngineError(
                f"the optimiser model {self._outside.model} at {self._outside.url} cannot be used ({error}). Fix: "
                f"check url and key_env of gateway.outside.{name} and algorithm.settings.options, and resume with "
                "others by --set; for another model begin a new run"
            ) from None
        record.answer = ""  # it is about this question: too long, or not allowed
        return None

    def _request(self, call: int, question: str) -> dict[str, Any]:
        options = dict(self._settings.options)
        cap = {} if "max_completion_tokens" in options else {self._cap: self._settings.answer_tokens}
        seed = {} if self._seed is None else {"seed": stable_hash(self._seed, "optimizer", call) % 2**31}
        text = question.encode(errors="replace").decode()  # models write halves of letters, which cannot be sent
        messages = [{"role": "user", "content": text}]
        return {"model": self._outside.model, "messages": messages, **cap, **seed, "extra_body": options}

    @property
    def _answer_tokens(self) -> int:
        options = self._settings.options
        return int(options.get("max_completion_tokens") or options.get("max_tokens") or self._settings.answer_tokens)

    def _cost(self, asked: int, answered: int) -> float:
        return (asked * self._outside.price_in + answered * self._outside.price_out) / 1e6

    def _explain_beyond(self, tokens: int, cost: float) -> str:
        """Which budget a call does not fit into, if there is one."""
        spent, limits = self.ledger.spent, self._settings
        if limits.max_calls and spent.calls + 1 > limits.max_calls:
            return f"algorithm.settings.max_calls: {spent.calls} of {limits.max_calls} calls are spent"
        if limits.max_tokens and spent.tokens + tokens > limits.max_tokens:
            return (
                f"algorithm.settings.max_tokens: {spent.tokens:,} of {limits.max_tokens:,} tokens are spent, and the "
                f"next call may take {tokens:,}"
            )
        if limits.max_cost and spent.cost + cost > limits.max_cost:
            return (
                f"algorithm.settings.max_cost: {spent.cost:.4g} of {limits.max_cost:.4g} are spent, and the next call "
                f"may cost {cost:.4g}"
            )
        return ""

    def _count(self, answer: Any, record: CallRecord) -> None:
        """What an answer came to, as the provider counts; where it does not, what was reserved."""
        usage = getattr(answer, "usage", None)
        asked, answered = (getattr(usage, name, None) for name in ("prompt_tokens", "completion_tokens"))
        if isinstance(asked, int) and isinstance(answered, int) and min(asked, answered) >= 0 and asked + answered > 0:
            record.tokens, record.cost = asked + answered, self._cost(asked, answered)


def find_provider(config: Config, optimizer: PromptOptimizer) -> OutsideConfig:
    """The provider of the optimiser model. Raises `ConfigError`."""
    name, there = optimizer.optimizer, config.gateway.outside
    if name not in there:
        known = f" (there: {', '.join(there)})" if there else ""
        raise ConfigError(
            f"algorithm.settings.optimizer is {name!r}, which gateway.outside does not have{known}. Fix: set "
            f"gateway.outside.{name}.url and gateway.outside.{name}.model"
        )
    outside, options = there[name], optimizer.options
    if ours := [field for field in OURS if field in options]:
        raise ConfigError(f"algorithm.settings.options may not set {ours[0]!r}. Fix: leave it out")
    for cap in ("max_tokens", "max_completion_tokens"):
        if not isinstance(options.get(cap, 1), int):
            raise ConfigError(f"algorithm.settings.options.{cap} is not a whole number. Fix: set answer_tokens instead")
    if not outside.model:
        raise ConfigError(f"gateway.outside.{name}.model is missing: which model writes prompts? Fix: set it")
    if optimizer.max_cost and not (outside.price_in or outside.price_out):
        raise ConfigError(
            f"algorithm.settings.max_cost is set, and gateway.outside.{name} has no prices. Fix: set price_in and "
            "price_out"
        )
    return outside


def _read_answer(answer: Any) -> str:
    try:
        said = answer.choices[0].message.content
    except (AttributeError, TypeError, LookupError):
        raise _Garbled(f"not a chat completion: {answer!r:.200}") from None
    if said is not None and not isinstance(said, str):
        raise _Garbled(f"not a chat completion: {answer!r:.200}")
    return (said or "").encode(errors="replace").decode()


def _is_budget(error: BaseException) -> bool:
    return isinstance(error, BudgetSpent)
