"""Launches as text: which kernels a call launches, with what constexprs and options, by its sizes.

A call of which one axis is a star stands above the sizes from which on something else is launched.
The first size has all of a launch, another what it changes. Entries that are 0 or False are left
out, and what has fields is told by those that are numbers or words.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, is_dataclass
from typing import Any

import torch

from ferrum_triton.kernels.jit import record_launches
from ferrum_triton.registry import OPS, Op
from ferrum_triton.testing import TensorFactory

# Powers of two and what follows them.
SIZES = sorted({n for k in range(13) for n in (1 << k, (1 << k) + 1)})
# Axes by which launchers choose: of every case the first that it has, and of an op's first case the
# others too.
AXES = ("num_tokens", "m", "num_rows", "batch", "length", "routed_tokens", "num_parts", "q_len")
WIDTHS = ("hidden_size", "head_dim", "num_cols", "num_experts", "num_blocks", "vocab_size", "n")
HOPPER, AMD = (9, 0), (0, 0)
# Formats with launches of their own, and one of the others.
KINDS = ("Q4_K", "Q3_K", "MXFP4")
# Every kernel of a decoder step has these.
PDL = ("PDL", "launch_pdl")

Launches = list[tuple[str, dict[str, str]]]


def told(value: Any) -> str:
    """A constexpr without what is too long to read."""
    if hasattr(value, "name"):
        return value.name
    fields = asdict(value) if is_dataclass(value) else getattr(value, "_asdict", dict)()
    if not fields:
        return str(value)
    plain = {n: v for n, v in fields.items() if v and type(v) in (bool, int, float, str)}
    return f"({' '.join(f'{n}={v}' for n, v in plain.items() if len(str(v)) < 40)})"


def launched(op: Op, dtype: torch.dtype, capability: tuple[int, int], axes: dict) -> Launches:
    """The kernels of a call, each with its grid and what it is launched with."""
    call = op.make_sample(TensorFactory(dtype, "meta"), **axes)
    with record_launches(capability) as launches:
        op.impls["triton"](**call)
    return [
        (
            launch.kernel.name,
            {"grid": "x".join(map(str, launch.grid))}
            | {name: told(v) for name, v in launch.meta.items() if v and name not in PDL},
        )
        for launch in launches
    ]


def by_size(
    op: Op, dtype: torch.dtype, capability: tuple[int, int], axes: dict, star: str
) -> Iterator[str]:
    """A line for each kernel of each size from which on launches are others than before."""
    before: Launches = []
    for size in SIZES:
        now = launched(op, dtype, capability, axes | {star: size})
        same = [name for name, _ in now] == [name for name, _ in before]
        old = [meta for _, meta in before] if same else [{} for _ in now]
        for (name, meta), was in zip(now, old, strict=True):
            changed = {k: v for k, v in meta.items() if was.get(k) != v}
            changed |= dict.fromkeys([k for k in was if k not in meta], "")
            if changed.keys() - {"grid"} or not was:
                entries = " ".join(f"{k}={v}" for k, v in changed.items())
                yield f"    {size}: {name} {entries}"
        if before and not now:
            yield f"    {size}: nothing"
        before = now


def asked(op: Op) -> Iterator[tuple[torch.dtype, tuple[int, int], dict[str, Any], str]]:
    """Calls, with the axis that is a star: bench cases that differ in more than sizes."""
    seen = set()
    for case in op.bench:
        words = {n: str(v) for n, v in case.axes.items() if type(v) is not int}
        kinds = {word.removesuffix(":planes") for n, word in words.items() if n.endswith("kind")}
        key = (case.dtype, *words.items())
        if key in seen or not kinds <= {*KINDS, "None"}:
            continue
        axes = dict(case.axes)
        first, *others = [axis for axis in (*AXES, *WIDTHS) if axis in axes]
        yield case.dtype, HOPPER, axes, first
        if not seen:
            yield case.dtype, AMD, axes, first
            yield from ((case.dtype, HOPPER, axes, axis) for axis in others if axis in WIDTHS)
            if torch.float32 in op.dtypes and case.dtype != torch.float32:
                yield torch.float32, HOPPER, axes, first
        seen.add(key)


def launches() -> dict[str, str]:
    """The table of every op's launches, by its name."""
    found = {}
    for op in (op for op in OPS.values() if "triton" in op.impls):
        lines = []
        for dtype, capability, axes, star in asked(op):
            call = " ".join(f"{n}={'*' if n == star else v}" for n, v in axes.items())
            gpu = "Hopper" if capability == HOPPER else "AMD"
            lines += [f"{str(dtype).removeprefix('torch.')} {call} [{gpu}]"]
            lines += by_size(op, dtype, capability, axes, star)
        found[op.name] = "\n".join(lines) + "\n"
    return found
