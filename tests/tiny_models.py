"""Random models of a few thousand weights: as Hugging Face directories, and as packed tensors."""

from __future__ import annotations

from pathlib import Path

import torch

from ferrum_triton.models.config import LlamaConfig, RopeConfig
from ferrum_triton.models.weights import Matrix, Source
from ferrum_triton.quant import FORMATS, QuantizedTensor, quantize_blocks

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
    "qwen3": ("Qwen3Config", {"head_dim": 24, "tie_word_embeddings": True}),
}


def save_tiny(directory: Path, variant: str):
    """A random model of ``variant``, saved to ``directory`` and returned as transformers has it."""
    import transformers

    name, extra = VARIANTS[variant]
    config = getattr(transformers, name)(**SHAPE, **extra)
    torch.manual_seed(sum(variant.encode()))
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            # Away from the initial ones and zeros, which would hide a swapped norm or a lost bias.
            noise = torch.randn_like(parameter) * (0.3 if parameter.dim() == 1 else 0.15)
            parameter.copy_(parameter * 0.5 + noise if parameter.dim() == 1 else noise)
    model.save_pretrained(directory)
    return model


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


class PackedSource(Source):
    """Random weights of :data:`PACKED`, V in another format than Q and K."""

    def __init__(self) -> None:
        self.path = Path("packed")
        make = torch.Generator().manual_seed(4)

        def matrix(rows: int, cols: int, kind: str) -> QuantizedTensor:
            weights = 0.15 * torch.randn(rows, cols, generator=make)
            return QuantizedTensor(quantize_blocks(weights, FORMATS[kind]), kind)

        def vector(size: int) -> torch.Tensor:
            return 1 + 0.3 * torch.randn(size, generator=make)

        self._tensors: dict[str, Matrix] = {
            "token_embd.weight": matrix(96, 64, "Q8_0"),
            "output_norm.weight": vector(64),
        }
        for layer in range(PACKED.num_layers):
            self._tensors |= {
                f"blk.{layer}.{name}.weight": tensor
                for name, tensor in {
                    "attn_norm": vector(64),
                    "attn_q": matrix(64, 64, "Q4_1"),
                    "attn_k": matrix(32, 64, "Q4_1"),
                    "attn_v": matrix(32, 64, "Q8_0"),
                    "attn_output": matrix(64, 64, "IQ4_NL"),
                    "ffn_norm": vector(64),
                    "ffn_gate": matrix(96, 64, "Q4_1"),
                    "ffn_up": matrix(96, 64, "Q4_1"),
                    "ffn_down": matrix(64, 96, "MXFP4"),
                }.items()
            }

    def __len__(self) -> int:
        return len(self._tensors)

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def fetch(self, name: str) -> Matrix:
        return self._tensors[name]
