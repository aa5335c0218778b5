"""The merge behind prefill over pages, where the keys of blocks are cut into parts.

How many parts a block may have follows from shapes. How many it has follows from its sequence's
keys, which the device alone knows. So a short sequence in wide block tables has one part, whose
merge is a copy.
"""

import triton.language as tl
from torch import Tensor

from ferrum_triton.kernels.attention.merge import MAX_COLUMNS, merge_rows, strides_of
from ferrum_triton.kernels.attention.plan import ANY, Sequences, sequence_lengths
from ferrum_triton.kernels.jit import kernel
from ferrum_triton.kernels.pdl import pdl_trigger, pdl_wait
from ferrum_triton.kernels.rows import cdiv, next_power_of_2

# Keys of a sequence for each of its parts: those of a tile. Nine queries of 32 heads over 8 of 128
# take 12.7 us on 1,024 keys, 14.9 by parts of 512, and 21.0 by one. On 300 keys in tables for
# 8,192, 128 queries take 14.8 us for 17.4 and 15.8, but on no others 12.0 for 12.0 and 10.7
# (``bench.timing.device_us`` of ``paged_varlen_attention`` with each, H200, what became
# 2a405fe).
LEAST_KEYS = 128

# Elements of parts that a program loads at once, and the fewest and the most parts they are of.
TILE, FEWEST_PARTS, MOST_PARTS = 4096, 4, 16

# Scalars that change from call to call. The stride of parts is none of them: only where it is known
# to be a multiple of 16 rows are loaded in vectors, by which 128 queries of 32 heads took 12.0 us
# for 19.2 (the same).
DYNAMIC = "stride_part_lses_part num_seqs capacity num_tokens splits least_keys num_rows"


@kernel(dynamic=DYNAMIC.split())
def _prefill_merge_kernel(
    out_ptr,  # [num_tokens, num_heads, HEAD_DIM]
    lse_ptr,  # [num_tokens, num_heads] or None
    parts_ptr,  # [splits, num_tokens, num_heads, HEAD_DIM]
    part_lses_ptr,  # [splits, num_tokens, num_heads]
    pos_offsets_ptr,  # [num_seqs]
    cu_seqlens_q_ptr,  # [num_seqs + 1]
    stride_out_token,
    stride_out_head,
    stride_lse_token,
    stride_lse_head,
    stride_parts_part,
    stride_parts_token,
    stride_parts_head,
    stride_part_lses_token,
    stride_part_lses_head,
    num_heads,
    stride_part_lses_part,
    num_seqs,
    capacity,  # keys a block table can hold
    num_tokens,
    splits,  # the most parts
    least_keys,  # of a part
    num_rows,  # num_tokens · num_heads
    HEAD_DIM: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_B: tl.constexpr,  # power of two >= num_seqs
    PDL: tl.constexpr,
):
    """out = Σᵢ exp(lseᵢ - lse) outᵢ with lse = log Σᵢ exp(lseᵢ), over the parts i of a sequence."""
    # What tells the sequences apart was complete before the prefill, which waited and then let this
    # launch begin.
    row = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    column = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    head, token = row % num_heads, row // num_heads
    batch = Sequences(None, pos_offsets_ptr, cu_seqlens_q_ptr, num_seqs, capacity, num_tokens)
    seqs = tl.arange(0, BLOCK_B)
    ends = tl.load(cu_seqlens_q_ptr + 1 + seqs, mask=seqs < num_seqs, other=ANY).to(tl.int32)
    seq = tl.sum((ends[None, :] <= token[:, None]).to(tl.int32), axis=1)
    _, keys, known = sequence_lengths(batch, seq, ANY, "")
    # Tokens before the first sequence and past the last one are nobody's.
    in_rows = (row < num_rows) & known & (token >= tl.load(cu_seqlens_q_ptr).to(tl.int32))
    counts = tl.minimum(tl.maximum(keys // least_keys, 1), splits)
    most = tl.max(tl.where(in_rows, counts, 0), axis=0)

    head, token = head.to(tl.int64), token.to(tl.int64)
    out_rows = out_ptr + token * stride_out_token + head * stride_out_head
    part_rows = parts_ptr + token * stride_parts_token + head * stride_parts_head
    part_lse_rows = part_lses_ptr + token * stride_part_lses_token + head * stride_part_lses_head
    lse_rows = lse_ptr
    if lse_ptr is not None:
        lse_rows += token * stride_lse_token + head * stride_lse_head
    pdl_wait(PDL)
    pdl_trigger(PDL)
    merge_rows(
        out_rows,
        lse_rows,
        part_rows,
        part_lse_rows,
        stride_parts_part,
        stride_part_lses_part,
        counts,
        most,
        in_rows,
        column,
        HEAD_DIM=HEAD_DIM,
        READ_ALL=True,
        ROOM=0,
        BLOCK_P=BLOCK_P,
    )


def merge_prefill(
    out: Tensor,
    lse: Tensor | None,
    parts: Tensor,
    part_lses: Tensor,
    pos_offsets: Tensor,
    cu_seqlens_q: Tensor,
    capacity: int,
) -> None:
    """Merge a sequence's parts, of which it has one for each ``LEAST_KEYS``.

    Args:
        out: the result, [num_tokens, num_heads, head_dim].
        lse: natural logarithms, [num_tokens, num_heads], or None.
        parts: float32 [splits, num_tokens, num_heads, head_dim], where a sequence has as many.
        part_lses: as parts without its last dimension; -inf where a part saw no key, whose row of
            ``parts`` is finite.
        capacity: keys a block table can hold.
    """
    splits, num_tokens, num_heads, head_dim = parts.shape
    num_rows, num_seqs = num_tokens * num_heads, pos_offsets.shape[0]
    block_d = min(next_power_of_2(head_dim), MAX_COLUMNS)
    block_p = min(max(next_power_of_2(splits), FEWEST_PARTS), MOST_PARTS)
    block_r = max(TILE // (block_p * block_d), 1)
    _prefill_merge_kernel.launch(
        (cdiv(num_rows, block_r), cdiv(head_dim, block_d)),
        out_ptr=out,
        lse_ptr=lse,
        parts_ptr=parts,
        part_lses_ptr=part_lses,
        pos_offsets_ptr=pos_offsets,
        cu_seqlens_q_ptr=cu_seqlens_q,
        **strides_of("out", out, "token", "head"),
        **strides_of("lse", lse, "token", "head"),
        **strides_of("parts", parts, "part", "token", "head"),
        **strides_of("part_lses", part_lses[0], "token", "head"),
        num_heads=num_heads,
        stride_part_lses_part=part_lses.stride(0),
        num_seqs=num_seqs,
        capacity=capacity,
        num_tokens=num_tokens,
        splits=splits,
        least_keys=LEAST_KEYS,
        num_rows=num_rows,
        HEAD_DIM=head_dim,
        BLOCK_R=block_r,
        BLOCK_P=block_p,
        BLOCK_D=block_d,
        BLOCK_B=next_power_of_2(num_seqs),
        num_warps=4,
    )
