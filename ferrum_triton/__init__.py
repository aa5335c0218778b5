"""Hand-written Triton kernels for every operation of a transformer decoder step.

Two doors to the same ops: ``get_backend("cuda").rms_norm(x, weight)`` calls the kernel's launcher
directly, ``torch.ops.ferrum.rms_norm(x, weight)`` goes through torch's dispatcher and is what
``torch.compile`` and ``torch.export`` trace. Importing this package needs no GPU and no triton.

The command line alone imports what a command needs when it needs it: help would wait for torch.
"""

from ferrum_triton.cli import is_this_process

__version__ = "0.1.0"

__all__ = [
    "OPS",
    "Backend",
    "BackendUnavailable",
    "FerrumError",
    "FileError",
    "InputError",
    "MissingKernel",
    "UnknownOp",
    "get_backend",
    "ops",
]

if not is_this_process():
    from ferrum_triton import ops
    from ferrum_triton.backends import Backend, get_backend, serve_dispatcher
    from ferrum_triton.errors import (
        BackendUnavailable,
        FerrumError,
        FileError,
        InputError,
        MissingKernel,
        UnknownOp,
    )
    from ferrum_triton.registry import OPS

    serve_dispatcher()
