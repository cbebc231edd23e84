"""The processes that both sides of a comparison run in: the peer's virtualenv, servers, and those that run laps."""

from __future__ import annotations

import json
import os
import secrets
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

PEERS = Path(__file__).parent
ROOT = PEERS.parent.parent
PEER_HOME = ROOT / ".peers" / "agentlightning"

PEER = ["agentlightning==0.3.0", "httptools==0.9.0"]
"""httptools makes uvicorn, its server, faster; it does not come with it."""
PEER_PINS = [
    "aiohttp==3.14.5",
    "fastapi==0.162.4",
    "opentelemetry-sdk==1.45.2",
    "pydantic==2.14.3",
    "starlette==1.10.0",
    "uvicorn==0.54.0",
    "uvloop==0.23.0",
]
"""What its speed depends on, pinned so that its figures can be had again. None of it asks for torch."""

Laps = dict[str, dict[str, float]]
"""Per verb: rate, cpu_us, p50_ms, p99_ms."""


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


# -- the peer's virtualenv ---------------------------------------------------------------------------------------------


def set_up() -> Path:
    """Make the virtualenv unless it is there as asked for. Returns its Python."""
    python, stamp, wanted = PEER_HOME / "bin" / "python", PEER_HOME / ".installed", "\n".join(PEER + PEER_PINS)
    if not stamp.is_file() or stamp.read_text() != wanted:
        say(f"installing {' '.join(PEER)} into {PEER_HOME.relative_to(ROOT)} (a few minutes, 800 MB)")
        subprocess.run([sys.executable, "-m", "venv", PEER_HOME], check=True)
        pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, *PEER, *PEER_PINS], check=True)
        stamp.write_text(wanted)
    return python


# -- processes ---------------------------------------------------------------------------------------------------------


def import_from(checkout: Path) -> dict[str, str]:
    """Has a process import that checkout's strop, and everything else from where this one does."""
    before = os.environ.get("PYTHONPATH")
    return {"PYTHONPATH": os.pathsep.join([str(checkout.resolve() / "src"), *([before] if before else [])])}


class LapProcess:
    """A process of one side that runs laps when asked to, all of them with the same start-up behind it."""

    def __init__(self, *command: str | Path, checkout: Path | None = None) -> None:
        """`checkout` is whose strop it imports."""
        environment = {**os.environ} | (import_from(checkout) if checkout else {})
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self._process = subprocess.Popen(command, **pipes, cwd=PEERS, env=environment)

    def lap(self, **order: Any) -> Laps:
        assert self._process.stdin
        assert self._process.stdout
        print(json.dumps(order), file=self._process.stdin, flush=True)
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"a lap failed, see above: {order}")
        return json.loads(line)

    def close(self) -> None:
        assert self._process.stdin
        self._process.stdin.close()
        self._process.wait()


@contextmanager
def running(*command: str | Path, **options: Any) -> Generator[subprocess.Popen[str]]:
    """A process for as long as the block lasts."""
    process = subprocess.Popen(command, text=True, cwd=ROOT, **options)
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@contextmanager
def peer_server(python: Path) -> Generator[dict[str, Any]]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    # What it says about itself belongs with the progress, not with the figures.
    with running(python, PEERS / "agentlightning_store.py", "serve", str(port), stdout=sys.stderr) as process:
        for _ in range(600):
            try:
                urllib.request.urlopen(f"{url}/v1/agl/health", timeout=5).close()
                break
            except OSError:
                if process.poll() is not None:
                    raise SystemExit("the peer's server did not start, see above") from None
                time.sleep(0.2)
        yield {"url": url, "pid": process.pid}


@contextmanager
def our_server(folder: Path, synchronous: str = "NORMAL", checkout: Path = ROOT) -> Generator[dict[str, Any]]:
    key = secrets.token_hex(16)
    serve = ["serve", "--folder", folder, "--port", "0", "--synchronous", synchronous, "--json"]
    environment = {**os.environ, "PYTHONPATH": str(checkout.resolve() / "src"), "STROP_KEY": key}
    command = [sys.executable, "-m", "strop.cli", *serve]
    with running(*command, stdout=subprocess.PIPE, env=environment) as process:
        assert process.stdout
        line = process.stdout.readline()
        if not line:
            raise SystemExit("`strop serve` did not start, see above")
        yield {"url": json.loads(line)["url"], "key": key, "pid": process.pid}
