"""What loading a model takes, told before it is read."""

from __future__ import annotations

import logging
import math
import os
from typing import TYPE_CHECKING

import torch

from ferrum_triton.backends import Backend
from ferrum_triton.models.linear import keeps_packed

if TYPE_CHECKING:
    from ferrum_triton.models.weights import Source

_log = logging.getLogger(__name__)


def tell_what_decoding_takes(source: Source, backend: Backend, dtype: torch.dtype) -> None:
    """Log what weights that cannot stay packed take, before any is read."""
    matrices = [p for p in source.packed() if not p.is_stack]  # experts stay packed everywhere
    decoded = [p for p in matrices if not keeps_packed(backend, p.kind)]
    if not decoded:
        return
    needed = sum(p.numel for p in decoded) * dtype.itemsize
    short = backend.device.type == "cpu" and needed > _physical_memory()
    _log.log(
        logging.WARNING if short else logging.INFO,
        "%s: %s of packed weights take %s as %s, which the %s backend multiplies by%s",
        source.path.name,
        _megabytes(sum(p.nbytes for p in decoded)),
        _megabytes(needed),
        str(dtype).removeprefix("torch."),
        backend.name,
        "; this machine has less memory than that" if short else "",
    )


def _physical_memory() -> float:
    """This machine's memory in bytes; infinite where the system does not say."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        return math.inf


def _megabytes(nbytes: int) -> str:
    return f"{nbytes / 1e6:,.0f} MB"
