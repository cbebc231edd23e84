"""Who asks: the address a request is sent to, and the keys it brings.

/r/g1.0/1/agents/main/v1    rollout, attempt and agent are in the address; the key must be that attempt's
/v1                         one base URL for all rollouts: the key says which attempt it is
/proxy/rollout/g1.0/attempt/0/mode/train/openai/v1    as Agent Lightning 1.0 writes it: its attempts count from 0
/k/<key>/v1                 the key is in the address, for agents that send none or one of their own

In the place of /v1 each may have Azure's /openai, /openai/v1 or /openai/deployments/<model>.
An address is shown as `hide_key` writes it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from msgspec import Struct
from starlette.types import Scope

from strop.gateway.dialects.base import ApiError
from strop.gateway.dialects.registry import PATHS
from strop.net.asgi import Header
from strop.store.server.agentlightning.routes import read_number
from strop.store.server.keys import KEY_IN_PATH, is_same_key, read_bearer
from strop.types import Attempt

AGENT = "main"
"""The name of agents that say none."""
AGENT_HEADER = b"x-strop-agent"
API_KEYS = (b"x-api-key", b"api-key")
"""Headers in which Anthropic's and Azure's clients send a key."""
TRACE = (b"trace_id", b"trace-id")
"""Headers in which services send an attempt's key; proxies drop those with a `_` in them."""


class RequestAddress(Struct, frozen=True, kw_only=True):
    """Who speaks, as the request says: `path` is what follows /v1/. Without a rollout the key must say it; `key` is the
    one in the address. `model` is asked for by the address, where the body asks for none. `foreign` is an address of
    Agent Lightning's, where every answer has token ids."""

    rollout: str | None = None
    attempt: str = ""
    agent: str = AGENT
    key: str | None = None
    model: str = ""
    path: str
    foreign: bool = False

    @classmethod
    def of(cls, path: str, headers: Sequence[Header] = ()) -> RequestAddress | None:
        """Without a rollout in the path, a header names the agent.

        >>> RequestAddress.of("/r/g1.0/1/agents/main/v1/chat/completions").path
        'chat/completions'
        >>> RequestAddress.of("/v1/models").rollout is None, RequestAddress.of("/health") is None
        (True, True)
        >>> RequestAddress.of("/k/the-key/v1/messages").key
        'the-key'
        >>> RequestAddress.of("/proxy/rollout/g1.0/attempt/0/mode/train/openai/v1/completions").attempt
        '1'
        """
        if foreign := _FOREIGN.fullmatch(path):
            rollout, number, path = foreign.groups()
            return cls(rollout=rollout, attempt=str(read_number(number)), path=path, foreign=True)
        found = _ADDRESS.fullmatch(path)
        if found is None:
            key = KEY_IN_PATH.match(path)
            return None if key is None else cls(key=key[1], path="")
        rollout, attempt, agent, key, path = found.groups()
        model = ""
        if deployed := _DEPLOYED.fullmatch(path):
            model, path = deployed.groups()
        if rollout is not None:
            return cls(rollout=rollout, attempt=attempt, agent=agent, model=model, path=path)
        named = next((value.decode("latin-1") for name, value in headers if name == AGENT_HEADER), AGENT)
        return cls(agent=named, key=key, model=model, path=path)

    @property
    def is_attempts(self) -> bool:
        """Whether it names an attempt itself."""
        return self.rollout is not None or self.key is not None


_FOREIGN = re.compile("/proxy/rollout/([^/]*)/attempt/([^/]*)/mode/[^/]*/openai/v1/(.*)", re.DOTALL)
_ADDRESS = re.compile(
    f"(?:/r/([^/]*)/([^/]*)/agents/([^/]*)|{KEY_IN_PATH.pattern})?/(?:v1|openai(?:/v1)?)/(.*)", re.DOTALL
)
_DEPLOYED = re.compile(f"deployments/(.+?)/({'|'.join(map(re.escape, PATHS))})", re.DOTALL)


def read_keys(scope: Scope, *, trace_first: bool = False) -> list[bytes]:
    """What may be the attempt's key, where any of the APIs' clients put it. One in the address is the only one: what
    an agent sends beside it is for somebody else."""
    address = RequestAddress.of(scope["path"])
    if address is not None and address.key is not None:
        return [address.key.encode()]
    headers = scope["headers"]
    api, trace = [read_bearer(headers)], list[bytes]()
    for name, value in headers:
        if name in API_KEYS:
            api.append(value)
        elif name in TRACE:
            trace.append(value)
    return [key for key in (trace + api if trace_first else api + trace) if key]


def is_opened_by(attempt: Attempt, keys: Sequence[bytes]) -> bool:
    secret = attempt.key.encode()
    return any(is_same_key(key, secret) for key in keys)


def unauthorized(
    message: str = "this key does not open this attempt. Fix: use the api_key the agent was given, with the base_url "
    "it was given",
) -> ApiError:
    return ApiError(message, status=401, code="invalid_api_key")
