"""What a GGUF file says of a model that comes from a Hugging Face directory: Llama's and Qwen's.

Names, metadata and the order of rows are llama.cpp's. In files of the architecture ``llama`` it
rotates neighbouring dimensions of a head, where Hugging Face rotates its halves.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from ferrum_triton.errors import FileError
from ferrum_triton.files.gguf import Value
from ferrum_triton.models.config import LlamaConfig
from ferrum_triton.ops import rope_tables as schemes

ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}


def metadata(config: LlamaConfig, architecture: str, path: Path) -> dict[str, Value]:
    """Hyperparameters, by GGUF's keys.

    Raises:
        FileError: the rotary embedding is one that such files are not read with here.
    """
    rope = config.rope
    if rope.kind not in ("default", "linear", "llama3"):
        reason = f"rope scaling {rope.kind!r} is not written to GGUF files"
        raise FileError(path, f"{reason}; known: default, linear, llama3")
    if architecture == "llama" and rope.dim != config.head_dim:
        raise FileError(path, "heads that are rotated in part are not written to GGUF files")
    found: dict[str, Value] = {
        "block_count": config.num_layers,
        "context_length": config.max_positions,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_heads,
        "attention.head_count_kv": config.num_kv_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.freq_base": rope.theta,
        "rope.dimension_count": rope.dim,
        "vocab_size": config.vocab_size,
    }
    if config.sliding_window:
        found["attention.sliding_window"] = config.sliding_window
    if rope.kind == "linear":
        found |= {"rope.scaling.type": "linear", "rope.scaling.factor": rope.factor}
    said: dict[str, Value] = {"general.architecture": architecture}
    return said | {f"{architecture}.{key}": value for key, value in found.items()}


def frequency_factors(config: LlamaConfig) -> Tensor | None:
    """Llama 3's divisors of frequencies, which files hold as ``rope_freqs.weight``; float32."""
    rope = config.rope
    if rope.kind != "llama3":
        return None
    plain = schemes.frequencies(rope.dim, rope.theta)
    ramp = rope.low_freq_factor, rope.high_freq_factor
    scaled = schemes.llama3(plain, rope.factor, *ramp, rope.original_positions)
    return (plain / scaled).float()


def row_order(name: str, config: LlamaConfig, architecture: str) -> Tensor | None:
    """The order in which a file has a tensor's rows; None where it is the directory's."""
    stem = name.rpartition(".")[0].rpartition(".")[2]
    heads = {"attn_q": config.num_heads, "attn_k": config.num_kv_heads}
    if architecture != "llama" or stem not in heads:
        return None
    halves = torch.arange(heads[stem] * config.head_dim).unflatten(0, (heads[stem], 2, -1))
    return halves.transpose(1, 2).flatten()
