"""Many tokens by their experts' rows in planes, on tensor cores: one program per tile of an expert.

Activations are arranged once, every row of them (:mod:`ferrum_triton.kernels.moe.prepare`), and
gathered by pair in the loop that :mod:`ferrum_triton.kernels.quant.mma` has for one matrix. float32
activations are never rounded: each of their pairs is a product of its own.
"""

import torch
import triton.language as tl
from torch import Tensor

from ferrum_triton.kernels.jit import capability, kernel
from ferrum_triton.kernels.moe.buckets import bucket_tiles, start_of_tile, tile_bound
from ferrum_triton.kernels.moe.plane_gemv import gemv_plane_pairs
from ferrum_triton.kernels.moe.prepare import prepare
from ferrum_triton.kernels.quant.mma import Config, halves_of, tile_meta, tile_product
from ferrum_triton.kernels.quant.plane_products import OTHER_TILES, fitted, least_tokens
from ferrum_triton.kernels.quant.planes import row_sizes
from ferrum_triton.kernels.rows import cdiv, next_power_of_2
from ferrum_triton.quant.kinds import file_kind
from ferrum_triton.quant.planes import ROW_ALIGN

# By the pairs of a tile. Those of plane_products, with shorter steps where the gathered rows'
# addresses leave fewer registers, and so that the loop is not over before its pipeline is full.
TILES = {
    8: Config(64, 8),
    16: Config(64, 16, words=16, parts=2, registers=128),
    32: Config(128, 32, words=16, late=False, warps=8, registers=128),
    64: Config(128, 64, words=16, late=False, warps=8, stages=3, registers=128),
}


@kernel(dynamic=("capacity",))
def _plane_tiles_kernel(
    y_ptr,  # [num_tokens, top_k, n], zeros
    x_ptr,  # [num_tokens, padded k], or [num_pairs, padded k]
    sums_ptr,  # [rows of x, padded k / 8]
    factor_ptr,  # [rows of x]
    planes_ptr,  # [num_experts, n, row_bytes]
    pairs_ptr,  # [num_experts, capacity]
    counts_ptr,  # [num_experts]
    stride_y_token,
    stride_y_slot,
    stride_x,
    stride_expert,  # of planes, in units of 16 bytes
    q_row,  # of a row of each plane, likewise
    h_row,
    s_row,
    t_row,
    d_row,
    num_experts,
    num_rows,
    num_words,  # of eight weights
    capacity,
    TOP_K: tl.constexpr,
    PER_PAIR: tl.constexpr,  # a row of x a pair
    BLOCK_E: tl.constexpr,  # power of two >= num_experts
    BITS: tl.constexpr,
    OFFSET: tl.constexpr,
    SCALES: tl.constexpr,
    MINS: tl.constexpr,
    ASM: tl.constexpr,
    CONSTRAINTS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_W: tl.constexpr,
    PARTS: tl.constexpr,
    LATE: tl.constexpr,
    WHOLE: tl.constexpr,  # K is whole steps
):
    counts, tiles, last, total = bucket_tiles(counts_ptr, num_experts, capacity, BLOCK_E, BLOCK_M)
    # Programs of one tile of pairs run side by side, and those of one expert near each other.
    tiles_n = tl.cdiv(num_rows, BLOCK_N)
    tile = tl.program_id(0) // tiles_n
    if tile >= total:
        return
    n = (tl.program_id(0) % tiles_n).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.minimum(n, num_rows - 1)  # past the end the last row is read again
    expert, pairs_ptr, left = start_of_tile(
        tile, counts, tiles, last, pairs_ptr, capacity, BLOCK_E, BLOCK_M
    )
    m = tl.arange(0, BLOCK_M)
    pair = tl.load(pairs_ptr + m, mask=m < left, other=0).to(tl.int64)
    acc = tile_product(
        planes_ptr + expert * stride_expert * 16, x_ptr, sums_ptr, q_row, h_row, s_row, t_row,
        d_row, stride_x, row, pair if PER_PAIR else pair // TOP_K, num_rows, num_words, 0, BITS,
        OFFSET, SCALES, MINS, ASM, CONSTRAINTS, BLOCK_N, BLOCK_M, BLOCK_W, PARTS, LATE, 1, WHOLE, 0,
    )  # fmt: skip
    # Read again: it would take registers all the while.
    pair = tl.load(pairs_ptr + m, mask=m < left, other=0, volatile=True).to(tl.int64)
    token, slot = pair // TOP_K, pair % TOP_K
    acc *= tl.load(factor_ptr + (pair if PER_PAIR else token))[None, :]
    y_row = y_ptr + (token * stride_y_token + slot * stride_y_slot)[None, :]
    tl.store(
        y_row + n[:, None],
        acc.to(y_ptr.dtype.element_ty),
        mask=(m < left)[None, :] & (n < num_rows)[:, None],
    )


