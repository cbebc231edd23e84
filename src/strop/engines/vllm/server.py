"""The vLLM process: started, watched and ended by us, or somebody else's that only has a URL.

    server = Own(model, settings, log=..., ...)      or     Elsewhere(url)
    await server.start()       returns once it answers; its address is `server.url`
    how = await server.gone()  returns once it does not any more, and says how it ended
    await server.end()

An own server listens on a free loopback port that is drawn anew at every start. It leads a process group, and all that
belongs to it (vLLM starts a process for its engine, and one per GPU) ends with it, or with us, however we end. Its
control endpoints know no key: who can reach the port can change the weights.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import shlex
import signal
import socket
import subprocess
import sys
from abc import ABC, abstractmethod
from pathlib import Path

import msgspec

from strop.config import VllmConfig
from strop.engines.vllm.protocol import MODEL
from strop.errors import EngineError
from strop.http import Client
from strop.runners.tree import Trees

POLL = 0.25
"""Seconds between two looks at a server that is starting."""
WATCH = 1.0
"""Seconds between two looks at somebody else's server: none restarts within that time unseen."""
MISSED = 3
"""Looks in a row at somebody else's server that find nothing until it counts as gone."""
ENTRY = "vllm.entrypoints.openai.api_server"
"""What `vllm serve` runs; packages of other builds lack that command."""


class Server(ABC):
    url: str

    @abstractmethod
    async def start(self) -> None:
        """Returns once it answers. Raises `EngineError` with the reason if it does not within the time allowed."""

    @abstractmethod
    async def gone(self) -> str:
        """Wait until it is gone, and say how."""

    @abstractmethod
    async def end(self) -> None:
        """End what is ours of it. It may be started again."""

    async def close(self) -> None:
        await self.end()


class Elsewhere(Server):
    """A server that somebody else started, and starts again if it dies."""

    def __init__(self, url: str, timeout: float) -> None:
        self.url = url
        self._timeout = timeout

    async def start(self) -> None:
        try:
            async with asyncio.timeout(self._timeout):
                while not await _answers(self.url):  # noqa: ASYNC110 - what is waited for is on the network
                    await asyncio.sleep(WATCH)
        except TimeoutError:
            raise EngineError(
                f"no vLLM answers at {self.url} within {self._timeout:g} s: start it, or mend engine.vllm.url"
            ) from None

    async def gone(self) -> str:
        missed = 0
        while missed < MISSED:
            await asyncio.sleep(WATCH)
            missed = 0 if await _answers(self.url) else missed + 1
        return f"vLLM at {self.url} does not answer any more"

    async def end(self) -> None: ...


