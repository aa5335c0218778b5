"""Hyperparameters of the Llama family, read from a GGUF file or a Hugging Face ``config.json``.

Either source is outside input: every value is checked for type and range before a tensor is sized
by it, and what this package would compute wrongly is refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ferrum_triton.errors import FileError

GGUF_ARCHITECTURES = ("llama", "qwen2", "qwen3")
HF_ARCHITECTURES = (
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
)

# Larger than any model of the family; a hostile file could otherwise ask for any amount of memory.
MAX_DIM = 1 << 24
MAX_LAYERS = 1 << 10
MAX_POSITIONS = 1 << 21
MAX_HEAD_DIM = 256


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding: angle = position · theta^(-2i/dim), then scaled.

    Attributes:
        theta: base of the wavelengths.
        dim: dimensions rotated, at most head_dim.
        interleaved: pairs are (2i, 2i + 1), as in GGUF's ``llama`` files, not (i, i + dim/2).
        kind: ``"default"``, ``"linear"`` (angles divided by factor) or ``"llama3"`` (long
            wavelengths divided by factor, medium ones in part).
        factor: the scaling's factor.
        low_freq_factor, high_freq_factor: bounds of llama3's ramp.
        original_positions: context length before llama3's scaling.
    """

    theta: float
    dim: int
    interleaved: bool = False
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_positions: int = 8192


