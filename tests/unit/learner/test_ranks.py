"""What ranks share out, without the processes: see tests/parity/test_ranks.py for those."""

import numpy as np
import pytest

from strop.errors import LearnerError
from strop.learner.ranks import ALONE, measure_work, pack_evenly, share_work
from strop.learner.sequence_parallel import SequenceGroup
from strop.trajectory import assemble, check, pack


@pytest.fixture
def batch(episodes):
    return assemble(episodes(num_groups=4, num_members=6), agents=["main"], budget=1000)


@pytest.mark.parametrize("count", [1, 2, 3, 8])
def test_work_is_done_once_and_evenly(count):
    work = [float(n) for n in np.random.default_rng(0).integers(1, 100, 40)]
    own = share_work(work, count)
    assert sorted(k for each in own for k in each) == list(range(40))
    loads = [sum(work[k] for k in each) for each in own]
    assert max(loads) - min(loads) <= min(work) + max(work) / 4


def test_as_many_pieces_for_each_rank(batch):
    total = sum(len(piece.ids) for piece in pack(batch, 400))
    for count in (2, 3, 4):
        pieces = pack_evenly(batch, 400, None, count)
        check(pieces, batch, None)
        assert len(pieces) % count == 0
        sizes = [len(piece.ids) for piece in pieces]
        assert sum(sizes) <= 1.3 * total
        assert max(sizes) <= 2 * sum(sizes) / len(sizes)


def test_one_rank_packs_as_before(batch):
    ours, theirs = pack_evenly(batch, 300, None, 1), pack(batch, 300)
    assert [piece.ids.tolist() for piece in ours] == [piece.ids.tolist() for piece in theirs]
    assert ALONE.share(theirs, 16) == [(piece, True) for piece in sorted(theirs, key=lambda p: -measure_work(p, 16))]


def test_a_token_that_sees_more_is_more_work(batch):
    (whole,) = pack(batch, 10_000)
    longer = measure_work(whole, 16)
    assert longer > 6 * 16 * len(whole.ids)
    assert measure_work(whole, 64) / longer < 4


@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_every_entry_is_read_by_one_rank_of_a_piece(batch, size):
    (piece,) = pack(batch, 10_000)
    tokens, found = len(piece.ids), []
    for index in range(size):
        group = SequenceGroup(None, index, size)
        own = group.take_own(piece, tokens)
        assert ((own.at >= 0) & (own.at < group.share(tokens))).all()
        assert (piece.at[group.find_own(piece, tokens)[index]] == own.at + index * group.share(tokens)).all()
        found += own.entry.tolist()
    assert sorted(found) == sorted(piece.entry.tolist())


def test_heads_that_cannot_be_shared_out_are_refused():
    SequenceGroup(None, 0, 4).refuse_heads(12)
    with pytest.raises(LearnerError, match=r"12 attention heads\. Fix: set it to 4"):
        SequenceGroup(None, 0, 8).refuse_heads(12)
