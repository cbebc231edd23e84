from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strop.trajectory import Sample, assemble, check, pack
from strop.trajectory.token_tree import PIECE_COST
from strop.types import Rollout, Task, Turn

# Three ids make shared prefixes, equal paths and paths inside paths common.
PATHS = st.lists(
    st.tuples(st.lists(st.integers(0, 2), min_size=1, max_size=8), st.lists(st.integers(0, 2), min_size=1, max_size=5)),
    min_size=1,
    max_size=12,
)
LONGEST = 13


def make(paths):
    samples = []
    for k, (prompt, response) in enumerate(paths):
        id = f"g1.{k}"
        turn = Turn(
            id=f"{id}/1/0", rollout=id, attempt=1, prompt_ids=prompt, response_ids=response, finish="stop",
            logprobs=[-1.0] * len(response), versions=[(0, "1.0")], started=0.0, ended=1.0,
        )  # fmt: skip
        rollout = Rollout(id=id, group="g1", member=k, task=Task(id="t"), status="succeeded", created=0.0)
        samples.append(Sample(rollout, [turn]))
    return assemble(samples, agents=["main"], budget=1000)


def sees(piece, i):
    """The rule, one pair at a time."""
    return [j for j in range(len(piece.ids)) if j <= i < piece.end[j]]


@settings(max_examples=300, deadline=None)
@given(PATHS, st.integers(LONGEST, 40))
def test_every_entry_is_laid_out_once_and_sees_exactly_its_context(paths, budget):
    batch = make(paths)
    pieces = pack(batch, budget)
    check(pieces, batch)
    assert sorted(np.concatenate([p.entry for p in pieces])) == list(range(len(batch.entries)))
    for piece in pieces:
        assert len(piece.ids) <= budget
        for entry, at in zip(piece.entry, piece.at, strict=True):
            turn, index = batch.turns[batch.entries.turn[entry]], batch.entries.index[entry]
            context = sees(piece, at)
            assert piece.ids[context].tolist() == turn.prompt_ids + turn.response_ids[:index]
            assert piece.pos[context].tolist() == list(range(len(context)))


@settings(max_examples=200, deadline=None)
@given(PATHS)
def test_a_prefix_appears_once(paths):
    batch = make(paths)
    (piece,) = pack(batch, 1000)
    contexts = [tuple(piece.ids[sees(piece, i)]) for i in range(len(piece.ids))]
    prefixes = {tuple((p + r)[: n + 1]) for p, r in paths for n in range(len(p + r))}
    assert len(contexts) == len(set(contexts))
    assert set(contexts) == prefixes


@settings(max_examples=100, deadline=None)
@given(PATHS, st.randoms(use_true_random=False), st.integers(LONGEST, 40))
def test_layout_does_not_depend_on_the_order_of_paths(paths, random, budget):
    shuffled = list(paths)
    random.shuffle(shuffled)
    for a, b in zip(pack(make(paths), budget), pack(make(shuffled), budget), strict=True):
        assert all(np.array_equal(getattr(a, n), getattr(b, n)) for n in ("ids", "pos", "end", "at"))


@settings(max_examples=100, deadline=None)
@given(PATHS, st.data())
def test_some_turns_only(paths, data):
    batch = make(paths)
    turns = sorted(data.draw(st.sets(st.integers(0, len(paths) - 1))))
    pieces = pack(batch, LONGEST, turns)
    check(pieces, batch, turns)
    assert {int(t) for p in pieces for t in batch.entries.turn[p.entry]} == set(turns)


def test_worked_example():
    (piece,) = pack(make([([1, 5, 2], [7, 8]), ([1, 5, 2], [7, 9, 3])]), 100)
    assert piece.ids.tolist() == [1, 5, 2, 7, 8, 9, 3]
    assert piece.pos.tolist() == [0, 1, 2, 3, 4, 4, 5]
    assert piece.end.tolist() == [7, 7, 7, 7, 5, 7, 7]
    assert piece.at.tolist() == [2, 3, 2, 3, 5]


def test_a_tree_over_the_budget_is_cut_at_a_branch():
    batch = make([([1, 2, 3], [k, k]) for k in (4, 5, 6)])
    pieces = pack(batch, 7)
    assert [p.ids.tolist() for p in pieces] == [[1, 2, 3, 4, 4, 5, 5], [1, 2, 3, 6, 6]]


def test_trees_are_cut_between_rather_than_within():
    """A greedy layout fills the first micro-batch with half of the second tree, whose prefix it repeats in the next."""
    trees = [[([9 - tree, 7, 7, 7], [k, k]) for k in (1, 2, 3)] for tree in range(3)]
    pieces = pack(make([path for tree in trees for path in tree]), 16)
    assert [len(piece.ids) for piece in pieces] == [10, 10, 10]


def test_micro_batches_are_of_equal_size_where_that_repeats_nothing():
    pieces = pack(make([([k], [k] * 9) for k in range(9)]), 40)
    assert [len(piece.ids) for piece in pieces] == [30, 30, 30]


@settings(max_examples=200, deadline=None)
@given(PATHS, st.integers(LONGEST, 20))
def test_no_way_to_cut_costs_less(paths, budget):
    batch = make(paths)
    pieces = pack(batch, budget)
    leaves = sorted(tuple(p + r) for p, r in paths)
    leaves = [a for a, b in zip(leaves, [*leaves[1:], ()], strict=True) if b[: len(a)] != a]

    def cheapest(begin):
        """Of all ways to cut the paths from here on."""
        costs = [0] if begin == len(leaves) else []
        for end in range(begin + 1, len(leaves) + 1):
            size = len({path[: n + 1] for path in leaves[begin:end] for n in range(len(path))})
            costs += [size + PIECE_COST + cheapest(end)] if size <= budget else []
        return min(costs)

    assert sum(len(piece.ids) + PIECE_COST for piece in pieces) == cheapest(0)


def test_what_travels_to_a_learner_is_laid_out_alike():
    batch = make([([1, 5, 2], [7, 8]), ([1, 5, 2, 7], [8]), ([1, 5, 2], [7, 9, 3])])
    bare = batch.bare()
    check(pack(bare, 100), bare)
    for one, other in zip(pack(batch, 100), pack(bare, 100), strict=True):
        assert all(np.array_equal(getattr(one, n), getattr(other, n)) for n in ("ids", "pos", "end", "at", "entry"))
    assert not any(turn.ids for turn in bare.turns)


def test_no_turns_no_pieces():
    assert pack(make([([1], [2])]), 10, []) == []
    check([], make([([1], [2])]), [])


@pytest.mark.parametrize("column", ["ids", "pos", "end", "at", "entry"])
def test_check_catches_any_column_gone_wrong(column):
    batch = make([([1, 5, 2], [7, 8]), ([1, 5, 2], [7, 9, 3]), ([4], [4, 4])])
    (piece,) = pack(batch, 100)
    for k in range(len(getattr(piece, column))):
        values = getattr(piece, column).copy()
        values[k] += 1 if column != "end" or values[k] < len(piece.ids) else -1
        unread = column == "ids" and not any(k in sees(piece, i) for i in piece.at)
        if unread:
            continue  # the last token of a path predicts nothing
        with pytest.raises((AssertionError, IndexError)):
            check([replace(piece, **{column: values})], batch)
