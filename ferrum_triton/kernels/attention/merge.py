"""Attention over a set of keys from attention over its parts: one kernel for every split.

:func:`merge_parts` follows each attention kernel that cuts sequences into parts, and it is all of
``merge_attention_states``. Rows that fill the GPU take their parts one after another; with fewer
rows a program loads all parts of a row at once.
"""

import triton
import triton.language as tl
from torch import Tensor

from ferrum_triton.kernels.attention.softmax import LN_2, LOG2_E, LOWEST
from ferrum_triton.kernels.gpu import Gpu, gpu_of
from ferrum_triton.kernels.jit import kernel
from ferrum_triton.kernels.pdl import pdl_trigger, pdl_wait
from ferrum_triton.kernels.rows import cdiv, next_power_of_2
from ferrum_triton.kernels.tuning import Config, Tunable
from ferrum_triton.ops.attention import merge as ops

# Elements of one part that a program holds at once, where there are enough of them: 16 bytes a
# thread and load, four loads a thread.
TILE = 4096

# Parts up to which rows that fill the GPU take them one after another.
FEW_PARTS = 4

# Parts a program loads at once, at most, and columns of each.
MAX_PARTS, MAX_COLUMNS = 64, 128

# Programs for an SM from more than which on the launch behind begins when they end, not beside
# them, where some SMs most likely have room before others. Eight sequences of four queries on
# 16,384 keys, 32 heads over 8, take 133.7 us for 139.0 so, and three of 128 heads over latents of
# 4,096 keys 19.8 us for 21.3. Of few programs that costs 0.8 to 1.2 us: a sequence of 1,024 keys
# takes 7.8 us for 7.0, and eight 16.3 for 15.2 (``bench.timing.Replay`` of
# ``paged_decode_attention`` and ``mla_attention`` with each, H200, 01c8ab3).
MANY_PROGRAMS = 4


@triton.jit
def merge_rows(
    out_rows,  # pointers to the rows' first elements, [BLOCK_R]
    lse_rows,  # pointers, [BLOCK_R], or None
    part_rows,  # pointers to those of the rows' first parts, [BLOCK_R]
    part_lse_rows,  # pointers, [BLOCK_R]
    stride_part,
    stride_part_lse,
    counts,  # parts of each row, [BLOCK_R]
    most,  # the largest of them
    in_rows,  # [BLOCK_R]
    column,  # [BLOCK_D]
    HEAD_DIM: tl.constexpr,
    READ_ALL: tl.constexpr,  # parts that saw nothing are readable too
    ROOM: tl.constexpr,  # parts to read whatever the counts, or 0
    BLOCK_P: tl.constexpr,
):
    """Merge the parts of a block of rows and store the result."""
    in_head = column < HEAD_DIM
    row_max = tl.full(in_rows.shape, LOWEST, tl.float32)
    row_sum = tl.zeros_like(row_max)
    acc = tl.zeros([in_rows.shape[0], column.shape[0]], tl.float32)
    for first in range(0, most, BLOCK_P):
        part = (first + tl.arange(0, BLOCK_P))[None, :]
        known = in_rows[:, None] & (part < counts[:, None])
        readable = known
        if ROOM > 0:
            readable = part < ROOM
        part = part.to(tl.int64)
        lse = tl.load(
            part_lse_rows[:, None] + part * stride_part_lse, mask=readable, other=float("-inf")
        )  # [BLOCK_R, BLOCK_P]
        if not READ_ALL:
            readable = lse != float("-inf")
        values = tl.load(
            (part_rows[:, None] + part * stride_part)[:, :, None] + column[None, None, :],
            mask=readable[:, :, None] & in_head[None, None, :],
            other=0.0,
        ).to(tl.float32)  # [BLOCK_R, BLOCK_P, BLOCK_D]
        if ROOM > 0:
            lse = tl.where(known, lse, float("-inf"))
            values = tl.where(known[:, :, None], values, 0.0)
        # In natural logarithms, as parts have them: a single part keeps every bit.
        new_max = tl.maximum(row_max, tl.max(lse, axis=1))
        weights = tl.exp2((lse - new_max[:, None]) * LOG2_E)
        rescale = tl.exp2((row_max - new_max) * LOG2_E)
        acc = acc * rescale[:, None] + tl.sum(weights[:, :, None] * values, axis=1)
        row_sum = row_sum * rescale + tl.sum(weights, axis=1)
        row_max = new_max
    empty = row_sum == 0.0
    total = tl.where(empty, 1.0, row_sum)
    at = out_rows[:, None] + column[None, :]
    out = (acc / total[:, None]).to(at.dtype.element_ty)
    tl.store(at, out, mask=in_rows[:, None] & in_head[None, :])
    if lse_rows is not None:
        lse = tl.where(empty, float("-inf"), row_max + tl.log2(total) * LN_2)
        tl.store(lse_rows, lse, mask=in_rows & (tl.program_id(1) == 0))


