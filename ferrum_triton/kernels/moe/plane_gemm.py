"""Many tokens by their experts' rows in planes, on tensor cores: one program per tile of an expert.

Activations are arranged once, every row of them (:mod:`ferrum_triton.kernels.moe.prepare`), and
gathered by pair; or sorted by expert, a row a pair, for tensor descriptors to bring
(:mod:`ferrum_triton.kernels.moe.sorted_activations`). A loop takes the steps that
:mod:`ferrum_triton.kernels.quant.mma` takes for one matrix, one tile of rows after the other. Of
gate and up a tile has rows of both. float32 activations are never rounded: each of their pairs is a
product of its own.
"""

from functools import partial
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ferrum_triton.kernels.elementwise import activated
from ferrum_triton.kernels.jit import can_overlap, capability, kernel
from ferrum_triton.kernels.moe.buckets import bucket_tiles, start_of_tile, tile_bound
from ferrum_triton.kernels.moe.plane_gemv import gemv_plane_pairs
from ferrum_triton.kernels.moe.prepare import Prepared, clear_lost, prepare
from ferrum_triton.kernels.moe.sorted_activations import prepare_sorted
from ferrum_triton.kernels.quant.descriptors import Descriptors, describe_planes
from ferrum_triton.kernels.quant.mma import Config, described_activations, halves_of, tile_meta
from ferrum_triton.kernels.quant.mma_operands import block_scales, described_operands, operands
from ferrum_triton.kernels.quant.mma_steps import add_step
from ferrum_triton.kernels.quant.plane_products import OTHER_TILES, fitted, least_tokens
from ferrum_triton.kernels.quant.planes import row_sizes
from ferrum_triton.kernels.rows import cdiv, next_power_of_2
from ferrum_triton.quant.kinds import file_kind
from ferrum_triton.quant.planes import ROW_ALIGN


class Mix(NamedTuple):
    """Tiles of one product: of one size, or what is left of an expert's pairs in smaller ones.

    Attributes:
        config: of tiles of pairs; neither ``splits`` nor ``ahead`` count.
        spared: at most so many pairs of an expert that are left by whole tiles take smaller ones.
        rest: of those, with as many words.
    """

    config: Config
    spared: int = 0
    rest: Config | None = None


# By the most pairs an expert has on average. Of few the products of plane_products' tiles, with
# shorter pipelines; more come through descriptors, sorted by expert. Chosen for the experts of
# bench.moe_layer.
_FULL = {"words": 16, "late": False, "described": True}
_SMALL = Config(64, 64, stages=3, registers=168, **_FULL)
MIXES = {
    4: Mix(Config(64, 8, stages=3)),
    8: Mix(Config(64, 16, stages=3, registers=128, described=True)),
    32: Mix(Config(64, 32, stages=3, described=True)),
    128: Mix(Config(64, 128, stages=3, **_FULL), 64, _SMALL),
    256: Mix(
        Config(128, 256, warps=8, stages=3, **_FULL),
        64,
        Config(64, 32, words=16, stages=4, described=True),
    ),
}
# Of gate and up, whose tiles have half as many rows of each.
_GATED_MIXES = {4: Mix(Config(128, 8, stages=3, registers=168))}
# Of kinds that would spill.
_MIXES_OF = {
    "Q3_K": {8: Mix(Config(64, 16, stages=3, registers=168, described=True))},
    "MXFP4": {256: MIXES[128]},
}
# Steps of its loop that a program has at most, unless a tile has more: by the pairs of a tile.
STEPS = {8: 32, 16: 16, 32: 16, 64: 32}
# Rows of the result that a program looks after which no tile may write.
CLEARED = 64


