"""How a new version reaches engines.

    shared   learner and engine hold the same tensors: only the name of the version is passed on
    files    a folder per version, which engines read; the only way that also serves an engine that was started again
    ipc      handles of the learner's GPU memory, to an engine on the same GPUs
    nccl     tensors broadcast to an engine on GPUs of its own

All but `shared` end with a probe: the logprobs of a few tokens, computed by the learner and asked of the engine, must
agree. It costs one short forward pass and shows what no checksum would: that the tensors are where they belong.
"""

from __future__ import annotations

from abc import ABC, abstractmethod


class Weights(ABC):
    @abstractmethod
    async def publish(self, version: str) -> None:
        """Make every engine serve `version`; returns once they do."""
