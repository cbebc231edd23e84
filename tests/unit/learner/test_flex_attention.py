"""Trees for FlexAttention: blocks against the rule itself, on a CPU; on a GPU the kernel against plain operations."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import BlockMask

from strop.learner.blocks import Way
from strop.learner.flex_attention import build_flex_plan, find_blocks_seen, kernel_size, padded_size
from strop.learner.logprobs import compute_hidden_states
from strop.learner.model import load
from strop.learner.tree_attention import plan, visible

ALONE = "ignore:flex_attention called without torch.compile"


def forest(ups):
    """`end` of a forest in depth-first order, from a list of how far up each token's parent is."""
    way, end = [], [0] * len(ups)
    for i, up in enumerate(ups):
        for _ in range(min(up, len(way))):
            end[way.pop()] = i
        way.append(i)
    for j in way:
        end[j] = len(ups)
    return np.array(end)


TREES = st.lists(st.sampled_from([0, 0, 0, 0, 0, 0, 1, 2, 5, 9]), min_size=1, max_size=60).map(forest)


@settings(max_examples=300, deadline=None)
@given(TREES, st.integers(2, 12))
def test_blocks_are_told_apart_as_by_looking_at_every_pair(end, block):
    some, whole = find_blocks_seen(end, block)
    every = np.arange(len(end))
    seen = visible(every, every, end)
    for b in range(len(some)):
        for c in range(len(some)):
            pairs = seen[b * block : (b + 1) * block, c * block : (c + 1) * block]
            assert some[b, c] == pairs.any(), (b, c)
            assert whole[b, c] == (pairs.all() and b != c), (b, c)  # the block itself is always tested