@triton.jit
def _store_tile(
    y_ptr, factor_ptr, pairs_ptr, places_ptr, acc, n, num_rows, left, first_place, stride_y_token,
    stride_y_slot, TOP_K: tl.constexpr, PER_PAIR: tl.constexpr, GATED: tl.constexpr,
    SORTED: tl.constexpr,
):  # fmt: skip
    """Write a tile's rows ``n`` of y, for pairs of which ``left`` are left."""
    m = tl.arange(0, acc.shape[1])
    # Read again, of L2: they would take registers all the while.
    pair = tl.load(pairs_ptr + m, mask=m < left, other=0, cache_modifier=".cg").to(tl.int64)
    token, slot = pair // TOP_K, pair % TOP_K
    kept = m < left
    if SORTED:
        # Of a pair that is in two places, one has activations.
        kept &= tl.load(places_ptr + pair, mask=kept, other=-1) == first_place + m
        factor = tl.load(factor_ptr + m, mask=m < left, other=0)
    else:
        factor = tl.load(factor_ptr + (pair if PER_PAIR else token))
    acc *= factor[None, :]
    if GATED:
        acc = tl.reshape(acc, [acc.shape[0] // 16, 2, 8, acc.shape[1]])
        gate, up = tl.split(tl.permute(acc, (0, 2, 3, 1)))
        acc = tl.reshape(activated(gate, "silu") * up, [n.shape[0], acc.shape[3]])
    y_row = y_ptr + (token * stride_y_token + slot * stride_y_slot)[None, :]
    tl.store(
        y_row + n[:, None],
        acc.to(y_ptr.dtype.element_ty),
        mask=kept[None, :] & (n < num_rows)[:, None],
    )


@kernel(dynamic=("num_pairs", "capacity", "tiles_each", "num_programs"))
def _plane_tiles_kernel(
    y_ptr,  # [num_tokens, top_k, n]
    x_ptr,  # [num_tokens, padded k], or [num_pairs, padded k]; through descriptors by expert
    sums_ptr,  # [rows of x, padded k / 8]
    factor_ptr,  # [rows of x]
    planes_ptr,  # [num_experts, n, row_bytes]
    up_ptr,  # likewise, if GATED
    pairs_ptr,  # [num_experts, capacity]
    counts_ptr,  # [num_experts]
    places_ptr,  # [num_pairs]
    x_desc,  # of describe_activations, or None
    sums_desc,
    w_desc,  # of describe_planes, or None
    h_desc,
    s_desc,
    d_desc,
    up_w_desc,
    up_h_desc,
    up_s_desc,
    up_d_desc,
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
    num_experts,
    num_rows,
    num_words,  # of eight weights
    num_pairs,
    capacity,
    tiles_each,  # of rows of W, one after the other
    num_programs,  # with tiles; the others clear
    TOP_K: tl.constexpr,
    PER_PAIR: tl.constexpr,  # a row of x a pair
    GATED: tl.constexpr,  # y = silu(W x) * (up x)
    BLOCK_E: tl.constexpr,  # power of two >= num_experts
    SPARED: tl.constexpr,  # see bucket_tiles
    BIG: tl.constexpr,
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
    RELEASED: tl.constexpr,  # this kernel may start before the end of the one before
    BLOCK_P: tl.constexpr,
):
    if RELEASED:
        gdc_launch_dependents()
        gdc_wait()
    if tl.program_id(0) >= num_programs:
        pair = (tl.program_id(0) - num_programs).to(tl.int64) * BLOCK_P + tl.arange(0, BLOCK_P)
        clear_lost(
            y_ptr, places_ptr, pairs_ptr, counts_ptr, pair, stride_y_token, stride_y_slot,
            num_experts, num_rows, num_pairs, capacity, TOP_K, BLOCK_N,
        )  # fmt: skip
        return
    counts, skipped, tiles, last, total = bucket_tiles(
        counts_ptr, num_experts, capacity, BLOCK_E, BLOCK_M, SPARED, BIG
    )
    # Programs of one tile of pairs run side by side, and those of one expert near each other.
    ROWS: tl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N
    tiles_n = tl.cdiv(num_rows, ROWS)
    chunks = tl.cdiv(tiles_n, tiles_each)
    tile = tl.program_id(0) // chunks
    if tile >= total:
        return
    first = tl.program_id(0) % chunks * tiles_each
    tiles_n = tl.minimum(tiles_n - first, tiles_each)
    expert, first_pair, left = start_of_tile(tile, counts, skipped, tiles, last, BLOCK_E, BLOCK_M)
    pairs_ptr += expert * capacity + first_pair
    first_place = (expert << 32) | first_pair
    SORTED: tl.constexpr = w_desc is not None
    if SORTED:
        e = tl.arange(0, BLOCK_E)
        first_pair += tl.sum(tl.where(e < expert, counts, 0), axis=0)
        left = tl.minimum(left, num_pairs - first_pair)  # of rows, if pairs are in two places
        factor_ptr += first_pair
    planes_ptr += expert * stride_expert * 16
    row = tl.arange(0, BLOCK_N)
    if GATED:
        # Eight rows of each in turn: what a thread has of them are neighbours' products.
        is_up = row // 8 % 2 == 1
        row = row // 16 * 8 + row % 8
        planes_ptr = tl.where(is_up, up_ptr + expert * stride_up_expert * 16, planes_ptr)
    row = tl.minimum(first.to(tl.int64) * ROWS + row, num_rows - 1)  # past the end the last again
    m = tl.arange(0, BLOCK_M)
    pair = tl.load(pairs_ptr + m, mask=m < left, other=0).to(tl.int64)
    at = operands(
        planes_ptr, x_ptr, sums_ptr, q_row, h_row, s_row, t_row, d_row, stride_x, row,
        pair if PER_PAIR else pair // TOP_K, num_rows, BITS, SCALES, MINS, BLOCK_W, PARTS,
    )  # fmt: skip
    at = described_operands(
        at, w_desc, h_desc, s_desc, d_desc, up_w_desc, up_h_desc, up_s_desc, up_d_desc, x_desc,
        sums_desc, first * ROWS, tl.where(stride_expert == 0, 0, expert).to(tl.int32),
        tl.where(stride_up_expert == 0, 0, expert).to(tl.int32), first_pair,
    )  # fmt: skip
    # The steps of one tile after those of the other, so that the pipeline is filled once.
    steps = tl.cdiv(num_words, BLOCK_W)
    tile, step = 0, 0
    d, d_min = block_scales(at, d_row, 0, 0, BLOCK_W, MINS, LATE)
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for _ in range(tiles_n * steps):
        is_last = step == steps - 1
        next_step, next_tile = tl.where(is_last, 0, step + 1), tl.where(is_last, tile + 1, tile)
        next_skipped = tl.minimum(next_tile, tiles_n - 1).to(tl.int64) * ROWS
        acc, d, d_min = add_step(
            acc, d, d_min, at, q_row, h_row, s_row, t_row, d_row, tl.cast(tile, tl.int64) * ROWS,
            step, next_skipped, next_step, num_words, BITS, OFFSET, SCALES, MINS, ASM, CONSTRAINTS,
            BLOCK_W, PARTS, LATE, WHOLE,
        )  # fmt: skip
        if is_last:
            n = (first + tile).to(tl.int64) * ROWS + tl.arange(0, ROWS)
            _store_tile(
                y_ptr, factor_ptr, pairs_ptr, places_ptr, acc, n, num_rows, left, first_place,
                stride_y_token, stride_y_slot, TOP_K, PER_PAIR, GATED, SORTED,
            )  # fmt: skip
            acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
        tile, step = next_tile, next_step


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
    mix: Mix | None = None,
) -> Tensor:
    """y[p // top_k, p mod top_k] = W[e] · a[p] for p in the first tpe[e] of bucket_ids[e].

    Args:
        a: [num_tokens, K] or [num_tokens, top_k, K].
        planes: uint8 [num_experts, n, row_bytes], W's rows in planes.
        bucket_ids, tpe: of ``compute_ids_tpe``.
        kind: of planes, such as ``"Q4_K:planes"``.
        top_k: slots of a token.
        up: of planes' shape: y is silu(W[e] · a[p]) * (up[e] · a[p]).
        out: [num_tokens, top_k, n] to write to.
        mix: tiles to launch.
    """
    (num_experts, num_rows), k = planes.shape[:2], a.shape[-1]
    num_pairs = a.shape[0] * top_k
    y = a.new_empty(a.shape[0], top_k, num_rows) if out is None else out
    if y.numel() == 0:
        return y
    if a.dtype == torch.float32:
        ids = experts_of_pairs(bucket_ids, tpe, a.shape[0], top_k)
        return gemv_plane_pairs(a, planes, ids, kind, up, None if up is None else kind, out=y)
    if k == 0:
        return y.zero_()
    mix = mix or _mix_of(file_kind(kind), num_pairs, num_experts, up is not None, a.device)
    may_overlap = can_overlap(a.device)
    sizes, config = row_sizes(planes, kind, k), mix.config
    arguments = a, bucket_ids, tpe, top_k, config.words, halves_of(kind)
    if config.described:
        prepared = prepare_sorted(*arguments, y, may_overlap)
    else:
        prepared = prepare(*arguments, may_overlap)
    launch = partial(
        _launch_tiles, y, prepared, planes, up, sizes, kind, k, a.dim() == 3, may_overlap
    )
    launch(config, mix.spared, 0)
    if mix.spared:
        launch(mix.rest, mix.spared, config.tokens)
    return y


def _launch_tiles(
    y: Tensor,
    prepared: Prepared,
    planes: Tensor,
    up: Tensor | None,
    sizes: dict[str, int],
    kind: str,
    k: int,
    per_pair: bool,
    may_overlap: bool,
    config: Config,
    spared: int,
    big: int,
) -> None:
    """Products of one size of tile; ``spared`` and ``big`` as ``bucket_tiles`` has them."""
    x, sums, factor, pairs, counts, places = prepared
    (num_experts, num_rows), (num_tokens, top_k) = planes.shape[:2], y.shape[:2]
    capacity = pairs.shape[1]
    num_pairs = num_tokens * top_k
    if big:
        stripes = min(num_pairs, num_experts) * cdiv(spared, config.tokens)
    else:
        stripes = tile_bound(num_pairs, num_experts, capacity, config.tokens)
    rows = config.rows if up is None else config.rows // 2
    tiles = cdiv(num_rows, rows)
    tiles_each = 1  # the rows that a last tile lacks can only be left out of a program's first
    if num_rows % rows == 0:
        tiles_each = _tiles_each(tiles, cdiv(k, 8 * config.words), config.tokens)
    num_programs = stripes * cdiv(tiles, tiles_each)
    second = planes if up is None else up
    described: Descriptors = (None,) * 10
    if config.described:
        described = described_activations(x, sums, kind, config)
        described += describe_planes(planes, sizes, kind, k, config.words, rows)
        if up is None:
            described += (None,) * 4
        else:
            described += describe_planes(up, sizes, kind, k, config.words, rows)
    _plane_tiles_kernel.launch(
        (num_programs + (0 if config.described else cdiv(num_pairs, CLEARED)),),
        y,
        x,
        sums,
        factor,
        planes,
        second,
        pairs,
        counts,
        places,
        *described,
        y.stride(0),
        y.stride(1),
        x.stride(0),
        planes.stride(0) // ROW_ALIGN,
        second.stride(0) // ROW_ALIGN,
        *(size // ROW_ALIGN for size in sizes.values()),
        num_experts,
        num_rows,
        k // 8,
        num_pairs,
        capacity,
        tiles_each,
        num_programs,
        TOP_K=top_k,
        PER_PAIR=per_pair,
        GATED=up is not None,
        BLOCK_E=next_power_of_2(num_experts),
        SPARED=spared,
        BIG=big,
        **tile_meta(kind, config, k, y.device),
        RELEASED=may_overlap,
        BLOCK_P=CLEARED,
        **({"launch_pdl": True} if may_overlap else {}),
    )


def _tiles_each(tiles: int, steps: int, tokens: int) -> int:
    """Tiles of rows, of so many steps, that a program takes: as many as all of them can."""
    few = range(1, max(min(tiles, STEPS.get(tokens, 16) // steps), 1) + 1)
    return max(each for each in few if tiles % each == 0)


def _mix_of(kind: str, num_pairs: int, num_experts: int, gated: bool, device: torch.device) -> Mix:
    """Tiles for what an expert has on average."""
    average = cdiv(num_pairs, num_experts)
    if capability(device) < (9, 0):
        least = max(average, least_tokens(kind))
        fitting = (tokens for tokens in OTHER_TILES if least <= tokens)
        return Mix(fitted(kind, OTHER_TILES[next(fitting, max(OTHER_TILES))]))
    if capability(device) >= (10, 0):  # some of the others spill there
        mixes = {pairs: Mix(MIXES[pairs].config) for pairs in (4, 128)}
    else:
        mixes = MIXES | (_GATED_MIXES if gated else {}) | _MIXES_OF.get(kind, {})
    fitting = (
        mix
        for pairs, mix in mixes.items()
        if average <= pairs and mix.config.tokens >= least_tokens(kind)
    )
    mix = next(fitting, mixes[max(mixes)])
    rest = mix.rest and fitted(kind, mix.rest)
    return mix._replace(config=fitted(kind, mix.config), rest=rest)
