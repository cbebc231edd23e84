"""Code that wants out, or wants too much. It is refused or contained, and the session goes on, or the next one does."""

import asyncio
import os
import socket
import subprocess
import sys
import sysconfig
import time
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from strop.tools.python import CodeResult, PythonBox, SandboxSession
from tests.limits import stretch

from .boxes import Marked, needs_walls

pytestmark = needs_walls
SRC = Path(__file__).parents[3] / "src"

ENDLESS_FORKS = """
import os
while True:
    try:
        os.fork()
    except OSError:
        pass
"""
MEMORY_IN_MANY = """
import os, time
for _ in range(12):
    if os.fork() == 0:
        mine = b"x" * (100 << 20)
        time.sleep(60)
time.sleep(60)
"""
SHARED_IN_MANY = """
import mmap, os, time
for _ in range(12):
    if os.fork() == 0:
        mine = mmap.mmap(-1, 100 << 20)
        mine.write(b"x" * (100 << 20))
        time.sleep(60)
time.sleep(60)
"""
DEEP = """
import sys
sys.setrecursionlimit(10**9)
def down(_):
    return list(map(down, [0]))
down(0)
"""
FORGED = """
import os, struct, time
if os.fork() == 0:
    while True:
        time.sleep(0.01)
os.write(3, struct.pack(">cI", b"=", 4) + b"done")
time.sleep(60)
"""
WOKEN = """
import os, signal, struct, time
me = os.getpid()
if os.fork() == 0:
    while True:
        os.kill(me, signal.SIGCONT)
os.write(3, struct.pack(">cI", b"=", 4) + b"done")
while True:
    pass
"""
KILLED = {  # what ends the interpreter, and how
    "forks": (ENDLESS_FORKS, ("timeout", "memory")),
    "loop": ("while True: pass", ("timeout",)),
    "memory in many processes": (MEMORY_IN_MANY, ("memory",)),
    "shared memory in many": (SHARED_IN_MANY, ("memory",)),
    "output": ("while True: print('x' * 1000)", ("output",)),
    "output of others": (
        "import subprocess, sys\nsubprocess.run([sys.executable, '-c', 'while True: print(1000 * chr(120))'])",
        ("output",),
    ),
    "exit": ("import os; os._exit(0)", ("died",)),
    "crash": ("import ctypes; ctypes.string_at(0)", ("died",)),
    "recursion": (DEEP, ("died", "memory", "raised")),
    "own signal": ("import os; os.kill(os.getpid(), 9)", ("died",)),
    "cut off": ("import os; os.closerange(0, 256)", ("died",)),
    "false answer": ("import os; os.write(3, b'=' + b'\\xff' * 100)", ("died",)),
    "an answer for a child that goes on": (FORGED, ("timeout",)),
    "an answer, and a child that wakes its parent": (WOKEN, ("timeout",)),
    "huge number": ("import sys; sys.set_int_max_str_digits(0); len(str(3 ** (10 ** 8)))", ("timeout", "raised")),
    "repr": ("class A:\n    def __repr__(self):\n        while True: pass\nA()", ("timeout",)),
    "ignored signals": (
        "import signal\nfor n in range(1, 60):\n    try: signal.signal(n, signal.SIG_IGN)\n    except Exception: pass\n"
        "while True: pass",
        ("timeout",),
    ),
}


@pytest.fixture
async def marked() -> AsyncIterator[Marked]:
    made = Marked()
    yield made
    assert await made.gone(), "something of it is left"


@pytest.fixture
async def session(marked: Marked) -> AsyncIterator[SandboxSession]:
    async with marked.box.session() as session:
        yield session


@pytest.mark.parametrize("name", KILLED)
async def test_what_ends_the_interpreter(marked: Marked, name: str) -> None:
    code, ends = KILLED[name]
    async with marked.box.session() as session:
        await session.run("x = 1")
        observation = await session.run(code)
        assert observation.ended in ends, observation.text[-500:]
        assert observation.seconds < 8
        if observation.ended != "raised":
            assert observation.text.endswith("All variables and files are lost; the next call starts afresh.]")
            assert "NameError" in (await session.run("x")).text
        assert (await session.run("import os; os.getpid(), 1 + 1")).text == "(2, 2)"
        assert await marked.gone(but=3), "bubblewrap, its child and the runner; the old one is gone"


