"""Masks of tokens as tensors."""

from __future__ import annotations

import torch
from torch import Tensor


def unpack(masks: Tensor, vocabulary: int) -> Tensor:
    """Bits in words of 32, [..., words], as booleans, [..., vocabulary].

    >>> unpack(torch.tensor([[0b101]], dtype=torch.int32), 4).tolist()
    [[True, False, True, False]]
    """
    shifts = torch.arange(32, dtype=torch.int32, device=masks.device)
    return ((masks[..., None] >> shifts) & 1).bool().flatten(-2)[..., :vocabulary]
