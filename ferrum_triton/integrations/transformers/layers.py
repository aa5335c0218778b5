"""The modules that stand in a converted model: on CUDA the kernels compute, on the CPU torch."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ferrum_triton.backends import get_backend
from ferrum_triton.ops.moe.expert_sum import FEW_TOKENS
from ferrum_triton.ops.moe.pairs import MAX_EXPERTS
from ferrum_triton.quant import QuantizedTensor
from ferrum_triton.quant.kinds import format_of
from ferrum_triton.quant.planes import PLANE_FORMATS


def backend_of(x: Tensor) -> Any:
    """The backend of x's device; while torch.compile traces, the ops of its dispatcher."""
    if torch.compiler.is_compiling():
        return torch.ops.ferrum
    return get_backend({"cuda": "cuda", "mps": "metal"}.get(x.device.type, "cpu"))


class Packed(NamedTuple):
    """Packed blocks as modules hold them; tied modules hold the same ones."""

    blocks: nn.Parameter
    kind: str

    @classmethod
    def of(cls, weight: QuantizedTensor) -> Packed:
        """The weight in planes, or as the file has it where its kind has none."""
        weight = weight.in_planes()
        return cls(nn.Parameter(weight.blocks, requires_grad=False), weight.kind)


class PackedModule(nn.Module):
    """What the modules over packed weights share."""

    def as_in_file(self, name: str) -> QuantizedTensor:
        """The weight ``name`` in the blocks of a GGUF file."""
        return QuantizedTensor(getattr(self, name).data, self._kinds[name]).as_in_file()

    def _hold(self, **weights: Packed) -> None:
        self._kinds = {name: weight.kind for name, weight in weights.items()}
        for name, weight in weights.items():
            self.register_parameter(name, weight.blocks)


class PackedLinear(PackedModule):
    """y = x Wᵀ + bias for any number of rows.

    Args:
        weight: W [out_features, in_features].
        bias: [out_features], or None.
        input_permutation: the order in which W's columns take x's, or None for x's own.
    """

    def __init__(
        self, weight: Packed, bias: nn.Parameter | None, input_permutation: Tensor | None = None
    ) -> None:
        super().__init__()
        self._hold(weight=weight)
        self.kind = weight.kind
        self.out_features, row_bytes = weight.blocks.shape
        self.in_features = format_of(self.kind).row_weights(row_bytes)
        self.bias = bias
        self.register_buffer("input_permutation", input_permutation, persistent=False)

    @property
    def is_plain(self) -> bool:
        """Whether it is one product in planes with nothing before or after it."""
        return self.kind in PLANE_FORMATS and self.bias is None and self.input_permutation is None

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, self.in_features)
        if self.input_permutation is not None:
            rows = rows.index_select(1, self.input_permutation)
        backend = backend_of(x)
        if self.bias is None:
            y = backend.gemm_quant(rows, self.weight, self.kind)
        else:
            y = backend.linear_quant(rows, self.weight, self.kind, self.bias)
        return y.view(*x.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, {self.kind}, bias={self.bias is not None}"


class PackedEmbedding(PackedModule):
    """y[i] = row ids[i] of a packed table, in ``dtype``, times ``scale`` if there is one."""

    def __init__(self, weight: Packed, dtype: torch.dtype, scale: Tensor | None = None) -> None:
        super().__init__()
        self.register_buffer("scale", scale, persistent=False)
        self._hold(weight=weight)
        self.kind, self.dtype = weight.kind, dtype
        self.num_embeddings, row_bytes = weight.blocks.shape
        self.embedding_dim = format_of(self.kind).row_weights(row_bytes)

    def forward(self, input_ids: Tensor) -> Tensor:
        rows = backend_of(input_ids).embedding_lookup_quant(
            self.weight, input_ids, self.kind, self.dtype
        )
        return rows if self.scale is None else rows * self.scale

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}, {self.kind}"


