"""The states of every source of random numbers, for checkpoints: torch's on each device, numpy's and Python's."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch


def state() -> dict[str, Any]:
    kind, keys, *rest = np.random.get_state()
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        "numpy": [kind, torch.from_numpy(np.asarray(keys, np.int64)), *rest],
        "python": random.getstate(),
    }


def restore(saved: dict[str, Any]) -> None:
    """On a machine with other GPUs theirs go on as they are."""
    torch.set_rng_state(saved["torch"])
    if len(saved["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(saved["cuda"])
    kind, keys, *rest = saved["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))
    random.setstate(saved["python"])
