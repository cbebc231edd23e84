"""The owner of a store looks after it: attempts of runners that are gone are ended in time.

A runner is not to blame for a store that was away. After a start, after a pause of this process and after a jump of the
clock, runners first get `grace` seconds to be heard of again.
"""

from __future__ import annotations

import asyncio
import time

from strop.store.base import Store

SLACK = 2.0
"""Seconds by which a busy machine may be late without being taken for one that slept."""


async def reclaim_regularly(store: Store, every: float, grace: float) -> None:
    """End attempts whose leases have run out, again and again, until cancelled."""
    quiet_until = time.monotonic() + grace
    while True:
        passed, clock = time.monotonic(), time.time()
        await asyncio.sleep(every)
        slept, jumped = time.monotonic() - passed - every, abs(time.time() - clock - (time.monotonic() - passed))
        if max(slept, jumped) > SLACK:
            quiet_until = time.monotonic() + grace
        if time.monotonic() >= quiet_until:
            await store.reclaim()
