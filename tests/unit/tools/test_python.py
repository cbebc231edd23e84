"""What a session shows of well-behaved code, how it is used, and what it does when there are no walls."""

import asyncio
import inspect
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from strop.agent.tool import Tool
from strop.errors import ConfigError, StropError
from strop.tools.python import PythonBox

from .boxes import Marked, needs_walls

SRC = str(Path(__file__).parents[3] / "src")
ALIKE = [
    ("x = 6 * 7\nx", "42"),
    (
        "print('a')\nimport sys\nprint('b', file=sys.stderr)\nsys.stdout.write('c')\nsys.stderr.write('d')\nNone",
        "a\nb\ncd",
    ),
    ("import os\n_ = os.system('echo shell') if os.path.exists('/bin/sh') else print('shell')", "shell"),
    ("None", ""),
    ("", ""),
    ("'tschüß 中'", "'tschüß 中'"),
    ("if __name__ == '__main__':\n    print('main')", "main"),
]


@pytest.fixture(params=[pytest.param(True, marks=needs_walls), False], ids=["isolated", "plain"])
def box(request: pytest.FixtureRequest) -> PythonBox:
    return PythonBox(seconds=5, isolated=request.param)


@pytest.mark.parametrize(("code", "text"), ALIKE)
async def test_it_shows_what_a_notebook_shows(box: PythonBox, code: str, text: str) -> None:
    async with box.session() as session:
        observation = await session.run(code)
    assert (observation.text, observation.ok, observation.ended) == (text, True, "done")


async def test_variables_imports_and_files_are_kept(box: PythonBox) -> None:
    async with box.session() as session:
        await session.run(
            "import math\ndef area(r):\n    return math.pi * r * r\nopen('note.py', 'w').write('kept = 7')"
        )
        assert (await session.run("round(area(2), 2)")).text == "12.57"
        assert (await session.run("import note; note.kept + _")).text == "19.57"
        assert "note.py" in (await session.run("import os; os.listdir('.')")).text
    async with box.session() as other:
        assert "NameError" in (await other.run("area(2)")).text
        assert (await other.run("import os; os.listdir('.')")).text == "[]"


async def test_a_traceback_has_the_models_own_lines_only(box: PythonBox) -> None:
    async with box.session() as session:
        await session.run("import json\ndef read(text):\n    return json.loads(text)")
        observation = await session.run("read('{')")
        assert observation.ended == "raised"
        assert observation.text.splitlines() == [
            "Traceback (most recent call last):",
            '  File "<cell 2>", line 1, in <module>',
            "    read('{')",
            '  File "<cell 1>", line 3, in read',
            "    return json.loads(text)",
            "           ^^^^^^^^^^^^^^^^",
            "json.decoder.JSONDecodeError: Expecting property name enclosed in double quotes: line 1 column 2 (char 1)",
        ]
        assert (await session.run("1 +")).text.splitlines()[-1] == "SyntaxError: invalid syntax"
        chained = await session.run("try:\n    1 / 0\nexcept ZeroDivisionError as e:\n    raise KeyError('x') from e")
        assert "ZeroDivisionError" in chained.text
        assert chained.text.endswith("KeyError: 'x'")
        assert "runner.py" not in chained.text


async def test_ends_and_exits(box: PythonBox) -> None:
    async with box.session() as session:
        await session.run("x = 1")
        assert (await session.run("import sys; sys.exit()")).ok
        assert (await session.run("exit(3)")).text == "SystemExit: 3"
        assert (await session.run("raise KeyboardInterrupt")).ended == "raised"
        assert (await session.run("x")).text == "1", "none of these ends the interpreter"
        died = await session.run("import os; os._exit(3)")
        assert died.ended == "died"
        assert "exit code 3" in died.text
        assert "lost" in died.text
        assert "NameError" in (await session.run("x")).text


async def test_too_long_is_said_and_the_next_call_starts_afresh() -> None:
    box = PythonBox(seconds=0.3, isolated=False)
    async with box.session() as session:
        await session.run("x = 1")
        observation = await session.run("print('working')\nwhile True: pass")
        assert observation.ended == "timeout"
        assert observation.text.startswith("working\n[The call took longer than 0.3 s")
        assert "NameError" in (await session.run("x")).text


@needs_walls
async def test_a_cancelled_call_leaves_nothing() -> None:
    marked = Marked(seconds=60)
    async with marked.box.session() as session:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.5):
                await session.run("while True: pass")
        assert await marked.gone()
        assert (await session.run("1 + 1")).text == "2"
    assert await marked.gone()
    with pytest.raises(StropError, match=r"box\.session\(\)"):
        await session.run("1")


