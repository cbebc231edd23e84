"""Copies of tensors that lie in memory of their own."""

import os

import torch

from strop.learner.memory import _left_in_container, available_memory
from strop.learner.snapshot import ALIGN, SnapshotMemory, measure


def test_a_copy_stays_as_it_was():
    bits, matrix = torch.tensor([True, False, True]), torch.randn(4, 6)
    given = {"a": [matrix, (torch.tensor(3.0), 7, "text")], "b": {"t": matrix.t(), "none": None}, "bits": bits}
    copied = SnapshotMemory(torch.device("cpu")).copy(given)
    before = matrix.clone()
    matrix.zero_(), bits.zero_()
    assert torch.equal(copied["a"][0], before)
    assert torch.equal(copied["b"]["t"], before.t())
    assert copied["a"][1] == (torch.tensor(3.0), 7, "text")
    assert type(copied["a"][1]) is tuple
    assert copied["b"]["none"] is None
    assert copied["bits"].tolist() == [True, False, True]
    assert copied["a"][0].untyped_storage().nbytes() == matrix.nbytes  # torch.save writes all of a storage


def test_the_next_copy_lies_in_the_same_memory():
    memory = SnapshotMemory(torch.device("cpu"))
    places = {memory.copy([torch.full((1000,), float(n))])[0].data_ptr() for n in range(3)}
    assert len(places) == 1
    grown = memory.copy([torch.ones(1000), torch.ones(5000)])
    assert [float(tensor.sum()) for tensor in grown] == [1000.0, 5000.0]


def test_what_a_snapshot_takes_is_measured():
    assert measure({"a": torch.zeros(ALIGN // 4), "b": [torch.zeros(1)], "c": 5}) == 2 * ALIGN


def test_a_container_has_what_its_limit_leaves(tmp_path):
    assert _left_in_container(tmp_path) > 2**60
    (tmp_path / "memory.current").write_text("700\n")
    (tmp_path / "memory.stat").write_text("anon 100\ninactive_file 250\n")
    (tmp_path / "memory.max").write_text("max\n")
    assert _left_in_container(tmp_path) > 2**60
    (tmp_path / "memory.max").write_text("1000\n")
    assert _left_in_container(tmp_path) == 550
    assert 0 < available_memory() <= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
