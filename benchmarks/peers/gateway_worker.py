"""The gateway of a worker process of the benchmark (`gateway_strop.py` starts them)."""

from __future__ import annotations

from pathlib import Path

from gateway_strop import Instant, make_routes

from strop.gateway.app import Gateway
from strop.gateway.template import Renderer
from strop.gateway.worker import WorkerParts


def make(given: tuple[Path, list[int], bool], parts: WorkerParts) -> Gateway:
    """With an engine of its own, or with the one in the process that owns the store."""
    model, ids, relayed = given
    engine = parts.engine("main") if relayed else Instant(ids)
    return Gateway(parts.store, make_routes(engine, Renderer.from_folder(model)), in_flight=parts.in_flight)
