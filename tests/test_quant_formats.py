"""Block formats against the gguf package, on random and adversarial bytes."""

import gguf
import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given

from ferrum_triton import InputError
from ferrum_triton.quant import FORMATS, QuantizedTensor, dequantize_blocks, quantize_blocks
from ferrum_triton.quant.formats import GGUF_FORMATS
from ferrum_triton.quant.kinds import KINDS as KINDS_AND_PLANES
from ferrum_triton.quant.kinds import quantize_rows
from ferrum_triton.quant.layout import E4m3, Half, Ratio

KINDS = pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS)
GGUF_KINDS = pytest.mark.parametrize("fmt", GGUF_FORMATS.values(), ids=lambda fmt: fmt.name)

# Byte offset of every fp16 scale in a block; MXFP4 has none.
HALVES = {
    name: tuple(scale.at for scale in (fmt.d, fmt.m) if isinstance(scale, Half))
    for name, fmt in FORMATS.items()
}
# What gguf encodes; the others it only decodes.
ENCODED_BY_GGUF = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "MXFP4")

# fp16 bits: zeros, the smallest and largest denormals, the smallest normal, 1, the largest,
# infinities, NaN; and their negatives.
SPECIAL_HALVES = (0, 1, 0x3FF, 0x400, 0x3C00, 0x7BFF, 0x7C00, 0x7E00)
SPECIAL_HALVES += tuple(bits | 0x8000 for bits in SPECIAL_HALVES)


