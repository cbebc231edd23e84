"""Masks of tokens as tensors."""

from __future__ import annotations

import torch
from torch import Tensor


def unpack(masks: Tensor, vocabulary: int) -> Tensor:
    """Bits in words of 32, [..., words], as booleans, [..., vocabulary].

    >>> unpack(torch.tensor([[0b101]], dtype=torch.int32), 4).tolist()
    [[True, False, True, False]]
    """
    shifts = torch.arange(8, dtype=torch.uint8, device=masks.device)
    bits = (masks.view(torch.uint8)[..., None] >> shifts) & 1  # the first byte of a word has its lowest bits
    return bits.bool().flatten(-2)[..., :vocabulary]
