"""Encoders of the block formats, for tests and tools: plain rounding, no importance weights.

Q4_0, Q4_1, Q5_0, Q5_1, Q8_0 and MXFP4 give ggml's reference bytes. The others choose each scale so
that the sub-block's whole range is covered, which bounds every weight's error by its own step;
ggml's encoders search for a smaller mean error instead.
"""

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor

from ferrum_triton.quant.formats import BlockFormat
from ferrum_triton.quant.layout import E4m3


def quantize_blocks(weights: Tensor, fmt: BlockFormat) -> Tensor:
    """Encode rows of finite weights.

    Args:
        weights: [..., K] of any float dtype; K is a multiple of the format's block size.
        fmt: format to encode to.

    Returns:
        uint8 [..., row_bytes].

    Raises:
        InputError: K is no whole number of blocks.
    """
    row_bytes = fmt.row_bytes(weights.shape[-1])
    if weights.numel() == 0:
        return weights.new_empty((*weights.shape[:-1], row_bytes), dtype=torch.uint8)
    num_blocks = weights.shape[-1] // fmt.block_size
    x = weights.float().unflatten(-1, (num_blocks, fmt.block_size))
    blocks = x.new_zeros((*x.shape[:-1], fmt.block_bytes), dtype=torch.uint8)
    _encoder_of(fmt)(blocks, x, fmt)
    return blocks.reshape(*weights.shape[:-1], row_bytes)


def _inverse(scale: Tensor) -> Tensor:
    """1 / scale, and 0 for the scale 0 of a block of zeros."""
    return torch.where(scale == 0, 0.0, 1.0 / scale)


def _extreme(x: Tensor) -> Tensor:
    """The value of largest magnitude, with its sign: [..., n] -> [..., 1]."""
    return x.gather(-1, x.abs().argmax(dim=-1, keepdim=True))


def _encode_even(blocks: Tensor, x: Tensor, fmt: BlockFormat) -> None:
    """Q4_0 and Q5_0: the weight of largest magnitude becomes the most negative q."""
    d = _extreme(x) / fmt.q.smallest
    code = (x * _inverse(d) + (0.5 - fmt.q.smallest)).trunc()
    fmt.d.write(blocks, d)
    fmt.q.write(blocks, (code + fmt.q.smallest).clamp(max=fmt.q.largest))


def _encode_range(blocks: Tensor, x: Tensor, fmt: BlockFormat) -> None:
    """Q4_1 and Q5_1: q = 0 at the smallest weight, which is m, and the largest q at the largest."""
    assert fmt.m
    m = x.amin(dim=-1, keepdim=True)
    d = (x.amax(dim=-1, keepdim=True) - m) / fmt.q.largest
    fmt.d.write(blocks, d)
    fmt.m.write(blocks, m)
    fmt.q.write(blocks, ((x - m) * _inverse(d) + 0.5).trunc().clamp(0, fmt.q.largest))


def _encode_zeros(blocks: Tensor, x: Tensor, fmt: BlockFormat) -> None:
    """Q4_Z: the least q at the smallest weight or 0, the largest at the largest or 0."""
    assert fmt.m
    low, high = x.amin(dim=-1, keepdim=True).clamp(max=0), x.amax(dim=-1, keepdim=True).clamp(min=0)
    fmt.d.write(blocks, (high - low) / fmt.q.largest)
    inverse = _inverse(fmt.d.read(blocks))
    zero = (-low * inverse).round().clamp(0, fmt.q.largest)
    fmt.m.write(blocks, zero)
    fmt.q.write(blocks, (x * inverse + zero).round().clamp(0, fmt.q.largest))


def _encode_q8_0(blocks: Tensor, x: Tensor, fmt: BlockFormat) -> None:
    """q = ±127 at the weight of largest magnitude; ties round away from zero."""
    d = x.abs().amax(dim=-1, keepdim=True) / 127
    scaled = x * _inverse(d)
    size = scaled.abs()
    whole = size.floor()
    fmt.d.write(blocks, d)
    fmt.q.write(blocks, scaled.sign() * (whole + (2 * (size - whole)).floor()))


def _encode_sub_ranges(blocks: Tensor, x: Tensor, fmt: BlockFormat) -> None:
    """Mins first, rounded so that they reach below every weight, then steps that reach above."""
    assert fmt.m and fmt.mins and fmt.scales
    sub = x.unflatten(-1, (len(fmt.scales), -1))
    depth = (-sub.amin(dim=-1)).clamp(min=0)
    fmt.m.write(blocks, depth.amax(dim=-1, keepdim=True) / fmt.mins.largest)
    dmin = fmt.m.read(blocks)
    mins = (depth * _inverse(dmin)).ceil().clamp(0, fmt.mins.largest)
    low = dmin * mins
    span = (sub.amax(dim=-1) + low).clamp(min=0) / fmt.q.largest
    fmt.d.write(blocks, span.amax(dim=-1, keepdim=True) / fmt.scales.largest)
    d = fmt.d.read(blocks)
    scales = (span * _inverse(d)).ceil().clamp(0, fmt.scales.largest)
    q = (sub + low[..., None]) * _inverse((d * scales)[..., None])
    fmt.mins.write(blocks, mins)
    fmt.scales.write(blocks, scales)
    fmt.q.write(blocks, q.round().clamp(0, fmt.q.largest).flatten(-2))


