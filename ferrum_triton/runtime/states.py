"""States of running sequences, in the layers that keep one instead of keys and values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ferrum_triton.errors import InputError
from ferrum_triton.runtime.kv_cache import PagedKvCache


class StateCache(PagedKvCache):
    """A paged cache, and beside it states of some layers, a slot for each sequence.

    A state is what a layer knows of all tokens of a sequence so far. It has one length, the
    sequence's: no earlier one can be read from it. So sequences share no blocks here, and none goes
    back but to its start. At position 0 a sequence begins from zeros, whatever its slot holds, so
    that a slot needs no clearing when its sequence leaves.

    Args:
        shapes: shape and dtype of each kind of state; every layer has one of each kind.
        num_state_layers: layers with states.
        sizes: arguments of the paged cache; its num_layers counts layers with keys and values.

    Attributes:
        states: of each kind a tensor per layer, [num_seqs, *shape].
        state_slots: [num_seqs] int32 on the device, the slot of each sequence: its number.
    """

    can_share = False

    def __init__(
        self,
        *,
        shapes: Sequence[tuple[tuple[int, ...], torch.dtype]],
        num_state_layers: int,
        **sizes: Any,
    ) -> None:
        super().__init__(**sizes)
        num_seqs, device = len(self.blocks), self.kv_lens.device
        self.states = [
            [
                torch.zeros((num_seqs, *shape), dtype=dtype, device=device)
                for _ in range(num_state_layers)
            ]
            for shape, dtype in shapes
        ]
        self.state_slots = torch.arange(num_seqs, dtype=torch.int32, device=device)

    @property
    def tensors(self) -> list[Tensor]:
        return [*super().tensors, *(t for kind in self.states for t in kind), self.state_slots]

    def set_lens(self, lengths: Mapping[int, int]) -> None:
        """As of the paged cache.

        Raises:
            InputError: a length is below the sequence's, and not 0, too.
        """
        for seq, length in lengths.items():
            self._check_seq("set_lens", seq)
            if 0 < length < self.lengths[seq]:
                allowed = f"0, or {self.lengths[seq]} and more: states do not go back"
                advice = "Free the sequence and read it again."
                raise InputError("set_lens", "lengths", f"{length} for {seq}", allowed, advice)
        super().set_lens(lengths)

    def share(self, seq: int, blocks: Sequence[int]) -> None:
        """Begin an empty sequence; without blocks of others, whose states it would not have.

        Raises:
            InputError: there are blocks, or the sequence is none or not empty.
        """
        if blocks:
            advice = "Read the tokens again."
            raise InputError("share", "blocks", f"{len(blocks)} of them", "none", advice)
        super().share(seq, blocks)
