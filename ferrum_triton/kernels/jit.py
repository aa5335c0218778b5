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

# The compute capability a launcher is told of on meta tensors, unless record_launches says another:
# the oldest one served, whose limits every newer GPU has too.
META_CAPABILITY = (8, 0)

# Combinations of arguments one kernel remembers before it starts over.
MAX_ENTRIES = 4096

# The launcher of a compiled kernel is Triton's private interface. It is called directly only where
# it was tested (that halves the host time of a launch); elsewhere Triton does it all.
DIRECT_LAUNCH = triton.__version__.startswith("3.6.") and torch.version.hip is None


@dataclass(frozen=True)
class Launch:
    """One launch a launcher asked for."""

    kernel: Kernel
    grid: tuple[int, ...]
    args: tuple[Any, ...]
    meta: dict[str, Any]


_recording: ContextVar[list[Launch] | None] = ContextVar("ferrum_recording", default=None)
_meta_capability: ContextVar[tuple[int, int]] = ContextVar(
    "ferrum_meta_capability", default=META_CAPABILITY
)


@contextlib.contextmanager
def record_launches(capability: tuple[int, int] = META_CAPABILITY) -> Iterator[list[Launch]]:
    """Collect the launches made on meta tensors inside the block; nothing runs.

    Args:
        capability: of the GPU the launchers should choose for.
    """
    launches: list[Launch] = []
    tokens = _recording.set(launches), _meta_capability.set(capability)
    try:
        yield launches
    finally:
        _recording.reset(tokens[0])
        _meta_capability.reset(tokens[1])


class Kernel:
    """A Triton kernel and the ways to launch it.

    Parameters come in this order: pointers (named ``*_ptr``, the first never None), host tensor
    descriptors (named ``*_desc``, or None), integers that rarely change (strides, sizes), the
    ``dynamic`` scalars, constexprs. ``kernel.jit`` is the plain ``triton.jit`` function.
    """

    def __init__(self, fn: Callable[..., Any], dynamic: Sequence[str] = ()) -> None:
        self.jit = JITFunction(fn, do_not_specialize=list(dynamic))
        self.name = fn.__name__
        runtime = [p.name for p in self.jit.params if not p.is_constexpr]
        self._num_pointers = sum(name.endswith("_ptr") for name in runtime)
        self._num_descriptors = sum(name.endswith("_desc") for name in runtime)
        self._num_specialized = len(runtime) - len(dynamic)
        pointers = runtime[: self._num_pointers]
        descriptors = runtime[self._num_pointers :][: self._num_descriptors]
        if (
            not all(name.endswith("_ptr") for name in pointers)
            or not all(name.endswith("_desc") for name in descriptors)
            or runtime[self._num_specialized :] != list(dynamic)
        ):
            raise TypeError(f"{self.name}: parameters are not in the order Kernel describes")
        self._runtime = runtime
        self._constexprs = [p.name for p in self.jit.params if p.is_constexpr]
        self._entries: dict[tuple, _Entry] = {}

    def launch(self, grid: tuple[int, ...], *args: Any, **meta: Any) -> None:
        """Run the kernel over ``grid``.

        Args:
            grid: programs along each axis.
            args: the first runtime arguments, in the kernel's order.
            meta: the other runtime arguments by name, the constexprs and compiler options. A
                constexpr named ``PDL`` is filled in where it is not given: see
                :mod:`ferrum_triton.kernels.pdl`.
        """
        args += tuple(meta.pop(name) for name in self._runtime[len(args) :])
        first = args[0]
        if "PDL" in self._constexprs:
            if "PDL" not in meta:
                meta["PDL"] = can_overlap(first.device)
            if meta["PDL"]:
                meta["launch_pdl"] = True
        if first.is_cuda:
            self._launch_compiled(first.get_device(), grid, args, meta)
        elif first.is_cpu:
            constexprs = {k: v for k, v in meta.items() if k not in OPTIONS}
            interpreter.run(self.jit, grid, args, constexprs)
        else:
            launches = _recording.get()
            if launches is None:
                where = f"{self.name} cannot run on {first.device}"
                raise FerrumError(f"{where}; record_launches() lists its launches there")
            launches.append(Launch(self, grid, args, meta))

    def _launch_compiled(self, device: int, grid: tuple, args: tuple, meta: dict) -> None:
        # The key is at least as fine as what Triton specialises on (types, 16-byte alignment of
        # pointers, 1 and multiples of 16 among integers), so one entry never serves two binaries:
        # code compiled for aligned loads would read a misaligned tensor wrongly.
        dtypes: list[Any] = []
        addresses = 0
        for tensor in args[: self._num_pointers]:
            if tensor is None:
                dtypes.append(None)
            else:
                dtypes.append(tensor.dtype)
                addresses |= tensor.data_ptr()
        aligned = addresses % 16 == 0 or tuple(
            tensor is not None and tensor.data_ptr() % 16 == 0
            for tensor in args[: self._num_pointers]
        )
        for scalar in args[self._num_specialized :]:
            wide = scalar.__class__ is int and not -(2**31) <= scalar < 2**31
            dtypes.append("int64" if wide else scalar.__class__)
        sizes = args[self._num_pointers : self._num_specialized]
        if self._num_descriptors:
            # Code depends on their element and block alone: the rest is encoded at each launch.
            described = sizes[: self._num_descriptors]
            sizes = sizes[self._num_descriptors :]
            dtypes += [d and (d.base.dtype, *d.block_shape) for d in described]
        key = (device, aligned, sizes, *dtypes, *meta.values())

        entry = self._entries.get(key)
        if entry is None:
            self._compile(key, device, grid, args, meta)
            return
        if torch._C._cuda_getDevice() != device:
            with torch.cuda.device(device):
                self._launch_entry(entry, device, grid, args, meta)
        else:
            self._launch_entry(entry, device, grid, args, meta)

    def _launch_entry(
        self, entry: _Entry, device: int, grid: tuple, args: tuple, meta: dict
    ) -> None:
        if entry.launch is None or _is_watched():
            self.jit[grid](*args, **meta)
            return
        x, y, z = grid if len(grid) == 3 else (*grid, 1, 1)[:3]
        stream = torch._C._cuda_getCurrentRawStream(device)
        entry.launch(x, y, z, stream, *entry.head, None, None, None, *args, *entry.tail)

    def _compile(self, key: tuple, device: int, grid: tuple, args: tuple, meta: dict) -> None:
        if torch.cuda.is_current_stream_capturing():
            raise FerrumError(
                f"{self.name} is not compiled for these arguments yet, and compiling cannot be "
                "captured in a graph. Run the step once before capturing it."
            )
        with torch.cuda.device(device):
            compiled = self.jit[grid](*args, **meta)
        if len(self._entries) >= MAX_ENTRIES:
            self._entries.clear()
        self._entries[key] = _Entry.of(compiled, [meta[name] for name in self._constexprs])


