"""A cluster that asks for Ray's token, as those of newer versions do where there is one."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.limits import stretch

pytest.importorskip("ray", reason="Ray is not installed: make cluster")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

JOIN = """
import sys
from strop.cluster.connection import import_ray, join_cluster
from strop.errors import PlaceError

class Actor:
    def answer(self):
        return 5

try:
    ray = import_ray(sys.argv[1])
except PlaceError as error:
    sys.exit(str(error))
with join_cluster(sys.argv[1]):
    print(len(ray.nodes()), "node", ray.get(ray.remote(Actor).options(num_cpus=0).remote().answer.remote()))
"""


@pytest.fixture
def home() -> Iterator[Path]:
    """It has a token. Its path is short: those of Ray's sockets must be."""
    with tempfile.TemporaryDirectory(prefix="s", ignore_cleanup_errors=True) as folder:
        (Path(folder) / ".ray").mkdir()
        (Path(folder) / ".ray" / "auth_token").write_text("a" * 64)
        yield Path(folder)


def is_answering(port: int) -> bool:
    with socket.socket() as sock:
        return sock.connect_ex(("127.0.0.1", port)) == 0


@pytest.mark.parametrize("mode", ["token", "disabled"])
def test_a_cluster_is_told_the_token_if_it_asks(home: Path, mode: str) -> None:
    """One that does not would take who says one for dead, and end its actors."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    env = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")} | {"HOME": str(home)}
    command = [Path(sys.executable).with_name("ray"), "start", "--head", "--block", f"--port={port}", "--num-cpus=0"]
    command += ["--include-dashboard=false", f"--temp-dir={home}/ray", f"--object-store-memory={80 * 2**20}"]
    head = subprocess.Popen(
        [*command, "--disable-usage-stats"],
        env=env | {"RAY_AUTH_MODE": mode},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )

    def join() -> subprocess.CompletedProcess[str]:
        words = [sys.executable, "-c", JOIN, f"127.0.0.1:{port}"]
        return subprocess.run(words, env=env, capture_output=True, text=True, check=False)

    try:
        deadline = time.monotonic() + stretch(60)
        while not is_answering(port):
            assert time.monotonic() < deadline
            assert head.poll() is None
            time.sleep(0.1)
        done = join()
        assert done.stdout == "1 node 5\n", done.stderr
        if mode == "token":
            (home / ".ray" / "auth_token").write_text("b" * 64)
            done = join()
            assert "asks for another token than the one in" in done.stderr
            assert done.stderr.count("\n") == 1
        (home / ".ray" / "auth_token").unlink()
        done = join()
        if mode == "token":
            assert "asks for a token, and there is none in" in done.stderr
            assert done.stderr.count("\n") == 1
        else:
            assert done.stdout == "1 node 5\n", done.stderr
    finally:
        os.killpg(head.pid, signal.SIGTERM)
        head.wait(60)
