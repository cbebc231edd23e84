"""Whether a gateway that is not at the store's address answers: it may be gone while the store is there."""

from __future__ import annotations

import asyncio

from strop.net.client import Client

SECONDS = 5.0
"""Seconds that it gets to answer: connections wait while a worker is started."""
AGAIN = 0.5


class GatewayCheck:
    def __init__(self, url: str) -> None:
        self._client = Client(url.rstrip("/"))
        self._is_away = False

    async def answers(self) -> bool:
        try:
            async with asyncio.timeout(SECONDS):
                answer = await self._client.request("GET", "/health", timeout=SECONDS)
            self._is_away = answer.status != 200
        except (OSError, TimeoutError):
            self._is_away = True
        return not self._is_away

    async def close(self) -> None:
        await self._client.close()

    async def wait_until_back(self) -> None:
        """Returns at once unless it was found to be away."""
        while self._is_away and not await self.answers():  # noqa: ASYNC110
            await asyncio.sleep(AGAIN)
