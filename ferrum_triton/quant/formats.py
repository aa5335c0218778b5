"""GGUF's block formats: what the bytes of a block mean.

A weight row of K values is K / block_size blocks back to back, each holding its own scales; bytes
are little-endian and scales are fp16 unless said. Names and layouts are ggml's
(``ggml-common.h``); the order of the float32 operations is that of its reference dequantisers, so
that every implementation gives the same bits. A format is one decoder and one line of
:data:`FORMATS`.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ferrum_triton.errors import InputError


@dataclass(frozen=True)
class BlockFormat:
    """One block format.

    Attributes:
        name: ggml's name, e.g. ``"Q4_K"``.
        ggml_id: number of the type in GGUF files.
        block_size: weights in a block.
        block_bytes: bytes of a block.
        decode: uint8 [..., block_bytes] -> float32 [..., block_size].
    """

    name: str
    ggml_id: int
    block_size: int
    block_bytes: int
    decode: Callable[[Tensor], Tensor]

    def row_bytes(self, num_weights: int) -> int:
        """Bytes of a row of ``num_weights`` weights, a multiple of the block size."""
        if num_weights % self.block_size:
            allowed = f"a multiple of {self.block_size}, the block size of {self.name}"
            raise InputError(
                "BlockFormat.row_bytes", "num_weights", str(num_weights), allowed, "Pad the row."
            )
        return num_weights // self.block_size * self.block_bytes

    def row_weights(self, row_bytes: int) -> int:
        """Weights in a row of ``row_bytes`` bytes, a multiple of the block's bytes."""
        if row_bytes % self.block_bytes:
            allowed = f"a multiple of {self.block_bytes}, the block bytes of {self.name}"
            advice = "The row is truncated, or of another format."
            raise InputError(
                "BlockFormat.row_weights", "row_bytes", str(row_bytes), allowed, advice
            )
        return row_bytes // self.block_bytes * self.block_size


def dequantize_blocks(blocks: Tensor, fmt: BlockFormat) -> Tensor:
    """Decode packed rows.

    Args:
        blocks: uint8 [..., row_bytes], any strides, at any byte address.
        fmt: their format.

    Returns:
        float32 [..., K], equal to ggml's reference dequantisation bit for bit.

    Raises:
        InputError: row_bytes is no whole number of blocks.
    """
    num_weights = fmt.row_weights(blocks.shape[-1])
    num_blocks = num_weights // fmt.block_size
    values = fmt.decode(blocks.unflatten(-1, (num_blocks, fmt.block_bytes)))
    return values.reshape(*blocks.shape[:-1], num_weights)


def _half(blocks: Tensor, at: int) -> Tensor:
    """The fp16 at byte ``at`` of each block, as float32 [..., 1]."""
    # Copied first: a block may start at an odd address, where fp16 cannot be viewed.
    pair = blocks[..., at : at + 2].clone(memory_format=torch.contiguous_format)
    return pair.view(torch.float16).float()


def _nibbles(packed: Tensor) -> Tensor:
    """uint8 [..., n] -> [..., 2, n]: all low halves, then all high halves."""
    return torch.stack((packed & 15, packed >> 4), dim=-2)


def _decode_q4_0(blocks: Tensor) -> Tensor:
    """w[i] = d · (q[i] - 8).

    Bytes: d 0:2, qs 2:18. Byte qs[i mod 16] holds q[i], in its low half for i < 16, else its high.
    """
    q = _nibbles(blocks[..., 2:18]).flatten(-2).float()
    return _half(blocks, 0) * (q - 8)


def _decode_q4_1(blocks: Tensor) -> Tensor:
    """w[i] = d · q[i] + m.

    Bytes: d 0:2, m 2:4, qs 4:20, with q as in Q4_0.
    """
    q = _nibbles(blocks[..., 4:20]).flatten(-2).float()
    return _half(blocks, 0) * q + _half(blocks, 2)


def _decode_q8_0(blocks: Tensor) -> Tensor:
    """w[i] = d · q[i].

    Bytes: d 0:2, q int8 2:34.
    """
    q = blocks[..., 2:34].view(torch.int8).float()
    return _half(blocks, 0) * q


def _six_bit_scales(packed: Tensor) -> tuple[Tensor, Tensor]:
    """The eight 6-bit scales and mins in 12 bytes: uint8 [..., 12] -> two uint8 [..., 8].

    The first four of each lie in the low six bits of bytes 0:4 and 4:8; the last four have their
    low halves in the halves of bytes 8:12 and their top two bits above the first four's.
    """
    first, second, third = packed[..., 0:4], packed[..., 4:8], packed[..., 8:12]
    scales = torch.cat((first & 63, (third & 15) | (first >> 6 << 4)), dim=-1)
    mins = torch.cat((second & 63, (third >> 4) | (second >> 6 << 4)), dim=-1)
    return scales, mins


def _decode_q4_k(blocks: Tensor) -> Tensor:
    """w[i] = (d · scale[j]) · q[i] - (dmin · min[j]), in eight sub-blocks j = i // 32.

    Bytes: d 0:2, dmin 2:4, scales and mins 4:16 in six bits each, qs 16:144. Each 32 bytes of qs
    hold two sub-blocks: the even one in the low halves, the odd one in the high halves.
    """
    scales, mins = _six_bit_scales(blocks[..., 4:16])
    step = _half(blocks, 0) * scales.float()
    low = _half(blocks, 2) * mins.float()
    q = _nibbles(blocks[..., 16:144].unflatten(-1, (4, 32))).flatten(-3, -2).float()
    return (step[..., None] * q - low[..., None]).flatten(-2)


def _decode_q6_k(blocks: Tensor) -> Tensor:
    """w[i] = (d · scale[i // 16]) · (q[i] - 32).

    Bytes: ql 0:128, qh 128:192, scale int8 192:208, d 208:210. With i = 128h + 32j + l, the low
    four bits of q[i] are half j // 2 of ql[64h + 32 (j mod 2) + l], and the high two are bits 2j
    and 2j + 1 of qh[32h + l].
    """
    low = _nibbles(blocks[..., 0:128].unflatten(-1, (2, 2, 32)).flatten(-2))  # [..., h, j // 2, 64]
    low = low.unflatten(-1, (2, 32)).flatten(-3, -2)  # [..., h, j, l]
    packed = blocks[..., 128:192].unflatten(-1, (2, 1, 32))
    high = torch.cat([packed >> 2 * j & 3 for j in range(4)], dim=-2)
    q = (low | high << 4).float() - 32
    step = _half(blocks, 208) * blocks[..., 192:208].view(torch.int8).float()
    return (step[..., None] * q.flatten(-3).unflatten(-1, (16, 16))).flatten(-2)


FORMATS: dict[str, BlockFormat] = {
    fmt.name: fmt
    for fmt in (
        BlockFormat("Q4_0", ggml_id=2, block_size=32, block_bytes=18, decode=_decode_q4_0),
        BlockFormat("Q4_1", ggml_id=3, block_size=32, block_bytes=20, decode=_decode_q4_1),
        BlockFormat("Q8_0", ggml_id=8, block_size=32, block_bytes=34, decode=_decode_q8_0),
        BlockFormat("Q4_K", ggml_id=12, block_size=256, block_bytes=144, decode=_decode_q4_k),
        BlockFormat("Q6_K", ggml_id=14, block_size=256, block_bytes=210, decode=_decode_q6_k),
    )
}