REFUSED = {  # what raises, and the session goes on as if nothing had been
    "memory": ("held = bytearray(1 << 34)", "MemoryError"),
    "memory bit by bit": ("held = []\nwhile True: held.append(bytearray(1 << 20))", "MemoryError"),
    "memory outside of limits": ("import os; os.memfd_create('x')", "PermissionError"),
    "input": ("input()", "EOFError"),
    "huge number": ("10 ** 5000", "ValueError"),
    "recursion": ("def down(): return down()\ndown()", "RecursionError"),
    "more memory": ("import resource; resource.setrlimit(resource.RLIMIT_AS, (-1, -1))", "ValueError"),
    "more processes": ("import resource; resource.setrlimit(resource.RLIMIT_NPROC, (999, 999))", "ValueError"),
    "root": ("import os; os.setuid(0)", "Error: [Errno"),
    "another root folder": ("import os; os.chroot('/tmp')", "PermissionError"),
    "write /": ("open('/x', 'w')", "OSError: [Errno 30]"),
    "write /python": ("open('/python/x', 'w')", "OSError: [Errno 30]"),
    "write /dev": ("open('/dev/x', 'w')", "OSError: [Errno 30]"),
    "write the library": ("import os; open(os.__file__, 'a')", "Error: [Errno"),
    "passwd": ("open('/etc/passwd')", "FileNotFoundError"),
    "shadow by a symlink": ("import os; os.symlink('/etc/shadow', 's'); open('s')", "FileNotFoundError"),
    "out by ..": ("open('../../../../../../etc/passwd')", "FileNotFoundError"),
    "a hard link": ("import os; os.link(os.__file__, 'mine.py')", "Error: [Errno"),
    "its own interpreter": ("import os, sys; os.remove(sys.executable)", "OSError"),
    "pid 1's environment": ("open('/proc/1/environ')", "FileNotFoundError"),
    "a parent": (f"import os; os.kill({os.getpid()}, 9)", "ProcessLookupError"),
    "outside": ("import socket; socket.create_connection(('1.1.1.1', 80), 2)", "OSError: [Errno 97]"),
    "names": ("import socket; socket.getaddrinfo('example.com', 80)", "gaierror"),
    "vsock": ("import socket; socket.socket(socket.AF_VSOCK)", "OSError: [Errno 97]"),
    "raw packets": ("import socket; socket.socket(socket.AF_PACKET, socket.SOCK_RAW)", "OSError: [Errno 97]"),
    "buffers of sockets": (
        "import socket; socket.socketpair()[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 24)",
        "PermissionError",
    ),
    "big file": ("open('big', 'wb').truncate(1 << 40)", "OSError: [Errno 27]"),
}


@pytest.mark.parametrize("name", REFUSED)
async def test_what_is_refused(session: SandboxSession, name: str) -> None:
    code, error = REFUSED[name]
    await session.run("x = 1")
    observation = await session.run(code)
    assert observation.ended == "raised"
    assert error in observation.text.splitlines()[-1]
    await session.run("held = None")
    assert (await session.run("x + 1")).text == "2"


SYSTEM_CALLS = """
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
def tried(name, *given):
    return name, getattr(libc, name)(*given), ctypes.get_errno()
[tried("ptrace", 16, 1, 0, 0), tried("ptrace", 0, 0, 0, 0), tried("unshare", 0x10000000), tried("shmget", 0, 9, 0o1600),
 tried("mount", b"none", b"/tmp", b"tmpfs", 0, None), tried("setns", 0, 0), tried("personality", 8)]
"""


async def test_system_calls_that_are_refused(session: SandboxSession) -> None:
    said = (await session.run(SYSTEM_CALLS)).text
    assert said.count(", -1, 1)") == 7, said


async def test_a_namespace_of_its_own_cannot_be_cloned(session: SandboxSession) -> None:
    call = {"x86_64": 56, "aarch64": 220}[os.uname().machine]
    said = await session.run(f"import ctypes\nctypes.CDLL(None).syscall({call}, 0x10000000 | 17, 0, 0, 0, 0)")
    assert said.text == "-1"


async def test_signals_to_pid_1_and_to_all(session: SandboxSession) -> None:
    await session.run("import os, signal; x = 1")
    for code in ("os.kill(1, 9)", "os.kill(os.getppid(), signal.SIGSTOP)", "os.killpg(0, 0)"):
        await session.run(code)
    assert "ProcessLookupError" in (await session.run("os.kill(-1, 9)")).text, "there is nobody else to hit"
    assert (await session.run("x")).text == "1"


