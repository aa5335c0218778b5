"""Attention over paged pools at random shapes: a few interpreted, two thousand on a GPU."""

import math
import random

import pytest
import torch
from torch.nn import functional as F

from ferrum_triton import get_backend
from ferrum_triton.ops.attention.pool import gather
from ferrum_triton.registry import OPS
from ferrum_triton.testing import tolerance
from tests.harness import clone, in_float64, sample

QUANTISED = (torch.int8, torch.float8_e4m3fn)

# Calls in a row, by seed, that have the same kernels and other sizes: compiling takes longest.
ALIKE = 10

# Elements of a cache, so that references in float64 of several workers fit one GPU.
MOST_ELEMENTS = 1 << 27


def draw(pick: random.Random, longest: int, dims: tuple[int, ...], seed: int) -> dict:
    """Axes of a call whose longest sequence has up to ``longest`` keys."""
    alike = random.Random(f"kernels/{seed // ALIKE}")
    return {
        "num_kv_heads": pick.choice((1, 2, 4, 8)),
        "group_size": alike.choice((1, 2, 3, 4, 5, 7, 8, 12)),
        "head_dim": alike.choice(dims),
        "block_size": alike.choice((8, 16, 32, 64, 128)),
        "layout": alike.choice(("hnd", "nhd", "vllm_x")),
        "cache_dtype": alike.choice((None, None, *QUANTISED)),
        "scales": alike.choice(("slot", "head", "tensor")),
        "sliding_window": alike.choice((0, 0, 1, 100, 4096)),
        "softcap": alike.choice((0.0, 0.0, 30.0)),
        "with_sinks": alike.random() < 0.3,
        "with_lse": True,
        "max_len": int(math.exp(pick.uniform(0, math.log(longest)))),
    }


def most_sequences(axes: dict, length: int) -> int:
    """How many sequences of that many keys a call may have."""
    return max(MOST_ELEMENTS // (max(length, 1) * axes["num_kv_heads"] * axes["head_dim"]), 1)


def decode_call(pick, backend, dtype, longest, dims, seed):
    axes = draw(pick, longest, dims, seed)
    batch = min(pick.randint(1, 6), most_sequences(axes, axes["max_len"]))
    alike = random.Random(f"queries/{seed // ALIKE}")
    axes |= {"batch": batch, "q_len": alike.choice((1, 1, 1, 2, 4, 8))}
    axes["batch_invariant"] = alike.random() < 0.2
    return "paged_decode_attention", sample(
        OPS["paged_decode_attention"], dtype, backend.device, seed, **axes
    )


def varlen_call(pick, backend, dtype, longest, dims, seed, most=None):
    """A call whose sequences have up to ``most`` queries."""
    axes = draw(pick, longest, dims, seed)
    offset = axes.pop("max_len")
    most = most or max(min(longest // 100, 100), 12)
    sequences = min(4, most_sequences(axes, offset + most))
    q_lens = tuple(pick.choice((0, 1, 1, 5, 9, pick.randint(1, most))) for _ in range(sequences))
    axes |= {"q_lens": q_lens, "max_offset": offset, "padding": pick.randint(0, 2)}
    return "paged_varlen_attention", sample(
        OPS["paged_varlen_attention"], dtype, backend.device, seed, **axes
    )


def error_of_torch(name: str, call: dict, exact: torch.Tensor) -> float:
    """The largest error of torch's own attention in the same dtype, where it has such a call."""
    plain = call["softcap"] == 0 and call["sinks"] is None and call["sliding_window"] == 0
    if "decode" not in name or not plain or call["k_cache"].dtype in QUANTISED:
        return 0.0
    worst = 0.0
    for b, length in enumerate(call["kv_lens"].tolist()):
        q = call["q"][b].transpose(0, 1)
        k, v = (
            gather(call[cache], None, call["block_tables"][b], call["layout"])[:length]
            .to(q.dtype)
            .transpose(0, 1)
            for cache in ("k_cache", "v_cache")
        )
        position = length - q.shape[1] + torch.arange(q.shape[1], device=q.device)
        mask = torch.arange(length, device=q.device) <= position[:, None]
        seen = mask.any(dim=1)
        if not seen.any():
            continue
        got = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
        off = got.transpose(0, 1)[seen].double() - exact[b][seen]
        worst = max(worst, off.abs().max().item())
    return worst


def hold(backend, make_call, seed, longest, dims):
    pick = random.Random(seed)
    alike = random.Random(f"dtype/{seed // ALIKE}")
    dtype = alike.choice((torch.float16, torch.bfloat16, torch.float32))
    name, call = make_call(pick, backend, dtype, longest, dims, seed)
    wide = in_float64(clone(call))
    exact = OPS[name].reference(**wide)
    out = getattr(backend, name)(**call)
    tokens = call["cu_seqlens_q"][-1] if "varlen" in name else len(out)
    out, exact = out[:tokens], exact[:tokens]
    assert out.isfinite().all(), name
    rtol, atol = tolerance(out.dtype)
    allowed = (atol + rtol * exact.abs()).clamp(min=2 * error_of_torch(name, call, exact))
    assert ((out.double() - exact).abs() <= allowed).all(), f"{name}, seed {seed}"
    assert is_lse(call["lse"][:tokens], wide["lse"][:tokens]), f"lse of {name}, seed {seed}"


def is_lse(got: torch.Tensor, want: torch.Tensor) -> bool:
    """Whether logarithms are those of a reference in float64."""
    off = (got.double() - want.double()).abs()
    return ((got == want) | (off <= 1e-3)).all().item()  # equal where both are -inf


CALLS = pytest.mark.parametrize("make_call", [decode_call, varlen_call])


@CALLS
@pytest.mark.parametrize("seed", range(12))
def test_random_shapes_interpreted(make_call, seed):
    hold(get_backend("interpret"), make_call, ALIKE * seed, 150, (16, 64, 80))


@pytest.mark.gpu
@CALLS
@pytest.mark.parametrize("batch", range(50))
def test_random_shapes(make_call, batch):
    """Fifty batches of twenty each way, of two kernels at ten sizes."""
    for seed in range(1000 + 20 * batch, 1020 + 20 * batch):
        hold(get_backend("cuda"), make_call, seed, 70_000, (64, 80, 96, 128, 192, 256))
    torch.cuda.empty_cache()
