"""Mixtures of experts in Hugging Face directories, Qwen3-MoE and Mixtral: a tensor for each expert.

Their layers are Llama's; what differs is how experts' tensors are named, and how many there are.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ferrum_triton.errors import FileError
from ferrum_triton.models.linear import Matrix
from ferrum_triton.models.weights import HF_NAMES, HfSource
from ferrum_triton.quant import Fp8Blocks, QuantizedTensor

QWEN3_MOE_NAMES = HF_NAMES | {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.{}.gate_proj",
    "ffn_up_exps": "mlp.experts.{}.up_proj",
    "ffn_down_exps": "mlp.experts.{}.down_proj",
}

MIXTRAL_NAMES = HF_NAMES | {
    "ffn_gate_inp": "block_sparse_moe.gate",
    "ffn_gate_exps": "block_sparse_moe.experts.{}.w1",
    "ffn_up_exps": "block_sparse_moe.experts.{}.w3",
    "ffn_down_exps": "block_sparse_moe.experts.{}.w2",
}


class MixtureSource(HfSource):
    """A Hugging Face directory in which ``{}`` of a name stands for the number of an expert."""

    def __contains__(self, name: str) -> bool:
        return self.spelled(name).format(0) in self._files

    def fetch(self, name: str) -> Matrix:
        """The tensor, or those of all experts as one."""
        if "{}" not in self.spelled(name):
            return super().fetch(name)
        names = list(self._experts_of(self.spelled(name)))
        self._read.update(names)
        parts = [self._files[part] for part in names]
        kinds = {part.kind if isinstance(part, QuantizedTensor) else "" for part in parts}
        if len(kinds) == 1 and "" not in kinds:
            blocks = [part.blocks for part in parts if isinstance(part, QuantizedTensor)]
            return QuantizedTensor(self._stacked(blocks, names), *kinds)
        if all(isinstance(part, Fp8Blocks) for part in parts):
            codes = self._stacked([part.weight.view(torch.uint8) for part in parts], names)
            scales = self._stacked([part.scales for part in parts], names)
            return Fp8Blocks(codes.view(parts[0].weight.dtype), scales)
        plain = [part if isinstance(part, Tensor) else part.dequantize() for part in parts]
        return self._stacked(plain, names)

    def _stacked(self, parts: list[Tensor], names: list[str]) -> Tensor:
        """The parts as one tensor; they have to be of one shape and dtype."""
        for part, spelled in zip(parts, names, strict=True):
            if (part.shape, part.dtype) != (parts[0].shape, parts[0].dtype):
                reason = f"tensors {names[0]!r} and {spelled!r} are of different shapes or dtypes"
                raise FileError(self.path, reason)
        return torch.stack(parts)

    def _experts_of(self, spelled: str) -> Iterator[str]:
        """The names of the experts there are, up to the first that is missing."""
        number = 0
        while (name := spelled.format(number)) in self._files:
            yield name
            number += 1
