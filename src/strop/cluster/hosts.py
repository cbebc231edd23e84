"""Actors on nodes: each starts one process there, and that process dies with it.

Ray ends actors when the command that made them does, and when their node's Ray does. A child asks Linux to be killed
with its parent, so nothing is left behind however that comes about.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import msgspec
from msgspec import Struct

from strop.cluster.connection import import_ray
from strop.cluster.listener import connect
from strop.cluster.load import ProcessLoad, measure_load
from strop.engines.gpus import VISIBLE
from strop.engines.server_process import ServerProcess, ServerProgram
from strop.errors import EngineError
from strop.files import private
from strop.gateway.spawn import spawn_worker
from strop.learner.spawn import spawn_with
from strop.net.secrets import child_environment

RUNNER = """
import signal, sys
from strop.net.process_group import die_with_parent
die_with_parent()
signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])  # which Ray blocks in all that it starts
from strop.cli import main
sys.exit(main(sys.argv[1:]))
"""
FORESEE = "from strop.cluster.memory import answer; answer()"
FORESEE_SECONDS = 90.0
"""Seconds after which nothing is foreseen: meanwhile the host answers nothing else."""
SIOCGIFADDR = 0x8915
WAITING = 2048
"""Connections that wait while a gateway has no worker."""


class HostPlace(Struct, frozen=True):
    """Where a host is, and which GPUs it may use, as CUDA names them.

    >>> HostPlace("3fa9c1d2e4", "10.0.0.7", 64).name
    '10.0.0.7/3fa9c1'
    """

    node: str
    address: str
    pid: int
    gpus: str = ""

    @property
    def name(self) -> str:
        """Of the node, in events."""
        return f"{self.address}/{self.node[:6]}"


class StartedServer(Struct, frozen=True):
    """Where an engine's server answers, and which process it is; or why there is none."""

    url: str = ""
    pid: int = 0
    error: str = ""


def describe_host() -> HostPlace:
    ray = import_ray()
    node, address = ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address()
    return HostPlace(node, address, os.getpid(), os.environ.get(VISIBLE, ""))


def hide_gpus() -> None:
    """Those that Ray gives to others: a child would use them."""
    if not import_ray().get_gpu_ids():
        os.environ[VISIBLE] = ""


class ProcessHost:
    """On a node; has one process at a time. `uses_gpus`: it may have some."""

    uses_gpus: ClassVar[bool] = False

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def describe(self) -> HostPlace:
        return describe_host()

    def poll(self) -> int | None:
        assert self._process is not None, "nothing was started"
        return self._process.poll()

    def measure(self) -> ProcessLoad | None:
        if self._process is None or self._process.poll() is not None:
            return None
        return measure_load(self._process.pid, os.environ.get(VISIBLE, "") if self.uses_gpus else "")

    def signal(self, number: int) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(number)


class RankHost(ProcessHost):
    """Starts a process that holds weights."""

    uses_gpus = True

    def __init__(self) -> None:
        super().__init__()
        hide_gpus()

    def find_port(self) -> int:
        """One that is free here now."""
        with socket.socket() as free:
            free.bind(("", 0))
            return free.getsockname()[1]

    def foresee(self, asked: bytes) -> bytes:
        """See memory.py; in a process of its own, since that imports torch. Nothing where that fails or takes long."""
        words, env = [sys.executable, "-c", FORESEE], child_environment()
        try:
            done = subprocess.run(
                words, input=asked, capture_output=True, env=env, timeout=FORESEE_SECONDS, check=False
            )
        except subprocess.TimeoutExpired:
            return b""
        return done.stdout

    def start(self, driver: tuple[str, int], number: int, key: bytes, log: str) -> int:
        """The process gets a connection that has been proven already: it knows no key."""
        with connect(driver, number, key) as sock, open(log, "ab", opener=private) as out:
            self._process = spawn_with(sock, out.fileno(), choose_interface(sock.getsockname()[0]))
        return self._process.pid


