"""Ends a process with everything it started, also what left its process group.

A tree is what one program and its children come to. A process belongs to the tree of `pid` with the secret `cookie`,
which no other tree has, if

    it is `pid`, or in the process group or session that `pid` leads          what most programs start
    an ancestor of it belongs to the tree                                     what went into a session of its own
    the cookie is the value of a variable in its environment                  what was cut off from its parents: daemons

The cookie is an attempt's key, which stands in the environment of whatever an agent starts. One pass over /proc tells
all this for any number of trees, at 0.02 ms per process. Without /proc (macOS) only the group is ended.

Left out: processes of another user (sudo), containers, which belong to a daemon, and one that leaves its session, loses
its parents and wipes its environment, all in the same breath.

Why not a child subreaper alone: it takes one more process for each program, which ending `true` was measured with at
20 ms of CPU against 2.7 ms here, and 10 MB; and what that process leaves when it is killed itself, nobody finds. A
process that has workers below it anyway can be one (`become_subreaper`): all that they start stays below it, and ends
with it by `kill_descendants`.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Container, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import NamedTuple

APART = "apart"
"""Has the watcher leave whoever started it."""
KILL_SECONDS = 5.0
"""Seconds after which what will not die (it hangs in a system call, or forks faster than it is killed) is given up."""
PAUSE = 0.01
PR_SET_CHILD_SUBREAPER = 36
YOUNG = 0.2
"""Seconds in which a program that has just begun may not have its environment yet."""
MISSES = 3
"""Passes in a row that must find nothing when each of them saw processes that had just ended: one of those may be the
parent of one that was born too late to be seen. Otherwise one pass is enough."""


def kill_tree(pid: int, cookie: str) -> int:
    """Kill the tree of `pid` until nothing of it is left, and say how many processes that were. An empty `cookie`
    matches nothing. `pid` must not have been reaped, or its number may belong to someone else by now."""
    tree = ProcessTree(pid, cookie)
    deadline = time.monotonic() + KILL_SECONDS
    while _strike([tree]) and time.monotonic() < deadline:
        time.sleep(PAUSE)
    return len(tree.killed)


def kill_leftovers(cookie: str) -> None:
    """Kill what a tree whose leader is gone left behind, until nothing of it is found."""
    deadline = time.monotonic() + KILL_SECONDS
    while (left := find_leftovers(cookie)) and time.monotonic() < deadline:
        for pid in left:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(PAUSE)


def find_leftovers(cookie: str) -> list[int]:
    """The processes that a tree whose leader has ended by itself left behind."""
    return [process.pid for process in list_processes({cookie}, set()) if process.cookie]


@dataclass(eq=False)
class ProcessTree:
    """What is to be ended, and how far that got: what was killed of it, which dead the last pass knew of, and how many
    passes in a row found nothing more."""

    pid: int
    cookie: str
    killed: set[tuple[int, int]] = field(default_factory=set[tuple[int, int]])
    dead: set[int] = field(default_factory=set[int])
    misses: int = 0

    def __post_init__(self) -> None:
        self.dead.add(self.pid)  # if it is; it may have ended long ago
        assert self.pid not in (0, 1, os.getpid(), os.getpgrp(), os.getsid(0)), "that would be ourselves"


class ProcessTrees:
    """The trees of one runner: each ends when the runner says so, and all end when it dies.

        trees = ProcessTrees()
        trees.add(process.pid, cookie)
        killed = await trees.end(process.pid)  # then reap it
        await trees.close()

    Trees that are to end at the same time share each pass over /proc, which a thread makes. A small process of its own
    waits for the runner's death: it holds the other end of a pipe. `apart`: it is not a child of ours, for those whose
    children somebody else kills (Ray does that when it ends an actor).
    """

    def __init__(self, *, apart: bool = False) -> None:
        self._trees: dict[int, ProcessTree] = {}
        self._ending: dict[ProcessTree, asyncio.Future[int]] = {}
        self._work: asyncio.Task[None] | None = None
        self._thread = ThreadPoolExecutor(1, "strop-tree")
        from strop.net.secrets import child_environment

        # By path and isolated (-I): nothing of strop is imported, so that it starts at once and stays small.
        self._watcher = subprocess.Popen(
            [sys.executable, "-I", __file__, *([APART] if apart else [])],
            bufsize=0,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            env=child_environment(),
        )
        assert self._watcher.stdin is not None
        self._pipe = self._watcher.stdin
        os.set_blocking(self._pipe.fileno(), False)

    def add(self, pid: int, cookie: str) -> None:
        self._trees[pid] = ProcessTree(pid, cookie)
        self._tell(f"+{pid} {cookie}")

    async def end(self, pid: int) -> int:
        """Kill the tree of `pid` until nothing of it is left; says how many processes that were. Who waits may be
        cancelled, the work is done all the same."""
        if (tree := self._trees.get(pid)) is None:
            return 0
        if tree not in self._ending:
            self._ending[tree] = asyncio.get_running_loop().create_future()
        if self._work is None or self._work.done():
            self._work = asyncio.create_task(self._strike())
        return await asyncio.shield(self._ending[tree])

    async def close(self) -> None:
        await asyncio.gather(*(self.end(pid) for pid in list(self._trees)))
        if self._work is not None:
            await self._work
        self._thread.shutdown()
        self._pipe.close()
        self._watcher.kill()
        self._watcher.wait()

    async def _strike(self) -> None:
        loop = asyncio.get_running_loop()
        since: dict[ProcessTree, float] = {}
        try:
            while self._ending:
                await asyncio.sleep(PAUSE)  # those that end at about the same time come together
                trees = list(self._ending)
                alive = await loop.run_in_executor(self._thread, _strike, trees)
                for tree in trees:
                    if tree not in alive or loop.time() - since.setdefault(tree, loop.time()) > KILL_SECONDS:
                        self._mark_ended(tree)
        finally:
            if self._ending:  # cancelled, as all tasks are when a loop is left: strike once more, and let nobody wait
                with contextlib.suppress(Exception):
                    _strike(list(self._ending))
                for tree in list(self._ending):
                    self._mark_ended(tree)

    def _mark_ended(self, tree: ProcessTree) -> None:
        del self._trees[tree.pid]
        self._tell(f"-{tree.pid}")
        self._ending.pop(tree).set_result(len(tree.killed))

    def _tell(self, line: str) -> None:
        with contextlib.suppress(OSError):  # without a watcher, agents may outlive a runner that is killed: no more
            self._pipe.write(f"{line}\n".encode())


def watch(lines: Iterable[str]) -> None:
    """The watcher's life: hear of trees until the runner is gone, then end those that are left."""
    trees: dict[str, str] = {}
    for line in lines:
        pid, _, cookie = line[1:].strip().partition(" ")
        if line[0] == "+":
            trees[pid] = cookie
        else:
            trees.pop(pid, None)
    for pid, cookie in trees.items():
        kill_tree(int(pid), cookie)


