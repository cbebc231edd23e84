"""What agents of Agent Lightning are handed: where their model is, prompt templates, and which rollout it is."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, Literal, TypeVar
from urllib.parse import quote

import msgspec
from msgspec import Struct

from strop.agent.llm import LLM
from strop.errors import ConfigError

T = TypeVar("T")
Dataset = Sequence[T]


class ModelEndpoint(Struct, kw_only=True):
    """Agent Lightning's `LLM`: an OpenAI client's base URL, a model's name and what to ask for."""

    endpoint: str
    model: str
    api_key: str | None = None
    sampling_parameters: dict[str, Any] = {}
    resource_type: Literal["llm"] = "llm"

    def as_agent(self, name: str) -> ModelEndpoint:
        """The same for another agent of the rollout, which is known by that name.

        >>> ModelEndpoint(endpoint="http://127.0.0.1:1/r/g/1/agents/main/v1", model="m").as_agent("write").endpoint
        'http://127.0.0.1:1/r/g/1/agents/write/v1'
        """
        base, _, _ = self.endpoint.rpartition("/agents/")
        return msgspec.structs.replace(self, endpoint=f"{base}/agents/{quote(name, safe='')}/v1")

    def get_base_url(self, rollout_id: str | None = None, attempt_id: str | None = None) -> str:
        """The same for every rollout that asks: the endpoint is that rollout's own."""
        return self.endpoint


class PromptTemplate(Struct, kw_only=True):
    """A text with placeholders.

    >>> PromptTemplate(template="Find a room on {date}.", engine="f-string").format(date="Monday")
    'Find a room on Monday.'
    """

    template: str
    engine: Literal["f-string", "jinja", "poml"] = "f-string"
    resource_type: Literal["prompt_template"] = "prompt_template"

    def format(self, **values: Any) -> str:
        if self.engine != "f-string":
            raise ConfigError(
                f"a template of {self.engine} is not filled in here. Fix: write it with engine='f-string'"
            )
        return self.template.format(**values)


ResourceUnion = ModelEndpoint | PromptTemplate
NamedResources = dict[str, ResourceUnion]


class AttemptName(Struct, kw_only=True):
    """Which try of a rollout it is."""

    attempt_id: str
    rollout_id: str
    sequence_id: int


class AttemptedRollout(Struct, kw_only=True):
    """A rollout as its agent sees it; `mode` is train or val."""

    rollout_id: str
    input: Any
    mode: Literal["train", "val"]
    attempt: AttemptName


def read_rollout(llm: LLM) -> AttemptedRollout:
    """The rollout whose model that is."""
    number = (llm.base_url.rpartition("/agents/")[0].rpartition("/")[2]) or "1"
    return AttemptedRollout(
        rollout_id=llm.rollout,
        input=llm.task.data,
        mode="train" if llm.task.split == "train" else "val",
        attempt=AttemptName(
            attempt_id=number, rollout_id=llm.rollout, sequence_id=int(number) if number.isdigit() else 1
        ),
    )


def make_resources(llm: LLM) -> NamedResources:
    """The model as `main_llm`, and the run's prompts by their names."""
    sampling = msgspec.to_builtins(llm.sampling)
    wanted = {name: sampling[name] for name in ("temperature", "top_p", "max_tokens")}
    model = ModelEndpoint(endpoint=llm.base_url, model=llm.model, api_key=llm.api_key, sampling_parameters=wanted)
    prompts = {name: PromptTemplate(template=text) for name, text in llm.prompts.items()}
    return {"main_llm": model, **prompts}


def setup_logging(level: str | int = "INFO", **settings: Any) -> None:
    """Python's own logging, at that level; its other settings have no meaning here."""
    logging.basicConfig(level=level)
