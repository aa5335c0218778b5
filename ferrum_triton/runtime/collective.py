"""What ranks do together, over ``torch.distributed``: NCCL on CUDA, gloo on CPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch.distributed as dist
from torch import Tensor

from ferrum_triton.errors import InputError
from ferrum_triton.types import ReduceOp


class Collective:
    """Collectives of one process group; in a process without one, the identity of a single rank.

    Tensors lie on the device of the group's library and are contiguous. Every rank calls the same
    collectives in the same order with the same shapes and dtypes.

    Args:
        group: None means the default group if ``torch.distributed`` is initialised.
    """

    def __init__(self, group: Any = None) -> None:
        self.group = group
        alone = not (dist.is_available() and dist.is_initialized())
        self.world_size = 1 if alone else dist.get_world_size(group)
        self.rank = 0 if alone else dist.get_rank(group)
        if self.rank < 0:
            _reject("Collective", "group", "without this process", "a group it belongs to")

    def all_reduce(self, x: Tensor, op: ReduceOp = ReduceOp.SUM) -> None:
        """x ← the elementwise sum, maximum or minimum over ranks, in place, on every rank.

        Raises:
            InputError: ``x`` is not contiguous, or ``op`` is not one of :class:`ReduceOp`.
        """
        if op not in tuple(ReduceOp):
            _reject("all_reduce", "op", repr(op), ", ".join(ReduceOp))
        _check_contiguous("all_reduce", "x", x)
        if self.world_size > 1:
            reduction = getattr(dist.ReduceOp, ReduceOp(op).name)
            dist.all_reduce(x, op=reduction, group=self.group)

    def all_gather(self, local: Tensor, out: Tensor | None = None) -> Tensor:
        """Every rank's tensor, in the order of ranks along dimension 0, on every rank.

        Args:
            local: [n, ...], of the same shape on every rank.
            out: [world_size · n, ...] to write to; None allocates it.

        Raises:
            InputError: ``local`` is a scalar or not contiguous, or ``out`` does not fit.
        """
        if local.dim() == 0:
            _reject("all_gather", "local", "a scalar", "one dimension or more")
        shape = (self.world_size * local.shape[0], *local.shape[1:])
        out = local.new_empty(shape) if out is None else out
        if out.shape != shape or out.dtype != local.dtype:
            got = f"{str(out.dtype)[6:]}{list(out.shape)}"
            _reject("all_gather", "out", got, f"{str(local.dtype)[6:]}{list(shape)}")
        _check_contiguous("all_gather", "local", local)
        _check_contiguous("all_gather", "out", out)
        if self.world_size > 1:
            dist.all_gather_into_tensor(out, local, group=self.group)
        else:
            out.copy_(local)
        return out

    def all_to_all(
        self, x: Tensor, send: Sequence[int] | None = None, receive: Sequence[int] | None = None
    ) -> Tensor:
        """Rows for every rank, sent to it, and those of every rank for this one, in their order.

        Args:
            x: [n, ...], the rows for rank 0 before those for rank 1.
            send: the number of rows for each rank, n in all; None sends n / world_size to each.
            receive: the number of rows from each rank, which is what it sends here; None with
                ``send``.

        Returns:
            [sum of receive, ...], the rows of rank 0 before those of rank 1.

        Raises:
            InputError: ``x`` is a scalar or not contiguous, or the numbers do not fit.
        """
        if x.dim() == 0:
            _reject("all_to_all", "x", "a scalar", "one dimension or more")
        _check_contiguous("all_to_all", "x", x)
        if send is None or receive is None:
            if len(x) % self.world_size or send is not receive:
                allowed = f"a multiple of {self.world_size} rows, or send and receive"
                _reject("all_to_all", "x", f"of {len(x)} rows", allowed)
            send = receive = [len(x) // self.world_size] * self.world_size
        for name, counts in (("send", send), ("receive", receive)):
            if len(counts) != self.world_size or min(counts) < 0:
                allowed = f"{self.world_size} numbers of rows, one of each rank"
                _reject("all_to_all", name, str(list(counts)), allowed)
        if sum(send) != len(x) or send[self.rank] != receive[self.rank]:
            got = f"{list(send)} with receive {list(receive)}"
            _reject("all_to_all", "send", got, f"{len(x)} rows in all, the same to itself")
        out = x.new_empty(sum(receive), *x.shape[1:])
        if self.world_size > 1:
            dist.all_to_all_single(out, x, list(receive), list(send), group=self.group)
        else:
            out.copy_(x)
        return out

    def broadcast(self, x: Tensor, src: int) -> None:
        """x ← rank ``src``'s x, in place, on every rank.

        Raises:
            InputError: ``x`` is not contiguous, or there is no rank ``src``.
        """
        if not 0 <= src < self.world_size:
            _reject("broadcast", "src", str(src), f"a rank in [0, {self.world_size})")
        _check_contiguous("broadcast", "x", x)
        if self.world_size > 1:
            dist.broadcast(x, group=self.group, group_src=src)


def _check_contiguous(what: str, name: str, x: Tensor) -> None:
    if not x.is_contiguous():
        _reject(what, name, f"of strides {list(x.stride())}", "contiguous")


def _reject(what: str, argument: str, got: str, allowed: str) -> NoReturn:
    raise InputError(what, argument, got, allowed, f"See Collective.{what}.")
