"""What tensors an op accepts, declared once and checked at every backend's door.

A contract maps each tensor parameter to ``dtypes[dims]``::

    {"x": "T[..., hidden_size]", "weight": "float[hidden_size]", "ids": "int[num_tokens]"}

``T`` is one activation dtype shared by every parameter that names it; the other words are the
classes in :data:`DTYPES`. A dimension is a name (equal wherever it appears in one call), a number,
or ``...`` for any leading dimensions. The last dimension must have stride 1; every other stride is
free. A tensor that the op writes overlaps neither itself nor another tensor of the call; where
``over`` names an input, the output may be exactly that. Tensors lie on one device, but for those
that ``in_host_memory`` names: they may lie in pinned memory of the host as well.
"""

from __future__ import annotations

import re
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch._subclasses import FakeTensor

from ferrum_triton.errors import InputError
from ferrum_triton.overlap import overlap, overlaps_itself, same_elements

ACTIVATIONS = (torch.float32, torch.float16, torch.bfloat16)

DTYPES: dict[str, tuple[torch.dtype, ...]] = {
    "T": ACTIVATIONS,
    "float": ACTIVATIONS,
    "float32": (torch.float32,),
    "int": (torch.int32, torch.int64),
    "int32": (torch.int32,),
    "int8": (torch.int8,),
    "uint8": (torch.uint8,),
    "flags": (torch.int8, torch.uint8),
    "any": (
        *ACTIVATIONS,
        torch.float64,
        torch.int64,
        torch.int32,
        torch.int16,
        torch.int8,
        torch.uint8,
    ),
}


MAX_FLOAT = torch.finfo(torch.float32).max

# The least that finite floats of these names may be. Of others any number will do.
LEAST = {
    "eps": 0.0,
    "limit": 0.0,
    "softcap": 0.0,
    "softmax_scale": -MAX_FLOAT,
    "query_scale": -MAX_FLOAT,
    "routed_scaling_factor": -MAX_FLOAT,
}


@dataclass(frozen=True)
class TensorSpec:
    """The dtypes and dimensions one parameter may have."""

    text: str
    dtype_class: str
    dims: tuple[str, ...]  # without the leading "..."
    any_leading: bool

    @classmethod
    def parse(cls, text: str) -> TensorSpec:
        match = re.fullmatch(r"(\w+)\[(.*)\]", text)
        if match is None or match[1] not in DTYPES:
            raise ValueError(f"not a tensor spec: {text!r}")
        dims = tuple(part.strip() for part in match[2].split(",") if part.strip())
        any_leading = dims[:1] == ("...",)
        return cls(text, match[1], dims[any_leading:], any_leading)


