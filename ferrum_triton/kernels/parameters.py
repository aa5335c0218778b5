"""The values a launch parameter may have, by which a table's row is checked.

A :class:`Parameter` declares the type and the range of one constexpr or compiler option.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ferrum_triton.kernels.gpu import Gpu

Dim = int | str | bool
Value = int | str | bool | None
Config = Mapping[str, Value]
"""Constexprs and compiler options of a launch, e.g. ``{"BLOCK_H": 4096, "num_warps": 8}``.

An op that has several kernels names the one to launch under ``"path"``.
"""

# Elements of the largest tensor that Triton compiles.
MAX_TILE = 1 << 20
MAX_INT = 2**31 - 1
# Values of a tensor that a thread may hold: of 255 registers, some are for addresses.
MAX_PER_THREAD = 128


@dataclass(frozen=True)
class Parameter:
    """The values one parameter may have.

    Attributes:
        least: smallest integer.
        most: largest integer.
        power_of_two: whether integers have to be powers of two.
        choices: all values there are, in place of a range of integers.
        optional: whether None is a value too.
    """

    least: int = 0
    most: int = MAX_INT
    power_of_two: bool = False
    choices: tuple[Value, ...] = ()
    optional: bool = False

    def refusal(self, value: Value) -> str:
        """The reason why the parameter may not have ``value``, "" if it may."""
        if value is None and self.optional:
            return ""
        if self.choices:
            known = any(value == choice and type(value) is type(choice) for choice in self.choices)
            return "" if known else f"not one of {self.choices}"
        in_range = type(value) is int and self.least <= value <= self.most
        if in_range and not (self.power_of_two and value & (value - 1)):
            return ""
        noun = "a power of two" if self.power_of_two else "an integer"
        return f"not {noun} from {self.least} to {self.most}"


def power_of_two(least: int = 1, most: int = MAX_TILE) -> Parameter:
    """A power of two, such as the size of a tile."""
    return Parameter(least, most, power_of_two=True)


def integer(least: int = 0, most: int = MAX_INT) -> Parameter:
    """A number of something."""
    return Parameter(least, most)


def one_of(*choices: Value) -> Parameter:
    """A value of a few: a path's name, a flag."""
    return Parameter(choices=choices)


# Compiler options, which every kernel may be given.
OPTIONS = {
    "num_warps": power_of_two(1, 32),
    "num_stages": integer(1, 16),
    "num_ctas": power_of_two(1, 8),
    "maxnreg": Parameter(0, 255, optional=True),
    "enable_fp_fusion": one_of(True, False),
}


def tile_refusal(gpu: Gpu, config: Config, values: int) -> str:
    """Why a program of ``config`` cannot hold a tile of ``values`` in registers, or ""."""
    per_thread = values // (gpu.warp_size * config["num_warps"])
    if per_thread > MAX_PER_THREAD:
        return f"{values} values are {per_thread} a thread, more than {MAX_PER_THREAD}"
    return ""


def shared_refusal(gpu: Gpu, num_bytes: int) -> str:
    """Why a program cannot have that much shared memory, or ""."""
    if num_bytes > gpu.shared_limit:
        return f"{num_bytes} bytes of shared memory are more than {gpu.shared_limit}"
    return ""


def gpu_refusal(gpu: Gpu, config: Config) -> str:
    """Why a GPU cannot launch with the compiler options of ``config``, or ""."""
    if (warps := config.get("num_warps") or 1) > gpu.max_warps:
        return f"num_warps is {warps}, and {gpu.arch} has {gpu.max_warps} a program"
    if (ctas := config.get("num_ctas") or 1) > 1 and gpu.capability < (9, 0):
        return f"num_ctas is {ctas}, and {gpu.arch} has no clusters"
    return ""
