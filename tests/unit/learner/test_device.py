import numpy as np
import pytest
import torch

from strop.learner.device import send


def test_values_and_kinds_arrive():
    ids = send(np.array([[3, 1]]), "cpu")
    assert (ids.dtype, ids.tolist()) == (torch.int64, [[3, 1]])
    weights = send(np.array([0.5, 1 / 3]), "cpu", torch.float32)
    assert torch.equal(weights, torch.tensor([0.5, 1 / 3]))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")
def test_an_array_that_changes_afterwards_arrives_as_it_was():
    """The copy happens when the GPU comes to it; what it copies was set aside before."""
    array = np.arange(2**20)
    busy = torch.randn(4096, 4096, device="cuda")
    for _ in range(50):
        busy = busy @ busy
    sent = send(array, "cuda")
    array[:] = 0
    assert torch.equal(sent.cpu(), torch.arange(2**20))