class PackedExperts(PackedModule):
    """Σ over a token's experts e of p_e · down_e(silu(gate_e(x)) · up_e(x)).

    Args:
        gate, up: [num_experts, intermediate_size, hidden_size].
        down: [num_experts, hidden_size, intermediate_size].
    """

    def __init__(self, gate: Packed, up: Packed, down: Packed) -> None:
        super().__init__()
        self._hold(gate_proj=gate, up_proj=up, down_proj=down)
        self.num_experts, self.intermediate_dim = gate.blocks.shape[:2]
        self.hidden_dim = down.blocks.shape[1]

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        x, ids = hidden_states.reshape(-1, self.hidden_dim), top_k_index.to(torch.int32)
        backend, names = backend_of(x), ("gate_proj", "up_proj", "down_proj")
        gate, up, down = (getattr(self, name) for name in names)
        gate_kind, up_kind, kind = (self._kinds[name] for name in names)
        if ids.numel() > self.num_experts and self.num_experts <= MAX_EXPERTS:
            slots = backend.mlp_quant_moe_id(x, gate, up, down, ids, gate_kind, up_kind, kind)
            return backend.weighted_sum(slots, top_k_weights).view_as(hidden_states)
        # Each pair reads its expert by itself.
        middle = backend.gemv_quant_moe_id_gate_up_silu(x, gate, up, ids, gate_kind, up_kind)
        if len(x) <= FEW_TOKENS and kind in PLANE_FORMATS:
            y = backend.gemv_quant_moe_id_sum(middle, down, ids, top_k_weights, kind)
        else:
            slots = backend.gemv_quant_moe_id(middle, down, ids, kind)
            y = backend.weighted_sum(slots, top_k_weights)
        return y.view_as(hidden_states)

    def extra_repr(self) -> str:
        return f"{self.num_experts}, {self.hidden_dim}, {self.intermediate_dim}, {self._kinds}"


class RMSNorm(nn.Module):
    """y = x / sqrt(mean(x²) + eps) · (weight + offset), offset 0, or 1 as in Gemma's norms."""

    def __init__(self, weight: nn.Parameter, eps: float, offset: int) -> None:
        super().__init__()
        self.weight, self.eps = weight, eps
        scale = weight.detach().float() + offset if offset else None
        self.register_buffer("scale", scale, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight if self.scale is None else self.scale
        return backend_of(x).rms_norm(x.contiguous(), weight, self.eps)

    def extra_repr(self) -> str:
        return f"{len(self.weight)}, eps={self.eps}, offset={int(self.scale is not None)}"


class GatedRMSNorm(nn.Module):
    """y = x / sqrt(mean(x²) + eps) · weight · silu(gate)."""

    def __init__(self, weight: nn.Parameter, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = weight, eps

    def forward(self, hidden_states: Tensor, gate: Tensor) -> Tensor:
        # Rows may be strided: of a product with others, z is some columns.
        x, z = (t if t.stride(-1) == 1 else t.contiguous() for t in (hidden_states, gate))
        return backend_of(x).gated_rms_norm(x, z, self.weight, self.eps)

    def extra_repr(self) -> str:
        return f"{len(self.weight)}, eps={self.eps}"


class GatedMLP(nn.Module):
    """y = down(act(gate(x)) · up(x)), its layers under the names they had.

    Args:
        layers: gate, up and down, in this order, by name.
        activation: ``"silu"`` or ``"gelu_tanh"``.
    """

    def __init__(self, layers: dict[str, nn.Module], activation: str) -> None:
        super().__init__()
        self.names, self.activation = tuple(layers), activation
        for name, layer in layers.items():
            self.add_module(name, layer)

    def forward(self, x: Tensor) -> Tensor:
        gate, up, down = (getattr(self, name) for name in self.names)
        backend = backend_of(x)
        if _are_one_launch(gate, up):
            rows, kinds = x.reshape(-1, x.shape[-1]), (gate.kind, up.kind)
            middle = backend.gemv_quant_gate_up_silu(
                rows, gate.weight, up.weight, *kinds, self.activation
            ).view(*x.shape[:-1], gate.out_features)
        elif self.activation == "silu":
            middle = backend.silu_mul(gate(x), up(x))
        else:
            middle = backend.fused_gelu_tanh_mul_split(torch.cat((gate(x), up(x)), dim=-1))
        return down(middle)

    def extra_repr(self) -> str:
        return self.activation


def _are_one_launch(gate: nn.Module, up: nn.Module) -> bool:
    return (
        isinstance(gate, PackedLinear)
        and isinstance(up, PackedLinear)
        and gate.is_plain
        and up.is_plain
        and gate.out_features == up.out_features
    )
