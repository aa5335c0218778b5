"""Packed weights from raw bytes, which must be exactly as many as their sizes say.

``data`` is any bytes-like object (bytes, a slice of a mapped file) or a uint8 tensor, in the order
of a GGUF file: experts, rows, blocks of a row. On the CPU nothing is repacked: the result is a view
of ``data``, which must then stay as it is. Weights that go to a GPU are laid out there in planes
(:mod:`ferrum_triton.quant.planes`), some megabytes at a time; ``planes=False`` leaves them as the
file has them, and ``planes=True`` lays them out on any device.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import Any, NoReturn, TypeAlias

import torch
from torch import Tensor

from ferrum_triton.errors import InputError
from ferrum_triton.quant.formats import FORMATS
from ferrum_triton.quant.tensor import FusedTensor, QuantizedTensor

Device: TypeAlias = torch.device | str | None


def load_quant(
    kind: str,
    data: Any,
    num_rows: int,
    num_cols: int,
    device: Device = None,
    *,
    planes: bool | None = None,
) -> QuantizedTensor:
    """A matrix W [num_rows, num_cols]: ``gemm_quant`` computes a · Wᵀ.

    Args:
        kind: a name in :data:`~ferrum_triton.quant.FORMATS`.
        data: num_rows · FORMATS[kind].row_bytes(num_cols) bytes.
        num_rows, num_cols: of the decoded matrix; num_cols is a multiple of the block size.
        device: where the weights go; None leaves them where they are.
        planes: lay them out in planes; None does so on a GPU, for kinds that have them.

    Raises:
        InputError: the kind is unknown, the sizes are negative or no whole number of blocks, or
            the bytes are of another number; the message names which.
    """
    weight = _load("load_quant", "data", kind, data, (num_rows,), num_cols, device)
    return weight.in_planes() if _wants_planes(weight, planes) else weight


def load_quant_experts(
    kind: str,
    data: Any,
    num_experts: int,
    num_rows: int,
    num_cols: int,
    device: Device = None,
    *,
    planes: bool | None = None,
) -> QuantizedTensor:
    """A stack W [num_experts, num_rows, num_cols], as the ops ending in ``_moe_id`` take.

    Raises:
        InputError: as :func:`load_quant`.
    """
    sizes = (num_experts, num_rows)
    weight = _load("load_quant_experts", "data", kind, data, sizes, num_cols, device)
    return weight.in_planes() if _wants_planes(weight, planes) else weight


def load_quant_fused(
    parts: Sequence[tuple[str, Any, int]],
    num_cols: int,
    device: Device = None,
    *,
    planes: bool | None = None,
) -> FusedTensor:
    """Matrices of several kinds over the same columns, stacked along their rows.

    Args:
        parts: (kind, data, rows) of each, as in :func:`load_quant`. Neighbours of one kind are
            joined.
        num_cols: of all parts.
        device: where the weights go; None leaves them where they are.
        planes: as in :func:`load_quant`.

    Raises:
        InputError: there are no parts, or as :func:`load_quant`; the part's number is named.
    """
    op = "load_quant_fused"
    if not parts:
        _reject(op, "parts", "empty", "at least one part", "Pass (kind, data, rows) of each.")
    weight = FusedTensor.of(
        [
            _load(op, f"parts[{i}]", kind, data, (rows,), num_cols, device)
            for i, (kind, data, rows) in enumerate(parts)
        ]
    )
    return weight.in_planes() if _wants_planes(weight, planes) else weight


def _wants_planes(weight: QuantizedTensor | FusedTensor, planes: bool | None) -> bool:
    return weight.device.type == "cuda" if planes is None else planes


def _load(
    op: str,
    name: str,
    kind: str,
    data: Any,
    sizes: tuple[int, ...],
    num_cols: int,
    device: Device,
) -> QuantizedTensor:
    kind = str(kind)  # the members of types.GgufQuantType too
    if kind not in FORMATS:
        what = "kind" if name == "data" else name
        _reject(op, what, f"of kind {kind!r}", ", ".join(FORMATS), "Convert the weights.")
    if min(*sizes, num_cols) < 0:
        _reject(op, name, f"of sizes {[*sizes, num_cols]}", "sizes of at least 0", "Check them.")
    block_size = FORMATS[kind].block_size
    if num_cols % block_size:
        allowed = f"a multiple of {block_size}, the block size of {kind}"
        _reject(op, "num_cols", str(num_cols), allowed, "Rows are whole blocks.")
    shape = (*sizes, FORMATS[kind].row_bytes(num_cols))
    stored = _as_bytes(op, name, data)
    if stored.numel() != math.prod(shape):
        allowed = f"{math.prod(shape)} bytes, for {kind} of shape {[*sizes, num_cols]}"
        advice = "The data is cut off, or of another kind or shape."
        _reject(op, name, f"{stored.numel()} bytes", allowed, advice)
    blocks = stored.view(shape)
    return QuantizedTensor(blocks if device is None else blocks.to(device), kind)


def _as_bytes(op: str, name: str, data: Any) -> Tensor:
    """uint8 [num_bytes], a view of ``data``."""
    if isinstance(data, Tensor):
        if data.dtype != torch.uint8:
            _reject(op, name, f"a tensor of {data.dtype}", "uint8", "View the bytes as uint8.")
        if not data.is_contiguous():
            got = f"of strides {list(data.stride())}"
            _reject(op, name, got, "contiguous bytes", "Pass .contiguous().")
        return data.view(-1)
    try:
        buffer = memoryview(data).cast("B")
    except (TypeError, ValueError) as error:
        _reject(op, name, f"unreadable as bytes ({error})", "bytes-like", "Pass the bytes.")
    if buffer.nbytes == 0:
        return torch.empty(0, dtype=torch.uint8)
    with warnings.catch_warnings():
        # Weights are only read, so memory that may not be written is as good.
        warnings.filterwarnings("ignore", "The given buffer is not writable")
        return torch.frombuffer(buffer, dtype=torch.uint8)


def _reject(op: str, argument: str, got: str, allowed: str, advice: str) -> NoReturn:
    raise InputError(op, argument, got, allowed, advice)
