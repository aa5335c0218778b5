"""Packed rows by the kind that ops know them by: a format of GGUF, or one in planes."""

from __future__ import annotations

import torch
from torch import Tensor

from ferrum_triton.quant.encode import quantize_blocks
from ferrum_triton.quant.formats import FORMATS, BlockFormat, dequantize_blocks
from ferrum_triton.quant.planes import (
    PLANE_FORMATS,
    PlaneFormat,
    from_planes,
    to_planes,
)
from ferrum_triton.quant.planes import take_rows as take_rows_of_planes

KINDS = (*PLANE_FORMATS, *FORMATS)


def is_kind(kind: str) -> bool:
    """Whether ``kind`` names a format, one that was added since :data:`KINDS` was made too."""
    return kind in FORMATS or kind in PLANE_FORMATS


def format_of(kind: str) -> BlockFormat | PlaneFormat:
    """The format that ``kind``, one of :data:`KINDS`, names."""
    return FORMATS[kind] if kind in FORMATS else PLANE_FORMATS[kind]


def file_kind(kind: str) -> str:
    """``kind`` as a file names it: ``"Q4_K"`` for ``"Q4_K:planes"``."""
    return PLANE_FORMATS[kind].file.name if kind in PLANE_FORMATS else kind


def dequantize_rows(rows: Tensor, kind: str) -> Tensor:
    """Decode uint8 [..., rows, row_bytes] to float32 [..., rows, K], with the bits of ggml's."""
    stored = from_planes(rows, file_kind(kind)) if kind in PLANE_FORMATS else rows
    return dequantize_blocks(stored, FORMATS[file_kind(kind)])


def take_rows(blocks: Tensor, rows: Tensor, kind: str) -> Tensor:
    """Rows [i] of a packed matrix [n, row_bytes], as a matrix of their own."""
    if kind in PLANE_FORMATS:
        return take_rows_of_planes(blocks, rows, file_kind(kind))
    return blocks[rows]


def quantize_rows(weights: Tensor, kind: str) -> Tensor:
    """Pack float [..., K], a multiple of the block size, to uint8 [..., row_bytes]."""
    if weights.is_meta:  # no numbers to encode, and operators on meta tensors are slow
        row_bytes = format_of(kind).row_bytes(weights.shape[-1])
        return weights.new_empty((*weights.shape[:-1], row_bytes), dtype=torch.uint8)
    stored = quantize_blocks(weights, FORMATS[file_kind(kind)])
    return to_planes(stored, file_kind(kind)) if kind in PLANE_FORMATS else stored
