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
from triton._C.libtriton import ir
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.jit import mangle_type

from ferrum_triton.kernels.jit import OPTIONS, Launch
from ferrum_triton.kernels.sass import usage
from ferrum_triton.kernels.sources import hash_source


@dataclass(frozen=True)
class Target:
    """A kind of GPU kernels are compiled for.

    Attributes:
        gpu: as Triton knows it.
        shared_limit: bytes of shared memory a program may use.
        capability: what launchers are told; (0, 0) of a GPU that is not NVIDIA's.
        spill_limit: bytes a thread may spill. Where launches are tuned by measurement that is none.
            Elsewhere the assembler may keep a few values in memory that it reads once.
    """

    gpu: GPUTarget
    shared_limit: int
    capability: tuple[int, int]
    spill_limit: int = 64


TARGETS = {
    "sm_80": Target(GPUTarget("cuda", 80, 32), 166_912, (8, 0)),
    "sm_90": Target(GPUTarget("cuda", 90, 32), 232_448, (9, 0), spill_limit=0),
    "sm_100": Target(GPUTarget("cuda", 100, 32), 232_448, (10, 0)),
    "gfx942": Target(GPUTarget("hip", "gfx942", 64), 65_536, (0, 0)),
}


@dataclass(frozen=True)
class Resources:
    """Of one compiled kernel.

    Attributes:
        registers: of a thread.
        spilled: bytes a thread spills to memory, as :func:`~ferrum_triton.kernels.sass.Usage`
            counts them; on AMD, vector registers.
        shared: bytes of shared memory a program uses.
        asm: the compiler's stages by name, such as ``"ptx"``.
    """

    registers: int
    spilled: int
    shared: int
    asm: dict[str, Any]


def compile_launch(launch: Launch, target: Target) -> Resources:
    """Compile what a launcher asked for."""
    hash_source(launch.kernel.jit)
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
        registers, spilled = usage(compiled.asm["cubin"])
    return Resources(registers, spilled, compiled.metadata.shared, dict(compiled.asm))


def translate_launch(launch: Launch, target: Target) -> None:
    """Translate what a launcher asked for to Triton's IR, without the passes that take the time."""
    source, options = _source(launch)
    backend = make_backend(target.gpu)
    parsed = backend.parse_options(options)
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    functions, modules = backend.get_codegen_implementation(parsed), backend.get_module_map()
    source.make_ir(target.gpu, parsed, functions, modules, context)


def _source(launch: Launch) -> tuple[ASTSource, dict[str, Any]]:
    """What Triton would compile for a launch: types, constants and alignment of its arguments."""
    kernel = launch.kernel.jit
    meta = {k: v for k, v in launch.meta.items() if k not in OPTIONS}
    options = {k: v for k, v in launch.meta.items() if k in OPTIONS}
    positions = {p.name: i for i, p in enumerate(kernel.params)}
    generic = {p.name for p in kernel.params if p.do_not_specialize}
    constants: dict[tuple[int, ...], Any] = {}
    attributes: dict[tuple[int, ...], Any] = {}

    def type_of(value: Any, path: tuple[int, ...], specialize: bool) -> Any:
        """The type of an argument; notes whether it is constant, or a multiple of 16."""
        if isinstance(value, tuple):
            types = [type_of(part, (*path, i), specialize) for i, part in enumerate(value)]
            return type(value)(*types) if hasattr(value, "_fields") else tuple(types)
        is_int = type(value) is int and specialize
        if value is None or (is_int and value == 1):
            constants[path] = value
            return "constexpr"
        if isinstance(value, torch.Tensor) or (is_int and value % 16 == 0):
            attributes[path] = [["tt.divisibility", 16]]
        return mangle_type(value)

    names = [p.name for p in kernel.params if not p.is_constexpr]
    signature = {
        name: type_of(value, (positions[name],), name not in generic)
        for name, value in zip(names, launch.args, strict=True)
    }
    for name, value in meta.items():
        signature[name] = "constexpr"
        constants[positions[name],] = value
    ordered = {p.name: signature[p.name] for p in kernel.params}
    return launch.kernel.source(kernel, ordered, constants, attributes), options