@settings(max_examples=100, deadline=None)
@given(TREES, st.integers(2, 12), st.integers(0, 3))
def test_the_mask_holds_exactly_the_pairs_of_the_rule(end, block, more):
    """Full blocks whole, partial ones by the rule, the others not at all; padding sees itself."""
    size = (-(-len(end) // block) + more) * block
    mask = build_flex_plan(end, "cpu", size=size, block=block).mask
    every = torch.arange(size)
    rule = mask.mask_mod(None, None, every[:, None], every[None, :])
    got = torch.zeros(size, size, dtype=torch.bool)
    for count, indices, full in (
        (mask.kv_num_blocks, mask.kv_indices, False),
        (mask.full_kv_num_blocks, mask.full_kv_indices, True),
    ):
        for b in range(size // block):
            for c in indices[0, 0, b, : count[0, 0, b]].tolist():
                at = slice(b * block, (b + 1) * block), slice(c * block, (c + 1) * block)
                assert not got[at].any()
                got[at] = True if full else rule[at]
    padded = np.append(end, np.arange(len(end), size) + 1)
    wanted = visible(np.arange(size), np.arange(size), padded)
    assert np.array_equal(got.numpy(), wanted)
    assert wanted[len(end) :].sum() == size - len(end)


@settings(max_examples=50, deadline=None)
@given(TREES, st.integers(2, 12))
def test_the_backward_pass_is_told_of_the_same_blocks(end, block):
    """By key block instead of query block: as torch itself would turn it round."""
    mask = build_flex_plan(end, "cpu", size=-(-len(end) // block) * block, block=block).mask
    turned = BlockMask.from_kv_blocks(
        *(mask.kv_num_blocks, mask.kv_indices, mask.full_kv_num_blocks, mask.full_kv_indices), BLOCK_SIZE=block
    )
    for count, indices in (("q_num_blocks", "q_indices"), ("full_q_num_blocks", "full_q_indices")):
        assert torch.equal(getattr(mask, count), getattr(turned, count))
        for b, num in enumerate(getattr(mask, count)[0, 0].tolist()):
            ours, theirs = (getattr(which, indices)[0, 0, b, :num] for which in (mask, turned))
            assert torch.equal(ours, theirs)


def test_sizes_are_few_and_waste_little():
    sizes = {kernel_size(n) for n in range(1, 2**17, 7)}
    assert len(sizes) <= 2 + 8 * 3
    assert all(size % 1024 == 0 for size in sizes)
    assert all(n <= padded_size(n) <= kernel_size(n) for n in range(1, 2**17, 7))
    assert all(kernel_size(n) <= n * 1.25 for n in range(2**14 + 1, 2**17, 7))


@pytest.mark.filterwarnings(ALONE)
def test_same_attention_as_in_plain_operations():
    torch.manual_seed(0)
    end = forest([0] * 90 + [40] + [0] * 60 + [70] + [0] * 20 + [1] * 5)
    n, size = len(end), 192
    q = torch.randn(1, 4, size, 16)
    k, v = torch.randn(2, 1, 2, size, 16)
    ours = build_flex_plan(end, "cpu", size=size, block=32).attend(q, k, v, 0.2)
    plain = plan(end, torch.float32, "cpu").attend(q[:, :, :n], k[:, :, :n], v[:, :, :n], 0.2)
    assert ours.shape == q.shape
    assert torch.allclose(ours[:, :, :n], plain, atol=1e-5)


@pytest.mark.filterwarnings(ALONE)
def test_a_model_has_the_same_hidden_states_either_way(folder):
    model = load(folder)
    rng = np.random.default_rng(0)
    end = forest([0] * 20 + [6] + [0] * 15 + [9] + [0] * 5)
    ids, n = rng.integers(0, 24, len(end)), len(end)
    seen = visible(np.arange(n), np.arange(n), end)
    pos = seen.sum(1) - 1
    with torch.no_grad():
        flex = compute_hidden_states(model, ids, pos, end, Way("flex"))
        assert torch.allclose(flex, compute_hidden_states(model, ids, pos, end), atol=1e-5)


@pytest.mark.gpu
@pytest.mark.filterwarnings("default")  # the compiler's own
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")
@pytest.mark.parametrize("heads", [(4, 4), (8, 2), (7, 1)])
def test_the_kernel_gives_outputs_and_gradients_of_plain_operations(heads):
    torch.manual_seed(0)
    for n in (700, 1500, 1501, 3000):  # the second and third share a kernel and differ in their trees
        end = forest([0] * (n // 2) + [n // 3] + [0] * (n // 4) + [n // 2] + [0] * (n - n // 2 - n // 4 - 2))
        tree = build_flex_plan(end, "cuda")
        q = torch.randn(1, heads[0], tree.size, 64, device="cuda", requires_grad=True)
        k, v = (torch.randn(1, heads[1], tree.size, 64, device="cuda", requires_grad=True) for _ in range(2))
        push = torch.randn(1, heads[0], n, 64, device="cuda")
        found, wanted = [], []
        out = tree.attend(q, k, v, 0.125)[:, :, :n]
        found = [out, *torch.autograd.grad((out * push).sum(), (q, k, v))]
        out = plan(end, torch.float32, "cuda").attend(q[:, :, :n], k[:, :, :n], v[:, :, :n], 0.125)
        wanted = [out, *torch.autograd.grad((out * push).sum(), (q, k, v))]
        for ours, plain in zip(found, wanted, strict=True):
            assert (ours - plain).abs().max() < 2e-2 * plain.abs().max()  # its float32 is TF32


@pytest.mark.gpu
@pytest.mark.filterwarnings("default")  # the compiler's own
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")
@pytest.mark.parametrize("offload", [False, True])
def test_a_learner_on_a_gpu_follows_the_one_on_a_cpu(folder, episodes, offload):
    from strop.algorithms import make
    from strop.config import AlgorithmConfig, LearnerConfig, OptimConfig
    from strop.learner.learner import Learner
    from tests.unit.learner.practice import credited

    norms = []
    for device, more in (("cpu", {}), ("cuda", {"dtype": "bfloat16", "offload": offload})):
        config = LearnerConfig(optim=OptimConfig(lr=1e-3), token_budget=1000, device=device, **more)
        taught = Learner(folder, config, make(AlgorithmConfig(), config))
        norms.append([taught.update(credited(taught, episodes()))["actor/grad_norm"] for _ in range(3)])
        if offload and device == "cuda":
            assert {w.device.type for w in taught.optim.weights().values()} == {"cpu"}
    assert norms[1] == pytest.approx(norms[0], rel=0.1)


@pytest.mark.gpu
@pytest.mark.filterwarnings("default")  # the compiler's own
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")
def test_passes_never_wait_for_the_gpu(folder, episodes):
    """Not between micro-batches either: the next is laid out while the last one is computed."""
    from strop.algorithms import make
    from strop.config import AlgorithmConfig, LearnerConfig
    from strop.learner.learner import Learner
    from tests.unit.learner.practice import credited

    config = LearnerConfig(token_budget=60, device="cuda")
    taught = Learner(folder, config, make(AlgorithmConfig(), config))
    batch = credited(taught, episodes())
    every = np.arange(len(batch.turns))
    for mode in ("default", "error"):  # the first time compiles, which may wait
        torch.cuda.set_sync_debug_mode(mode)
        try:
            passed = taught._gradients(batch, every, 1)
            norm = taught.optim.clip()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        taught._clear()
    assert len(passed) > 1
    assert float(norm) > 0
