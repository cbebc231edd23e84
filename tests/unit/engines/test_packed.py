"""Attention of tokens being decoded, as a CPU computes it, against torch's own."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from strop.engines.embedded.packed import attend_on_cpu


@pytest.mark.parametrize("queries", [1, 3])
@pytest.mark.parametrize("scale", [None, 0.3])
@torch.inference_mode()
def test_it_attends_like_torch(queries: int, scale: float | None) -> None:
    torch.manual_seed(0)
    cache = torch.randn(2, 6, 2, 40, 16)  # keys and values of 6 rows: 2 heads, 40 columns
    for rows, width, ragged in ((slice(0, 6), 40, True), (slice(2, 5), 17, True), (slice(5, 6), 1, False)):
        count = rows.stop - rows.start
        query = torch.randn(2, queries, count, 16).permute(2, 0, 1, 3)  # as the model leaves it
        key, value = cache[:, rows, :, :width]
        mask = None
        if ragged:
            lengths = torch.randint(1, width + 1, (count,))
            mask = torch.zeros(count, 1, 1, width)
            mask.masked_fill_((torch.arange(width) >= lengths[:, None])[:, None, None], -torch.inf)
        wanted = scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale)
        assert torch.allclose(attend_on_cpu(query, key, value, mask, scale=scale), wanted, atol=1e-5)
