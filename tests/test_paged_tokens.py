"""Attention over pages where ``cu_seqlens_q``, which the device alone knows, is out of range."""

import pytest
import torch

from ferrum_triton import get_backend
from ferrum_triton.kernels.attention import decode_config
from ferrum_triton.kernels.attention.flash_config import hopper_tile
from ferrum_triton.kernels.attention.prefill_config import prefill_config
from ferrum_triton.kernels.jit import record_launches
from ferrum_triton.registry import OPS
from ferrum_triton.testing import assert_close
from tests.harness import BACKENDS, clone, in_float64, sample

OP = OPS["paged_varlen_attention"]
# Rows in front of the tensors of a call and behind them, which no launch may write.
MARGIN, GUARD = 32, 7.0

# Of sequences of 1, 40 and 3 tokens, which a decode launch, a prefill and that decode launch take.
ENDS = (
    [0, 1, 41, 60],  # the last one's end lies behind
    [0, 1, 50, 70],  # the last one lies behind
    [45, 46, 90, 100],  # all lie behind
    [-20, 1, 41, 44],  # the first one begins before
    [-60, -59, -20, -3],  # all lie before
)


def guarded(x, fill):
    """Room for a tensor between margins: the whole, and the place of the tensor."""
    whole = x.new_full((MARGIN + x.shape[0] + MARGIN, *x.shape[1:]), fill)
    return whole, whole[MARGIN : MARGIN + x.shape[0]]


def check(backend, ends, dtype, **axes):
    """Hold a call to the reference where there are tokens, and to its margins."""
    axes = {"num_kv_heads": 2, "group_size": 2, "head_dim": 64, "block_size": 16} | axes
    axes |= {"q_lens": (1, 40, 3), "offsets": (70, 40, 200), "with_lse": True}
    call = sample(OP, dtype, backend.device, torch.seed() % 2**31, **axes)
    call["cu_seqlens_q"] = torch.tensor(ends, dtype=torch.int32, device=backend.device)
    wide = in_float64(clone(call))
    want = OP.reference(**wide)
    around, q = guarded(call["q"], torch.nan)
    q.copy_(call["q"])
    outs, out = guarded(call["q"], GUARD)
    sums, lse = guarded(call["lse"], GUARD)
    with record_launches() as launches:
        backend.paged_varlen_attention(**call | {"q": q, "lse": lse}, out=out)
    first, end = (min(max(at, 0), len(q)) for at in (ends[0], ends[-1]))
    assert_close(out[first:end], want[first:end])
    assert_close(lse[first:end], wide["lse"][first:end], name="lse", scale=4)
    for whole in (outs, sums):
        assert (whole[:MARGIN] == GUARD).all()
        assert (whole[-MARGIN:] == GUARD).all()
    assert around[:MARGIN].isnan().all()
    return [launch.kernel.name for launch in launches]


@pytest.mark.parametrize("backend_name", BACKENDS)
def test_tokens_that_do_not_exist_are_left_out(backend_name):
    for ends in ENDS:
        check(get_backend(backend_name), ends, torch.float32)


@pytest.mark.parametrize("backend_name", BACKENDS)
def test_nor_are_parts_of_them_merged(backend_name):
    """Units of one tile, which a second launch merges."""
    config = {
        "BLOCK_N": 16,
        "PROGRAMS": 1000,
        "LEAST_KEYS": 16,
        "PREFETCH": 0,
        "AHEAD": 0,
        "num_warps": 4,
        "num_stages": 2,
    }
    with decode_config.decode_config.forced(config):
        for ends in ENDS:
            check(get_backend(backend_name), ends, torch.float32)


@pytest.mark.parametrize("backend_name", ["interpret", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_hopper_leaves_them_out_too(backend_name):
    for ends in ENDS:
        with prefill_config.forced(hopper_tile(128, 64, 2)):
            launches = check(get_backend(backend_name), ends, torch.float16)
        assert "_hopper_paged_kernel" in launches