@needs_walls
async def test_it_dies_with_its_parent() -> None:
    marked = Marked()
    script = f"""
import asyncio
from strop.tools.python import PythonBox
from strop.agent.tool import Tool
async def main():
    session = PythonBox(seconds=60, output={marked.mark}).session()
    print((await session.run("1")).text, flush=True)
    await session.run("import os, time; os.fork(); time.sleep(60)")
asyncio.run(main())
"""
    parent = subprocess.Popen(  # noqa: ASYNC220
        [sys.executable, "-c", script], env=os.environ | {"PYTHONPATH": SRC}, stdout=subprocess.PIPE, text=True
    )
    with parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == "1\n"
        assert marked.processes()
        parent.send_signal(signal.SIGKILL)
    assert await marked.gone()


@needs_walls
async def test_many_sessions_at_once_leave_the_event_loop_alone() -> None:
    marked = Marked(seconds=30)
    gaps: list[float] = []

    async def tick() -> None:
        while True:
            began = time.monotonic()
            await asyncio.sleep(0.01)
            gaps.append(time.monotonic() - began)

    async def one(number: int) -> str:
        async with marked.box.session() as session:
            await session.run(f"x = {number}")
            return (await session.run("x * x")).text

    ticking = asyncio.create_task(tick())
    said = await asyncio.gather(*(one(number) for number in range(64)))
    ticking.cancel()
    assert said == [str(number * number) for number in range(64)]
    assert sorted(gaps)[len(gaps) // 2] < 0.2
    assert await marked.gone()


async def test_calls_of_one_session_wait_for_each_other(box: PythonBox) -> None:
    async with box.session() as session:
        said = await asyncio.gather(session.run("x = 1\nimport time\ntime.sleep(0.2)"), session.run("x + 1"))
    assert said[1].text == "2"


def test_the_tool_from_plain_code(box: PythonBox) -> None:
    with box.tool() as python:
        assert python("x = 2") == ""
        assert python("x + 1") == "3"
        assert python.__name__ == "python"


async def test_the_tool_for_a_rollout(box: PythonBox) -> None:
    async with box.tool() as python:
        assert isinstance(python, Tool)
        assert python.timeout is None  # the box says how long a call may take
        assert python.__name__ == "python"
        assert list(inspect.signature(python).parameters) == ["code"]
        assert python.description.startswith("Run Python code")
        await python("x = 2")
        assert (await python(code="x + 1")).text == "3"
        assert (await python("1 / 0")).wrong == "error"


async def test_the_tool_says_what_went_wrong_after_much_output() -> None:
    async with PythonBox(isolated=False, output=12_000, seconds=3).tool() as python:
        for code in ("print('x\\n' * 20_000)\n1 / 0", "print('x\\n' * 20_000)\nwhile True: pass"):
            text = (await python.run(json.dumps({"code": code}))).text
            assert text.count("x\n") > 5_900, "all of `output` is shown"
            assert "characters are left out here" in text
            assert "cut here" not in text
            assert text.endswith(("ZeroDivisionError: division by zero", "the next call starts afresh.]"))


def test_without_bubblewrap_it_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ConfigError, match="apt-get install bubblewrap"):
        PythonBox()
    with PythonBox(isolated=False).tool() as python:
        assert python("1 + 1") == "2"


def test_limits_that_cannot_be() -> None:
    with pytest.raises(ConfigError, match="memory_mb is 1"):
        PythonBox(memory_mb=1)


@needs_walls
async def test_chosen_packages_can_be_imported_and_no_others() -> None:
    with pytest.raises(ConfigError, match="pip install no-such-thing"):
        async with PythonBox(packages=("no-such-thing",)).session() as session:
            await session.run("1")
    box = PythonBox(seconds=30, memory_mb=1024, packages=("numpy",))
    async with box.session() as session:
        assert (await session.run("import numpy\nint(numpy.linalg.det(numpy.eye(3)))")).text == "1"
        assert "ModuleNotFoundError" in (await session.run("import msgspec")).text
    async with PythonBox().session() as session:
        assert "ModuleNotFoundError" in (await session.run("import numpy")).text
        assert "ModuleNotFoundError" in (await session.run("import pip")).text


@needs_walls
async def test_the_standard_library_is_whole() -> None:
    async with PythonBox(seconds=30).session() as session:
        said = await session.run(
            "import asyncio, bz2, ctypes, curses, decimal, hashlib, lzma, sqlite3, ssl, zlib\n"
            "from multiprocessing import Pool\n"
            "def square(x):\n    return x * x\n"
            "with Pool(3) as pool:\n    print(pool.map(square, range(4)))\n"
            "async def seven():\n    return 7\n"
            "import subprocess, sys\n"
            "print(subprocess.run([sys.executable, '-c', 'print(1)'], capture_output=True, env={}).stdout)\n"
            "asyncio.run(seven())"
        )
    assert said.text == "[0, 1, 4, 9]\nb'1\\n'\n7"
