"""Model calls with the server's own key, which is not an attempt's: each is a rollout of its own.

    curl $STROP_URL/v1/chat/completions -H "Authorization: Bearer $STROP_KEY" -d '{"messages": [...]}'

    key ──▶ rollout call-... begins, leased to the server ──▶ gateway, with that attempt's key ──▶ the rollout ends

A client of Agent Lightning has no other key: at its addresses (/proxy/rollout/...) the server's stands for the key of
the attempt there, which is opened by its first call if the rollout is queued.

It is sampled as the request says, and by `policy.eval` where that says nothing. A request cannot go on from another
one's (`previous_response_id`): that would be another rollout's.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time

from starlette.types import Message, Receive, Scope, Send

from strop.errors import StropError, UnknownId
from strop.gateway.api_errors import to_api_error
from strop.gateway.app import Gateway
from strop.gateway.auth import API_KEYS, TRACE, RequestAddress, read_keys
from strop.gateway.dialects.base import ApiError
from strop.gateway.session import CALLS
from strop.store.base import Store
from strop.store.server.agentlightning.routes import take
from strop.store.server.attempts import find_attempt, number_of
from strop.store.server.keys import RunKey
from strop.types import Attempt, Cause, Rollout, Task, stable_hash

LEASE = 3600.0
"""Seconds after which a call that never ended, since the server died, counts as lost."""
IN_ADDRESS = (
    "this address has the server's key in it, which opens more than a model, and addresses are written down in many "
    "places. Fix: send it as API key to /v1; an attempt's key may be in an address"
)
LOG = logging.getLogger("strop.server_key")


class ServerKeyCalls:
    """An ASGI app before a gateway, for clients with the server's key; all others go through to the gateway."""

    def __init__(self, gateway: Gateway, store: Store, key: RunKey) -> None:
        self._gateway, self._store, self._key, self._since = gateway, store, key, time.time()
        gateway.sessions.other_key = (
            "; or, for a rollout of its own, the server's key as API key: `strop serve` printed it, and the file `key` "
            "in its folder has it unless it was given one"
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not any(self._key.fits(key) for key in read_keys(scope)):
            return await self._gateway(scope, receive, send)
        address = RequestAddress.of(scope["path"])
        if address is not None and address.key is not None:
            return await self._gateway.refuse(scope, send, ApiError(IN_ADDRESS, status=403, code="run_key"))
        if address is not None and address.rollout is not None and address.foreign:
            return await self._as_client(address.rollout, int(address.attempt), scope, receive, send)
        if address is not None and address.rollout is not None:
            return await self._gateway.refuse(scope, send, await self._why_not(address.rollout, address.attempt))
        if address is not None and self._gateway.is_model_call(scope["method"], address):
            return await self._call(address.path, scope, receive, send)
        if not await self._gateway.show_models(scope, send, self._since):
            await self._gateway(scope, receive, send)

    async def _call(self, path: str, scope: Scope, receive: Receive, send: Send) -> None:
        status = 0

        async def watched(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            await send(message)

        id = f"call-{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-{secrets.token_hex(4)}"
        task = Task(id=path, split=CALLS)
        rollout = Rollout(
            id=id, group=id, member=0, task=task, mode="eval", seed=stable_hash(id), retries={}, created=time.time()
        )
        try:
            lease = await self._store.begin(rollout, "serve", seconds=LEASE)
        except StropError as error:
            return await self._gateway.refuse(scope, send, ApiError(str(error), status=503, code="store_unavailable"))
        try:
            await self._gateway(_as_attempt(scope, lease.attempt), receive, watched)
        finally:
            await asyncio.shield(self._end(id, status))

    async def _as_client(self, rollout: str, number: int, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            if scope["method"] == "POST":  # a look at the models takes nothing
                await take(self._store, rollout, number)
            attempt = await find_attempt(self._store, rollout, number)
        except UnknownId as error:
            return await self._gateway.refuse(scope, send, ApiError(str(error), status=404, code="unknown_id"))
        except StropError as error:
            return await self._gateway.refuse(scope, send, to_api_error(error))
        await self._gateway(_as_attempt(scope, attempt), receive, send)

    async def _end(self, id: str, status: int) -> None:
        cause: Cause | None = None
        detail = None
        if not status:
            cause, detail = "agent_error", "the request ended before it was answered: its client was gone, or we failed"
        elif status >= 400:
            cause = "agent_error" if status < 500 else "engine_error"
            detail = f"the request was refused with {status}: its events say why"
        await self._gateway.wait_until_idle(id, 1)
        try:
            await self._store.finish(id, 1, cause=cause, detail=detail)
        except StropError as error:
            LOG.warning("rollout %s could not be ended: %s", id, error)
        self._gateway.forget(id)

    async def _why_not(self, rollout: str, number: str) -> ApiError:
        """The server's key at an attempt's address."""
        try:
            attempt = await find_attempt(self._store, rollout, number_of(number))
        except UnknownId as error:
            return ApiError(str(error), status=404, code="unknown_id")
        if attempt.ended is not None:
            message = f"attempt {number} of rollout {rollout!r} is over. Fix: end the agent"
            return ApiError(message, status=409, code="attempt_over")
        return ApiError(
            "this is the server's key, and an attempt's address is opened by the attempt's own. Fix: use the api_key "
            "that its agent was given; or ask at /v1 with the server's key, for a rollout of its own",
            status=403,
            code="run_key",
        )


def _as_attempt(scope: Scope, attempt: Attempt) -> Scope:
    """The same request with the attempt's key in the place of the server's."""
    keys = (b"authorization", *API_KEYS, *TRACE)
    others = [(name, value) for name, value in scope["headers"] if name not in keys]
    return {**scope, "headers": [*others, (b"authorization", f"Bearer {attempt.key}".encode())]}
