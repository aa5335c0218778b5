"""Weight matrices in packed form."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import NoReturn

import torch
from torch import Tensor

from ferrum_triton.errors import InputError
from ferrum_triton.quant.formats import BlockFormat
from ferrum_triton.quant.fp8 import Fp8Blocks
from ferrum_triton.quant.kinds import KINDS, dequantize_rows, file_kind, format_of, is_kind
from ferrum_triton.quant.planes import PLANE_FORMATS, SUFFIX, PlaneFormat, from_planes, to_planes


@dataclass(frozen=True, eq=False)
class QuantizedTensor:
    """Packed rows and the name of their format.

    Attributes:
        blocks: uint8 [rows, row_bytes], or [experts, rows, row_bytes], as stored in a GGUF file,
            or in planes (:mod:`ferrum_triton.quant.planes`).
        kind: a name in :data:`~ferrum_triton.quant.FORMATS`; with ``":planes"`` behind it for the
            latter.

    Raises:
        InputError: the kind is unknown, or blocks has another dtype or rank, or holds no whole
            number of blocks in a row.
    """

    blocks: Tensor
    kind: str

    def __post_init__(self) -> None:
        if not is_kind(self.kind):
            advice = "Convert the file to one of these."
            _reject("kind", repr(self.kind), ", ".join(KINDS), advice)
        blocks = self.blocks
        if blocks.dtype != torch.uint8:
            _reject("blocks", str(blocks.dtype), "uint8", "View the stored bytes as uint8.")
        if blocks.dim() not in (2, 3):
            allowed = "[rows, row_bytes] or [experts, rows, row_bytes]"
            _reject("blocks", f"of shape {list(blocks.shape)}", allowed, "Reshape it.")
        if not self.format.is_row(blocks.shape[-1]):
            allowed = f"rows of whole {self.kind} blocks, {self.format.block_bytes} bytes each"
            advice = "The tensor is truncated, or of another format."
            _reject("blocks", f"of shape {list(blocks.shape)}", allowed, advice)

    @classmethod
    def stack(cls, matrices: Sequence[QuantizedTensor]) -> QuantizedTensor:
        """Experts' matrices of one kind and shape as one stack, an expert each.

        Raises:
            InputError: there is none, or one has another kind, shape or device than the first.
        """
        if not matrices:
            _reject("matrices", "none", "at least one", "Name the matrices of all experts.")
        first = matrices[0]
        for number, matrix in enumerate(matrices):
            if matrix.blocks.dim() != 2:
                got = f"{list(matrix.shape)} at {number}"
                _reject("matrices", got, "matrices [rows, K]", "Stack experts one by one.")
            if (matrix.kind, matrix.shape) != (first.kind, first.shape):
                got = f"{matrix.kind} of {list(matrix.shape)} at {number}"
                allowed = f"{first.kind} of {list(first.shape)}, as the first is"
                _reject("matrices", got, allowed, "Decode those of other kinds: dequantize().")
            if matrix.device != first.device:
                got, advice = f"{matrix.device} at {number}", "Move them to one device: to(device)."
                _reject("matrices", got, f"{first.device}, as the first is", advice)
        return cls(torch.stack([matrix.blocks for matrix in matrices]), first.kind)

    def expert(self, index: int) -> QuantizedTensor:
        """The matrix of one expert of a stack: a view of its memory.

        Raises:
            InputError: this is no stack, or has no such expert.
        """
        if self.blocks.dim() != 3:
            _reject("blocks", f"of shape {list(self.blocks.shape)}", "a stack", "It is one matrix.")
        if not 0 <= index < len(self.blocks):
            allowed = f"0 to {len(self.blocks) - 1}, of {len(self.blocks)} experts"
            _reject("index", str(index), allowed, "Count experts from 0.")
        return replace(self, blocks=self.blocks[index])

    @property
    def format(self) -> BlockFormat | PlaneFormat:
        return format_of(self.kind)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the decoded tensor: ([experts,] rows, K)."""
        return (*self.blocks.shape[:-1], self.format.row_weights(self.blocks.shape[-1]))

    @property
    def device(self) -> torch.device:
        return self.blocks.device

    def to(self, device: torch.device | str) -> QuantizedTensor:
        """The same weights on ``device``."""
        return replace(self, blocks=self.blocks.to(device))

    @property
    def has_planes(self) -> bool:
        """Whether :meth:`in_planes` lays the weights out anew."""
        return self.kind + SUFFIX in PLANE_FORMATS

    def in_planes(self) -> QuantizedTensor:
        """The same weights in planes, as the fastest kernels take them; formats without stay."""
        if not self.has_planes:
            return self
        return QuantizedTensor(to_planes(self.blocks, self.kind), self.kind + SUFFIX)

    def as_in_file(self) -> QuantizedTensor:
        """The same weights as a GGUF file stores them, to the bit."""
        if self.kind not in PLANE_FORMATS:
            return self
        kind = file_kind(self.kind)
        return QuantizedTensor(from_planes(self.blocks, kind), kind)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Decode with torch: the reference. ``backend.dequantize`` does it by kernel."""
        return dequantize_rows(self.blocks, self.kind).to(dtype)


@dataclass(frozen=True, eq=False)
class FusedTensor:
    """Matrices over the same K stacked along their rows, each kept in its own format.

    What Q, K and V of a layer are, where a file holds V in more bits. One product with each part
    fills that part's columns of the whole.

    Attributes:
        parts: matrices [rows_i, K], packed, in FP8 or dense.

    Raises:
        InputError: there are no parts, one is no matrix, or their K differ.
    """

    parts: tuple[Tensor | QuantizedTensor | Fp8Blocks, ...]

    def __post_init__(self) -> None:
        if not self.parts:
            _reject_parts("empty", "at least one matrix", "Leave the layer out.")
        shapes = [tuple(part.shape) for part in self.parts]
        if any(len(shape) != 2 or shape[1] != shapes[0][-1] for shape in shapes):
            advice = "Only matrices of as many columns stack."
            _reject_parts(f"of shapes {[list(s) for s in shapes]}", "[rows_i, K] each", advice)

    @classmethod
    def of(cls, parts: Sequence[Tensor | QuantizedTensor | Fp8Blocks]) -> FusedTensor:
        """Stack ``parts``, copying neighbours of one format into one, which is one product.

        Parts in planes stay apart: join them as the file has them.
        """
        joined: list[Tensor | QuantizedTensor | Fp8Blocks] = []
        for part in cls(tuple(parts)).parts:
            both = _joined(joined[-1], part) if joined else None
            if both is None:
                joined.append(part)
            else:
                joined[-1] = both
        return cls(tuple(joined))

    @property
    def shape(self) -> tuple[int, int]:
        """(rows of all parts, K)."""
        return sum(part.shape[0] for part in self.parts), self.parts[0].shape[1]

    @property
    def columns(self) -> tuple[slice, ...]:
        """Where each part's products lie in those of the whole."""
        ends = accumulate((part.shape[0] for part in self.parts), initial=0)
        return tuple(slice(start, end) for start, end in pairwise(ends))

    @property
    def device(self) -> torch.device:
        return self.parts[0].device

    def to(self, device: torch.device | str) -> FusedTensor:
        """The same weights on ``device``."""
        return FusedTensor(tuple(part.to(device) for part in self.parts))

    def in_planes(self) -> FusedTensor:
        """The same weights, packed parts in planes where there are."""
        parts = (p if isinstance(p, Tensor) else p.in_planes() for p in self.parts)
        return FusedTensor(tuple(parts))

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """[rows, K] in ``dtype``, decoded with torch."""
        return torch.cat(
            [p.to(dtype) if isinstance(p, Tensor) else p.dequantize(dtype) for p in self.parts]
        )


def _joined(
    above: Tensor | QuantizedTensor | Fp8Blocks, below: Tensor | QuantizedTensor | Fp8Blocks
) -> Tensor | QuantizedTensor | Fp8Blocks | None:
    """The two as one matrix, or None where their formats differ."""
    if isinstance(above, Fp8Blocks) and isinstance(below, Fp8Blocks):
        return above.above(below)
    if isinstance(above, QuantizedTensor) and isinstance(below, QuantizedTensor):
        if above.kind == below.kind and above.kind not in PLANE_FORMATS:
            return QuantizedTensor(torch.cat((above.blocks, below.blocks)), above.kind)
    elif isinstance(above, Tensor) and isinstance(below, Tensor) and above.dtype == below.dtype:
        return torch.cat((above, below))
    return None


def _reject(argument: str, got: str, allowed: str, advice: str) -> NoReturn:
    raise InputError("QuantizedTensor", argument, got, allowed, advice)


def _reject_parts(got: str, allowed: str, advice: str) -> NoReturn:
    raise InputError("FusedTensor", "parts", got, allowed, advice)
