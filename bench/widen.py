"""Models made wider that compute what they did, so that every row is a multiple of 128 columns.

    python -m bench.widen SOURCE TARGET [--columns 128] [--dtype bfloat16]

SOURCE is a Hugging Face directory or a GGUF file that transformers reads, of Llama, Mistral or
Qwen2. TARGET is a directory to make. It holds the hidden size, the width of attention and the
intermediate size rounded up, so that groups of 128 columns fit.

What is added is zero. Added heads have values of zero and meet no weights of the output. Added
elements of the residual stream stay zero. They lower its mean of squares by a factor: epsilon of
the norms is multiplied by it, and their weights by its root. So logits are the same, but for
rounding.
"""

from __future__ import annotations

import argparse
import math
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch

from ferrum_triton.errors import FileError

ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM")
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
# Norms over the residual stream, by the ends of their names.
_NORMS = ("input_layernorm.weight", "post_attention_layernorm.weight", "model.norm.weight")


def rounded_up(size: int, columns: int) -> int:
    """The least multiple of ``columns`` that is not below a size."""
    return size + -size % columns


def wide_config(config: Any, columns: int) -> Any:
    """transformers' configuration of the wider model.

    There are as many heads to a KV head as before, and each is as long. The hidden size is a
    multiple of the number of heads too, as transformers wants it of Llama.
    """
    wide = deepcopy(config)
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    group = heads // kv_heads
    # Whole groups of heads whose rows, side by side, are a multiple.
    step = columns // math.gcd(columns, group * head_dim)
    wide.num_key_value_heads = rounded_up(kv_heads, step)
    wide.num_attention_heads = wide.num_key_value_heads * group
    wide.head_dim = head_dim
    both = math.lcm(columns, wide.num_attention_heads)
    wide.hidden_size = rounded_up(config.hidden_size, both)
    wide.intermediate_size = rounded_up(config.intermediate_size, columns)
    wide.rms_norm_eps = config.rms_norm_eps * config.hidden_size / wide.hidden_size
    return wide


def widen(model: Any, columns: int = 128, dtype: torch.dtype = torch.bfloat16) -> Any:
    """The wider model of transformers' ``model``, which stays as it is.

    Args:
        model: one of ARCHITECTURES, with plain weights.
        columns: what rows become multiples of.
        dtype: the dtype of the wider one's weights.
    """
    made = type(model)(wide_config(model.config, columns)).to(dtype).eval()
    shrink = math.sqrt(model.config.hidden_size / made.config.hidden_size)
    weights = dict(model.named_parameters())
    with torch.no_grad():
        for name, padded in made.named_parameters():
            weight = weights[name]
            weight = weight.float() * shrink if name.endswith(_NORMS) else weight
            padded.zero_()
            padded[tuple(slice(size) for size in weight.shape)] = weight.to(dtype)
    return made


def widen_files(source: Path, target: Path, columns: int, dtype: torch.dtype) -> None:
    """Write the wider model of a directory or GGUF file, with its tokenizer.

    Raises:
        FileError: the source is of another architecture, or the target is there.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if target.exists():
        raise FileError(target, "is there already")
    where: dict[str, Any] = {"pretrained_model_name_or_path": source}
    if source.suffix == ".gguf":
        where = {"pretrained_model_name_or_path": source.parent, "gguf_file": source.name}
    model = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
    if (name := type(model).__name__) not in ARCHITECTURES:
        raise FileError(source, f"{name} is not made wider; known: {', '.join(ARCHITECTURES)}")
    if source.suffix == ".gguf":
        del model.config.quantization_config  # what was packed is plain by now
    tokenizer = AutoTokenizer.from_pretrained(**where)
    widen(model, columns, dtype).save_pretrained(target)
    tokenizer.save_pretrained(target)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    parser.add_argument("--columns", type=int, default=128, help="what rows become multiples of")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    options = parser.parse_args()
    widen_files(options.source, options.target, options.columns, DTYPES[options.dtype])


if __name__ == "__main__":
    main()
