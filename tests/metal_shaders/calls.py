"""The ops that have shaders, and which of their calls run them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ferrum_triton.backends import metal
from ferrum_triton.backends.metal import quant
from ferrum_triton.registry import OPS, Op

metal.load_shaders()
SHADED = [pytest.param(op, id=name) for name, op in OPS.items() if "metal" in op.impls]


def with_shader(op: Op) -> dict[str, Any]:
    """Values of the axes that decide whether a call runs a shader, or its definition."""
    pools = {"cache_dtype": (torch.int8, None)} if "cache_dtype" in op.axes else {}
    return {**kinds_of(op), **pools}


def kinds_of(op: Op) -> dict[str, Any]:
    """Of these axes, those that are formats of packed weights."""
    axes = [name for name in op.axes if name in ("kind", "gate_kind", "up_kind")]
    return dict.fromkeys(axes, tuple(quant.KINDS))
