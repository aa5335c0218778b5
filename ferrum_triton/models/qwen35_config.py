"""Hyperparameters of Qwen3-Next and Qwen3.5, whose layers are of two kinds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch

from ferrum_triton.errors import FileError
from ferrum_triton.files.int_weights import packing_of
from ferrum_triton.models.config import LlamaConfig
from ferrum_triton.models.config_keys import Keys
from ferrum_triton.models.config_rope import gguf_rope, hf_rope

GGUF_ARCHITECTURES = ("qwen35", "qwen35moe", "qwen3next")
# Those with a vision tower too, of which the text model is read.
HF_ARCHITECTURES = (
    "Qwen3NextForCausalLM",
    "Qwen3_5ForCausalLM",
    "Qwen3_5ForConditionalGeneration",
    "Qwen3_5MoeForCausalLM",
    "Qwen3_5MoeForConditionalGeneration",
)

# What files may leave out: it is the same in every model of the family.
_INTERVAL = 4  # layers, the last of which is of full attention
_ROTARY = 0.25  # of a head
# Of rotary positions in images: those of a text are equal in all of their sections.
_OF_IMAGES = ("mrope_section", "mrope_interleaved")
_MAX_TAPS = 16


@dataclass(frozen=True)
class Qwen35Config(LlamaConfig):
    """Hyperparameters of one model.

    Attributes:
        linear: whether each layer is of linear attention, a Gated DeltaNet, or of full attention.
        num_k_heads, num_v_heads: heads of a Gated DeltaNet.
        head_k_dim, head_v_dim: their widths.
        taps: the tokens that its convolution sees.
        shared_size: intermediate size of the expert that every token has; 0 without experts.
        has_tiled_values: whether the file's value head h has key head h % num_k_heads, as in
            llama.cpp's files of Qwen3.5, and not h // (num_v_heads / num_k_heads).
    """

    linear: tuple[bool, ...] = ()
    num_k_heads: int = 16
    num_v_heads: int = 32
    head_k_dim: int = 128
    head_v_dim: int = 128
    taps: int = 4
    shared_size: int = 0
    has_tiled_values: bool = False

    @property
    def key_dim(self) -> int:
        return self.num_k_heads * self.head_k_dim

    @property
    def value_dim(self) -> int:
        return self.num_v_heads * self.head_v_dim

    @property
    def num_channels(self) -> int:
        """Channels of the convolution: of queries, keys and values."""
        return 2 * self.key_dim + self.value_dim

    def states_of(self, dtype: torch.dtype) -> list[tuple[tuple[int, ...], torch.dtype]]:
        """Shapes and dtypes of what a Gated DeltaNet keeps of a sequence.

        The last inputs of its convolution are activations, of ``dtype``. The state of its delta
        rule is a sum over thousands of tokens: in 16 bits it would lose what each of them adds.
        """
        inputs = (self.taps - 1, self.num_channels)
        state = (self.num_v_heads, self.head_k_dim, self.head_v_dim)
        return [(inputs, dtype), (state, torch.float32)]

    def checked(self, path: Path) -> Self:
        heads = f"{self.num_v_heads} value heads over {self.num_k_heads} key heads"
        problems = {
            heads: self.num_v_heads % self.num_k_heads,
            "heads of linear attention over 256": max(self.head_k_dim, self.head_v_dim) > 256,
            f"a convolution of {self.taps} tokens": not 2 <= self.taps <= _MAX_TAPS,
            "no layer of full attention": all(self.linear),
        }
        for problem, present in problems.items():
            if present:
                raise FileError(path, f"unusable hyperparameters: {problem}")
        return super().checked(path)

    @classmethod
    def from_gguf(
        cls, metadata: Mapping[str, Any], tensor_names: Mapping[str, Any], path: Path
    ) -> Qwen35Config:
        architecture = metadata.get("general.architecture")
        keys = Keys(metadata, path, f"{architecture}.")
        sizes = cls.gguf_sizes(keys, metadata, path)
        if f"{architecture}.attention.recurrent_layers" in metadata:
            known = "full_attention_interval"
            raise FileError(path, f"attention.recurrent_layers is not supported; known: {known}")
        # Layers that guess the tokens after the next stand behind the others.
        layers = sizes["num_layers"] - keys.size("nextn_predict_layers", 0, least=0)
        if layers < 1:
            raise FileError(path, "no layers are left beside nextn_predict_layers")
        if experts := keys.size("expert_count", 0, least=0):
            inner = keys.size("expert_feed_forward_length")
            sizes |= {
                "intermediate_size": inner,
                "num_experts": experts,
                "experts_per_token": keys.size("expert_used_count"),
                "shared_size": keys.size("expert_shared_feed_forward_length", inner),
            }
        num_k_heads, num_v_heads = keys.size("ssm.group_count"), keys.size("ssm.time_step_rank")
        head_v_dim, rest = divmod(keys.size("ssm.inner_size"), num_v_heads)
        if rest or not head_v_dim:
            raise FileError(path, f"ssm.inner_size is no multiple of {num_v_heads} value heads")
        every = keys.size("full_attention_interval", _INTERVAL)
        rotated = int(sizes["head_dim"] * _ROTARY)
        config = cls(
            **sizes | {"num_layers": layers},
            rope=gguf_rope(keys, rotated, 10000.0, path),
            qk_norm=True,
            tie_embeddings="output.weight" not in tensor_names,
            linear=tuple((i + 1) % every != 0 for i in range(layers)),
            num_k_heads=num_k_heads,
            num_v_heads=num_v_heads,
            head_k_dim=keys.size("ssm.state_size"),
            head_v_dim=head_v_dim,
            taps=keys.size("ssm.conv_kernel"),
            has_tiled_values=architecture != "qwen3next" and num_k_heads != num_v_heads,
        )
        return config.checked(path)

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], path: Path) -> Qwen35Config:
        packing_of(config, path)  # which refuses what is not read
        tied = config.get("tie_word_embeddings")
        nested = config.get("text_config")
        if nested is not None:
            if not isinstance(nested, Mapping):
                raise FileError(path, f"text_config is {nested!r:.80}")
            tied = nested.get("tie_word_embeddings") if tied is None else tied
            config = nested
        keys = Keys({**config, "tie_word_embeddings": tied}, path)
        if (activation := keys.text("hidden_act", "silu")) not in ("silu", "swish"):
            raise FileError(path, f"activation {activation!r:.80} is not supported; known: silu")
        if keys.flag("attention_bias"):
            raise FileError(path, "biases of attention's products are not supported")
        if config.get("attn_output_gate") is False:
            raise FileError(path, "full attention without gates is not supported")
        hidden, heads = keys.size("hidden_size"), keys.size("num_attention_heads")
        layers, head_dim = keys.size("num_hidden_layers"), keys.size("head_dim", 256)
        sizes: dict[str, Any] = {}
        if keys.size("num_experts", 0, least=0):
            sizes = _hf_experts(keys, config, path)
        else:
            sizes["intermediate_size"] = keys.size("intermediate_size")
        result = cls(
            vocab_size=keys.size("vocab_size"),
            hidden_size=hidden,
            num_layers=layers,
            num_heads=heads,
            num_kv_heads=keys.size("num_key_value_heads", heads),
            head_dim=head_dim,
            rms_norm_eps=keys.number("rms_norm_eps", 1e-6),
            max_positions=keys.size("max_position_embeddings", 32768),
            rope=hf_rope(_without_images(config), head_dim, path),
            qk_norm=True,
            tie_embeddings=keys.flag("tie_word_embeddings"),
            linear=_linear(config, keys, layers, path),
            num_k_heads=keys.size("linear_num_key_heads", 16),
            num_v_heads=keys.size("linear_num_value_heads", 32),
            head_k_dim=keys.size("linear_key_head_dim", 128),
            head_v_dim=keys.size("linear_value_head_dim", 128),
            taps=keys.size("linear_conv_kernel_dim", 4),
            **sizes,
        )
        return result.checked(path)


def _hf_experts(keys: Keys, config: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """The hyperparameters of experts, which are in every layer."""
    if config.get("mlp_only_layers") or keys.size("decoder_sparse_step", 1) != 1:
        raise FileError(path, "layers without experts among those with are not supported")
    return {
        "intermediate_size": keys.size("moe_intermediate_size"),
        "num_experts": keys.size("num_experts"),
        "experts_per_token": keys.size("num_experts_per_tok"),
        "norm_topk_prob": config.get("norm_topk_prob") is None or keys.flag("norm_topk_prob"),
        "shared_size": keys.size("shared_expert_intermediate_size"),
    }


def _linear(config: Mapping[str, Any], keys: Keys, layers: int, path: Path) -> tuple[bool, ...]:
    """Whether each layer is of linear attention, from their types or how they alternate."""
    types = config.get("layer_types")
    if types is None:
        every = keys.size("full_attention_interval", _INTERVAL)
        return tuple((i + 1) % every != 0 for i in range(layers))
    if not isinstance(types, list) or len(types) != layers:
        raise FileError(path, f"layer_types is no list of {layers} types")
    known = ("linear_attention", "full_attention")
    for kind in types:
        if kind not in known:
            reason = f"layer type {kind!r:.80} is not supported; known: {', '.join(known)}"
            raise FileError(path, reason)
    return tuple(kind == "linear_attention" for kind in types)


def _without_images(config: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration whose rotary embedding is that of texts."""
    part = config.get("partial_rotary_factor")
    spelled = {**config, "partial_rotary_factor": _ROTARY if part is None else part}
    for name in ("rope_scaling", "rope_parameters"):
        if isinstance(found := config.get(name), Mapping):
            spelled[name] = {k: v for k, v in found.items() if k not in _OF_IMAGES}
    return spelled
