"""Block formats against the gguf package, on random and adversarial bytes."""

import gguf
import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given

from ferrum_triton import InputError
from ferrum_triton.quant import FORMATS, QuantizedTensor, dequantize_blocks, quantize_blocks

KINDS = pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS)

# Byte offset of every fp16 scale in a block.
HALVES = {"Q4_0": (0,), "Q4_1": (0, 2), "Q8_0": (0,), "Q4_K": (0, 2), "Q6_K": (208,)}

# fp16 bits: zeros, the smallest and largest denormals, the smallest normal, 1, the largest,
# infinities, NaN; and their negatives.
SPECIAL_HALVES = (0, 1, 0x3FF, 0x400, 0x3C00, 0x7BFF, 0x7C00, 0x7E00)
SPECIAL_HALVES += tuple(bits | 0x8000 for bits in SPECIAL_HALVES)


def random_blocks(fmt, *shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(
        0, 256, (*shape, fmt.block_bytes), dtype=torch.uint8, generator=generator
    ).flatten(-2)


def oracle(blocks, fmt):
    kind = gguf.GGMLQuantizationType(fmt.ggml_id)
    with np.errstate(all="ignore"):
        return torch.from_numpy(gguf.quants.dequantize(blocks.contiguous().numpy(), kind))


def assert_same_bits(got, want):
    """Equal bit for bit, but for which NaN a NaN is."""
    assert got.shape == want.shape
    nan = want.isnan()
    assert torch.equal(got.isnan(), nan)
    ints = {torch.float32: torch.int32, torch.float16: torch.int16, torch.bfloat16: torch.int16}
    bits = ints[want.dtype]
    assert torch.equal(got.contiguous().view(bits)[~nan], want.contiguous().view(bits)[~nan])


@KINDS
def test_sizes_are_ggmls(fmt):
    kind = gguf.GGMLQuantizationType[fmt.name]
    assert kind == fmt.ggml_id
    assert (fmt.block_size, fmt.block_bytes) == gguf.GGML_QUANT_SIZES[kind]


@KINDS
@given(rows=st.integers(1, 5), blocks=st.integers(1, 4), seed=st.integers(0, 2**31))
def test_random_bytes_decode_as_gguf(fmt, rows, blocks, seed):
    data = random_blocks(fmt, rows, blocks, seed=seed)
    assert_same_bits(dequantize_blocks(data, fmt), oracle(data, fmt))


@KINDS
@pytest.mark.parametrize("fill", [0x00, 0x0F, 0x7F, 0x80, 0xF0, 0xFF])
def test_special_scales_decode_as_gguf(fmt, fill):
    """Every special fp16 in every scale, over bytes all alike: largest scales, negative int8."""
    data = torch.full((len(SPECIAL_HALVES) ** 2, fmt.block_bytes), fill, dtype=torch.uint8)
    special = torch.tensor(SPECIAL_HALVES, dtype=torch.int32)
    pairs = torch.cartesian_prod(special, special)
    for at, bits in zip(HALVES[fmt.name], pairs.T, strict=False):
        data[:, at] = (bits & 255).to(torch.uint8)
        data[:, at + 1] = (bits >> 8).to(torch.uint8)
    assert_same_bits(dequantize_blocks(data, fmt), oracle(data, fmt))


@KINDS
def test_every_byte_matters(fmt):
    """Flipping any one byte of a block changes what it decodes to, as it does for gguf."""
    block = quantize_blocks(torch.randn(1, fmt.block_size, generator=_seeded(3)) - 0.3, fmt)
    flipped = block.repeat(fmt.block_bytes, 1) ^ (torch.eye(fmt.block_bytes) * 0x55).byte()
    decoded = dequantize_blocks(flipped, fmt)
    assert_same_bits(decoded, oracle(flipped, fmt))
    assert (decoded != dequantize_blocks(block, fmt)).any(dim=-1).all()


@KINDS
def test_strides_and_addresses_are_free(fmt):
    data = random_blocks(fmt, 2, 3, 2, seed=4)
    want = dequantize_blocks(data, fmt)
    odd = torch.zeros(data.numel() + 1, dtype=torch.uint8)[1:].view(data.shape)
    odd.copy_(data)
    padded = torch.zeros(2, 3, data.shape[-1] + 3, dtype=torch.uint8)[..., 1:-2]
    padded.copy_(data)
    for same in (odd, padded, data.transpose(0, 1).contiguous().transpose(0, 1)):
        assert_same_bits(dequantize_blocks(same, fmt), want)
    alone = odd[0, 0, : fmt.block_bytes]
    assert_same_bits(dequantize_blocks(alone, fmt), want[0, 0, : fmt.block_size])


@KINDS
def test_meta_and_empty(fmt):
    data = torch.empty(3, 2 * fmt.block_bytes, dtype=torch.uint8, device="meta")
    decoded = dequantize_blocks(data, fmt)
    assert (decoded.shape, decoded.dtype) == ((3, 2 * fmt.block_size), torch.float32)
    encoded = quantize_blocks(decoded, fmt)
    assert (encoded.shape, encoded.dtype) == (data.shape, torch.uint8)
    assert dequantize_blocks(data[:0], fmt).shape == (0, 2 * fmt.block_size)
    assert dequantize_blocks(data[:, :0], fmt).shape == (3, 0)
    assert quantize_blocks(torch.empty(0, fmt.block_size), fmt).shape == (0, fmt.block_bytes)


@KINDS
def test_broken_rows_are_refused(fmt):
    with pytest.raises(InputError, match=str(fmt.block_bytes)):
        dequantize_blocks(torch.zeros(2, fmt.block_bytes + 1, dtype=torch.uint8), fmt)
    with pytest.raises(InputError, match=str(fmt.block_size)):
        quantize_blocks(torch.zeros(2, fmt.block_size - 1), fmt)


def _seeded(seed):
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0"])
@given(
    scale=st.sampled_from((1e-3, 1.0, 300.0)), offset=st.floats(-2, 2), seed=st.integers(0, 9999)
)
def test_legacy_formats_encode_as_gguf(kind, scale, offset, seed):
    weights = (torch.randn(3, 96, generator=_seeded(seed)) + offset) * scale
    weights[1, 32:64] = 0.0
    weights[2, :32] = weights[2, 0]
    weights[2, 40] = -weights[2, 32:64].abs().max()  # two of the largest magnitude
    weights[2, 50] = weights[2, 40].abs()
    want = gguf.quants.quantize(weights.numpy(), gguf.GGMLQuantizationType[kind])
    assert torch.equal(quantize_blocks(weights, FORMATS[kind]), torch.from_numpy(want))


@KINDS
@given(
    scale=st.sampled_from((1e-2, 1.0, 100.0)), offset=st.floats(-2, 2), seed=st.integers(0, 9999)
)
def test_encoding_error_is_bounded(fmt, scale, offset, seed):
    """No weight is off by more than its step, taken from the range of its own sub-block."""
    weights = (torch.randn(2, 2 * fmt.block_size, generator=_seeded(seed)) + offset) * scale
    error = dequantize_blocks(quantize_blocks(weights, fmt), fmt) - weights
    blocks = weights.unflatten(-1, (-1, fmt.block_size))
    largest = blocks.abs().amax(dim=-1, keepdim=True)
    span = blocks.amax(dim=-1, keepdim=True).clamp(min=0) - blocks.amin(dim=-1, keepdim=True)
    rounding = largest * 2**-10  # of the fp16 scales
    bound = {
        "Q4_0": largest / 8,  # the extreme opposite to the largest is clipped by up to a step
        "Q4_1": span / 15 / 2,
        "Q8_0": largest / 127 / 2,
        # Half a step; steps and mins are rounded up to the next 1/63 of the block's largest.
        "Q4_K": (span + largest / 63) / 15 * (1 + 1 / 63) / 2,
        "Q6_K": largest / 31 / 2 * (1 + 1 / 127),
    }[fmt.name]
    assert (error.abs().unflatten(-1, (-1, fmt.block_size)) <= bound + rounding).all()


@KINDS
def test_encoding_again_changes_little(fmt):
    """Decoded weights are representable, so a second round loses far less than the first."""
    weights = torch.randn(4, 2 * fmt.block_size, generator=_seeded(7))
    once = dequantize_blocks(quantize_blocks(weights, fmt), fmt)
    twice = dequantize_blocks(quantize_blocks(once, fmt), fmt)
    assert (twice - once).norm() < 0.5 * (once - weights).norm()


def test_quantized_tensor():
    fmt = FORMATS["Q6_K"]
    blocks = random_blocks(fmt, 2, 3, 2, seed=9)
    weight = QuantizedTensor(blocks, "Q6_K")
    assert weight.shape == (2, 3, 512)
    assert weight.to("meta").shape == weight.shape
    assert weight.to("meta").device.type == "meta"
    assert_same_bits(weight.dequantize(torch.float16), oracle(blocks, fmt).half())
    assert QuantizedTensor(blocks[0], "Q6_K").shape == (3, 512)


@pytest.mark.parametrize(
    ("blocks", "kind", "argument"),
    [
        (torch.zeros(2, 210, dtype=torch.uint8), "q6_k", "kind"),
        (torch.zeros(2, 210, dtype=torch.int8), "Q6_K", "blocks"),
        (torch.zeros(210, dtype=torch.uint8), "Q6_K", "blocks"),
        (torch.zeros(2, 209, dtype=torch.uint8), "Q6_K", "blocks"),
    ],
)
def test_quantized_tensor_refuses(blocks, kind, argument):
    with pytest.raises(InputError) as error:
        QuantizedTensor(blocks, kind)
    assert (error.value.op, error.value.argument) == ("QuantizedTensor", argument)