def _is_watched() -> bool:
    """Whether a profiler has asked Triton to tell it of every launch."""
    enter, leave = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    return bool((enter is not None and enter.calls) or (leave is not None and leave.calls))


@dataclass(frozen=True)
class _Entry:
    """A compiled kernel, ready for Triton's C launcher.

    ``launch`` is None where that launcher may not be called directly: an untested Triton, or a
    kernel that wants scratch memory allocated for each launch.
    """

    launch: Callable[..., None] | None
    head: tuple = ()
    tail: tuple = ()

    @classmethod
    def of(cls, compiled: Any, constexprs: list[Any]) -> _Entry:
        if not DIRECT_LAUNCH:
            return cls(None)
        launcher = compiled.run
        if launcher.global_scratch_size or launcher.profile_scratch_size:
            return cls(None)
        options = (launcher.launch_cooperative_grid, launcher.launch_pdl, None, None)
        head = (compiled.function, *options, compiled.packed_metadata)
        return cls(launcher.launch, head, tuple(constexprs))


def kernel(
    fn: Callable[..., Any] | None = None, *, dynamic: Sequence[str] = ()
) -> Kernel | Callable[[Callable[..., Any]], Kernel]:
    """Make a :class:`Kernel` of a Triton function.

    Args:
        fn: the function.
        dynamic: scalars that change from call to call (lengths, positions, factors). Triton would
            otherwise compile a variant for the value 1 and another for multiples of 16.
    """
    if fn is None:
        return functools.partial(Kernel, dynamic=dynamic)
    return Kernel(fn, dynamic)


@functools.cache
def processors(device: torch.device) -> int:
    """Streaming multiprocessors of ``device``: what a grid should fill."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).multi_processor_count
    return META_PROCESSORS if device.type == "meta" else CPU_PROCESSORS


def can_overlap(device: torch.device) -> bool:
    """Whether a kernel may start before the end of the one before it, and wait by itself."""
    return capability(device) >= (9, 0)


def capability(device: torch.device) -> tuple[int, int]:
    """Compute capability of an NVIDIA GPU; (0, 0) of any other device."""
    return _meta_capability.get() if device.type == "meta" else _capability(device)


@functools.cache
def _capability(device: torch.device) -> tuple[int, int]:
    if device.type == "cuda" and torch.version.hip is None:
        return torch.cuda.get_device_capability(device)
    return (0, 0)
