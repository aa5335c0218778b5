"""Random models of a few thousand weights: as Hugging Face directories, and as packed tensors."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from bench.random_models import CONFIGS
from ferrum_triton.models.config import LlamaConfig, RopeConfig
from ferrum_triton.models.qwen35_config import Qwen35Config
from ferrum_triton.models.weights import Matrix, Packed, Source
from ferrum_triton.quant import FORMATS, QuantizedTensor, quantize_blocks
from tests import gguf_writer

SHAPE = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
VARIANTS = {
    "llama": ("LlamaConfig", {}),
    "llama3_rope": (
        "LlamaConfig",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 10000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 16,
            }
        },
    ),
    "mistral": ("MistralConfig", {"sliding_window": 5}),
    "qwen2": ("Qwen2Config", {}),
    "gemma3": (
        "Gemma3TextConfig",
        {
            "head_dim": 24,
            "num_hidden_layers": 3,
            "sliding_window": 5,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "query_pre_attn_scalar": 20,
            "final_logit_softcapping": 3.0,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ),
    "qwen3": ("Qwen3Config", {"head_dim": 24, "tie_word_embeddings": True}),
}


def save_tiny(directory: Path, variant: str, **changed: Any):
    """A random model of ``variant``, saved to ``directory`` and returned as transformers has it.

    ``changed`` is what its configuration has in place of the variant's own.
    """
    import transformers

    name, extra = VARIANTS[variant]
    config = getattr(transformers, name)(**SHAPE | extra | changed)
    torch.manual_seed(sum(variant.encode()))
    model = transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation="eager"
    ).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            # Away from the initial ones and zeros, which would hide a swapped norm or a lost bias.
            noise = torch.randn_like(parameter) * (0.3 if parameter.dim() == 1 else 0.15)
            parameter.copy_(parameter * 0.5 + noise if parameter.dim() == 1 else noise)
    model.save_pretrained(directory)
    return model


def write_gguf(
    path: Path,
    architecture: str,
    metadata: dict[str, Any],
    tensors: dict[str, torch.Tensor | QuantizedTensor],
) -> None:
    """A GGUF file of a model's hyperparameters and tensors, float32 or packed."""
    kinds: dict[type, int] = {
        str: gguf_writer.STRING,
        bool: gguf_writer.BOOL,
        int: gguf_writer.U32,
        float: gguf_writer.F32,
    }
    pairs = [gguf_writer.pair("general.architecture", gguf_writer.STRING, architecture)]
    for key, value in metadata.items():
        # What is said of a tokenizer has no architecture before it.
        name = key if key.startswith("tokenizer.") else f"{architecture}.{key}"
        if isinstance(value, list):
            pairs.append(gguf_writer.array(name, kinds[type(value[0])], value))
        else:
            pairs.append(gguf_writer.pair(name, kinds[type(value)], value))
    records, data = [], b""
    for name, tensor in tensors.items():
        packed = isinstance(tensor, QuantizedTensor)
        kind = FORMATS[tensor.kind].ggml_id if packed else 0
        records.append(gguf_writer.tensor(name, tensor.shape[::-1], kind, len(data)))
        data += (tensor.blocks if packed else tensor.float()).contiguous().numpy().tobytes()
        data += b"\0" * (-len(data) % 32)
    path.write_bytes(gguf_writer.gguf(pairs, records, data))


def gguf_name(name: str, stems: dict[str, str]) -> str:
    """GGUF's name of a tensor of Hugging Face's, whose stems are spelled in ``stems``."""
    words = name.removesuffix(".weight").split(".")
    layer = f"blk.{words[2]}." if words[1:2] == ["layers"] else ""
    return f"{layer}{stems['.'.join(words[3:] if layer else words)]}.weight"


PACKED = LlamaConfig(
    vocab_size=96,
    hidden_size=64,
    intermediate_size=96,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    rms_norm_eps=1e-5,
    max_positions=64,
    rope=RopeConfig(theta=10000.0, dim=16, interleaved=True),
    tie_embeddings=True,
)


