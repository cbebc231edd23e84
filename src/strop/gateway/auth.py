"""Who asks: the address a request is sent to, and the keys it brings.

/r/g1.0/1/agents/main/v1    rollout, attempt and agent are in the address; the key must be that attempt's
/v1                         one base URL for all rollouts: the key says which attempt it is
/k/<key>/v1                 the key is in the address, for agents that send none or one of their own

An address with a key in it is shown by `hide_key` only.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from msgspec import Struct
from starlette.types import Scope

from strop.gateway.dialects.base import ApiError
from strop.net.asgi import Header
from strop.store.server.keys import is_same_key, read_bearer
from strop.types import Attempt

AGENT = "main"
"""The name of agents that say none."""
AGENT_HEADER = b"x-strop-agent"
TRACE = (b"trace_id", b"trace-id")
"""Headers in which services send an attempt's key; proxies drop those with a `_` in them."""


class RequestAddress(Struct, frozen=True, kw_only=True):
    """Who speaks, as the request says: `path` is what follows /v1/. Without a rollout the key must say it; `key` is the
    one in the address."""

    rollout: str | None = None
    attempt: str = ""
    agent: str = AGENT
    key: str | None = None
    path: str

    @classmethod
    def of(cls, path: str, headers: Sequence[Header] = ()) -> RequestAddress | None:
        """Without a rollout in the path, a header names the agent.

        >>> RequestAddress.of("/r/g1.0/1/agents/main/v1/chat/completions").path
        'chat/completions'
        >>> RequestAddress.of("/v1/models").rollout is None, RequestAddress.of("/health") is None
        (True, True)
        >>> RequestAddress.of("/k/the-key/v1/messages").key
        'the-key'
        """
        if path.startswith("/r/"):
            parts = path.split("/", 7)
            if len(parts) == 8 and (parts[4], parts[6]) == ("agents", "v1"):
                return cls(rollout=parts[2], attempt=parts[3], agent=parts[5], path=parts[7])
            return None
        key, rest = None, path
        if path.startswith("/k/"):
            key, slash, rest = path[3:].partition("/")
            rest = slash + rest
        if not rest.startswith("/v1/") and key is None:
            return None
        named = next((value.decode("latin-1") for name, value in headers if name == AGENT_HEADER), AGENT)
        return cls(agent=named, key=key, path=rest[4:] if rest.startswith("/v1/") else "")

    @property
    def is_attempts(self) -> bool:
        """Whether it names an attempt itself."""
        return self.rollout is not None or self.key is not None


def hide_key(path: str) -> str:
    """A path as it may be shown.

    >>> hide_key("/k/the-key/v1/messages"), hide_key("/v1/messages")
    ('/k/.../v1/messages', '/v1/messages')
    """
    return _KEY.sub("/k/...", path)


_KEY = re.compile("^/k/[^/]*")


def read_keys(scope: Scope, *, trace_first: bool = False) -> list[bytes]:
    """What may be the attempt's key, where any of the APIs' clients put it. One in the address is the only one: what
    an agent sends beside it is for somebody else."""
    address = RequestAddress.of(scope["path"])
    if address is not None and address.key is not None:
        return [address.key.encode()]
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
