"""A store that is full, locked, or gone for half a minute: a sentence or a wait, and nothing acknowledged is lost."""

import asyncio
import os
import signal
import sqlite3
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from strop.errors import StoreError
from strop.store.remote import HttpStore
from strop.store.sqlite import SqliteStore
from strop.types import Event, Rollout, Task
from tests import runs

pytestmark = pytest.mark.fault
AWAY = 30.0


class Served:
    """`strop serve` in a folder, on the same port each time it is started."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.port, self.said = folder, 0, b""

    def start(self) -> None:
        command = runs.strop("serve", "--folder", self.folder, "--port", self.port, "--json")
        keyed = os.environ | {"STROP_KEY": "k"}
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=keyed)
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, self.process.communicate()[1]
        self.url = line.decode().split('"url":"')[1].split('"')[0]
        self.port = int(self.url.rpartition(":")[2])

    def end(self, number: signal.Signals = signal.SIGTERM) -> None:
        self.process.send_signal(number)
        self.said += self.process.communicate(timeout=60)[1]


def rollout(id: str) -> Rollout:
    return Rollout(id=id, group=id, member=0, task=Task(id="t"), created=0.0)


def event(n: int, size: int = 20_000) -> Event:
    text = os.urandom(size // 2).hex()
    return Event(id=str(n), rollout="r.0", attempt=1, kind="message", data={"text": text}, time=0.0)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    place = tmp_path / "disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(place)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("a small disk cannot be mounted here (not root)")
    yield place
    subprocess.run(["umount", str(place)], check=True)


async def test_a_full_disk_is_a_sentence_and_work_goes_on_when_there_is_room(small_disk: Path):
    ballast = small_disk / "ballast"
    ballast.write_bytes(b"x" * 1_500_000)
    served = Served(small_disk / "served")
    served.start()
    store = await HttpStore.open(served.url, "k", patience=1.0)
    await store.enqueue([rollout("r.0")])
    await store.lease("w", seconds=600)
    recorded: list[str] = []

    async def fill() -> None:
        for n in range(400):
            await store.add_events([event(n)])
            recorded.append(str(n))

    with pytest.raises(StoreError, match=r"disk.* is full\. Fix: free some space"):
        await fill()
    assert recorded
    assert (await store.get("r.0")).status == "running"  # looking still works
    ballast.unlink()
    await store.add_events([event(1000)])
    await store.close()
    served.end()
    assert b"Traceback" not in served.said
    again = await SqliteStore.open(small_disk / "served" / "store.sqlite")
    there = {event.id for event in await again.events("r.0")}
    await again.close()
    assert {*recorded, "1000"} <= there


def test_a_disk_that_fills_up_ends_a_run_with_a_sentence_and_it_goes_on_when_there_is_room(small_disk: Path):
    subprocess.run(["mount", "-o", "remount,size=64m", str(small_disk)], check=True)
    folder, ballast = small_disk / "run", small_disk / "ballast"
    ballast.write_bytes(b"x" * 55_000_000)
    done = subprocess.run(runs.demo(folder, *runs.SMALL), capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 1, (done.stdout, done.stderr)
    assert "Traceback" not in done.stderr
    assert "No space left" in done.stderr or "is full" in done.stderr, done.stderr
    there = {rollout.id for rollout in runs.story(folder).rollouts}
    assert there
    ballast.unlink()
    runs.finish(runs.strop("train", "--resume", folder, "--json"))
    told = runs.story(folder)
    assert there <= {rollout.id for rollout in told.rollouts}
    assert len(told.steps) == 4


async def test_a_locked_store_is_waited_for(tmp_path: Path):
    served = Served(tmp_path / "served")
    served.start()
    store = await HttpStore.open(served.url, "k")
    await store.enqueue([rollout("r.0")])
    await store.lease("w", seconds=600)
    other = sqlite3.connect(tmp_path / "served" / "store.sqlite", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    writes = [asyncio.create_task(store.add_events([event(n, 100)])) for n in range(20)]
    await asyncio.sleep(AWAY)
    assert not any(write.done() for write in writes)
    assert (await store.get("r.0")).status == "running"  # looking still works
    other.execute("ROLLBACK")
    other.close()
    await asyncio.gather(*writes)
    assert len(await store.events("r.0")) == 20
    await store.close()
    served.end()
    assert not served.said


async def test_a_server_that_is_gone_is_waited_for(tmp_path: Path):
    served = Served(tmp_path / "served")
    served.start()
    store = await HttpStore.open(served.url, "k")
    await store.enqueue([rollout("r.0"), rollout("r.1")])
    await store.lease("w", seconds=600)
    served.end(signal.SIGKILL)
    writes = [asyncio.create_task(store.add_events([event(n, 100)])) for n in range(20)]
    lease = asyncio.create_task(store.lease("w", seconds=600))
    look = asyncio.create_task(store.get("r.0"))
    await asyncio.sleep(AWAY)
    assert not any(task.done() for task in (*writes, lease, look))
    await asyncio.to_thread(served.start)
    await asyncio.gather(*writes)
    assert [leased.rollout.id for leased in await lease] == ["r.1"]
    assert (await look).status == "running"
    assert sorted(int(e.id) for e in await store.events("r.0")) == list(range(20))
    await store.close()
    served.end()


async def test_one_who_waits_no_longer_is_told_what_to_do(tmp_path: Path):
    served = Served(tmp_path / "served")
    served.start()
    store = await HttpStore.open(served.url, "k", patience=1.0)
    served.end()
    with pytest.raises(StoreError, match=r"http://127\.0\.0\.1:\d+"):
        await store.stats()
    await store.close()
