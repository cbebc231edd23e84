"""Server, runners and agents are killed with -9 at random moments, hundreds of times. Afterwards: every rollout that
was enqueued ended exactly once, every turn and event that was acknowledged is there once, and none was taken from an
attempt that was dead.
"""

import asyncio
import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from strop.errors import StoreError
from strop.store import open_store
from strop.store.base import Store
from strop.store.remote import HttpStore
from strop.types import Retry, Rollout, Task
from tests import runs
from tests.postgres import Server as Postgres
from tests.postgres import postgres_server

__all__ = ["postgres_server"]  # a fixture

pytestmark = [pytest.mark.fault, pytest.mark.timeout(1800)]

KILLS = int(os.environ.get("STROP_TEST_KILLS", "220"))
KEY = "run-key"
AGENT = Path(__file__).with_name("busy_agent.py")
PATIENT = {cause: Retry(limit=1000) for cause in ("lost_runner", "engine_error", "agent_error", "timeout")}


class Stage:
    """One server, two runners (a Python function in processes, a command), all of which may be killed."""

    def __init__(self, folder: Path, where: str) -> None:
        self.folder, self.where, self.acks = folder, where, folder / "acks.jsonl"
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.environment = os.environ | {
            "STROP_TEST_ACKS": str(self.acks),
            "STROP_TEST_URL": self.url,
            "STROP_TEST_KEY": KEY,
            "STROP_KEY": KEY,
            "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]),
        }
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.log = (folder / "log").open("ab")

    def start(self, name: str) -> None:
        store = ["--store", self.where] if "://" in self.where else []
        agent = {"function": f"{AGENT}:agent", "command": f"{sys.executable} {AGENT}"}.get(name, "")
        arguments = {
            "server": [
                "serve",
                "--folder",
                self.folder / "served",
                "--port",
                self.port,
                "--grace",
                1,
                *store,
            ],
        }.get(name) or [
            *("runner", "--url", self.url, "--agent", agent, "--workers", 4),
            *("--set", "runner.lease=2", "--set", "runner.timeout=60", "--log", self.folder / f"{name}.log"),
        ]
        self.processes[name] = subprocess.Popen(
            runs.strop(*arguments), env=self.environment, stdout=self.log, stderr=self.log, stdin=subprocess.DEVNULL
        )

    def kill(self, name: str) -> None:
        self.processes[name].kill()
        self.processes[name].wait()

    def agents(self) -> list[int]:
        """Processes below the runners: fork servers, workers, commands."""
        parents = {int(p): int(parent) for p, parent in _parents()}
        tops = {process.pid for name, process in self.processes.items() if name != "server"}
        below = {pid for pid in parents if _ancestors(pid, parents) & tops}
        return sorted(below - tops)

    def close(self) -> None:
        for process in self.processes.values():
            process.kill()
            process.wait()
        self.log.close()


def _parents() -> list[tuple[str, str]]:
    listed = subprocess.run(["ps", "-eo", "pid=,ppid="], capture_output=True, text=True, check=True).stdout
    return [(pid, parent) for pid, parent in (line.split() for line in listed.splitlines())]


def _ancestors(pid: int, parents: dict[int, int]) -> set[int]:
    found: set[int] = set()
    while (pid := parents.get(pid, 0)) and pid not in found:
        found.add(pid)
    return found


async def enqueue_always(url: str, enqueued: set[str], stop: asyncio.Event) -> None:
    """Somebody who brings work, and notes what was acknowledged."""
    store = await HttpStore.open(url, KEY)
    number = 0
    while not stop.is_set():
        ids = [f"r{number + k:05d}.0" for k in range(8)]
        task = Task(id="t", data={"n": number})
        await store.enqueue(
            [Rollout(id=id, group=id, member=0, task=task, retries=PATIENT, created=time.time()) for id in ids]
        )
        enqueued |= set(ids)
        number += len(ids)
        while not stop.is_set() and (await store.stats())["queued"] > 24:  # noqa: ASYNC110
            await asyncio.sleep(0.1)
    await store.close()


async def follow(url: str, endings: Counter[str], stop: asyncio.Event) -> None:
    """Somebody who waits for changes: no rollout that was seen ended is ever seen otherwise again."""
    store = await HttpStore.open(url, KEY)
    cursor = 0
    while True:
        cursor, changed = await store.wait(cursor, timeout=0.5)
        for rollout in changed:
            assert rollout.id not in endings, f"{rollout} changed after its end"
            if rollout.status in ("succeeded", "failed", "cancelled"):
                endings[rollout.id] += 1
        if stop.is_set() and not changed:
            break
    await store.close()


async def kill_at_random(stage: Stage, rng: random.Random, postgres: Postgres | None) -> Counter[str]:
    kills: Counter[str] = Counter()
    while kills.total() < KILLS:
        await asyncio.sleep(rng.uniform(0.02, 0.5))
        victims = {"server": 3, "function": 2, "command": 2, "agent": 6, "frozen": 1, "database": 0.5 * bool(postgres)}
        victim = rng.choices(list(victims), list(victims.values()))[0]
        if victim == "frozen":  # not killed, but taken for dead: what its agents go on saying must be refused
            process = stage.processes[rng.choice(["function", "command"])]
            process.send_signal(signal.SIGSTOP)
            await asyncio.sleep(rng.uniform(2.5, 4.0))
            process.send_signal(signal.SIGCONT)
        elif victim == "agent":
            if not (below := stage.agents()):
                continue
            with contextlib.suppress(ProcessLookupError):
                os.kill(rng.choice(below), signal.SIGKILL)
                kills[victim] += 1
        elif victim == "database":
            assert postgres is not None
            await asyncio.to_thread(postgres.kill9)
            await asyncio.to_thread(postgres.start)
            kills[victim] += 1
        else:
            stage.kill(victim)
            await asyncio.sleep(rng.uniform(0.0, 0.3))
            stage.start(victim)
            kills[victim] += 1
        for name, process in stage.processes.items():
            assert process.poll() is None, f"{name} ended by itself: {(stage.folder / 'log').read_text()[-3000:]}"
    return kills


