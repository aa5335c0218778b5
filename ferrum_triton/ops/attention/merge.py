"""Attention over a set of keys, put together from attention over its parts."""

import torch
from torch import Tensor

from ferrum_triton.ops.precision import widen
from ferrum_triton.registry import Case, op

BENCH_HEADS = {"num_parts": 2, "num_heads": 32, "head_dim": 128}


@op(
    tensors={
        "outs": "T[num_parts, num_tokens, num_heads, head_dim]",
        "lses": "float[num_parts, num_tokens, num_heads]",
    },
    axes={
        "num_parts": (2, 0, 1, 3, 9),
        "num_tokens": (0, 1, 5),
        "num_heads": (1, 3, 20),
        "head_dim": (16, 40, 128),
        "empty": (1.0, 0.0, 0.3),
    },
    bench=[
        Case("bf16/n2/h32d128/t4096", torch.bfloat16, {**BENCH_HEADS, "num_tokens": 4096}),
        Case("bf16/n2/h32d128/t64", torch.bfloat16, {**BENCH_HEADS, "num_tokens": 64}),
    ],
)
def merge_attention_states(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    """lse = log Σᵢ exp(lseᵢ) and out = Σᵢ exp(lseᵢ - lse) outᵢ, for each token and head.

    If outᵢ is softmax attention over the keys of part i and lseᵢ the logarithm of its
    denominator, the result is attention over the keys of all parts, whatever their order or
    grouping: what a prefix shared by many sequences, attended to once, needs to be joined with
    each sequence's own suffix.

    A part that saw no key has lse = -inf; its out is not read and may hold anything. Where every
    part is such, or there are none, out is 0 and lse is -inf. A NaN or +inf among lses makes
    the result of its token and head NaN.

    Args:
        outs: [num_parts, num_tokens, num_heads, head_dim].
        lses: [num_parts, num_tokens, num_heads] float32, natural logarithms.

    Returns:
        out [num_tokens, num_heads, head_dim] in outs' dtype, computed in float32, and lse
        [num_tokens, num_heads] in float32.

    Source: Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018.
    """
    lses = widen(lses)
    # One part more that saw nothing, so that there is a maximum even of no parts.
    nothing = torch.full_like(lses.sum(dim=0), -torch.inf)
    largest = torch.cat((lses, nothing[None])).amax(dim=0)
    shift = torch.where(largest == -torch.inf, 0.0, largest)
    weights = torch.exp(lses - shift)  # [num_parts, num_tokens, num_heads]
    total = weights.sum(dim=0)
    seen = (lses != -torch.inf)[..., None]
    out = (weights[..., None] * torch.where(seen, widen(outs), 0.0)).sum(dim=0)
    out = out / torch.where(total == 0.0, 1.0, total)[..., None]
    return out.to(outs.dtype), shift + torch.log(total)


@merge_attention_states.rule
def _(outs, lses):
    if lses.dtype != torch.float32:
        merge_attention_states.reject("lses", str(lses.dtype), "torch.float32")


@merge_attention_states.sample
def _(make, num_parts, num_tokens, num_heads, head_dim, empty=0.0):
    outs = make.randn(num_parts, num_tokens, num_heads, head_dim)
    lses = make.randn(num_parts, num_tokens, num_heads, scale=3.0).float()
    if empty:
        drawn = make.ints(0, 100, num_parts, num_tokens, num_heads)
        lses = torch.where(drawn < 100 * empty, -torch.inf, lses)
    return {"outs": outs, "lses": lses}


@merge_attention_states.flops
def _(outs, lses):
    """A product and a sum for each element of each part."""
    return 2 * outs.numel()
