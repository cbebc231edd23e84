"""Where agents reach the model, and outside models that answer some of them."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

from strop.config.describe import doc


class OutsideConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A provider that answers for some agents, or for some models that agents ask for; its turns are never trained."""

    url: Annotated[str, doc("where its model APIs are, with /v1: https://api.openai.com/v1")]
    model: Annotated[str, doc("the model that is requested; default: the one that the agent requests")] = ""
    key_env: Annotated[str, doc("the environment variable that holds its key")] = ""
    agents: Annotated[tuple[str, ...], doc("names or patterns (villager-*) of the agents it answers")] = ()
    probability: Annotated[
        float,
        doc("how likely it answers for each of its agents in a rollout, as for the rest of its group; 1: always"),
        Meta(gt=0, le=1),
    ] = 1.0
    models: Annotated[tuple[str, ...], doc("it also answers requests for one of these models")] = ()
    dialects: Annotated[
        tuple[str, ...], doc("the model APIs it speaks, by their paths: chat/completions, messages, ...; default: all")
    ] = ()
    requests_per_minute: Annotated[
        int, doc("rate limit: requests begun per minute, more wait; 0: no limit"), Meta(ge=0)
    ] = 0
    max_concurrency: Annotated[int, doc("concurrent requests at most, more wait; 0: no limit"), Meta(ge=0)] = 0
    timeout: Annotated[float, doc("seconds a request may take, waiting and retries included"), Meta(gt=0)] = 600.0
    max_tokens: Annotated[int, doc("token budget of a run: prompt and completion tokens; 0: no limit"), Meta(ge=0)] = 0
    max_cost: Annotated[float, doc("cost budget of a run, in the currency of its prices; 0: no limit"), Meta(ge=0)] = (
        0.0
    )
    price_in: Annotated[float, doc("price of a million prompt tokens"), Meta(ge=0)] = 0.0
    price_out: Annotated[float, doc("price of a million completion tokens"), Meta(ge=0)] = 0.0


class GatewayConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where agents reach the model."""

    host: Annotated[str, doc("address to listen on")] = "127.0.0.1"
    port: Annotated[int, doc("port to listen on; 0 picks a free one"), Meta(ge=0, le=65535)] = 0
    hosts: Annotated[
        tuple[str, ...],
        doc("host names that requests may carry beside its address and the machine's name: those of a proxy"),
    ] = ()
    workers: Annotated[
        Annotated[int, Meta(ge=1)] | Literal["auto"],
        doc("gateway processes; auto: one for every four cores, four at most; 1: within the run's own process"),
    ] = "auto"
    in_flight: Annotated[int, doc("concurrency limit: model calls at once; more get a 429"), Meta(ge=1)] = 4096
    in_flight_per_attempt: Annotated[int, doc("concurrency limit of one attempt"), Meta(ge=1)] = 256
    deadline: Annotated[float, doc("seconds one model call may take"), Meta(gt=0)] = 1800.0
    pause_timeout: Annotated[
        float, doc("seconds a model call waits while the engine is paused for new weights"), Meta(gt=0)
    ] = 900.0
    outside: Annotated[dict[str, OutsideConfig], doc("outside models by name: url, model, key_env, agents, ...")] = {}
