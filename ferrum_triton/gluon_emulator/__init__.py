"""Runs Gluon kernels for Hopper in Python, without a GPU, and finds missing synchronisation."""

from ferrum_triton.gluon_emulator.assembly import twin_of
from ferrum_triton.gluon_emulator.errors import (
    Deadlock,
    EmulationError,
    Misuse,
    OutOfBounds,
    Race,
)
from ferrum_triton.gluon_emulator.idle import idle_barriers
from ferrum_triton.gluon_emulator.run import run

__all__ = [
    "Deadlock",
    "EmulationError",
    "Misuse",
    "OutOfBounds",
    "Race",
    "idle_barriers",
    "run",
    "twin_of",
]
