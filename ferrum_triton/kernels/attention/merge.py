"""Partial attentions put together: one program for a few heads of the batch's tokens."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ferrum_triton.kernels.attention.softmax import LN_2, LOG2_E
from ferrum_triton.kernels.jit import kernel, processors
from ferrum_triton.kernels.rows import cdiv, next_power_of_2
from ferrum_triton.ops.attention import merge as ops

# Elements of one part that a program holds at once, where there are enough of them: 16 bytes a
# thread and load, four loads a thread.
TILE = 4096


@triton.jit
def weigh(lse, largest):
    """exp(lse - largest), 0 where lse is -inf even if nothing was larger."""
    shift = tl.where(largest == float("-inf"), 0.0, largest)
    return tl.exp2((lse - shift) * LOG2_E)


@kernel(dynamic=("num_rows",))
def _merge_attention_states_kernel(
    out_ptr,  # [num_tokens, num_heads, head_dim]
    lse_ptr,  # [num_tokens, num_heads]
    outs_ptr,  # [num_parts, num_tokens, num_heads, head_dim]
    lses_ptr,  # [num_parts, num_tokens, num_heads]
    stride_out_token,
    stride_out_head,
    stride_lse_token,
    stride_outs_part,
    stride_outs_token,
    stride_outs_head,
    stride_lses_part,
    stride_lses_token,
    num_parts,
    num_heads,
    head_dim,
    num_rows,  # num_tokens * num_heads
    BLOCK_R: tl.constexpr,
    BLOCK_P: tl.constexpr,  # power of two >= num_parts
    BLOCK_D: tl.constexpr,  # power of two >= head_dim
):
    row = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    token, head = row // num_heads, row % num_heads
    in_rows = row < num_rows
    part = tl.arange(0, BLOCK_P).to(tl.int64)
    d = tl.arange(0, BLOCK_D)[None, :]
    in_tile = in_rows[:, None] & (d < head_dim)

    lses_row = lses_ptr + token * stride_lses_token + head  # [BLOCK_R]
    lses = tl.load(
        lses_row[:, None] + part[None, :] * stride_lses_part,
        mask=in_rows[:, None] & (part < num_parts)[None, :],
        other=float("-inf"),
    )  # [BLOCK_R, BLOCK_P]
    largest = tl.max(lses, axis=1)
    total = tl.sum(weigh(lses, largest[:, None]), axis=1)
    divisor = tl.where(total == 0.0, 1.0, total)

    outs_row = outs_ptr + token * stride_outs_token + head * stride_outs_head
    acc = tl.zeros([BLOCK_R, BLOCK_D], tl.float32)
    for _ in range(num_parts):
        # Read again, from a cache that has it: registers are not indexed at run time.
        lse = tl.load(lses_row, mask=in_rows, other=float("-inf"))
        seen = lse != float("-inf")
        out = tl.load(outs_row[:, None] + d, mask=in_tile & seen[:, None], other=0.0)
        acc += weigh(lse, largest)[:, None] * out.to(tl.float32)
        lses_row += stride_lses_part
        outs_row += stride_outs_part

    out_row = out_ptr + token * stride_out_token + head * stride_out_head
    merged = acc / divisor[:, None]
    tl.store(out_row[:, None] + d, merged.to(out_ptr.dtype.element_ty), mask=in_tile)
    shift = tl.where(largest == float("-inf"), 0.0, largest)
    lse = shift + tl.log2(total) * LN_2
    tl.store(lse_ptr + token * stride_lse_token + head, lse, mask=in_rows)


def rows_per_program(num_rows: int, block_d: int, device: torch.device) -> int:
    """Tiles of TILE elements, or smaller ones where those would leave processors idle."""
    fill = num_rows // (4 * processors(device))
    return min(next_power_of_2(max(fill, 1)), max(TILE // block_d, 1))


@ops.merge_attention_states.impl("triton")
def merge_attention_states(
    outs: Tensor, lses: Tensor, *, out: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    num_parts, num_tokens, num_heads, head_dim = outs.shape
    if out is None:
        merged = outs.new_empty(num_tokens, num_heads, head_dim)
        lse = lses.new_empty(num_tokens, num_heads)
    else:
        merged, lse = out
    num_rows = num_tokens * num_heads
    if num_rows == 0:
        return merged, lse
    block_d = next_power_of_2(max(head_dim, 1))
    block_r = rows_per_program(num_rows, block_d, outs.device)
    _merge_attention_states_kernel.launch(
        (cdiv(num_rows, block_r),),
        merged,
        lse,
        outs,
        lses,
        *merged.stride()[:2],
        lse.stride(0),
        *outs.stride()[:3],
        *lses.stride()[:2],
        num_parts,
        num_heads,
        head_dim,
        num_rows,
        BLOCK_R=block_r,
        BLOCK_P=next_power_of_2(max(num_parts, 1)),
        BLOCK_D=block_d,
        num_warps=max(min(block_r * block_d // 512, 8), 1),
    )
    return merged, lse