def _encode_sub_blocks(blocks: Tensor, x: Tensor, fmt: BlockFormat) -> None:
    """The weight of largest magnitude in each sub-block becomes one level, whatever its sign.

    The lowest level, which is beyond the highest. Of many levels the highest: clipping what is
    opposite to the largest would cost more than a level gains.
    """
    assert fmt.scales
    level = fmt.q.largest if fmt.bits >= 6 else fmt.q.smallest
    if fmt.values:
        level = min(fmt.values)
    sub = x.unflatten(-1, (len(fmt.scales), -1))
    steps = (_extreme(sub) / level).squeeze(-1)
    fmt.d.write(blocks, steps.abs().amax(dim=-1, keepdim=True) / fmt.scales.largest)
    d = fmt.d.read(blocks)
    scales = steps.sign() * (steps.abs() * _inverse(d)).ceil().clamp(max=fmt.scales.largest)
    fmt.scales.write(blocks, scales)
    fmt.q.write(blocks, _nearest(sub * _inverse((d * scales)[..., None]), fmt).flatten(-2))


def _encode_levels(blocks: Tensor, x: Tensor, fmt: BlockFormat) -> None:
    """IQ4_NL: the weight of largest magnitude becomes the lowest level, -127."""
    assert fmt.values
    fmt.d.write(blocks, _extreme(x) / fmt.values[0])
    fmt.q.write(blocks, _nearest(x * _inverse(fmt.d.read(blocks)), fmt))


def _nearest(levels: Tensor, fmt: BlockFormat) -> Tensor:
    """The integers whose weights, at a step of 1, are nearest to ``levels``."""
    if fmt.values is None:
        return levels.round().clamp(fmt.q.smallest, fmt.q.largest)
    return _bucket(levels, fmt.values)


def _bucket(levels: Tensor, values: tuple[int, ...]) -> Tensor:
    """Index of the nearest of ascending values, of two as near the lower."""
    middles = [(low + high) / 2 for low, high in pairwise(values)]
    boundaries = torch.tensor(middles, device=levels.device)
    return torch.bucketize(levels.contiguous(), boundaries, out_int32=True)


def _encode_mxfp4(blocks: Tensor, x: Tensor, fmt: BlockFormat) -> None:
    """The exponent brings the largest magnitude to 4 ≤ |w| < 8, where 6 is the last value.

    ggml's bytes down to a largest magnitude of 2^-125, below which its exponent wraps around.
    """
    assert fmt.values
    size = x.abs()
    # In float64 and rounded: log2 of float32 is off by its last bit in places.
    power = size.amax(dim=-1, keepdim=True).double().log2().float().floor() - 3
    fmt.d.write(blocks, power.double().exp2())
    code = _bucket(size / fmt.d.read(blocks), fmt.values[:8])
    fmt.q.write(blocks, torch.where((x < 0) & (code > 0), code + 8, code))


def _encode_nvfp4(blocks: Tensor, x: Tensor, fmt: BlockFormat) -> None:
    """A row's largest magnitude is the largest code by the largest scale, and a sub-block's 6."""
    assert fmt.values and fmt.scales
    largest = max(fmt.values)
    sub = x.unflatten(-1, (len(fmt.scales), -1))
    d = x.abs().amax(dim=(-2, -1), keepdim=True) / (224 * largest)
    fmt.d.write(blocks, d.expand(*x.shape[:-1], 1))
    fmt.scales.write(blocks, sub.abs().amax(dim=-1) * _inverse(d) / largest)
    levels = sub * _inverse(d * fmt.scales.read(blocks))[..., None]
    code = _bucket(levels.abs(), fmt.values[:8])
    fmt.q.write(blocks, torch.where((levels < 0) & (code > 0), code + 8, code).flatten(-2))


def _encoder_of(fmt: BlockFormat) -> Callable[[Tensor, Tensor, BlockFormat], None]:
    """The encoder that a description asks for."""
    if fmt.is_exponent:
        return _encode_mxfp4
    if isinstance(fmt.scales, E4m3):
        return _encode_nvfp4
    if fmt.mins:
        return _encode_sub_ranges
    if fmt.scales:
        return _encode_sub_blocks
    if fmt.m:
        return _encode_zeros if fmt.has_zero else _encode_range
    if fmt.values:
        return _encode_levels
    return _encode_q8_0 if fmt.signed else _encode_even
