"""Sessions on a SandboxFusion server: the same interface, another isolation.

    box = FusionBox("http://10.0.0.7:8080", seconds=5)
    async with box.session() as session:
        observation = await session.run("6 * 7")

Every call is a program of its own there (POST /run_code): no variables and no files are kept from one to the next. What
is printed to stdout comes before what is printed to stderr. A server that cannot be reached or is busy is asked again.

Left out: other languages than Python, files, /run_jupyter.
"""

from __future__ import annotations

import ast
import asyncio
import time
from typing import Any

import msgspec
from msgspec import Struct

from strop.errors import ConfigError, StropError
from strop.net.client import Broken, Client, Lost, Response, Unreachable, parse_url, retry_after
from strop.tools.sandbox.base import Box, CodeResult, Ended, SandboxSession
from strop.tools.sandbox.runner import shorten

TRIES = 5
GRACE = 30.0
"""Seconds that an answer may take beyond the call's own, since the server may have others to run first."""


class FusionRun(Struct):
    """What the server says about the program."""

    status: str
    return_code: int | None = None
    stdout: str | None = None
    stderr: str | None = None


class FusionResult(Struct):
    """What the server answers. `status`: Success, Failed, or SandboxError, which is trouble of its own."""

    status: str
    message: str = ""
    run_result: FusionRun | None = None


class FusionBox(Box):
    """Sessions at `url`. `memory_mb` is asked for; servers before it was known to them take no notice."""

    keeps = "Every call begins anew: no variables, imports or files are kept."

    def __init__(
        self, url: str, *, key: str | None = None, seconds: float = 5.0, memory_mb: int = 512, output: int = 10_000
    ) -> None:
        parse_url(url)
        if seconds <= 0:
            raise ConfigError(f"seconds is {seconds}. Fix: give a call some time")
        self.url, self.key, self.output = url, key, output
        self.asked: dict[str, Any] = {
            "language": "python",
            "compile_timeout": seconds,
            "run_timeout": seconds,
            "memory_limit_MB": memory_mb,
        }

    def session(self) -> SandboxSession:
        return _Session(self)


class _Session(SandboxSession):
    def __init__(self, box: FusionBox) -> None:
        self._box = box
        self._client: Client | None = None
        self._turn = asyncio.Lock()

    async def run(self, code: str) -> CodeResult:
        async with self._turn:
            began = time.monotonic()
            ended, text = _read(await self._ask(code), self._box.asked["run_timeout"])
            text = shorten(text.replace("\0", "�"), self._box.output)
            return CodeResult(text=text, ended=ended, seconds=time.monotonic() - began)

    async def close(self) -> None:
        async with self._turn:
            client, self._client = self._client, None
            if client is not None:
                await client.close()

    async def _ask(self, code: str) -> FusionRun:
        """What the server says, once it says anything about the program."""
        body = msgspec.json.encode(self._box.asked | {"code": print_last_value(code).encode(errors="replace").decode()})
        wrong, pause = "", 0.0
        for number in range(TRIES):
            await asyncio.sleep(pause)
            pause = 0.2 * 2**number
            try:
                answer = await self._send(body)
            except (Unreachable, Lost, Broken, TimeoutError) as error:
                wrong = str(error)
                continue
            if answer.status == 429 or answer.status >= 500:
                wrong = f"it answered {answer.status}"
                pause = max(pause, retry_after(answer.headers.get("retry-after", "")))
                continue
            result = _decode(answer, self._box.url)
            if result.status != "SandboxError" and result.run_result is not None:
                return result.run_result
            wrong = result.message or result.status
        raise StropError(f"no result from the sandbox at {self._box.url}: {wrong}. Fix: see whether it is up")

    async def _send(self, body: bytes) -> Response:
        if self._client is None:
            self._client = Client(self._box.url, key=self._box.key)
        headers = {"content-type": "application/json"}
        timeout = self._box.asked["run_timeout"] + GRACE
        return await self._client.request("POST", "/run_code", body, headers=headers, timeout=timeout, again=True)


def _decode(answer: Response, url: str) -> FusionResult:
    if answer.status != 200:
        said = answer.body[:300].decode(errors="replace")
        raise StropError(f"{url} refused to run code ({answer.status}): {said}; is it a SandboxFusion server?")
    try:
        return msgspec.json.decode(answer.body, type=FusionResult)
    except msgspec.MsgspecError as error:
        raise StropError(f"{url} does not answer as a SandboxFusion server: {error}") from None


def _read(run: FusionRun, seconds: float) -> tuple[Ended, str]:
    out, err = run.stdout or "", run.stderr or ""
    text = out + ("\n" if out and err and not out.endswith("\n") else "") + err
    if run.status == "TimeLimitExceeded":
        return "timeout", f"{text.rstrip()}\n[The call took longer than {seconds:g} s and was stopped.]".lstrip("\n")
    code = run.return_code or 0
    ended: Ended = "done" if code == 0 else "raised" if 0 < code < 128 else "died"
    if ended == "died":
        text = f"{text.rstrip()}\n[The interpreter was killed (exit code {code}).]".lstrip("\n")
    return ended, text.rstrip("\n")


def print_last_value(code: str) -> str:
    """The same program, which prints the value of its last expression as a notebook does. Line numbers stay as they
    are; what cannot be read is sent as it is.

    >>> print_last_value("x = 3\\nx + 1  # more")
    "x = 3\\n__import__('sys').displayhook((x + 1))  # more"
    >>> print_last_value("x = 3")
    'x = 3'
    """
    try:
        body = ast.parse(code).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return code
    if not body or not isinstance(body[-1], ast.Expr):
        return code
    last = body[-1].value
    lines = code.encode(errors="replace").splitlines(keepends=True)  # positions are in bytes of UTF-8
    begin = sum(map(len, lines[: last.lineno - 1])) + last.col_offset
    end = sum(map(len, lines[: (last.end_lineno or last.lineno) - 1])) + (last.end_col_offset or 0)
    whole = b"".join(lines)
    return b"".join([whole[:begin], b"__import__('sys').displayhook((", whole[begin:end], b"))", whole[end:]]).decode()
