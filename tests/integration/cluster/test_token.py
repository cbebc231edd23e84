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
with join_cluster(sys.argv[1]):
    print(len(import_ray().nodes()), "node")
"""


@pytest.fixture
def home() -> Iterator[Path]:
    """Its path is short: those of Ray's sockets must be."""
    with tempfile.TemporaryDirectory(prefix="s", ignore_cleanup_errors=True) as folder:
        (Path(folder) / ".ray").mkdir()
        (Path(folder) / ".ray" / "auth_token").write_text("a" * 64)
        yield Path(folder)


def test_a_cluster_that_asks_for_the_token_is_joined(home: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    env = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")} | {"HOME": str(home)}
    ray = Path(sys.executable).with_name("ray")
    command = [ray, "start", "--head", "--block", f"--port={port}", "--num-cpus=0", "--include-dashboard=false"]
    head = subprocess.Popen(
        [*command, f"--temp-dir={home}/ray", "--disable-usage-stats", f"--object-store-memory={80 * 2**20}"],
        env=env | {"RAY_AUTH_MODE": "token"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        deadline = time.monotonic() + stretch(60)
        while subprocess.run(
            [sys.executable, "-c", f"import socket; socket.create_connection(('127.0.0.1', {port}))"],
            stderr=subprocess.DEVNULL,
            check=False,
        ).returncode:
            assert time.monotonic() < deadline
            assert head.poll() is None
        done = subprocess.run(
            [sys.executable, "-c", JOIN, f"127.0.0.1:{port}"], env=env, capture_output=True, text=True, check=False
        )
        assert done.stdout == "1 node\n", done.stderr
    finally:
        os.killpg(head.pid, signal.SIGTERM)
        head.wait(60)
