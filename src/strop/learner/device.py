"""Arrays on their way to a device.

A plain copy to a GPU waits until the GPU has done all that it was asked before: the host would lay out and launch the
next micro-batch only when the last one has ended. A copy from pinned memory waits its turn on the GPU, not on the host.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def send(array: np.ndarray, device: torch.device | str, dtype: torch.dtype | None = None) -> Tensor:
    """The array as a tensor there, in `dtype` if one is given. On a CPU it may share the array's memory."""
    tensor = torch.from_numpy(array)
    if torch.device(device).type == "cuda":
        tensor = tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device, dtype or tensor.dtype)
