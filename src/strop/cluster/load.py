"""How busy a process on a node is, with all that it has started; measured there."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from pathlib import Path

from msgspec import Struct

from strop.net.process_group import list_descendants

TICKS = os.sysconf("SC_CLK_TCK")
QUERY = ["--query-gpu=utilization.gpu,memory.used", "--format=csv,noheader,nounits"]


class ProcessLoad(Struct, frozen=True):
    """Seconds of CPU that a process and all below it have used so far, and bytes of memory that they have now; and of
    the GPUs that it may use."""

    cpu: float
    memory: int
    gpu: float | None = None
    gpu_memory: int | None = None


def measure_load(pid: int, gpus: str = "") -> ProcessLoad:
    """On the machine where it is. `gpus` are the process's, as CUDA names them."""
    cpu, memory = 0.0, 0
    for one in list_descendants(pid):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            fields = Path(f"/proc/{one}/stat").read_bytes().rpartition(b")")[2].split()
            cpu += sum(map(int, fields[11:15])) / TICKS  # with children that ended
            memory += read_memory(one)
    return ProcessLoad(cpu, memory, *measure_gpus(gpus))


def read_memory(pid: int) -> int:
    """What it shares with others counts in parts."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    return 0


def measure_gpus(gpus: str) -> tuple[float | None, int | None]:
    """Nothing where there are none, or the driver's program is missing."""
    if not gpus or (program := shutil.which("nvidia-smi")) is None:
        return None, None
    try:
        told = subprocess.run([program, *QUERY, "-i", gpus], capture_output=True, text=True, timeout=5, check=True)
        rows = [line.split(",") for line in told.stdout.splitlines() if line.strip()]
        return sum(float(busy) for busy, _ in rows) / 100 / len(rows), sum(int(used) for _, used in rows) * 2**20
    except (OSError, subprocess.SubprocessError, ValueError, ZeroDivisionError):
        return None, None
