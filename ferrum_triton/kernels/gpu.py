"""The GPU a launch is chosen for: its architecture and the limits a configuration has to keep.

A :class:`Gpu` describes a real device, the one that meta tensors stand for, or the interpreter.
Launch choices take it in place of a device, so that they can be asked about any GPU.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from ferrum_triton.kernels.jit import CPU_PROCESSORS, META_PROCESSORS, capability, processors

# Bytes of shared memory a program may use, by architecture.
SHARED_LIMITS = {
    "sm_80": 166_912,
    "sm_86": 101_376,
    "sm_89": 101_376,
    "sm_90": 232_448,
    "sm_100": 232_448,
    "sm_120": 101_376,
    "gfx942": 65_536,
}

# Assumed of an architecture that is not listed, and of the interpreter: the least listed.
LEAST_SHARED_LIMIT = 65_536

# The architecture meant by a capability of (0, 0), which is how launchers see AMD's GPUs.
AMD_ARCH = "gfx942"

INTERPRETER = "interpreter"


@dataclass(frozen=True)
class Gpu:
    """What a launch choice may depend on.

    Attributes:
        capability: compute capability of an NVIDIA GPU; (0, 0) of any other device.
        shared_limit: bytes of shared memory a program may use.
        num_sms: streaming multiprocessors, which a grid should fill.
        arch: the architecture's name, such as ``"sm_90"`` or ``"gfx942"``.
    """

    capability: tuple[int, int]
    shared_limit: int
    num_sms: int
    arch: str

    @property
    def warp_size(self) -> int:
        """Threads of a warp."""
        return 64 if self.arch.startswith("gfx9") else 32

    @property
    def waits_for_stores(self) -> bool:
        """Whether a barrier is known to wait for the stores of all of a program's warps.

        Then one of its threads can tell another program that they are there. Of AMD's GPUs none
        has been seen to.
        """
        return not self.arch.startswith("gfx")

    @property
    def max_warps(self) -> int:
        """Warps of the largest program, which has 1024 threads."""
        return 1024 // self.warp_size


def gpu_of(device: torch.device) -> Gpu:
    """The GPU behind ``device``; for meta tensors, the one ``record_launches`` was told of."""
    return gpu_of_capability(capability(device)) if device.type == "meta" else _gpu_of(device)


@functools.cache
def gpu_of_capability(found: tuple[int, int]) -> Gpu:
    """The GPU that meta tensors stand for while launches are recorded for a capability."""
    return gpu_of_arch(AMD_ARCH if found == (0, 0) else arch_of(found))


@functools.cache
def gpu_of_arch(arch: str) -> Gpu:
    """A GPU of an architecture, where there is no device to ask."""
    number = arch.removeprefix("sm_")
    found = (int(number[:-1]), int(number[-1])) if number.isdecimal() else (0, 0)
    shared = SHARED_LIMITS.get(arch, LEAST_SHARED_LIMIT)
    return Gpu(found, shared, META_PROCESSORS, arch)


@functools.cache
def _gpu_of(device: torch.device) -> Gpu:
    if device.type != "cuda":
        return Gpu((0, 0), LEAST_SHARED_LIMIT, CPU_PROCESSORS, INTERPRETER)
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip is not None:
        arch = properties.gcnArchName.split(":")[0]
        shared = properties.shared_memory_per_block
    else:
        arch = arch_of(capability(device))
        shared = properties.shared_memory_per_block_optin
    return Gpu(capability(device), shared, processors(device), arch)


def arch_of(found: tuple[int, int]) -> str:
    """The name of an NVIDIA architecture: ``"sm_90"`` of (9, 0)."""
    return f"sm_{found[0]}{found[1]}"
