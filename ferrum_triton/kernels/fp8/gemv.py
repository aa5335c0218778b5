"""One row of activations by a matrix in FP8: as long as the weights are read.

A program has a few rows of weights and makes the codes of its activations by itself, so that no
launch goes before it. Threads lie along K and multiply-add in float32: of one row of activations
tensor cores would multiply fifteen of padding. Sums are added up over threads at the end, so a code
of activations is multiplied by both scales beforehand. Four codes of weights are loaded as a word:
taken apart by Triton, those of 16 rows by 512 columns took 177 byte permutations, where words take
5, as :mod:`ferrum_triton.kernels.sass` lists them.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ferrum_triton.kernels.attention.mla_tiles import widen_e4m3
from ferrum_triton.kernels.elementwise import activated
from ferrum_triton.kernels.fp8.codes import BLOCK, multiplies_codes, scaled_groups
from ferrum_triton.kernels.jit import can_overlap, kernel
from ferrum_triton.kernels.kv_pool import e4m3_bits
from ferrum_triton.kernels.moe.dense import without_expert
from ferrum_triton.kernels.moe.plane_gemv import slot_stride
from ferrum_triton.kernels.parameters import Config
from ferrum_triton.kernels.pdl import pdl_trigger, pdl_wait, prefetch_l2
from ferrum_triton.kernels.rows import cdiv

# Codes of what L2 is asked for at a time.
LINE = tl.constexpr(128)


class StackStrides(NamedTuple):
    """Strides of a stack of matrices and of its scales, in elements."""

    expert: Any
    row: Any
    scales_expert: Any
    scales_row: Any


def stack_strides(weights: Tensor, scales: Tensor) -> StackStrides:
    """The strides of a stack, or of one matrix."""
    if weights.dim() == 2:
        return StackStrides(0, weights.stride(0), 0, scales.stride(0))
    return StackStrides(*weights.stride()[:2], *scales.stride()[:2])


@triton.jit
def rounded_to_e4m3(y, NATIVE: tl.constexpr):
    """float32 rounded to E4M3."""
    if NATIVE:
        rounded = y.to(tl.float8e4nv).to(tl.float32)
    else:
        rounded = widen_e4m3(e4m3_bits(y))
    return rounded


# PTX: the four codes of a word as float32, the lowest byte first.
_WIDEN = tl.constexpr("""{
    .reg .b16 low, high;
    .reg .b32 pair, next;
    .reg .f16 a, b, c, d;
    mov.b32 {low, high}, $4;
    cvt.rn.f16x2.e4m3x2 pair, low;
    cvt.rn.f16x2.e4m3x2 next, high;
    mov.b32 {a, b}, pair;
    mov.b32 {c, d}, next;
    cvt.f32.f16 $0, a;
    cvt.f32.f16 $1, b;
    cvt.f32.f16 $2, c;
    cvt.f32.f16 $3, d;
}""")


@triton.jit
def _widened(words, NATIVE: tl.constexpr):
    """The four codes of each word, as float32."""
    if NATIVE:
        codes = tl.inline_asm_elementwise(
            _WIDEN,
            "=f,=f,=f,=f,r",
            [words],
            dtype=(tl.float32, tl.float32, tl.float32, tl.float32),
            is_pure=True,
            pack=1,
        )
    else:
        codes = ()
        for i in tl.static_range(4):
            codes += (widen_e4m3((words >> (8 * i)) & 0xFF),)
    return codes


@triton.jit
def load_words(at, column, num_cols, BLOCK_K: tl.constexpr, ALIGNED: tl.constexpr):
    """Codes of some columns of a tile's rows, four to a word; 0 past the last.

    Args:
        at: pointers to bytes [..., 1].
        num_cols: a number, or one for each row.
    """
    word = column // 4 + tl.arange(0, BLOCK_K // 4)
    if ALIGNED:
        word_at = at.to(tl.pointer_type(tl.int32)) + word
        words = tl.load(word_at, word < num_cols // 4, other=0, eviction_policy="evict_first")
    else:
        k = 4 * word
        first = at + k
        words = tl.zeros(first.shape, tl.int32)
        for i in tl.static_range(4):
            code = tl.load(first + i, mask=k + i < num_cols, other=0)
            words |= code.to(tl.int32) << (8 * i)
    return words


@triton.jit
def load_activations(x_at, column, num_cols, BLOCK_K: tl.constexpr):
    """Activations of some columns, float32 [groups, BLOCK]; 0 past the last.

    Args:
        x_at: a pointer, or some [slots, 1, 1]: of these they are [slots, groups, BLOCK].
        num_cols: a number, or one for each.
    """
    group = column // BLOCK + tl.arange(0, BLOCK_K // BLOCK)
    k = group[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    return tl.load(x_at + k, mask=k < num_cols, other=0.0).to(tl.float32)


@triton.jit
def load_scales(scale_at, column, num_cols, BLOCK_K: tl.constexpr):
    """Scales of weights for some columns, float32 [groups]; 0 past the last.

    Args:
        scale_at: a pointer, or some [slots, 1]: of these they are [slots, groups].
        num_cols: a number, or one for each.
    """
    group = column // BLOCK + tl.arange(0, BLOCK_K // BLOCK)
    return tl.load(scale_at + group, mask=group * BLOCK < num_cols, other=0.0)


@triton.jit
def scaled_words(y, factor):
    """Rounded activations by what their groups are multiplied by: fourths of them, [1, words]."""
    t = tl.reshape(y * factor[:, None], [1, y.shape[0] * BLOCK // 4, 2, 2])
    even, odd = tl.split(t)
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first, second, third, fourth


@triton.jit
def with_products(sums, words, t, NATIVE: tl.constexpr):
    """sums plus the products of words' codes with what :func:`scaled_words` gave."""
    codes = _widened(words, NATIVE)
    for i in tl.static_range(4):
        sums += codes[i] * t[i]
    return sums


