"""How busy processes are: measured where they are, and written down by the run."""

import json
import os
import stat
import subprocess
import sys
import time
from concurrent.futures import Future
from types import SimpleNamespace

import pytest

from strop.cluster.hosts import HostPlace
from strop.cluster.journal import Journal
from strop.cluster.load import ProcessLoad, measure_gpus, measure_load
from strop.cluster.meter import LoadMeter
from strop.monitor.console import Silent
from tests.limits import stretch

BUSY = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "b = bytearray(64 * 2**20)\\nwhile True: pass"])
print("there", flush=True)
sys.stdin.read()
child.kill()
"""


def test_what_a_process_has_started_counts_too() -> None:
    process = subprocess.Popen([sys.executable, "-c", BUSY], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None
    try:
        process.stdout.readline()
        deadline = time.monotonic() + stretch(20)
        while (found := measure_load(process.pid)).cpu < 0.5 or found.memory < 64 * 2**20:
            assert time.monotonic() < deadline, found
            time.sleep(0.05)
        assert found.memory < 200 * 2**20
    finally:
        process.communicate()
    assert measure_load(process.pid) == ProcessLoad(0.0, 0), "it is gone"


def test_gpus_are_asked_of_the_driver(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert measure_gpus("0,2") == (None, None), "there is no driver"
    program = tmp_path / "nvidia-smi"
    program.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/asked\necho "90, 1000"\necho "10, 500"\n')
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    assert measure_gpus("") == (None, None)
    assert measure_gpus("0,2") == (0.5, 1500 * 2**20)
    assert (tmp_path / "asked").read_text().endswith("-i 0,2\n")
    program.write_text("#!/bin/sh\necho '[N/A], 5'\n")
    assert measure_gpus("0") == (None, None)


class Host:
    """Answers with these loads, one after the other; then it is gone."""

    def __init__(self, *loads: ProcessLoad | None) -> None:
        self._loads = list(loads)
        self.measure = SimpleNamespace(remote=lambda: SimpleNamespace(future=self._answer))

    def _answer(self) -> Future[ProcessLoad | None]:
        answer: Future[ProcessLoad | None] = Future()
        answer.set_result(self._loads.pop(0)) if self._loads else answer.set_exception(RuntimeError("gone"))
        return answer


async def test_lines_tell_what_was_used_since_the_line_before(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(time, "time", lambda: now)
    journal = Journal(tmp_path, Silent())
    meter = LoadMeter(tmp_path, journal)
    place = HostPlace("a1b2c3d4", "10.0.0.7", os.getpid())
    rank = Host(ProcessLoad(5.0, 100, 0.25, 7), ProcessLoad(25.0, 200))
    journal.write_start("rank 0", place, rank, 71)
    journal.write_start("gateway 0", place, Host(None, ProcessLoad(3.0, 1)), 72)
    now = 1010.0
    await meter.look()
    journal.write_end("died", "gateway 0", node=place.name, why="was killed by signal 9")
    now = 1020.0
    await meter.look()
    await meter.look()
    lines = [json.loads(line) for line in (tmp_path / "processes.jsonl").read_text().splitlines()]
    told = {"what": "rank 0", "node": "10.0.0.7/a1b2c3", "pid": 71}
    assert lines == [
        {"time": 1010.0, **told, "cpus": 0.5, "memory": 100, "gpu": 0.25, "gpu_memory": 7},
        {"time": 1020.0, **told, "cpus": 2.0, "memory": 200},
    ]
    assert (tmp_path / "processes.jsonl").stat().st_mode & 0o077 == 0
