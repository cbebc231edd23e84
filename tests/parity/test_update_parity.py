"""What an update leaves behind is what plain rows and a plain AdamW leave, however its turns came, were named or were
packed."""

import random
from dataclasses import replace

import msgspec
import numpy as np
import pytest
import torch
from torch.nn.utils import clip_grad_norm_

from strop.learner import learner as step
from strop.trajectory import Sample, pack
from tests.parity.forests import EXAMPLE
from tests.parity.rows import unrounded
from tests.parity.trees import CASES, OPTIM, Both, compare, longest

pytestmark = pytest.mark.usefixtures("one_thread")

STEPPED = ["grpo, kl and correction", "gspo", "ppo", "ppo, one trunk", "ppo, lora"]


def shares(both):
    """Turns by the half of the groups they are in, of those that carry weight; the first half is the larger."""
    entries = both.entries
    groups = sorted(set(entries.group[entries.weight > 0].tolist()))
    middle = (len(groups) + 1) // 2
    of = [entries.group[both.batch.starts[t]] for t in range(len(both.batch.turns))]
    return [[t for t, group in enumerate(of) if group in half] for half in (groups[:middle], groups[middle:])]


def plain_adamw(leaves):
    leaves = [leaf for leaf in leaves if leaf.requires_grad]
    matrices = {"params": [p for p in leaves if p.ndim > 1], "weight_decay": OPTIM.weight_decay}
    others = {"params": [p for p in leaves if p.ndim < 2], "weight_decay": 0.0}
    groups = [group for group in (matrices, others) if group["params"]]
    return leaves, torch.optim.AdamW(groups, lr=OPTIM.lr, betas=OPTIM.betas, foreach=False, fused=False)


@pytest.mark.parametrize("name", STEPPED)
def test_four_optimizer_steps_leave_the_same_weights(llama, name):
    """Two steps of two shares each, with clipping and weight decay."""
    with unrounded():
        both = Both(llama, replace(CASES[name], updates=2), EXAMPLE, budget=40)
        halves = shares(both)
        assert all(halves)
        rows = both.rows
        before = {n: w.clone() for n, w in both.trained().items()}
        optimizers = [plain_adamw(rows.weights.values())]
        if rows.critic:
            optimizers.append(plain_adamw(rows.critic.values()))
        for _ in range(2):
            both.learner.update(both.batch)
            for half in halves:
                gradients, _ = both.row_gradients(half, shares=2)
                leaves = rows.weights | {f"critic.{n}": w for n, w in rows.critic.items()}
                for leaf, gradient in gradients.items():
                    leaves[leaf].grad = gradient
                for trained, adam in optimizers:
                    clip_grad_norm_(trained, OPTIM.grad_clip)
                    adam.step()
                    adam.zero_grad()
    assert both.learner.optim.steps == 4
    after = both.trained()
    leaves = rows.weights | {f"critic.{n}": w for n, w in rows.critic.items()}
    compare(after, {n: leaves[n].detach() for n in after}, 1e-9)
    moved = [n for n, w in after.items() if not torch.allclose(w, before[n], atol=1e-4)]
    assert len(moved) == len(after), set(after) - set(moved)


@pytest.mark.parametrize("name", ["grpo, kl and correction", "gspo", "ppo", "ppo, one trunk, lora"])
def test_the_token_budget_changes_no_gradient(llama, name):
    tight = longest(EXAMPLE)
    with unrounded():
        whole, metrics, _ = Both(llama, CASES[name], EXAMPLE, budget=1000).tree_gradients()
        counts = set()
        for budget in (tight, tight + 1, tight + 7, 60):
            both = Both(llama, CASES[name], EXAMPLE, budget)
            counts.add(len(pack(both.batch, budget)))
            found, other, _ = both.tree_gradients()
            compare(found, whole, 1e-12)
            assert other["actor/pg_loss"] == pytest.approx(metrics["actor/pg_loss"], abs=1e-12)
    assert len(counts) > 2


def in_other_order(samples, seed):
    """The same rollouts, that ended in another order, in groups and with members of other names."""
    rng = random.Random(seed)
    groups = sorted({s.rollout.group for s in samples})
    names = dict(zip(groups, rng.sample(groups, len(groups)), strict=True))
    found = []
    for sample in samples:
        rollout = msgspec.structs.replace(
            sample.rollout, group=names[sample.rollout.group], member=9 - sample.rollout.member
        )
        found.append(Sample(rollout, rng.sample(sample.turns, len(sample.turns))))
    return rng.sample(found, len(found))


@pytest.mark.parametrize("name", ["grpo", "gspo", "ppo", "ppo, one trunk"])
def test_the_order_of_turns_changes_no_gradient(llama, name):
    with unrounded():
        expected, _, _ = Both(llama, CASES[name], EXAMPLE, budget=40).tree_gradients()
        for seed in range(3):
            both = Both(llama, CASES[name], in_other_order(EXAMPLE, seed), budget=40)
            assert [s.rollout.id for s in both.batch.samples] != [s.rollout.id for s in EXAMPLE]
            compare(both.tree_gradients()[0], expected, 1e-12)


# -- turns that say wrong things about each other ----------------------------------------------------------------------


def lying(samples):
    """Every turn says that it extends some other one, further than it does or than there is anything to extend."""
    turns = [turn.id for sample in samples for turn in sample.turns]
    found = []
    for sample in samples:
        lies = [
            msgspec.structs.replace(turn, parent=turns[(turns.index(turn.id) + 5) % len(turns)], shared=10**6)
            for turn in sample.turns
        ]
        found.append(Sample(sample.rollout, lies))
    return found


@pytest.mark.parametrize("name", ["grpo", "ppo, one trunk"])
def test_a_turn_that_lies_about_its_parent_trains_its_own_ids(llama, name):
    """Contexts are found by comparing recorded ids, never by what turns say of each other: `parent` and `shared` are
    for people to look at. A turn that disagrees with its parent is a branch like any other, and nothing is left out."""
    with unrounded():
        honest = Both(llama, CASES[name], EXAMPLE, budget=40)
        liar = Both(llama, CASES[name], lying(EXAMPLE), budget=40)
        assert liar.batch.counts() == honest.batch.counts()
        for one, other in zip(pack(liar.batch, 40), pack(honest.batch, 40), strict=True):
            assert all(np.array_equal(getattr(one, n), getattr(other, n)) for n in ("ids", "pos", "end", "entry", "at"))
        liar.compare_scores(1e-9)
        liar.compare_update(1e-9)


@pytest.mark.parametrize("column", ["ids", "pos", "end", "at"])
def test_a_context_that_is_not_the_turns_own_never_trains(llama, monkeypatch, column):
    """Should a tree ever hold other ids than its turns, it is noticed before anything is computed from it."""
    both = Both(llama, CASES["grpo"], EXAMPLE, budget=1000)

    def wrong(batch, budget, turns, count):
        (piece,) = pack(batch, budget, turns)
        changed = getattr(piece, column).copy()
        changed[3] += 1 if column != "end" else -1
        return [replace(piece, **{column: changed})]

    before = both.learner.digest()
    monkeypatch.setattr(step, "pack_evenly", wrong)
    with pytest.raises(AssertionError):
        both.learner.update(both.batch)
    assert both.learner.digest() == before
    assert both.learner.optim.steps == 0