async def prove(store: Store, stage: Stage, enqueued: set[str], endings: Counter[str]) -> Counter[str]:
    said = [json.loads(line) for line in stage.acks.read_bytes().splitlines()]
    acknowledged: dict[str, set[tuple[str, int, str]]] = {"turn": set(), "event": set()}
    refused: dict[str, set[tuple[str, int, str]]] = {"turn": set(), "event": set()}
    for kind, rollout, attempt, id, status in said:
        if kind.startswith("refused_"):
            assert status == 409, (kind, status)
            refused[kind.removeprefix("refused_")].add((rollout, attempt, id))
        else:
            acknowledged[kind].add((rollout, attempt, id))
    stored: dict[str, list[tuple[str, int, str]]] = {"turn": [], "event": []}
    counts: Counter[str] = Counter()
    for id in sorted(enqueued):
        rollout = await store.get(id)  # UnknownId if it was lost
        attempts = await store.attempts(id)
        assert rollout.status == "succeeded", rollout
        assert endings[id] == 1
        assert [a.number for a in attempts] == list(range(1, rollout.attempts + 1))
        assert [a.number for a in attempts if a.cause is None] == [rollout.attempts]  # one success, the last
        assert all(a.ended is not None for a in attempts)
        assert rollout.reward() == rollout.attempts  # what the last attempt said, nobody else
        counts["attempts"] += len(attempts)
        counts.update(f"attempts {a.cause}" for a in attempts if a.cause)
        for attempt in attempts:
            turns = await store.turns(id, attempt=attempt.number)
            events = [e for e in await store.events(id, attempt=attempt.number) if "k" in e.data]
            stored["turn"] += [(id, attempt.number, turn.id) for turn in turns]
            stored["event"] += [(id, attempt.number, event.id) for event in events]
            assert all(event.time <= attempt.ended for event in events)
            if attempt.number == rollout.attempts:
                assert len(turns) == 3
    for kind in ("turn", "event"):
        assert len(set(stored[kind])) == len(stored[kind])
        assert acknowledged[kind] <= set(stored[kind]), f"lost: {sorted(acknowledged[kind] - set(stored[kind]))[:5]}"
        dead = (refused[kind] - acknowledged[kind]) & set(stored[kind])
        assert not dead, f"of dead attempts: {sorted(dead)[:5]}"
        counts[f"acknowledged {kind}s"] += len(acknowledged[kind])
        counts[f"refused {kind}s"] += len(refused[kind])
    return counts


@pytest.mark.parametrize("backend", ["sqlite", pytest.param("postgres", marks=pytest.mark.postgres)])
async def test_nothing_is_lost_whoever_is_killed(backend: str, tmp_path: Path, request: pytest.FixtureRequest):
    rng = random.Random(7)
    postgres: Postgres | None = request.getfixturevalue("postgres_server") if backend == "postgres" else None
    stage = Stage(tmp_path, postgres.url("nothing_lost") if postgres else str(tmp_path / "served" / "store.sqlite"))
    enqueued: set[str] = set()
    endings: Counter[str] = Counter()
    stop, seen_all = asyncio.Event(), asyncio.Event()
    try:
        for name in ("server", "function", "command"):
            stage.start(name)
        await (await open_store(stage.url, key=KEY, patience=60)).close()  # a busy machine starts it slowly
        bring = asyncio.create_task(enqueue_always(stage.url, enqueued, stop))
        watch = asyncio.create_task(follow(stage.url, endings, seen_all))
        kills = await kill_at_random(stage, rng, postgres)
        stop.set()
        await bring
        store = await HttpStore.open(stage.url, KEY)
        deadline = time.monotonic() + 180
        while (stats := await store.stats())["queued"] or stats["running"]:
            assert time.monotonic() < deadline, stats
            await asyncio.sleep(0.2)
        await store.close()
        seen_all.set()
        await watch
        for name in ("function", "command", "server"):  # a clean end, which must leave nothing behind either
            stage.processes[name].send_signal(signal.SIGTERM)
            code = stage.processes[name].wait(60)  # one that was just starting may go without a word
            assert code in (0, 130, -signal.SIGTERM), (tmp_path / "log").read_text()[-3000:]
        store = await open_store(stage.where)
        counts = await prove(store, stage, enqueued, endings)
        await store.close()
        assert kills.total() >= KILLS
        assert counts["refused turns"] + counts["refused events"] > 0 or KILLS < 200  # fencing was put to the test
        print(f"\n{backend}: kills {dict(kills)}; {len(enqueued)} rollouts; {dict(counts)}")
        assert "Traceback" not in (tmp_path / "log").read_text()
    except StoreError as error:
        raise AssertionError(f"{error}; log: {(tmp_path / 'log').read_text()[-3000:]}") from error
    finally:
        stage.close()
