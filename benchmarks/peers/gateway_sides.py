"""The gateways of the comparison: how each is installed, started, and told about rollouts.

    with side.serving(folder, upstream) as gateway:     the process answers
        targets = gateway.make(100)                     [(path, key), ...], one per rollout
        gateway.end()                                   those rollouts are over

Each peer has a virtual environment of its own under .peers/. Every one runs as one process with one worker, uvloop and
httptools where it is served by uvicorn, its log at errors, no key to check beyond those that it makes itself.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import time
import urllib.request
from abc import ABC, abstractmethod
from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, ClassVar

from peers.processes import PEERS, ROOT, running, say

Target = tuple[str, str]
"""The path of a rollout's model API, and its key."""

HOMES = ROOT / ".peers"
FAST = ("httptools==0.9.0", "uvloop==0.23.0")
SERVED = ("fastapi==0.162.4", "httpx==0.28.1", "pydantic==2.14.3", "starlette==1.10.0", "uvicorn==0.54.0")
"""What the peers' speed depends on, pinned so that their figures can be had again. None of it asks for torch."""
MODEL = "tiny"


def read_memory(pid: int) -> float:
    """MB of a process that are in memory now."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS:")) / 1024


class Gateway(ABC):
    """A gateway that is being served."""

    def __init__(self, process: subprocess.Popen[str], url: str) -> None:
        self._process, self.url = process, url
        self.pid = process.pid
        self.port = int(url.rpartition(":")[2])

    @abstractmethod
    def make(self, count: int) -> list[Target]: ...

    @abstractmethod
    def end(self) -> dict[str, int]: ...

    @contextmanager
    def awake(self) -> Generator[None]:
        """Gateways sleep while others are measured."""
        self._process.send_signal(signal.SIGCONT)
        try:
            yield
        finally:
            self._process.send_signal(signal.SIGSTOP)

    def cpu(self) -> float:
        """Seconds of CPU so far, of all its threads."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def memory(self) -> float:
        """MB that are in memory now."""
        return read_memory(self.pid)


class Ordered(Gateway):
    """One that takes orders over its standard input."""

    def make(self, count: int) -> list[Target]:
        return [(path, key) for path, key in self._ask({"make": count})]

    def end(self) -> dict[str, int]:
        return self._ask({"end": True})

    def _ask(self, order: dict[str, Any]) -> Any:
        assert self._process.stdin
        assert self._process.stdout
        print(json.dumps(order), file=self._process.stdin, flush=True)
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.url} has ended, see above")
        return json.loads(line)


class Side(ABC):
    """One of the gateways. `packages` go into its virtual environment, which has the Python that runs this unless it
    wants another; `keeps` says where it records what."""

    name: str
    packages: tuple[str, ...] = ()
    python: str | None = None
    keeps: str
    settings: str

    @property
    def home(self) -> Path:
        return HOMES / f"gateway-{self.name}"

    @property
    def interpreter(self) -> Path:
        return self.home / "bin" / "python"

    def set_up(self) -> None:
        """Make the virtual environment unless it is there as asked for."""
        stamp, wanted = self.home / ".installed", "\n".join(self.packages)
        if not self.packages or (stamp.is_file() and stamp.read_text() == wanted):
            return
        say(f"installing {self.packages[0]} into {self.home.relative_to(ROOT)} (minutes)")
        python = find_python(self.python) if self.python else sys.executable
        subprocess.run([python, "-m", "venv", self.home], check=True)
        pip = [self.interpreter, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, *self.packages], check=True)
        stamp.write_text(wanted)

    def versions(self) -> dict[str, str]:
        names = [pin.partition("==")[0].partition("[")[0] for pin in self.packages]
        code = f"import json, importlib.metadata as m; print(json.dumps({{n: m.version(n) for n in {names!r}}}))"
        done = subprocess.run([self.interpreter, "-c", code], check=True, capture_output=True, text=True)
        python = subprocess.run([self.interpreter, "--version"], check=True, capture_output=True, text=True).stdout
        return json.loads(done.stdout) | {"python": python.split()[1]}

    @abstractmethod
    def serving(self, folder: Path, upstream: str) -> AbstractContextManager[Gateway]:
        """Serve as long as the block lasts, in front of the model server at `upstream`."""


