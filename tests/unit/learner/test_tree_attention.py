import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from strop.learner.model import load
from strop.learner.tree_attention import attention, plan


def forest(parents):
    """`end` of a forest in depth-first order, from a list of how far up each token's parent is."""
    way, end = [], [0] * len(parents)
    for i, up in enumerate(parents):
        for _ in range(min(up, len(way))):
            end[way.pop()] = i
        way.append(i)
    for j in way:
        end[j] = len(parents)
    return np.array(end)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.sampled_from([0, 0, 0, 0, 1, 2, 5]), min_size=1, max_size=40), st.integers(1, 50))
def test_blocks_hold_exactly_the_pairs_of_the_rule(parents, block):
    end = forest(parents)
    tree = plan(end, torch.float32, "cpu", block)
    pairs, start = set(), 0
    for rows, keys, mask in zip(tree.rows, tree.keys.split(tree.widths), tree.masks, strict=True):
        assert set(mask.unique().tolist()) <= {0.0, -torch.inf}
        pairs |= {(start + int(r), int(keys[k])) for r, k in (mask == 0).nonzero()}
        start += rows
    assert start == len(end)
    assert pairs == {(i, j) for i in range(len(end)) for j in range(len(end)) if j <= i < end[j]}


@pytest.mark.parametrize("block", [1, 3, 128])
def test_same_as_dense_attention(block):
    torch.manual_seed(0)
    end = forest([0, 0, 0, 2, 0, 0, 3, 0, 9, 0, 0, 1])
    n = len(end)
    q = torch.randn(1, 4, n, 8, dtype=torch.float64)
    k, v = torch.randn(2, 1, 2, n, 8, dtype=torch.float64)
    sees = torch.tensor([[j <= i < end[j] for j in range(n)] for i in range(n)])
    dense = torch.zeros(n, n, dtype=torch.float64).masked_fill(~sees, -torch.inf)[None, None]
    expected, _ = attention(None, q, k, v, dense, 0.3)
    stock = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=sees, scale=0.3, enable_gqa=True)
    ours, _ = attention(None, q, k, v, None, 0.3, tree=plan(end, torch.float64, "cpu", block))
    assert torch.allclose(ours, expected, atol=1e-12)
    assert torch.allclose(ours, stock.transpose(1, 2), atol=1e-12)


def test_the_model_still_takes_plain_masks(folder):
    """Decoding runs the same model with a mask of its own: Hugging Face must pass a 4D mask on as it is."""
    model = load(folder)
    ids = torch.tensor([[1, 2, 3, 4]])
    plain = model(input_ids=ids).logits
    mask = torch.full((1, 1, 4, 4), -torch.inf).triu(1)
    assert torch.allclose(model(input_ids=ids, attention_mask=mask).logits, plain, atol=1e-6)
    mask[..., 3, 1] = -torch.inf
    assert not torch.allclose(model(input_ids=ids, attention_mask=mask).logits[0, 3], plain[0, 3], atol=1e-4)
