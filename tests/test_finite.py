"""Counting weights out of range: equal to decoding all, in every format."""

import pytest
import torch

from ferrum_triton.quant import FORMATS, QuantizedTensor, finite
from ferrum_triton.quant.finite import count_out_of_range


def random_rows(fmt, num_blocks=12):
    """Rows whose scales are any bits at all, NaN and infinity among them."""
    blocks = torch.randint(0, 256, (4, num_blocks * fmt.block_bytes), dtype=torch.uint8)
    if fmt.is_exponent:
        blocks[:, fmt.d.at :: fmt.block_bytes] = torch.randint(248, 256, (4, num_blocks)).byte()
        return blocks
    if fmt.is_row_scaled:
        values = torch.tensor([0.01, 1.0, -3e36, 1e-38, float("nan"), float("inf"), 0.0])
        parts = values[torch.tensor([[0, 2, 4, 5], [1, 1, 1, 3]])].view(2, 4, 1, 1)
        fmt.d.write_parts(
            blocks.unflatten(-1, (num_blocks, -1)), *parts.expand(2, 4, num_blocks, 1)
        )
        return blocks
    for scale in filter(None, (fmt.d, fmt.m)):
        values = torch.tensor([0.01, -3.0, 6e4, float("nan"), float("inf"), -float("inf")]).half()
        drawn = (
            values[torch.randint(0, 6, (4, num_blocks))].view(torch.uint8).unflatten(-1, (-1, 2))
        )
        for byte in (0, 1):
            blocks[:, scale.at + byte :: fmt.block_bytes] = drawn[..., byte]
    return blocks


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_packed(kind, dtype, monkeypatch):
    monkeypatch.setattr(finite, "_TILE", 256)
    weight = QuantizedTensor(random_rows(FORMATS[kind]), kind)
    expected = int((~(weight.dequantize().abs() <= torch.finfo(dtype).max)).sum())
    assert expected > 0
    assert count_out_of_range(weight, dtype) == expected
    if weight.has_planes:
        assert count_out_of_range(weight.in_planes(), dtype) == expected


@pytest.mark.parametrize("stored", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_plain(stored, monkeypatch):
    monkeypatch.setattr(finite, "_TILE", 7)
    weight = torch.randn(5, 9).to(stored)
    assert count_out_of_range(weight, torch.float16) == 0
    weight[0, 3], weight[4, 8], weight[2, 1] = float("nan"), -float("inf"), 65504.0
    assert count_out_of_range(weight, torch.float32) == 2
    beyond = stored is torch.bfloat16  # rounds it up
    assert count_out_of_range(weight, torch.float16) == 2 + beyond
    assert count_out_of_range(weight[:0], torch.float32) == 0


def test_blocks_in_order_are_not_decoded(monkeypatch):
    def decoded(*_):
        raise AssertionError("decoded")

    fmt = FORMATS["Q4_1"]
    blocks = torch.randint(0, 60, (64, 8 * fmt.block_bytes), dtype=torch.uint8)
    monkeypatch.setattr(finite, "dequantize_blocks", decoded)
    assert count_out_of_range(QuantizedTensor(blocks, "Q4_1"), torch.float32) == 0
