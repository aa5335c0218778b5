"""Hyperparameters of the Llama family, read from a GGUF file or a Hugging Face ``config.json``.

Either source is outside input: every value is checked for type and range before a tensor is sized
by it, and what this package would compute wrongly is refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from ferrum_triton.errors import FileError
from ferrum_triton.files.int_weights import packing_of
from ferrum_triton.models.config_keys import Keys
from ferrum_triton.models.config_rope import RopeConfig, gguf_rope, hf_rope

GGUF_ARCHITECTURES = ("llama", "qwen2", "qwen3", "qwen3moe")
HF_ARCHITECTURES = (
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
)
# Of the same layers, with experts.
QWEN3_MOE, MIXTRAL = "Qwen3MoeForCausalLM", "MixtralForCausalLM"

# Larger than any model of the family; a hostile file could otherwise ask for any amount of memory.
MAX_LAYERS = 1 << 10
MAX_POSITIONS = 1 << 21
MAX_HEAD_DIM = 256
# As many as the routing ops take.
MAX_EXPERTS = 1024
MAX_EXPERTS_PER_TOKEN = 32


@dataclass(frozen=True)
class LlamaConfig:
    """Hyperparameters of one model.

    sliding_window is 0 where attention sees everything, num_experts where the MLP is one.
    intermediate_size is that of an expert where there are some, and norm_topk_prob whether the
    probabilities of a token's experts are divided by their sum.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_positions: int
    rope: RopeConfig
    sliding_window: int = 0
    qkv_bias: bool = False
    qk_norm: bool = False
    tie_embeddings: bool = False
    num_experts: int = 0
    experts_per_token: int = 0
    norm_topk_prob: bool = True

    @property
    def ropes(self) -> tuple[RopeConfig, ...]:
        """The rotary embeddings of its layers, each of which has one of them."""
        return (self.rope,)

    @property
    def sandwich_norms(self) -> bool:
        """Whether attention and MLP are normed behind as well, before they are added."""
        return False

    @property
    def q_dim(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_dim(self) -> int:
        return self.num_kv_heads * self.head_dim

    @classmethod
    def from_gguf(
        cls, metadata: Mapping[str, Any], tensor_names: Mapping[str, Any], path: Path
    ) -> LlamaConfig:
        """Read the ``<architecture>.*`` keys of the GGUF specification.

        Raises:
            FileError: the architecture is not of this family, or a key is missing or unusable.
        """
        architecture = metadata.get("general.architecture")
        if architecture not in GGUF_ARCHITECTURES:
            known = ", ".join(GGUF_ARCHITECTURES)
            raise FileError(path, f"architecture {architecture!r} is not supported; known: {known}")
        keys = Keys(metadata, path, f"{architecture}.")
        sizes = cls.gguf_sizes(keys, metadata, path)
        if experts := keys.size("expert_count", 0, least=0):
            inner = keys.size("expert_feed_forward_length", sizes["intermediate_size"])
            chosen = keys.size("expert_used_count")
            sizes |= {
                "intermediate_size": inner,
                "num_experts": experts,
                "experts_per_token": chosen,
            }
        if keys.size("expert_shared_count", 0, least=0):
            raise FileError(path, "experts that every token shares are not supported")
        config = cls(
            **sizes,
            rope=gguf_rope(
                keys, sizes["head_dim"], 10000.0, path, interleaved=architecture == "llama"
            ),
            sliding_window=keys.size("attention.sliding_window", 0, least=0),
            qkv_bias=architecture == "qwen2" or "blk.0.attn_q.bias" in tensor_names,
            qk_norm=architecture in ("qwen3", "qwen3moe")
            or "blk.0.attn_q_norm.weight" in tensor_names,
            tie_embeddings="output.weight" not in tensor_names,
        )
        return config.checked(path)

    @staticmethod
    def gguf_sizes(keys: Keys, metadata: Mapping[str, Any], path: Path) -> dict[str, Any]:
        """The hyperparameters that every architecture's keys hold under the same names."""
        hidden, heads = keys.size("embedding_length"), keys.size("attention.head_count")
        head_dim = keys.size("attention.key_length", hidden // heads)
        if keys.size("attention.value_length", head_dim) != head_dim:
            raise FileError(path, "keys and values of different head sizes are not supported")
        tokens = metadata.get("tokenizer.ggml.tokens")
        vocabulary = len(tokens) if isinstance(tokens, list) else None
        inner = keys.size("expert_feed_forward_length", 0, least=0)  # all that mixtures may have
        return {
            "vocab_size": keys.size("vocab_size", vocabulary),
            "hidden_size": hidden,
            "intermediate_size": keys.size("feed_forward_length", inner or None),
            "num_layers": keys.size("block_count"),
            "num_heads": heads,
            "num_kv_heads": keys.size("attention.head_count_kv", heads),
            "head_dim": head_dim,
            "rms_norm_eps": keys.number("attention.layer_norm_rms_epsilon"),
            "max_positions": keys.size("context_length"),
        }

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], path: Path) -> LlamaConfig:
        """Read a Hugging Face ``config.json``.

        Raises:
            FileError: the architecture is not of this family, or a value is missing or unusable.
        """
        architectures = config.get("architectures")
        name = architectures[0] if isinstance(architectures, list) and architectures else None
        if name not in (known_names := (*HF_ARCHITECTURES, QWEN3_MOE, MIXTRAL)):
            known = ", ".join(known_names)
            raise FileError(path, f"architecture {name!r} is not supported; known: {known}")
        keys = Keys(config, path)
        if config.get("use_sliding_window"):
            raise FileError(path, "sliding windows on some of the layers only are not supported")
        layer_types = config.get("layer_types") or ["full_attention"]
        if not isinstance(layer_types, list):
            raise FileError(path, f"layer_types is {layer_types!r:.80}")
        for kind in layer_types:
            if kind != "full_attention":
                known = "full_attention"
                raise FileError(path, f"layer type {kind!r:.80} is not supported; known: {known}")
        packing_of(config, path)  # which refuses what is not read
        if (activation := keys.text("hidden_act", "silu")) not in ("silu", "swish"):
            raise FileError(path, f"activation {activation!r} is not supported; known: silu")
        hidden, heads = keys.size("hidden_size"), keys.size("num_attention_heads")
        head_dim = keys.size("head_dim", hidden // heads)
        windowed = name in ("MistralForCausalLM", MIXTRAL)
        sizes: dict[str, Any] = {"intermediate_size": keys.size("intermediate_size")}
        if name in (QWEN3_MOE, MIXTRAL):
            sizes = cls._hf_experts(config, path, name)
        result = cls(
            vocab_size=keys.size("vocab_size"),
            hidden_size=hidden,
            num_layers=keys.size("num_hidden_layers"),
            num_heads=heads,
            num_kv_heads=keys.size("num_key_value_heads", heads),
            head_dim=head_dim,
            rms_norm_eps=keys.number("rms_norm_eps", 1e-6),
            max_positions=keys.size("max_position_embeddings", 2048),
            rope=hf_rope(config, head_dim, path),
            sliding_window=keys.size("sliding_window", 0, least=0) if windowed else 0,
            qkv_bias=name == "Qwen2ForCausalLM" or keys.flag("attention_bias"),
            qk_norm=name in ("Qwen3ForCausalLM", QWEN3_MOE),
            tie_embeddings=keys.flag("tie_word_embeddings"),
            **sizes,
        )
        return result.checked(path)

    @staticmethod
    def _hf_experts(config: Mapping[str, Any], path: Path, name: str) -> dict[str, Any]:
        """The hyperparameters of experts, which are in every layer.

        Raises:
            FileError: some of the layers are without, or a value is missing or unusable.
        """
        keys = Keys(config, path)
        of_layers = keys.size("decoder_sparse_step", 1)
        if config.get("mlp_only_layers") or of_layers != 1:
            raise FileError(path, "layers without experts among those with are not supported")
        count = "num_experts" if config.get("num_local_experts") is None else "num_local_experts"
        is_qwen = name == QWEN3_MOE
        return {
            "intermediate_size": keys.size(
                "moe_intermediate_size" if is_qwen else "intermediate_size"
            ),
            "num_experts": keys.size(count),
            "experts_per_token": keys.size("num_experts_per_tok"),
            "norm_topk_prob": keys.flag("norm_topk_prob") if is_qwen else True,
        }

    def checked(self, path: Path) -> Self:
        """This, if a model can be built of it.

        Raises:
            FileError: a hyperparameter is out of range.
        """
        problems = {
            "heads are no multiple of KV heads": self.num_heads % self.num_kv_heads,
            f"head size {self.head_dim} is over {MAX_HEAD_DIM}": self.head_dim > MAX_HEAD_DIM,
            f"{self.num_layers} layers are over {MAX_LAYERS}": self.num_layers > MAX_LAYERS,
            f"{self.max_positions} positions are over {MAX_POSITIONS}": self.max_positions
            > MAX_POSITIONS,
            f"{self.experts_per_token} of {self.num_experts} experts a token": self.num_experts
            and not (
                1 <= self.experts_per_token <= min(self.num_experts, MAX_EXPERTS_PER_TOKEN)
                and self.num_experts <= MAX_EXPERTS
            ),
            f"norm epsilon {self.rms_norm_eps}": not 0 < self.rms_norm_eps < 1,
        }
        for rope in self.ropes:
            problems |= {
                f"{rope.dim} rotary dimensions": rope.dim % 2 or rope.dim > self.head_dim,
                f"rope theta {rope.theta}": not 0 < rope.theta < 1e12,
                f"rope scaling factor {rope.factor}": not 0 < rope.factor < 1e6,
                "the ramp of llama3's rope scaling is empty": not 0
                < rope.low_freq_factor
                < rope.high_freq_factor,
            }
        for problem, present in problems.items():
            if present:
                raise FileError(path, f"unusable hyperparameters: {problem}")
        return self


def refuse_quantised(config: Mapping[str, Any], path: Path) -> None:
    """Refuse a Hugging Face text encoder whose weights are packed."""
    if config.get("quantization_config"):
        raise FileError(path, "quantised weights of text encoders are supported in GGUF files only")


def windows_of(types: Any, num_layers: int, window: int, path: Path) -> tuple[int, ...]:
    """The window of each layer from ``layer_types`` of a Hugging Face model; 0 where all is seen.

    Raises:
        FileError: they are no list of as many known types.
    """
    sizes = {"full_attention": 0, "sliding_attention": window}
    if not isinstance(types, list) or len(types) != num_layers:
        raise FileError(path, f"layer_types is no list of {num_layers} types")
    for kind in types:
        if kind not in [*sizes]:
            known = ", ".join(sizes)
            raise FileError(path, f"layer type {kind!r:.80} is not supported; known: {known}")
    return tuple(sizes[kind] for kind in types)