@kernel(dynamic=("num_pairs", "capacity"))
def _experts_of_pairs_kernel(
    ids_ptr,  # [num_pairs], -1
    buckets_ptr,  # [num_experts, capacity]
    tpe_ptr,  # [num_experts]
    stride_buckets_expert,
    num_pairs,
    capacity,
    BLOCK: tl.constexpr,
):
    expert = tl.program_id(0)
    count = tl.load(tpe_ptr + expert)
    count = tl.minimum(tl.maximum(count, 0), capacity).to(tl.int32)
    bucket_ptr = buckets_ptr + expert.to(tl.int64) * stride_buckets_expert
    for first in range(0, count, BLOCK):
        entry = first + tl.arange(0, BLOCK)
        pair = tl.load(bucket_ptr + entry, mask=entry < count, other=-1).to(tl.int64)
        tl.store(
            ids_ptr + pair, tl.full([BLOCK], 0, tl.int32) + expert,
            mask=(pair >= 0) & (pair < num_pairs),
        )  # fmt: skip


def experts_of_pairs(bucket_ids: Tensor, tpe: Tensor, num_tokens: int, top_k: int) -> Tensor:
    """int32 [num_tokens, top_k], the expert of each pair in a bucket, -1 of the others."""
    num_experts, capacity = bucket_ids.shape
    ids = torch.full((num_tokens, top_k), -1, dtype=torch.int32, device=tpe.device)
    _experts_of_pairs_kernel.launch(
        (num_experts,),
        ids,
        bucket_ids,
        tpe,
        bucket_ids.stride(0),
        ids.numel(),
        capacity,
        BLOCK=128,
        num_warps=4,
    )
    return ids


def gemm_plane_pairs(
    a: Tensor,
    planes: Tensor,
    bucket_ids: Tensor,
    tpe: Tensor,
    kind: str,
    top_k: int,
    *,
    out: Tensor | None = None,
    config: Config | None = None,
) -> Tensor:
    """y[p // top_k, p mod top_k] = W[e] · a[p] for p in the first tpe[e] of bucket_ids[e].

    Args:
        a: [num_tokens, K] or [num_tokens, top_k, K].
        planes: uint8 [num_experts, n, row_bytes], W's rows in planes.
        bucket_ids, tpe: of ``compute_ids_tpe``.
        kind: of planes, such as ``"Q4_K:planes"``.
        top_k: slots of a token.
        out: [num_tokens, top_k, n] to write to.
        config: of the launch, its tokens being pairs; neither ``splits`` nor ``ahead`` count.
    """
    (num_experts, num_rows), k = planes.shape[:2], a.shape[-1]
    num_pairs, capacity = a.shape[0] * top_k, bucket_ids.shape[1]
    y = a.new_empty(a.shape[0], top_k, num_rows) if out is None else out
    if y.numel() == 0:
        return y
    if a.dtype == torch.float32:
        ids = experts_of_pairs(bucket_ids, tpe, a.shape[0], top_k)
        return gemv_plane_pairs(a, planes, ids, kind, out=y)
    if k == 0:
        return y.zero_()
    config = config or _config_of(file_kind(kind), num_pairs, num_experts, a.device)
    sizes = row_sizes(planes, kind, k)
    x, sums, factor, pairs, counts = prepare(y, a, bucket_ids, tpe, config.words, halves_of(kind))
    stripes = tile_bound(num_pairs, num_experts, capacity, config.tokens)
    _plane_tiles_kernel.launch(
        (stripes * cdiv(num_rows, config.rows),),
        y,
        x,
        sums,
        factor,
        planes,
        pairs,
        counts,
        y.stride(0),
        y.stride(1),
        x.stride(0),
        planes.stride(0) // ROW_ALIGN,
        *(size // ROW_ALIGN for size in sizes.values()),
        num_experts,
        num_rows,
        k // 8,
        capacity,
        TOP_K=top_k,
        PER_PAIR=a.dim() == 3,
        BLOCK_E=next_power_of_2(num_experts),
        **tile_meta(kind, config, k, a.device),
    )
    return y


def _config_of(kind: str, num_pairs: int, num_experts: int, device: torch.device) -> Config:
    """Tiles of what an expert has on average."""
    tiles = TILES if capability(device) >= (9, 0) else OTHER_TILES
    least = max(least_tokens(kind), min(tiles))
    average = next_power_of_2(max(cdiv(num_pairs, num_experts), least))
    return fitted(kind, tiles[min(average, max(tiles))])
