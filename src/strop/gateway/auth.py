"""Who asks: the address a request is sent to, and the keys it brings.

/r/g1.0/1/agents/main/v1    rollout, attempt and agent are in the address; the key must be that attempt's
/v1                         one base URL for all rollouts: the key says which attempt it is
/proxy/rollout/g1.0/attempt/0/mode/train/openai/v1    as Agent Lightning 1.0 writes it: its attempts count from 0
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct
from starlette.types import Scope

from strop.gateway.dialects.base import ApiError
from strop.net.asgi import Header
from strop.store.server.agentlightning.routes import read_number
from strop.store.server.keys import is_same_key, read_bearer
from strop.types import Attempt

AGENT = "main"
"""The name of agents that say none."""
AGENT_HEADER = b"x-strop-agent"
TRACE = (b"trace_id", b"trace-id")
"""Headers in which services send an attempt's key; proxies drop those with a `_` in them."""


class RequestAddress(Struct, frozen=True, kw_only=True):
    """Who speaks, as the request says: `path` is what follows /v1/. Without a rollout the key must say it. `foreign` is
    an address of Agent Lightning's, where every answer has token ids."""

    rollout: str | None = None
    attempt: str = ""
    agent: str = AGENT
    path: str
    foreign: bool = False

    @classmethod
    def of(cls, path: str, headers: Sequence[Header] = ()) -> RequestAddress | None:
        """Without a rollout in the path, a header names the agent.

        >>> RequestAddress.of("/r/g1.0/1/agents/main/v1/chat/completions").path
        'chat/completions'
        >>> RequestAddress.of("/v1/models").rollout is None, RequestAddress.of("/health") is None
        (True, True)
        >>> RequestAddress.of("/proxy/rollout/g1.0/attempt/0/mode/train/openai/v1/completions").attempt
        '1'
        """
        if path.startswith("/v1/"):
            named = next((value.decode("latin-1") for name, value in headers if name == AGENT_HEADER), AGENT)
            return cls(agent=named, path=path[4:])
        parts = path.split("/", 7)
        if len(parts) == 8 and (parts[1], parts[4], parts[6]) == ("r", "agents", "v1"):
            return cls(rollout=parts[2], attempt=parts[3], agent=parts[5], path=parts[7])
        if path.startswith("/proxy/rollout/"):
            parts = path.split("/", 10)
            if len(parts) == 11 and (parts[4], parts[6], parts[8], parts[9]) == ("attempt", "mode", "openai", "v1"):
                attempt = str(read_number(parts[5]))
                return cls(rollout=parts[3], attempt=attempt, path=parts[10], foreign=True)
        return None


def read_keys(scope: Scope, *, trace_first: bool = False) -> list[bytes]:
    """What may be the attempt's key, where any of the APIs' clients put it."""
    headers = scope["headers"]
    api, trace = [read_bearer(headers)], list[bytes]()
    for name, value in headers:
        if name == b"x-api-key":
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