def random_blocks(fmt, *shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    blocks = torch.randint(
        0, 256, (*shape, fmt.block_bytes), dtype=torch.uint8, generator=generator
    )
    if fmt.is_row_scaled:
        parts = torch.rand(2, *shape[:-1], 1, 1, generator=generator) + 0.25
        fmt.d.write_parts(blocks, *parts.expand(2, *shape, 1))
    return blocks.flatten(-2)


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


@pytest.mark.parametrize("kind", KINDS_AND_PLANES)
def test_meta_weights_have_the_shape_of_packed_ones(kind):
    weights = torch.randn(2, 3, 512)
    packed = quantize_rows(weights, kind)
    meta = quantize_rows(weights.to("meta"), kind)
    assert (meta.shape, meta.dtype) == (packed.shape, packed.dtype)


@GGUF_KINDS
def test_sizes_are_ggmls(fmt):
    kind = gguf.GGMLQuantizationType[fmt.name]
    assert kind == fmt.ggml_id
    assert (fmt.block_size, fmt.block_bytes) == gguf.GGML_QUANT_SIZES[kind]


@KINDS
def test_every_bit_of_a_block_is_described_once(fmt):
    taken = torch.zeros(fmt.block_bytes, dtype=torch.int32)
    for scale in (fmt.d, fmt.m):
        if scale is not None:
            size = 2 if isinstance(scale, Half) else 8 if isinstance(scale, Ratio) else 1
            taken[scale.at : scale.at + size] += 255
    for integers in (fmt.q, fmt.scales, fmt.mins):
        if integers is None:
            continue
        assert fmt.block_size % len(integers) == 0
        for run in (*integers.low, *([integers.high] if integers.high else [])):
            block = torch.zeros(fmt.block_bytes, dtype=torch.uint8)
            run.write(block, torch.full((len(run),), 255, dtype=torch.uint8))
            taken += block
    assert (taken == 255).all()


@KINDS
@pytest.mark.parametrize("name", ["q", "scales", "mins"])
def test_integers_come_back(fmt, name):
    """Every value there is, written and read, in its own place: the rest of the block stays."""
    integers = getattr(fmt, name)
    if integers is None or isinstance(integers, E4m3):  # numbers: see test_float_weights
        return
    values = torch.arange(integers.smallest, integers.largest + 1)
    rows = max(2, -(-len(values) // len(integers)))
    values = values.repeat(rows * len(integers))[: rows * len(integers)].view(rows, -1)
    blocks = torch.zeros(rows, fmt.block_bytes, dtype=torch.uint8)
    integers.write(blocks, values)
    assert torch.equal(integers.read(blocks).long(), values)
    for other in ("q", "scales", "mins"):
        if other != name and getattr(fmt, other) is not None:
            zero = getattr(fmt, other).read(torch.zeros_like(blocks))
            assert torch.equal(getattr(fmt, other).read(blocks), zero)


@GGUF_KINDS
@given(rows=st.integers(1, 5), blocks=st.integers(1, 4), seed=st.integers(0, 2**31))
def test_random_bytes_decode_as_gguf(fmt, rows, blocks, seed):
    data = random_blocks(fmt, rows, blocks, seed=seed)
    assert_same_bits(dequantize_blocks(data, fmt), oracle(data, fmt))


@GGUF_KINDS
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


def test_every_exponent_decodes_as_gguf():
    fmt = FORMATS["MXFP4"]
    data = torch.arange(256).repeat_interleave(17).view(256, 17)
    data[:, 1:] = torch.arange(0, 256, 16) + torch.arange(15, -1, -1)  # every code, low and high
    assert_same_bits(dequantize_blocks(data.byte(), fmt), oracle(data.byte(), fmt))


@GGUF_KINDS
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


def test_gguf_encodes_what_we_hold_against_it():
    weights = np.zeros((1, 256), np.float32)
    for fmt in GGUF_FORMATS.values():
        if fmt.name not in ENCODED_BY_GGUF:
            with pytest.raises(NotImplementedError):
                gguf.quants.quantize(weights, gguf.GGMLQuantizationType(fmt.ggml_id))


@pytest.mark.parametrize("kind", ENCODED_BY_GGUF)
@given(
    scale=st.sampled_from((1e-3, 1.0, 300.0)), offset=st.floats(-2, 2), seed=st.integers(0, 9999)
)
def test_weights_encode_as_gguf(kind, scale, offset, seed):
    weights = (torch.randn(3, 96, generator=_seeded(seed)) + offset) * scale
    weights[1, 32:64] = 0.0
    weights[2, :32] = weights[2, 0]
    weights[2, 40] = -weights[2, 32:64].abs().max()  # two of the largest magnitude
    weights[2, 50] = weights[2, 40].abs()
    want = gguf.quants.quantize(weights.numpy(), gguf.GGMLQuantizationType[kind])
    assert torch.equal(quantize_blocks(weights, FORMATS[kind]), torch.from_numpy(want))


def test_exponents_encode_as_gguf():
    """Around every power of two from the least that ggml encodes, and halfway between values."""
    powers = torch.arange(-125, 128).double().exp2().float()
    largest = torch.cat((powers, powers.nextafter(torch.zeros(())), powers.nextafter(2 * powers)))
    largest = largest[largest.isfinite()]
    steps = torch.arange(32) / 32 * torch.tensor([1.0, -1.0]).repeat(16)
    steps[0] = 1.0
    weights = largest[:, None] * steps
    with np.errstate(over="ignore"):
        want = gguf.quants.quantize(weights.numpy(), gguf.GGMLQuantizationType.MXFP4)
    assert torch.equal(quantize_blocks(weights, FORMATS["MXFP4"]), torch.from_numpy(want))


def test_exponents_too_small_are_the_smallest():
    """Where ggml's exponent wraps around to a huge one."""
    weights = torch.full((1, 32), 2.0**-130)
    weights[0, 0] = 0.0
    encoded = quantize_blocks(weights, FORMATS["MXFP4"])
    assert encoded[0, 0] == 0
    assert torch.equal(dequantize_blocks(encoded, FORMATS["MXFP4"]), torch.zeros(1, 32))


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
        "Q4_Z": (span + largest) / 15,  # of what holds 0 too, and so has a zero
        "Q5_0": largest / 16,
        "Q5_1": span / 31 / 2,
        "Q8_0": largest / 127 / 2,
        # Half a step; steps and mins are rounded up to the next 1/15 or 1/63 of the largest.
        "Q2_K": (span + largest / 15) / 3 * (1 + 1 / 15) / 2,
        "Q4_K": (span + largest / 63) / 15 * (1 + 1 / 63) / 2,
        "Q5_K": (span + largest / 63) / 31 * (1 + 1 / 63) / 2,
        "Q3_K": largest / 4 * (1 + 1 / 31),  # clipped as Q4_0
        "Q6_K": largest / 31 / 2 * (1 + 1 / 127),
        # -127 is the lowest level and 113 the highest, which is clipped to.
        "IQ4_NL": largest * 14 / 127,
        "IQ4_XS": largest * 15 / 127,
        # Of 8 to 16 steps, beyond 12 clipped to 12.
        "MXFP4": largest / 4,
        # Half the largest step of 6, and of a scale below it, which is off by 1 / 16 at most.
        "NVFP4": largest / 6 + largest / 8,
    }[fmt.name]
    assert (error.abs().unflatten(-1, (-1, fmt.block_size)) <= bound + rounding).all()


@KINDS
def test_encoding_again_changes_little(fmt):
    """Decoded weights are representable, so a second round loses less than the first."""
    weights = torch.randn(4, 2 * fmt.block_size, generator=_seeded(7))
    once = dequantize_blocks(quantize_blocks(weights, fmt), fmt)
    twice = dequantize_blocks(quantize_blocks(once, fmt), fmt)
    assert (twice - once).norm() < 0.6 * (once - weights).norm()


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
