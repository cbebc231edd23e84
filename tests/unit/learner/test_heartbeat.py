"""Processes that hold weights and hang are noticed, named and killed. Those that only take long are left alone."""

import asyncio
import os
import signal
import subprocess
import threading
import time

import pytest

from strop.algorithms import make
from strop.config import load
from strop.errors import LearnerDied
from strop.learner.heartbeat import Heartbeat
from strop.learner.process import LearnerProcess
from strop.learner.rank_processes import LearnerRanks
from strop.learner.verbs import LearnerSettings
from strop.trajectory import assemble
from strop.types import Sampling
from tests.limits import stretch
from tests.runs import alive

LIMIT = 5.0
LEARNER = {"device": "cpu", "hang_timeout": LIMIT, "collective_timeout": 600.0, "minibatches": 3}


async def begin(process: LearnerProcess, folder, *, serve: bool = False, **learner) -> None:
    await process.start(LearnerSettings.of(load(learner=LEARNER | learner), folder, serve=serve))


async def keep_updating(process: LearnerProcess, episodes) -> None:
    config = load(learner=LEARNER)
    batch = assemble(episodes(), agents=["main"], budget=1000)
    batch.entries, _ = await process.of().score(batch.bare())
    make(config.algorithm, config.learner).assign_credit(batch)
    while True:
        await process.of().update(batch.bare())


def find_pid(process: LearnerProcess) -> int:
    assert isinstance(process._process, subprocess.Popen)
    return process._process.pid


async def end_of(work, seconds: float = 3 * LIMIT) -> LearnerDied:
    with pytest.raises(LearnerDied) as caught:
        await asyncio.wait_for(work, stretch(seconds))
    return caught.value


async def test_a_learner_that_is_stopped(folder, episodes, tmp_path) -> None:
    process = LearnerProcess(tmp_path / "log")
    try:
        await begin(process, folder)
        updating = asyncio.ensure_future(keep_updating(process, episodes))
        await asyncio.sleep(1)
        os.kill(find_pid(process), signal.SIGSTOP)
        error = await end_of(updating)
        assert str(error).startswith(
            "the process that holds the weights has not answered for 5 s (learner.hang_timeout) and was killed; its log"
        )
        assert str(error).endswith("Fix: resume the run to go on")
        assert process._process.wait(5) == -signal.SIGKILL
        assert str(await end_of(process.of().digest())) == str(error)
    finally:
        await process.close()


async def test_a_rank_that_is_stopped_in_the_middle_of_an_update(folder, episodes, tmp_path) -> None:
    ranks = await LearnerRanks.launch(tmp_path / "learner.log", 2)
    pids = [find_pid(one) for one in ranks._ranks]
    try:
        await begin(ranks, folder, ranks=2)
        updating, watching = (asyncio.ensure_future(c) for c in (keep_updating(ranks, episodes), ranks.watch()))
        await asyncio.sleep(2)
        os.kill(pids[1], signal.SIGSTOP)
        for work in (updating, watching):
            error = await end_of(work)
            assert str(error).startswith("rank 1 has not answered for 5 s")
            assert f"{tmp_path}/learner-1.log" in str(error)
    finally:
        await ranks.close()
    assert not [pid for pid in pids if alive(pid)]


@pytest.mark.slow
async def test_the_embedded_engine_is_stopped_while_it_samples(folder, tmp_path) -> None:
    process = LearnerProcess(tmp_path / "log")
    try:
        await begin(process, folder, serve=True)
        await process.of().load("1.0")
        arrived: asyncio.Queue = asyncio.Queue()
        for _ in range(100):
            process.of().generate([1, 2, 3], Sampling(max_tokens=120), [], arrived)
        await arrived.get()
        os.kill(find_pid(process), signal.SIGSTOP)
        assert "has not answered" in str(await end_of(process.watch()))
    finally:
        await process.close()


async def test_a_read_that_never_ends(folder, tmp_path) -> None:
    """As of a file on a network's disk that is gone: the process is there, but not the thread that works."""
    process = LearnerProcess(tmp_path / "log")
    checkpoint = tmp_path / "checkpoint"
    try:
        await begin(process, folder, collective_timeout=6.0)
        await process.of().begin_save(checkpoint, {})
        await process.of().finish_save()
        (checkpoint / "strop.json").unlink()
        os.mkfifo(checkpoint / "strop.json")
        error = await end_of(process.of().restore(checkpoint), 20)
        assert "has been in one operation for 6 s (learner.collective_timeout): " in str(error)
        assert " in checksums.py:" in str(error)
    finally:
        await process.close()


@pytest.mark.slow
async def test_what_waits_or_works_for_long_is_left_alone(folder, episodes, tmp_path) -> None:
    process = LearnerProcess(tmp_path / "log")
    try:
        await begin(process, folder, collective_timeout=5.0)
        await asyncio.sleep(LIMIT + 2)
        updating = asyncio.ensure_future(keep_updating(process, episodes))
        await asyncio.sleep(LIMIT + 2)
        assert not updating.done()
        assert not process.died.done()
        updating.cancel()
    finally:
        await process.close()


def test_a_thread_in_one_operation_is_told_from_one_that_moves() -> None:
    heartbeat, done = Heartbeat(lambda seconds, where: None), threading.Event()

    def move() -> None:
        with heartbeat.work():
            while not done.is_set():
                sum(k * k for k in range(1000))
                sorted(range(1000), key=lambda k: -k)
                time.sleep(0.001)

    def stay() -> None:
        with heartbeat.work():
            done.wait()

    threads = [threading.Thread(target=each, daemon=True) for each in (move, stay)]
    try:
        threads[0].start()
        for _ in range(40):
            heartbeat.look(time.monotonic())
            time.sleep(0.01)
        assert heartbeat.look(time.monotonic())[0] < stretch(0.3)
        threads[1].start()
        time.sleep(0.1)
        now = time.monotonic()
        heartbeat.look(now)
        assert heartbeat.look(now + 100)[0] == pytest.approx(100, abs=20)
    finally:
        done.set()
    for thread in threads:
        thread.join(5)
    assert heartbeat.look(now + 200) == (0.0, "")
