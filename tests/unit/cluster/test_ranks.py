"""Learner ranks are started on nodes while the event loop goes on, with a Ray that only plays to be one."""

import asyncio
import socket
import threading
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any, cast

import pytest

from strop.cluster.hosts import HostPlace
from strop.cluster.ranks import ClusterLauncher
from strop.errors import LearnerDied


class SlowRay:
    """Answers once `there` is set; with an error where it has one."""

    class exceptions:
        class RayError(Exception): ...

    def __init__(self) -> None:
        self.asked, self.there = threading.Event(), threading.Event()
        self.error: Exception | None = None

    def get(self, asked: Any, timeout: float) -> Any:
        self.asked.set()
        assert self.there.wait(10)
        if self.error is not None:
            raise self.error
        return asked


@pytest.fixture
def stand(tmp_path):
    """A launcher of one rank, its Ray, and both ends of the connection that it will have."""
    ray = SlowRay()
    ours, theirs = (Connection(sock.detach()) for sock in socket.socketpair())
    host = SimpleNamespace(start=SimpleNamespace(remote=lambda *told: 71))
    reservation = SimpleNamespace(ranks=1, hosts=[host], places=[HostPlace("3fa9c1d2e4", "10.0.0.7", 64)])
    listener = SimpleNamespace(address=("", 0), expect=lambda: (1, b""), take=lambda number, timeout: ours)
    journal = SimpleNamespace(write_start=lambda *told: None)
    launcher = ClusterLauncher(ray, *(cast("Any", one) for one in ([reservation], listener, journal)))
    with ours, theirs:
        yield SimpleNamespace(ray=ray, ours=ours, theirs=theirs, starting=lambda: launcher.start([tmp_path / "log"]))
    ray.there.set()


async def test_the_loop_goes_on_while_a_rank_is_started(stand) -> None:
    starting = asyncio.ensure_future(stand.starting())
    await asyncio.wait_for(asyncio.to_thread(stand.ray.asked.wait), 5)
    stand.ray.there.set()
    [child] = await starting
    assert child.connection is stand.ours
    assert child.place.address == "10.0.0.7"


async def test_who_is_called_off_leaves_no_connection_open(stand) -> None:
    starting = asyncio.ensure_future(stand.starting())
    await asyncio.to_thread(stand.ray.asked.wait, 5)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(starting, 1)
    assert not stand.ours.closed
    stand.ray.there.set()
    with pytest.raises(EOFError):
        await asyncio.wait_for(asyncio.to_thread(stand.theirs.recv), 5)
    assert stand.ours.closed


async def test_what_ray_says_is_a_lost_learner(stand) -> None:
    stand.ray.error = SlowRay.exceptions.RayError("the actor died")
    stand.ray.there.set()
    with pytest.raises(LearnerDied, match="could not be started: RayError: the actor died"):
        await stand.starting()
