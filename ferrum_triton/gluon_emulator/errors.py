"""What the emulator raises about a kernel."""

from ferrum_triton.errors import FerrumError


class EmulationError(FerrumError, RuntimeError):
    """A kernel that would not be right on a GPU, or that the emulator cannot run."""


class Race(EmulationError):
    """Two accesses of which one writes, and nothing orders them."""


class Deadlock(EmulationError):
    """Every partition waits for what nobody will do, or the time given was not enough."""


class Misuse(EmulationError):
    """A rule of the language or of the hardware is broken, or something is not emulated."""


class OutOfBounds(EmulationError):
    """An address outside of the tensor or buffer that it was derived from."""
