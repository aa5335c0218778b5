"""The rule for products of few tokens: they are timed behind a norm that writes what they read.

An op declares ``after_norm``, the parameter of its activations. In a decoder a product follows a
norm, so up to FEW_TOKENS of them are timed behind an rms_norm of as many rows and columns; the row
is the time of the pair less the norm's own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bench.timing import added_us, device_us, eager_us
from ferrum_triton.backends import Backend
from ferrum_triton.registry import Op

Step = Callable[[], Any]

FEW_TOKENS = 8
EPS = 1e-6


class Timing(NamedTuple):
    """Microseconds of one call.

    Attributes:
        us: the time of the row.
        chained: the time in a chain of the op with itself, where the row's is another.
    """

    us: float
    chained: float | None = None


def stands_behind_norm(op: Op, arguments: Mapping[str, Any]) -> bool:
    """Whether a call is timed behind a norm."""
    return bool(op.after_norm) and 0 < len(arguments[op.after_norm]) <= FEW_TOKENS


def time_call(
    op: Op,
    call: Callable[..., Any],
    sets: Sequence[dict[str, Any]],
    backend: Backend,
    graph: bool = True,
) -> Timing:
    """The time of an op's call, or of a peer's with the same arguments, by the op's rule.

    Args:
        op: the op.
        call: the op's call or a peer's.
        sets: arguments of each call.
        backend: the backend whose norm goes before.
        graph: whether a CUDA graph can hold the call.
    """
    if not graph:
        return Timing(eager_us(call, sets))
    chained = device_us(call, sets)
    if not stands_behind_norm(op, sets[0]):
        return Timing(chained)
    return Timing(added_us(*behind_norm(op, call, sets, backend)), chained)


def behind_norm(
    op: Op, call: Callable[..., Any], sets: Sequence[dict[str, Any]], backend: Backend
) -> tuple[list[Step], list[Step]]:
    """A call with each set, and the norm that writes its activations."""
    weight = torch.ones_like(sets[0][op.after_norm].flatten(0, -2)[0])
    norms = []
    for arguments in sets:
        rows: Tensor = arguments[op.after_norm].flatten(0, -2)
        x = torch.randn(rows.shape, device=rows.device).to(rows.dtype)
        norms.append(partial(backend.rms_norm, x, weight, EPS, out=rows))
    return [partial(call, **arguments) for arguments in sets], norms
