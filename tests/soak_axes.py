"""Sizes, formats and routings of the calls of ``python -m tests.soak``, off every tile.

Each function takes two sources: ``alike`` draws what kernels are compiled for, and is the same for
the calls of a group; ``pick`` draws sizes.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from ferrum_triton.ops.moe.pairs import compute_ids_tpe
from ferrum_triton.quant.planes import PLANE_FORMATS
from ferrum_triton.registry import Op
from ferrum_triton.testing import TensorFactory
from tests.harness import sample
from tests.test_attention_fuzz import ALIKE, varlen_call

Arguments = dict[str, Any]

# Launch choices have other tiles by tokens, so calls of a group have about as many.
TOKENS = ((1, 8), (9, 16), (17, 32), (33, 64), (65, 128), (129, 256), (257, 4096))
# Of rows divided by 16: Triton compiles anew for strides and sizes that are multiples of 16.
REMAINDERS = (0, 0, 8, *range(1, 16))
HEAD_DIMS = (64, 80, 96, 128, 192, 256)
# Which experts pairs name: any, or none that there is; the first ones mostly; one; none.
ROUTINGS = (*("uniform",) * 4, "skewed", "skewed", "one", "none")


@dataclass(frozen=True)
class Limits:
    """What a call has at most; references in float64 of several processes share a GPU.

    Attributes:
        tokens: tokens or queries.
        rows: rows of a matrix.
        columns: columns of a matrix, or keys of a sequence.
        experts: experts.
        operations: operations of a call.
        copied: weights of a matrix for each pair, which references of experts' products copy.
        elements: elements of the largest tensor.
        is_emulated: whether calls are for the interpreter. It has one launch choice for all of a
            call's matrices, so that they have one format, and tensor maps of caches in float16.
    """

    tokens: int
    rows: int
    columns: int
    experts: int
    operations: int
    copied: int
    elements: int
    is_emulated: bool


LARGE = Limits(4096, 6000, 8192, 130, 1 << 33, 1 << 27, 1 << 26, is_emulated=False)
# What the emulator has in a second or so.
SMALL = Limits(70, 260, 512, 3, 1 << 24, 1 << 23, 1 << 20, is_emulated=True)


def log_uniform(pick: random.Random, low: int, high: int) -> int:
    """An integer from low to high, small ones as likely as large ones."""
    return round(math.exp(pick.uniform(math.log(low), math.log(max(low, high)))))


def product_axes(op: Op, alike: random.Random, pick: random.Random, limits: Limits) -> Arguments:
    """Axes of a product, packed or not, with experts or without."""
    few, many = alike.choice([pair for pair in TOKENS if pair[0] <= limits.tokens])
    remainder, kind = alike.choice(REMAINDERS), alike.choice(sorted(PLANE_FORMATS))
    tokens_remainder = alike.choice(REMAINDERS) if few > 16 else -1

    def rows() -> int:
        return max(log_uniform(pick, 16, limits.rows) // 16 * 16 + remainder, 1)

    def tokens() -> int:
        count = log_uniform(pick, few, min(many, limits.tokens))
        return count if tokens_remainder < 0 else count // 16 * 16 + tokens_remainder

    # These are constants of kernels, or decide some of how activations are prepared.
    def columns() -> int:
        return log_uniform(alike, 1, limits.columns // 16) * 16

    def blocks() -> int:
        return log_uniform(alike, 1, limits.columns // 256)

    sizes: dict[str, Callable[[], int]] = {
        "m": tokens,
        "num_tokens": tokens,
        "n": rows,
        "nq": rows,
        "nkv": rows,
        "k": columns,
        "num_blocks": blocks,
        "inner_blocks": blocks,
        "num_experts": lambda: log_uniform(alike, 1, limits.experts),
        "top_k": lambda: alike.randint(1, 8),
    }
    beside = op.bench[0].axes.keys() & sizes.keys()  # sizes that the op's own axes leave alone
    axes: Arguments = {}
    for name, values in op.axes.items():
        if name in sizes:
            axes[name] = sizes[name]()
        elif name.endswith("kind"):
            other = kind if limits.is_emulated else alike.choice(sorted(PLANE_FORMATS))
            others = [kind, kind, other]
            axes[name] = alike.choice(others + [None] * (None in values))
        else:
            axes[name] = alike.choice(list(values))
    return axes | {name: sizes[name]() for name in sorted(beside - axes.keys())}


def flash_axes(op: Op, alike: random.Random, pick: random.Random, limits: Limits) -> Arguments:
    """Axes of attention over a contiguous cache."""
    q_len = log_uniform(pick, 128, max(limits.tokens, 128))
    head_dim = alike.choice(HEAD_DIMS)
    return {
        "batch": pick.randint(1, 6),
        "num_kv_heads": alike.randint(1, 12),
        "group_size": alike.choice((1, 2, 3, 4, 5, 8)),
        "head_dim": head_dim,
        "value_dim": alike.choice((None, None, None, 64, 128)),
        "q_len": q_len,
        "kv_len": pick.choice((q_len, log_uniform(pick, 1, limits.columns))),
        "spare": pick.choice((0, 0, pick.randint(1, 200))),
        "causal": alike.random() < 0.7,
        "sliding_window": alike.choice((0, 0, 1, 100, 1000)),
        "softmax_scale": alike.choice((None, None, 0.3)),
        "device_lens": alike.random() < 0.3,
        "softcap": alike.choice((0.0, 0.0, 30.0)),
        "with_sinks": alike.random() < 0.3,
        "with_lse": alike.random() < 0.5,
    }


def mla_axes(op: Op, alike: random.Random, pick: random.Random, limits: Limits) -> Arguments:
    """Axes of latent attention."""
    block_size = alike.choice((64, 128, 192))
    return {
        "batch": log_uniform(pick, 1, 160),
        "num_heads": alike.choice((64, 128)),
        "q_len": pick.choice((1, 1, 2, 3)),
        "kv_lora_rank": alike.choice((128, 256, 512, 512)),
        "rope_dim": alike.choice((64, 64, 32, 8)),
        "block_size": block_size,
        "max_blocks": log_uniform(pick, 1, max(limits.columns // block_size, 1)),
        "lens": pick.choice((*("random",) * 4, "full", "empty")),
        "paged": alike.random() < 0.7,
        "hostile": alike.random() < 0.5,
        "cache_dtype": None,
        "with_lse": alike.random() < 0.5,
    }


AXES = {"flash_attention": flash_axes, "mla_attention": mla_axes}
# Axes of products, which say what an op multiplies.
PRODUCTS = {"n", "nq"}


def is_known(op: Op) -> bool:
    """Whether calls of an op are drawn here."""
    return op.name in (*AXES, "paged_varlen_attention") or bool(op.axes.keys() & PRODUCTS)


def draw_call(
    op: Op, key: str, member: str, limits: Limits
) -> tuple[Callable[[torch.device | str], Arguments], str] | None:
    """A function that makes a call's arguments on a device, and the axes in words.

    None of a call of experts that is too large for its reference.

    Args:
        key: what calls that are alike have in common.
        member: what tells this one from others.
    """
    alike, pick = random.Random(key), random.Random(f"{key}/{member}")
    dtype = alike.choice([each for each in op.dtypes if each.itemsize == 2])
    if limits.is_emulated and op.name in AXES:
        dtype = torch.float16
    seed = pick.randrange(1 << 31)
    if op.name == "paged_varlen_attention":
        return _paged(dtype, alike, pick, limits)
    axes = AXES.get(op.name, product_axes)(op, alike, pick, limits)
    routing = pick.choice(ROUTINGS)
    about = " ".join([str(dtype), *(f"{name}={value}" for name, value in axes.items())])
    if "num_experts" not in axes:
        return (lambda device: sample(op, dtype, device, seed, **axes)), about
    columns = axes["k"] if "k" in axes else 256 * axes["num_blocks"]
    if axes["num_tokens"] * axes["top_k"] * axes["n"] * columns > limits.copied:
        return None

    def build(device: torch.device | str) -> Arguments:
        return routed(sample(op, dtype, device, seed, **axes), axes, routing, seed, device)

    return build, f"{about} routing={routing}"


def _paged(
    dtype: torch.dtype, alike: random.Random, pick: random.Random, limits: Limits
) -> tuple[Callable[[torch.device | str], Arguments], str]:
    seed = ALIKE * alike.randrange(1 << 26) + pick.randrange(ALIKE)
    own, most = pick.randrange(1 << 31), log_uniform(pick, 16, limits.tokens)

    def build(device: torch.device | str) -> Arguments:
        where, longest = SimpleNamespace(device=device), limits.columns
        return varlen_call(random.Random(own), where, dtype, longest, HEAD_DIMS, seed, most)[1]

    return build, f"{dtype} seed={seed} own={own} most={most}"


def routed(
    call: Arguments, axes: Arguments, routing: str, seed: int, device: torch.device | str
) -> Arguments:
    """The call with ids, or buckets made of them, that name experts in another way."""
    experts, top_k = axes["num_experts"], axes["top_k"]
    shape, make = (axes["num_tokens"], top_k), TensorFactory(torch.float32, device, seed)

    def any_ids() -> Tensor:
        return make.ints(-1, experts + 1, *shape)

    ids = any_ids()
    if routing == "skewed":
        ids = torch.minimum(torch.minimum(ids, any_ids()), any_ids())
    elif routing in ("one", "none"):
        ids = torch.full_like(ids, -1 if routing == "none" else seed % experts)
    if "ids" in call:
        return call | {"ids": ids}
    if "bucket_ids" in call:
        bucket_ids, tpe, _ = compute_ids_tpe.reference(ids, experts, axes["n"], axes["n"])
        return call | {"bucket_ids": bucket_ids, "tpe": tpe}
    return call
