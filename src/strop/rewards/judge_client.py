"""Asking a model for a judgement, over any endpoint that speaks OpenAI's chat completions.

    prompt ──▶ said before? ──▶ call (again after 429, 5xx, a lost connection, no JSON) ──▶ read ──▶ Verdict
                                  ▲                                                          │ cannot be read, the first
                                  └───────────────── with a reminder ◀───────────────────────┘ time

A judge that is busy, mute or out of budget is a verdict of None with the reason. One that cannot be used at all (a
wrong key, no such model) is an error: nothing would ever come of it.

Left out: a call that is under way is not called off when an async caller is cancelled; it ends by its deadline.
"""

from __future__ import annotations

import json
import os
import random
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from strop.errors import StropError
from strop.rewards.judge_cache import JudgeCache, make_key
from strop.rewards.verdict import Verdict

if TYPE_CHECKING:
    import openai

Reads = Callable[[str], float | None]
"""What turns a judge's words into a value from 0 to 1, or None if they are not what was asked for."""

PAUSES = (0.5, 20.0)
"""Seconds before the first call that is made again, twice as long each time, and at most."""

_FIELDS = re.compile(r"\{(question|answer|golden|first|second)\}")


class Unanswered(Exception):
    """Why a judge said nothing."""


class _Garbled(Exception):
    """What came is not an answer of a model: a web page, or JSON of another shape."""


class Asking:
    """A model that is asked for judgements.

    `key_env` names the environment variable that holds the key; inside an agent's process $OPENAI_API_KEY is the key of
    the trained model's gateway, so give the judge's another name. `cache` is a file that remembers every answer, for
    all processes; `calls` is the most that are ever made, counted in that file where there is one. `deadline` is how
    many seconds one judgement may take, `at_once` how many run at once for async callers and groups, and `options` go
    along with every call. `counts` says what came of it all in this process.
    """

    def __init__(
        self,
        model: str,
        *,
        base_url: str,
        key_env: str = "",
        prompt: str,
        reads: Reads,
        reminder: str,
        cache: str | Path | None = None,
        calls: int | None = None,
        deadline: float = 120.0,
        at_once: int = 16,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        self.model = model
        self.counts: Counter[str] = Counter()
        self._base_url = base_url
        self._key_env = key_env
        self._prompt = prompt
        self._reads = reads
        self._reminder = reminder
        self._answers = JudgeCache(cache)
        self._calls = calls
        self._deadline = deadline
        self._at_once = at_once
        self._options = dict({"temperature": 0} if options is None else options)
        self._lock = threading.Lock()
        self._made: dict[int, openai.OpenAI] = {}
        self._threads: dict[int, ThreadPoolExecutor] = {}

    def threads(self) -> ThreadPoolExecutor:
        """Where judgements are made for async callers and groups, `at_once` at a time."""
        with self._lock:
            if (threads := self._threads.get(os.getpid())) is None:
                threads = ThreadPoolExecutor(self._at_once, thread_name_prefix="strop-judge")
                self._threads = {os.getpid(): threads}
            return threads

    def compute_verdict(self, **fields: Any) -> Verdict:
        """What the model says about these fields of the prompt."""
        filled = _FIELDS.sub(lambda found: str(fields.get(found[1], "")), self._prompt)
        filled = filled.encode(errors="replace").decode()  # models write halves of letters, which cannot be sent
        messages = [{"role": "user", "content": filled}]
        key = make_key(self._base_url.rstrip("/"), self.model, messages, self._options)
        said = self._answers.get(key)
        if said is not None and (value := self._reads(said)) is not None:
            self._count("cached")
            return Verdict(value, said)
        deadline = time.monotonic() + self._deadline
        try:
            for _ in range(2):
                said = self._complete(messages, deadline)
                if (value := self._reads(said)) is not None:
                    self._answers.put(key, said)
                    return Verdict(value, said)
                self._count("unreadable")
                messages += [{"role": "assistant", "content": said}, {"role": "user", "content": self._reminder}]
        except Unanswered as why:
            self._count("unanswered")
            return Verdict(None, str(why))
        return Verdict(None, f"the judge's answer cannot be read: {said!r:.300}")

    def _complete(self, messages: Sequence[Any], deadline: float) -> str:
        """Its answer, however often it has to be asked."""
        import openai

        pause, longest = PAUSES
        trouble: Exception | None = None
        again: tuple[type[Exception], ...] = (
            openai.RateLimitError,
            openai.InternalServerError,
            openai.APIConnectionError,
            json.JSONDecodeError,  # and what else may come in place of an answer
            UnicodeDecodeError,
            RecursionError,
            _Garbled,
        )
        while True:
            if (left := deadline - time.monotonic()) <= 0:
                raise Unanswered(f"the judge gave no answer within {self._deadline:g} s: {trouble or 'no time left'}")
            if not self._answers.spend(self._calls):
                raise Unanswered(f"the judge's budget of {self._calls} calls is spent")
            self._count("calls")
            try:
                client: Any = self._client().with_options(timeout=left)
                answer = client.chat.completions.create(model=self.model, messages=messages, **self._options)
                return _content(answer)
            except again as error:
                self._count("failed")
                if trouble is None or not isinstance(error, openai.APITimeoutError):
                    trouble = error  # the last call is cut short by the deadline: what went wrong before says more
                wait = max(_asked_to_wait(error), pause * random.uniform(0.5, 1.0))
                if time.monotonic() + wait > deadline:
                    raise Unanswered(f"the judge gave no answer within {self._deadline:g} s: {trouble}") from None
                time.sleep(wait)
                pause = min(2 * pause, longest)
            except openai.APIStatusError as error:
                if error.status_code not in (401, 403, 404):  # it is about this prompt: too long, or not allowed
                    raise Unanswered(f"the judge refused the prompt: {error}") from None
                raise StropError(
                    f"the judge {self.model} at {self._base_url} cannot be used ({error}). Fix: check its base_url, "
                    "its model and the variable that holds its key"
                ) from None

    def _client(self) -> openai.OpenAI:
        """One for each process: connections must not be shared with a child that was forked."""
        with self._lock:
            if (client := self._made.get(os.getpid())) is None:
                import openai

                key = os.environ.get(self._key_env, "") if self._key_env else "-"
                if not key:
                    raise StropError(
                        f"the judge's key is missing. Fix: set ${self._key_env}, or give another key_env (one that "
                        "gateway.outside names is kept from agents, and from judges beside them)"
                    )
                client = openai.OpenAI(base_url=self._base_url, api_key=key, max_retries=0)
                self._made = {os.getpid(): client}
            return client

    def _count(self, what: str) -> None:
        with self._lock:
            self.counts[what] += 1


def _content(answer: Any) -> str:
    """What it says, as text that can be stored and sent."""
    try:
        said = answer.choices[0].message.content if answer.choices else ""
    except (AttributeError, TypeError, LookupError):
        said = answer
    if said is not None and (said is answer or not isinstance(said, str)):
        raise _Garbled(f"what it answered is not a chat completion ({answer!r:.200}). Fix: check its base_url")
    return (said or "").encode(errors="replace").decode()


def _asked_to_wait(error: Exception) -> float:
    """The seconds that a busy server asks for; minutes of it are not waited for."""
    response = getattr(error, "response", None)
    try:
        return min(60.0, max(0.0, float(response.headers.get("retry-after", 0)))) if response is not None else 0.0
    except ValueError:  # a date
        return 0.0
