"""Planes of a packed matrix, for tests of the kernels that read them."""

import torch
from torch import Tensor

from ferrum_triton.kernels.quant.fragments import CODES
from ferrum_triton.quant import FORMATS


def _packed(values: Tensor, bits: int) -> Tensor:
    """Integers [n, k], 32 / bits to an int32: value 4 p + b of a word at bits · p of byte b."""
    per_byte = 8 // bits
    each = values.to(torch.int32).unflatten(-1, (-1, per_byte, 4)) & (1 << bits) - 1
    shifts = bits * torch.arange(per_byte, device=values.device)[:, None]
    word_bytes = (each << shifts).sum(-2).to(torch.uint8)
    return word_bytes.flatten(-2).contiguous().view(torch.int32)


def _aligned(plane: Tensor) -> Tensor:
    """The same, rows at multiples of 16 bytes; what lies between them is no number."""
    unit = 16 // plane.element_size()
    n, columns = plane.shape
    whole = plane.new_full(
        (n, -(-columns // unit) * unit), -1 if not plane.is_floating_point() else torch.nan
    )
    whole[:, :columns] = plane
    return whole[:, :columns]


def planes_of(blocks: Tensor, kind: str) -> dict[str, Tensor]:
    """uint8 [n, row_bytes] -> planes as :mod:`ferrum_triton.kernels.quant.mma` reads them."""
    fmt, codes = FORMATS[kind], CODES[kind]
    each = blocks.unflatten(-1, (-1, fmt.block_bytes))
    q = (fmt.q.read(each).to(torch.int16) + codes.offset).flatten(-2)
    low = min(codes.bits, 8) if codes.bits in (2, 4, 8) else (2 if codes.bits == 3 else 4)
    planes = {"words": _packed(q, low)}
    if codes.bits != low:
        planes["more"] = _packed(q >> low, codes.bits - low)
    if codes.scales:
        scales = fmt.scales.read(each).to(torch.int16).flatten(-2)
        if codes.scales == "byte":
            planes["scales"] = scales.to(torch.int8)
        else:
            mins = fmt.mins.read(each).to(torch.int16).flatten(-2)
            both = scales | mins << (8 if codes.scales == "pair" else 4)
            planes["scales"] = both if codes.scales == "pair" else both.to(torch.uint8)
    d = each[..., fmt.d.at : fmt.d.at + 2]
    if codes.mins:
        d = torch.cat([d, each[..., fmt.m.at : fmt.m.at + 2]], -1)
        planes["d"] = d.contiguous().view(torch.int32).squeeze(-1)
    else:
        planes["d"] = d.contiguous().view(torch.float16).squeeze(-1)
    return {name: _aligned(plane) for name, plane in planes.items()}
