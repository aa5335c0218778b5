"""Sequences and the slots of their states, as the ops of linear attention take them.

A state is what a layer knows of all tokens of a sequence so far. States lie in slots, the first
dimension of ``states``, and a call reads and writes the slots of its sequences in place:

* ``slots`` [num_seqs], the slot of each sequence. A sequence whose slot is negative or past the
  last begins from zeros, and its state is not kept; so do all without ``states``. No slot may come
  twice: which sequence it would serve is not defined, and what lies in device memory cannot be
  looked at without waiting for it. The ``debug`` backend waits, and refuses.
* ``cu_seqlens`` [num_seqs + 1]: the tokens of sequence s are [cu_seqlens[s], cu_seqlens[s + 1]).
  Without it there is one sequence, or each token is a sequence of its own, as in a decode step.
  A sequence without tokens leaves its state alone. Tokens before the first and past the last
  sequence are padding: their results are undefined.
* ``pos_offsets`` [num_seqs], the position of each sequence's first token. One at 0 begins from
  zeros whatever its slot holds; one at a negative position is padding, whose state is neither read
  nor written. Without it all go on from their slots.
* ``kept_slots`` [num_tokens], where it is taken: the state after each token goes to that slot, and
  nowhere if that is out of range; ``slots`` are then only read. So are guesses verified: the next
  step goes on from the slot of the last token that was accepted. No slot of both may come twice.

A copy of a slot, for a prefix that sequences share, is ``copy_slice(states[a], states[b])``.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ferrum_triton.ops.precision import widen
from ferrum_triton.registry import Op

SEQUENCE_TENSORS = {
    "slots": "int[num_seqs]",
    "cu_seqlens": "int[num_bounds]",
    "pos_offsets": "int[num_seqs]",
}

# Axes of samples that are made by `sequence_sample`.
SEQUENCE_AXES = {
    "hostile": (True, False),
    "with_states": (False, True),
    "with_offsets": (False, True),
}


class Sequences(NamedTuple):
    """What the arguments say, tensors throughout, so that no step depends on what they hold.

    Attributes:
        seq: [num_tokens] the sequence of each token; num_seqs of padding.
        start, end: [num_seqs + 1] its tokens; the last entry is padding's.
        slot: [num_seqs] where its state is written, -1 for nowhere.
        source: [num_seqs] where its state is read, -1 for zeros.
        alive: [num_seqs + 1] whether it may keep states at all; padding may not.
    """

    seq: Tensor
    start: Tensor
    end: Tensor
    slot: Tensor
    source: Tensor
    alive: Tensor


def sequences(num_tokens, states, slots, cu_seqlens, pos_offsets, device) -> Sequences:
    """The sequences of a call."""
    token = torch.arange(num_tokens, device=device)
    if cu_seqlens is not None:
        bounds = cu_seqlens.long().clamp(0, num_tokens)
        start, end = bounds[:-1], torch.maximum(bounds[1:], bounds[:-1])
    elif slots is None or slots.shape[0] == 1:
        start, end = token.new_zeros(1), token.new_full((1,), num_tokens)
    else:
        start, end = token, token + 1
    num_seqs = start.shape[0]
    inside = (start[:, None] <= token) & (token < end[:, None])  # [num_seqs, num_tokens]
    order = torch.arange(num_seqs, device=device)[:, None]
    seq = torch.where(inside, order, num_seqs).amin(dim=0) if num_seqs else token * 0
    slot = torch.full_like(start, -1)
    if states is not None:
        slot = slots.long()
        slot = torch.where((slot >= 0) & (slot < states.shape[0]), slot, -1)
    source, alive = slot, torch.ones_like(slot, dtype=torch.bool)
    if pos_offsets is not None:
        alive = pos_offsets >= 0
        source = torch.where(pos_offsets > 0, slot, -1)
    slot = torch.where(alive & (end > start), slot, -1)
    start, end, alive = (torch.cat((x, x.new_zeros(1))) for x in (start, end, alive))
    return Sequences(seq, start, end, slot, source, alive)


def read_states(states: Tensor, source: Tensor) -> Tensor:
    """The state of each sequence, and of padding a last one: zeros where source is -1."""
    padded = torch.cat((widen(states), widen(states.new_zeros(1, *states.shape[1:]))))
    source = torch.cat((source, source.new_full((1,), -1)))
    return padded[torch.where(source < 0, states.shape[0], source)]


def write_states(states: Tensor, slot: Tensor, new: Tensor) -> None:
    """states[slot] ← new, but for slots that are out of range."""
    known = (slot >= 0) & (slot < states.shape[0])
    # One extra slot takes what is not kept, so that shapes do not depend on the data.
    padded = torch.cat((states, states.new_zeros(1, *states.shape[1:])))
    row = torch.where(known, slot, states.shape[0]).long()
    states.copy_(padded.index_copy(0, row, new.to(states.dtype))[:-1])


def check_sequences(of_op: Op, num_tokens, states, slots, cu_seqlens, pos_offsets) -> None:
    """What the host can see of the sequences; ``states`` None where the op was given none."""
    if (states is None) != (slots is None):
        name, other = ("slots", "states") if slots is None else ("states", "slots")
        of_op.reject(name, "None", f"a tensor, since {other} are given")
    if cu_seqlens is None:
        if slots is not None and slots.shape[0] not in (1, num_tokens):
            allowed = f"1 or num_tokens = {num_tokens} slots without cu_seqlens"
            of_op.reject("slots", f"of {slots.shape[0]} sequences", allowed)
        num_seqs = 1 if slots is None else slots.shape[0]
    else:
        num_seqs = cu_seqlens.shape[0] - 1
        if num_seqs < 0:
            of_op.reject("cu_seqlens", "empty", "num_seqs + 1 elements")
        if slots is not None and slots.shape[0] != num_seqs:
            got = f"of {cu_seqlens.shape[0]} elements"
            of_op.reject("cu_seqlens", got, f"num_seqs + 1 = {slots.shape[0] + 1}")
    if pos_offsets is not None and pos_offsets.shape[0] != num_seqs:
        of_op.reject("pos_offsets", f"of {pos_offsets.shape[0]} elements", f"{num_seqs} sequences")


def check_kept(of_op: Op, num_tokens, states, kept_slots) -> None:
    """Slots kept for every token, of states that there are."""
    if kept_slots is None:
        return
    if states is None:
        of_op.reject("states", "None", "a tensor, since kept_slots are given")
    if kept_slots.shape[0] != num_tokens:
        got = f"of {kept_slots.shape[0]} elements"
        of_op.reject("kept_slots", got, f"num_tokens = {num_tokens}")


def refuse_shared_slots(of_op: Op, states, slots, kept_slots=None) -> None:
    """What only a debug door looks at: that no slot comes twice."""
    if states is None:
        return
    named = slots.long() if kept_slots is None else torch.cat((slots.long(), kept_slots.long()))
    known = named[(named >= 0) & (named < states.shape[0])]
    found, counts = known.unique(return_counts=True)
    if bool((counts > 1).any()):
        name = "slots" if kept_slots is None else "kept_slots"
        slot = int(found[counts > 1][0])
        of_op.reject(name, f"holding {slot} more than once", "slots that all differ")


def lengths(seq_lens: Sequence[int] | None, batch: int, q_len: int) -> tuple[int, ...]:
    """Tokens of each sequence of a sample: told one by one, or as many sequences alike."""
    return (q_len,) * batch if seq_lens is None else tuple(seq_lens)


def sequence_sample(
    make, seq_lens, hostile=False, with_states=True, with_offsets=False, with_kept=False
) -> tuple[int | None, dict]:
    """Slots that there are, if any, and the arguments that describe sequences of ``seq_lens``."""
    num_seqs, num_tokens = len(seq_lens), sum(seq_lens)
    num_slots = num_seqs + with_kept * num_tokens + 2 * hostile
    is_decode = set(seq_lens) == {1} and not hostile and (with_states or num_seqs == 1)
    ends = [0, *itertools.accumulate(seq_lens)]
    ints = {"dtype": torch.int32, "device": make.device}
    arguments = {"cu_seqlens": None if is_decode else torch.tensor(ends, **ints)}
    if with_offsets:
        arguments["pos_offsets"] = make.ints(-1 if hostile else 0, 3, num_seqs)
    if not with_states:
        return None, arguments
    low, high = (-1, num_slots + 1) if hostile else (0, num_slots)
    count = num_seqs + with_kept * num_tokens
    named = make.distinct_ints(low, high, count)
    arguments["slots"] = named[:num_seqs]
    if with_kept:
        arguments["kept_slots"] = named[num_seqs:].clone()
    return num_slots, arguments
