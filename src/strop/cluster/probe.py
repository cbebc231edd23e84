"""What every node of the cluster is like, asked there: its versions, and whether it sees the run's folder and reaches
this command.

The question is a function without anything of strop's in it, since a node may have another strop, or none.
"""

from __future__ import annotations

import platform
import secrets
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

from msgspec import Struct
from msgspec.structs import replace

from strop.cluster.calls import find_cause
from strop.cluster.connection import import_part
from strop.cluster.plan import ClusterNode
from strop.errors import PlaceError
from strop.net.server import bind
from strop.version import __version__

PROBE_SECONDS = 60.0
Address = tuple[str, int]
"""Where this command listens."""


class ProbeAnswer(Struct, frozen=True, kw_only=True):
    """What a node said: whether it sees the run's folder, which model is `missing`, why it does not `reach` a port of
    this command, by the setting that names it, and whether Ray's object `store` takes something. `failed` is why it
    could not be asked; one that is `gone` was lost a moment ago."""

    strop: str = ""
    python: str = ""
    sees: bool = True
    missing: str = ""
    reach: dict[str, str] = {}
    store: bool = True
    failed: str = ""
    gone: bool = False


def list_nodes(ray: Any) -> list[ClusterNode]:
    """The nodes that Ray takes to be alive."""
    found = [node for node in ray.nodes() if node["Alive"]]
    addresses = [node["NodeManagerAddress"] for node in found]
    return [
        ClusterNode(
            id=node["NodeID"],
            address=node["NodeManagerAddress"],
            cpus=node["Resources"].get("CPU", 0.0),
            gpus=node["Resources"].get("GPU", 0.0),
            several=addresses.count(node["NodeManagerAddress"]) > 1,
        )
        for node in found
    ]


def probe_nodes(
    ray: Any,
    nodes: Sequence[ClusterNode],
    folder: Path,
    models: Sequence[str],
    ports: Mapping[str, Address],
    given_up: threading.Event,
) -> list[ClusterNode]:
    """Those nodes that are there, with what is wrong with each. `ports` are what they must reach here, by setting."""
    usable = [node for node in nodes if node.cpus]
    with write_marker(folder) as (mark, said):
        asked = [start_probe(ray, node, {mark: said}, models, ports) for node in usable]
        ready, deadline = list[Any](), time.monotonic() + PROBE_SECONDS
        while len(ready) < len(asked) and time.monotonic() < deadline and not given_up.is_set():
            ready = ray.wait(asked, num_returns=len(asked), timeout=1.0)[0]
        answers = [
            read_answer(ray, node, ref) if ref in ready else None for node, ref in zip(usable, asked, strict=True)
        ]
    found = [
        replace(node, trouble=explain_trouble(node, answer, folder, ports))
        for node, answer in zip(usable, answers, strict=True)
        if answer is None or not answer.gone
    ]
    return [*found, *(node for node in nodes if not node.cpus)]


def start_probe(
    ray: Any, node: ClusterNode, marks: dict[str, str], models: Sequence[str], ports: Mapping[str, Address]
) -> Any:
    where = import_part("util.scheduling_strategies").NodeAffinitySchedulingStrategy(node.id, soft=False)
    remote = ray.remote(num_cpus=0, max_retries=0, scheduling_strategy=where)(make_question())
    return remote.remote(marks, list(models), dict(ports))


