"""Gemma 3's text models: norms before and after each part, windows on most layers, two rotations.

Five layers in six see a window and turn their heads by one rotary embedding, the sixth sees
everything and turns them by another.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from ferrum_triton.errors import FileError
from ferrum_triton.files.int_weights import packing_of
from ferrum_triton.models.config import LlamaConfig, windows_of
from ferrum_triton.models.config_keys import Keys
from ferrum_triton.models.config_rope import RopeConfig, gguf_rope, hf_rope
from ferrum_triton.models.decoder import Decoder, predicted_rows
from ferrum_triton.models.linear import apply
from ferrum_triton.models.step import Step
from ferrum_triton.models.weights import HF_NAMES as LLAMA_NAMES
from ferrum_triton.models.weights import Mlp
from ferrum_triton.runtime.kv_cache import PagedKvCache

GGUF_ARCHITECTURES = ("gemma3",)
HF_ARCHITECTURES = ("Gemma3ForCausalLM",)
HF_NAMES = {
    **LLAMA_NAMES,
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
# Hugging Face's files hold what a norm multiplies by less one.
HF_NORM_OFFSET = 1.0

# What GGUF files do not say: it is the same in every model of the family.
_LOCAL_THETA = 10000.0
_LOCAL_ROPE = RopeConfig(_LOCAL_THETA, dim=256)
_WINDOWS_OF = 6  # layers, the last of which has none
_LAYERS_OF_27B = 62


@dataclass(frozen=True)
class Gemma3Config(LlamaConfig):
    """Hyperparameters of one model.

    Attributes:
        windows: the keys that each layer's queries see; 0 means all.
        local_rope: the rotary embedding of layers with a window.
        softmax_scale: what scores are multiplied by.
        logit_softcap: the bound of logits; 0 means none.
    """

    windows: tuple[int, ...] = ()
    local_rope: RopeConfig = _LOCAL_ROPE
    softmax_scale: float = 1.0
    logit_softcap: float = 0.0

    @property
    def ropes(self) -> tuple[RopeConfig, ...]:
        return self.rope, self.local_rope

    @property
    def sandwich_norms(self) -> bool:
        return True

    def checked(self, path: Path) -> Self:
        if self.logit_softcap < 0:
            raise FileError(path, f"unusable hyperparameters: soft cap {self.logit_softcap}")
        return super().checked(path)

    @classmethod
    def from_gguf(
        cls, metadata: Mapping[str, Any], tensor_names: Mapping[str, Any], path: Path
    ) -> Gemma3Config:
        keys = Keys(metadata, path, "gemma3.")
        sizes = cls.gguf_sizes(keys, metadata, path)
        if keys.size("expert_count", 0, least=0):
            raise FileError(path, "mixtures of experts are not supported")
        head_dim, layers = sizes["head_dim"], sizes["num_layers"]
        window = keys.size("attention.sliding_window")
        scaled_by = head_dim
        if layers == _LAYERS_OF_27B:
            scaled_by = sizes["hidden_size"] // sizes["num_heads"]
        config = cls(
            **sizes,
            rope=gguf_rope(keys, head_dim, 1e6, path),
            qk_norm=True,
            tie_embeddings="output.weight" not in tensor_names,
            windows=tuple(0 if (i + 1) % _WINDOWS_OF == 0 else window for i in range(layers)),
            local_rope=RopeConfig(keys.number("rope.freq_base_swa", _LOCAL_THETA), head_dim),
            softmax_scale=scaled_by**-0.5,
            logit_softcap=keys.number("final_logit_softcapping", 0.0),
        )
        return config.checked(path)

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], path: Path) -> Gemma3Config:
        keys = Keys(config, path)
        packing_of(config, path)  # which refuses what is not read
        activation = keys.text("hidden_activation", "gelu_pytorch_tanh")
        if activation != "gelu_pytorch_tanh":
            known = "gelu_pytorch_tanh"
            raise FileError(path, f"activation {activation!r} is not supported; known: {known}")
        if config.get("attn_logit_softcapping") is not None:
            raise FileError(path, "bounds of attention's scores are not supported")
        if keys.flag("use_bidirectional_attention"):
            raise FileError(path, "attention in both directions is not supported")
        hidden, heads = keys.size("hidden_size"), keys.size("num_attention_heads")
        head_dim = keys.size("head_dim", 256)
        spelled = {"rope_theta": 1e6, **config}
        if any(isinstance(v, Mapping) for v in (config.get("rope_parameters") or {}).values()):
            ropes = [hf_rope(spelled, head_dim, path, f"{kind}_attention") for kind in _KINDS]
        else:
            theta = keys.number("rope_local_base_freq", _LOCAL_THETA)
            ropes = [hf_rope(spelled, head_dim, path), RopeConfig(theta, head_dim)]
        result = cls(
            vocab_size=keys.size("vocab_size"),
            hidden_size=hidden,
            intermediate_size=keys.size("intermediate_size"),
            num_layers=keys.size("num_hidden_layers"),
            num_heads=heads,
            num_kv_heads=keys.size("num_key_value_heads", heads),
            head_dim=head_dim,
            rms_norm_eps=keys.number("rms_norm_eps", 1e-6),
            max_positions=keys.size("max_position_embeddings", 131072),
            rope=ropes[0],
            qkv_bias=keys.flag("attention_bias"),
            qk_norm=True,
            tie_embeddings=config.get("tie_word_embeddings") is None
            or keys.flag("tie_word_embeddings"),
            windows=_windows(config, keys, path),
            local_rope=ropes[1],
            softmax_scale=keys.size("query_pre_attn_scalar", 256) ** -0.5,
            logit_softcap=keys.number("final_logit_softcapping", 0.0),
        )
        return result.checked(path)


_KINDS = ("full", "sliding")


def _windows(config: Mapping[str, Any], keys: Keys, path: Path) -> tuple[int, ...]:
    """The window of each layer, from their types or, in older files, from how they alternate."""
    layers, window = keys.size("num_hidden_layers"), keys.size("sliding_window", 4096)
    types = config.get("layer_types")
    if types is None:
        every = keys.size("sliding_window_pattern", _WINDOWS_OF)
        return tuple(0 if (i + 1) % every == 0 else window for i in range(layers))
    return windows_of(types, layers, window, path)


class Gemma3(Decoder):
    """x += norm(attention(norm(x))), then x += norm(mlp(norm(x))), in each layer."""

    config: Gemma3Config

    def _layers(self, x: Tensor, step: Step, cache: PagedKvCache) -> Tensor:
        backend, weights, config = self.backend, self.weights, self.config
        eps = config.rms_norm_eps
        # Rounded as the activations are: so the models were trained.
        scale = torch.tensor(config.hidden_size**0.5, dtype=self.dtype).item()
        residual = torch.empty(x.shape, dtype=torch.float32, device=x.device)
        backend.copy_slice(x, residual)
        backend.scale_inplace(residual, scale)
        for index, (layer, window) in enumerate(zip(weights.layers, config.windows, strict=True)):
            h = backend.rms_norm_to(residual, layer.attn_norm, self.dtype, eps)
            attended = self._attention(
                apply(backend, h, layer.qkv),
                index,
                step,
                cache,
                tables=self.tables[1 if window else 0],
                sliding_window=window,
                softmax_scale=config.softmax_scale,
            )
            x = apply(backend, attended, layer.attn_out)
            if index == config.num_layers - 1:
                residual = predicted_rows(residual, step)
            backend.rms_norm_add_inplace(residual, x, layer.attn_post_norm, eps)
            h = backend.rms_norm_to(residual, layer.mlp_norm, self.dtype, eps)
            assert isinstance(layer.mlp, Mlp)
            gate_up = apply(backend, h, layer.mlp.gate_up)
            x = apply(backend, backend.fused_gelu_tanh_mul_split(gate_up), layer.mlp.down)
            backend.rms_norm_add_inplace(residual, x, layer.mlp_post_norm, eps)
        return backend.rms_norm_to(residual, weights.final_norm, self.dtype, eps)

    def _head(self, h: Tensor) -> Tensor:
        logits, cap = super()._head(h), self.config.logit_softcap
        return logits.div_(cap).tanh_().mul_(cap) if cap else logits
