import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from strop.trajectory import check, pack
from strop.trajectory.balance import distribute, estimate_work, pack_balanced
from tests.unit.trajectory.test_token_tree import LONGEST, PATHS, make


@settings(max_examples=200, deadline=None)
@given(PATHS, st.integers(LONGEST, 40), st.integers(1, 3))
def test_balanced_pieces_hold_the_same_entries_and_are_no_more_nor_larger(paths, budget, ranks):
    batch = make(paths)
    plain, pieces = pack(batch, budget), pack_balanced(batch, budget, ranks=ranks)
    check(pieces, batch)
    assert len(pieces) <= -(-len(plain) // ranks) * ranks
    assert max(len(p.ids) for p in pieces) <= max(len(p.ids) for p in plain)


def test_a_small_rest_is_spread_over_the_others():
    batch = make([([k], [k] * 9) for k in range(11)])  # eleven paths of ten tokens that share nothing
    assert [len(p.ids) for p in pack(batch, 40)] == [40, 40, 30]
    batch = make([([k], [k] * 9) for k in range(9)])
    assert [len(p.ids) for p in pack(batch, 40)] == [40, 40, 10]
    assert [len(p.ids) for p in pack_balanced(batch, 40)] == [30, 30, 30]
    assert [len(p.ids) for p in pack_balanced(batch, 40, ranks=2)] == [30, 30, 30]


@settings(max_examples=200, deadline=None)
@given(PATHS, st.integers(LONGEST, 25), st.integers(1, 4))
def test_every_piece_has_one_rank_and_ranks_have_equally_many(paths, budget, ranks):
    pieces = pack(make(paths), budget)
    parts = distribute(pieces, ranks, width=8)
    assert sorted(id(p) for part in parts for p in part) == sorted(id(p) for p in pieces)
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_ranks_have_about_the_same_work():
    batch = make([([k], [k] * n) for k, n in enumerate([40, 30, 20, 20, 20, 10])])
    pieces = pack(batch, 41)
    done = [sum(estimate_work(p, 64) for p in part) for part in distribute(pieces, 2, 64)]
    assert max(done) <= 4 / 3 * sum(done) / 2  # what taking the largest first promises


def test_work_counts_what_is_seen():
    (piece,) = pack(make([([1, 1, 1], [1])]), 100)
    assert estimate_work(piece, 1) == 4 + np.arange(1, 5).sum() / 6