async def test_nothing_of_the_host_is_seen(
    session: SandboxSession, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "secret").write_text("hidden")
    seen = (
        await session.run("import os; sorted(os.listdir('/')), sorted(os.listdir('/dev')), os.listdir('/tmp')")
    ).text
    lib = ", 'lib64'" if "lib64" in seen else ""
    assert seen == (
        f"(['dev', 'lib'{lib}, 'python', 'tmp'], ['full', 'null', 'random', 'shm', 'urandom', 'zero'], ['work'])"
    )
    assert (await session.run(f"os.path.exists({str(tmp_path)!r})")).text == "False"
    assert (await session.run("import socket; socket.gethostname()")).text == "'box'"


async def test_no_keys_of_the_parent(marked: Marked, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret-of-the-parent")
    look = "import os, ctypes\nstr(dict(os.environ)) + str(ctypes.c_char_p.in_dll(ctypes.CDLL(None), 'environ').value)"
    async with marked.box.session() as session:
        said = await session.run(look)
        assert said.ok
        assert "secret" not in said.text
        assert "API_KEY" not in said.text


async def test_no_file_descriptors_of_the_parent(session: SandboxSession) -> None:
    said = await session.run(
        "import os, stat\nfound = []\n"
        "for n in range(256):\n    try: found.append((n, stat.S_IFMT(os.fstat(n).st_mode)))\n    except OSError: pass\n"
        "found"
    )
    kinds = [kind for _, kind in msgspec.json.decode(said.text.replace("(", "[").replace(")", "]"))]
    fifo, sock, char = 0o010000, 0o140000, 0o020000
    assert sorted(kinds) == sorted([char, char, fifo, fifo, fifo, sock])


async def test_the_hosts_loopback_cannot_be_reached(session: SandboxSession) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket(socket.AF_UNIX) as abstract:
        name = f"strop-test-{os.getpid()}"
        abstract.bind(f"\0{name}")
        abstract.listen()
        port = server.getsockname()[1]
        said = await session.run(f"import socket; socket.create_connection(('127.0.0.1', {port}), 2)")
        assert "OSError: [Errno 97]" in said.text
        said = await session.run(f"socket.socket(socket.AF_UNIX).connect('\\0{name}')")
        assert "ConnectionRefusedError" in said.text


async def test_a_full_disk(session: SandboxSession) -> None:
    fill = (
        "n = 0\n"
        "def fill(folder):\n    global n\n    while True:\n"
        "        with open(f'{folder}/{n}', 'wb') as file: file.write(bytes(1 << 20))\n        n += 1\n"
    )
    await session.run(fill)
    for folder in (".", "/tmp", "/dev/shm"):
        assert "No space left" in (await session.run(f"fill({folder!r})")).text
    assert int((await session.run("n")).text) <= 16, "all three are one"
    assert (
        await session.run("import os\nfor i in range(n): os.remove(str(i))\nopen('x', 'w').write('room')")
    ).text == "4"


async def test_binary_and_much_output(session: SandboxSession) -> None:
    said = await session.run("import sys; _ = sys.stdout.buffer.write(bytes(range(256)) * 10)")
    assert said.ok
    assert "\0" not in said.text
    assert said.text.encode()
    async with Marked().box.session() as other:
        assert (await other.run("print('\\ud800')")).text == "\\ud800"


async def test_ten_megabytes_are_cut() -> None:
    async with PythonBox(output=1000).session() as session:
        for code in ("print('a' + 'x' * 10_000_000 + 'z')", "'a' + 'x' * 10_000_000 + 'z'"):
            said = await session.run(code)
            assert said.ok
            assert len(said.text) < 1100
            assert said.text.lstrip("'").startswith("ax")
            assert said.text.rstrip("'").endswith("xz")
            assert "[... 9999" in said.text
            assert "characters are left out here" in said.text
        said = await session.run("print('x' * 5000)\n1 / 0")
        assert "ZeroDivisionError" in said.text, "what went wrong is never cut"


@pytest.mark.parametrize(
    "code", ["import sys; sys.stdout.close(); sys.stderr.close()", "import os; os.close(1); os.close(2); os.close(0)"]
)
async def test_closed_streams_are_open_again(session: SandboxSession, code: str) -> None:
    await session.run("x = 1")
    assert (await session.run(code)).ok
    assert (await session.run("import sys\nprint(x)\nprint(2, file=sys.stderr)")).text == "1\n2"


async def test_threads_that_outlive_a_call_are_stopped_with_it(session: SandboxSession) -> None:
    await session.run("import threading, time\ndef spin():\n    while True: pass")
    await session.run("threading.Thread(target=spin).start()\nused = time.process_time()")
    await asyncio.sleep(1)
    assert float((await session.run("time.process_time() - used")).text) < 0.6


async def test_processes_that_outlive_a_call_are_killed(session: SandboxSession) -> None:
    await session.run("import subprocess, sys\np = subprocess.Popen([sys.executable, '-c', 'while True: pass'])")
    assert (await session.run("p.poll() is not None")).text == "True"
    await session.run("import os\nfor _ in range(100): os.fork()")
    assert (await session.run("subprocess.run([sys.executable, '-c', 'print(1)']).returncode")).text == "1\n0"


async def test_a_cell_that_answers_itself_stands_still_too(session: SandboxSession) -> None:
    said = await session.run(
        "import os, struct, time\nx = 0\nos.write(3, struct.pack('>cI', b'=', 4) + b'done')\n"
        "used = time.process_time()\nwhile time.process_time() - used < 0.5: x += 1"
    )
    assert said.text == "done"
    assert said.seconds < 3
    await asyncio.sleep(1)
    assert (await session.run("1")).text == "", "the first call's own answer comes only now"


async def test_a_name_that_is_no_text(session: SandboxSession) -> None:
    await session.run("import ctypes, time; ctypes.CDLL(None).prctl(15, b') R \\xff\\xfe')")
    assert (await session.run("time.sleep(0.2); 1 + 1")).text == "2"


async def test_a_forgotten_copy_answers_nothing(session: SandboxSession) -> None:
    said = await session.run("import os\nx = os.fork()\nprint('once' if x else 'copy')")
    assert said.ok
    assert "once" in said.text
    assert (await session.run("x > 2")).text == "True"
    assert (await session.run("1 + 1")).text == "2"


async def test_cpu_time_of_a_session() -> None:
    marked = Marked(cpu_seconds=1, seconds=10)
    async with marked.box.session() as session:
        began = time.monotonic()
        said = await session.run("while True: pass")
        assert said.ended == "died"
        assert "CPU time" in said.text
        assert time.monotonic() - began < stretch(9)
    assert await marked.gone()


# -- as an ordinary user -----------------------------------------------------------------------------------------------

AS_USER = """
import asyncio, json, sys
from strop.tools.python import PythonBox
async def main():
    box = PythonBox(seconds=3, memory_mb=256, disk_mb=16, processes=24)
    async with box.session() as session:
        for code in json.load(sys.stdin):
            said = await session.run(code)
            print(json.dumps([said.ended, said.text]), flush=True)
asyncio.run(main())
"""


def as_user(codes: list[str]) -> list[CodeResult]:
    """What a session of user `nobody` says, with a Python that he can use."""
    python = f"/usr/bin/python{sys.version_info[0]}.{sys.version_info[1]}"
    if os.geteuid() != 0:
        pytest.skip("this is an ordinary user already: every test here is of one")
    if not os.path.exists(python):
        pytest.skip(f"there is no {python}, and root's own Python may be out of reach for others")
    path = f"{SRC}:{sysconfig.get_path('purelib')}"
    ran = subprocess.run(
        [python, "-c", AS_USER],
        input=msgspec.json.encode(codes),
        env={"PATH": os.environ["PATH"], "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        cwd="/",
        user=65534,
        group=65534,
        extra_groups=[],
        timeout=120,
        check=False,
    )
    if b"PermissionError" in ran.stderr or b"ModuleNotFoundError" in ran.stderr:
        pytest.skip("the project lies where other users cannot read it")
    assert ran.returncode == 0, ran.stderr.decode()
    lines = [msgspec.json.decode(line) for line in ran.stdout.splitlines()]
    return [CodeResult(ended=ended, text=text) for ended, text in lines]


def test_an_ordinary_user_has_the_same_walls() -> None:
    first = ["1 + 1", SYSTEM_CALLS, ENDLESS_FORKS, MEMORY_IN_MANY, "1 + 2"]
    said = as_user([*first, *(f"held = None\n{code}" for code, _ in REFUSED.values())])
    assert said[0].text == "2"
    assert said[1].text.count(", -1, 1)") == 7
    assert said[2].ended in ("timeout", "memory")
    assert said[3].ended == "memory"
    assert said[4].text == "3"
    for (name, (_, error)), observation in zip(REFUSED.items(), said[5:], strict=True):
        assert error in observation.text.splitlines()[-1], name
