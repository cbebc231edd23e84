"""What an agent is handed: where its model is, and how to say things about the rollout while it runs."""

from __future__ import annotations

import ssl
import urllib.error
import urllib.request
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import Struct

from strop.errors import BadReward, StropError
from strop.types import EventKind, Reward, Sampling, Task

if TYPE_CHECKING:
    import openai


class LLM(Struct, frozen=True, kw_only=True):
    """The model behind one attempt of one rollout, as any OpenAI client sees it.

        def agent(task, llm):
            answer = llm.client().chat.completions.create(model=llm.model, messages=[...])
            return float(answer.choices[0].message.content == task.data["answer"])

    `sampling` is what the policy will use; what an agent asks for is recorded, but does not win. `prompts` will hold
    prompts that are being improved, by name; none are yet. `api_key` opens this attempt and nothing else; `trace_id` is
    the same secret, to be passed on to services so that they can be told apart.
    """

    base_url: str
    api_key: str
    model: str
    trace_id: str
    events_url: str
    rollout: str
    task: Task
    sampling: Sampling = Sampling()
    prompts: dict[str, str] = {}

    def client(self) -> openai.OpenAI:
        """A client pointed at this attempt. It shares its connections with every other one of this process."""
        shared = _shared_client()
        if shared.is_closed():  # an agent closed the one it was given
            _shared_client.cache_clear()
            shared = _shared_client()
        return shared.with_options(base_url=self.base_url, api_key=self.api_key)

    def async_client(self) -> openai.AsyncOpenAI:
        """The same for `async` agents. Its connections belong to the event loop it is first used in, so keep it."""
        import openai

        http = openai.DefaultAsyncHttpxClient(verify=_ssl())
        return openai.AsyncOpenAI(base_url=self.base_url, api_key=self.api_key, http_client=http)

    def reward(self, name: str, value: float, *, turn: str | None = None, agent: str | None = None) -> None:
        """Report a reward now: for the rollout, for one turn (the id of the model's answer) or for one agent."""
        given = Reward(name=name, value=float(value), turn=turn, agent=agent)
        if given.wrong:
            raise BadReward(given.wrong)
        self.event("reward", msgspec.to_builtins(given))

    def event(self, kind: EventKind, data: dict[str, Any]) -> None:
        """Record anything else: a message, a span, an error."""
        request = urllib.request.Request(
            self.events_url,
            data=msgspec.json.encode({"kind": kind, "data": data}),
            headers={"content-type": "application/json", "authorization": f"Bearer {self.api_key}"},
        )
        try:
            with urllib.request.urlopen(request, timeout=30) as answer:
                answer.read()
        except urllib.error.HTTPError as error:
            with error:
                said = error.read(500).decode(errors="replace")
            raise StropError(f"the gateway refused a {kind} event ({error.code}): {said}") from None


@lru_cache(maxsize=1)
def _ssl() -> ssl.SSLContext:
    """Reading the certificates takes tens of milliseconds: once per process is enough."""
    return ssl.create_default_context()


@lru_cache(maxsize=1)
def _shared_client() -> openai.OpenAI:
    import openai

    # The real address and key are put in by with_options.
    return openai.OpenAI(
        base_url="http://strop.invalid", api_key="-", http_client=openai.DefaultHttpxClient(verify=_ssl())
    )


def preload() -> None:
    """Make ahead what every worker needs, so that workers forked afterwards share it."""
    _ = _shared_client().chat.completions  # its modules are imported when they are first asked for
