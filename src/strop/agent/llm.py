"""What an agent is handed: where its model is, and how to say things about the rollout while it runs."""

from __future__ import annotations

import contextlib
import http.client
import secrets
import time
import urllib.error
import urllib.request
from collections.abc import MutableMapping
from typing import TYPE_CHECKING, Any, ClassVar
from urllib.parse import quote

import msgspec
from msgspec import Struct

from strop.config.prompts import fill_placeholders
from strop.errors import BadExclusion, BadReward, ConfigError, StropError
from strop.types import EventKind, Exclusion, Lease, Reward, Sampling, Task

if TYPE_CHECKING:
    import openai

EVENT_SECONDS = 30.0
"""Seconds an event is tried again for, while the gateway cannot be reached or cannot answer."""


class LLM(Struct, frozen=True, kw_only=True):
    """The model behind one attempt of one rollout, as any OpenAI client sees it.

        def agent(task, llm):
            answer = llm.client().chat.completions.create(model=llm.model, messages=[...])
            return float(answer.choices[0].message.content == task.data["answer"])

    `sampling` is what the policy will use; what an agent asks for is recorded, but does not win. `prompts` are the
    texts of the configuration's table `prompts`, by name, as this rollout has them. `api_key` opens this attempt and
    nothing else; `trace_id` is the same secret, to be passed on to services so that they can be told apart.
    """

    shares_loop: ClassVar[bool] = False
    """Whether the agent runs in an event loop that others run in too."""

    base_url: str
    api_key: str
    model: str
    trace_id: str
    events_url: str
    rollout: str
    task: Task
    sampling: Sampling = Sampling()
    prompts: dict[str, str] = {}

    @classmethod
    def at(cls, url: str, lease: Lease, *, model: str, sampling: Sampling | None = None) -> LLM:
        """What the agent of `lease` is handed, with the gateway at `url`. An attempt's addresses are made here only."""
        attempt = lease.attempt
        base = f"{url.rstrip('/')}/r/{attempt.rollout}/{attempt.number}"
        return cls(
            base_url=f"{base}/agents/main/v1",
            api_key=attempt.key,
            model=model,
            trace_id=attempt.key,
            events_url=f"{base}/events",
            rollout=attempt.rollout,
            task=lease.rollout.task,
            sampling=sampling or Sampling(),
            prompts=lease.rollout.prompts,
        )

    def prompt(self, name: str, **values: object) -> str:
        """The prompt called `name` with values in the place of its placeholders.

        >>> llm = LLM(base_url="", api_key="", model="", trace_id="", events_url="", rollout="g1.0", task=Task(id="t"),
        ...     prompts={"system": "Today is {date}."})
        >>> llm.prompt("system", date="Monday")
        'Today is Monday.'
        """
        if name not in self.prompts:
            there = ", ".join(self.prompts) or "none"
            raise ConfigError(f"there is no prompt {name!r} (there: {there}). Fix: set prompts.{name}.text")
        return fill_placeholders(self.prompts[name], values)

    def as_agent(self, name: str) -> LLM:
        """The same model for another agent of this rollout: what it is asked there is recorded under that name.

        >>> llm = LLM(base_url="http://127.0.0.1:1/r/g1.0/1/agents/main/v1", api_key="", model="", trace_id="",
        ...     events_url="", rollout="g1.0", task=Task(id="t"))
        >>> llm.as_agent("the writer").base_url
        'http://127.0.0.1:1/r/g1.0/1/agents/the%20writer/v1'
        """
        base, _, _ = self.base_url.rpartition("/agents/")
        return msgspec.structs.replace(self, base_url=f"{base}/agents/{quote(name, safe='')}/v1")

    def environment(self, task_file: str) -> dict[str, str]:
        """The same for agents, and programs they start, that read it from the environment."""
        return {
            "OPENAI_BASE_URL": self.base_url,
            "OPENAI_API_KEY": self.api_key,
            "ANTHROPIC_BASE_URL": self.base_url.removesuffix("/v1"),
            "ANTHROPIC_API_KEY": self.api_key,
            "STROP_MODEL": self.model,
            "STROP_TASK": task_file,
            "STROP_ROLLOUT": self.rollout,
            "STROP_EVENTS_URL": self.events_url,
            "STROP_PROMPTS": msgspec.json.encode(self.prompts).decode(),
            "AGL_OPENAI_BASE_URL": self._foreign_url(),
            "AGL_EVENT_URL": self.events_url,
            "AGL_KEY": self.api_key,
            "OPENAI_AGENTS_DISABLE_TRACING": "1",  # it would send the attempt's key to OpenAI
        }

    def _foreign_url(self) -> str:
        """The address as Agent Lightning 1.0 writes it, whose answers have token ids as there."""
        root, _, rest = self.base_url.rpartition("/r/")
        rollout, number, *_ = [*rest.split("/"), ""]
        if not root or not number.isdigit():
            return self.base_url
        mode = "train" if self.task.split == "train" else "val"
        return f"{root}/proxy/rollout/{rollout}/attempt/{int(number) - 1}/mode/{mode}/openai/v1"

    def client(self) -> openai.OpenAI:
        """A client pointed at this attempt. It shares its connections with every other one of this process."""
        from strop.agent.openai_clients import make_client

        return make_client(self.base_url, self.api_key)

    def async_client(self) -> openai.AsyncOpenAI:
        """The same for `async` agents. It shares its connections with every other one of the event loop."""
        from strop.agent.openai_clients import make_async_client

        return make_async_client(self.base_url, self.api_key)

    def reward(self, name: str, value: float, *, turn: str | None = None, agent: str | None = None) -> None:
        """Report a reward now: for the rollout, for one turn (the id of the model's answer) or for one agent."""
        try:
            given = Reward(name=name, value=float(value), turn=turn, agent=agent)
        except OverflowError:
            raise BadReward(f"reward {name!r} is too large for a float. Fix: give a smaller one") from None
        if given.wrong:
            raise BadReward(given.wrong)
        self.event("reward", msgspec.to_builtins(given))

    def exclude(self, turn: str, reason: str) -> None:
        """Leave a turn (the id of the model's answer) out of training: its tokens are counted as `excluded:<reason>`.
        The reason is one plain word."""
        given = Exclusion(turn=turn, reason=reason)
        if given.wrong:
            raise BadExclusion(f"{given.wrong}. Fix: give the id of the model's answer and one plain word")
        self.event("exclude", msgspec.to_builtins(given))

    def event(self, kind: EventKind, data: dict[str, Any]) -> None:
        """Record anything else: a message, a span, an error. A gateway that is away for a while, because it is started
        again, loses nothing: the event is sent until it is answered, and recorded once, by its id."""
        request = urllib.request.Request(
            self.events_url,
            data=msgspec.json.encode({"id": secrets.token_hex(8), "kind": kind, "data": data}),
            headers={"content-type": "application/json", "authorization": f"Bearer {self.api_key}"},
        )
        pause, deadline = 0.1, time.monotonic() + EVENT_SECONDS
        while (failure := _post(request)) is not None:
            again, why = failure
            if not again:
                raise StropError(f"the gateway refused a {kind} event {why}")
            if time.monotonic() + pause > deadline:
                raise StropError(
                    f"the gateway took no {kind} event for {EVENT_SECONDS:g} s {why}. Fix: see whether it is up"
                )
            time.sleep(pause)
            pause = min(2 * pause, 2.0)


def _post(request: urllib.request.Request) -> tuple[bool, str] | None:
    """None, or whether trying again may help, and what went wrong."""
    try:
        with urllib.request.urlopen(request, timeout=EVENT_SECONDS) as answer:
            answer.read()
        return None
    except urllib.error.HTTPError as error:
        said = b""
        with error, contextlib.suppress(OSError, http.client.HTTPException):
            said = error.read(500)
        return error.code >= 500, f"({error.code}): {said.decode(errors='replace')}"
    except (OSError, http.client.HTTPException) as error:  # urllib's own errors are OSErrors
        return True, f"({error})"


def bypass_proxy(host: str, environment: MutableMapping[str, str]) -> None:
    """The gateway is reached directly, whatever proxy agents use for the rest. Clients read this when they are made."""
    for name in ("NO_PROXY", "no_proxy"):
        hosts = [part for part in environment.get(name, "").split(",") if part]
        environment[name] = ",".join(hosts if host in hosts or not host else [*hosts, host])


def preload() -> None:
    """Make ahead what every worker needs, so that workers forked afterwards share it."""
    from strop.agent.certificates import defer_certificates
    from strop.agent.openai_clients import warm_up

    defer_certificates()
    warm_up()
