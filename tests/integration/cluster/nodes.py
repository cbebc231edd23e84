"""A real Ray cluster of several nodes on this machine, and runs on it as a user would start them."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from strop.types import TERMINAL
from tests import runs
from tests.runs import SMALL

STORE_BYTES = 80 * 2**20
TWO_RANKS = ["learner.ranks=2", "cluster.rank_cpus=2", "cluster.runners=2", "runner.workers=4", "runner.lease=3"]
"""With nodes of three CPUs: a rank and a runner pool on each."""


class Nodes:
    """A head that runs nothing, and nodes with CPUs in name only."""

    def __init__(self, *cpus: int, **head: Any) -> None:
        from ray.cluster_utils import Cluster

        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        options = {"num_cpus": 0, "object_store_memory": STORE_BYTES, "include_dashboard": False, **head}
        self.cluster = Cluster(initialize_head=True, head_node_args=options, shutdown_at_exit=True)
        self.added = [self.add(count) for count in cpus]

    @property
    def address(self) -> str:
        address = self.cluster.address
        assert address is not None
        return address

    def add(self, cpus: int, **options: Any) -> Any:
        return self.cluster.add_node(num_cpus=cpus, object_store_memory=STORE_BYTES, **options)

    def remove(self, node: Any) -> None:
        """As when the machine dies."""
        self.cluster.remove_node(node, allow_graceful=False)

    def close(self) -> None:
        self.cluster.shutdown()


class ClusterRun:
    """A run of the small demo on a cluster."""

    def __init__(self, folder: Path, address: str, *settings: str) -> None:
        self.folder = folder
        words = [*SMALL, "loop.steps=3", "loop.checkpoint_every=1", "loop.eval_splits=[]", f"cluster.address={address}"]
        self.command = [word for word in runs.demo(folder, *words, *settings) if word != "--json"]
        self.begin()

    def begin(self) -> None:
        """Anew, once the command has ended."""
        self._start(self.command)

    def resume(self, *options: str) -> None:
        """The same with what is there."""
        self._start(runs.strop("train", "--resume", self.folder, *options))

    def _start(self, command: list[str]) -> None:
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def wait_for(self, moment: Callable[[], Any], limit: float = 240) -> Any:
        deadline = time.monotonic() + limit
        while not (found := moment()):
            assert self.process.poll() is None, self.process.communicate()
            assert time.monotonic() < deadline, "the moment never came"
            time.sleep(0.02)
        return found

    def events(self, event: str, what: str = "") -> list[dict[str, Any]]:
        """Those that begin with these words."""
        file = self.folder / "cluster.jsonl"
        lines = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
        return [line for line in lines if line["event"].startswith(event) and line["what"].startswith(what)]

    def finish(self, timeout: float = 280) -> str:
        """What it printed; it must succeed."""
        stdout, stderr = self.process.communicate(timeout=timeout)
        assert self.process.returncode == 0, stderr + stdout
        return stdout

    def check(self, steps: int = 3, url: str = "", *, rollouts: int = 16) -> runs.Story:
        """Every rollout has ended, and was trained on once; none is missing of so many in each step."""
        told = runs.story(self.folder, url)
        assert [step.number for step in told.steps] == list(range(1, steps + 1))
        assert set(Counter(id for step in told.steps for id in step.rollouts).values()) == {1}
        assert sum(len(step.rollouts) for step in told.steps) == steps * rollouts
        assert all(rollout.status in TERMINAL for rollout in told.rollouts)
        by_id = {rollout.id: rollout for rollout in told.rollouts}
        for step in told.steps:
            assert all(by_id[id].status == "succeeded" and told.turns[id] for id in step.rollouts)
        return told

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        with suppress(ValueError):  # it was finished
            self.process.communicate()


def find_processes(folder: Path) -> list[int]:
    """Those that write to a log in a run's folder: ranks, runners, and what they started."""
    found: list[int] = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with suppress(OSError):
                opened = {os.readlink(fd) for fd in (entry / "fd").iterdir()}
                if any(name.startswith(f"{folder}/") for name in opened):
                    found.append(int(entry.name))
    return found


def list_groups(address: str) -> list[str]:
    """The placement groups of a cluster that are not removed."""
    code = (
        f"import ray; ray.init(address={address!r}, logging_level='ERROR', log_to_driver=False);"
        "from ray.util.placement_group import placement_group_table;"
        "print([one for one, told in placement_group_table().items() if told['state'] != 'REMOVED'])"
    )
    import sys

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return json.loads(done.stdout.strip().splitlines()[-1].replace("'", '"'))
