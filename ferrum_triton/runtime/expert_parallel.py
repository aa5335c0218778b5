"""Experts that are spread over ranks: tokens travel to their experts, and products back.

A token goes once to each rank that has experts of it, however many of its experts those are. What
comes back is a row for each of its experts, in the activations' dtype, and not a sum for each rank:
the layer then adds the rows up as it would have without other ranks, in float32 in the order of
slots. So the sum is the same bit for bit, and sums that are fused with a residual or a norm stay as
they are.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TypeAlias

import torch
from torch import Tensor
from torch.nn.functional import pad

from ferrum_triton.backends import Backend
from ferrum_triton.errors import InputError
from ferrum_triton.runtime.collective import Collective
from ferrum_triton.runtime.context import refuse_in_capture

Outputs: TypeAlias = Callable[[Tensor, Tensor], Tensor]
"""Products of tokens [num_tokens, hidden_size] with their experts [num_tokens, top_k]."""

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


class ExpertParallel:
    """Ranks that have some of the experts each: contiguous ranges, in the order of ranks.

    Every rank makes one, and then the same calls in the same order, each with any number of tokens.

    Args:
        backend: the backend that sorts; its device is that of ``collective``'s library.
        collective: the ranks.
        num_experts: the experts of all ranks.
        experts: this rank's, of whatever number; None shares them out evenly, one more to each of
            the first ranks if need be, and none to ranks beyond their number.
        top_k: experts of a token.
        hidden_size: the width of a token.
        dtype: the dtype of tokens.

    Attributes:
        experts: this rank's.
        capacity: tokens of each rank that :meth:`outputs` pads to; None exchanges their numbers.

    Raises:
        InputError: ranks disagree, or the numbers are of no use; on every rank.
    """

    def __init__(
        self,
        backend: Backend,
        collective: Collective,
        num_experts: int,
        experts: range | None = None,
        *,
        top_k: int,
        hidden_size: int,
        dtype: torch.dtype,
    ) -> None:
        self.backend, self.collective = backend, collective
        self.num_experts, self.top_k = num_experts, top_k
        self.hidden_size, self.dtype = hidden_size, dtype
        self.capacity: int | None = None
        if experts is None:
            size, rest = divmod(num_experts, collective.world_size)
            first = collective.rank * size + min(collective.rank, rest)
            experts = range(first, first + size + (collective.rank < rest))
        self.experts = experts
        code = DTYPES.index(dtype) if dtype in DTYPES else -1
        start = experts.start if experts.step == 1 else -1
        starts, stops, codes, *sizes = self._gathered(
            start, experts.stop, code, num_experts, top_k, hidden_size
        )
        for name, values in zip(("num_experts", "top_k", "hidden_size"), sizes, strict=True):
            _check(name, values)
        names = [str(DTYPES[c])[6:] if c >= 0 else "no float dtype" for c in codes]
        _check("dtype", names, codes[0] >= 0)
        ranges = [f"{start} to {stop}" for start, stop in zip(starts, stops, strict=True)]
        whole = starts == [0, *stops[:-1]] and stops == sorted(stops) and stops[-1] == num_experts
        if not whole:
            _reject("experts", f"{ranges} by rank", f"ranges one after another, 0 to {num_experts}")
        self._stops = torch.tensor(stops, dtype=torch.int32, device=backend.device)
        self._ranks = torch.arange(len(stops), dtype=torch.int32, device=backend.device)

    @contextlib.contextmanager
    def padded_to(self, capacity: int) -> Iterator[None]:
        """Within it, exchange ``capacity`` tokens with each rank, whatever their number: no host.

        For the capture of a decode step. Every rank enters it, with the same capacity.

        Raises:
            InputError: ranks disagree, or the capacity is less than 1; on every rank.
        """
        (values,) = self._gathered(capacity)
        _check("capacity", values)
        before, self.capacity = self.capacity, capacity
        try:
            yield
        finally:
            self.capacity = before

    def outputs(self, h: Tensor, ids: Tensor, local: Outputs) -> Tensor:
        """What each token's experts give, on whichever rank they are.

        Without a capacity the host reads, once, how many tokens go where, and only those travel.
        With one every rank gets all tokens, and returns a row for each of their slots.

        Args:
            h: [num_tokens, hidden_size], this rank's tokens: any number, 0 included.
            ids: int32 [num_tokens, top_k], of all ranks' experts. One that is none has a row of
                zeros.
            local: gives rows [m, top_k, hidden_size] of tokens [m, hidden_size] at this rank's
                experts, whose ids [m, top_k] count from its first; an id outside has a row of
                zeros. It is not called on a rank without experts.

        Returns:
            [num_tokens, top_k, hidden_size] in h's dtype.

        Raises:
            InputError: h or ids are not as said above, or too many for the capacity. Without a
                capacity every rank raises if one does. With one, the rank at fault takes part
                without tokens before it raises, so that none waits for it.
            FerrumError: it would have to read counts in the capture of a graph.
        """
        device, fault = self.backend.device, self._fault(h, ids)
        if self.collective.world_size == 1:
            if fault is not None:
                raise fault
            return local(h, ids)
        if self.capacity is None:
            advice = "Capture it within padded_to(capacity)."
            refuse_in_capture("ExpertParallel.outputs", device, advice)
        if fault is not None:
            h = torch.empty(0, self.hidden_size, dtype=self.dtype, device=device)
            ids = torch.empty(0, self.top_k, dtype=torch.int32, device=device)
        if self.capacity is None:
            slots = self._counted(h, ids, local, fault)
        else:
            slots = self._padded(h, ids, local, self.capacity)
        if fault is not None:
            raise fault
        return slots

    def _counted(self, h: Tensor, ids: Tensor, local: Outputs, fault: InputError | None) -> Tensor:
        sort, exchange = self.backend.moe_build_pairs_by_token, self.collective.all_to_all
        owner, num_ranks = self._owner(ids), len(self._ranks)
        # Tokens in the order of the ranks that they go to, and where in what comes back the row of
        # each pair will be: by rank, then by pair.
        visits = torch.where((owner[..., None] == self._ranks).any(1), self._ranks, -1)
        _, tokens, first_token = sort(visits, num_ranks)
        place, _, first_pair = sort(owner, num_ranks)
        failed = torch.full_like(self._ranks, fault is not None)
        sent = torch.stack((first_token.diff(), first_pair.diff(), failed), dim=1)
        # The one wait for the device.
        (send, expect, _), (receive, give, failures) = (
            torch.stack((sent, exchange(sent))).transpose(1, 2).tolist()
        )
        if any(failures):
            wrong = [rank for rank, is_wrong in enumerate(failures) if is_wrong]
            raise fault or _error("h or ids", f"refused on ranks {wrong}", "what those say")
        tokens = tokens[: sum(send)]
        h = exchange(self._rows(h, tokens), send, receive)
        ids = exchange(ids[tokens], send, receive) - self.experts.start
        slots = self._local(h, ids, local)
        # Rows of other ranks' pairs stay here. The others are already in the order of ranks.
        here = torch.where((ids >= 0) & (ids < len(self.experts)), 0, -1)
        _, pairs, _ = sort(here.view(-1, 1), 1)
        rows = self._rows(slots.flatten(0, 1), pairs[: sum(give)])
        return self._rows(exchange(rows, give, expect), place)

    def _padded(self, h: Tensor, ids: Tensor, local: Outputs, capacity: int) -> Tensor:
        lacking = (0, 0, 0, capacity - len(h))
        every_h, every_ids = (
            self.collective.all_gather(padded.contiguous())
            for padded in (pad(h, lacking), pad(ids, lacking, value=-1))
        )
        slots = self._local(every_h, every_ids - self.experts.start, local)
        rows = self.collective.all_to_all(slots.flatten(0, 1))
        pair = torch.arange(ids.numel(), dtype=torch.int32, device=ids.device).view(ids.shape)
        return self._rows(rows, self._owner(ids) * (capacity * self.top_k) + pair)

    def _owner(self, ids: Tensor) -> Tensor:
        """The rank of each expert; the number of ranks where it is none."""
        owner = torch.bucketize(ids, self._stops, right=True, out_int32=True)
        return torch.where(ids < 0, len(self._ranks), owner)

    def _local(self, h: Tensor, ids: Tensor, local: Outputs) -> Tensor:
        # An id of another rank's expert lies outside of this rank's, which products give zeros.
        return local(h, ids) if self.experts else h.new_zeros(*ids.shape, self.hidden_size)

    def _rows(self, x: Tensor, index: Tensor) -> Tensor:
        """x's rows; zeros for an index outside of them."""
        if not len(x):
            return x.new_zeros(*index.shape, self.hidden_size)
        return self.backend.embedding_lookup_dev(x, index)

    def _fault(self, h: Tensor, ids: Tensor) -> InputError | None:
        """What is wrong with a call."""
        device, limit = self.backend.device, self.capacity
        num_tokens = h.shape[0] if h.dim() else 0
        wanted = (self.dtype, self.hidden_size), (torch.int32, self.top_k)
        for name, x, (dtype, width) in zip(("h", "ids"), (h, ids), wanted, strict=True):
            want = dtype, (num_tokens, width), device.type
            if (x.dtype, tuple(x.shape), x.device.type) != want:
                got = f"{str(x.dtype)[6:]} {list(x.shape)} on {x.device}"
                return _error(name, got, f"{str(dtype)[6:]} {list(want[1])} on {device}")
        if limit is not None and num_tokens > limit:
            return _error("h", f"of {num_tokens} tokens", f"{limit}, the capacity")
        return None

    def _gathered(self, *values: int) -> list[list[int]]:
        """Each of the values on every rank."""
        mine = torch.tensor([values], dtype=torch.int64, device=self.backend.device)
        return self.collective.all_gather(mine).T.tolist()


def _check(name: str, values: list, is_allowed: bool | None = None) -> None:
    """Refuse what is not one on all ranks, or a number that is not positive."""
    if len(set(values)) > 1 or not (values[0] > 0 if is_allowed is None else is_allowed):
        _reject(name, f"{values} by rank", "one that is of use, on all ranks")


def _reject(argument: str, got: str, allowed: str) -> None:
    raise _error(argument, got, allowed)


def _error(argument: str, got: str, allowed: str) -> InputError:
    return InputError("ExpertParallel", argument, got, allowed, "Ranks run the same model alike.")
