"""What disks and people do to files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path


def cut_off(file: Path) -> None:
    data = file.read_bytes()
    file.write_bytes(data[: len(data) // 2])


def emptied(file: Path) -> None:
    file.write_bytes(b"")


def missing(file: Path) -> None:
    file.unlink()


def garbage(file: Path) -> None:
    file.write_bytes(b"\x8f\x07" * (file.stat().st_size // 2))


def bit_flipped(file: Path) -> None:
    """Near the end, where a file of weights has weights: it loads as before."""
    data = bytearray(file.read_bytes())
    data[-2] ^= 0x10
    file.write_bytes(data)


DAMAGES: list[Callable[[Path], None]] = [cut_off, emptied, missing, garbage, bit_flipped]
