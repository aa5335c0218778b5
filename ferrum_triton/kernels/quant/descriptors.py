"""Planes and arranged activations as tensor descriptors.

On GPUs of capability 9.0 a tile comes to shared memory by one instruction of one thread. By
pointers each thread asks for its 16 bytes, or for four where rows of a plane are narrow, waits for
its turn, and keeps addresses in registers; ``bench.quant_tiles`` times both.
"""

from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ferrum_triton.kernels.quant.fragments import CODES
from ferrum_triton.quant.kinds import file_kind

Descriptors = tuple[TensorDescriptor | None, ...]
# Rows of a descriptor's tile have at least so many bytes.
LEAST_BYTES = triton.language.constexpr(16)


@triton.constexpr_function
def words_of(bits, words):
    """int32 of a row's first plane that hold so many words of eight weights."""
    return 2 * words if bits == 8 else (words // 2 if bits < 4 else words)


@triton.constexpr_function
def high_words_of(bits, words):
    """int32 of its second plane; 0 of formats that have none."""
    return {6: words // 2, 5: words // 4, 3: words // 4}.get(bits, 0)


@triton.constexpr_function
def scales_of(scales, words):
    """Its sub-blocks' scales, of the kind of ``Codes.scales``."""
    return 0 if scales == "" else words // (2 if scales in ("byte", "nibbles") else 4)


@triton.constexpr_function
def scales_described(scales, words):
    """Whether a step's scales come by a descriptor: those of 16 words are too narrow."""
    return scales in ("pair", "nibbles", "byte") and words == 32


@triton.constexpr_function
def blocks_described(scales, mins, words):
    """Likewise d, and m, of formats of 32 weights; of others a step has one."""
    return scales == "" and words // 4 * (4 if mins else 2) >= LEAST_BYTES


@dataclass(frozen=True)
class _Address:
    """What a descriptor asks of a tensor: it is remembered, and must not keep memory from being
    freed."""

    address: int
    dtype: torch.dtype

    def data_ptr(self) -> int:
        return self.address


@lru_cache(maxsize=8192)
def _at(
    address: int,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    block: tuple[int, ...],
) -> TensorDescriptor:
    return TensorDescriptor(_Address(address, dtype), list(shape), list(strides), list(block))


@lru_cache(maxsize=256)
def _tiles(kind: str, words: int) -> tuple[tuple[torch.dtype, int] | None, ...]:
    """Of the planes q, h, s and d: the type and number of a step's columns, if it is described."""
    codes = CODES[file_kind(kind)]
    types = {"pair": torch.int16, "nibbles": torch.uint8, "byte": torch.int8}
    high = high_words_of(codes.bits, words)
    q = torch.int32, words_of(codes.bits, words)
    h = (torch.int32, high) if high else None
    s, d = None, None
    if scales_described(codes.scales, words):
        s = types[codes.scales], scales_of(codes.scales, words)
    if blocks_described(codes.scales, codes.mins, words):
        d = (torch.int32 if codes.mins else torch.float16), words // 4
    return q, h, s, d


def describe_planes(
    planes: Tensor, sizes: dict[str, int], kind: str, num_weights: int, words: int, rows: int
) -> Descriptors:
    """The planes q, h, s and d in tiles of a step of some rows; None of one that is read otherwise.

    Args:
        planes: uint8 [experts, n, row_bytes], each expert's rows in planes; of an expanded one
            there is one expert.
        sizes: of ``row_sizes``.
        kind: their kind, such as ``"Q4_K:planes"``.
        num_weights: of a row. What lies in a plane past them is any, and a d that is no number
            would not become 0 by activations that are.
        words: of a step.
        rows: of a tile.
    """
    experts, n = planes.shape[:2]
    if planes.stride(0) == 0:  # no stride of a descriptor: all are the first
        experts = 1
    q, h, s, t, _ = sizes.values()
    firsts = {"Q": 0, "H": q, "S": q + h, "D": q + h + s + t}
    found: list[TensorDescriptor | None] = []
    for (plane, first), tile in zip(firsts.items(), _tiles(kind, words), strict=True):
        if tile is None:
            found.append(None)
            continue
        (dtype, columns), size = tile, sizes[plane]
        each = dtype.itemsize
        shape = experts, n, num_weights // 32 if plane == "D" else size // each
        # Of one expert any stride does, but it has to be one of a descriptor.
        strides = (planes.stride(0) if experts > 1 else n * size) // each, size // each, 1
        found.append(_describe(planes, first * n, dtype, shape, strides, (1, rows, columns)))
    return tuple(found)


def describe_activations(
    x: Tensor, sums: Tensor, tokens: int, words: int, parts: int, with_sums: bool
) -> Descriptors:
    """Arranged activations, and their sums, in tiles of a part of a step of some tokens.

    Args:
        x, sums: of ``arrange``.
        tokens: of a tile.
        words: of a step.
        parts: of a step.
        with_sums: or None instead of them.
    """
    x_desc = _describe(x, 0, x.dtype, x.shape, x.stride(), (tokens, 8 * words // parts))
    if not with_sums:
        return x_desc, None
    return x_desc, _describe(sums, 0, sums.dtype, sums.shape, sums.stride(), (tokens, words))


def _describe(
    tensor: Tensor,
    first: int,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    block: tuple[int, ...],
) -> TensorDescriptor:
    """Elements of ``dtype`` from byte ``first`` of a tensor on."""
    if tensor.is_cuda:
        return _at(tensor.data_ptr() + first, dtype, tuple(shape), tuple(strides), block)
    each, before = dtype.itemsize, tensor.storage_offset() * tensor.element_size()
    size = (shape[-1] * each,)
    view = tensor.view(torch.uint8) if tensor.dtype != torch.uint8 else tensor
    view = view.as_strided(
        (*shape[:-1], *size), (*(stride * each for stride in strides[:-1]), 1), before + first
    )
    return TensorDescriptor(view.view(dtype), list(shape), list(strides), list(block))
