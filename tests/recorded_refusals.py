"""Refusals as text: what each op's rules say to calls of which one argument, or size, is changed.

Below a message stand the changes that it answers. Not listed are changes after which a call is
still a good one, and those that contradict the contract of its tensors or an annotation.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ferrum_triton.backends.door import check
from ferrum_triton.errors import InputError
from ferrum_triton.registry import OPS, Op
from tests.harness import sample, typical_axes

# Of sizes and counts: none, few, odd, and more than any op takes.
SIZES = (-1, 0, 1, 3, 5, 16, 65, 300, 5000, 1 << 20, 1 << 31)
# Sizes that calls are made with, all tensors alike; larger ones would take time to make.
MADE = (1, 3, 7, 65, 300)
NUMBERS = (-1.0, 0.0, 1.5, float("nan"), float("inf"))
WORDS = ("none", "", "Q4_K", "Q4_K:planes")


def other_tensors(x: Tensor) -> Iterator[tuple[str, Any]]:
    yield "None", None
    yield "float64", x.double()
    yield "int64", x.long()
    yield "float16", x.half()
    yield "one more dimension", x.unsqueeze(0)
    for dim in range(x.dim()):
        size = x.shape[dim]
        if size:
            yield f"dimension {dim} one longer", torch.cat([x, x.narrow(dim, 0, 1)], dim)
            yield f"dimension {dim} one shorter", x.narrow(dim, 0, size - 1).clone()
            yield f"without dimension {dim}", x.select(dim, 0).clone()
    if x.dim():
        yield "elements apart", x.repeat_interleave(2, -1)[..., ::2]
        yield "one row for all", x[:1].expand(x.shape)
        yield "off the grid", torch.cat([x.flatten(), x.flatten()[:1]])[1:].view(x.shape)


def other_values(value: Any, annotation: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Tensor):
        yield from other_tensors(value)
    elif isinstance(value, torch.dtype):
        yield from ((str(other), other) for other in (torch.float64, torch.float16, torch.int8))
    else:
        others = (*SIZES, *NUMBERS, *WORDS, True, False)
        yield from ((repr(other), other) for other in others if type(other) is type(value))
        if type(value) is not type(None) and "None" in str(annotation):
            yield "None", None


def refusal(op: Op, arguments: dict[str, Any]) -> str:
    """What an op's rules say to a call; "" for a good one, and one that never meets them."""
    try:
        op.contract.check(arguments, "cpu")
    except InputError:
        return ""
    try:
        check(op, dict(arguments), "cpu")
        for rule in op.call_rules:
            rule(**arguments)
    except InputError as error:
        advice = "" if error.advice == f"See {op.name}'s docstring." else f" {error.advice}"
        got = re.sub(r"0x[0-9a-f]+", "0x...", error.got)  # addresses differ from run to run
        return f"{error.argument} is {got}; allowed: {error.allowed}.{advice}"
    return ""


def calls(op: Op) -> Iterator[tuple[str, dict[str, Any]]]:
    """Calls, with what was changed of a good one: of flags and words the last of the tests' and
    then the first, which are mostly there and absent.
    """
    last = typical_axes(op)
    for axes in (last, last | {n: v[0] for n, v in op.axes.items() if type(v[0]) is not int}):
        good = sample(op, op.dtypes[0], "cpu", 0, **axes)
        for name, parameter in op.signature.parameters.items():
            for said, other in other_values(good[name], parameter.annotation):
                yield f"{name}: {said}", good | {name: other}
        for axis, value in axes.items():
            for size in MADE if type(value) is int and axis != "seed_bits" else ():
                made = sample(op, op.dtypes[0], "cpu", 0, **axes | {axis: size})
                yield f"{axis} is {size}", made


def refusals() -> dict[str, str]:
    """The table of every op's refusals, by its name."""
    found = {}
    for name, op in OPS.items():
        answers: dict[str, dict[str, None]] = {}
        for change, arguments in calls(op):
            if said := refusal(op, arguments):
                answers.setdefault(said, {})[change] = None
        lines = [f"{said}\n    {'; '.join(changes)}" for said, changes in answers.items()]
        found[name] = "\n".join(lines) + "\n"
    return found