def make_question() -> Callable[[dict[str, str], list[str], dict[str, Address]], dict[str, Any]]:
    """A function that Ray sends as it is, since it stands inside another one."""

    def look(marks: dict[str, str], models: list[str], ports: dict[str, tuple[str, int]]) -> dict[str, Any]:
        import os
        import platform
        import socket

        answer: dict[str, Any] = {"python": platform.python_version()}
        try:
            from strop.version import __version__ as found

            answer["strop"] = found
        except ImportError:
            answer["strop"] = ""
        for mark, said in marks.items():
            try:
                with open(mark) as file:
                    answer["sees"] = file.read() == said
            except OSError:
                answer["sees"] = False
        answer["missing"] = next((model for model in models if not os.path.isdir(model)), "")
        answer["reach"] = {}
        for setting, address in ports.items():
            try:
                socket.create_connection(address, timeout=5).close()
            except OSError as error:
                answer["reach"][setting] = str(error)
        try:
            from importlib import import_module

            import_module("ray").put(bytes(2**20))
        except Exception as error:
            if type(error).__name__ not in ("ObjectStoreFullError", "OutOfDiskError"):
                raise
            answer["store"] = False
        return answer

    return look


def read_answer(ray: Any, node: ClusterNode, ref: Any) -> ProbeAnswer:
    try:
        return ProbeAnswer(**cast("dict[str, Any]", ray.get(ref)))
    except (ray.exceptions.TaskUnschedulableError, ray.exceptions.NodeDiedError):  # it is asked for no CPUs
        return ProbeAnswer(gone=True)
    except ray.exceptions.RayError as error:
        return ProbeAnswer(failed=find_cause(error))


def explain_trouble(node: ClusterNode, answer: ProbeAnswer | None, folder: Path, ports: Mapping[str, Address]) -> str:
    """What is wrong with a node, as a sentence; empty where nothing is."""
    if answer is None:
        return f"node {node.name} did not answer within {PROBE_SECONDS:g} s. Fix: see `ray status`, or take it out"
    if answer.failed:
        return f"node {node.name} cannot run anything ({answer.failed}). Fix: see `ray status`, or take it out"
    if answer.strop != __version__:
        theirs = f"strop {answer.strop}" if answer.strop else "no strop in the Python that Ray runs"
        return (
            f"node {node.name} has {theirs}, and this machine has {__version__}. Fix: install the same version on "
            "every node"
        )
    if (theirs := answer.python.rpartition(".")[0]) != (ours := platform.python_version().rpartition(".")[0]):
        return f"node {node.name} has Python {theirs}, and this machine has {ours}. Fix: use the same on every node"
    if not answer.sees:
        return (
            f"node {node.name} does not see {folder.absolute()}. Fix: give --folder on a file system that every node "
            "has under the same path"
        )
    if answer.missing:
        return (
            f"node {node.name} does not have the model at {answer.missing}. Fix: put it there, or where every node "
            "sees it, and name that place with policy.model"
        )
    for setting, why in answer.reach.items():
        host, port = ports[setting]
        return (
            f"node {node.name} cannot reach this command at {host}:{port} ({why}). Fix: open a port between them, and "
            f"name it with {setting}"
        )
    if not answer.store:
        return (
            f"the object store of node {node.name} is full. Fix: end what fills it (`ray memory`), or start Ray there "
            "with more --object-store-memory"
        )
    return ""


@contextmanager
def listen_at(listener: Address, gateway: Address | None) -> Generator[dict[str, Address]]:
    """What nodes must reach, by setting. The gateway does not listen yet: its port is open until the end of the block.
    Raises `PlaceError` where it cannot be."""
    if gateway is None:
        yield {"cluster.port": listener}
    else:
        with bind(*gateway, ("gateway.host", "gateway.port")):
            yield {"cluster.port": listener, "gateway.port": gateway}


@contextmanager
def write_marker(folder: Path) -> Generator[tuple[str, str]]:
    """A file beside the run's folder, or above that, with a random word in it, until the end of the block."""
    place = next(one for one in (folder.absolute(), *folder.absolute().parents) if one.is_dir())
    mark, said = place / f".strop-{secrets.token_hex(8)}", secrets.token_hex(8)
    try:
        mark.write_text(said)
    except OSError as error:
        raise PlaceError(f"cannot write into {place} ({error.strerror}). Fix: give another --folder") from None
    try:
        yield str(mark), said
    finally:
        mark.unlink(missing_ok=True)
