"""What cannot run on a real cluster is said in one sentence, before anything starts."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import runs
from tests.integration.cluster.nodes import Nodes, list_groups
from tests.runs import SMALL

pytest.importorskip("ray", reason="Ray is not installed: make cluster")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300), pytest.mark.filterwarnings("ignore")]

HOLD = """
import sys, ray
ray.init(address=sys.argv[1], logging_level="ERROR", log_to_driver=False)

class Holder:
    def fill(self, size):
        self.held = []
        try:
            for _ in range(size):
                self.held.append(ray.put(bytes(2**20)))
        except (ray.exceptions.ObjectStoreFullError, ray.exceptions.OutOfDiskError):
            pass
        return len(self.held)

holder = ray.remote(Holder).options(num_cpus=int(sys.argv[2])).remote()
print(ray.get(holder.fill.remote(int(sys.argv[3]))), flush=True)
sys.stdin.read()
"""


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    """Where the object store overflows to a disk that counts as full."""
    nodes = Nodes(2, _system_config={"automatic_object_spilling_enabled": False, "local_fs_capacity_threshold": 0.01})
    yield nodes
    nodes.close()


class Holder:
    """Another program on the cluster: it has so many CPUs, and puts so many MiB into its node's object store."""

    def __init__(self, nodes: Nodes, cpus: int, size: int) -> None:
        command = [sys.executable, "-c", HOLD, nodes.address, str(cpus), str(size)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        self.held = int(self._process.stdout.readline())

    def __enter__(self) -> Holder:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()


def refused(folder: Path, *settings: str) -> str:
    done = subprocess.run(runs.demo(folder / "run", *SMALL, *settings), capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith("strop: ")
    assert done.stderr.count("\n") == 1, done.stderr
    assert " Fix: " in done.stderr
    assert not (folder / "run" / "config.json").exists()
    return done.stderr


def test_more_ranks_than_there_is_room(nodes, tmp_path) -> None:
    said = refused(tmp_path, f"cluster.address={nodes.address}", "learner.ranks=3")
    assert "3 learner ranks of 1 CPU each cannot be placed: the cluster has 2 CPUs and 0 GPUs on 1 node" in said
    assert list_groups(nodes.address) == []


def test_gpus_where_there_are_none(nodes, tmp_path) -> None:
    said = refused(tmp_path, f"cluster.address={nodes.address}", "learner.device=cuda")
    assert "no node of the cluster has a GPU" in said


def test_what_others_use(nodes, tmp_path) -> None:
    with Holder(nodes, cpus=2, size=0):
        said = refused(tmp_path, f"cluster.address={nodes.address}", "cluster.timeout=3")
    assert "the cluster has no room now for 1 learner rank of 1 CPU each, which others use" in said
    assert list_groups(nodes.address) == []


def test_ctrl_c_while_it_waits_for_room(nodes, tmp_path) -> None:
    command = runs.demo(tmp_path / "run", *SMALL, f"cluster.address={nodes.address}", "cluster.timeout=250")
    with Holder(nodes, cpus=2, size=0):
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        deadline = time.monotonic() + 60
        while not list_groups(nodes.address):
            assert time.monotonic() < deadline
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=60)
    assert process.returncode == 130
    assert stderr == "strop: stopped; the run had not begun, and nothing of it is kept\n"
    assert list_groups(nodes.address) == []


def test_a_full_object_store(nodes, tmp_path) -> None:
    with Holder(nodes, cpus=1, size=1000) as holder:
        assert 0 < holder.held < 1000
        said = refused(tmp_path, f"cluster.address={nodes.address}")
    assert "the object store of node" in said
    assert "is full" in said


def test_another_version_on_a_node(nodes, tmp_path) -> None:
    other = tmp_path / "other" / "strop"
    other.mkdir(parents=True)
    (other / "__init__.py").touch()
    (other / "version.py").write_text('__version__ = "0.0.1"\n')
    node = nodes.add(1, env_vars={"PYTHONPATH": str(tmp_path / "other")})
    try:
        said = refused(tmp_path, f"cluster.address={nodes.address}")
    finally:
        nodes.remove(node)
    assert "has strop 0.0.1, and this machine has" in said


def test_a_port_that_is_taken(nodes, tmp_path) -> None:
    with socket.create_server(("0.0.0.0", 0)) as taken:
        port = taken.getsockname()[1]
        said = refused(tmp_path, f"cluster.address={nodes.address}", f"cluster.port={port}")
    assert f":{port} for learner ranks" in said


def test_nobody_at_the_address_and_servers_that_cannot_be(nodes, tmp_path) -> None:
    assert "nothing answers at 127.0.0.1:9, " in refused(tmp_path, "cluster.address=127.0.0.1:9")
    vllm = ["engine.name=vllm", "engine.deterministic=false", "engine.vllm.sleep=true", "engine.replicas=2"]
    said = refused(tmp_path, f"cluster.address={nodes.address}", *vllm)
    assert "2 for 2 servers are more than its 1. Fix: set learner.ranks=2" in said
    vllm = ["engine.name=vllm", "engine.deterministic=false", "engine.replicas=2"]
    said = refused(tmp_path, f"cluster.address={nodes.address}", *vllm)
    assert "2 vllm servers of 1 CPU each cannot be placed" in said
    assert "room for 1. Fix: start Ray with more CPUs than there are (--num-cpus), or add nodes" in said
    assert list_groups(nodes.address) == []


def test_from_python_it_is_not_begun(tmp_path, monkeypatch) -> None:
    import strop
    from strop.errors import ConfigError

    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"begun on the command line\. Fix: use `strop train --cluster`"):
        strop.train("strop.demo:agent", "strop.demo:tasks", cluster={"address": "auto"}, quiet=True)
