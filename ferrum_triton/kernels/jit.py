"""How a kernel is launched: compiled on CUDA tensors, interpreted on CPU, recorded on meta.

``@kernel`` makes a :class:`Kernel` of a Triton function. Where its tensors lie decides what a
launch does, so one process can hold both the compiled kernel and its interpreted check, and a
launcher given meta tensors tells which kernels it would launch, which is how CI compiles every
shipped configuration without a GPU.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from ferrum_triton.errors import FerrumError
from ferrum_triton.kernels import compiled, interpreter
from ferrum_triton.kernels.machine_code import refuse_wrong_code
from ferrum_triton.kernels.sources import hash_source

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

# Whether an integer is passed as an int32, in the source of a launch.
INT32 = "-2147483648 <= {} <= 2147483647"

# What the source of a launch calls its own.
LOCALS = (
    "axes",
    "cooperative",
    "device",
    "entry",
    "function",
    "key",
    "metadata",
    "overlapped",
    "run",
)


@dataclass(frozen=True)
class Launch:
    """One launch a launcher asked for."""

    kernel: Kernel
    grid: tuple[int, ...]
    args: tuple[Any, ...]
    meta: dict[str, Any]


class Recording(NamedTuple):
    """Launches noted in the order they were asked for, and whether they run as well."""

    launches: list[Launch]
    runs: bool


_recording: ContextVar[Recording | None] = ContextVar("ferrum_recording", default=None)
_meta_capability: ContextVar[tuple[int, int]] = ContextVar(
    "ferrum_meta_capability", default=META_CAPABILITY
)

# An element for every recording under way in any thread: a launch asks for its own thread's only
# where there is one at all.
RECORDINGS: list[Recording] = []


@contextlib.contextmanager
def note_launches(runs: bool) -> Iterator[list[Launch]]:
    """Collect the launches made inside the block.

    Args:
        runs: the launches run too, where their tensors can be run on.
    """
    recording = Recording([], runs)
    token = _recording.set(recording)
    RECORDINGS.append(recording)
    try:
        yield recording.launches
    finally:
        RECORDINGS.pop()
        _recording.reset(token)


@contextlib.contextmanager
def record_launches(capability: tuple[int, int] = META_CAPABILITY) -> Iterator[list[Launch]]:
    """Collect the launches made inside the block; those on meta tensors do not run.

    Args:
        capability: compute capability of the GPU that launchers choose for on meta tensors.
    """
    token = _meta_capability.set(capability)
    try:
        with note_launches(runs=True) as launches:
            yield launches
    finally:
        _meta_capability.reset(token)


class Kernel:
    """A Triton kernel and the ways to launch it.

    Parameters come in this order: pointers (named ``*_ptr``, the first never None), host tensor
    descriptors (named ``*_desc``, or None), integers that rarely change (strides, sizes), the
    ``dynamic`` scalars, constexprs.

    Attributes:
        jit: the plain ``triton.jit`` function.
        runtime: names of the parameters that are no constexprs, in the kernel's order.
        constexprs: names of the others.
        dynamic: names of the scalars that change from call to call.
        source: what Triton compiles of the function.
        known_of_descriptors: what its code depends on of a descriptor, in a launch's source.
    """

    make_function: ClassVar[type[JITFunction]] = JITFunction
    source: ClassVar[type[ASTSource]] = ASTSource
    known_of_descriptors: ClassVar[str] = "{0}.base.dtype, *{0}.block_shape"

    def __init__(self, fn: Callable[..., Any], dynamic: Sequence[str] = ()) -> None:
        self.jit = self.make_function(fn, do_not_specialize=list(dynamic))
        self.name = fn.__name__
        self.runtime = tuple(p.name for p in self.jit.params if not p.is_constexpr)
        self.constexprs = tuple(p.name for p in self.jit.params if p.is_constexpr)
        self.dynamic = tuple(dynamic)
        self.pointers = tuple(name for name in self.runtime if name.endswith("_ptr"))
        self.descriptors = tuple(name for name in self.runtime if name.endswith("_desc"))
        given = (*self.pointers, *self.descriptors, *self.dynamic)
        self.sizes = tuple(name for name in self.runtime if name not in given)
        wanted = (*self.pointers, *self.descriptors, *self.sizes, *self.dynamic)
        if self.runtime != wanted:
            raise TypeError(f"{self.name}: parameters are not in the order Kernel describes")
        self._entries: dict[tuple, compiled.Entry | None] = {}

    @functools.cached_property
    def launch(self) -> Callable[..., None]:
        """Run the kernel over a grid: ``launch(grid, y_ptr=y, ..., BLOCK=64, num_warps=4)``.

        The first argument is the grid, programs along each axis. The runtime arguments follow, by
        position or by name; constexprs and compiler options are named. A constexpr named ``PDL``
        is filled in where it is not given: see :mod:`ferrum_triton.kernels.pdl`.
        """
        return self._functions["launch"]

    @functools.cached_property
    def find(self) -> Callable[..., compiled.Entry | None]:
        """The compiled entry that a launch with the same arguments would use, if there is one."""
        return self._functions["find"]

    @functools.cached_property
    def _functions(self) -> dict[str, Any]:
        """``launch`` and ``find``, written out for this kernel's parameters.

        A launch is most of what a small op costs the host, so it makes no loop over arguments, and
        builds no dictionary.
        """
        names: dict[str, Any] = {
            "RECORDINGS": RECORDINGS,
            "can_overlap": can_overlap,
            "current_device": compiled.current_device,
            "current_stream": compiled.current_stream,
            "defaults": {p.name: p.default for p in self.jit.params if p.has_default},
            "elsewhere": self._elsewhere,
            "entries": self._entries,
            "hooks": compiled.HOOKS,
            "no_enter_hook": compiled.NO_ENTER_HOOK,
            "no_exit_hook": compiled.NO_EXIT_HOOK,
            "on_device": torch.cuda.device,
            "slowly": self._slowly,
            "was_noted": self._was_noted,
        }
        taken = {"grid", *OPTIONS, *names, *LOCALS} & {*self.runtime, *self.constexprs}
        if taken:
            raise TypeError(f"{self.name}: {sorted(taken)} are names that its launch uses itself")
        exec(compile(_source_of(self), f"<launch of {self.name}>", "exec"), names)
        names["launch"].__qualname__ = f"{self.name}.launch"
        names["find"].__qualname__ = f"{self.name}.find"
        return names

    def _was_noted(self, grid: tuple[int, ...], args: tuple, meta: dict[str, Any]) -> bool:
        """Note the launch where this thread records; whether it must not run."""
        recording = _recording.get()
        if recording is None:
            return False
        recording.launches.append(Launch(self, grid, args, _given(meta)))
        return not recording.runs

    def _elsewhere(self, grid: tuple[int, ...], args: tuple, meta: dict[str, Any]) -> None:
        """Launch on tensors that are not on a GPU."""
        first = args[0]
        if first.is_cpu:
            constexprs = {k: v for k, v in meta.items() if k not in OPTIONS}
            self.run_on_cpu(grid, args, constexprs)
        elif _recording.get() is None:
            where = f"{self.name} cannot run on {first.device}"
            raise FerrumError(f"{where}; record_launches() lists its launches there")

    def run_on_cpu(self, grid: tuple[int, ...], args: Sequence[Any], constexprs: dict) -> None:
        """Compute on CPU tensors what a launch computes."""
        interpreter.run(self.jit, grid, args, constexprs)

    def _slowly(
        self, key: tuple, device: int, grid: tuple[int, ...], args: tuple, meta: dict[str, Any]
    ) -> None:
        """Launch through Triton a kernel that is not compiled yet, or that somebody watches."""
        known = key in self._entries
        if not known and torch.cuda.is_current_stream_capturing():
            raise FerrumError(
                f"{self.name} is not compiled for these arguments yet, and compiling cannot be "
                "captured in a graph. Run the step once before capturing it."
            )
        hash_source(self.jit)
        loading = contextlib.nullcontext() if known else compiled.LOADING
        with torch.cuda.device(device), loading:
            result = self.jit[grid](*args, **_given(meta))
        if not known:
            refuse_wrong_code(result, self.name)
            if len(self._entries) >= MAX_ENTRIES:
                self._entries.clear()
            self._entries[key] = compiled.entry_of(result)


def _given(meta: dict[str, Any]) -> dict[str, Any]:
    """``meta`` without the compiler options that were left to their defaults."""
    return {k: v for k, v in meta.items() if v is not None or k not in OPTIONS}


def _source_of(kernel: Kernel) -> str:
    """The Python source of a kernel's ``launch`` and ``find``."""
    defaults = {p.name for p in kernel.jit.params if p.has_default} | {"PDL"}
    values = {name: f"{name}=defaults[{name!r}]" for name in defaults} | {"PDL": "PDL=None"}
    runtime = [values.get(name, name) for name in kernel.runtime]
    constexprs = [values.get(name, name) for name in kernel.constexprs]
    options = [f"{option}=None" for option in OPTIONS]
    signature = ", ".join(["grid", *runtime, "*", *constexprs, *options])
    named = [*kernel.constexprs, *OPTIONS]
    meta = "{" + ", ".join(f"{name!r}: {name}" for name in named) + "}"
    args = "(" + "".join(f"{name}, " for name in kernel.runtime) + ")"
    again = ", ".join(["grid", *kernel.runtime, *(f"{name}={name}" for name in named)])
    first = kernel.pointers[0]
    # The C launcher ignores constexprs, but counts them.
    addresses = [f"at_{name}" for name in kernel.pointers]
    passed = ", ".join(
        [*addresses, *kernel.runtime[len(addresses) :], *("None" for _ in kernel.constexprs)]
    )
    overlap = f"""
    if PDL is None:
        PDL = can_overlap({first}.device)
    if PDL:
        launch_pdl = True""" * ("PDL" in kernel.constexprs)
    return f"""
def launch({signature}):{overlap}
    if RECORDINGS and was_noted(grid, {args}, {meta}):
        return
    if not {first}.is_cuda:
        elsewhere(grid, {args}, {meta})
        return
    {_key_source(kernel)}
    entry = entries.get(key)
    if (
        entry is None
        or hooks.launch_enter_hook is not no_enter_hook
        or hooks.launch_exit_hook is not no_exit_hook
        or no_enter_hook.calls
        or no_exit_hook.calls
    ):
        slowly(key, device, grid, {args}, {meta})
        return
    if current_device() != device:
        with on_device(device):
            launch({again})
        return
    run, function, cooperative, overlapped, metadata = entry
    axes = len(grid)
    run(
        grid[0], grid[1] if axes > 1 else 1, grid[2] if axes > 2 else 1, current_stream(device),
        function, cooperative, overlapped, None, None, metadata, None, None, None, {passed}
    )

def find({signature}):{overlap}
    {_key_source(kernel)}
    return entries.get(key)
"""


