"""Models without values, to be filled by rows; what ranks make of them is in tests/parity/test_ranks.py."""

import torch
from safetensors.torch import load_file, save_file

from strop.learner.logprobs import find_head
from strop.learner.model import load
from strop.learner.sharded_loading import find_rows, outline
from strop.learner.sharding import give_memory
from strop.learner.summed_file import order_tensors, write_tensors


def test_an_outline_is_the_model_without_its_memory(folder) -> None:
    before = torch.get_rng_state()
    found, whole = outline(folder, torch.float32), load(folder)
    assert found is not None
    assert torch.equal(torch.get_rng_state(), before)
    assert all(parameter.is_meta for parameter in found.parameters())
    assert {n: (p.shape, p.dtype) for n, p in found.named_parameters()} == {
        n: (p.shape, p.dtype) for n, p in whole.named_parameters()
    }
    for name, buffer in whole.named_buffers():
        assert torch.equal(found.get_buffer(name), buffer)
    give_memory(found, torch.device("cpu"))
    assert find_head(found).weight is found.get_input_embeddings().weight
    with torch.no_grad():
        for name, parameter in whole.named_parameters():
            found.get_parameter(name).copy_(parameter)
    ids = torch.tensor([[1, 2, 3]])
    assert torch.equal(found(ids).logits, whole(ids).logits)


def test_what_cannot_be_read_by_rows_has_none(folder, tmp_path) -> None:
    assert outline(tmp_path, torch.float32) is None
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    tensors = load_file(folder / "model.safetensors")
    save_file({f"other.{name}": tensor for name, tensor in tensors.items()}, tmp_path / "model.safetensors")
    assert outline(tmp_path, torch.float32) is None
    save_file({name: tensor[..., :-1].contiguous() for name, tensor in tensors.items()}, tmp_path / "model.safetensors")
    assert outline(tmp_path, torch.float32) is None


def test_rows_are_those_of_torch() -> None:
    for count in (1, 3, 4, 7, 16):
        for rows in (1, 2, 3, 5, 16, 17):
            parts = torch.arange(rows).chunk(count)
            for index in range(count):
                expected = parts[index].tolist() if index < len(parts) else []
                assert list(find_rows(rows, index, count)) == expected


def test_a_file_of_tensors_that_come_one_by_one(tmp_path) -> None:
    tensors = {"b": torch.randn(3, 2), "a": torch.randn(5), "c": torch.randn(2).to(torch.bfloat16), "d": torch.empty(0)}
    outlined = {name: torch.empty_like(tensor, device="meta") for name, tensor in tensors.items()}
    sums = [
        write_tensors(tmp_path / "1", tensors),
        write_tensors(tmp_path / "2", outlined, (tensors[name] for name in order_tensors(outlined))),
    ]
    assert sums[0] == sums[1]
    assert (tmp_path / "1").read_bytes() == (tmp_path / "2").read_bytes()
