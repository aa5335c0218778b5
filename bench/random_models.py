"""Models of known shapes with random weights, through the package's own loader.

Formats: ``q4_K`` is what llama.cpp calls Q4_K_M, ``q4_1`` has every matrix in Q4_1, ``int4g128`` in
Q4_0, as which symmetric integers of four bits are laid out, the head among them; ``bf16`` is dense,
``mxfp4`` is dense but for the experts. gpt-oss has its experts in MXFP4 in every format. Weights
are random bytes under scales that keep activations about as large as they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch

from ferrum_triton.backends import Backend
from ferrum_triton.models import Decoder, Llama, LlamaConfig
from ferrum_triton.models.config_rope import RopeConfig
from ferrum_triton.models.gemma3 import Gemma3, Gemma3Config
from ferrum_triton.models.gpt_oss import GptOss, GptOssConfig, GptOssLoader
from ferrum_triton.models.qwen35 import Qwen35, Qwen35Loader
from ferrum_triton.models.qwen35_config import Qwen35Config
from ferrum_triton.models.weights import POST_NORMS, Matrix, Source, load_weights
from ferrum_triton.quant import FORMATS, QuantizedTensor

# Formats with one kind for every matrix.
ALIKE = {"q4_1": "Q4_1", "int4g128": "Q4_0"}
FORMATS_OF_MODELS = ("q4_K", *ALIKE, "bf16", "mxfp4")

# Root mean square of a weight of random bytes whose block scale is 1.
SPREAD = {"Q4_K": 310.0, "Q6_K": 1370.0, "Q4_0": 4.6, "Q4_1": 4.6, "Q8_0": 74.0, "MXFP4": 5.85}
# What the minimum is in scales, so that the mean weight is 0.
MINIMUM = {"Q4_K": 7.5, "Q4_1": -7.5}


def _llama(hidden: int, inner: int, layers: int, heads: str, vocab: int, **more) -> LlamaConfig:
    num_heads, num_kv_heads, head_dim = map(int, heads.split("/"))
    return LlamaConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=inner,
        num_layers=layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rms_norm_eps=1e-6,
        max_positions=40960,
        rope=RopeConfig(theta=1e6, dim=head_dim),
        **more,
    )


def _gemma() -> Gemma3Config:
    layers = 62
    return Gemma3Config(
        **{
            **vars(_llama(5376, 21504, layers, "32/16/128", 262208, qk_norm=True)),
            "tie_embeddings": True,
            "rope": RopeConfig(theta=1e6, dim=128, kind="linear", factor=8.0),
            "windows": tuple(0 if i % 6 == 5 else 1024 for i in range(layers)),
            "local_rope": RopeConfig(theta=1e4, dim=128),
            "softmax_scale": 168**-0.5,
        }
    )


def _gpt_oss() -> GptOssConfig:
    layers = 24
    return GptOssConfig(
        **{
            **vars(_llama(2880, 2880, layers, "64/8/64", 201088, num_experts=32)),
            "experts_per_token": 4,
            "rms_norm_eps": 1e-5,
            "qkv_bias": True,
            "rope": RopeConfig(
                theta=150000.0,
                dim=64,
                kind="yarn",
                factor=32.0,
                original_positions=4096,
                truncate=False,
            ),
            "windows": tuple(0 if i % 2 else 128 for i in range(layers)),
        }
    )


def _qwen35() -> Qwen35Config:
    layers = 32
    return Qwen35Config(
        **{
            **vars(_llama(4096, 12288, layers, "16/4/256", 248320, qk_norm=True)),
            "rope": RopeConfig(theta=1e7, dim=64),
            "linear": tuple(i % 4 != 3 for i in range(layers)),
        }
    )


CONFIGS: dict[str, LlamaConfig] = {
    "qwen3-8b": _llama(4096, 12288, 36, "32/8/128", 151936, qk_norm=True),
    "llama-3.1-8b": _llama(4096, 14336, 32, "32/8/128", 128256),
    "qwen3-30b-a3b": _llama(
        2048, 768, 48, "32/4/128", 151936, qk_norm=True, num_experts=128, experts_per_token=8
    ),
    "gemma3-27b": _gemma(),
    "gpt-oss-20b": _gpt_oss(),
    "qwen3.5-9b": _qwen35(),
    "smollm2-135m": _llama(576, 1536, 30, "9/3/64", 49152, tie_embeddings=True),
}


class RandomSource(Source):
    """Random weights of a configuration in a format, made on a device as they are fetched."""

    def __init__(self, config: LlamaConfig, form: str, device: torch.device | str) -> None:
        self.path = Path("random")
        self._config, self._form, self._device = config, form, device
        self.shapes = dict(_shapes(config))

    def __len__(self) -> int:
        return len(self.shapes)

    def __contains__(self, name: str) -> bool:
        return name in self.shapes

    def fetch(self, name: str) -> Matrix:
        shape = self.shapes[name]
        on = {"dtype": torch.bfloat16, "device": self._device}
        if name.endswith(".bias"):
            return 0.1 * torch.randn(shape, **on)
        if name.endswith("ssm_a"):  # states fade by half in one to a hundred tokens
            return -torch.empty(shape, **on).uniform_(0.01, 1.0)
        if len(shape) == 1:
            return 1 + 0.1 * torch.randn(shape, **on)
        kind = self.kind(name)
        if kind:
            return random_blocks(kind, shape, self._device)
        return torch.randn(shape, **on) * shape[-1] ** -0.5

    def kind(self, name: str) -> str:
        """The file's format of a matrix; ``""`` for a dense one."""
        kind = self._wanted(name)
        if kind and self.shapes[name][-1] % FORMATS[kind].block_size:  # as llama.cpp falls back
            return "Q8_0"
        return kind

    def _wanted(self, name: str) -> str:
        """The format of a matrix if its rows are of whole blocks."""
        in_mxfp4 = self._form == "mxfp4" or isinstance(self._config, GptOssConfig)
        if in_mxfp4 and "_exps." in name:
            return "MXFP4"
        is_small = any(part in name for part in ("ffn_gate_inp", "ssm_conv1d"))
        if self._form in ("bf16", "mxfp4") or is_small or name.endswith(".bias"):
            return ""
        if self._form in ALIKE:
            return ALIKE[self._form]
        layer = int(name.split(".")[1]) if name.startswith("blk.") else -1
        more = layer >= 0 and uses_more_bits(layer, self._config.num_layers)
        tied = self._config.tie_embeddings and name == "token_embd.weight"
        wide = name == "output.weight" or tied
        with_more = any(part in name for part in ("attn_v", "attn_qkv", "ffn_down"))
        return "Q6_K" if wide or (more and with_more) else "Q4_K"


