"""How a kernel is launched: compiled on CUDA tensors, interpreted on CPU, recorded on meta.

``@kernel`` makes a :class:`Kernel` of a Triton function. Where its tensors lie decides what a
launch does, so one process can hold both the compiled kernel and its interpreted check, and a
launcher given meta tensors tells which kernels it would launch, which is how CI compiles every
shipped configuration without a GPU.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
import triton
from triton import knobs
from triton.runtime.jit import JITFunction

from ferrum_triton.errors import FerrumError
from ferrum_triton.kernels import interpreter

# Compiler options a launch may set beside the kernel's own constexprs.
OPTIONS = ("num_warps", "num_stages", "num_ctas", "maxnreg", "enable_fp_fusion", "launch_pdl")

# Streaming multiprocessors assumed where there is no device to ask: an H200's, and few enough in
# the interpreter that work is still split there.
META_PROCESSORS, CPU_PROCESSORS = 132, 4

# The launcher of a compiled kernel is Triton's private interface. It is called directly only where
# it was tested (it saves about half of the host time of a launch); elsewhere Triton does it all.
DIRECT_LAUNCH = triton.__version__.startswith("3.6.")


@dataclass(frozen=True)
class Launch:
    """One launch a launcher asked for."""

    kernel: Kernel
    grid: tuple[int, ...]
    args: tuple[Any, ...]
    meta: dict[str, Any]


_recording: ContextVar[list[Launch] | None] = ContextVar("ferrum_recording", default=None)


@contextlib.contextmanager
def record_launches() -> Iterator[list[Launch]]:
    """Collect the launches made on meta tensors inside the block; nothing runs."""
    launches: list[Launch] = []
    token = _recording.set(launches)
    try:
        yield launches
    finally:
        _recording.reset(token)


class Kernel:
    """A Triton kernel and the ways to launch it.

    Parameters come in the order runtime arguments, then constexprs; the first argument is a tensor.
    ``kernel.jit`` is the plain ``triton.jit`` function.
    """

    def __init__(self, fn: Callable[..., Any], do_not_specialize: Sequence[str] = ()) -> None:
        self.jit = JITFunction(fn, do_not_specialize=list(do_not_specialize))
        self.name = fn.__name__
        names = [p.name for p in self.jit.params if not p.is_constexpr]
        self._generic = frozenset(i for i, name in enumerate(names) if name in do_not_specialize)
        self._constexprs = [p.name for p in self.jit.params if p.is_constexpr]
        self._compiled: dict[tuple, tuple[Any, tuple]] = {}

    def launch(self, grid: tuple[int, ...], *args: Any, **meta: Any) -> None:
        """Run the kernel over ``grid``; ``meta`` holds constexprs and compiler options."""
        device = args[0].device
        if device.type == "cuda":
            self._launch_compiled(device.index, grid, args, meta)
        elif device.type == "cpu":
            constexprs = {k: v for k, v in meta.items() if k not in OPTIONS}
            interpreter.run(self.jit, grid, args, constexprs)
        else:
            launches = _recording.get()
            if launches is None:
                raise FerrumError(f"{self.name} cannot run on {device}; record_launches() lists it")
            launches.append(Launch(self, grid, args, meta))

    def _launch_compiled(self, device: int, grid: tuple, args: tuple, meta: dict) -> None:
        key = [device, *meta.items()]
        generic = self._generic
        for i, arg in enumerate(args):
            # Exactly what Triton specialises on, so that one entry never serves two binaries: an
            # entry compiled for 16-byte alignment would read a misaligned tensor wrongly.
            kind = type(arg)
            if kind is int:
                wide = not -(2**31) <= arg < 2**31
                key.append((wide,) if i in generic else (wide, arg == 1, arg % 16 == 0))
            elif kind is float or arg is None or kind is bool:
                key.append(kind)
            else:
                key.append((arg.dtype, arg.data_ptr() % 16 == 0))
        entry = self._compiled.get(key := tuple(key))
        if entry is None:
            self._compile(key, device, grid, args, meta)
        elif not DIRECT_LAUNCH or knobs.runtime.launch_enter_hook is not None:
            with torch.cuda.device(device):
                self.jit[grid](*args, **meta)
        else:
            compiled, tail = entry
            x, y, z = (*grid, 1, 1)[:3]
            if torch._C._cuda_getDevice() != device:
                with torch.cuda.device(device):
                    self._run(compiled, device, x, y, z, args, tail)
            else:
                self._run(compiled, device, x, y, z, args, tail)

    @staticmethod
    def _run(compiled: Any, device: int, x: int, y: int, z: int, args: tuple, tail: tuple) -> None:
        stream = torch._C._cuda_getCurrentRawStream(device)
        function, metadata = compiled.function, compiled.packed_metadata
        compiled.run(x, y, z, stream, function, metadata, None, None, None, *args, *tail)

    def _compile(self, key: tuple, device: int, grid: tuple, args: tuple, meta: dict) -> None:
        if torch.cuda.is_current_stream_capturing():
            raise FerrumError(
                f"{self.name} is not compiled for these arguments yet, and compiling cannot be "
                "captured in a graph. Run the step once before capturing it."
            )
        with torch.cuda.device(device):
            compiled = self.jit[grid](*args, **meta)
        self._compiled[key] = (compiled, tuple(meta[name] for name in self._constexprs))


def kernel(
    fn: Callable[..., Any] | None = None, *, do_not_specialize: Sequence[str] = ()
) -> Kernel | Callable[[Callable[..., Any]], Kernel]:
    """Make a :class:`Kernel` of a Triton function.

    Args:
        fn: the function.
        do_not_specialize: integer parameters that change from call to call (lengths, positions):
            Triton would compile a variant for the value 1 and one for multiples of 16.
    """
    if fn is None:
        return functools.partial(Kernel, do_not_specialize=do_not_specialize)
    return Kernel(fn, do_not_specialize)


@functools.cache
def processors(device: torch.device) -> int:
    """Streaming multiprocessors of ``device``: what a grid should fill."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).multi_processor_count
    return META_PROCESSORS if device.type == "meta" else CPU_PROCESSORS
