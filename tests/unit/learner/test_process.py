"""The run's side of a process that holds weights, with one that only plays to be one: whatever it does, the event loop
goes on."""

import asyncio
import contextlib
import pickle
import socket
import threading
import time
from collections.abc import AsyncGenerator, Callable
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from strop.errors import LearnerDied, LearnerError
from strop.learner import rank_processes
from strop.learner.launcher import StartedChild
from strop.learner.outgoing import LARGE
from strop.learner.process import LearnerProcess
from strop.learner.rank_processes import LearnerRanks
from strop.learner.verbs import RankPlace
from strop.types import Sampling
from tests.limits import stretch

HELD_UP = 0.4
"""Seconds that the event loop may stand still here."""


class Elsewhere:
    """The handle of a process on another machine, of which it takes `seconds` to learn how it ended."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.seconds = seconds

    def poll(self) -> int | None:
        time.sleep(self.seconds)
        return 3

    def wait(self, timeout: float | None = None) -> int:
        time.sleep(self.seconds)
        return 3

    def terminate(self) -> None: ...

    def kill(self) -> None: ...


def play(work: Callable[[Connection], object], seconds: float = 0.0) -> StartedChild:
    """A child that does `work` in a thread, and then hangs up."""
    ours, theirs = (Connection(sock.detach()) for sock in socket.socketpair())

    def run() -> None:
        with theirs, contextlib.suppress(EOFError, OSError):
            work(theirs)

    threading.Thread(target=run, daemon=True).start()
    return StartedChild(Elsewhere(seconds), ours, RankPlace())


@contextlib.asynccontextmanager
async def keep_moving() -> AsyncGenerator[None]:
    """The event loop does, all through the block."""
    longest = 0.0

    async def tick() -> None:
        nonlocal longest
        while True:
            began = time.monotonic()
            await asyncio.sleep(0.01)
            longest = max(longest, time.monotonic() - began)

    ticking = asyncio.create_task(tick())
    await asyncio.sleep(0)
    yield
    await asyncio.sleep(0.02)
    ticking.cancel()
    assert longest < stretch(HELD_UP)


async def test_requests_beside_a_batch_that_is_being_sent_hold_nobody_up(tmp_path: Path) -> None:
    arrived = []

    def read_late(connection: Connection) -> None:
        time.sleep(1)
        for _ in range(4):
            message = connection.recv()
            arrived.append(message[0])
            if message[0] == "call":
                connection.send(("result", message[1], len(pickle.loads(connection.recv_bytes())[0])))
        connection.recv()

    process = LearnerProcess(tmp_path / "log", play(read_late))
    async with keep_moving():
        batch = asyncio.create_task(process.call("main", "update", (bytes(32 * LARGE),)))
        await asyncio.sleep(0.05)
        request = process.generate(process.of(), [1, 2, 3], Sampling(), [], asyncio.Queue())
        small = asyncio.create_task(process.call("main", "load", ("1.0",)))
        await asyncio.sleep(0)
        process.cancel(request)
        assert await asyncio.gather(batch, small) == [32 * LARGE, 3]
    await process.close()
    assert arrived == ["call", "generate", "call", "cancel"]


async def test_closing_in_the_middle_of_a_batch_leaves_no_thread(tmp_path: Path) -> None:
    before = set(threading.enumerate())
    never = threading.Event()
    process = LearnerProcess(tmp_path / "log", play(lambda _: never.wait(30)))
    batch = asyncio.create_task(process.call("main", "update", (bytes(32 * LARGE),)))
    await asyncio.sleep(0.05)
    await asyncio.wait_for(process.close(), stretch(2))
    never.set()
    with pytest.raises(LearnerDied, match="ended with code 3"):
        await batch
    with pytest.raises(LearnerDied):
        await process.call("main", "load", ("1.0",))
    left = set(threading.enumerate()) - before
    assert not [thread for thread in left if thread.name.startswith("learner-")]


async def test_how_a_process_elsewhere_ended_is_found_out_beside_the_loop(tmp_path: Path) -> None:
    process = LearnerProcess(tmp_path / "log", play(lambda connection: connection.recv(), seconds=1.0))
    async with keep_moving():
        with pytest.raises(LearnerDied, match=r"ended with code 3; its log is .*Fix: resume"):
            await process.call("main", "load", ("1.0",))
        with pytest.raises(LearnerDied):
            process.generate(process.of(), [1], Sampling(), [], asyncio.Queue())
    await process.close()


async def test_the_rank_that_is_gone_is_named_however_late_it_is_known_how(tmp_path: Path, monkeypatch) -> None:
    """Another one fails for want of it at once, and that error alone would not have the run begin again."""
    monkeypatch.setattr(rank_processes, "NOTICE", 0.2)

    def fail(connection: Connection) -> None:
        _, id, *_ = connection.recv()
        connection.recv_bytes()
        connection.send(("error", id, LearnerError("connection closed by peer")))
        connection.recv()

    children = [play(fail), play(lambda connection: connection.recv(), seconds=0.5)]
    ranks = LearnerRanks([tmp_path / "0.log", tmp_path / "1.log"], children, tmp_path / "meeting")
    with pytest.raises(LearnerDied, match="rank 1 ended with code 3"):
        await ranks.call("main", "update", (1,))
    await ranks.close()