def _strike(trees: list[ProcessTree]) -> set[ProcessTree]:
    """Kill once what is found of these trees; returns those of which more may be left."""
    leaders = {tree.pid: tree for tree in trees}
    cookies = {tree.cookie: tree for tree in trees if tree.cookie}
    owners: dict[int, ProcessTree | None] = {}
    found: list[ProcessInfo] = []
    dead: set[int] = set()
    for process in list_processes(cookies, dead):
        found.append(process)
        signs = (leaders.get(number) for number in (process.pid, process.group, process.session))
        if owner := cookies.get(process.cookie) or next(filter(None, signs), None):
            owners[process.pid] = owner
            _send(process, signal.SIGSTOP)  # it forks no more, and who its children are can still be seen
    _inherit(owners, found)
    for tree in trees:
        tree.misses = MISSES if dead <= tree.dead else tree.misses + 1
        tree.dead = dead | {tree.pid}
        with contextlib.suppress(OSError):  # gone, or not ours
            os.killpg(tree.pid, signal.SIGKILL)
    for process in found:
        if tree := owners[process.pid]:
            tree.misses = 0
            tree.dead.add(process.pid)
            tree.killed.add((process.pid, process.started))
            _send(process, signal.SIGKILL)
    return {tree for tree in trees if tree.misses < MISSES}


