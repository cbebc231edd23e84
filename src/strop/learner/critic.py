"""A critic for algorithms that need values: one number per token, on hidden states of a model of its own or of the
policy itself.

A value belongs to a sampled token and is read where its logits are. The head begins at 0, so that the first values say
nothing rather than something wrong, and computes in float32 at least: values are compared with each other.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from strop.learner.blocks import PLAIN, Way
from strop.learner.logprobs import compute_entry_states, find_head, gather_entries
from strop.trajectory import MicroBatch


class ValueHead(nn.Linear):
    """A critic that shares the policy's trunk: it costs no pass of its own, and its loss trains the trunk too."""

    def __init__(self, policy: PreTrainedModel) -> None:
        wide = torch.promote_types(policy.dtype, torch.float32)
        device = None if policy.device.type == "meta" else policy.device  # it has values, whether the policy has or not
        super().__init__(policy.config.hidden_size, 1, dtype=wide, device=device)
        nn.init.zeros_(self.weight)
        nn.init.zeros_(self.bias)

    def forward(self, input: Tensor) -> Tensor:
        """Hidden states [entries, width] in, values [entries] out."""
        return super().forward(input.to(self.weight.dtype))[:, 0]


class Critic(nn.Module):
    """A copy of the policy, adapters included, that is trained by itself."""

    def __init__(self, policy: PreTrainedModel, way: Way = PLAIN) -> None:
        super().__init__()
        self.trunk = copy.deepcopy(policy)
        self.way = way
        if not self.trunk.config.tie_word_embeddings:
            find_head(self.trunk).requires_grad_(False)  # its logits are never asked for
        self.head = ValueHead(policy)

    def forward(self, piece: MicroBatch) -> Tensor:
        """A value for every entry of the piece, [entries]."""
        values = self.head(compute_entry_states(self.trunk, piece, self.way))
        return gather_entries(values, piece, self.way)