class Strop(Side):
    settings = "gateway, store and an engine that answers at once in one process; uvloop"

    def __init__(self, name: str = "strop", *, synchronous: str = "NORMAL", model: Path) -> None:
        self.name, self._synchronous, self._model = name, synchronous, model
        self.keeps = f"SQLite (WAL, synchronous={synchronous}), before the answer is sent"

    @contextmanager
    def serving(self, folder: Path, upstream: str) -> Generator[Gateway]:
        place = folder / self.name.replace(" ", "-")
        place.mkdir()
        command = [sys.executable, PEERS / "gateway_strop.py", place, self._synchronous, self._model]
        with started(*command) as gateway:
            yield gateway

    @staticmethod
    def extensions(folder: Path) -> dict[str, int]:
        """What the store says about the turns of all laps."""
        with sqlite3.connect(folder / "store.sqlite") as db:
            turns, first, extended, branches = db.execute(
                "SELECT count(*), sum(parent IS NULL), sum(parent IS NOT NULL AND branch IS NULL),"
                " sum(branch IS NOT NULL) FROM turns"
            ).fetchone()
        return {"turns": turns, "first": first or 0, "extended_exactly": extended or 0, "branches": branches or 0}


class Verifiers(Side):
    name = "verifiers"
    packages = ("verifiers==0.4.0", "aiohttp==3.14.5", "httpx==0.28.1", "pydantic==2.14.3", *FAST)
    python = "3.12"
    keeps = "memory, until the rollout ends"
    settings = "interception server, relaying client, no hooks; aiohttp on uvloop"

    @contextmanager
    def serving(self, folder: Path, upstream: str) -> Generator[Gateway]:
        with started(self.interpreter, PEERS / "gateway_verifiers.py", upstream) as gateway:
            yield gateway


