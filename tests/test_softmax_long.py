"""Rows of softmax_rows that are longer than a tile, which are read twice."""

import pytest
import torch

from ferrum_triton import get_backend
from ferrum_triton.kernels import softmax
from ferrum_triton.testing import assert_close


@pytest.mark.parametrize("num_cols", [33, 64, 100])
def test_long_rows_are_summed_in_blocks(num_cols, monkeypatch):
    """Several blocks and a part of one; what hides a column, hides it there too."""
    monkeypatch.setattr(softmax, "MAX_SOFTMAX_TILE", 32)
    monkeypatch.setattr(softmax, "LONG_BLOCK", 16)
    x = 30 * torch.randn(3, num_cols)
    x[1, ::3] = float("-inf")
    x[2] = x[2].sort().values  # each block has a larger maximum than the ones before
    got = get_backend("interpret").softmax_rows(x)
    assert_close(got, x.double().softmax(-1))
