"""Heads in two strips of columns: which have them, there and back, and decode over them."""

import pytest
import torch
import triton
import triton.language as tl

from ferrum_triton import get_backend
from ferrum_triton.kernels.attention.strips import from_strips, in_strips, strip_of
from ferrum_triton.kernels.interpreter import run_raw
from ferrum_triton.kernels.jit import record_launches
from ferrum_triton.registry import OPS
from ferrum_triton.testing import TensorFactory, assert_close
from tests.harness import BACKENDS, clone, in_float64
from tests.test_paged_attention import decode

OP = OPS["paged_decode_attention"]
STRIPS = {48: 16, 80: 16, 96: 32, 160: 32, 192: 64, 144: 16}
WHOLE = (1, 16, 64, 128, 256)
NEITHER = (17, 24, 40, 112, 100, 224)


def test_which_heads_are_two_strips():
    assert {dim: strip_of(dim) for dim in STRIPS} == STRIPS
    assert not any(map(strip_of, (*WHOLE, *NEITHER)))


@triton.jit
def _there_and_back(y_ptr, first_ptr, rest_ptr, x_ptr, D: tl.constexpr, STRIP: tl.constexpr):
    row = tl.arange(0, 16)[:, None]
    d = row * D + tl.arange(0, D)[None, :]
    first, rest = in_strips(tl.load(x_ptr + d), STRIP)
    tl.store(first_ptr + row * (D // 2) + tl.arange(0, D // 2)[None, :], first)
    tl.store(rest_ptr + row * STRIP + tl.arange(0, STRIP)[None, :], rest)
    tl.store(y_ptr + d, from_strips((first, rest)))


@pytest.mark.parametrize(("block", "strip"), [(64, 16), (128, 16), (128, 32), (256, 64)])
def test_strips_are_the_first_columns_in_their_order(block, strip):
    x = torch.randn(16, block)
    y, first, rest = torch.empty_like(x), torch.empty(16, block // 2), torch.empty(16, strip)
    run_raw(_there_and_back, (1,), (y, first, rest, x), {"D": block, "STRIP": strip})
    half = block // 2
    assert torch.equal(first, x[:, :half])
    assert torch.equal(rest, x[:, half : half + strip])
    assert torch.equal(y[:, : half + strip], x[:, : half + strip])
    assert not y[:, half + strip :].any()


@pytest.mark.parametrize("backend_name", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("head_dim", [48, 96, 192])
def test_decode_over_strips(backend_name, dtype, head_dim):
    """Cut in units and whole, with all that scores go through."""
    backend = get_backend(backend_name)
    for more in (
        {"max_len": 700, "q_len": 1},
        {"layout": "nhd", "sliding_window": 20, "softcap": 5.0, "with_sinks": True},
        {"batch_invariant": True, "max_len": 300},
    ):
        call = decode(backend, dtype=dtype, head_dim=head_dim, **more)
        wide = in_float64(call)
        out = backend.paged_decode_attention(**call)
        assert_close(out, OP.reference(**wide).to(dtype))
        assert_close(call["lse"], wide["lse"].float())


@pytest.mark.parametrize("backend_name", BACKENDS)
def test_columns_behind_a_head_are_not_read(backend_name):
    """A cache whose vectors are the first columns of wider ones, the others NaN."""
    backend = get_backend(backend_name)
    call = decode(backend, dtype=torch.float16, head_dim=96)
    want = backend.paged_decode_attention(**clone(call))
    for name in ("k_cache", "v_cache"):
        wide = call[name].new_full((*call[name].shape[:-1], 128), torch.nan)
        wide[..., :96] = call[name]
        call[name] = wide[..., :96]
    assert torch.equal(backend.paged_decode_attention(**call), want)


@pytest.mark.parametrize(
    ("axes", "strip"),
    [
        ({"head_dim": 96}, 32),
        ({"head_dim": 128}, 0),
        ({"head_dim": 40}, 0),
        ({"head_dim": 96, "layout": "vllm_x"}, 0),
        ({"head_dim": 96, "cache_dtype": torch.int8}, 0),
    ],
)
def test_what_is_launched_in_strips(axes, strip):
    axes = {"batch": 2, "max_len": 64, "num_kv_heads": 2, "group_size": 4} | axes
    call = OP.make_sample(TensorFactory(torch.float16, "meta"), **axes)
    with record_launches((9, 0)) as launches:
        OP.impls["triton"](**call)
    assert launches[0].meta["ATTENTION"].strip == strip
