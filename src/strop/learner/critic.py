"""A critic for algorithms that need values: its own copy of the policy's trunk with one number per token on top.

A value belongs to a sampled token and is read where its logits are. The head begins at 0, so that the first values say
nothing rather than something wrong.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from strop.learner.attention import plan
from strop.learner.logprobs import head_of, hidden_states
from strop.trajectory import Piece


class Critic(nn.Module):
    def __init__(self, policy: PreTrainedModel) -> None:
        super().__init__()
        self.trunk = copy.deepcopy(policy)
        if not self.trunk.config.tie_word_embeddings:
            head_of(self.trunk).requires_grad_(False)  # its logits are never asked for
        self.head = nn.Linear(self.trunk.config.hidden_size, 1, dtype=policy.dtype, device=policy.device)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, piece: Piece) -> Tensor:
        """A value for every entry of the piece, [entries]."""
        tree = plan(piece.end, self.trunk.dtype, self.trunk.device)
        hidden = hidden_states(self.trunk, piece.ids, piece.pos, tree)
        at = torch.from_numpy(piece.at).to(hidden.device)
        return self.head(hidden.index_select(0, at))[:, 0]
