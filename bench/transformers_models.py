"""The models of :mod:`bench.random_models` as transformers has them, and the speed of its generate.

Weights are random and made on the device. :func:`pack` puts packed weights in place of the dense
ones, in the formats that a file of the model has, as ``from_pretrained`` leaves a file that stays
packed.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor, nn

from bench.random_models import RandomSource, random_blocks
from ferrum_triton.integrations.transformers.library import part
from ferrum_triton.models.config import LlamaConfig
from ferrum_triton.models.config_rope import RopeConfig
from ferrum_triton.models.gemma3 import Gemma3Config
from ferrum_triton.models.gpt_oss import GptOssConfig
from ferrum_triton.models.qwen35 import HF_NAMES as QWEN35_NAMES
from ferrum_triton.models.qwen35_config import Qwen35Config
from ferrum_triton.models.weights import HF_NAMES
from ferrum_triton.quant import FORMATS

# Steps before those that are timed, and answers: the first ones compile and record graphs.
WARM_UP_STEPS, ANSWERS = 8, 3

_GGUF_NAMES = {
    theirs: ours
    for ours, theirs in [*HF_NAMES.items(), *QWEN35_NAMES.items()]
    if ours in HF_NAMES or theirs.startswith("linear_attn.")
}


def their_config(config: LlamaConfig) -> Any:
    """transformers' configuration of the same shapes."""
    import transformers

    shapes = {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "rms_norm_eps": config.rms_norm_eps,
        "max_position_embeddings": config.max_positions,
        "rope_parameters": _rope(config.rope),
        "tie_word_embeddings": config.tie_embeddings,
        "pad_token_id": 0,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    if windows := getattr(config, "windows", ()):
        kinds = ["sliding_attention" if window else "full_attention" for window in windows]
        shapes |= {"layer_types": kinds, "sliding_window": max(windows)}
    if isinstance(config, Gemma3Config):
        local = _rope(config.local_rope)
        ropes = {"full_attention": shapes["rope_parameters"], "sliding_attention": local}
        scalar = round(config.softmax_scale**-2)
        more = {"rope_parameters": ropes, "query_pre_attn_scalar": scalar}
        return transformers.Gemma3TextConfig(**shapes | more)
    if isinstance(config, Qwen35Config):
        kinds = ["linear_attention" if linear else "full_attention" for linear in config.linear]
        part = config.rope.dim / config.head_dim
        return transformers.Qwen3_5TextConfig(
            **shapes | {"rope_parameters": _rope(config.rope) | {"partial_rotary_factor": part}},
            layer_types=kinds,
            linear_num_key_heads=config.num_k_heads,
            linear_num_value_heads=config.num_v_heads,
            linear_key_head_dim=config.head_k_dim,
            linear_value_head_dim=config.head_v_dim,
            linear_conv_kernel_dim=config.taps,
        )
    chosen = {"num_experts_per_tok": config.experts_per_token}
    if isinstance(config, GptOssConfig):
        return transformers.GptOssConfig(**shapes, num_local_experts=config.num_experts, **chosen)
    if config.num_experts:
        return transformers.Qwen3MoeConfig(
            **shapes,
            **chosen,
            num_experts=config.num_experts,
            moe_intermediate_size=config.intermediate_size,
            norm_topk_prob=True,
        )
    family = transformers.Qwen3Config if config.qk_norm else transformers.LlamaConfig
    return family(**shapes)


def _rope(rope: RopeConfig) -> dict[str, Any]:
    found: dict[str, Any] = {"rope_type": rope.kind, "rope_theta": rope.theta}
    if rope.kind != "default":
        found["factor"] = rope.factor
    if rope.kind == "yarn":
        found["original_max_position_embeddings"] = rope.original_positions
        found["truncate"] = rope.truncate
    return found


def their_model(config: LlamaConfig, device: torch.device | str) -> Any:
    """transformers' model of the same shapes, in bfloat16, with random weights."""
    import transformers

    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(
            their_config(config), dtype=torch.bfloat16
        )
    return model.eval()


def pack(model: Any, config: LlamaConfig, form: str) -> int:
    """Put a ``GgufLinear`` with random blocks in place of each linear layer; how many those are.

    Args:
        model: transformers' model.
        config: ours.
        form: a format of :mod:`bench.random_models`; layers that it leaves dense stay as they are.
    """
    source, linear = RandomSource(config, form, model.device), part("integrations.gguf.utils")
    linears = [(name, m) for name, m in model.named_modules() if type(m) is nn.Linear]
    count = 0
    for name, was in linears:
        ours = gguf_name(name)
        if ours not in source or not (kind := source.kind(ours)):
            continue
        rows, columns = was.weight.shape
        with torch.device("meta"):
            now = linear.GgufLinear(columns, rows, FORMATS[kind].ggml_id, was.bias is not None)
        blocks = random_blocks(kind, (rows, columns), model.device).blocks
        now.weight, now.bias = nn.Parameter(blocks, requires_grad=False), was.bias
        model.set_submodule(name, now)
        count += 1
    return count


def gguf_name(name: str) -> str:
    """A module's weight by GGUF's name."""
    block, _, rest = name.removeprefix("model.layers.").partition(".")
    if block.isdecimal():
        return f"blk.{block}.{_GGUF_NAMES.get(rest, rest)}.weight"
    return f"{_GGUF_NAMES.get(name, name)}.weight"


class _Clock:
    """A logits processor that notes when the steps to be timed begin."""

    def __init__(self, first: int, device: torch.device) -> None:
        self._left, self._device, self.began = first, device, 0.0

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self._left -= 1
        if self._left == 0:
            _wait_for(self._device)
            self.began = time.perf_counter()
        return scores


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def decode_speed(model: Any, batch: int, context: int, steps: int) -> float:
    """Tokens a second of a greedy ``generate`` with a static cache, of all sequences together.

    On a GPU generate compiles the step in mode ``"reduce-overhead"``. Where that fails, a line says
    so and the step runs as it is.

    Args:
        model: transformers' model.
        batch: sequences.
        context: tokens of each in the end.
        steps: the last tokens of each, which are decoded; those before are its prompt.
    """
    torch._dynamo.reset()  # a step compiled for another size would be compiled for any
    ids = torch.randint(1, model.config.vocab_size, (batch, context - steps), device=model.device)
    try:
        return [_answer(model, ids, steps) for _ in range(ANSWERS)][-1]
    except torch.cuda.OutOfMemoryError:
        raise
    except Exception as error:  # of the compiler, whose errors have no class in common
        if model.device.type != "cuda":
            raise
        first = (str(error).splitlines() or [""])[0]
        print(f"transformers runs eagerly, as compiling failed: {first[:120]}", flush=True)
    torch._dynamo.reset()
    return [_answer(model, ids, steps, disable_compile=True) for _ in range(2)][-1]


def _answer(model: Any, ids: Tensor, steps: int, **options: Any) -> float:
    """Tokens a second of the later steps of one answer."""
    first = min(WARM_UP_STEPS, steps - 1)
    clock = _Clock(first, ids.device)
    answer = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=steps,
        do_sample=False,
        eos_token_id=None,
        cache_implementation="static",
        logits_processor=[clock],
        **options,
    )
    _wait_for(ids.device)
    seconds = time.perf_counter() - clock.began
    if answer.shape[1] != ids.shape[1] + steps:
        raise RuntimeError(f"{answer.shape[1] - ids.shape[1]} tokens were chosen, not {steps}")
    return len(ids) * (steps - first) / seconds
