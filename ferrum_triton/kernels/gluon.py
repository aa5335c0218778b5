"""Gluon kernels, launched, recorded and compiled as Triton's are.

Gluon is Triton's lower dialect: layouts, shared memory, tensor maps, barriers and asynchronous
products are written by hand. It is experimental, so it is used on versions of Triton that were
tested, on Hopper, where a measured row of a table asks for it or a heuristic that was fitted to
measurements. Everywhere else, and in the interpreter, a plain kernel serves
(:func:`ferrum_triton.kernels.hopper_config.serves`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource, GluonJITFunction
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ferrum_triton.kernels.jit import Kernel

# A layout in shared memory depends on the width of what lies there.
BY_BYTES = {1: gl.int8, 2: gl.int16, 4: gl.int32}


class GluonKernel(Kernel):
    """A :class:`~ferrum_triton.kernels.jit.Kernel` of a Gluon function.

    Its descriptors come from :func:`describe`. CPU tensors are computed on by the emulator.
    """

    make_function = GluonJITFunction
    source = GluonASTSource
    known_of_descriptors = f"{Kernel.known_of_descriptors}, {{0}}.layout"

    def run_on_cpu(self, grid: tuple[int, ...], args: Sequence[Any], constexprs: dict) -> None:
        from ferrum_triton.gluon_emulator import run

        run(self.jit, grid, args, constexprs)


def gluon_kernel(
    fn: Callable[..., Any] | None = None, *, dynamic: Sequence[str] = ()
) -> GluonKernel | Callable[[Callable[..., Any]], GluonKernel]:
    """Make a :class:`GluonKernel`; parameters as of :func:`~ferrum_triton.kernels.jit.kernel`."""
    if fn is None:
        return functools.partial(GluonKernel, dynamic=dynamic)
    return GluonKernel(fn, dynamic)


def describe(
    x: Tensor,
    block: Sequence[int],
    shape: Sequence[int] | None = None,
    strides: Sequence[int] | None = None,
    *,
    swizzled: bool = True,
) -> TensorDescriptor:
    """A tensor map of x in blocks, in the widest swizzle of shared memory that fits them.

    Args:
        x: the tensor whose first element the map begins at.
        block: the shape of a block.
        shape: the sizes that the map sees; those of x if not given. What a block has beyond them
            reads as zero and is not written.
        strides: the step of each of these sizes, in elements; those of x if not given.
        swizzled: False where threads read the blocks in an order of their own.
    """
    shape, strides = list(shape or x.shape), list(strides or x.stride())
    layout = _layout(tuple(block), BY_BYTES[x.element_size()], swizzled)
    return TensorDescriptor(x, shape, strides, list(block), layout)


@functools.cache
def _layout(block: tuple[int, ...], dtype: gl.dtype, swizzled: bool) -> gl.NVMMASharedLayout:
    if swizzled:
        return gl.NVMMASharedLayout.get_default_for(list(block), dtype)
    return gl.NVMMASharedLayout(0, dtype.primitive_bitwidth, rank=len(block))
