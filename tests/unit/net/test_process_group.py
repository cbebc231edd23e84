"""Processes end with everything they started. All of it is real."""

import asyncio
import os
import secrets
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from strop.net import process_group
from strop.net.process_group import ProcessTrees, find_leftovers, kill_tree

pytestmark = pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="needs /proc")

DAEMON = """
import os, sys, time
# Twice forked and in a session of its own: its parent is not ours, and neither is its group.
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        open(sys.argv[1], "w").write(str(os.getpid()))
        time.sleep(600)
    os._exit(0)
os.wait()
"""


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def eventually(condition: Callable[[], object], seconds: float = 20.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


@pytest.fixture
def cookie() -> Iterator[str]:
    cookie = secrets.token_hex(16)
    yield cookie
    left = find_leftovers(cookie)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert not left


def begin(program: list[str], cookie: str, **more: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(program, start_new_session=True, env={**os.environ, "OPENAI_API_KEY": cookie, **more})


def python(code: str, cookie: str, *arguments: object) -> subprocess.Popen[bytes]:
    return begin([sys.executable, "-S", "-c", textwrap.dedent(code), *map(str, arguments)], cookie)


def number_in(path: Path) -> int:
    assert eventually(lambda: path.exists() and path.read_text())
    return int(path.read_text())


def test_a_program_that_has_only_just_begun(cookie: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is running before the kernel shows its environment."""
    read, empty = process_group._read, [b"", b"", b""]
    with begin(["sleep", "600"], cookie) as process:
        monkeypatch.setattr(
            process_group,
            "_read",
            lambda path: empty.pop() if empty and path == f"/proc/{process.pid}/environ" else read(path),
        )
        assert find_leftovers(cookie) == [process.pid]
        assert not empty
        process.kill()


def test_a_group_ends(cookie: str) -> None:
    with begin(["sh", "-c", "sleep 600 & sleep 600 & wait"], cookie) as process:
        assert eventually(lambda: len(find_leftovers(cookie)) == 3)
        members = find_leftovers(cookie)
        assert kill_tree(process.pid, "") == 3  # found without the cookie
        assert not any(map(alive, members))
    assert process.returncode == -signal.SIGKILL


def test_a_child_in_a_session_of_its_own_ends(cookie: str, tmp_path: Path) -> None:
    """Nor is it in the group any more, and nothing in its environment says whose it is."""
    code = 'import subprocess as s, sys; p = s.Popen(["sleep", "600"], start_new_session=True, env={});' \
           'open(sys.argv[1], "w").write(str(p.pid)); p.wait()'  # fmt: skip
    with python(code, cookie, tmp_path / "pid") as process:
        child = number_in(tmp_path / "pid")
        assert os.getsid(child) == child
        assert find_leftovers(cookie) == [process.pid]
        assert kill_tree(process.pid, "") == 2
        assert eventually(lambda: not alive(child))


def test_a_daemon_ends(cookie: str, tmp_path: Path) -> None:
    with python(DAEMON + "time.sleep(600)", cookie, tmp_path / "pid") as process:
        daemon = number_in(tmp_path / "pid")
        assert eventually(lambda: sorted(find_leftovers(cookie)) == sorted([process.pid, daemon]))
        assert kill_tree(process.pid, cookie) == 2
        assert eventually(lambda: not alive(daemon))
        assert find_leftovers(cookie) == []


def test_what_a_daemon_started_ends_with_it(cookie: str, tmp_path: Path) -> None:
    code = DAEMON.replace("time.sleep(600)", 'os.execvp("sh", ["sh", "-c", "env -i sleep 600; true"])')
    with python(code + "time.sleep(600)", cookie, tmp_path / "pid") as process:
        daemon = number_in(tmp_path / "pid")
        children = Path(f"/proc/{daemon}/task/{daemon}/children")
        assert eventually(lambda: children.read_text() and not leftovers_of_child(children, cookie))
        sleeper = int(children.read_text())
        assert kill_tree(process.pid, cookie) == 3
        assert not alive(sleeper)


def leftovers_of_child(children: Path, cookie: str) -> bool:
    """Whether the child still carries the cookie: it has not wiped its environment yet."""
    return int(children.read_text()) in find_leftovers(cookie)


def test_a_leader_that_has_ended_left_a_daemon(cookie: str, tmp_path: Path) -> None:
    with python(DAEMON, cookie, tmp_path / "pid") as process:
        daemon = number_in(tmp_path / "pid")
        assert eventually(lambda: not alive(process.pid))
        assert find_leftovers(cookie) == [daemon]
        assert kill_tree(process.pid, cookie) == 1
    assert process.returncode == 0


def test_what_forks_while_it_is_killed_ends_too(cookie: str) -> None:
    code = """
    import os, time
    for n in range(300):  # a chain: each one leaves the session, starts the next and ends
        if os.fork(): os._exit(0)
        os.setsid()
        time.sleep(0.003)
    time.sleep(600)
    """
    with python(code, cookie) as process:
        time.sleep(0.1)
        kill_tree(process.pid, cookie)
        assert find_leftovers(cookie) == []


def test_others_are_left_alone(cookie: str) -> None:
    """Another tree of the same parent, a neighbour whose environment has the cookie only as a part, and ourselves."""
    other = begin(["sleep", "600"], "x" + cookie, NOTE=f"{cookie} and more")
    with begin(["sleep", "600"], cookie) as process, other:
        try:
            assert eventually(lambda: find_leftovers("x" + cookie) == [other.pid])
            assert kill_tree(process.pid, cookie) == 1
            assert alive(other.pid)
        finally:
            other.kill()


def test_an_empty_cookie_matches_nothing(cookie: str) -> None:
    with begin(["sleep", "600"], cookie, EMPTY="") as process:
        assert find_leftovers("") == []
        with begin(["sleep", "600"], cookie, EMPTY="") as other:
            assert kill_tree(other.pid, "") == 1
            assert alive(process.pid)
        assert kill_tree(process.pid, cookie) == 1


@pytest.mark.parametrize(
    "pid", [0, 1, os.getpid(), os.getpgrp(), os.getsid(0)], ids=["all", "init", "process", "group", "session"]
)
def test_we_never_kill_ourselves(pid: int) -> None:
    with pytest.raises(AssertionError):
        kill_tree(pid, "x")


def test_a_tree_that_is_gone_is_no_error(cookie: str) -> None:
    with begin(["true"], cookie) as process:
        assert eventually(lambda: not alive(process.pid))
        assert kill_tree(process.pid, cookie) == 0


def test_without_proc_the_group_ends(cookie: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with begin(["sh", "-c", "sleep 600 & wait"], cookie) as process:
        assert eventually(lambda: len(find_leftovers(cookie)) == 2)
        with monkeypatch.context() as patch:
            patch.setattr(process_group.os, "listdir", lambda path: (_ for _ in ()).throw(FileNotFoundError(path)))
            assert kill_tree(process.pid, cookie) == 0
            assert find_leftovers(cookie) == []
        assert eventually(lambda: not find_leftovers(cookie))


# -- many of them ----------------------------------------------------------------------------------------------------


async def test_many_trees_end_at_once_and_each_counts_its_own(cookie: str) -> None:
    trees = ProcessTrees()
    processes = {}
    for number in range(20):
        process = begin(["sh", "-c", "setsid sleep 600 & sleep 600; true"], f"{cookie}-{number}")
        processes[process.pid] = process
        trees.add(process.pid, f"{cookie}-{number}")
    assert await asyncio.to_thread(
        eventually, lambda: all(len(find_leftovers(f"{cookie}-{number}")) == 3 for number in range(20))
    )
    assert await asyncio.gather(*(trees.end(pid) for pid in processes)) == [3] * 20
    assert await trees.end(next(iter(processes))) == 0
    await trees.close()
    assert [process.wait() for process in processes.values()] == [-signal.SIGKILL] * 20
    assert not any(find_leftovers(f"{cookie}-{number}") for number in range(20))


async def test_who_waits_may_be_cancelled_and_closing_ends_the_rest(cookie: str) -> None:
    trees = ProcessTrees()
    with begin(["sleep", "600"], cookie) as one, begin(["sleep", "600"], cookie) as two:
        trees.add(one.pid, cookie)
        trees.add(two.pid, "")
        waiting = asyncio.create_task(trees.end(one.pid))
        await asyncio.sleep(0)
        waiting.cancel()
        await trees.close()
        assert (one.wait(), two.wait()) == (-signal.SIGKILL, -signal.SIGKILL)


def test_trees_end_when_their_runner_is_killed(cookie: str, tmp_path: Path) -> None:
    code = f"""
    import asyncio, os, subprocess, sys
    from strop.net.process_group import ProcessTrees
    async def main():
        trees = ProcessTrees()
        for number in range(2):
            process = subprocess.Popen(["sh", "-c", "setsid sleep 600 & sleep 600; true"], start_new_session=True,
                                       env={{**os.environ, "OPENAI_API_KEY": sys.argv[2]}})
            trees.add(process.pid, sys.argv[2])
        open(sys.argv[1], "w").write("1")
        await asyncio.sleep(600)
    sys.path[:] = {sys.path!r}
    asyncio.run(main())
    """
    with subprocess.Popen([sys.executable, "-c", textwrap.dedent(code), tmp_path / "ready", cookie]) as runner:
        number_in(tmp_path / "ready")
        assert eventually(lambda: len(find_leftovers(cookie)) == 6)
        runner.kill()
        assert eventually(lambda: not find_leftovers(cookie))
