"""How the pieces of a pass lie: end to end for any, and filled up to the size of a recording on a GPU."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from strop.engines.embedded.passes import PassSlice, end_to_end
from strop.engines.embedded.ragged import RaggedPasses, size_of

DECODING = [PassSlice(4, 9, [7], sampled=True, last=True), PassSlice(6, 2, [8], sampled=True, last=True)]
PROMPTS = [PassSlice(1, 0, [5, 6, 7], sampled=False, last=True), PassSlice(2, 3, [9, 9], sampled=False, last=False)]


def lay_out(pieces: list[PassSlice]) -> tuple[np.ndarray, np.ndarray]:
    passes = object.__new__(RaggedPasses)  # one that can run needs a GPU
    passes._cache = SimpleNamespace(rows=8, width=16)  # pyright: ignore[reportAttributeAccessIssue]
    inputs, starts = passes._lay_out(pieces, size_of(pieces))
    return inputs.numpy(), starts.numpy()


def test_ids_columns_and_rows_stand_end_to_end() -> None:
    assert end_to_end(DECODING).tolist() == [[7, 8], [9, 2], [4, 6]]
    wanted = [[7, 8, 5, 6, 7, 9, 9], [9, 2, 0, 1, 2, 3, 4], [4, 6, 1, 1, 1, 2, 2]]
    assert end_to_end([*DECODING, *PROMPTS]).tolist() == wanted


def test_a_pass_that_decodes_is_filled_up_with_sequences_of_one_token() -> None:
    inputs, (begin, keys, used, last) = lay_out([*DECODING, PassSlice(7, 0, [3], sampled=True, last=True)])
    assert inputs.tolist() == [[7, 8, 3, 0], [9, 2, 0, 0], [4, 6, 7, 8]]
    assert begin.tolist() == [0, 1, 2, 3, 4]
    assert keys.tolist() == [64, 96, 112, 128, 0]
    assert used.tolist() == [10, 3, 1, 1, 0]
    assert last.tolist() == [0, 1, 2, 3, 0]


@pytest.mark.parametrize("pieces", [PROMPTS, [*DECODING, *PROMPTS]])
def test_a_pass_with_prompts_has_one_sequence_more_with_the_tokens_that_fill_it(pieces: list[PassSlice]) -> None:
    inputs, (begin, keys, used, last) = lay_out(pieces)
    count, tokens = len(pieces), sum(len(piece.ids) for piece in pieces)
    assert np.array_equal(inputs[:, :tokens], end_to_end(pieces))
    assert inputs[:, tokens:].tolist() == [[0] * (64 - tokens), [0] * (64 - tokens), [8] * (64 - tokens)]
    ends = np.cumsum([len(piece.ids) for piece in pieces])
    assert begin.tolist() == [0, *ends, *[64] * (len(begin) - 1 - count)]
    assert keys[:count].tolist() == [16 * piece.row for piece in pieces]
    assert set(keys[count:-1]) == {128}
    assert used.tolist() == [*(piece.stop for piece in pieces), *[1] * (len(used) - 1 - count), 0]
    assert last[:-1].tolist() == (begin[1:] - 1).tolist()
