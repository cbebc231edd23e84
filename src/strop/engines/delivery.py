"""What an engine with a copy of the weights knows of new ones: which tensors they must be, and what must come of them.

How they get there is the affair of weights/.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

from msgspec import Struct

from strop.errors import EngineError

if TYPE_CHECKING:
    from strop.engines.vllm.protocol import Api

PROBED = 32
"""How many tokens a probe has."""


class TensorSpec(Struct, frozen=True):
    """What is known of a tensor without its values.

    >>> TensorSpec("bfloat16", (448, 128)).shape
    (448, 128)
    """

    dtype: str
    shape: tuple[int, ...]


class LogprobProbe(Struct, frozen=True):
    """Some ids and the logprob of each but the first, as the weights of one version have them."""

    ids: list[int]
    logprobs: list[float]

    def distance(self, logprobs: list[float]) -> float:
        """The mean difference to what somebody else found; infinite if it is none.

        >>> LogprobProbe([1, 2, 3], [-1.0, -2.0]).distance([-1.0, -2.5])
        0.25
        """
        far = [abs(ours - theirs) for ours, theirs in zip(self.logprobs, logprobs, strict=True)]
        mean = sum(far) / len(far)
        return mean if mean == mean else float("inf")


def probe_ids(vocabulary: int) -> list[int]:
    """Always the same ones."""
    draw = random.Random(0)
    return [draw.randrange(vocabulary) for _ in range(PROBED)]


class ModelTensors(Struct, frozen=True):
    """The tensors that a model has. `tied`: its output layer is its embedding, and is not a tensor of its own."""

    specs: dict[str, TensorSpec]
    tied: bool

    def refuse_misfits(self, given: Mapping[str, TensorSpec], what: str) -> None:
        """What has other tensors, by name or shape, is refused before any engine sees it.

        >>> model = ModelTensors({"norm.weight": TensorSpec("float32", (64,))}, tied=False)
        >>> model.refuse_misfits({"norm.weight": TensorSpec("bfloat16", (64,))}, "these weights")
        """
        for name, spec in given.items():
            own = self.specs.get(name)
            if own is None and not self._optional(name):
                raise WeightsRefused(f"{what} do not fit the model: it has no tensor {name}; nothing was changed")
            if own is not None and own.shape != spec.shape:
                raise WeightsRefused(
                    f"{what} do not fit the model: {name} has shape {list(spec.shape)} and should have "
                    f"{list(own.shape)}; nothing was changed"
                )
        if missing := next((name for name in self.specs if name not in given and not self._optional(name)), None):
            raise WeightsRefused(f"{what} are not whole: {missing} is missing; nothing was changed")

    def _optional(self, name: str) -> bool:
        return name.endswith(".inv_freq") or (self.tied and name == "lm_head.weight")


class Delivery(Protocol):
    """How one vLLM server gets a version."""

    async def deliver(self, api: Api, version: str, model: ModelTensors) -> Delivered:
        """Put the weights in place while the server answers nothing. What can be refused is, as `WeightsRefused`,
        before the server is told anything; after any other error nobody knows what it holds."""
        ...


class Delivered(Struct, frozen=True):
    """`model` is what the server calls it, and `probe` what must be found there, if that is known."""

    model: str
    probe: LogprobProbe | None


class WeightsRefused(EngineError):
    """New weights that no engine was told of: the version before is served as if nothing had been."""