def _inherit(owners: dict[int, ProcessTree | None], found: list[ProcessInfo]) -> None:
    """Give every process that has no owner yet the one of its nearest ancestor. Each is looked at once."""
    by_pid = {process.pid: process for process in found}
    for process in found:
        line: list[int] = []
        at: ProcessInfo | None = process
        while at is not None and at.pid not in owners:
            owners[at.pid] = None  # parents that were read at different moments may go round in circles
            line.append(at.pid)
            at = by_pid.get(at.parent)
        owners.update(dict.fromkeys(line, None if at is None else owners[at.pid]))


def _send(process: ProcessInfo, number: signal.Signals) -> None:
    with contextlib.suppress(OSError):  # it is gone
        if _stat(process.pid)[-1] == process.started:  # not somebody else who got the pid meanwhile
            os.kill(process.pid, number)


# -- below one process ---------------------------------------------------------------------------------------------


def die_with_parent() -> None:
    """Ask Linux to kill this process when its parent ends, however it ends; elsewhere the closed connection does it."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # 1: PR_SET_PDEATHSIG


def become_subreaper() -> None:
    """From now on, what loses its parents below this process becomes its child, not that of the system. Linux only."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def kill_descendants() -> None:
    """Kill and reap all that is below this process, which must not need its children any more."""
    deadline = time.monotonic() + KILL_SECONDS
    while time.monotonic() < deadline:
        for pid in list_descendants(os.getpid())[1:]:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(PAUSE)


def list_descendants(pid: int) -> list[int]:
    """The process and all below it."""
    found = [pid]
    for one in found:  # grows meanwhile
        with contextlib.suppress(OSError):
            for thread in os.listdir(f"/proc/{one}/task"):
                found += map(int, _read(f"/proc/{one}/task/{thread}/children").split())
    return found


# -- /proc ---------------------------------------------------------------------------------------------------------


class ProcessInfo(NamedTuple):
    """`started` counts from the machine's start: together with the pid it names a process for good. `cookie` is the
    one that was looked for and found in its environment, or empty."""

    pid: int
    parent: int
    group: int
    session: int
    started: int
    cookie: str


def list_processes(cookies: Container[str], dead: set[int]) -> Iterator[ProcessInfo]:
    """All live processes of this user except this one, the youngest first; none without /proc. Those that are not alive
    any more are put into `dead`."""
    user, own = os.geteuid(), str(os.getpid())
    try:
        names = os.listdir("/proc")
    except OSError:
        return
    for name in reversed(names):
        if not name.isdecimal() or name == own:
            continue
        try:
            if os.stat(f"/proc/{name}").st_uid != user:
                continue
            state, parent, group, session, started = _stat(int(name))
            if state not in "ZX":
                yield ProcessInfo(int(name), parent, group, session, started, _cookie(name, started, cookies))
                continue
        except OSError:
            pass
        dead.add(int(name))


def _stat(pid: int) -> tuple[str, int, int, int, int]:
    """State, parent, group, session, start."""
    fields = _read(f"/proc/{pid}/stat").rpartition(b")")[2].split()  # before it stands a name that may hold anything
    return fields[0].decode(), int(fields[1]), int(fields[2]), int(fields[3]), int(fields[19])


def _cookie(pid: str, started: int, cookies: Container[str]) -> str:
    """Whoever starts a program is let go on a moment before the program has its environment: while it is young, one
    that has none is looked at again."""
    try:
        while not (environment := _read(f"/proc/{pid}/environ")) and 0 <= _age(started) < YOUNG:
            time.sleep(0.001)
    except OSError:  # some programs keep theirs to themselves
        return ""
    for variable in environment.split(b"\0"):
        value = variable.partition(b"=")[2].decode(errors="replace")
        if value and value in cookies:
            return value
    return ""


def _age(started: int) -> float:
    """Seconds since a process was started."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started / os.sysconf("SC_CLK_TCK")


def _read(path: str) -> bytes:
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        parts: list[bytes] = []
        while part := os.read(file, 1 << 16):
            parts.append(part)
        return b"".join(parts)
    finally:
        os.close(file)


if __name__ == "__main__":
    if APART in sys.argv and os.fork():
        os._exit(0)
    watch(sys.stdin)
