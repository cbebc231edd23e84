"""What a result was measured on: results/*.json have it beside their figures."""

from __future__ import annotations

import os
import platform
import time
from pathlib import Path
from typing import Any


def hardware(device: str = "cpu") -> dict[str, Any]:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        model = platform.processor()
    found: dict[str, Any] = {"cpu": model, "cores": os.cpu_count(), "system": platform.system()}
    if device == "cuda":
        import torch

        found["gpu"] = torch.cuda.get_device_name()
    return found | {"load_before": os.getloadavg()}


def measure_reference() -> float:
    """CPU milliseconds of some fixed work in Python. CPU time does not count waiting, but cores that share caches and
    units with others do less in it: two figures can be compared where this was alike."""
    began = time.process_time()
    found: dict[int, str] = {}
    for number in range(200_000):
        found[number * 7919 % 50_021] = str(number)
    return (time.process_time() - began) * 1000
