"""A model of the same process that follows another's weights, version by version, instead of sharing them."""

from __future__ import annotations

import copy
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn


class ModelCopy:
    """`model` is a copy of the one given, as it was when it was last refreshed. On a GPU it is run in a stream of its
    own, so that it does not wait behind whatever the other has been asked to compute."""

    def __init__(self, of: nn.Module) -> None:
        self._of = of
        self.model: Any = copy.deepcopy(of).requires_grad_(False)
        device = next(of.parameters()).device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def stream(self) -> AbstractContextManager[Any]:
        return torch.cuda.stream(self._stream) if self._stream is not None else nullcontext()

    @torch.no_grad()
    def refresh(self) -> None:
        """Take the other's weights as they are now. Neither may be at work meanwhile."""
        if self._stream is not None:
            torch.cuda.synchronize()
        for ours, theirs in zip(self.model.parameters(), self._of.parameters(), strict=True):
            ours.copy_(theirs)
        if self._stream is not None:
            torch.cuda.synchronize()
