"""Interpreted kernels touch the tensors of their launch alone: each address is looked up.

Guards beside a buffer show what is written there, and NaN in them what is computed with. A read
whose value is dropped shows in neither, and may fault on a GPU.
"""

from __future__ import annotations

import bisect
import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import numpy as np
from torch import Tensor


def watch(module: Any) -> None:
    """Have ``ferrum_triton.kernels.interpreter`` refuse addresses outside a launch's tensors."""
    interpret = module._interpret

    def watched(kernel: Any, grid: Any, args: Sequence[Any], meta: dict) -> None:
        builder = module.interpreter.interpreter_builder
        with _looked_up(builder, kernel.fn.__name__, *_extents([*args, *meta.values()])):
            interpret(kernel, grid, args, meta)

    module._interpret = watched


def _extents(values: Sequence[Any]) -> tuple[list[int], list[int]]:
    """Where tensors begin and end, ascending; those that overlap are one."""
    found: list[tuple[int, int]] = []
    stack = [*values]
    while stack:
        value = stack.pop()
        value = getattr(value, "base", value)  # of a descriptor
        if isinstance(value, tuple):
            stack += value
        elif isinstance(value, Tensor) and value.numel():
            steps = zip(value.shape, value.stride(), strict=True)
            last = sum((size - 1) * stride for size, stride in steps)
            start = value.data_ptr()
            found.append((start, start + (last + 1) * value.element_size()))
    merged: list[tuple[int, int]] = []
    for start, end in sorted(found):
        if merged and start <= merged[-1][1]:
            start, end = merged[-1][0], max(end, merged.pop()[1])
        merged.append((start, end))
    return [start for start, _ in merged], [end for _, end in merged]


@contextlib.contextmanager
def _looked_up(builder: Any, name: str, starts: list[int], ends: list[int]) -> Iterator[None]:
    def check(pointers: Any, mask: Any, what: str) -> None:
        size = pointers.get_element_ty().primitive_bitwidth // 8
        if pointers.data.size and not inside(pointers.data, size):
            mask = mask if isinstance(mask, np.ndarray) else mask.data  # a descriptor's is bare
            used = pointers.data[np.broadcast_to(mask.astype(bool), pointers.data.shape)]
            fits = not used.size or inside(used, size) or all(inside(one, size) for one in used)
            assert fits, f"{name} {what} outside the tensors of its launch"

    def inside(pointers: np.ndarray, size: int) -> bool:
        """Whether all lie in one extent."""
        first, last = int(pointers.min()), int(pointers.max())
        at = bisect.bisect_right(starts, first) - 1
        return at >= 0 and last + size <= ends[at]

    def load(pointers: Any, mask: Any, *rest: Any, **named: Any) -> Any:
        check(pointers, mask, "reads")
        return plain_load(pointers, mask, *rest, **named)

    def store(pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        check(pointers, mask, "writes")
        return plain_store(pointers, value, mask, *rest)

    plain_load: Callable[..., Any] = builder.create_masked_load
    plain_store: Callable[..., Any] = builder.create_masked_store
    with (
        mock.patch.object(builder, "create_masked_load", load),
        mock.patch.object(builder, "create_masked_store", store),
    ):
        yield
