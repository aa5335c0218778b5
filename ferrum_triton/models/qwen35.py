"""Qwen3.5 and Qwen3-Next: three Gated DeltaNets, then a layer of full attention with gates.

A Gated DeltaNet keeps a state of each sequence in the place of keys and values: the matrix of its
delta rule, and the last tokens that its convolution saw. MLPs are dense, or mixtures of experts
with one that every token has.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from ferrum_triton.errors import FileError
from ferrum_triton.models.experts import Experts, SharedExpert
from ferrum_triton.models.linear import AnyNorm, Matrix, Stored, apply_to_norm, stacked
from ferrum_triton.models.llama import Llama, predicted_rows
from ferrum_triton.models.mixtures import QWEN3_MOE_NAMES, MixtureSource
from ferrum_triton.models.qwen35_config import Qwen35Config
from ferrum_triton.models.step import Spans, Step
from ferrum_triton.models.weights import LayerWeights, LlamaLoader
from ferrum_triton.ops.linear_attention.delta import MOST_IN_TURN
from ferrum_triton.quant import Fp8Blocks, Reordered
from ferrum_triton.quant.fp8 import BLOCK
from ferrum_triton.quant.reordered import take_rows
from ferrum_triton.runtime.kv_cache import PagedKvCache
from ferrum_triton.runtime.states import StateCache

HF_NAMES = {
    **QWEN3_MOE_NAMES,
    "post_attention_norm": "post_attention_layernorm",
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_in": "linear_attn.in_proj_qkvz",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_ba": "linear_attn.in_proj_ba",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
# Of GGUF's names as a whole: these have other endings.
_WHOLE_NAMES = {"ssm_a": "linear_attn.A_log", "ssm_dt.bias": "linear_attn.dt_bias"}
# Tensors of all experts, and the part that is meant: all of it, the first or the second half.
_FUSED = {
    "ffn_down_exps": ("down_proj", 0),
    "ffn_gate_exps": ("gate_up_proj", 1),
    "ffn_up_exps": ("gate_up_proj", 2),
}
# Hugging Face's files hold what a norm multiplies by less one.
HF_NORM_OFFSET = 1.0

_NESTED = "model.language_model."
# Parts of Hugging Face's files that are not run: the vision tower, and layers that guess ahead.
_LEFT_OUT = ("model.visual.", "mtp.")


@dataclass(frozen=True, kw_only=True)
class DeltaWeights(LayerWeights):
    """A layer whose attention is a Gated DeltaNet. Its vectors and taps are float32.

    The rows of ``qkv`` are those of queries, keys and values, of z, of b and of a; of a layer of
    full attention they are those of gates, of queries, keys and values.
    """

    taps: Tensor  # [num_channels, taps]
    a_log: Tensor  # [num_v_heads]
    dt_bias: Tensor  # [num_v_heads]
    head_norm: Tensor  # [head_v_dim]


class Qwen35Loader(LlamaLoader):
    """Layers of both kinds, the rows of their matrices in the order in which they are used."""

    config: Qwen35Config

    def layer(self, index: int) -> LayerWeights:
        config, prefix = self.config, f"blk.{index}."
        hidden = config.hidden_size
        common = {
            "attn_norm": self.vector(f"{prefix}attn_norm.weight", hidden),
            "mlp_norm": self.vector(f"{prefix}post_attention_norm.weight", hidden),
            "mlp": self.mlp(prefix),
        }
        if config.linear[index]:
            return self.delta_net(prefix, common)
        # A query's rows and its gate's take turns by heads.
        by_head = torch.arange(2 * config.q_dim).view(config.num_heads, 2, config.head_dim)
        parts = [
            self.rows(f"{prefix}attn_q.weight", hidden, by_head.transpose(0, 1).flip(0).flatten()),
            *(self.matrix(f"{prefix}attn_{x}.weight", (config.kv_dim, hidden)) for x in "kv"),
        ]
        q_norm, k_norm = (
            self.vector(f"{prefix}attn_{x}_norm.weight", config.head_dim) for x in "qk"
        )
        return LayerWeights(
            **common,
            qkv=stacked(parts, (), self.dtype, in_planes=self.in_planes),
            q_norm=q_norm,
            k_norm=k_norm,
            attn_out=self.linear(prefix, {"attn_output": hidden}, config.q_dim),
        )

    def delta_net(self, prefix: str, common: dict[str, Any]) -> DeltaWeights:
        config, hidden = self.config, self.config.hidden_size
        if f"{prefix}ssm_in.weight" in self.source:
            parts = [self.rows(f"{prefix}ssm_in.weight", hidden, self._by_key_head())]
        else:
            sizes = {"attn_qkv": config.num_channels, "attn_gate": config.value_dim}
            parts = [self.matrix(f"{prefix}{x}.weight", (n, hidden)) for x, n in sizes.items()]
        if f"{prefix}ssm_ba.weight" in self.source:
            by_head = torch.arange(2 * config.num_v_heads).view(config.num_k_heads, 2, -1)
            order = by_head.transpose(0, 1).flatten()
            parts.append(self.rows(f"{prefix}ssm_ba.weight", hidden, order))
        else:
            size = config.num_v_heads, hidden
            parts += [self.matrix(f"{prefix}ssm_{x}.weight", size) for x in ("beta", "alpha")]
        decay = self.plain(f"{prefix}ssm_a", (config.num_v_heads,))
        if not self.allow_non_finite and (decay > 0).any():
            raise self.error(f"{prefix}ssm_a", "lets states grow: expected numbers up to 0")
        return DeltaWeights(
            **common,
            qkv=stacked(parts, (), self.dtype, in_planes=self.in_planes),
            q_norm=None,
            k_norm=None,
            attn_out=self.linear(prefix, {"ssm_out": hidden}, config.value_dim),
            taps=self.plain(f"{prefix}ssm_conv1d.weight", (config.num_channels, config.taps)),
            a_log=(-decay).log(),
            dt_bias=self.plain(f"{prefix}ssm_dt.bias", (config.num_v_heads,)),
            head_norm=self.plain(f"{prefix}ssm_norm.weight", (config.head_v_dim,)),
        )

    def _by_key_head(self) -> Tensor:
        """The order of rows that are q, k, v and z of a key head, and then of the next."""
        config = self.config
        values = config.value_dim // config.num_k_heads
        rows = torch.arange(config.num_channels + config.value_dim).view(config.num_k_heads, -1)
        parts = rows.split([config.head_k_dim, config.head_k_dim, values, values], dim=1)
        return torch.cat([part.flatten() for part in parts])

    def rows(self, name: str, in_features: int, order: Tensor) -> Stored:
        """A matrix with its rows in another order."""
        matrix = self.matrix(name, (len(order), in_features))
        if torch.equal(order, torch.arange(len(order))):
            return matrix
        if isinstance(matrix, Reordered):
            blocks = matrix.weight.blocks[order]
            return dataclasses.replace(
                matrix, weight=dataclasses.replace(matrix.weight, blocks=blocks)
            )
        if not isinstance(matrix, Fp8Blocks):
            return take_rows(matrix, order)
        blocks = order.view(-1, BLOCK) if len(order) % BLOCK == 0 else order[None]
        first = blocks[:, :1]
        if blocks.shape[1] != BLOCK or (first % BLOCK).any() or blocks.diff().ne(1).any():
            raise self.error(name, f"is in FP8 by blocks of {BLOCK} rows of several heads")
        codes = matrix.weight.view(torch.uint8)[order].view(matrix.weight.dtype)
        return Fp8Blocks(codes, matrix.scales[first[:, 0] // BLOCK])

    def experts(self, prefix: str) -> Experts:
        hidden, inner = self.config.hidden_size, self.config.shared_size
        gates = {"ffn_gate_shexp": inner, "ffn_up_shexp": inner}
        gate = self.plain(f"{prefix}ffn_gate_inp_shexp.weight", (hidden,))
        shared = SharedExpert(
            gate=gate[None].to(self.dtype),
            gate_up=self.linear(prefix, gates, hidden, apart=True),
            down=self.linear(prefix, {"ffn_down_shexp": hidden}, inner),
        )
        return dataclasses.replace(super().experts(prefix), shared=shared)

    def leaves_out(self, name: str) -> bool:
        block = name.split(".")[1] if name.startswith("blk.") else ""
        is_behind = block.isdecimal() and int(block) >= self.config.num_layers
        return is_behind or name.startswith(_LEFT_OUT)


class Qwen35Source(MixtureSource):
    """A Hugging Face directory, its tensors in the shapes that GGUF files give them.

    The text model may be part of one with a vision tower. Experts are tensors of their own, or
    all of a layer are one tensor.
    """

    def __init__(
        self,
        files: Any,
        names: Mapping[str, str] = HF_NAMES,
        norm_offset: float = HF_NORM_OFFSET,
    ) -> None:
        layers = "model.layers."
        if any(name.startswith(_NESTED) for name in files):
            layers = f"{_NESTED}layers."
            names = {k: v.replace("model.", _NESTED) for k, v in names.items()}
        super().__init__(files, names, norm_offset, layers)
        self._has_fused_experts = any(name.endswith("experts.gate_up_proj") for name in files)

    def spelled(self, name: str) -> str:
        *start, rest = name.split(".", 2)
        layer = f"{self._layers}{start[-1]}." if len(start) == 2 else ""
        if rest in _WHOLE_NAMES:
            return layer + _WHOLE_NAMES[rest]
        if self._has_fused_experts and (fused := _FUSED.get(rest.removesuffix(".weight"))):
            return f"{layer}mlp.experts.{fused[0]}"
        return super().spelled(name)

    def fetch(self, name: str) -> Matrix:
        stored, rest = super().fetch(name), name.split(".", 2)[-1]
        if not isinstance(stored, Tensor):
            return stored
        if rest == "ssm_a" and stored.is_floating_point():
            return -stored.float().exp()
        if rest == "ssm_conv1d.weight" and stored.dim() == 3:
            return stored.squeeze(1)
        if rest == "ffn_gate_inp_shexp.weight":
            return stored.flatten()
        if self._has_fused_experts and (fused := _FUSED.get(rest.removesuffix(".weight"))):
            if stored.dim() != 3:
                reason = f"tensor {self.spelled(name)!r} has shape {list(stored.shape)}"
                raise FileError(self.path, f"{reason}, not that of a matrix of each expert")
            middle = stored.shape[1] // 2
            return stored[:, (slice(None), slice(middle), slice(middle, None))[fused[1]]]
        return stored


class Qwen35(Llama):
    """A Llama whose attention is of two kinds."""

    config: Qwen35Config

    @functools.cached_property
    def _places(self) -> list[int]:
        """The number of each layer among those of its kind."""
        linear = self.config.linear
        counts = accumulate(linear, initial=0)
        return [
            before if is_linear else i - before
            for i, (is_linear, before) in enumerate(zip(linear, counts, strict=False))
        ]

    def _cache_of(self, **sizes: Any) -> StateCache:
        config = self.config
        num_linear = sum(config.linear[: config.num_layers])  # of the layers that there are
        return StateCache(
            shapes=config.states_of(self.dtype),
            num_state_layers=num_linear,
            **sizes | {"num_layers": max(config.num_layers - num_linear, 1)},
        )

    def _attended(self, norm: AnyNorm, index: int, step: Step, cache: PagedKvCache) -> Tensor:
        config, layer = self.config, self.weights.layers[index]
        products, place = apply_to_norm(self.backend, norm, layer.qkv), self._places[index]
        is_last = index == config.num_layers - 1
        if isinstance(layer, DeltaWeights):
            assert isinstance(cache, StateCache)
            states = [kind[place] for kind in cache.states]
            spans = step.spans
            if spans is None:
                slots = cache.state_slots[: len(step.positions)]
                spans = Spans(slots, step.positions, step.cu_seqlens)
            attended = self._delta_net(products, layer, states, spans, step.longest)
            return predicted_rows(attended, step) if is_last else attended
        gate, qkv = products.split([config.q_dim, config.q_dim + 2 * config.kv_dim], dim=1)
        attended = self._attention(
            qkv,
            index,
            step,
            cache,
            tables=self.tables[0],
            sliding_window=0,
            pool_index=place,
        )
        gate = predicted_rows(gate, step) if is_last else gate
        return self.backend.sigmoid_gate(attended, gate, out=attended)

    def _delta_net(
        self,
        products: Tensor,
        layer: DeltaWeights,
        states: list[Tensor],
        spans: Spans,
        longest: int,
    ) -> Tensor:
        """A Gated DeltaNet, before its last product; reads and writes a layer's states.

        Args:
            products: [num_tokens, num_channels + value_dim + 2 · num_v_heads].
            layer: the layer's weights.
            states: the convolution's and the delta rule's.
            spans: the sequences.
            longest: the most tokens of one.

        Returns:
            [num_tokens, value_dim].
        """
        backend, config = self.backend, self.config
        sizes = [config.num_channels, config.value_dim, config.num_v_heads, config.num_v_heads]
        qkv, z, b, a = products.split(sizes, dim=1)
        slots, positions, cu_seqlens = spans
        where = {"slots": slots, "cu_seqlens": cu_seqlens, "pos_offsets": positions}
        prepared = backend.gdn_prepare(
            qkv,
            b,
            a,
            layer.taps,
            layer.a_log,
            layer.dt_bias,
            config.num_k_heads,
            config.head_k_dim,
            states[0],
            **where,
        )
        rule = backend.gdn_prefill if longest > MOST_IN_TURN else backend.gdn_decode
        core = rule(*prepared, states[1], **where, tiled_values=config.has_tiled_values)
        z = z.unflatten(1, core.shape[1:])
        out = backend.gated_rms_norm(core, z, layer.head_norm, config.rms_norm_eps)
        return out.flatten(1)