@kernel(dynamic=("num_tokens", "num_parts", "num_rows"))
def _merge_kernel(
    out_ptr,  # [num_seqs, num_tokens, num_heads, HEAD_DIM]; [1, all tokens, ...] with cu_seqlens_q
    lse_ptr,  # as out without its last dimension, or None
    parts_ptr,  # [num_parts, num_seqs, num_tokens, num_heads, HEAD_DIM]
    part_lses_ptr,  # as parts without its last dimension; -inf where a part saw no key
    cu_parts_ptr,  # [num_seqs + 1] where each sequence's parts begin, or None: all have num_parts
    cu_seqlens_q_ptr,  # [num_seqs + 1] or None
    stride_out_seq,
    stride_out_token,
    stride_out_head,
    stride_lse_seq,
    stride_lse_token,
    stride_lse_head,
    stride_parts_part,
    stride_parts_seq,
    stride_parts_token,
    stride_parts_head,
    stride_part_lses_part,
    stride_part_lses_seq,
    stride_part_lses_token,
    stride_part_lses_head,
    num_heads,
    num_tokens,  # all that out has, with cu_seqlens_q
    num_parts,
    num_rows,  # num_seqs · num_tokens · num_heads; with cu_seqlens_q num_seqs · num_heads
    HEAD_DIM: tl.constexpr,
    ROOM: tl.constexpr,  # parts that there is memory for, of one sequence; 0 of several
    BLOCK_R: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_D: tl.constexpr,
    LATE: tl.constexpr,  # whether the next launch begins when programs end
    PDL: tl.constexpr,
):
    """lse = log Σᵢ exp(lseᵢ) and out = Σᵢ exp(lseᵢ - lse) outᵢ, over the parts i of each row.

    A sequence that cu_parts gives one part was written by whoever made it, and is left alone. With
    cu_seqlens_q a program has a head of a sequence, and takes its queries in turns.
    """
    pdl_wait(PDL)
    if not LATE:
        pdl_trigger(PDL)
    row = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    in_rows = row < num_rows
    column = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    head, token, seq = row % num_heads, row * 0, row // num_heads
    if cu_seqlens_q_ptr is None:
        token, seq = seq % num_tokens, seq // num_tokens
    # Strides may take 64 bits; divisions of 64 bits would take longer than the merge.
    head, token, seq = head.to(tl.int64), token.to(tl.int64), seq.to(tl.int64)

    first, counts, most = seq * 0, row * 0 + num_parts, num_parts
    if cu_parts_ptr is not None:
        first = tl.load(cu_parts_ptr + seq, mask=in_rows, other=0).to(tl.int64)
        counts = tl.load(cu_parts_ptr + seq + 1, mask=in_rows, other=0) - first.to(tl.int32)
        in_rows = in_rows & (counts > 1)
        most = tl.max(tl.where(in_rows, counts, 0), axis=0)
        if ROOM > 0:
            # Parts are asked for together with their number, not after it.
            first, most = first * 0, ROOM

    out_rows = out_ptr + seq * stride_out_seq + token * stride_out_token + head * stride_out_head
    part_rows = parts_ptr + first * stride_parts_part + seq * stride_parts_seq
    part_rows += token * stride_parts_token + head * stride_parts_head
    part_lse_rows = part_lses_ptr + first * stride_part_lses_part + seq * stride_part_lses_seq
    part_lse_rows += token * stride_part_lses_token + head * stride_part_lses_head
    lse_rows = lse_ptr
    if lse_ptr is not None:
        lse_rows += seq * stride_lse_seq + token * stride_lse_token + head * stride_lse_head

    READ_ALL: tl.constexpr = cu_parts_ptr is not None
    turns, queries = 1, row * 0 + 1
    if cu_seqlens_q_ptr is not None:
        # As plan.tokens_of has them, but by its code the compiler spills here.
        start = tl.load(cu_seqlens_q_ptr + seq, mask=in_rows, other=0)
        end = tl.load(cu_seqlens_q_ptr + seq + 1, mask=in_rows, other=0)
        start = tl.minimum(tl.maximum(start, 0), num_tokens).to(tl.int64)
        queries = tl.minimum(end, num_tokens) - start
        turns = tl.max(queries, axis=0)
        out_rows += start * stride_out_token
        if lse_ptr is not None:
            lse_rows += start * stride_lse_token
    for query in range(turns):
        merge_rows(
            out_rows,
            lse_rows,
            part_rows,
            part_lse_rows,
            stride_parts_part,
            stride_part_lses_part,
            counts,
            most,
            in_rows & (query < queries),
            column,
            HEAD_DIM=HEAD_DIM,
            READ_ALL=READ_ALL,
            ROOM=ROOM,
            BLOCK_P=BLOCK_P,
        )
        out_rows += stride_out_token
        part_rows += stride_parts_token
        part_lse_rows += stride_part_lses_token
        if lse_ptr is not None:
            lse_rows += stride_lse_token
    if LATE:
        pdl_trigger(PDL)


