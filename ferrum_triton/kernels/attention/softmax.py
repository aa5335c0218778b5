"""The online softmax, in base 2: what attention kernels do with one tile of scores.

A row's running maximum m starts at the lowest finite number, not at -inf: what is hidden scores
-inf, and -inf - m is then -inf, never NaN, without a guard in the loop. Its running sum l is 0 as
long as the row has seen nothing.
Source: Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018.
"""

import triton
import triton.language as tl
from torch import Tensor

from ferrum_triton.kernels.jit import kernel
from ferrum_triton.kernels.rows import next_power_of_2

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
LOWEST = tl.constexpr(-3.4028234663852886e38)

# Stands for a scale of zero, which would make NaN of the -inf that hides a score.
LEAST_SCALE = tl.constexpr(1e-30)


@triton.jit
def first_state(sink_log2):
    """(m, l) before any key: nothing, or a sink's logit, which counts as a key without a value."""
    l_i = tl.where(sink_log2 == float("-inf"), 0.0, 1.0)
    return tl.maximum(sink_log2, LOWEST), l_i


@triton.jit
def soft_cap(y, softcap_log2, EXACT: tl.constexpr):
    """softcap_log2 · tanh(x), where y is 2 · log2(e) · x; overflows nowhere.

    Near 0 the difference cancels, to an error of a float32's step at 1: softcap times that is more
    than scores of float32 inputs may be off, so EXACT takes the series there, whose next term is
    below 1e-8 of the result.
    """
    t = 2.0 / (1.0 + tl.exp2(-y)) - 1.0
    if EXACT:
        x = y * (0.5 * LN_2)
        square = x * x
        series = -17.0 / 315.0 + square * (62.0 / 2835.0)
        series = 1.0 + square * (-1.0 / 3.0 + square * (2.0 / 15.0 + square * series))
        t = tl.where(square < 0.0625, x * series, t)
    return softcap_log2 * t


@triton.jit
def fold_tile(scores, scale_log2, v, acc, m_i, l_i, PRECISION: tl.constexpr):
    """Fold a tile of scores and values into the running softmax.

    The scores are multiplied by ``scale_log2`` >= 0 on the way, in the same instruction that
    subtracts the maximum, so hidden ones must be -inf and the scale positive.
    """
    m_new = tl.maximum(m_i, tl.max(scores, axis=1) * scale_log2)
    p = tl.exp2(scores * scale_log2 - m_new[:, None])
    alpha = tl.exp2(m_i - m_new)
    l_i = l_i * alpha + tl.sum(p, axis=1)
    acc = acc * alpha[:, None]
    acc = tl.dot(p.to(v.dtype), v, acc, input_precision=PRECISION)
    return acc, m_new, l_i


@triton.jit
def finish(acc, m_i, l_i):
    """(output, natural log of the sum of exp): 0 and -inf for rows that saw nothing."""
    empty = l_i == 0.0
    total = tl.where(empty, 1.0, l_i)
    lse = tl.where(empty, float("-inf"), (m_i + tl.log2(total)) * LN_2)
    return acc * (1.0 / total)[:, None], lse


@kernel(dynamic=("num_splits", "q_len"))
def _merge_splits_kernel(
    out_ptr,  # [batch, num_heads, q_len, head_dim]
    lse_ptr,  # [batch, num_heads, q_len] or None
    partial_ptr,  # [batch, num_heads, q_len, num_splits, head_dim]
    partial_lse_ptr,  # [batch, num_heads, q_len, num_splits]
    stride_out_batch,
    stride_out_head,
    stride_out_token,
    stride_lse_batch,
    stride_lse_head,
    num_heads,
    num_splits,
    q_len,
    HEAD_DIM: tl.constexpr,
    BLOCK_S: tl.constexpr,  # power of two >= num_splits
    BLOCK_D: tl.constexpr,  # power of two >= head_dim
):
    row = tl.program_id(0).to(tl.int64)
    query = row % q_len
    head = row // q_len % num_heads
    batch = row // q_len // num_heads

    split = tl.arange(0, BLOCK_S)
    lse = tl.load(
        partial_lse_ptr + row * num_splits + split, mask=split < num_splits, other=float("-inf")
    )
    m = tl.max(lse, axis=0)
    shift = tl.where(m == float("-inf"), 0.0, m)
    weight = tl.exp2((lse - shift) * LOG2_E)  # [BLOCK_S]
    total = tl.sum(weight, axis=0)

    # Most of a short sequence's splits saw nothing: what they wrote need not be read.
    d = tl.arange(0, BLOCK_D)
    tile = tl.load(
        partial_ptr + (row * num_splits + split)[:, None] * HEAD_DIM + d[None, :],
        mask=(lse != float("-inf"))[:, None] & (d < HEAD_DIM)[None, :],
        other=0.0,
    )
    out = tl.sum(weight[:, None] * tile, axis=0) / tl.where(total == 0.0, 1.0, total)
    out_row = out_ptr + batch * stride_out_batch + head * stride_out_head + query * stride_out_token
    tl.store(out_row + d, out.to(out_ptr.dtype.element_ty), mask=d < HEAD_DIM)
    if lse_ptr is not None:
        lse_row = lse_ptr + batch * stride_lse_batch + head * stride_lse_head + query
        tl.store(lse_row, tl.where(total == 0.0, float("-inf"), m + tl.log(total)))


def merge_splits(out: Tensor, lse: Tensor | None, partial: Tensor, partial_lse: Tensor) -> None:
    """Weigh partial attention by the sums of exp it was normalised with.

    Args:
        out: [batch, num_heads, q_len, head_dim], written.
        lse: [batch, num_heads, q_len] float32, written unless None.
        partial: [batch, num_heads, q_len, num_splits, head_dim] float32, contiguous.
        partial_lse: [batch, num_heads, q_len, num_splits] float32, contiguous; -inf where a split
            saw nothing, whose row of ``partial`` may then hold anything.
    """
    batch, num_heads, q_len, num_splits, head_dim = partial.shape
    _merge_splits_kernel.launch(
        (batch * num_heads * q_len,),
        out,
        lse,
        partial,
        partial_lse,
        *out.stride()[:3],
        *((0, 0) if lse is None else lse.stride()[:2]),
        num_heads,
        num_splits,
        q_len,
        HEAD_DIM=head_dim,
        BLOCK_S=next_power_of_2(num_splits),
        BLOCK_D=next_power_of_2(head_dim),
        num_warps=2 if head_dim <= 128 and num_splits <= 32 else 4,
    )
