"""A new version, from the learner to the engine.

    prepare    the learner begins what it can, while the step is committed
    publish    stage (the learner) ──▶ engine.load: requests are held back, unless it goes beside what is served
    deliver        hold the server ──▶ send ──▶ let it go on ──▶ verify (a probe's logprobs)
               ◀── requests go on, with the new version

The engine calls `deliver` inside `load`, and again whenever its server was started anew and has lost the weights.
"""

from __future__ import annotations

import time
from contextlib import nullcontext

from strop.engines.base import Engine
from strop.engines.receiver import WeightReceiver
from strop.errors import EngineError
from strop.weights.base import Sent, Transfer


class Publisher:
    """Gives `engine` weights, version by version, by one way. `sending` is how many seconds it took to send the last
    one, to the server that took longest."""

    def __init__(self, engine: Engine, transfer: Transfer) -> None:
        self._engine = engine
        self._transfer = transfer
        self.sending = 0.0

    def prepare(self, version: str) -> None:
        """The learner's present weights are `version`, which will be published next."""
        self._transfer.prepare(version)

    async def publish(self, version: str) -> None:
        """Have the engine serve `version`, the learner's present weights or what lies in a checkpoint; returns once it
        does."""
        self.sending = 0.0
        await self._transfer.stage(version)
        await self._engine.load(version, self)
        await self._transfer.discard_others(version)

    async def deliver(self, version: str, receiver: WeightReceiver) -> str:
        """Send a version and make sure that the server has it; returns what the server calls it."""
        async with nullcontext() if self._transfer.beside and not receiver.asleep else receiver.hold():
            began = time.monotonic()
            sent = await self._transfer.send(version, receiver)
            self.sending = max(self.sending, time.monotonic() - began)
        await verify(version, sent, receiver)
        return sent.model


async def verify(version: str, sent: Sent, receiver: WeightReceiver) -> None:
    """Raises `EngineError` if the server gives other logprobs than the learner."""
    if sent.probe is None:
        return
    far = sent.probe.distance(await receiver.score(sent.probe.ids, model=sent.model))
    if not far <= receiver.limit:
        raise EngineError(
            f"the engine does not serve what was sent as version {version}: the logprobs of a probe differ by "
            f"{far:.2g} in the mean, more than {receiver.limit:g}; the version before is served again{receiver.hint}"
        )
