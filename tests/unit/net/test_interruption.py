"""Blocks that end when they take too long, or when nobody waits for them."""

from __future__ import annotations

import asyncio
import time

import pytest

from strop.net.interruption import Interruption


async def test_one_timer_ends_each_block_in_its_time() -> None:
    """Those that ended before their time leave nothing behind that would end another."""
    ended: list[tuple[int, str | None]] = []

    async def block(number: int, work: float) -> None:
        await asyncio.sleep(0.02 * number)
        with Interruption(0.15) as interruption:
            await asyncio.sleep(work)
        ended.append((number, interruption.cause))

    await asyncio.gather(*(block(number, 0.0 if number % 2 else 60) for number in range(6)))
    assert sorted(ended) == [(number, None if number % 2 else "late") for number in range(6)]
    assert [number for number, cause in ended if cause] == [0, 2, 4]


async def test_the_task_goes_on_after_it() -> None:
    with Interruption(0.01) as interruption:
        await asyncio.sleep(60)
    task = asyncio.current_task()
    assert interruption.cause == "late"
    assert task is not None
    assert not task.cancelling()
    await asyncio.sleep(0)  # nothing is left to be raised


async def test_it_ends_for_a_reason_of_ones_own() -> None:
    with Interruption(60) as interruption:
        asyncio.get_running_loop().call_soon(interruption.end_for, "gone")
        await asyncio.sleep(60)
    assert interruption.cause == "gone"


async def test_errors_and_cancellation_from_outside_go_through() -> None:
    with pytest.raises(ValueError, match="no"), Interruption(60):
        raise ValueError("no")

    async def block() -> None:
        with Interruption(60):
            await asyncio.sleep(60)

    task = asyncio.create_task(block())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_cancelled_from_outside_while_it_ends_is_cancelled() -> None:
    async def block() -> None:
        with Interruption(60) as interruption:
            asyncio.get_running_loop().call_soon(interruption.end_for, "gone")
            asyncio.get_running_loop().call_soon(task.cancel)
            await asyncio.sleep(60)

    task = asyncio.create_task(block())
    with pytest.raises(asyncio.CancelledError):
        await task


def test_every_loop_has_its_own_clock() -> None:
    async def block() -> float:
        began = time.monotonic()
        with Interruption(0.05):
            await asyncio.sleep(60)
        return time.monotonic() - began

    assert all(asyncio.run(block()) < 30 for _ in range(3))