def merge_heuristic(
    gpu: Gpu, num_rows: int, num_parts: int, head_dim: int, in_turns: bool
) -> Config:
    """Tiles of TILE elements for rows that fill the GPU, else every part of a row at once.

    Few warps take a row's parts. The launch behind begins while rows are merged, and its programs
    find room on an SM beside few threads. Beside many, some SMs most likely get more of them than
    others. By 32 sequences of 4,096 keys 8 heads over one of 256 take 44.0 us with two warps, 44.9
    with four and 51.8 with eight. By 12 such sequences 32 heads over 8 of 128 take 61.2, 62.5 and
    67.8 us. By 16 sequences of 4,000 keys heads of 96 take 57.0, 58.2 and 61.1 us
    (``bench.timing.Replay`` of ``paged_decode_attention`` with each, H200, 01c8ab3). 64 parts by
    128 columns spill on two, and with a loop over queries 32 parts do.

    Args:
        in_turns: whether a program takes a sequence's queries in turns.
    """
    block_d = min(next_power_of_2(max(head_dim, 1)), MAX_COLUMNS)
    fill = num_rows // (4 * gpu.num_sms)
    if fill > 1 and num_parts <= FEW_PARTS:
        return _config(min(next_power_of_2(fill), TILE // block_d), 1, block_d)
    block_p = min(next_power_of_2(max(num_parts, 1)), MAX_PARTS)
    warps = max(block_p * block_d // (TILE // 2), 1) * (2 if in_turns else 1)
    return _config(1, block_p, block_d) | {"num_warps": warps}


def _config(block_r: int, block_p: int, block_d: int) -> Config:
    warps = max(min(block_r * block_p * block_d // 512, 8), 1)
    return {"BLOCK_R": block_r, "BLOCK_P": block_p, "BLOCK_D": block_d, "num_warps": warps}


def merge_candidates(
    gpu: Gpu, num_rows: int, num_parts: int, head_dim: int, in_turns: bool
) -> list[Config]:
    """Tiles of 1 to 32 rows and up to 16 parts."""
    block_d = min(next_power_of_2(max(head_dim, 1)), MAX_COLUMNS)
    return [
        _config(block_r, block_p, block_d)
        for block_r in (1, 2, 4, 8, 16, 32)
        for block_p in (1, 2, 4, 16)
        if 256 <= block_r * block_p * block_d <= 2 * TILE
    ]


merge_config = Tunable(
    "merge_attention_states",
    ("num_rows", "num_parts", "head_dim", "in_turns"),
    merge_heuristic,
    merge_candidates,
)


def strides_of(name: str, x: Tensor | None, *axes: str) -> dict[str, int]:
    """The strides of x under the names kernels give them, such as ``stride_out_head``.

    They are 0 along an axis of one index, and without x: whatever the index, nothing moves.
    """
    sizes = (1,) * len(axes) if x is None else x.shape
    steps = sizes if x is None else x.stride()
    return {
        f"stride_{name}_{axis}": step if size > 1 else 0
        for axis, size, step in zip(axes, sizes, steps, strict=False)
    }


def merge_parts(
    out: Tensor,
    lse: Tensor | None,
    parts: Tensor,
    part_lses: Tensor,
    cu_parts: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    most_parts: int = 0,
) -> None:
    """Weigh partial attention by the sums of exp it was normalised with.

    Args:
        out: the result, [num_seqs, num_tokens, num_heads, head_dim], or with cu_seqlens_q
            [1, tokens of all sequences, num_heads, head_dim].
        lse: natural logarithms, as out without its last dimension, or None.
        parts: partial results, [num_parts, num_seqs, num_tokens, num_heads, head_dim]. With
            cu_parts the parts of all sequences are in one row, and num_seqs is 1.
        part_lses: as parts without its last dimension; -inf where a part saw no key, whose row of
            ``parts`` may then hold anything, unless cu_parts is given.
        cu_parts: where each sequence's parts begin, [num_seqs + 1], or None where each has all.
        cu_seqlens_q: where each sequence's tokens begin, [num_seqs + 1], or None.
        most_parts: bound on the parts of a sequence, with cu_parts.
    """
    num_parts, num_seqs, num_tokens, num_heads, head_dim = parts.shape
    room = 0
    if cu_parts is None:
        num_rows = num_seqs * num_tokens * num_heads
        config = merge_config.pick(out.device, num_rows, num_parts, head_dim, False)
    else:
        # One row a program, whatever the batch: sequences differ in their parts.
        in_turns = cu_seqlens_q is not None
        config = merge_config.pick(out.device, 1, most_parts, head_dim, in_turns)
        num_rows = (cu_parts.shape[0] - 1) * (1 if in_turns else num_tokens) * num_heads
        is_one = cu_parts.shape[0] == 2 and not in_turns and config["BLOCK_R"] == 1
        if is_one and most_parts <= config["BLOCK_P"]:
            room = most_parts
    axes = ("seq", "token", "head")
    steps = (
        strides_of("out", out, *axes)
        | strides_of("lse", lse, *axes)
        | strides_of("parts", parts, "part", *axes)
        | strides_of("part_lses", part_lses, "part", *axes)
    )
    grid = cdiv(num_rows, config["BLOCK_R"]), cdiv(head_dim, config["BLOCK_D"])
    _merge_kernel.launch(
        grid,
        out_ptr=out,
        lse_ptr=lse,
        parts_ptr=parts,
        part_lses_ptr=part_lses,
        cu_parts_ptr=cu_parts,
        cu_seqlens_q_ptr=cu_seqlens_q,
        **steps,
        num_heads=num_heads,
        num_tokens=num_tokens if cu_seqlens_q is None else out.shape[1],
        num_parts=num_parts,
        num_rows=num_rows,
        HEAD_DIM=head_dim,
        ROOM=room,
        LATE=grid[0] * grid[1] > MANY_PROGRAMS * gpu_of(out.device).num_sms,
        **config,
    )


@ops.merge_attention_states.impl("triton")
def merge_attention_states(
    outs: Tensor, lses: Tensor, *, out: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    _, num_tokens, num_heads, head_dim = outs.shape
    if out is None:
        merged = outs.new_empty(num_tokens, num_heads, head_dim)
        lse = lses.new_empty(num_tokens, num_heads)
    else:
        merged, lse = out
    if lse.numel():
        merge_parts(merged[None], lse[None], outs[:, None], lses[:, None])
    return merged, lse
