"""Flat device buffers from host data and back: one-dimensional torch tensors.

For callers that hold numbers rather than tensors. A value the buffer's dtype cannot hold is an
error: an integer out of range, a fraction among integers, a finite number that would overflow.
Whatever copies host data is refused while a graph is captured, since a replay would not see it.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from ferrum_triton.contract import ACTIVATIONS
from ferrum_triton.errors import InputError
from ferrum_triton.runtime.context import refuse_in_capture
from ferrum_triton.types import Dtype, SrcDtype


def alloc(n: int, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu") -> Tensor:
    """[n] uninitialised activations, of float32, float16 or bfloat16.

    Raises:
        InputError: n is negative, or the dtype is another.
    """
    _check_activation("alloc", dtype)
    return alloc_typed(dtype, n, device)


def alloc_typed(dtype: Dtype | torch.dtype, n: int, device: torch.device | str = "cpu") -> Tensor:
    """[n] uninitialised elements.

    Raises:
        InputError: n is negative, or the dtype is not in :class:`Dtype`.
    """
    if n < 0:
        _reject("alloc_typed", "n", str(n), "0 or more", "Pass a number of elements.")
    return torch.empty(n, dtype=_element_type("alloc_typed", dtype), device=device)


def from_slice(
    data: Sequence[float] | Tensor,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> Tensor:
    """Host numbers as [n] activations, rounded to the dtype.

    Raises:
        InputError: the dtype is not one of activations, or cannot hold a value.
    """
    _check_activation("from_slice", dtype)
    return _upload("from_slice", data, dtype, device)


def from_slice_typed(
    data: Sequence[float] | Tensor,
    dtype: Dtype | torch.dtype,
    device: torch.device | str = "cpu",
) -> Tensor:
    """Host numbers as [n] elements of ``dtype``.

    Raises:
        InputError: the dtype is not in :class:`Dtype`, or cannot hold a value.
    """
    kind = _element_type("from_slice_typed", dtype)
    return _upload("from_slice_typed", data, kind, device)


def write_typed(dst: Tensor, data: Sequence[float] | Tensor) -> None:
    """Overwrite the first ``len(data)`` elements of ``dst`` with host numbers.

    Raises:
        InputError: ``dst`` is shorter, not contiguous, or cannot hold a value; it is unchanged.
    """
    _write("write_typed", dst, data)


def write_f32_to_activation(dst: Tensor, data: Sequence[float] | Tensor) -> None:
    """:func:`write_typed` into an activation buffer, rounding to its dtype."""
    _check_activation("write_f32_to_activation", dst.dtype)
    _write("write_f32_to_activation", dst, data)


def zero_buffer(buffer: Tensor, n: int | None = None) -> None:
    """Zero the first ``n`` elements, or all; may be captured in a graph.

    Raises:
        InputError: the buffer is shorter, or not contiguous.
    """
    _first("zero_buffer", buffer, buffer.numel() if n is None else n).zero_()


def to_vec(buffer: Tensor, n: int | None = None) -> list[float]:
    """The first ``n`` elements, or all, on the host; integers stay exact integers. Waits for them.

    Raises:
        InputError: the buffer is shorter, or not contiguous.
    """
    refuse_in_capture("to_vec", buffer.device, "Read back after the replay.")
    first = _first("to_vec", buffer, buffer.numel() if n is None else n)
    return (first.float() if first.is_floating_point() else first).tolist()


def from_weight_bytes(raw: Any, src: SrcDtype, device: torch.device | str = "cpu") -> Tensor:
    """The weights in little-endian bytes, in their own dtype, so that no range is lost.

    On a CPU this is a view of ``raw``, which must then stay as it is; another device gets the one
    copy that takes them there.

    Args:
        raw: a bytes-like object, e.g. a slice of a memory-mapped file.
        src: the element type of the bytes.
        device: the device the weights go to.

    Raises:
        InputError: the bytes are not whole elements.
    """
    try:
        data = memoryview(raw).cast("B")
    except TypeError as error:
        _reject("from_weight_bytes", "raw", str(error), "a bytes-like object", "Pass the bytes.")
    if data.nbytes % src.bytes_per_elem:
        allowed = f"a multiple of {src.bytes_per_elem}, the bytes of a {src.name}"
        advice = "The data is truncated, or of another dtype."
        _reject("from_weight_bytes", "raw", f"{data.nbytes} bytes", allowed, advice)
    if data.nbytes == 0:
        return torch.empty(0, dtype=src.value, device=device)
    with warnings.catch_warnings():
        # Weights are only read, so memory that may not be written is as good.
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        return torch.frombuffer(data, dtype=src.value).to(device)


def _upload(what: str, data: Any, dtype: torch.dtype, device: torch.device | str) -> Tensor:
    device = torch.device(device)
    refuse_in_capture(what, device, "Upload before the capture.")
    return _host(what, data, dtype).to(device)


def _write(what: str, dst: Tensor, data: Any) -> None:
    refuse_in_capture(what, dst.device, "Write before the replay.")
    values = _host(what, data, dst.dtype)
    _first(what, dst, values.numel()).copy_(values)


def _first(what: str, buffer: Tensor, n: int) -> Tensor:
    if not buffer.is_contiguous():
        got = f"of strides {list(buffer.stride())}"
        _reject(what, "buffer", got, "contiguous", "Pass the tensor it is a view of.")
    if not 0 <= n <= buffer.numel():
        allowed = f"0 to the buffer's {buffer.numel()} elements"
        _reject(what, "n", str(n), allowed, "Allocate a longer buffer.")
    return buffer.view(-1)[:n]


def _host(what: str, data: Any, dtype: torch.dtype) -> Tensor:
    """[n] values on the host in ``dtype``, none of them changed beyond rounding."""
    if isinstance(data, Tensor):
        data = data.detach().cpu()
        data = data.double().numpy() if data.is_floating_point() else data.numpy()
    try:
        values = np.asarray(data)  # doubles and 64-bit integers: nothing is lost yet
    except ValueError as error:
        _reject(what, "data", f"unreadable ({error})", "numbers", "Pass a flat sequence of them.")
    if values.size == 0:
        return torch.empty(0, dtype=dtype)
    if values.ndim != 1 or values.dtype.kind not in "biuf":
        got = f"{values.dtype}{list(values.shape)}"
        _reject(what, "data", got, "numbers in one dimension", "Flatten it.")
    if dtype.is_floating_point:
        limit = torch.finfo(dtype).max
        wide = values.astype(np.float64)
        beyond = np.isfinite(wide) & (np.abs(wide) > limit)
        if beyond.any():
            got = f"holding {values[beyond][0]}"
            _reject(what, "data", got, f"at most {limit} in size", "Choose a wider dtype.")
        return torch.from_numpy(wide).to(dtype)
    limits = torch.iinfo(dtype)
    low, high = values.min(), values.max()
    if values.dtype.kind == "f" or low < limits.min or high > limits.max:
        got = f"{values.dtype} in [{low}, {high}]"
        allowed = f"integers in [{limits.min}, {limits.max}]"
        _reject(what, "data", got, allowed, "Choose another dtype.")
    return torch.from_numpy(values.astype(np.int64)).to(dtype)


def _element_type(what: str, dtype: Dtype | torch.dtype) -> torch.dtype:
    try:
        return Dtype(dtype).value
    except ValueError:
        names = ", ".join(str(member.value)[6:] for member in Dtype)
        _reject(what, "dtype", str(dtype), names, "Choose one of these.")


def _check_activation(what: str, dtype: torch.dtype) -> None:
    if dtype not in ACTIVATIONS:
        names = ", ".join(str(dtype)[6:] for dtype in ACTIVATIONS)
        _reject(what, "dtype", str(dtype), names, "Use the typed functions for other dtypes.")


def _reject(what: str, argument: str, got: str, allowed: str, advice: str) -> NoReturn:
    raise InputError(what, argument, got, allowed, advice)
