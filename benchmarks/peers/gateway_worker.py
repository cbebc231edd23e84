"""The gateway of a worker process of the benchmark (`gateway_strop.py` starts them)."""

from __future__ import annotations

from pathlib import Path

from gateway_strop import make_engine, make_gateway

from strop.gateway.app import Gateway
from strop.gateway.template import Renderer
from strop.gateway.worker import WorkerParts


def make(given: tuple[Path, tuple[list[int], int, float, int], bool], parts: WorkerParts) -> Gateway:
    """With an engine of its own, or with the one in the process that owns the store."""
    model, pace, relayed = given
    engine = parts.engine("main") if relayed else make_engine(*pace)
    return make_gateway(parts.store, engine, Renderer.from_folder(model), in_flight=parts.in_flight)