def _key_source(kernel: Kernel) -> str:
    """Statements that set ``device``, the pointers' addresses and ``key``.

    The key is at least as fine as what Triton specialises on (types, 16-byte alignment of
    pointers, 1 and multiples of 16 among integers), so one entry never serves two binaries: code
    compiled for aligned loads would read a misaligned tensor wrongly. Of descriptors code depends
    on their element and block alone: the rest is encoded at each launch.
    """
    first, *others = kernel.pointers
    lines = [f"device = {first}.get_device()", f"at_{first} = {first}.data_ptr()"]
    lines += [f"at_{name} = 0 if {name} is None else {name}.data_ptr()" for name in others]
    addresses = " | ".join(f"at_{name}" for name in kernel.pointers)
    each = "".join(f"at_{name} & 15 == 0, " for name in kernel.pointers)
    parts = [
        "device",
        f"({addresses}) & 15 and ({each})",
        f"{first}.dtype",
        *(f"None if {name} is None else {name}.dtype" for name in others),
        *(
            f"None if {name} is None else ({kernel.known_of_descriptors.format(name)})"
            for name in kernel.descriptors
        ),
        *kernel.sizes,
        *(
            f"{name}.__class__ if {name}.__class__ is not int or {INT32.format(name)} else 'int64'"
            for name in kernel.dynamic
        ),
        *kernel.constexprs,
        *OPTIONS,
    ]
    lines.append("key = (" + "".join(f"{part}, " for part in parts) + ")")
    return "\n    ".join(lines)


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


class ReplayTable(dict):
    """Calls of one op by what they depend on, forgotten by :func:`forget_replays`."""

    def __init__(self) -> None:
        super().__init__()
        _replay_tables[id(self)] = self


_replay_tables: weakref.WeakValueDictionary[int, ReplayTable] = weakref.WeakValueDictionary()


def forget_replays() -> None:
    """Have every op ask its launcher again: what launchers choose by has changed."""
    for table in list(_replay_tables.values()):
        table.clear()


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
