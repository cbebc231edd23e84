"""Files that are hashed while they are written."""

import errno
import hashlib
import os

import pytest
import torch
from safetensors.torch import load_file, save_file

from strop.learner import summed_file
from strop.learner.summed_file import SummedFile, order_tensors, write_state, write_tensors

TENSORS = {
    "layers.10.weight": torch.randn(300, 500),
    "layers.9.weight": torch.randn(6, 4).t(),
    "norm": torch.randn(7).bfloat16(),
    "count": torch.arange(5),
    "scale": torch.tensor(2.5),
    "nothing": torch.zeros(2, 0),
    "größe": torch.ones(3).bfloat16(),
}


def summed(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_the_bytes_are_those_of_safetensors(tmp_path):
    told = write_tensors(tmp_path / "ours", TENSORS)
    save_file({name: t.contiguous() for name, t in TENSORS.items()}, tmp_path / "theirs", metadata={"format": "pt"})
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()
    assert told == summed(tmp_path / "ours")
    found = load_file(tmp_path / "ours")
    assert all(torch.equal(found[name], tensor) for name, tensor in TENSORS.items())


def test_values_that_are_too_few_or_of_another_size_are_no_file(tmp_path):
    outline = {name: tensor.to("meta") for name, tensor in TENSORS.items()}
    values = [TENSORS[name] for name in order_tensors(TENSORS)]
    assert write_tensors(tmp_path / "whole", outline, iter(values)) == write_tensors(tmp_path / "same", TENSORS)
    with pytest.raises(ValueError, match="shorter"):
        write_tensors(tmp_path / "short", outline, iter(values[:-1]))
    with pytest.raises(AssertionError, match="another size"):
        write_tensors(tmp_path / "wide", outline, (tensor.double() for tensor in values))


def test_what_torch_reads(tmp_path):
    state = {"steps": 3, "moments": [TENSORS["layers.10.weight"], (1, torch.tensor(2.0))], "tied": TENSORS["norm"]}
    assert write_state(tmp_path / "state.pt", state | {"again": TENSORS["norm"]}) == summed(tmp_path / "state.pt")
    found = torch.load(tmp_path / "state.pt", weights_only=True)
    assert torch.equal(found["moments"][0], TENSORS["layers.10.weight"])
    assert (found["steps"], found["moments"][1]) == (3, (1, torch.tensor(2.0)))
    assert found["tied"].data_ptr() == found["again"].data_ptr()


@pytest.mark.parametrize("piece", [1000, 2**20])
def test_large_and_small_pieces_come_in_order(tmp_path, monkeypatch, piece):
    monkeypatch.setattr(summed_file, "PIECE", piece)
    parts = [os.urandom(size) for size in (3, 200_000, 0, 17, 70_000)]
    with SummedFile(tmp_path / "f") as file:
        assert [file.write(part) for part in parts] == [len(part) for part in parts]
    assert (tmp_path / "f").read_bytes() == b"".join(parts)
    assert file.checksum == summed(tmp_path / "f")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no disk that is always full")
def test_a_full_disk_is_called_that(tmp_path):
    """Not by what torch makes of it."""
    (tmp_path / "f").symlink_to("/dev/full")
    for write in (lambda: write_tensors(tmp_path / "f", TENSORS), lambda: write_state(tmp_path / "f", TENSORS)):
        with pytest.raises(OSError, match="No space left") as raised:
            write()
        assert raised.value.errno == errno.ENOSPC
