"""A gateway that is away while the store is there costs no agent anything."""

import asyncio
import socket

from starlette.types import Receive, Scope, Send

from strop.net.asgi import answer
from strop.net.server import serve
from strop.runners.gateway_check import GatewayCheck
from strop.store.sqlite import SqliteStore
from tests.unit.runners.stand import ended, enqueue, running


async def healthy(scope: Scope, receive: Receive, send: Send) -> None:
    await answer(send, b"{}", 200 if scope["path"] == "/health" else 404)


async def test_an_agent_that_failed_without_its_gateway_is_run_again_once_that_answers(store: SqliteStore) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    check = GatewayCheck(f"http://127.0.0.1:{port}/")
    async with running(store, gateway_check=check, workers=1) as pool:
        (id,) = await enqueue(store, {"do": "raise"}, retries={})
        async with asyncio.timeout(30):
            while not pool.counts["interrupted"]:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        await asyncio.sleep(1.0)
        assert pool.counts == {"leased": 1, "interrupted": 1}  # nothing is begun that could only fail
        server = await serve(healthy, port=port)
        (rollout,) = await ended(store, [id])
        await server.close()
    assert (rollout.cause, rollout.attempts) == ("agent_error", 2)  # with its gateway there, it is the agent's own
    await check.close()
