"""What a launch takes of a GPU, from compiling it: no GPU needed.

A launcher given meta tensors under :func:`ferrum_triton.kernels.jit.record_launches` tells what it
would launch; here that is compiled for a target, and the assembler asked for its registers, its
shared memory and what it spills.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import mangle_type

from ferrum_triton.kernels.jit import OPTIONS, Launch
from ferrum_triton.kernels.sass import cuobjdump


@dataclass(frozen=True)
class Target:
    """A kind of GPU kernels are compiled for.

    Attributes:
        gpu: as Triton knows it.
        shared_limit: bytes of shared memory a program may use.
        capability: what launchers are told; (0, 0) of a GPU that is not NVIDIA's.
    """

    gpu: GPUTarget
    shared_limit: int
    capability: tuple[int, int]


TARGETS = {
    "sm_80": Target(GPUTarget("cuda", 80, 32), 166_912, (8, 0)),
    "sm_90": Target(GPUTarget("cuda", 90, 32), 232_448, (9, 0)),
    "sm_100": Target(GPUTarget("cuda", 100, 32), 232_448, (10, 0)),
    "gfx942": Target(GPUTarget("hip", "gfx942", 64), 65_536, (0, 0)),
}


@dataclass(frozen=True)
class Resources:
    """Of one compiled kernel.

    Attributes:
        registers: of a thread.
        spilled: bytes a thread spills to memory; on AMD, vector registers.
        shared: bytes of shared memory a program uses.
        asm: the compiler's stages by name, such as ``"ptx"``.
    """

    registers: int
    spilled: int
    shared: int
    asm: dict[str, Any]


def compile_launch(launch: Launch, target: Target) -> Resources:
    """Compile what a launcher asked for."""
    source, options = _source(launch)
    compiled = triton.compile(source, target=target.gpu, options=options)
    if target.gpu.backend == "hip":
        # Scalar registers spill to lanes of vector registers, not to memory.
        text = compiled.asm["amdgcn"]
        registers, spilled = (
            int(re.search(rf"{key}:\s+(\d+)", text)[1])
            for key in ("vgpr_count", "vgpr_spill_count")
        )
    else:
        usage = cuobjdump(compiled.asm["cubin"], "--dump-resource-usage")
        registers, spilled = (int(n) for n in re.search(r"REG:(\d+) STACK:(\d+)", usage).groups())
    return Resources(registers, spilled, compiled.metadata.shared, dict(compiled.asm))


def _source(launch: Launch) -> tuple[ASTSource, dict[str, Any]]:
    """What Triton would compile for a launch: types, constants and alignment of its arguments."""
    kernel = launch.kernel.jit
    constants = {k: v for k, v in launch.meta.items() if k not in OPTIONS}
    options = {k: v for k, v in launch.meta.items() if k in OPTIONS}
    signature, attributes = {}, {}
    names = [p.name for p in kernel.params if not p.is_constexpr]
    for i, (name, value) in enumerate(zip(names, launch.args, strict=True)):
        generic = kernel.params[i].do_not_specialize
        if value is None or (type(value) is int and value == 1 and not generic):
            signature[name], constants[name] = "constexpr", value
            continue
        signature[name] = mangle_type(value)
        aligned = isinstance(value, torch.Tensor) or (
            type(value) is int and value % 16 == 0 and not generic
        )
        if aligned:
            attributes[(i,)] = [["tt.divisibility", 16]]
    signature |= {name: "constexpr" for name in constants if name not in signature}
    ordered = {p.name: signature[p.name] for p in kernel.params}
    positions = {p.name: i for i, p in enumerate(kernel.params)}
    constexprs = {(positions[name],): value for name, value in constants.items()}
    return ASTSource(kernel, ordered, constexprs, attributes), options
