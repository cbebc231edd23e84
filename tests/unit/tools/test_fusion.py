"""The client for SandboxFusion, against a server that speaks its protocol and runs programs in our own sandbox."""

import asyncio
import contextlib
import io
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from strop.errors import ConfigError, StropError
from strop.tools.python import PythonBox
from strop.tools.sandbox.fusion import FusionBox, print_last_value

from .boxes import needs_walls

# What the server runs in the sandbox: the program as a file of its own, with what it said as JSON.
PROGRAM = """
import json, subprocess, sys
open("main.py", "w").write({code!r})
try:
    ran = subprocess.run([sys.executable, "main.py"], capture_output=True, text=True, timeout={seconds})
    said = dict(status="Finished", return_code=ran.returncode, stdout=ran.stdout, stderr=ran.stderr)
except subprocess.TimeoutExpired as late:
    said = dict(status="TimeLimitExceeded", return_code=None, stdout=(late.stdout or b"").decode(), stderr="")
print(json.dumps(said))
"""


class Server(ThreadingHTTPServer):
    """`trouble` is answered first: statuses, or whole answers. `asked` is what was requested."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.trouble: list[int | dict[str, Any]] = []
        self.asked: list[dict[str, Any]] = []
        self.url = f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    server: Server
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.server.asked.append(request)
        if self.path != "/run_code":
            return self.answer(404, {"detail": "Not Found"})
        if self.server.trouble:
            trouble = self.server.trouble.pop(0)
            return self.answer(trouble, {}) if isinstance(trouble, int) else self.answer(200, trouble)
        with PythonBox(seconds=30, output=1_000_000).tool() as python:
            said = json.loads(python(PROGRAM.format(code=request["code"], seconds=request["run_timeout"])))
        good = said["status"] == "Finished" and said["return_code"] == 0
        result = {"execution_time": 0.1, "cpu_time": None} | said
        given = {"compile_result": None, "run_result": result, "executor_pod_name": None, "files": {}}
        self.answer(200, {"status": "Success" if good else "Failed", "message": "", **given})

    def answer(self, status: int, said: dict[str, Any]) -> None:
        body = json.dumps(said).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing."""


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    thread = threading.Thread(target=made.serve_forever)
    thread.start()
    yield made
    made.shutdown()
    thread.join()
    made.server_close()


@needs_walls
async def test_it_speaks_as_a_session_does(server: Server) -> None:
    box = FusionBox(server.url, seconds=2, memory_mb=300)
    async with box.session() as session:
        said = await session.run("x = 6 * 7\nprint('a')\nx")
        assert (said.text, said.ended) == ("a\n42", "done")
        asked = server.asked[0]
        assert (asked["language"], asked["run_timeout"], asked["memory_limit_MB"]) == ("python", 2, 300)
        said = await session.run("print('before')\n1 / 0")
        assert said.ended == "raised"
        assert said.text.startswith("before\nTraceback")
        assert said.text.endswith("ZeroDivisionError: division by zero")
        assert "line 2" in said.text
        assert "NameError" in (await session.run("x")).text, "nothing is kept there"
        said = await session.run("import os; os.kill(os.getpid(), 9)")
        assert said.ended == "died"
        box.asked["run_timeout"] = 0.5
        said = await session.run("print('begun', flush=True)\nwhile True: pass")
        assert said.ended == "timeout"
        assert "took longer than 0.5 s" in said.text


@needs_walls
async def test_a_model_is_told_what_is_kept(server: Server) -> None:
    async with FusionBox(server.url).tool() as there:
        assert "Every call begins anew" in there.schema["function"]["description"]
    async with PythonBox().tool() as here:
        assert "are kept from call to call" in here.schema["function"]["description"]


@needs_walls
async def test_many_at_once_and_as_a_tool(server: Server) -> None:
    box = FusionBox(server.url)

    async def one(number: int) -> str:
        async with box.tool() as python:
            return (await python(f"{number} + 1")).text

    assert await asyncio.gather(*map(one, range(4))) == ["1", "2", "3", "4"]


@needs_walls
async def test_trouble_of_the_server_is_tried_again(server: Server) -> None:
    server.trouble = [503, 429, {"status": "SandboxError", "message": "no pod", "run_result": None}]
    async with FusionBox(server.url).session() as session:
        assert (await session.run("1 + 1")).text == "2"
    assert len(server.asked) == 4


async def test_a_server_that_is_none(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    async with FusionBox(f"{server.url}/elsewhere").session() as session:
        with pytest.raises(StropError, match="is it a SandboxFusion server"):
            await session.run("1")
    server.trouble = [{"answer": 42}]
    async with FusionBox(server.url).session() as session:
        with pytest.raises(StropError, match="does not answer as a SandboxFusion server"):
            await session.run("1")
    monkeypatch.setattr("strop.tools.sandbox.fusion.TRIES", 2)
    async with FusionBox("http://127.0.0.1:9").session() as session:
        with pytest.raises(StropError, match="see whether it is up"):
            await session.run("1")
    with pytest.raises(ConfigError):
        FusionBox("10.0.0.7:8080")


@needs_walls
def test_the_server_here_speaks_as_the_reference_client_expects(server: Server) -> None:
    fusion = pytest.importorskip("sandbox_fusion", reason="sandbox-fusion is not installed")
    answer = fusion.run_code(
        fusion.RunCodeRequest(code="print(1 + 1)", language="python"), endpoint=server.url, max_attempts=1
    )
    assert (answer.status, answer.run_result.stdout) == ("Success", "2\n")


@pytest.mark.parametrize(
    ("code", "printed"),
    [
        ("1 + 1", "2\n"),
        ("x = 'ä'; x + 'ö'", "'äö'\n"),
        ("(1,\n 2)", "(1, 2)\n"),
        ("1,\\\n2", "(1, 2)\n"),
        ("(yes := 3)", "3\n"),
        ("'''\n'''", "'\\n'\n"),
        ("[n for n in 'ab']; None", ""),
        ("if True:\n    5", ""),
    ],
)
def test_the_last_value_is_shown(code: str, printed: str) -> None:
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(print_last_value(code), {})
    assert out.getvalue() == printed
    assert print_last_value(code).count("\n") == code.count("\n"), "lines keep their numbers"
