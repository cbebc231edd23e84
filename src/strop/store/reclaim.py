"""Whoever owns a store looks after it: attempts of runners that are gone are ended in time."""

from __future__ import annotations

import asyncio

from strop.store.base import Store


async def reclaiming(store: Store, every: float) -> None:
    """End attempts whose leases have run out, again and again, until cancelled."""
    while True:
        await asyncio.sleep(every)
        await store.reclaim()
