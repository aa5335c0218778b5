"""Backends, found by name: one file each."""

from __future__ import annotations

import functools
from importlib import import_module
from typing import Any

import torch

from ferrum_triton.backends.backend import Backend
from ferrum_triton.errors import BackendUnavailable
from ferrum_triton.registry import LIB, ON_DECLARE, OPS, Op

# Where each backend looks for an op, in this order.
PROVIDERS = {
    "cuda": ("triton", "blas"),
    "cpu": ("torch", "blas", "reference"),
    "interpret": ("triton", "blas"),
    "metal": ("metal", "torch", "blas", "reference"),
}
NAMES = tuple(PROVIDERS)

# The backend behind torch.ops.ferrum.* for each of torch's own dispatch keys.
DISPATCH = {"CUDA": "cuda", "CPU": "cpu", "MPS": "metal"}

__all__ = ["DISPATCH", "NAMES", "PROVIDERS", "Backend", "get_backend", "serve_dispatcher"]


def get_backend(name: str = "auto") -> Backend:
    """Return the backend ``name``, one object per name and process.

    Args:
        name: ``"cuda"`` (Triton kernels), ``"cpu"`` (torch reference math), ``"interpret"`` (the
            Triton kernels, run by Triton's interpreter on CPU tensors), ``"metal"``, or ``"auto"``:
            CUDA where torch has a device, else Metal, else CPU.

    Raises:
        BackendUnavailable: the name is unknown, or the device or library behind it is absent.
    """
    if name == "auto":
        mps = torch.backends.mps.is_available()
        name = "cuda" if torch.cuda.is_available() else "metal" if mps else "cpu"
    if name not in NAMES:
        raise BackendUnavailable(
            f"unknown backend {name!r}; choose from {', '.join((*NAMES, 'auto'))}"
        )
    return _load(name)


@functools.cache
def _load(name: str) -> Backend:
    device = import_module(f"ferrum_triton.backends.{name}").prepare()
    return Backend(name, device, PROVIDERS[name])


def serve_dispatcher() -> None:
    """Put every op, present and future, behind ``torch.ops.ferrum``."""
    for op in OPS.values():
        _serve(op)
    ON_DECLARE.append(_serve)


def _serve(op: Op) -> None:
    """Register ``op`` for each dispatch key; the backend behind it loads when first called."""
    for key, backend in DISPATCH.items():
        LIB.impl(op.name, _forward(op.name, backend), key)
        if op.has_out:
            LIB.impl(f"{op.name}.out", _forward_out(op, backend), key)


def _forward(name: str, backend: str) -> Any:
    door: Any = None

    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal door
        if door is None:
            door = getattr(_load(backend), name)
        return door(*args, **kwargs)

    return call


def _forward_out(op: Op, backend: str) -> Any:
    names = [f"out{i}" for i in range(op.num_outputs)]

    def call(*args: Any, **kwargs: Any) -> None:
        outs = tuple(kwargs.pop(name) for name in names)
        getattr(_load(backend), op.name)(*args, **kwargs, out=outs if len(outs) > 1 else outs[0])

    return call
