"""gpt-oss: attention with sinks, windows on every other layer, and experts with biases.

Experts are packed, in MXFP4 as a rule, or in the activations' dtype.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from ferrum_triton.backends import Backend
from ferrum_triton.errors import FileError
from ferrum_triton.models.config import LlamaConfig, windows_of
from ferrum_triton.models.config_keys import Keys
from ferrum_triton.models.config_rope import RopeConfig, hf_rope
from ferrum_triton.models.decoder import Decoder, predicted_rows
from ferrum_triton.models.experts import DenseExperts, Experts, PackedExperts
from ferrum_triton.models.linear import Matrix, apply
from ferrum_triton.models.step import Step
from ferrum_triton.models.weights import HF_NAMES as LLAMA_NAMES
from ferrum_triton.models.weights import HfSource, LayerWeights, LlamaLoader
from ferrum_triton.quant import QuantizedTensor
from ferrum_triton.quant.float4 import mxfp4_of_gguf
from ferrum_triton.runtime.kv_cache import PagedKvCache

GGUF_ARCHITECTURES = ("gpt-oss",)
HF_ARCHITECTURES = ("GptOssForCausalLM",)
HF_NAMES = {
    **LLAMA_NAMES,
    "post_attention_norm": "post_attention_layernorm",
    "attn_sinks": "self_attn.sinks",
    "ffn_gate_inp": "mlp.router",
    "ffn_gate_exps": "mlp.experts.gate_up_proj",
    "ffn_up_exps": "mlp.experts.gate_up_proj",
    "ffn_down_exps": "mlp.experts.down_proj",
}

# What files may leave out: it is the same in every model of the family, as is YaRN's ramp, of which
# GGUF files do not say that it is not widened to whole pairs.
_THETA = 150000.0
_WINDOW = 128
_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
# Parameters of YaRN that are taken only at the value which they have by definition.
_FIXED = {
    "yarn_beta_fast": 32.0,
    "yarn_beta_slow": 1.0,
    "yarn_attn_factor": 1.0,
    "yarn_ext_factor": 1.0,
}


@dataclass(frozen=True)
class GptOssConfig(LlamaConfig):
    """Hyperparameters of one model. qkv_bias is that of all of attention's products.

    Attributes:
        windows: the keys that each layer's queries see; 0 means all.
        swiglu_alpha: the slope of the sigmoid in the experts' activation.
        swiglu_limit: the bound of what it takes.
    """

    windows: tuple[int, ...] = ()
    swiglu_alpha: float = 1.702
    swiglu_limit: float = 7.0

    def checked(self, path: Path) -> Self:
        for name in ("swiglu_alpha", "swiglu_limit"):
            if (value := getattr(self, name)) <= 0:
                raise FileError(path, f"unusable hyperparameters: {name} {value}")
        return super().checked(path)

    @classmethod
    def from_gguf(
        cls, metadata: Mapping[str, Any], tensor_names: Mapping[str, Any], path: Path
    ) -> GptOssConfig:
        keys = Keys(metadata, path, "gpt-oss.")
        sizes = cls.gguf_sizes(keys, metadata, path)
        inner = keys.size("expert_feed_forward_length", sizes["intermediate_size"])
        window = keys.size("attention.sliding_window", _WINDOW)
        if (kind := keys.text("rope.scaling.type", "none")) != "yarn":
            raise FileError(path, f"rope scaling {kind!r:.80} is not supported; known: yarn")
        for name, value in _FIXED.items():
            if (found := keys.number(f"rope.scaling.{name}", value)) != value:
                raise FileError(path, f"rope.scaling.{name} of {found} is not supported")
        config = cls(
            **sizes | {"intermediate_size": inner},
            rope=RopeConfig(
                theta=keys.number("rope.freq_base", _THETA),
                dim=keys.size("rope.dimension_count", sizes["head_dim"]),
                kind="yarn",
                factor=keys.number("rope.scaling.factor"),
                original_positions=keys.size("rope.scaling.original_context_length"),
                truncate=False,
            ),
            qkv_bias=True,
            tie_embeddings="output.weight" not in tensor_names,
            num_experts=keys.size("expert_count"),
            experts_per_token=keys.size("expert_used_count"),
            windows=tuple(0 if i % 2 else window for i in range(sizes["num_layers"])),
        )
        return config.checked(path)

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], path: Path) -> GptOssConfig:
        keys = Keys(config, path)
        packing = config.get("quantization_config") or {"quant_method": "mxfp4"}
        method = packing.get("quant_method") if isinstance(packing, Mapping) else packing
        if method != "mxfp4":
            raise FileError(path, f"quantisation {method!r:.80} is not supported; known: mxfp4")
        if (activation := keys.text("hidden_act", "silu")) != "silu":
            raise FileError(path, f"activation {activation!r:.80} is not supported; known: silu")
        hidden, heads = keys.size("hidden_size"), keys.size("num_attention_heads")
        layers, head_dim = keys.size("num_hidden_layers"), keys.size("head_dim", hidden // heads)
        kinds = "sliding_attention", "full_attention"
        types = config.get("layer_types") or [kinds[i % 2] for i in range(layers)]
        rope = config.get("rope_scaling") or config.get("rope_parameters") or _ROPE
        theta = config.get("rope_theta") or _THETA
        result = cls(
            vocab_size=keys.size("vocab_size"),
            hidden_size=hidden,
            intermediate_size=keys.size("intermediate_size"),
            num_layers=layers,
            num_heads=heads,
            num_kv_heads=keys.size("num_key_value_heads", heads),
            head_dim=head_dim,
            rms_norm_eps=keys.number("rms_norm_eps", 1e-5),
            max_positions=keys.size("max_position_embeddings", 131072),
            rope=hf_rope({**config, "rope_scaling": rope, "rope_theta": theta}, head_dim, path),
            qkv_bias=config.get("attention_bias") is None or keys.flag("attention_bias"),
            tie_embeddings=keys.flag("tie_word_embeddings"),
            num_experts=keys.size("num_local_experts"),
            experts_per_token=keys.size("num_experts_per_tok"),
            windows=windows_of(types, layers, keys.size("sliding_window", _WINDOW), path),
            swiglu_alpha=keys.number("swiglu_alpha", 1.702),
            swiglu_limit=keys.number("swiglu_limit", 7.0),
        )
        return result.checked(path)


@dataclass(frozen=True, kw_only=True)
class BiasedExperts(Experts):
    """The experts of one layer, each of whose products has a bias in float32, as the router has."""

    ADDS_DOWN_BIAS: ClassVar[bool]
    """Whether the last product's bias is in what experts give."""

    router_bias: Tensor  # [num_experts]
    down_bias: Tensor  # [num_experts, hidden_size]
    swiglu_alpha: float
    swiglu_limit: float

    def _summed(self, backend: Backend, h: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """As of any experts: sums that formats have of their own know no biases."""
        return Experts._summed(self, backend, h, ids, weights)


@dataclass(frozen=True, kw_only=True)
class PackedBiasedExperts(BiasedExperts, PackedExperts):
    """Packed experts, whose biases are added by the activation and by the sum over experts."""

    ADDS_DOWN_BIAS = False
    STACKS = (*PackedExperts.STACKS, "gate_bias", "up_bias")

    gate_bias: Tensor  # [num_experts, intermediate_size]
    up_bias: Tensor  # as gate_bias

    def outputs(self, backend: Backend, h: Tensor, ids: Tensor) -> Tensor:
        gate, up, down = self.matrices
        num_experts, inner, hidden = gate.shape
        if ids.numel() <= num_experts:  # each pair reads its expert by itself
            product = functools.partial(backend.gemv_quant_moe_id, ids=ids)
        else:
            bucket_ids, tpe, _ = backend.compute_ids_tpe(ids, num_experts, inner, hidden)
            product = functools.partial(
                backend.gemm_quant_moe_id, bucket_ids=bucket_ids, tpe=tpe, top_k=self.top_k
            )
        middle = backend.clamped_swiglu_moe_id(
            product(h, gate.blocks, kind=gate.kind),
            product(h, up.blocks, kind=up.kind),
            self.gate_bias,
            self.up_bias,
            ids,
            self.swiglu_alpha,
            self.swiglu_limit,
        )
        return product(middle, down.blocks, kind=down.kind)


@dataclass(frozen=True, kw_only=True)
class DenseBiasedExperts(BiasedExperts, DenseExperts):
    """Experts in the activations' dtype, whose products add their biases."""

    ADDS_DOWN_BIAS = True
    STACKS = (*DenseExperts.STACKS, "gate_up_bias", "down_bias")

    gate_up_bias: Tensor  # [num_experts, 2 * intermediate_size]

    def outputs(self, backend: Backend, h: Tensor, ids: Tensor) -> Tensor:
        middle = backend.gemm_moe_id_gate_up(
            h,
            self.gate_up,
            ids,
            self.gate_up_bias,
            "clamped_swiglu",
            self.swiglu_alpha,
            self.swiglu_limit,
        )
        return backend.gemm_moe_id(middle, self.down, ids, self.down_bias)


class GptOssLoader(LlamaLoader):
    """Layers with sinks, whose experts have biases."""

    config: GptOssConfig

    def layer(self, index: int) -> LayerWeights:
        config, prefix = self.config, f"blk.{index}."
        hidden, biased = config.hidden_size, config.qkv_bias
        sizes = {"attn_q": config.q_dim, "attn_k": config.kv_dim, "attn_v": config.kv_dim}
        return LayerWeights(
            attn_norm=self.vector(f"{prefix}attn_norm.weight", hidden),
            qkv=self.linear(prefix, sizes, hidden, biased),
            q_norm=None,
            k_norm=None,
            attn_out=self.linear(prefix, {"attn_output": hidden}, config.q_dim, biased),
            mlp_norm=self.vector(f"{prefix}post_attention_norm.weight", hidden),
            mlp=self.mlp(prefix),
            sinks=self.vector(f"{prefix}attn_sinks.weight", config.num_heads),
        )

    def experts(self, prefix: str) -> BiasedExperts:
        config, experts = self.config, super().experts(prefix)
        count, inner, hidden = config.num_experts, config.intermediate_size, config.hidden_size
        common = vars(experts) | {
            "router_bias": self.vector(f"{prefix}ffn_gate_inp.bias", count),
            "down_bias": self.plain(f"{prefix}ffn_down_exps.bias", (count, hidden)),
            "swiglu_alpha": config.swiglu_alpha,
            "swiglu_limit": config.swiglu_limit,
        }
        gate_bias, up_bias = (
            self.plain(f"{prefix}ffn_{part}_exps.bias", (count, inner)) for part in ("gate", "up")
        )
        if isinstance(experts, PackedExperts):
            return PackedBiasedExperts(**common, gate_bias=gate_bias, up_bias=up_bias)
        return DenseBiasedExperts(**common, gate_up_bias=torch.cat((gate_bias, up_bias), dim=1))


# The rows of Hugging Face's tensors of experts by GGUF's names: those of gate and up take turns.
_ROWS = {
    "ffn_gate_exps": slice(0, None, 2),
    "ffn_up_exps": slice(1, None, 2),
    "ffn_down_exps": slice(None),
}


class GptOssSource(HfSource):
    """A Hugging Face directory, whose experts are laid out as GGUF files have them."""

    def spelled(self, name: str) -> str:
        spelled = super().spelled(name)
        if ".mlp.experts." in spelled:
            stem, _, kind = spelled.rpartition(".")
            return f"{stem}_blocks" if kind == "weight" else f"{stem}_{kind}"
        return spelled.removesuffix(".weight") if spelled.endswith(".sinks.weight") else spelled

    def __contains__(self, name: str) -> bool:
        """Whether it is there, in whatever form."""
        spelled = self.spelled(name)
        return spelled in self._files or spelled.removesuffix("_blocks") in self._files

    def fetch(self, name: str) -> Matrix:
        spelled, rows = self.spelled(name), _ROWS.get(name.split(".")[-2])
        if rows is None:
            return super().fetch(name)
        if spelled.endswith("_blocks"):
            return self._experts(spelled.removesuffix("_blocks"), rows)
        bias = super().fetch(name)
        assert isinstance(bias, Tensor)
        return bias[:, rows].contiguous() if bias.dim() == 2 else bias

    def _experts(self, stem: str, rows: slice) -> Matrix:
        names = [f"{stem}_blocks", f"{stem}_scales"]
        if stem in self._files:  # not packed, with a row for each column of the product
            self._read.add(stem)
            plain = self._files[stem]
            if plain.dim() != 3:
                reason = f"has shape {list(plain.shape)}; allowed: [experts, columns, rows]"
                raise FileError(self.path, f"tensor {stem!r} {reason}")
            return plain.transpose(1, 2)[:, rows].contiguous()
        for name in names:
            if name not in self._files:
                raise FileError(self.path, f"tensor {name!r} is missing")
        codes, scales = (self._files[name] for name in names)
        self._read.update(names)
        if (
            {codes.dtype, scales.dtype} != {torch.uint8}
            or scales.dim() != 3
            or codes.shape != (*scales.shape, 16)
        ):
            shapes = f"{list(codes.shape)} and {list(scales.shape)}"
            reason = f"of shapes {shapes} are no bytes [experts, rows, blocks, 16] and their scales"
            raise FileError(self.path, f"tensors {' and '.join(names)} {reason}")
        return QuantizedTensor(mxfp4_of_gguf(codes[:, rows], scales[:, rows]), "MXFP4")


class GptOss(Decoder):
    """x += attention(norm(x)), then x += mixture(norm(x)), in each layer."""

    config: GptOssConfig

    def _layers(self, x: Tensor, step: Step, cache: PagedKvCache) -> Tensor:
        backend, weights, config = self.backend, self.weights, self.config
        eps = config.rms_norm_eps
        norms = [layer.attn_norm for layer in weights.layers[1:]] + [weights.final_norm]
        residual = torch.empty(x.shape, dtype=torch.float32, device=x.device)
        backend.copy_slice(x, residual)
        h = backend.rms_norm_to(residual, weights.layers[0].attn_norm, self.dtype, eps)
        for index, (layer, window) in enumerate(zip(weights.layers, config.windows, strict=True)):
            attended = self._attention(
                apply(backend, h, layer.qkv),
                index,
                step,
                cache,
                tables=self.tables[0],
                sliding_window=window,
            )
            x = apply(backend, attended, layer.attn_out)
            if index == config.num_layers - 1:
                residual = predicted_rows(residual, step)
            h = backend.fused_add_rms_norm(residual, x, layer.mlp_norm, eps)
            assert isinstance(layer.mlp, BiasedExperts)
            h = self._mixture(h, layer.mlp, residual, norms[index])
        return h

    def _mixture(
        self, h: Tensor, experts: BiasedExperts, residual: Tensor, norm_weight: Tensor
    ) -> Tensor:
        """residual += Σ p_e · expert_e(h) over the likeliest experts e, and the norm of it.

        p is the softmax over the scores of those that are chosen.

        Args:
            h: [num_tokens, hidden_size].
            experts: the layer's.
            residual: float32 [num_tokens, hidden_size], updated.
            norm_weight: [hidden_size], of the norm behind.

        Returns:
            As h.
        """
        backend, config = self.backend, self.config
        scores = backend.gemm(h, experts.router, wide=True)
        backend.add_bias(scores, experts.router_bias)
        ids, weights, _ = backend.route_topk_softmax(scores, experts.top_k, counted=False)
        slots = experts.slots(backend, h, ids)
        if not experts.ADDS_DOWN_BIAS:
            backend.add_inplace(residual, backend.moe_combine(experts.down_bias, ids, weights))
        return backend.weighted_sum_residual_norm(
            slots, weights, residual, norm_weight, config.rms_norm_eps
        )
