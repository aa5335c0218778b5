"""Keys and values as kernels take them: a pool of pages, of which a contiguous cache is one."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ferrum_triton.backends.metal.shader import strides
from ferrum_triton.ops.kv_pool import LIMITS, pool_strides, scale_strides, token_view

ONE_PIECE = 2**31  # is longer than any vector


class Pool(NamedTuple):
    """Keys and values.

    Attributes:
        strides: of k by block, head, slot and piece; then those of v.
        pieces: elements of k and of v that lie side by side.
        k_scales, v_scales: of codes, else None.
        scale_strides: of k's scales by block, head and slot; then those of v's.
    """

    k: Tensor
    v: Tensor
    num_blocks: int
    block_size: int
    num_kv_heads: int
    strides: tuple[int, ...]
    pieces: tuple[int, int] = (ONE_PIECE, ONE_PIECE)
    k_scales: Tensor | None = None
    v_scales: Tensor | None = None
    scale_strides: tuple[int, ...] = (0,) * 6

    def types(self) -> dict[str, torch.dtype | str]:
        """What the sources' names stand for."""
        return {
            "CACHE": self.k.dtype,
            "QUANTISED": str(int(self.k_scales is not None)),
            "SCALE": torch.float32 if self.k_scales is None else self.k_scales.dtype,
            "K_PIECE": f"{self.pieces[0]}u",
            "V_PIECE": f"{self.pieces[1]}u",
        }

    def params(self) -> dict[str, int]:
        """Those of a kernel that reads or writes the pool."""
        return {
            "num_blocks": self.num_blocks,
            "block_size": self.block_size,
            **strides("k", "block head slot piece", self.strides[:4]),
            **strides("v", "block head slot piece", self.strides[4:]),
            **strides("k_scales", "block head slot", self.scale_strides[:3]),
            **strides("v_scales", "block head slot", self.scale_strides[3:]),
        }


def contiguous(k: Tensor, v: Tensor) -> Pool:
    """Keys and values [sequences, num_kv_heads, capacity, width]: a page a sequence."""
    num_blocks, num_kv_heads, capacity = k.shape[:3]
    by_slot = (*pool_strides(k, "hnd"), *pool_strides(v, "hnd"))
    return Pool(k, v, num_blocks, capacity, num_kv_heads, by_slot)


def pages(
    k_cache: Tensor,
    v_cache: Tensor,
    k_scales: Tensor | None,
    v_scales: Tensor | None,
    layout: str,
) -> Pool:
    """A pool in one of the layouts of :mod:`ferrum_triton.ops.kv_pool`."""
    num_blocks, block_size, num_kv_heads = token_view(v_cache, layout).shape[:3]
    by_slot = (*pool_strides(k_cache, layout), *pool_strides(v_cache, layout))
    pieces = (k_cache.shape[-1], 1) if layout == "vllm_x" else (ONE_PIECE, ONE_PIECE)
    if k_cache.dtype not in LIMITS:
        k_scales = v_scales = None
    of_scales: list[int] = []
    for scales in (k_scales, v_scales):
        if scales is None:
            of_scales += (0, 0, 0)
        elif scales.dim() == 3:
            of_scales += scale_strides(scales, layout)
        else:  # one for all heads is one that never advances
            of_scales += (0, 0 if scales.shape[0] == 1 else scales.stride(0), 0)
    return Pool(
        k_cache, v_cache, num_blocks, block_size, num_kv_heads, by_slot, pieces, k_scales, v_scales,
        tuple(of_scales),
    )  # fmt: skip
