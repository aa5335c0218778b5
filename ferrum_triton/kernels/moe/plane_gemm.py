"""Many tokens by their experts' rows in planes, on tensor cores: one program per tile of an expert.

Activations are arranged once, every row of them (:mod:`ferrum_triton.kernels.moe.prepare`), and
gathered by pair in the loop that :mod:`ferrum_triton.kernels.quant.mma` has for one matrix. Gate
and up are that loop twice, the first product waiting in registers. Programs past the tiles clear
the rows of pairs without an expert. float32 activations are never rounded: each of their pairs is a
product of its own.

Each kernel of a call may start while the one before it ends: it waits for that one's end before it
reads anything, and what comes after may rely on it.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ferrum_triton.kernels.elementwise import activated
from ferrum_triton.kernels.jit import capability, kernel
from ferrum_triton.kernels.moe.plane_gemv import gemv_plane_pairs
from ferrum_triton.kernels.moe.prepare import prepare
from ferrum_triton.kernels.quant.mma import Config, halves_of, tile_meta, tile_product
from ferrum_triton.kernels.quant.planes import row_sizes
from ferrum_triton.kernels.rows import cdiv, next_power_of_2
from ferrum_triton.quant.kinds import file_kind
from ferrum_triton.quant.planes import ROW_ALIGN

# By the pairs of a tile. Those of plane_products, with shorter steps where the gathered rows'
# addresses leave fewer registers, and so that the loop is not over before its pipeline is full.
# With 128 registers a thread two programs of 8 warps, or four of 4, fit a processor.
TILES = {
    8: Config(64, 8, registers=128),
    16: Config(128, 16, parts=2, warps=8, stages=3, registers=128),
    32: Config(128, 32, words=16, late=False, warps=8, registers=128),
    64: Config(128, 64, words=16, late=False, warps=8, stages=3, registers=128),
}
# With 256 weights a step some do not fit: pairs of Q3_K, and two products of most kinds.
SHORT = Config(64, 16, words=16, parts=2, registers=128)
# Of GPUs before Hopper and of AMD's, where those spill or do not compile.
OTHER_TILES = {
    16: Config(64, 16, stages=2),
    32: Config(64, 32, words=16, late=False, stages=2),
    64: Config(128, 64, words=16, late=False, warps=8, stages=2),
}
OTHER_SHORT = SHORT._replace(stages=2, registers=0)
SOUGHT = 64  # pairs a program past the tiles looks for


@triton.jit
def _clear_missing(
    y_ptr, experts_ptr, pairs_ptr, places_ptr, stride_y_token, stride_y_slot, first, num_rows,
    num_tiles, num_pairs, TOP_K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    """Zeros for those of BLOCK_P pairs that no tile has."""
    pair = first + tl.arange(0, BLOCK_P)
    place = tl.load(places_ptr + pair, mask=pair < num_pairs, other=-1)
    # A pair that is nowhere has any place: what is there tells.
    somewhere = (place >= 0) & (place < num_tiles * BLOCK_M)
    somewhere &= tl.load(experts_ptr + place // BLOCK_M, mask=somewhere, other=-1) >= 0
    missing = tl.load(pairs_ptr + place, mask=somewhere, other=-1) != pair
    missing &= pair < num_pairs
    if tl.max(missing.to(tl.int32), axis=0) > 0:
        token, slot = (pair // TOP_K).to(tl.int64), (pair % TOP_K).to(tl.int64)
        y_rows = y_ptr + (token * stride_y_token + slot * stride_y_slot)[:, None]
        for begin in range(0, num_rows, 64):
            n = (begin + tl.arange(0, 64))[None, :]
            zeros = tl.zeros([BLOCK_P, 64], y_ptr.dtype.element_ty)
            tl.store(y_rows + n, zeros, mask=missing[:, None] & (n < num_rows))


@kernel(dynamic=("num_tiles", "num_pairs", "num_products"))
def _plane_tiles_kernel(
    y_ptr,  # [num_tokens, top_k, n]
    x_ptr,  # [num_tokens, padded k], or [num_pairs, padded k]
    sums_ptr,  # [rows of x, padded k / 8]
    factor_ptr,  # [rows of x]
    planes_ptr,  # [num_experts, n, row_bytes]
    up_ptr,  # likewise: y = silu(planes · a) · (up · a); or None
    experts_ptr,  # [num_tiles]
    pairs_ptr,  # [num_tiles, BLOCK_M]
    places_ptr,  # [num_pairs]
    stride_y_token,
    stride_y_slot,
    stride_x,
    stride_expert,  # of planes, in units of 16 bytes
    stride_up_expert,
    q_row,  # of a row of each plane, likewise
    h_row,
    s_row,
    t_row,
    d_row,
    num_rows,
    num_words,  # of eight weights
    num_tiles,
    num_pairs,
    num_products,
    TOP_K: tl.constexpr,
    PER_PAIR: tl.constexpr,  # a row of x a pair
    BLOCK_P: tl.constexpr,  # pairs a program past the tiles looks for
    CHAINED: tl.constexpr,  # starts while the launch before ends, and lets the next one do so
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
    if CHAINED:
        gdc_wait()
        gdc_launch_dependents()
    # Programs of one tile of pairs run side by side, and those of one expert near each other.
    tiles_n = tl.cdiv(num_rows, BLOCK_N)
    tile = tl.program_id(0) // tiles_n
    if tile >= num_tiles:
        first = (tl.program_id(0) - num_tiles * tiles_n) * BLOCK_P
        _clear_missing(
            y_ptr, experts_ptr, pairs_ptr, places_ptr, stride_y_token, stride_y_slot, first,
            num_rows, num_tiles, num_pairs, TOP_K, BLOCK_M, BLOCK_P,
        )  # fmt: skip
        return
    pairs_ptr += tile * BLOCK_M
    m = tl.arange(0, BLOCK_M)
    expert = tl.load(experts_ptr + tile).to(tl.int64)
    pair = tl.maximum(tl.load(pairs_ptr + m), 0).to(tl.int64)
    if expert < 0:
        return
    n = (tl.program_id(0) % tiles_n).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.minimum(n, num_rows - 1)  # past the end the last row is read again
    x_row = pair if PER_PAIR else pair // TOP_K
    matrix_ptr = planes_ptr + expert * stride_expert * 16
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    gate = acc
    # A loop and not twice the code, which would keep twice the addresses in registers.
    for product in range(1 if up_ptr is None else num_products):
        gate = acc
        if up_ptr is not None:
            if product > 0:
                matrix_ptr = up_ptr + expert * stride_up_expert * 16
        acc = tile_product(
            matrix_ptr, x_ptr, sums_ptr, q_row, h_row, s_row, t_row, d_row, stride_x, row, x_row,
            num_rows, num_words, 0, BITS, OFFSET, SCALES, MINS, ASM, CONSTRAINTS, BLOCK_N, BLOCK_M,
            BLOCK_W, PARTS, LATE, 1, WHOLE, 0,
        )  # fmt: skip
    # Read again: it would take registers all the while.
    pair = tl.load(pairs_ptr + m, volatile=True)
    known = pair >= 0
    pair = tl.maximum(pair, 0).to(tl.int64)
    token, slot = pair // TOP_K, pair % TOP_K
    factor = tl.load(factor_ptr + (pair if PER_PAIR else token))[None, :]
    acc *= factor
    if up_ptr is not None:
        acc *= activated(gate * factor, "silu")
    y_row = y_ptr + (token * stride_y_token + slot * stride_y_slot)[None, :]
    tl.store(
        y_row + n[:, None],
        acc.to(y_ptr.dtype.element_ty),
        mask=known[None, :] & (n < num_rows)[:, None],
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
    up: Tensor | None = None,
    *,
    out: Tensor | None = None,
    config: Config | None = None,
) -> Tensor:
    """y[p // top_k, p mod top_k] = W[e] · a[p] for p in the first tpe[e] of bucket_ids[e].

    Of two matrices an expert it is silu of that times U[e] · a[p].

    Args:
        a: [num_tokens, K] or [num_tokens, top_k, K].
        planes: uint8 [num_experts, n, row_bytes], W's rows in planes.
        bucket_ids, tpe: of ``compute_ids_tpe``.
        kind: of planes, such as ``"Q4_K:planes"``.
        top_k: slots of a token.
        up: U's rows, like planes.
        out: [num_tokens, top_k, n] to write to.
        config: of the launch, its tokens being pairs; neither ``splits`` nor ``ahead`` count.
    """
    (num_experts, num_rows), k = planes.shape[:2], a.shape[-1]
    num_pairs = a.shape[0] * top_k
    y = a.new_empty(a.shape[0], top_k, num_rows) if out is None else out
    if y.numel() == 0:
        return y
    if a.dtype == torch.float32:
        ids = experts_of_pairs(bucket_ids, tpe, a.shape[0], top_k)
        return gemv_plane_pairs(a, planes, ids, kind, up, "" if up is None else kind, out=y)
    if k == 0:
        return y.zero_()
    if config is None:
        config = _config_of(file_kind(kind), num_pairs, num_experts, up is not None, a.device)
    sizes = row_sizes(planes, kind, k)
    tiles = prepare(
        a, bucket_ids, tpe, top_k, config.tokens, config.words, halves_of(kind)
    )  # fmt: skip
    num_tiles = len(tiles.experts)
    chained = capability(a.device) >= (9, 0)
    _plane_tiles_kernel.launch(
        (num_tiles * cdiv(num_rows, config.rows) + cdiv(num_pairs, SOUGHT),),
        y,
        tiles.x,
        tiles.sums,
        tiles.factor,
        planes,
        up,
        tiles.experts,
        tiles.pairs,
        tiles.places,
        y.stride(0),
        y.stride(1),
        tiles.x.stride(0),
        planes.stride(0) // ROW_ALIGN,
        0 if up is None else up.stride(0) // ROW_ALIGN,
        *(size // ROW_ALIGN for size in sizes.values()),
        num_rows,
        k // 8,
        num_tiles,
        num_pairs,
        1 if up is None else 2,
        TOP_K=top_k,
        PER_PAIR=a.dim() == 3,
        BLOCK_P=SOUGHT,
        CHAINED=chained,
        **tile_meta(kind, config, k, a.device),
        **({"launch_pdl": True} if chained else {}),
    )
    return y


def _config_of(
    kind: str, num_pairs: int, num_experts: int, is_gated: bool, device: torch.device
) -> Config:
    """Tiles of what an expert has on average."""
    is_new = capability(device) >= (9, 0)
    tiles = TILES if is_new else OTHER_TILES
    # Q3_K's pairs do not stay in registers for the instruction of 8 tokens.
    least = 16 if kind == "Q3_K" else min(tiles)
    # Nor does a first product of 64 beside these kinds' weights.
    most = 32 if is_gated and kind in ("Q2_K", "Q3_K") else max(tiles)
    average = next_power_of_2(max(cdiv(num_pairs, num_experts), least))
    config = tiles[min(average, most)]
    if config.tokens == SHORT.tokens and (is_gated or kind == "Q3_K"):
        config = SHORT if is_new else OTHER_SHORT
    if kind == "Q8_0":  # twice the bytes a stage
        config = config._replace(stages=max(config.stages - 1, 2))
    return config
