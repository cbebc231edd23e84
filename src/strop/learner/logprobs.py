"""Logprobs and entropies of entries, read from a piece of the token tree where their logits are."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from strop.learner.attention import Plan, plan
from strop.trajectory import Entries, Piece

CHUNK = 2**24
"""Most logits in memory at once. One chunk is kept for the backward pass, several are computed again."""


def hidden_states(model: PreTrainedModel, ids: np.ndarray, pos: np.ndarray, tree: Plan) -> Tensor:
    """The last hidden state of every token, [tokens, width]."""
    device = model.device
    output = model.base_model(
        input_ids=torch.from_numpy(ids)[None].to(device),
        position_ids=torch.from_numpy(pos)[None].to(device),
        attention_mask=torch.zeros(1, 1, 1, 1),  # a 4D mask is taken as it is, so that no N x N mask is made from pos
        use_cache=False,
        tree=tree,
    )
    return output.last_hidden_state[0]


def head_of(model: PreTrainedModel) -> torch.nn.Module:
    """The module that makes logits of hidden states."""
    head = model.get_output_embeddings()
    assert head is not None
    return head


def logprobs(model: PreTrainedModel, piece: Piece, entries: Entries, *, chunk: int = CHUNK) -> tuple[Tensor, Tensor]:
    """log_softmax(logits / T) of each entry's target, and the entropy of that distribution; [entries] each."""
    device = model.device
    hidden = hidden_states(model, piece.ids, piece.pos, plan(piece.end, model.dtype, device))
    at = hidden.index_select(0, torch.from_numpy(piece.at).to(device))
    target = torch.from_numpy(entries.target[piece.entry]).to(device)
    warmth = entries.temperature[piece.entry]
    # Greedy turns never train and are never compared; reading them at 1 only keeps them finite.
    temperature = torch.from_numpy(np.where(warmth > 0, warmth, 1.0)).to(device, at.dtype)
    head = head_of(model)
    rows = max(1, chunk // model.config.vocab_size)
    if len(at) <= rows:
        return _read(head, at, target, temperature)
    parts = [
        checkpoint(_read, head, *columns, use_reentrant=False) if torch.is_grad_enabled() else _read(head, *columns)
        for columns in zip(at.split(rows), target.split(rows), temperature.split(rows), strict=True)
    ]
    logps, entropies = zip(*parts, strict=True)
    return torch.cat(logps), torch.cat(entropies)


def _read(head: torch.nn.Module, hidden: Tensor, target: Tensor, temperature: Tensor) -> tuple[Tensor, Tensor]:
    logps = (head(hidden) / temperature[:, None]).log_softmax(-1)
    entropy = -(logps.exp() * logps).sum(-1)
    return logps.gather(1, target[:, None])[:, 0], entropy
