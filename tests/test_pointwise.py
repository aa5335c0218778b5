"""Functions that take an element alike wherever it lies."""

import pytest
import torch

from ferrum_triton.ops.elementwise import gelu_tanh
from ferrum_triton.ops.pointwise import sigmoid, silu, softplus

FUNCTIONS = {
    sigmoid: torch.sigmoid,
    silu: torch.nn.functional.silu,
    softplus: torch.nn.functional.softplus,
}


@pytest.mark.parametrize("function", [*FUNCTIONS, gelu_tanh])
def test_an_element_has_the_same_bits_wherever_it_lies(function):
    for number in (torch.randn(300) * 4).tolist():
        found = function(torch.full((47,), number))
        assert (found == found[0]).all()


@pytest.mark.parametrize(("function", "torchs"), FUNCTIONS.items())
def test_values_are_torchs(function, torchs):
    x = torch.cat([torch.randn(1000) * 8, torch.tensor([0.0, -0.0, 88.0, -88.0, 1e4, -1e4, 1e30])])
    torch.testing.assert_close(function(x), torchs(x.double()).float(), rtol=1e-6, atol=1e-30)
    assert function(torch.tensor([torch.nan])).isnan().all()
    assert function(torch.tensor([torch.inf])) == torchs(torch.tensor([torch.inf]))
