"""A weight matrix in packed form."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ferrum_triton.errors import InputError
from ferrum_triton.quant.formats import FORMATS, BlockFormat, dequantize_blocks


@dataclass(frozen=True, eq=False)
class QuantizedTensor:
    """Packed rows and the name of their format.

    Attributes:
        blocks: uint8 [rows, row_bytes], or [experts, rows, row_bytes], as stored in a GGUF file.
        kind: a name in :data:`~ferrum_triton.quant.FORMATS`.

    Raises:
        InputError: the kind is unknown, or blocks has another dtype or rank, or holds no whole
            number of blocks in a row.
    """

    blocks: Tensor
    kind: str

    def __post_init__(self) -> None:
        if self.kind not in FORMATS:
            _reject(
                "kind", repr(self.kind), ", ".join(FORMATS), "Convert the file to one of these."
            )
        blocks = self.blocks
        if blocks.dtype != torch.uint8:
            _reject("blocks", str(blocks.dtype), "uint8", "View the stored bytes as uint8.")
        if blocks.dim() not in (2, 3):
            allowed = "[rows, row_bytes] or [experts, rows, row_bytes]"
            _reject("blocks", f"of shape {list(blocks.shape)}", allowed, "Reshape it.")
        if blocks.shape[-1] % self.format.block_bytes:
            allowed = f"rows of whole {self.kind} blocks, {self.format.block_bytes} bytes each"
            advice = "The tensor is truncated, or of another format."
            _reject("blocks", f"of shape {list(blocks.shape)}", allowed, advice)

    @property
    def format(self) -> BlockFormat:
        return FORMATS[self.kind]

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

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Decode with torch: the reference. ``backend.dequantize`` does it by kernel."""
        return dequantize_blocks(self.blocks, self.format).to(dtype)


def _reject(argument: str, got: str, allowed: str, advice: str) -> None:
    raise InputError("QuantizedTensor", argument, got, allowed, advice)