# V in another format than Q and K, and two formats that have no planes.
PACKED_KINDS = {
    "token_embd": "Q8_0",
    "attn_q": "Q4_1",
    "attn_k": "Q4_1",
    "attn_v": "Q8_0",
    "attn_output": "IQ4_NL",
    "ffn_gate": "Q4_1",
    "ffn_up": "Q4_1",
    "ffn_down": "MXFP4",
}


class PackedSource(Source):
    """Random weights of ``config``; ``kind_of`` gives a matrix's format by its name."""

    def __init__(
        self,
        config: LlamaConfig = PACKED,
        kind_of: Callable[[str], str] = lambda name: PACKED_KINDS[name.rpartition(".")[2]],
    ) -> None:
        self.path = Path("packed")
        make = torch.Generator().manual_seed(4)
        hidden, inner = config.hidden_size, config.intermediate_size
        # Sums of as many terms stay as large as those of 64.
        scale = 0.15 * (64 / hidden) ** 0.5
        self._tensors: dict[str, Matrix] = {}

        def matrix(name: str, rows: int, cols: int) -> None:
            weights, kind = scale * torch.randn(rows, cols, generator=make), kind_of(name)
            packed = QuantizedTensor(quantize_blocks(weights, FORMATS[kind]), kind)
            self._tensors[f"{name}.weight"] = packed

        def vector(name: str, size: int) -> None:
            self._tensors[f"{name}.weight"] = 1 + 0.3 * torch.randn(size, generator=make)

        matrix("token_embd", config.vocab_size, hidden)
        vector("output_norm", hidden)
        if not config.tie_embeddings:
            matrix("output", config.vocab_size, hidden)
        for layer in range(config.num_layers):
            prefix = f"blk.{layer}."
            vector(f"{prefix}attn_norm", hidden)
            matrix(f"{prefix}attn_q", config.q_dim, hidden)
            matrix(f"{prefix}attn_k", config.kv_dim, hidden)
            matrix(f"{prefix}attn_v", config.kv_dim, hidden)
            if config.qk_norm:
                vector(f"{prefix}attn_q_norm", config.head_dim)
                vector(f"{prefix}attn_k_norm", config.head_dim)
            matrix(f"{prefix}attn_output", hidden, config.q_dim)
            vector(f"{prefix}ffn_norm", hidden)
            matrix(f"{prefix}ffn_gate", inner, hidden)
            matrix(f"{prefix}ffn_up", inner, hidden)
            matrix(f"{prefix}ffn_down", hidden, inner)

    def packed(self) -> list[Packed]:
        return [
            Packed(tensor.kind, tensor.blocks.nbytes, math.prod(tensor.shape))
            for tensor in self._tensors.values()
            if isinstance(tensor, QuantizedTensor)
        ]

    def __len__(self) -> int:
        return len(self._tensors)

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def fetch(self, name: str) -> Matrix:
        return self._tensors[name]


def shrunk(name, width=64, head_dim=16):
    """The configuration of a model with its family's peculiarities and few weights."""
    config = CONFIGS[name]
    sizes = {"num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "vocab_size": 90}
    sizes |= {"hidden_size": width, "intermediate_size": width, "head_dim": head_dim}
    if config.num_experts:
        sizes |= {"num_experts": 4, "experts_per_token": 2}
    if hasattr(config, "windows"):
        sizes["windows"] = (8, 0)
    if isinstance(config, Qwen35Config):
        sizes |= {"linear": (True, False), "num_k_heads": 2, "num_v_heads": 4}
        sizes |= {"head_k_dim": head_dim, "head_v_dim": width // 4}
    ropes = {
        rope: getattr(config, rope) for rope in ("rope", "local_rope") if hasattr(config, rope)
    }
    return replace(config, **sizes, **{k: replace(v, dim=head_dim) for k, v in ropes.items()})
