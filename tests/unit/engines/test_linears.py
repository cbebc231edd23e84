"""Weights laid out for the CPU give what the model's own layers give, by either matrix routine."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from strop.engines.embedded import linears
from strop.engines.embedded.linears import MKL, ONEDNN, Linears, WeightFormat

pytestmark = pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="nothing is laid out without MKL")
FORMATS = {"mkl": MKL} | ({"onednn": ONEDNN} if torch.backends.mkldnn.is_available() else {})


class Block(nn.Module):
    """Layers with one input, with and without biases, and one by itself."""

    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.q_proj = nn.Linear(48, 64, bias=bias)
        self.k_proj = nn.Linear(48, 16, bias=bias)
        self.v_proj = nn.Linear(48, 16, bias=bias)
        self.o_proj = nn.Linear(64, 48, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.o_proj(self.q_proj(x) + torch.cat([self.k_proj(x), self.v_proj(x)], -1).repeat(1, 2))


@pytest.fixture(params=list(FORMATS))
def _format(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    format = FORMATS[request.param]
    monkeypatch.setattr(linears, "SMALLEST", 1)
    monkeypatch.setattr(linears, "choose_format", lambda: WeightFormat(format.reorder, format.multiply, any_rows=True))


@pytest.mark.usefixtures("_format")
@pytest.mark.parametrize("bias", [False, True])
@torch.inference_mode()
def test_any_number_of_rows_gives_what_the_layers_give(bias: bool) -> None:
    torch.manual_seed(0)
    block: Any = Block(bias)
    laid_out = Linears(block)
    for rows in (1, 2, 3, 7, 8, 31, 32, 33, 64, 65, 200, 300):
        x = torch.randn(rows, 48)
        plain = block(x)
        for _ in range(2):  # the first time is compared with the plain way, and is that
            with laid_out.using():
                assert torch.allclose(block(x), plain, atol=1e-5)
    assert laid_out._agrees  # pyright: ignore[reportPrivateUsage]
    assert all(laid_out._agrees.values())  # pyright: ignore[reportPrivateUsage]


@pytest.mark.usefixtures("_format")
@torch.inference_mode()
def test_a_layer_is_never_given_what_another_input_gave() -> None:
    torch.manual_seed(0)
    block: Any = Block(bias=True)
    laid_out = Linears(block)
    first, second = torch.randn(4, 48), torch.randn(4, 48)
    for _ in range(2):
        plain = [layer(x) for layer, x in ((block.q_proj, first), (block.k_proj, second), (block.v_proj, first))]
        again = block.q_proj(2 * first)
        with laid_out.using():
            assert torch.allclose(block.q_proj(first), plain[0], atol=1e-5)
            assert torch.allclose(block.k_proj(second), plain[1], atol=1e-5)
            assert torch.allclose(block.v_proj(first), plain[2], atol=1e-5)
            x = first.clone()
            block.q_proj(x)
            x *= 2
            assert torch.allclose(block.q_proj(x), again, atol=1e-5)


@pytest.mark.usefixtures("_format")
@torch.inference_mode()
def test_new_weights_are_used_once_they_are_laid_out() -> None:
    torch.manual_seed(0)
    block: Any = Block(bias=True)
    laid_out = Linears(block)
    x = torch.randn(5, 48)
    with laid_out.using():
        block(x)
    for parameter in block.parameters():
        parameter.data.mul_(1.5)
    laid_out.refresh()
    plain = block(x)
    with laid_out.using():
        assert torch.allclose(block(x), plain, atol=1e-5)


def test_the_faster_routine_is_found() -> None:
    format = linears.choose_format()
    assert format.multiply in {known.multiply for known in FORMATS.values()}
