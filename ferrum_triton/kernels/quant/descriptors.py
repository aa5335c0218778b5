"""Planes and arranged activations as tensor descriptors, for tiles that come by TMA.

On GPUs of capability 9.0 a tile comes to shared memory by one instruction of one thread. By
pointers each thread asks for its 16 bytes, or for four where rows of a plane are narrow, waits for
its turn, and keeps addresses in registers; ``bench.tune gemm_quant`` times both.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ferrum_triton.kernels.quant.activations import Arranged
from ferrum_triton.kernels.quant.mma_operands import (
    Tile,
    d_by_tma,
    d_columns,
    h_columns,
    q_columns,
    s_by_tma,
    s_columns,
)

Descriptor = TensorDescriptor | None


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
def _planes_of(tile: Tile) -> dict[str, tuple[torch.dtype, int]]:
    """The type and number of a step's columns of each plane that descriptors bring."""
    planes = {"q": (torch.int32, q_columns(tile))}
    if h_columns(tile):
        planes["h"] = torch.int32, h_columns(tile)
    if s_by_tma(tile):
        types = {"pair": torch.int16, "byte": torch.int8}
        planes["s"] = types.get(tile.format.scale_code, torch.uint8), s_columns(tile)
    if d_by_tma(tile):
        planes["d"] = torch.int32 if tile.format.has_minimum else torch.float16, d_columns(tile)
    return planes


def descriptors_of(
    tile: Tile,
    rows: int,
    arranged: Arranged,
    matrices: Mapping[str, Tensor | None],
    sizes: dict[str, int],
    num_weights: int,
) -> dict[str, Descriptor]:
    """A kernel's descriptors of its activations and of the planes q, h, s and d of its matrices.

    Args:
        tile: what a step is.
        rows: rows of a tile.
        arranged: activations, of which a step takes a part at a time.
        matrices: by the prefix of their descriptors' names, uint8 [experts, n, row_bytes], each
            expert's rows in planes; of an expanded one there is one expert.
        sizes: bytes of a row of each plane, of ``row_sizes``.
        num_weights: weights of a row. What lies in a plane past them is any, and a d that is no
            number would not become 0 by activations that are.

    Returns:
        ``{"x_desc": .., "q_desc": ..}`` and so on, None of what is read by pointers.
    """
    found = no_descriptors(matrices) | _activation_descriptors(arranged, tile)
    for prefix, planes in matrices.items():
        if planes is not None:
            for plane, descriptor in _plane_descriptors(planes, sizes, num_weights, tile, rows):
                found[f"{prefix}{plane}_desc"] = descriptor
    return found


def no_descriptors(prefixes: Iterable[str]) -> dict[str, Descriptor]:
    """A kernel's arguments where everything is read by pointers."""
    names = ["x", "sums", *(f"{prefix}{plane}" for prefix in prefixes for plane in "qhsd")]
    return {f"{name}_desc": None for name in names}


def _plane_descriptors(
    planes: Tensor, sizes: dict[str, int], num_weights: int, tile: Tile, rows: int
) -> Iterator[tuple[str, Descriptor]]:
    """Descriptors of those planes that they bring."""
    experts, n = planes.shape[:2]
    if planes.stride(0) == 0:  # no stride of a descriptor: all are the first
        experts = 1
    q, h, s, t, _ = sizes.values()
    firsts = {"q": 0, "h": q, "s": q + h, "d": q + h + s + t}
    for plane, (dtype, columns) in _planes_of(tile).items():
        size, each = sizes[plane], dtype.itemsize
        shape = experts, n, num_weights // 32 if plane == "d" else size // each
        # Of one expert any stride does, but it has to be one of a descriptor.
        strides = (planes.stride(0) if experts > 1 else n * size) // each, size // each, 1
        block = 1, rows, columns
        yield plane, _descriptor(planes, firsts[plane] * n, dtype, shape, strides, block)


def _activation_descriptors(arranged: Arranged, tile: Tile) -> dict[str, Descriptor]:
    x, sums, columns = arranged.x, arranged.sums, 8 * tile.words // tile.parts
    x_desc = _descriptor(x, 0, x.dtype, x.shape, x.stride(), (tile.tokens, columns))
    sums_desc = None
    if tile.scale_after and tile.format.has_minimum:
        block = (tile.tokens, tile.words)
        sums_desc = _descriptor(sums, 0, sums.dtype, sums.shape, sums.stride(), block)
    return {"x_desc": x_desc, "sums_desc": sums_desc}


def _descriptor(
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
