"""Encoders of the block formats, for tests and tools: plain rounding, no importance weights.

Q4_0, Q4_1 and Q8_0 give ggml's reference bytes. Those of the k-quants choose each scale so that the
sub-block's whole range is covered, which bounds every weight's error by half a step; ggml's own
encoder searches for a smaller mean error instead.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from ferrum_triton.quant.formats import BlockFormat


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
    blocks = _ENCODERS[fmt.name](weights.float().unflatten(-1, (num_blocks, fmt.block_size)))
    return blocks.reshape(*weights.shape[:-1], row_bytes)


def _inverse(scale: Tensor) -> Tensor:
    """1 / scale, and 0 for the scale 0 of a block of zeros."""
    return torch.where(scale == 0, 0.0, 1.0 / scale)


def _half_bytes(value: Tensor) -> Tensor:
    """float32 [..., n] -> the bytes of its fp16 rounding, uint8 [..., 2n]."""
    return value.half().view(torch.uint8)


def _pack_nibbles(q: Tensor) -> Tensor:
    """uint8 [..., 2, n] of values below 16 -> [..., n], the first of a pair in the low half."""
    return q[..., 0, :] | q[..., 1, :] << 4


def _encode_q4_0(x: Tensor) -> Tensor:
    """The weight of largest magnitude becomes q = 0, that is -8 steps of d = w / -8."""
    extreme = x.gather(-1, x.abs().argmax(dim=-1, keepdim=True))
    d = extreme / -8
    q = (x * _inverse(d) + 8.5).trunc().clamp(0, 15).to(torch.uint8)
    return torch.cat((_half_bytes(d), _pack_nibbles(q.unflatten(-1, (2, 16)))), dim=-1)


def _encode_q4_1(x: Tensor) -> Tensor:
    """q = 0 at the smallest weight, which is m, and 15 at the largest."""
    m = x.amin(dim=-1, keepdim=True)
    d = (x.amax(dim=-1, keepdim=True) - m) / 15
    q = ((x - m) * _inverse(d) + 0.5).trunc().clamp(0, 15).to(torch.uint8)
    qs = _pack_nibbles(q.unflatten(-1, (2, 16)))
    return torch.cat((_half_bytes(d), _half_bytes(m), qs), dim=-1)


def _encode_q8_0(x: Tensor) -> Tensor:
    """q = ±127 at the weight of largest magnitude; ties round away from zero."""
    d = x.abs().amax(dim=-1, keepdim=True) / 127
    scaled = x * _inverse(d)
    size = scaled.abs()
    whole = size.floor()
    q = scaled.sign() * (whole + (2 * (size - whole)).floor())
    return torch.cat((_half_bytes(d), q.to(torch.int8).view(torch.uint8)), dim=-1)


def _encode_q4_k(x: Tensor) -> Tensor:
    """Mins first, rounded so that they reach below every weight, then steps that reach above."""
    sub = x.unflatten(-1, (8, 32))
    depth = (-sub.amin(dim=-1)).clamp(min=0)
    dmin = (depth.amax(dim=-1, keepdim=True) / 63).half().float()
    mins = (depth * _inverse(dmin)).ceil().clamp(0, 63)
    low = dmin * mins
    span = (sub.amax(dim=-1) + low).clamp(min=0) / 15
    d = (span.amax(dim=-1, keepdim=True) / 63).half().float()
    scales = (span * _inverse(d)).ceil().clamp(0, 63)
    step = (d * scales)[..., None]
    q = ((sub + low[..., None]) * _inverse(step)).round().clamp(0, 15).to(torch.uint8)
    packed = _pack_six_bits(scales.to(torch.uint8), mins.to(torch.uint8))
    qs = _pack_nibbles(q.unflatten(-2, (4, 2))).flatten(-2)
    return torch.cat((_half_bytes(d), _half_bytes(dmin), packed, qs), dim=-1)


def _pack_six_bits(scales: Tensor, mins: Tensor) -> Tensor:
    """Two uint8 [..., 8] of values below 64 -> uint8 [..., 12], as the Q4_K decoder reads them."""
    first = scales[..., :4] | scales[..., 4:] >> 4 << 6
    second = mins[..., :4] | mins[..., 4:] >> 4 << 6
    third = scales[..., 4:] & 15 | mins[..., 4:] << 4
    return torch.cat((first, second, third), dim=-1)


def _encode_q6_k(x: Tensor) -> Tensor:
    """The weight of largest magnitude of 16 becomes q = ±31."""
    sub = x.unflatten(-1, (16, 16))
    span = sub.abs().amax(dim=-1) / 31
    d = (span.amax(dim=-1, keepdim=True) / 127).half().float()
    scales = (span * _inverse(d)).ceil().clamp(0, 127)
    step = (d * scales)[..., None]
    q = (sub * _inverse(step)).round().clamp(-32, 31) + 32
    q = q.to(torch.uint8).flatten(-2).unflatten(-1, (2, 4, 32))  # [..., h, j, l]
    ql = _pack_nibbles((q & 15).flatten(-2).unflatten(-1, (2, 64))).flatten(-2)
    high = q >> 4
    qh = high[..., 0, :] | high[..., 1, :] << 2 | high[..., 2, :] << 4 | high[..., 3, :] << 6
    scale_bytes = scales.to(torch.int8).view(torch.uint8)
    return torch.cat((ql, qh.flatten(-2), scale_bytes, _half_bytes(d)), dim=-1)


_ENCODERS: dict[str, Callable[[Tensor], Tensor]] = {
    "Q4_0": _encode_q4_0,
    "Q4_1": _encode_q4_1,
    "Q8_0": _encode_q8_0,
    "Q4_K": _encode_q4_k,
    "Q6_K": _encode_q6_k,
}