def uses_more_bits(layer: int, num_layers: int) -> bool:
    """Whether Q4_K_M has V and down of a layer in Q6_K: the first and last eighth, and every third
    between (llama.cpp's ``use_more_bits``). Of a Gated DeltaNet Q, K and V are one matrix.
    """
    eighth = num_layers // 8
    return layer < eighth or layer >= 7 * num_layers // 8 or (layer - eighth) % 3 == 2


def random_blocks(kind: str, shape: tuple[int, ...], device: torch.device | str) -> QuantizedTensor:
    """Random blocks of a matrix or a stack of them, as a file has them."""
    form = FORMATS[kind]
    *rows, k = shape
    blocks = k // form.block_size
    size = (*rows, blocks, form.block_bytes)
    data = torch.randint(0, 256, size, dtype=torch.uint8, device=device)
    scale = torch.empty(*rows, blocks, 1, device=device).uniform_(0.5, 1.5)
    scale *= k**-0.5 / SPREAD[kind]
    form.d.write(data, scale)
    if form.m is not None:
        form.m.write(data, scale * MINIMUM[kind])
    return QuantizedTensor(data.flatten(-2), kind)


def _shapes(config: LlamaConfig) -> Mapping[str, tuple[int, ...]]:
    """Every tensor of a model by GGUF's names."""
    hidden, inner, head_dim = config.hidden_size, config.intermediate_size, config.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (config.vocab_size, hidden),
        "output_norm.weight": (hidden,),
    }
    if not config.tie_embeddings:
        shapes["output.weight"] = (config.vocab_size, hidden)
    for layer in range(config.num_layers):
        each: dict[str, tuple[int, ...]] = {
            "attn_norm": (hidden,),
            "ffn_norm": (hidden,),
            "attn_q": (config.q_dim, hidden),
            "attn_k": (config.kv_dim, hidden),
            "attn_v": (config.kv_dim, hidden),
            "attn_output": (hidden, config.q_dim),
        }
        if config.qk_norm:
            each |= {"attn_q_norm": (head_dim,), "attn_k_norm": (head_dim,)}
        if config.sandwich_norms:
            each |= dict.fromkeys(POST_NORMS.values(), (hidden,))
        is_gpt_oss = isinstance(config, GptOssConfig)
        if is_gpt_oss:
            each["post_attention_norm"] = each.pop("ffn_norm")
            each["attn_sinks"] = (config.num_heads,)
        if count := config.num_experts:
            each["ffn_gate_inp"] = (count, hidden)
            each |= {f"ffn_{part}_exps": (count, inner, hidden) for part in ("gate", "up")}
            each["ffn_down_exps"] = (count, hidden, inner)
        else:
            each |= {f"ffn_{part}": (inner, hidden) for part in ("gate", "up")}
            each["ffn_down"] = (hidden, inner)
        if isinstance(config, Qwen35Config):
            each["post_attention_norm"] = each.pop("ffn_norm")
            each["attn_q"] = (2 * config.q_dim, hidden)  # and gates
            if config.linear[layer]:
                each = {name: shape for name, shape in each.items() if name not in _ATTENTION}
                each |= _delta_net(config)
        shapes |= {
            f"blk.{layer}.{name if name in _WHOLE_NAMES else name + '.weight'}": shape
            for name, shape in each.items()
        }
        if is_gpt_oss:  # every product of a layer has a bias
            products = {n: s for n, s in each.items() if n.startswith(("attn_", "ffn_"))}
            shapes |= {
                f"blk.{layer}.{name}.bias": shape[:-1]
                for name, shape in products.items()
                if len(shape) > 1
            }
    return shapes


