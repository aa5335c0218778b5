"""What a compiled kernel needs to be launched by Triton's C launcher, without Triton's Python.

That launcher is Triton's private interface. It is called directly only where it was tested (that
halves the host time of a launch); elsewhere there are no entries, and Triton does it all.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import triton
from triton import knobs

DIRECT_LAUNCH = triton.__version__.startswith("3.6.") and torch.version.hip is None

# Held while Triton loads a launcher. It names every launcher's module alike, and Python gives back
# one that was loaded before by copying it into the module of that name, of which there is one: of
# two threads that load, either may return with the other's launcher. Of 20,000 loads of eight
# launchers by 16 threads 3 to 12 did, on Python 3.11 to 3.13 with `sys.setswitchinterval(1e-6)`; of
# 2,000 by one thread none.
LOADING = threading.Lock()

# Hooks by which a profiler has Triton tell it of every launch. Their own chains are empty unless
# somebody listens; a chain that is another object was put there by somebody.
HOOKS = knobs.runtime
NO_ENTER_HOOK, NO_EXIT_HOOK = HOOKS.launch_enter_hook, HOOKS.launch_exit_hook

# The calls that torch's own Python makes, absent where torch was built without CUDA.
current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", None)
current_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", None)

# Tensor maps one argument of a replayed launch keeps: memory for activations comes back at a few
# addresses, that of weights stays where it is.
MAX_TENSOR_MAPS = 64


class Entry(NamedTuple):
    """A compiled kernel, ready for Triton's C launcher.

    Attributes:
        run: the launcher: grid, stream, ``function``, ``cooperative``, ``overlapped``, scratch
            memory, ``metadata``, hooks, then the kernel's arguments. Pointers may be addresses.
        function: the kernel's handle.
        cooperative: all programs start together.
        overlapped: the kernel may start before the one before it has ended.
        metadata: warps, CTAs of a cluster, bytes of shared memory.
    """

    run: Callable[..., None]
    function: int
    cooperative: bool
    overlapped: bool
    metadata: tuple[int, ...]


def is_watched() -> bool:
    """Whether a profiler has asked Triton to tell it of every launch."""
    enter, leave = HOOKS.launch_enter_hook, HOOKS.launch_exit_hook
    replaced = enter is not NO_ENTER_HOOK or leave is not NO_EXIT_HOOK
    return replaced or bool(NO_ENTER_HOOK.calls or NO_EXIT_HOOK.calls)


def entry_of(kernel: Any) -> Entry | None:
    """The entry of what Triton compiled, or None where its launcher may not be called directly.

    That is an untested Triton, or a kernel that wants scratch memory allocated for each launch.
    """
    if not DIRECT_LAUNCH:
        return None
    launcher = kernel.run
    if launcher.global_scratch_size or launcher.profile_scratch_size:
        return None
    options = launcher.launch_cooperative_grid, launcher.launch_pdl
    return Entry(launcher.launch, kernel.function, *options, kernel.packed_metadata)


def without_encoding(entry: Entry) -> tuple[Callable[..., None], Sequence[Any]] | None:
    """The launcher that takes descriptors already encoded, and how each is encoded.

    Triton encodes descriptors at every launch, in a function around the launcher proper. None if
    that function is not as it was when this was written.
    """
    if not inspect.isfunction(entry.run):
        return entry.run, ()
    inside = inspect.getclosurevars(entry.run).nonlocals
    if not {"launcher", "tensordesc_meta"} <= inside.keys():
        return None
    return inside["launcher"], inside["tensordesc_meta"]


class TensorMaps(dict):
    """The encoded descriptors of one argument, by the address that they describe."""

    def __init__(
        self, encoding: Any, shape: Sequence[int], strides: Sequence[int], padding: str
    ) -> None:
        self._encoding, self._shape, self._strides = encoding, [*shape], [*strides]
        self._padding = padding

    def __missing__(self, address: int) -> Any:
        from triton.backends.nvidia.driver import make_tensordesc_arg

        if len(self) >= MAX_TENSOR_MAPS:
            self.clear()
        described = SimpleNamespace(
            base=SimpleNamespace(data_ptr=lambda: address),
            shape=self._shape,
            strides=self._strides,
            padding=self._padding,
        )
        self[address] = encoded = make_tensordesc_arg(described, self._encoding)[0]
        return encoded