@kernel(dynamic=("num_pairs",))
def _fp8_gemv_kernel(
    y_ptr,  # [num_tokens, top_k, n]
    a_ptr,  # [num_tokens, k], or [num_tokens, top_k, k]
    weights_ptr,  # uint8 [num_experts, n, k]; of gate, where there are two
    scales_ptr,  # float32 [num_experts, row_blocks, groups]
    up_ptr,  # as weights_ptr, or None
    up_scales_ptr,
    ids_ptr,  # [num_tokens, top_k], or None of one matrix
    stride_y_token,
    stride_y_slot,
    stride_a_token,
    stride_a_slot,  # 0 where a token's pairs share a row
    strides,  # StackStrides of weights
    up_strides,  # StackStrides of up
    stride_ids_token,
    num_experts,
    num_rows,
    num_cols,
    num_pairs,
    TOP_K: tl.constexpr,
    ACTIVATION: tl.constexpr,  # of gate; "" of one matrix
    BLOCK_N: tl.constexpr,  # at most a block of weights
    BLOCK_K: tl.constexpr,  # whole groups
    LINES: tl.constexpr,
    ALIGNED: tl.constexpr,  # whether rows of weights begin and end at words
    NATIVE: tl.constexpr,
    PDL: tl.constexpr,
):
    GATED: tl.constexpr = ACTIVATION != ""
    # Programs side by side have the same rows of a matrix.
    pair = (tl.program_id(0) % num_pairs).to(tl.int64)
    first_row = (tl.program_id(0) // num_pairs).to(tl.int64) * BLOCK_N
    n = first_row + tl.arange(0, BLOCK_N)
    row = tl.minimum(n, num_rows - 1)[:, None]
    if LINES > 0:
        ahead = tl.minimum(tl.arange(0, LINES) * LINE, num_cols - 1)
        prefetch_l2(weights_ptr + row * strides.row + ahead[None, :])
    pdl_wait(PDL)
    pdl_trigger(PDL)
    token, slot = pair // TOP_K, pair % TOP_K
    end = num_cols
    expert = tl.zeros([], tl.int64)
    if ids_ptr is not None:
        expert = tl.load(ids_ptr + token * stride_ids_token + slot).to(tl.int64)
        # Of a pair without an expert no weights are read: its sums stay zeros.
        is_lost = without_expert(expert, num_experts)
        end = tl.where(is_lost, 0, num_cols)
        expert = tl.where(is_lost, 0, expert)
    row_block = first_row // BLOCK
    x_at = a_ptr + token * stride_a_token + slot * stride_a_slot
    w_at = weights_ptr + expert * strides.expert + row * strides.row
    scale_at = scales_ptr + expert * strides.scales_expert + row_block * strides.scales_row
    sums = tl.zeros([BLOCK_N, BLOCK_K // 4], tl.float32)
    # All that a step takes is asked for a step ahead.
    w = load_words(w_at, 0, end, BLOCK_K, ALIGNED)
    x = load_activations(x_at, 0, end, BLOCK_K)
    scale = load_scales(scale_at, 0, end, BLOCK_K)
    if GATED:
        up_at = up_ptr + expert * up_strides.expert + row * up_strides.row
        up_scale_at = up_scales_ptr + expert * up_strides.scales_expert
        up_scale_at += row_block * up_strides.scales_row
        up_sums = tl.zeros([BLOCK_N, BLOCK_K // 4], tl.float32)
        v = load_words(up_at, 0, end, BLOCK_K, ALIGNED)
        up_scale = load_scales(up_scale_at, 0, end, BLOCK_K)
    for column in range(0, end, BLOCK_K):
        later = column + BLOCK_K
        y, step = scaled_groups(x)
        y = rounded_to_e4m3(y, NATIVE)
        x = load_activations(x_at, later, end, BLOCK_K)
        w_later = load_words(w_at, later, end, BLOCK_K, ALIGNED)
        sums = with_products(sums, w, scaled_words(y, step * scale), NATIVE)
        scale = load_scales(scale_at, later, end, BLOCK_K)
        w = w_later
        if GATED:
            v_later = load_words(up_at, later, end, BLOCK_K, ALIGNED)
            up_sums = with_products(up_sums, v, scaled_words(y, step * up_scale), NATIVE)
            up_scale = load_scales(up_scale_at, later, end, BLOCK_K)
            v = v_later
    total = tl.sum(sums, axis=1)
    if GATED:
        total = activated(total, ACTIVATION) * tl.sum(up_sums, axis=1)
    y_at = y_ptr + token * stride_y_token + slot * stride_y_slot + n
    tl.store(y_at, total.to(y_ptr.dtype.element_ty), mask=n < num_rows)


def are_words(*codes: Tensor) -> bool:
    """Whether rows of codes, uint8 [..., k], begin and end at words of four."""
    sizes = [n for each in codes for n in (each.shape[-1], *each.stride()[:-1], each.data_ptr())]
    return all(size % 4 == 0 for size in sizes)


def gemv(
    y: Tensor,
    a: Tensor,
    stacks: tuple[Tensor, ...],
    config: Config,
    ids: Tensor | None = None,
    activation: str = "",
) -> None:
    """y ← the products of rows with a matrix, or of pairs with their experts'.

    Args:
        y: [m, n], or [num_tokens, top_k, n] of pairs; not empty.
        a: [m, k], or as in :func:`~ferrum_triton.ops.fp8.experts.gemm_moe_id_fp8_128x128`.
        stacks: weights and scales; with ``activation`` those of gate and then of up.
        config: a launch choice of the path ``"gemv"``.
        ids: [num_tokens, top_k], the experts.
        activation: the function that gate goes through; "" of one matrix.
    """
    num_rows, num_pairs = y.shape[-1], y.numel() // y.shape[-1]
    weights, scales, up, up_scales = stacks if activation else (*stacks, *stacks)
    codes = weights.view(torch.uint8), up.view(torch.uint8)
    _fp8_gemv_kernel.launch(
        (num_pairs * cdiv(num_rows, config["BLOCK_N"]),),
        y_ptr=y,
        a_ptr=a,
        weights_ptr=codes[0],
        scales_ptr=scales,
        up_ptr=codes[1] if activation else None,
        up_scales_ptr=up_scales if activation else None,
        ids_ptr=ids,
        stride_y_token=y.stride(0),
        stride_y_slot=0 if ids is None else y.stride(1),
        stride_a_token=a.stride(0),
        stride_a_slot=slot_stride(a),
        strides=stack_strides(weights, scales),
        up_strides=stack_strides(up, up_scales),
        stride_ids_token=0 if ids is None else ids.stride(0),
        num_experts=1 if ids is None else len(weights),
        num_rows=num_rows,
        num_cols=a.shape[-1],
        num_pairs=num_pairs,
        TOP_K=1 if ids is None else ids.shape[1],
        ACTIVATION=activation,
        BLOCK_N=config["BLOCK_N"],
        BLOCK_K=config["BLOCK_K"],
        LINES=config["LINES"] if ids is None and can_overlap(a.device) else 0,
        ALIGNED=are_words(*codes),
        NATIVE=multiplies_codes(a),
        num_warps=config["num_warps"],
    )