class LiteLlm(Side):
    name = "litellm"
    packages = ("litellm[proxy]==1.106.2", "aiohttp==3.14.5", *SERVED, *FAST)
    keeps = "nothing"
    settings = (
        "proxy with one model and one key, without which it does not start; no database, no callbacks, no retries; "
        "uvicorn on uvloop with httptools"
    )

    CONFIG: ClassVar[dict[str, Any]] = {
        "litellm_settings": {"num_retries": 0, "telemetry": False, "drop_params": False, "set_verbose": False},
        "general_settings": {"disable_spend_logs": True, "disable_error_logs": True},
        "router_settings": {"num_retries": 0, "disable_cooldowns": True},
    }

    @contextmanager
    def serving(self, folder: Path, upstream: str) -> Generator[Gateway]:
        port, path = free_port(), folder / "litellm.json"
        model = {"model": f"hosted_vllm/{MODEL}", "api_base": upstream, "api_key": "none"}
        path.write_text(json.dumps(self.CONFIG | {"model_list": [{"model_name": MODEL, "litellm_params": model}]}))
        key = f"sk-{secrets.token_hex(32)}"
        environment = {**os.environ, "LITELLM_LOG": "ERROR", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
        environment["LITELLM_MASTER_KEY"] = key
        command = [self.home / "bin" / "litellm", "--config", path, "--host", "127.0.0.1", "--port", str(port)]
        with listening(port, "/health/liveliness", *command, "--num_workers", "1", env=environment) as process:
            yield Same(process, f"http://127.0.0.1:{port}", key)


class Same(Gateway):
    """It knows no rollouts: all go the same way with the same key."""

    def __init__(self, process: subprocess.Popen[str], url: str, key: str) -> None:
        super().__init__(process, url)
        self._key = key

    def make(self, count: int) -> list[Target]:
        return [("/v1/chat/completions", self._key)] * count

    def end(self) -> dict[str, int]:
        return {}


class AgentLightning(Side):
    name = "agentlightning"
    packages = ("agentlightning==1.0.2", *SERVED, *FAST)
    python = "3.12"
    keeps = "memory, for good"
    settings = "agl-server, one model server, no key; uvicorn on uvloop with httptools"

    @contextmanager
    def serving(self, folder: Path, upstream: str) -> Generator[Gateway]:
        port = free_port()
        command = [self.interpreter, PEERS / "gateway_agentlightning.py", str(port), MODEL]
        with listening(port, "/healthz", *command) as process:
            gateway = Rollouts(process, f"http://127.0.0.1:{port}")
            post(f"{gateway.url}/api/models", [{"model": MODEL, "endpoint": upstream}])
            yield gateway


class Rollouts(Gateway):
    """Rollouts are made over its API; it has no way to let go of one."""

    def make(self, count: int) -> list[Target]:
        made = post(f"{self.url}/api/rollouts", [{"input": {"number": number}} for number in range(count)])
        way = "/proxy/rollout/{}/attempt/0/mode/train/openai/v1/chat/completions"
        return [(way.format(rollout["rollout_id"]), "none") for rollout in made]

    def end(self) -> dict[str, int]:
        return {}


class Rllm(Side):
    name = "rllm"
    packages = ("rllm-model-gateway==0.1.0", *SERVED, *FAST)
    keeps = "memory, until the session is deleted"
    settings = "memory store, answers passed on as they are (strip_vllm_fields off); uvicorn on uvloop with httptools"

    @contextmanager
    def serving(self, folder: Path, upstream: str) -> Generator[Gateway]:
        port, path = free_port(), folder / "rllm.json"
        workers = [{"url": upstream, "worker_id": "0"}]
        path.write_text(json.dumps({"workers": workers, "strip_vllm_fields": False, "health_check_interval": 3600}))
        command = [self.home / "bin" / "rllm-model-gateway", "--config", path, "--host", "127.0.0.1"]
        options = ["--port", str(port), "--store", "memory", "--log-level", "error"]
        with listening(port, "/health", *command, *options) as process:
            yield Sessions(process, f"http://127.0.0.1:{port}")


class Sessions(Gateway):
    """A session begins with its first request."""

    def __init__(self, process: subprocess.Popen[str], url: str) -> None:
        super().__init__(process, url)
        self._made = 0
        self._running: list[str] = []

    def make(self, count: int) -> list[Target]:
        names = [f"s{self._made + number}" for number in range(count)]
        self._made += count
        self._running = names
        return [(f"/sessions/{name}/v1/chat/completions", "none") for name in names]

    def end(self) -> dict[str, int]:
        for name in self._running:
            request = urllib.request.Request(f"{self.url}/sessions/{name}", method="DELETE")
            urllib.request.urlopen(request, timeout=60).close()
        self._running = []
        return {}


PEER_SIDES: list[Side] = [LiteLlm(), AgentLightning(), Rllm(), Verifiers()]

# -- processes ---------------------------------------------------------------------------------------------------------


def find_python(version: str) -> str:
    """An interpreter of that version: on the path, or among pyenv's."""
    if f"{sys.version_info.major}.{sys.version_info.minor}" == version:
        return sys.executable
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    found = [*([which] if (which := shutil.which(f"python{version}")) else []), *pyenv.glob(f"{version}.*/bin/python")]
    for python in map(str, found):
        done = subprocess.run([python, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"], capture_output=True)
        if done.stdout.decode().strip() == version:
            return python
    raise SystemExit(f"this peer needs Python {version}: put python{version} on the path, or install it with pyenv")


@contextmanager
def started(*command: str | Path) -> Generator[Ordered]:
    """A process that takes orders: its first line says where it serves."""
    with running(*command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout
        line = process.stdout.readline()
        if not line:
            raise SystemExit(f"{command[1]} did not start, see above")
        with awake_at_last(process):
            yield Ordered(process, json.loads(line)["url"])


@contextmanager
def listening(port: int, health: str, *command: str | Path, **options: Any) -> Generator[subprocess.Popen[str]]:
    """A process that serves at a port once its health can be asked for. Only its errors are shown."""
    with running(*command, stdout=subprocess.DEVNULL, **options) as process:
        for _ in range(1200):
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}{health}", timeout=5).close()
                break
            except OSError:
                if process.poll() is not None:
                    raise SystemExit(f"{command[0]} did not start, see above") from None
                time.sleep(0.1)
        with awake_at_last(process):
            yield process


@contextmanager
def awake_at_last(process: subprocess.Popen[str]) -> Generator[None]:
    """One that sleeps cannot be told to end."""
    try:
        yield
    finally:
        process.send_signal(signal.SIGCONT)


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def post(url: str, body: Any) -> Any:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as answered:
        return json.load(answered)
