"""Where compiled kernels are kept between runs: what torch.compile made once for a model's shapes is read from there
the next time, instead of being made again for half a minute.

torch's own place is under /tmp, which a machine may clear and another user may have made. What lies here is looked up
by torch itself, by the code, the shapes, the settings, its version and the kind of GPU; any of it may be deleted.
"""

from __future__ import annotations

import os
from importlib.metadata import PackageNotFoundError, version

from strop.models.cache import find_root

PARTS = ("torch", "triton", "transformers")


def compile_environment() -> dict[str, str]:
    """Variables for the process that compiles; those that are set already win."""
    root = find_root()
    if not os.access(next(folder for folder in (root, *root.parents) if folder.exists()), os.W_OK):
        return {}  # torch's own place is tried then
    place = root / "compile" / "-".join(_find_version(part) for part in PARTS)
    return {
        "TORCHINDUCTOR_CACHE_DIR": str(place / "inductor"),
        "TRITON_CACHE_DIR": str(place / "triton"),
        "TORCHINDUCTOR_FX_GRAPH_CACHE": "1",
        "TORCHINDUCTOR_AUTOGRAD_CACHE": "1",
    }


def _find_version(name: str) -> str:
    try:
        return version(name).replace("/", "_")
    except PackageNotFoundError:
        return "none"
