"""How a new version reaches engines.

    shared   learner and engine hold the same tensors: only the name of the version is passed on
    files    a folder per version, which engines read; the only way that also serves an engine that was started again
             after the learner has trained on
    adapters the same, for LoRA adapters beside weights that stay as they are
    checkpoints   past versions, from where they lie
    ipc      handles of the learner's GPU memory, to an engine on the same GPUs
    nccl     tensors broadcast to an engine on GPUs of its own

`Publisher` (publisher.py) drives all of them. All but `shared` and `checkpoints` end with a probe: the logprobs of a
few tokens, computed by the learner and asked of the engine, must agree. It costs one short forward pass and shows what
no checksum would: that the tensors are where they belong.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from msgspec import Struct

from strop.engines.receiver import LogprobProbe, WeightReceiver


class Sent(Struct, frozen=True):
    """`model` is what the server calls what it was sent, and `probe` what must be found there, if that is known."""

    model: str
    probe: LogprobProbe | None


class Transfer(ABC):
    """One way for weights to get from the learner to a server's receiver. `beside`: next to the weights that are
    served, so that requests may be answered meanwhile."""

    beside: ClassVar[bool] = False

    def prepare(self, version: str) -> None:  # noqa: B027 - most have nothing that could be done before
        """The learner's present weights are `version`, which is sent before it trains on: begin what can be begun."""

    async def stage(self, version: str) -> None:  # noqa: B027 - where the learner's memory is read nothing is put aside
        """Have the learner put its present weights, which are `version`, where they can be sent from."""

    @abstractmethod
    async def send(self, version: str, receiver: WeightReceiver) -> Sent:
        """Send a version; the server draws no tokens meanwhile unless it goes `beside`. What can be refused is, as
        `WeightsRefused`, before the receiver is told anything."""

    async def discard_others(self, version: str) -> None:  # noqa: B027 - the same
        """`version` is served: what was put aside for others may go."""
