"""Calls with the server's own key end as what they came to."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from strop.gateway.app import Gateway
from strop.gateway.server_key import ServerKeyCalls
from strop.store.server.keys import AttemptKeys, RunKey
from strop.store.sqlite import SqliteStore

KEY = "the-servers-own"
SCOPE = {
    "type": "http",
    "method": "POST",
    "path": "/v1/chat/completions",
    "headers": [(b"authorization", b"Bearer " + KEY.encode())],
}


class Breaks:
    """As much of a gateway as is asked here: it answers with a status, or breaks before it can."""

    def __init__(self, status: int) -> None:
        self._status, self.sessions = status, SimpleNamespace()

    def is_model_call(self, method: str, address: Any) -> bool:
        return True

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if not self._status:
            raise ConnectionResetError
        await send({"type": "http.response.start", "status": self._status, "headers": []})

    async def wait_until_idle(self, rollout: str, attempt: int) -> None: ...

    def forget(self, rollout: str) -> None: ...


@pytest.mark.parametrize(
    ("status", "ended"),
    [
        (200, ("succeeded", None)),
        (400, ("failed", "agent_error")),
        (503, ("failed", "engine_error")),
        (0, ("failed", "agent_error")),
    ],
)
async def test_a_call_ends_as_it_was_answered(tmp_path: Path, status: int, ended: tuple[str, str | None]) -> None:
    store = await SqliteStore.open(tmp_path / "store.sqlite")

    async def send(message: Any) -> None: ...

    server_key = ServerKeyCalls(cast(Gateway, Breaks(status)), store, RunKey(KEY, AttemptKeys(store)))
    try:
        await server_key(SCOPE, cast(Any, None), send)
    except ConnectionResetError:
        assert not status
    [rollout] = await store.list()
    assert (rollout.status, rollout.cause) == ended
    assert status == 200 or rollout.detail
    await store.close()
