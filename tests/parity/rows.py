"""The plainest thing that an update could be: one row per turn, stock Hugging Face with eager attention, autograd.

    rows = Rows(stock, weights, critic, trained, scale)    the weights of both, by the learner's names for them
    told = rows.turn(turn)                                 logprobs, entropies and values of one turn
    loss, sums = turn_loss("clip", told, columns, c)       written from the papers; then loss.backward()
    rows.gradients()

Nothing of the learner, the token tree or the algorithms is used: what comes from them are numbers, given as columns.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import functional_call
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from strop.types import Turn

Weights = dict[str, Tensor]
Columns = Mapping[str, Tensor]
"""Of one turn: advantage, weight, proximal, behaviour, ref, value, ret; a number per sampled token each."""


@contextmanager
def unrounded() -> Iterator[None]:
    """Hugging Face rounds to float32 in two places, whatever the weights are: norms, and the softmax of eager
    attention. For a comparison in float64 both stay in float64 here; the sums are the same."""

    def norm(self: Any, x: Tensor) -> Tensor:
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)

    def softmax(x: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
        return x.softmax(dim)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LlamaRMSNorm, "forward", norm)
        patch.setattr(Qwen3RMSNorm, "forward", norm)
        patch.setattr(torch.nn.functional, "softmax", softmax)
        yield


@dataclass(frozen=True)
class Told:
    """What a row says of one turn's sampled tokens. `value` is None without a critic."""

    logp: Tensor
    entropy: Tensor
    value: Tensor | None


class Rows:
    """`weights` and `critic` are copied and become leaves: their gradients are read from them. `trained` names those
    that have any. `scale` is what an adapter's product counts."""

    def __init__(self, stock: Any, weights: Weights, critic: Weights, trained: set[str], scale: float) -> None:
        self.stock, self.scale = stock, scale
        self.weights = {n: w.detach().clone().requires_grad_(n in trained) for n, w in weights.items()}
        self.critic = {n: w.detach().clone().requires_grad_(f"critic.{n}" in trained) for n, w in critic.items()}

    def turn(self, turn: Turn) -> Told:
        hidden, logits = self._run(self.weights, turn)
        logps = (logits / (turn.sampling.temperature or 1.0)).log_softmax(-1)
        logp = torch.stack([row[id] for row, id in zip(logps, turn.response_ids, strict=True)])
        value = None
        if "weight" in self.critic:  # a head on the policy's own hidden states
            value = hidden @ self.critic["weight"][0] + self.critic["bias"][0]
        elif self.critic:
            trunk = {n.removeprefix("trunk."): w for n, w in self.critic.items() if n.startswith("trunk.")}
            value = self._run(trunk, turn)[0] @ self.critic["head.weight"][0] + self.critic["head.bias"][0]
        return Told(logp, -(logps.exp() * logps).sum(-1), value)

    def _run(self, weights: Weights, turn: Turn) -> tuple[Tensor, Tensor]:
        """Hidden states and logits where the sampled tokens are predicted."""
        out = functional_call(
            self.stock,
            _merged(weights, self.scale),
            (torch.tensor([turn.ids]),),
            {"output_hidden_states": True, "use_cache": False},
        )
        predicts = slice(len(turn.prompt_ids) - 1, -1)
        return out.hidden_states[-1][0, predicts], out.logits[0, predicts]

    def gradients(self) -> Weights:
        """By name, the critic's under `critic.`; and forget them."""
        leaves = self.weights | {f"critic.{n}": w for n, w in self.critic.items()}
        found = {n: w.grad for n, w in leaves.items() if w.grad is not None}
        for leaf in leaves.values():
            leaf.grad = None
        return found


def _merged(weights: Weights, scale: float) -> Weights:
    """LoRA (Hu et al. 2021): W + scale B A."""
    plain: Weights = {}
    for name, weight in weights.items():
        stem, inside, _ = name.partition(".base_layer.")
        if inside:
            a, b = (weights[f"{stem}.lora_{x}.default.weight"] for x in "AB")
            plain[f"{stem}.weight"] = weight + scale * (b @ a)
        elif ".lora_" not in name:
            plain[name] = weight
    return plain


# -- losses ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Coefficients:
    clip: float
    clip_high: float
    entropy: float = 0.0
    kl: float = 0.0
    value: float = 1.0
    value_clip: float = 0.5
    correction: float | None = None


def clipped(told: Told, given: Columns, c: Coefficients) -> tuple[Tensor, Tensor]:
    """Schulman et al. 2017, a token at a time: minus min(r A, clip(r) A); at most -3 A where that is positive (Ye et
    al. 2019)."""
    advantage = given["advantage"]
    ratio = torch.exp(told.logp - given["proximal"])
    bounded = torch.clip(ratio, 1 - c.clip, 1 + c.clip_high)
    loss = -torch.min(ratio * advantage, bounded * advantage)
    loss = torch.where(advantage < 0, torch.min(loss, -3.0 * advantage), loss)
    return loss, bounded * advantage < ratio * advantage


def sequence(told: Told, given: Columns, c: Coefficients) -> tuple[Tensor, Tensor]:
    """Zheng et al. 2025: one ratio for the sequence, the geometric mean of its tokens'. Written for
    the whole sequence, whose tokens all have the same advantage; each token then stands for its share of it."""
    advantage = given["advantage"]
    assert (advantage == advantage[0]).all(), "a sequence has one advantage"
    ratio = torch.exp((told.logp - given["proximal"]).sum() / len(told.logp))
    bounded = torch.clip(ratio, 1 - c.clip, 1 + c.clip_high)
    loss = -torch.min(ratio * advantage[0], bounded * advantage[0])
    return loss.expand(len(advantage)), (bounded * advantage[0] < ratio * advantage[0]).expand(len(advantage))


def turn_loss(kind: str, told: Told, given: Columns, c: Coefficients) -> tuple[Tensor, dict[str, float]]:
    """The sum of weight x loss over a turn, and such sums of what metrics are made of.

    The policy's loss, corrected for what the engine found (truncated importance sampling, Yao et al. 2025); k3 to the
    reference, at most 10 (Schulman 2020); an entropy bonus; the critic's squared error, held near what the critic said
    before.
    """
    policy, cut = (sequence if kind == "gspo" else clipped)(told, given, c)
    if c.correction is not None:
        policy = policy * torch.exp(given["proximal"] - given["behaviour"]).clip(max=c.correction)
    loss = policy - c.entropy * told.entropy
    columns = {"actor/pg_loss": policy, "actor/pg_clipfrac": cut, "actor/entropy": told.entropy}
    if c.kl:
        apart = given["ref"] - told.logp
        columns["actor/kl_loss"] = torch.clip(torch.exp(apart) - apart - 1, max=10.0)
        loss = loss + c.kl * columns["actor/kl_loss"]
    if told.value is not None:
        near = given["value"] + torch.clip(told.value - given["value"], -c.value_clip, c.value_clip)
        errors = torch.stack([told.value - given["ret"], near - given["ret"]]) ** 2
        columns["critic/vf_loss"] = 0.5 * errors.max(0).values
        loss = loss + c.value * columns["critic/vf_loss"]
    weight = given["weight"]
    return (weight * loss).sum(), {n: (weight * column).sum().item() for n, column in columns.items()}
