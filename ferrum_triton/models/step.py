"""What goes through a model together: tokens of some sequences, and where their keys lie."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from ferrum_triton.runtime.kv_cache import PagedKvCache


class Spans(NamedTuple):
    """The sequences of a step, as ops that keep a state of each take them.

    Attributes:
        slots: [num_seqs] int32, where the states lie; negative for padding.
        positions: [num_seqs] int32, as in :class:`Step`.
        cu_seqlens: [num_seqs + 1] int32, as in :class:`Step`.
    """

    slots: Tensor
    positions: Tensor
    cu_seqlens: Tensor | None = None


@dataclass(frozen=True)
class Step:
    """Tokens after those in a cache. All tensors lie on the model's device.

    Attributes:
        ids: [num_tokens] int32 or int64.
        block_tables: [num_seqs, max_blocks] int32, the blocks of each sequence.
        positions: [num_seqs] int32, the position of each sequence's first token; negative for
            padding, which is neither cached nor seen.
        kv_lens: [num_seqs] int32, the keys of each sequence after the step.
        cu_seqlens: [num_seqs + 1] int32, where each sequence's tokens start; None where every
            token is a sequence of its own, as in a decode step.
        longest: the most tokens of a sequence.
        predicted: [num_predicted] int64, the tokens after which to predict; None for every one.
        batch_invariant: whether attention to a sequence may not depend on the others by a bit. Such
            a step may have several tokens of a sequence, each as a sequence of its own.
        spans: the sequences once more, for layers that keep states; None where they are the first
            of the cache, in order.
    """

    ids: Tensor
    block_tables: Tensor
    positions: Tensor
    kv_lens: Tensor
    cu_seqlens: Tensor | None = None
    longest: int = 1
    predicted: Tensor | None = None
    batch_invariant: bool = False
    spans: Spans | None = None

    @property
    def one_token_each(self) -> bool:
        """Whether no sequence has two tokens, so that none sees what another writes."""
        return self.cu_seqlens is None and not self.batch_invariant


def varlen_step(
    cache: PagedKvCache, parts: Sequence[tuple[int, Sequence[int]]], predicted: Sequence[int] = ()
) -> Step:
    """A step of any numbers of new tokens of some sequences; one upload.

    Args:
        cache: the cache, which has blocks for them.
        parts: sequences with the tokens that follow those cached.
        predicted: the tokens after which to predict, counted over all parts; none for every one.
    """
    device = cache.block_tables.device
    seqs = [seq for seq, _ in parts]
    counts = [len(ids) for _, ids in parts]
    starts = [cache.lengths[seq] for seq in seqs]
    ends = [start + count for start, count in zip(starts, counts, strict=True)]
    cuts = list(accumulate(counts, initial=0))
    flat = [token for _, ids in parts for token in ids]
    pieces = [flat, starts, ends, cuts, seqs, list(predicted)]
    packed = torch.tensor([n for piece in pieces for n in piece], dtype=torch.int32)
    # Pageable memory is read before the call returns.
    packed = packed.to(device, non_blocking=True)
    ids, first, last, cu_seqlens, rows, after = packed.split([len(piece) for piece in pieces])
    bounds = None if max(counts) == 1 else cu_seqlens
    return Step(
        ids=ids,
        block_tables=cache.block_tables.index_select(0, rows),
        positions=first,
        kv_lens=last,
        cu_seqlens=bounds,
        longest=max(counts),
        predicted=after.long() if predicted else None,
        spans=Spans(rows, first, bounds),
    )