class GatewayHost(ProcessHost):
    """Listens at an address of its node, and starts gateway workers, one after the other, that answer there: while
    there is none its clients wait."""

    def listen(self, port: int) -> str:
        """Its address as a URL: at this port if it is free."""
        address = import_ray().util.get_node_ip_address()
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        try:
            self._socket = socket.create_server((address, port), family=family, backlog=WAITING)
        except OSError:
            self._socket = socket.create_server((address, 0), family=family, backlog=WAITING)
        shown = f"[{address}]" if ":" in address else address
        return f"http://{shown}:{self._socket.getsockname()[1]}"

    def start(self, driver: tuple[str, int], number: int, key: bytes, setup: bytes, log: str) -> int:
        """The process gets a connection that has been proven already: it knows no key."""
        if self._process is not None:  # the one before
            self._process.kill()
            self._process.wait()
        with connect(driver, number, key) as sock:
            files = [sock.fileno(), self._socket.fileno()]
            self._process = spawn_worker("serve_at_address", setup, files, log)
        return self._process.pid


class RunnerHost(ProcessHost):
    """Starts `strop runner`."""

    def start(self, words: Sequence[str], key: str, log: str, folder: str) -> int:
        with open(log, "ab", opener=private) as out:
            self._process = subprocess.Popen(
                [sys.executable, "-c", RUNNER, "runner", *words],
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=out,
                cwd=folder if Path(folder).is_dir() else None,
                env=child_environment(),
                start_new_session=True,
            )
        assert self._process.stdin is not None
        with contextlib.suppress(OSError), self._process.stdin as stdin:
            stdin.write(key.encode() + b"\n")
        return self._process.pid

    def stop(self, drain: float) -> None:
        """Have it give back what it runs: at once, or after so many seconds in which its agents may end."""
        if self._process is None:
            return
        self.signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(max(drain, 0.2))
        self.signal(signal.SIGTERM)  # told twice, it ends at once
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(5)
        self.signal(signal.SIGKILL)


class ServerHost:
    """Starts an engine's server, which is ended with all that it has started when this actor ends, however it does."""

    def __init__(self) -> None:
        hide_gpus()
        self._server: ServerProcess | None = None
        self._gpus = ""

    async def describe(self) -> HostPlace:
        return describe_host()

    async def start(self, program: ServerProgram) -> StartedServer:
        """It listens at the address by which other nodes reach this one."""
        if self._server is not None:
            await self._server.close()
        here = describe_host()
        env = {**choose_interface(here.address), **program.env}
        self._gpus = env.get(VISIBLE) or here.gpus
        self._server = ServerProcess(msgspec.structs.replace(program, env=env), here.address, apart=True)
        try:
            await self._server.start()
        except EngineError as error:
            return StartedServer(error=str(error))
        except OSError as error:  # such as a full disk
            return StartedServer(error=f"{program.name} cannot be started on {here.name}: {error}")
        return StartedServer(self._server.url, self._server.pid)

    async def wait_until_gone(self) -> str:
        assert self._server is not None, "nothing was started"
        return await self._server.wait_until_gone()

    async def measure(self) -> ProcessLoad | None:
        if self._server is None or not self._server.pid:
            return None
        return await asyncio.to_thread(measure_load, self._server.pid, self._gpus)

    async def end(self) -> None:
        if self._server is not None:
            await self._server.end()


def choose_interface(address: str) -> dict[str, str]:
    """Has processes that compute together meet over the network interface that has this address: by themselves they go
    by the machine's name, which may lead to one that others do not reach."""
    name = find_interface(address)
    return {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": name} if name else {}


def find_interface(address: str) -> str:
    """The one that has an IPv4 address; empty where none has."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        for _, name in socket.if_nameindex():
            asked = struct.pack("256s", name.encode()[:15])
            with contextlib.suppress(OSError):
                if socket.inet_ntoa(fcntl.ioctl(sock, SIOCGIFADDR, asked)[20:24]) == address:
                    return name
    return ""
