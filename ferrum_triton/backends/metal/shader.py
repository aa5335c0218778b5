"""Kernels of Metal Shading Language: how one is declared, compiled and launched."""

from __future__ import annotations

import functools
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from ferrum_triton.errors import FerrumError

SOURCES = Path(__file__).parent / "shaders"
TYPES = {
    torch.float32: "float",
    torch.float16: "half",
    torch.bfloat16: "bfloat",
    torch.int8: "char",
    torch.int32: "int",
    torch.int64: "long",
}

# Of every GPU that Metal 3 runs on.
LANES, MAX_THREADS, MAX_BUFFERS, MAX_GRID = 32, 1024, 31, 2**32 - 1


class Shader:
    """A kernel, its buffers in their order, and its parameters, which are one more buffer.

    Args:
        sources: the files under ``shaders`` that it needs, its own the last.
        name: of the kernel.
        buffers: names of its tensors, as its parameters with ``[[buffer(0)]]`` on are called.
        params: names of the 64-bit fields of its last buffer. A float is there as its 32 bits.
        strided: names of the tensors whose strides are among the parameters.
    """

    declared: ClassVar[dict[str, Shader]] = {}

    def __init__(
        self, sources: str, name: str, buffers: str, params: str, strided: str = ""
    ) -> None:
        self.sources, self.name, self.strided = sources, name, frozenset(strided.split())
        self.buffers, self.params = tuple(buffers.split()), tuple(params.split())
        if len(self.buffers) + 1 > MAX_BUFFERS:
            raise FerrumError(f"shader {name} has more than {MAX_BUFFERS} buffers")
        self.declared[name] = self

    def launch(
        self,
        types: Mapping[str, torch.dtype | str],
        buffers: Sequence[Tensor],
        params: Sequence[int | float] | Mapping[str, int | float],
        *,
        groups: int,
        threads: int,
    ) -> None:
        """Run ``groups`` threadgroups of ``threads`` threads each.

        Args:
            types: what the source's names of types, and of other choices, stand for.
            buffers: in the order declared; contiguous, but for those that are strided.
            params: in the order declared, or by name.
        """
        if isinstance(params, Mapping):
            if params.keys() != set(self.params):
                raise FerrumError(f"shader {self.name}: {params.keys() ^ set(self.params)}")
            params = [params[name] for name in self.params]
        if len(buffers) != len(self.buffers) or len(params) != len(self.params):
            raise FerrumError(f"shader {self.name} takes {self.buffers} and {self.params}")
        for buffer, called in zip(buffers, self.buffers, strict=True):
            if called not in self.strided and not buffer.is_contiguous():
                raise FerrumError(f"shader {self.name} knows no strides of {called}")
        if threads > MAX_THREADS or threads % LANES or groups * threads > MAX_GRID:
            raise FerrumError(f"shader {self.name}: no grid of {groups} groups of {threads}")
        named = tuple(sorted((k, v if isinstance(v, str) else TYPES[v]) for k, v in types.items()))
        kernel = getattr(_library(self.sources, named), self.name)
        block = [_bits(value) for value in params]
        kernel(*buffers, block, threads=groups * threads, group_size=threads)


def _bits(value: int | float) -> int:
    return value if isinstance(value, int) else struct.unpack("<i", struct.pack("<f", value))[0]


# Before the types, which are macros: Metal's own headers should not see them.
PROLOGUE = "#include <metal_stdlib>\nusing namespace metal;\n"


def source(sources: str, types: Sequence[tuple[str, str]]) -> str:
    """What is compiled: the types, what all share, and the files named."""
    defined = "".join(f"#define {name} {stands_for}\n" for name, stands_for in types)
    parts = ((SOURCES / f"{part}.metal").read_text() for part in ("common", *sources.split()))
    return PROLOGUE + defined + "".join(parts)


def compile_source(text: str) -> Any:
    """A library whose attributes are kernels."""
    return torch.mps.compile_shader(text)


@functools.cache
def _library(sources: str, types: tuple[tuple[str, str], ...]) -> Any:
    return compile_source(source(sources, types))


def threads_for(columns: int, most: int = 256) -> int:
    """Threads of a group that shares so many columns: whole simdgroups."""
    return min(max(-(-columns // LANES) * LANES, LANES), most)


def power_of_2_threads(columns: int, most: int = 256) -> int:
    """Threads of a group that looks for a place among so many columns."""
    threads = LANES
    while threads < min(columns, most):
        threads *= 2
    return threads


def types_of(lists: Mapping[str, Tensor | None]) -> dict[str, torch.dtype]:
    """What the names of integers' types stand for."""
    return {name: torch.int64 if ids is None else ids.dtype for name, ids in lists.items()}


def all_there(buffers: Sequence[Tensor | None], some: Tensor) -> tuple[Tensor, ...]:
    """The buffers with ``some`` tensor for those that are not there, which no kernel reads."""
    return tuple(some if b is None or b.numel() == 0 else b for b in buffers)


def strides(of: str, dims: str, values: Sequence[int]) -> dict[str, int]:
    """Parameters that are the strides of something by ``dims``."""
    return {f"stride_{of}_{dim}": n for dim, n in zip(dims.split(), values, strict=True)}


def result(
    like: Tensor, shape: Sequence[int], out: Tensor | None, dtype: torch.dtype | None = None
) -> Tensor:
    """A contiguous tensor to write to, of like's dtype unless told: out where that is one."""
    if out is not None and out.is_contiguous():
        return out
    return torch.empty(tuple(shape), dtype=dtype or like.dtype, device=like.device)


def delivered(y: Tensor, out: Tensor | None) -> Tensor:
    """out, holding y; y where there is none."""
    return y if out is None or out is y else out.copy_(y)
