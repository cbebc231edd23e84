"""Where agents reach the model, and outside models that answer some of them."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from strop.config.describe import doc


class OutsideConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A provider that answers for some agents, or for some models that agents ask for; its turns are never trained."""

    url: Annotated[str, doc("where its model APIs are, with /v1: https://api.openai.com/v1")]
    model: Annotated[str, doc("the model it is asked for; default: what the agent asks for")] = ""
    key_env: Annotated[str, doc("the environment variable that holds its key")] = ""
    agents: Annotated[tuple[str, ...], doc("names of the agents it answers")] = ()
    models: Annotated[tuple[str, ...], doc("models that it also answers, whichever agent asks for them")] = ()
    dialects: Annotated[
        tuple[str, ...], doc("the model APIs it speaks, by their paths: chat/completions, messages, ...; default: all")
    ] = ()
    per_minute: Annotated[int, doc("rate limit: requests begun per minute, the others wait; 0: none"), Meta(ge=0)] = 0
    at_once: Annotated[int, doc("concurrency limit: requests at once, the others wait; 0: none"), Meta(ge=0)] = 0
    timeout: Annotated[float, doc("seconds a request may take, waiting and retries included"), Meta(gt=0)] = 600.0
    tokens: Annotated[int, doc("token budget of a run: input and output tokens; 0: no limit"), Meta(ge=0)] = 0
    money: Annotated[float, doc("cost budget of a run, in the currency of its prices; 0: no limit"), Meta(ge=0)] = 0.0
    price_in: Annotated[float, doc("price of a million input tokens"), Meta(ge=0)] = 0.0
    price_out: Annotated[float, doc("price of a million output tokens"), Meta(ge=0)] = 0.0


class GatewayConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where agents reach the model."""

    host: Annotated[str, doc("address to listen on")] = "127.0.0.1"
    port: Annotated[int, doc("port to listen on; 0 picks a free one"), Meta(ge=0, le=65535)] = 0
    hosts: Annotated[
        tuple[str, ...], doc("names that clients may call it by, beside its address and the machine's name: a proxy's")
    ] = ()
    in_flight: Annotated[
        int, doc("concurrency limit: model calls at once; more get a 429"), Meta(ge=1)
    ] = 4096
    in_flight_per_attempt: Annotated[
        int, doc("concurrency limit of one attempt"), Meta(ge=1)
    ] = 256
    deadline: Annotated[float, doc("seconds one model call may take"), Meta(gt=0)] = 1800.0
    pause_patience: Annotated[
        float, doc("timeout: seconds a model call waits while the engine is paused for a weight update"), Meta(gt=0)
    ] = 900.0
    outside: Annotated[dict[str, OutsideConfig], doc("outside models by name: url, model, key_env, agents, ...")] = {}