class Own(Server):
    """A process of ours. What it prints goes to `log`, one start after the other."""

    def __init__(self, model: Path, settings: VllmConfig, *, log: Path, context: int, dtype: str) -> None:
        self._model = model
        self._dtype = dtype
        self._settings = settings
        self._log = log
        self._context = context
        self._trees: Trees | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._ended: asyncio.Future[str] | None = None  # how
        self._from = 0  # where in the log the present start begins

    async def start(self) -> None:
        await self.end()
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        self._spawn([*command(self._model, self._settings, self._context, self._dtype), "--port", str(port)])
        assert self._ended is not None
        deadline = asyncio.get_running_loop().time() + self._settings.start_timeout
        while not await _answers(self.url):
            if self._ended.done():
                await self.end()
                raise EngineError(
                    f"vLLM {self._ended.result()} before it answered{self._last_words()}; its log is {self._log}"
                )
            if asyncio.get_running_loop().time() > deadline:
                await self.end()
                raise EngineError(
                    f"vLLM did not answer within {self._settings.start_timeout:g} s: see its log {self._log}, or raise "
                    "engine.vllm.start_timeout"
                )
            await asyncio.wait([self._ended], timeout=POLL)

    async def gone(self) -> str:
        assert self._ended is not None
        return f"vLLM {await asyncio.shield(self._ended)}; its log is {self._log}"

    async def end(self) -> None:
        """End the process and all that it started; waits until nothing of it is left."""
        if self._process is None:
            return
        process, self._process = self._process, None
        assert self._trees is not None
        await self._trees.end(process.pid)
        await asyncio.to_thread(process.wait)

    async def close(self) -> None:
        await self.end()
        if self._trees is not None:
            await self._trees.close()
            self._trees = None

    def _spawn(self, arguments: list[str]) -> None:
        self._trees = self._trees or Trees()
        self._log.parent.mkdir(parents=True, exist_ok=True)
        cookie = secrets.token_hex(16)
        with self._log.open("ab") as log:
            self._from = log.tell()
            log.write(f"$ {shlex.join(arguments)}\n".encode())
            log.flush()
            try:
                self._process = subprocess.Popen(
                    arguments,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env=environment(self._settings) | {"STROP_SERVER": cookie},
                    start_new_session=True,
                )
            except OSError as error:
                raise EngineError(
                    f"vLLM cannot be started: {arguments[0]}: {error.strerror}; set engine.vllm.python to a Python "
                    "that has it"
                ) from None
        self._trees.add(self._process.pid, cookie)
        self._ended = _end_of(self._process.pid)

    def _last_words(self) -> str:
        """The last error that it wrote since it was started, to be put behind a sentence."""
        with self._log.open("rb") as log:
            log.seek(self._from)
            lines = log.read().decode(errors="replace").splitlines()
        said = [line for line in lines if "Error" in line or "error:" in line]
        return f": {said[-1].strip()[-500:]}" if said else ""


def command(model: Path, settings: VllmConfig, context: int, dtype: str) -> list[str]:
    """How the server is started, but for its port."""
    given = [settings.python or sys.executable, "-m", ENTRY, "--model", str(model), "--served-model-name", MODEL]
    given += ["--host", "127.0.0.1", "--dtype", dtype, "--max-model-len", str(context)]
    given += ["--max-num-seqs", str(settings.rows), "--tensor-parallel-size", str(settings.tensor_parallel)]
    given += ["--gpu-memory-utilization", str(settings.gpu_memory), "--stream-interval", str(settings.stream_interval)]
    # Logprobs of the distribution that is drawn from; no text, no defaults of the model's own for sampling.
    given += ["--logprobs-mode", "processed_logprobs", "--tokens-only", "--generation-config", "vllm"]
    given += ["--disable-uvicorn-access-log"]
    if settings.weights in ("ipc", "nccl"):
        given += ["--weight-transfer-config", msgspec.json.encode({"backend": settings.weights}).decode()]
    if settings.sleep:
        given += ["--enable-sleep-mode"]
    if settings.lora_rank:
        given += ["--enable-lora", "--max-lora-rank", str(settings.lora_rank), "--max-loras", "2"]
    return [*given, *settings.args]


def environment(settings: VllmConfig) -> dict[str, str]:
    ours = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1"}
    if settings.weights == "ipc":  # handles of GPU memory travel pickled
        ours["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
    if settings.lora_rank:
        ours["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"
    return {**os.environ, **ours, **settings.env}


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


async def _answers(url: str) -> bool:
    client = Client(url, connect_timeout=5.0)
    try:
        return (await client.request("GET", "/health", timeout=10.0)).status == 200
    except (ConnectionError, TimeoutError):
        return False
    finally:
        await client.close()


def _end_of(pid: int) -> asyncio.Future[str]:
    """How a child ended, once it has. It is looked at and not reaped: its number is still needed to end its tree."""
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[str] = loop.create_future()
    handle = os.pidfd_open(pid)

    def seen() -> None:
        loop.remove_reader(handle)
        os.close(handle)
        if not ended.done():
            ended.set_result(_how(pid))

    loop.add_reader(handle, seen)
    return ended


def _how(pid: int) -> str:
    try:
        info = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | os.WNOHANG)
    except ChildProcessError:
        return "was ended"
    if info is None or info.si_code == os.CLD_EXITED:
        return f"ended with code {info.si_status if info else 'unknown'}"
    return f"was killed by {signal.Signals(info.si_status).name}"
