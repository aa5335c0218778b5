"""Random GGUF files of a few thousand weights, of architectures that transformers loads."""

from __future__ import annotations

from pathlib import Path

import torch

from ferrum_triton.quant import FORMATS, QuantizedTensor, quantize_blocks
from tests.tiny_models import write_gguf

HIDDEN, INNER, VOCAB, HEAD_DIM, LAYERS, EXPERTS = 64, 96, 96, 32, 2, 4
KINDS = ("Q8_0", "Q4_0", "Q4_1", "IQ4_NL")  # of 32 weights a block, one after the other
# Of gated DeltaNet: heads of keys and of values, their width, taps of the convolution.
KEY_HEADS, VALUE_HEADS, TAPS = 2, 6, 4
KEY_DIM, VALUE_DIM = KEY_HEADS * HEAD_DIM, VALUE_HEADS * HEAD_DIM

ATTENTION = {
    "attn_q": (2 * HEAD_DIM, HIDDEN),
    "attn_k": (HEAD_DIM, HIDDEN),
    "attn_v": (HEAD_DIM, HIDDEN),
    "attn_output": (HIDDEN, 2 * HEAD_DIM),
}
MLP = {"ffn_gate": (INNER, HIDDEN), "ffn_up": (INNER, HIDDEN), "ffn_down": (HIDDEN, INNER)}
EXPERT_MLP = {f"{name}_exps": (EXPERTS, *shape) for name, shape in MLP.items()}
SIZES = {
    "context_length": 128,
    "embedding_length": HIDDEN,
    "feed_forward_length": INNER,
    "block_count": LAYERS,
    "attention.head_count": 2,
    "attention.head_count_kv": 1,
    "attention.key_length": HEAD_DIM,
    "attention.value_length": HEAD_DIM,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "rope.freq_base": 10000.0,
    "rope.dimension_count": HEAD_DIM,
    "vocab_size": VOCAB,
    "tokenizer.ggml.tokens": [f"t{i}" for i in range(VOCAB)],
}
DELTA_NET = {
    "full_attention_interval": 2,
    "ssm.conv_kernel": TAPS,
    "ssm.state_size": HEAD_DIM,
    "ssm.group_count": KEY_HEADS,
    "ssm.time_step_rank": VALUE_HEADS,
    "ssm.inner_size": VALUE_DIM,
    "rope.dimension_count": 8,
    "rope.dimension_sections": [2, 1, 1, 0],
}
MIXTURE = {
    "expert_count": EXPERTS,
    "expert_used_count": 2,
    "expert_feed_forward_length": INNER,
    "expert_shared_feed_forward_length": INNER,
}


def write(path: Path, architecture: str, seed: int = 0) -> Path:
    """A random file of ``architecture``, its matrices packed in :data:`KINDS`."""
    make = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor | QuantizedTensor] = {}

    def matrix(name: str, *shape: int) -> None:
        # transformers joins experts' gate and up, so they are of one kind.
        is_joined = name.endswith(("gate_exps", "up_exps"))
        kind = "Q4_0" if is_joined else KINDS[len(tensors) % len(KINDS)]
        weight = torch.randn(shape, generator=make) * 1.5 * shape[-1] ** -0.5
        tensors[f"{name}.weight"] = QuantizedTensor(quantize_blocks(weight, FORMATS[kind]), kind)

    def norm(name: str, size: int) -> None:
        tensors[f"{name}.weight"] = 1 + 0.2 * torch.randn(size, generator=make)

    matrix("token_embd", VOCAB, HIDDEN)
    norm("token_embd_norm" if architecture == "lfm2" else "output_norm", HIDDEN)
    for i in range(LAYERS):
        has_experts = architecture.endswith("moe")
        shapes = dict(EXPERT_MLP if has_experts else MLP)
        norm(f"blk.{i}.attn_norm", HIDDEN)
        hybrid = architecture.startswith("qwen35")
        norm(f"blk.{i}.{'post_attention_norm' if hybrid else 'ffn_norm'}", HIDDEN)
        if has_experts:
            tensors[f"blk.{i}.ffn_gate_inp.weight"] = torch.randn(EXPERTS, HIDDEN, generator=make)
        if architecture == "qwen35moe":
            shapes |= {f"{name}_shexp": shape for name, shape in MLP.items()}
            gate = torch.randn(HIDDEN, generator=make) * 0.2
            tensors[f"blk.{i}.ffn_gate_inp_shexp.weight"] = gate
        if hybrid and i == 0:
            shapes |= {
                "attn_qkv": (2 * KEY_DIM + VALUE_DIM, HIDDEN),
                "attn_gate": (VALUE_DIM, HIDDEN),
                "ssm_alpha": (VALUE_HEADS, HIDDEN),
                "ssm_beta": (VALUE_HEADS, HIDDEN),
                "ssm_out": (HIDDEN, VALUE_DIM),
            }
            taps = torch.randn(2 * KEY_DIM + VALUE_DIM, TAPS, generator=make) * 0.5
            tensors[f"blk.{i}.ssm_conv1d.weight"] = taps
            tensors[f"blk.{i}.ssm_a"] = -torch.rand(VALUE_HEADS, generator=make) - 0.5
            tensors[f"blk.{i}.ssm_dt.bias"] = torch.randn(VALUE_HEADS, generator=make)
            norm(f"blk.{i}.ssm_norm", HEAD_DIM)
        elif architecture == "lfm2" and i == 0:
            shapes |= {
                "shortconv.in_proj": (3 * HIDDEN, HIDDEN),
                "shortconv.out_proj": (HIDDEN, HIDDEN),
            }
            taps = torch.randn(HIDDEN, 3, generator=make)
            tensors[f"blk.{i}.shortconv.conv.weight"] = taps
        else:
            shapes |= ATTENTION
            if hybrid:  # with a gate for each query
                shapes["attn_q"] = (4 * HEAD_DIM, HIDDEN)
            if architecture != "llama":
                norm(f"blk.{i}.attn_q_norm", HEAD_DIM)
                norm(f"blk.{i}.attn_k_norm", HEAD_DIM)
        if architecture == "gemma3":
            norm(f"blk.{i}.post_attention_norm", HIDDEN)
            norm(f"blk.{i}.post_ffw_norm", HIDDEN)
        for name, shape in shapes.items():
            matrix(f"blk.{i}.{name}", *shape)
    metadata = dict(SIZES)
    if architecture.startswith("qwen35"):
        metadata |= DELTA_NET
    if architecture.endswith("moe"):
        metadata |= MIXTURE
    if architecture == "lfm2":
        metadata |= {"attention.head_count_kv": [0, 1], "shortconv.l_cache": 3}
    if architecture == "gemma3":
        metadata |= {"attention.sliding_window": 5}
    write_gguf(path, architecture, metadata, tensors)
    return path