@dataclass(frozen=True)
class LlamaConfig:
    """Hyperparameters of one model; sliding_window is 0 where attention sees everything."""

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
        keys = _Keys(metadata, path, f"{architecture}.")
        hidden, heads = keys.size("embedding_length"), keys.size("attention.head_count")
        head_dim = keys.size("attention.key_length", hidden // heads)
        if keys.size("attention.value_length", head_dim) != head_dim:
            raise FileError(path, "keys and values of different head sizes are not supported")
        tokens = metadata.get("tokenizer.ggml.tokens")
        vocabulary = len(tokens) if isinstance(tokens, list) else None
        kind = keys.text("rope.scaling.type", "none")
        if kind not in ("none", "linear"):
            raise FileError(path, f"rope scaling {kind!r} is not supported; known: none, linear")
        if keys.size("expert_count", 0, least=0):
            raise FileError(path, "mixtures of experts are not supported")
        rope = RopeConfig(
            theta=keys.number("rope.freq_base", 10000.0),
            dim=keys.size("rope.dimension_count", head_dim),
            interleaved=architecture == "llama",
            kind="linear" if kind == "linear" else "default",
            factor=keys.number("rope.scaling.factor", None if kind == "linear" else 1.0),
        )
        config = cls(
            vocab_size=keys.size("vocab_size", vocabulary),
            hidden_size=hidden,
            intermediate_size=keys.size("feed_forward_length"),
            num_layers=keys.size("block_count"),
            num_heads=heads,
            num_kv_heads=keys.size("attention.head_count_kv", heads),
            head_dim=head_dim,
            rms_norm_eps=keys.number("attention.layer_norm_rms_epsilon"),
            max_positions=keys.size("context_length"),
            rope=rope,
            sliding_window=keys.size("attention.sliding_window", 0, least=0),
            qkv_bias=architecture == "qwen2" or "blk.0.attn_q.bias" in tensor_names,
            qk_norm=architecture == "qwen3" or "blk.0.attn_q_norm.weight" in tensor_names,
            tie_embeddings="output.weight" not in tensor_names,
        )
        return config._checked(path)

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], path: Path) -> LlamaConfig:
        """Read a Hugging Face ``config.json``.

        Raises:
            FileError: the architecture is not of this family, or a value is missing or unusable.
        """
        architectures = config.get("architectures")
        name = architectures[0] if isinstance(architectures, list) and architectures else None
        if name not in HF_ARCHITECTURES:
            known = ", ".join(HF_ARCHITECTURES)
            raise FileError(path, f"architecture {name!r} is not supported; known: {known}")
        keys = _Keys(config, path)
        if config.get("use_sliding_window"):
            raise FileError(path, "sliding windows on some of the layers only are not supported")
        if config.get("quantization_config"):
            raise FileError(path, "quantised weights are supported in GGUF files only")
        if (activation := keys.text("hidden_act", "silu")) not in ("silu", "swish"):
            raise FileError(path, f"activation {activation!r} is not supported; known: silu")
        hidden, heads = keys.size("hidden_size"), keys.size("num_attention_heads")
        head_dim = keys.size("head_dim", hidden // heads)
        windowed = name == "MistralForCausalLM"
        result = cls(
            vocab_size=keys.size("vocab_size"),
            hidden_size=hidden,
            intermediate_size=keys.size("intermediate_size"),
            num_layers=keys.size("num_hidden_layers"),
            num_heads=heads,
            num_kv_heads=keys.size("num_key_value_heads", heads),
            head_dim=head_dim,
            rms_norm_eps=keys.number("rms_norm_eps", 1e-6),
            max_positions=keys.size("max_position_embeddings", 2048),
            rope=_hf_rope(config, head_dim, path),
            sliding_window=keys.size("sliding_window", 0, least=0) if windowed else 0,
            qkv_bias=name == "Qwen2ForCausalLM" or keys.flag("attention_bias"),
            qk_norm=name == "Qwen3ForCausalLM",
            tie_embeddings=keys.flag("tie_word_embeddings"),
        )
        return result._checked(path)

    def _checked(self, path: Path) -> LlamaConfig:
        problems = {
            "heads are no multiple of KV heads": self.num_heads % self.num_kv_heads,
            f"head size {self.head_dim} is over {MAX_HEAD_DIM}": self.head_dim > MAX_HEAD_DIM,
            f"{self.num_layers} layers are over {MAX_LAYERS}": self.num_layers > MAX_LAYERS,
            f"{self.max_positions} positions are over {MAX_POSITIONS}": self.max_positions
            > MAX_POSITIONS,
            f"{self.rope.dim} rotary dimensions": self.rope.dim % 2
            or self.rope.dim > self.head_dim,
            f"rope theta {self.rope.theta}": not 0 < self.rope.theta < 1e12,
            f"rope scaling factor {self.rope.factor}": not 0 < self.rope.factor < 1e6,
            "the ramp of llama3's rope scaling is empty": not 0
            < self.rope.low_freq_factor
            < self.rope.high_freq_factor,
            f"norm epsilon {self.rms_norm_eps}": not 0 < self.rms_norm_eps < 1,
        }
        for problem, present in problems.items():
            if present:
                raise FileError(path, f"unusable hyperparameters: {problem}")
        return self


def _hf_rope(config: Mapping[str, Any], head_dim: int, path: Path) -> RopeConfig:
    """Both spellings: rope_theta with rope_scaling, and rope_parameters of newer files."""
    parameters = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(parameters, Mapping):
        raise FileError(path, f"rope parameters {parameters!r} are no object")
    keys = _Keys({**config, **parameters}, path)
    kind = keys.text("rope_type", keys.text("type", "default"))
    if kind not in ("default", "linear", "llama3"):
        known = "default, linear, llama3"
        raise FileError(path, f"rope scaling {kind!r} is not supported; known: {known}")
    part = keys.number("partial_rotary_factor", 1.0)
    if not 0 < part <= 1:
        raise FileError(path, f"partial_rotary_factor is {part}, not above 0 and up to 1")
    llama3 = kind == "llama3"
    return RopeConfig(
        theta=keys.number("rope_theta", 10000.0),
        dim=int(head_dim * part),
        kind=kind,
        factor=keys.number("factor", 1.0 if kind == "default" else None),
        low_freq_factor=keys.number("low_freq_factor", None if llama3 else 1.0),
        high_freq_factor=keys.number("high_freq_factor", None if llama3 else 4.0),
        original_positions=keys.size("original_max_position_embeddings", None if llama3 else 8192),
    )


class _Keys:
    """Typed, bounded access to a mapping from outside; None in it counts as absent."""

    def __init__(self, values: Mapping[str, Any], path: Path, prefix: str = "") -> None:
        self._values, self._path, self._prefix = values, path, prefix

    def _get(self, name: str, default: Any, kinds: tuple[type, ...]) -> Any:
        value = self._values.get(self._prefix + name)
        value = default if value is None else value
        if value is None:
            raise FileError(self._path, f"{self._prefix}{name} is missing")
        if isinstance(value, bool) or not isinstance(value, kinds):
            raise FileError(self._path, f"{self._prefix}{name} is {value!r:.80}")
        return value

    def size(self, name: str, default: int | None = None, least: int = 1) -> int:
        value = self._get(name, default, (int,))
        if not least <= value <= MAX_DIM:
            reason = f"{self._prefix}{name} is {value}, not in {least} to {MAX_DIM}"
            raise FileError(self._path, reason)
        return value

    def number(self, name: str, default: float | None = None) -> float:
        value = self._get(name, default, (int, float))
        if not -1e30 < value < 1e30:  # also false for NaN; an int may be too large for a float
            raise FileError(self._path, f"{self._prefix}{name} is {value!r:.80}")
        return float(value)

    def flag(self, name: str) -> bool:
        value = self._values.get(self._prefix + name)
        if value is not None and not isinstance(value, bool):
            raise FileError(self._path, f"{self._prefix}{name} is {value!r:.80}")
        return bool(value)

    def text(self, name: str, default: str) -> str:
        return self._get(name, default, (str,))
