"""Joining the Ray cluster that was asked for, or starting one on this machine; and whether its head is still there."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

from strop.errors import ConfigError, HeadLost, PlaceError
from strop.imports import one_line, to_install
from strop.net.secrets import without_secrets

AUTO = "auto"
STORE_BYTES = 128 * 2**20
"""Of a cluster that we start: nothing large goes through Ray's object store."""
REACH_SECONDS = 5.0
MODE = "RAY_AUTH_MODE"
NEEDS_TOKEN, ASK_SECONDS = 3, 60.0
ASK_HEAD = f"""
import sys
from ray._raylet import GcsClient
try:
    GcsClient(address=sys.argv[1]).get_all_node_info(timeout=5)
except Exception as error:
    sys.exit({NEEDS_TOKEN} if type(error).__name__ == "AuthenticationError" else 0)
"""
LOOK_SECONDS, MISSED = 2.0, 5
"""Seconds between two looks whether the head is there, and how many in a row must fail until it counts as gone. Ray
itself waits for a minute and then ends the process in the middle of whatever it does."""


def import_ray(address: str = "") -> Any:
    """Ray, or `ConfigError` where it is not installed. Of a cluster at `address` it is found out first whether it asks
    for a token, since Ray looks whether it is to say one once, as it is imported."""
    try:
        if address not in ("", AUTO) and "ray" not in sys.modules:
            refuse_unreachable(address)
            use_token(address)
        return import_module("ray")
    except ImportError:
        raise ConfigError(
            f"a run on a cluster needs Ray, which is not installed. Fix: {to_install('ray')}, or leave --cluster out"
        ) from None


def use_token(address: str) -> None:
    """Say Ray's token to a cluster that asks for one, and only to such: one that asks for none would take this command
    for dead. Raises `PlaceError` where there is no token, or another one."""
    if not asks_for_token(address):
        return
    given = next((name for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH") if os.environ.get(name)), "")
    default = Path.home() / ".ray" / "auth_token"
    if not given and not default.is_file():
        raise PlaceError(
            f"the Ray cluster at {address} asks for a token, and there is none in {default}. Fix: copy it from the head"
        )
    os.environ[MODE] = "token"
    if asks_for_token(address):
        raise PlaceError(
            f"the Ray cluster at {address} asks for another token than the one in {given or default}. Fix: copy it "
            "from the head"
        )


def asks_for_token(address: str) -> bool:
    """Whether the head refuses what a process with this one's environment says. A process of its own finds out, since
    Ray would go on as it was imported there."""
    words = [sys.executable, "-c", ASK_HEAD, address]
    return subprocess.run(words, capture_output=True, timeout=ASK_SECONDS, check=False).returncode == NEEDS_TOKEN


def import_part(name: str) -> Any:
    """A module of Ray's, which has no types that could be checked where it is not installed."""
    return import_module(f"ray.{name}")


@contextmanager
def join_cluster(address: str) -> Generator[tuple[str, str]]:
    """Be part of the cluster until the end of the block: gives the address by which its nodes reach this machine, and
    which cluster it is, in words. What was started for it is ended with it."""
    ray = import_ray()
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # or else it warns of a change to come
    if ray.is_initialized():
        raise PlaceError("this process is part of a Ray cluster already. Fix: call ray.shutdown() first")
    if address != AUTO:
        refuse_unreachable(address)
    keep_quiet()
    options: dict[str, Any] = {"logging_level": "ERROR", "log_to_driver": False, "namespace": "strop"}
    try:
        started = join(ray, address, options)
        how = "started on this machine for this run" if started else f"the one at {find_head(ray)}"
        yield ray.util.get_node_ip_address(), f"cluster: {how}"
    finally:
        ray.shutdown()


def keep_quiet() -> None:
    """Ray prints what it thinks of workers that died, in between what a command prints: it is among our events, and in
    Ray's own logs. There is no setting for it."""
    worker = import_part("_private.worker")
    if hasattr(worker, "print_to_stdstream"):
        worker.print_to_stdstream = print_nothing


def print_nothing(*said: Any, **how: Any) -> None: ...


def join(ray: Any, address: str, options: dict[str, Any]) -> bool:
    """Whether one had to be started."""
    try:
        ray.init(address=address, **options)
        return False
    except ConnectionError as error:
        if address != AUTO:
            raise refuse(address, error) from None
        with without_secrets():  # or else agents on it would inherit them
            ray.init(address="local", include_dashboard=False, object_store_memory=STORE_BYTES, **options)
        return True
    except Exception as error:
        raise refuse(address, error) from None


def take_signals_back() -> None:
    """Ray has SIGTERM print where every call is, and end the process 3 seconds later, however much there is to give
    back. From now on it does again what it did before."""
    if (handler := signal.getsignal(signal.SIGTERM)) is not None:
        signal.signal(signal.SIGTERM, handler)


def refuse(address: str, error: Exception) -> PlaceError:
    """What Ray said, as a sentence."""
    said = " ".join(str(error).split())
    if "ersion mismatch" in said:
        return PlaceError(
            f"the Ray cluster at {address} has another version of Ray or Python than this machine ({said}). Fix: use "
            "the same ones everywhere"
        )
    return PlaceError(
        f"the Ray cluster at {address} cannot be joined ({one_line(error)}). Fix: see `ray status` on its head, or "
        "start one with `ray start --head`"
    )


def find_head(ray: Any) -> str:
    """HOST:PORT of the head of the cluster that this process is part of."""
    return ray.get_runtime_context().gcs_address


async def watch_head(address: str) -> None:
    """Raises `HeadLost` once the head of the cluster is gone. Never returns."""
    host, _, port = address.rpartition(":")
    missed = 0
    while missed < MISSED:
        await asyncio.sleep(LOOK_SECONDS)
        try:
            async with asyncio.timeout(REACH_SECONDS):
                _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
            writer.close()
            missed = 0
        except (OSError, TimeoutError):
            missed += 1
    raise HeadLost(
        f"the head of the Ray cluster at {address} is gone, and nothing can be placed without it. Fix: start a cluster "
        "again, and go on with `strop train --resume`, and --cluster where its address is another"
    )


def refuse_unreachable(address: str) -> None:
    """Said at once: Ray itself tries for a minute."""
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdigit():
        raise ConfigError(f"cluster.address is {address!r}. Fix: give HOST:PORT of the cluster's head, or auto")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=REACH_SECONDS).close()
    except OSError as error:
        raise PlaceError(
            f"nothing answers at {address}, where the head of the Ray cluster should be ({error}). Fix: check the "
            "address, or start one there with `ray start --head`"
        ) from None
