"""Sequences in device memory: which tokens they have, and in which slots their states are.

What the arguments mean is in :mod:`ferrum_triton.ops.linear_attention.sequences`.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from ferrum_triton.kernels.rows import cdiv, next_power_of_2

# Sequences that a program looks at together to find its own: one for each lane.
BLOCK_S = tl.constexpr(32)
# Elements that divide a head's size, and the strides of heads and tokens, where chunks take them.
UNIT = 16


class Batch(NamedTuple):
    """What describes the sequences of a call."""

    cu_seqlens_ptr: Any  # [num_seqs + 1] or None
    slots_ptr: Any  # [num_seqs] or None
    pos_offsets_ptr: Any  # [num_seqs] or None
    num_seqs: Any
    num_tokens: Any
    num_slots: Any


class Span(NamedTuple):
    """Tokens of a sequence, and its slots, int64; -1 for none."""

    start: Any
    length: Any
    source: Any  # where its state is read
    target: Any  # where its state is written
    alive: Any  # whether it may keep states


@triton.jit
def bound_of(batch, seq):
    """Where tokens of a sequence begin, kept inside the call's tokens."""
    bound = tl.load(batch.cu_seqlens_ptr + seq).to(tl.int64)
    return tl.minimum(tl.maximum(bound, 0), batch.num_tokens)


@triton.jit
def span_of(batch, seq, EACH: tl.constexpr):
    """The :class:`Span` of a sequence."""
    start = seq.to(tl.int64)
    length = tl.full([], 1, tl.int64)
    if batch.cu_seqlens_ptr is not None:
        start = bound_of(batch, seq)
        length = tl.maximum(bound_of(batch, seq + 1) - start, 0)
    elif not EACH:
        length = length * batch.num_tokens
    slot = tl.full([], -1, tl.int64)
    if batch.slots_ptr is not None:
        slot = tl.load(batch.slots_ptr + seq).to(tl.int64)
        slot = tl.where((slot >= 0) & (slot < batch.num_slots), slot, -1)
    source, target = slot, slot
    alive = length > 0
    if batch.pos_offsets_ptr is not None:
        position = tl.load(batch.pos_offsets_ptr + seq).to(tl.int64)
        source = tl.where(position > 0, slot, -1)
        alive = alive & (position >= 0)
    return Span(start, length, source, tl.where(alive, target, -1), alive)


@triton.jit
def block_of(batch, index, EACH: tl.constexpr, BLOCK_T: tl.constexpr):
    """The sequence that block ``index`` is of, and its number there; negative for no block.

    Blocks begin where their sequence does. Those of sequence s are counted from
    cu_seqlens[s] // BLOCK_T + s, which leaves room for all of them and needs no running sum.
    """
    seq = index * 0
    block = index
    if EACH:
        seq, block = index, index * 0
    elif batch.cu_seqlens_ptr is not None:
        seq -= 1
        for first in range(0, batch.num_seqs, BLOCK_S):
            s = first + tl.arange(0, BLOCK_S)
            in_batch = s < batch.num_seqs
            bound = tl.load(batch.cu_seqlens_ptr + s, mask=in_batch, other=0).to(tl.int64)
            bound = tl.minimum(tl.maximum(bound, 0), batch.num_tokens)
            begun = in_batch & (bound // BLOCK_T + s <= index)
            seq += tl.sum(begun.to(tl.int32), axis=0)
        known = tl.maximum(seq, 0)
        block = tl.where(seq < 0, -1, index - bound_of(batch, known) // BLOCK_T - known)
        seq = known
    return seq, block


class Layout(NamedTuple):
    """How many sequences a call has, and what kernels take of them.

    Attributes:
        num_seqs: sequences.
        each: whether each token is a sequence of its own.
        tensors: arguments of a kernel by name.
    """

    num_seqs: int
    each: bool
    tensors: dict[str, Any]

    def blocks(self, num_tokens: int, block_t: int) -> int:
        """A bound on the blocks of all sequences, as :func:`block_of` counts them."""
        if self.each:
            return self.num_seqs
        if self.tensors["cu_seqlens_ptr"] is None:
            return cdiv(num_tokens, block_t)
        return num_tokens // block_t + self.num_seqs


def layout_of(
    num_tokens: int,
    states: Tensor | None,
    slots: Tensor | None,
    cu_seqlens: Tensor | None,
    pos_offsets: Tensor | None,
) -> Layout:
    """The sequences of a call."""
    if cu_seqlens is not None:
        num_seqs = cu_seqlens.shape[0] - 1
    else:
        num_seqs = 1 if slots is None else slots.shape[0]
    tensors = {
        "slots_ptr": slots,
        "cu_seqlens_ptr": cu_seqlens,
        "pos_offsets_ptr": pos_offsets,
        "num_seqs": num_seqs,
        "num_tokens": num_tokens,
        "num_slots": 0 if states is None else states.shape[0],
    }
    each = cu_seqlens is None and num_seqs == num_tokens
    return Layout(num_seqs, each, tensors)


def in_units(q: Tensor, k: Tensor) -> bool:
    """Whether heads [num_tokens, num_heads, size] are a power of two and lie in whole units.

    Of others ptxas of CUDA 12.8 writes wrong machine code, for instance of heads of 24 whose values
    are one: :func:`ferrum_triton.kernels.sass.unset_registers` finds it, and
    ``tests/test_machine_code.py`` shows it.
    """
    size = q.shape[2]
    steps = size, *q.stride()[:2], *k.stride()[:2]
    is_whole = size == next_power_of_2(size) and all(step % UNIT == 0 for step in steps)
    return is_whole and all(x.data_ptr() % 16 == 0 for x in (q, k))