class Contract:
    """The specs of every tensor parameter of one op."""

    def __init__(
        self,
        op: str,
        specs: Mapping[str, str],
        mutates: tuple[str, ...] = (),
        optional: Container[str] = (),
        over: Container[str] = (),
        in_host_memory: Sequence[str] = (),
    ) -> None:
        self.op = op
        self.optional = optional
        self.over = over
        self.in_host_memory = in_host_memory
        self.specs = {name: TensorSpec.parse(text) for name, text in specs.items()}
        self.mutates = mutates

    def check(self, arguments: Mapping[str, Any], device_type: str | None) -> None:
        """Raise :class:`InputError` unless every tensor of a call meets its spec.

        Args:
            arguments: parameter name to value, for every parameter of the op.
            device_type: where the tensors must lie, e.g. ``"cuda"``. None while a call is traced,
                when tensors have no memory: then dtypes and shapes alone are looked at.
        """
        bound: dict[str, tuple[int, str]] = {}
        first: Tensor | None = None
        shared_dtype: tuple[torch.dtype, str] | None = None
        for name, spec in self.specs.items():
            value = arguments[name]
            if value is None and name in self.optional:
                continue
            if not isinstance(value, Tensor):
                got = "None" if value is None else f"a {type(value).__name__}"
                self._reject(name, got, f"a tensor {spec.text}")
            first = value if first is None else first
            if device_type is not None:
                self._check_device(name, value, first, device_type)
            if value.dtype not in DTYPES[spec.dtype_class]:
                allowed = ", ".join(_name(dtype) for dtype in DTYPES[spec.dtype_class])
                self._reject(name, _name(value.dtype), allowed, f"Convert {name} with .to().")
            if spec.dtype_class == "T":
                if shared_dtype is not None and value.dtype != shared_dtype[0]:
                    want, owner = shared_dtype
                    allowed = f"{_name(want)}, the dtype of {owner}"
                    self._reject(name, _name(value.dtype), allowed, f"Convert {name} with .to().")
                shared_dtype = (value.dtype, name)
            self._check_shape(name, value, spec, bound)
            if device_type is not None:
                self._check_layout(name, value)

    def check_memory(self, arguments: Mapping[str, Any], outs: Sequence[Tensor]) -> None:
        """Raise :class:`InputError` where what a call writes overlaps its other tensors."""
        tensors = [(n, arguments[n]) for n in self.specs if arguments[n] is not None]
        written = [(n, t) for n, t in tensors if n in self.mutates] + [("out", t) for t in outs]
        for i, (name, value) in enumerate(written):
            if overlaps_itself(value):
                got = f"overlapping itself (strides {list(value.stride())})"
                self._reject(name, got, "memory of its own, since the op writes it", "Clone it.")
            inputs = [(n, t) for n, t in tensors if n not in self.mutates]
            for other_name, other in (*inputs, *written[:i]):
                is_over = other_name in self.over and same_elements(value, other)
                if not is_over and overlap(value, other):
                    got = f"in memory that {other_name} has a part of"
                    self._reject(
                        name, got, "memory of its own, since the op writes it", "Clone it."
                    )

    def _check_device(self, name: str, value: Tensor, first: Tensor, device_type: str) -> None:
        if name in self.in_host_memory and value.is_cpu and value.is_pinned():
            return
        if value.device.type != device_type:
            advice = f"Move it with .to({device_type!r}) or choose the backend of its device."
            self._reject(name, f"on {value.device}", f"on {device_type}", advice)
        if value.device != first.device:
            self._reject(name, f"on {value.device}", f"on {first.device}, as the first tensor")

    def _check_shape(
        self, name: str, value: Tensor, spec: TensorSpec, bound: dict[str, tuple[int, str]]
    ) -> None:
        shape = tuple(value.shape)
        if len(shape) < len(spec.dims) or (len(shape) > len(spec.dims) and not spec.any_leading):
            self._reject(name, f"of shape {list(shape)}", f"shape {spec.text}")
        for dim, size in zip(spec.dims, shape[len(shape) - len(spec.dims) :], strict=True):
            want, owner = (
                (int(dim), dim) if dim.isdecimal() else bound.setdefault(dim, (size, name))
            )
            if size != want:
                source = "" if owner == dim else f" from {owner}"
                self._reject(
                    name, f"of shape {list(shape)}", f"{spec.text} with {dim} = {want}{source}"
                )

    def _check_layout(self, name: str, value: Tensor) -> None:
        if isinstance(value, FakeTensor):
            advice = f"Trace torch.ops.ferrum.{self.op}."
            self._reject(name, "a FakeTensor", "a tensor with memory", advice)
        if value.is_neg():
            advice = f"Pass {name}.resolve_neg()."
            self._reject(name, "a negative view", "the numbers that lie in memory", advice)
        if value.numel() and value.dim() and value.size(-1) > 1 and value.stride(-1) != 1:
            got = f"of stride {value.stride(-1)} in the last dimension"
            self._reject(name, got, "stride 1 there", f"Pass {name}.contiguous().")

    def _reject(self, argument: str, got: str, allowed: str, advice: str = "") -> NoReturn:
        raise InputError(
            self.op, argument, got, allowed, advice or f"See the docstring of {self.op}."
        )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