# What a layer without full attention lacks, and what it has under names that are whole.
_ATTENTION = ("attn_q", "attn_k", "attn_v", "attn_q_norm", "attn_k_norm", "attn_output")
_WHOLE_NAMES = ("ssm_a", "ssm_dt.bias")


def _delta_net(config: Qwen35Config) -> dict[str, tuple[int, ...]]:
    """The tensors of a Gated DeltaNet by GGUF's names."""
    hidden, num_heads = config.hidden_size, config.num_v_heads
    return {
        "attn_qkv": (config.num_channels, hidden),
        "attn_gate": (config.value_dim, hidden),
        "ssm_beta": (num_heads, hidden),
        "ssm_alpha": (num_heads, hidden),
        "ssm_conv1d": (config.num_channels, config.taps),
        "ssm_a": (num_heads,),
        "ssm_dt.bias": (num_heads,),
        "ssm_norm": (config.head_v_dim,),
        "ssm_out": (hidden, config.value_dim),
    }


def random_model(
    name: str, form: str, backend: Backend, config: LlamaConfig | None = None
) -> Decoder:
    """A model of CONFIGS, or of a configuration of the same family, in bfloat16."""
    config = CONFIGS[name] if config is None else config
    source = RandomSource(config, form, backend.device)
    on_gpu = backend.device.type != "cpu"
    family, loader = Llama, None
    if isinstance(config, Gemma3Config):
        family = Gemma3
    elif isinstance(config, GptOssConfig):
        family, loader = GptOss, GptOssLoader
    elif isinstance(config, Qwen35Config):
        family, loader = Qwen35, Qwen35Loader
        config = replace(config, has_tiled_values=form != "bf16")  # as in a GGUF file
    weights = load_weights(
        source,
        config,
        backend,
        torch.bfloat16,
        planes=on_gpu,
        allow_non_finite=True,
        loader=loader,
    )
    return family(config, weights, backend, torch.bfloat16)
