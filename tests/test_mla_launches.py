"""Launches of latent attention: what compiles within limits, how many splits are taken."""

import re

import pytest
import torch

from ferrum_triton.kernels.attention import mla as kernels
from ferrum_triton.kernels.gpu import gpu_of_arch
from ferrum_triton.kernels.jit import record_launches
from ferrum_triton.kernels.resources import TARGETS
from ferrum_triton.registry import OPS
from ferrum_triton.testing import TensorFactory
from tests.compiling import compiled

OP = OPS["mla_attention"]

CACHES = {
    "block64": {"block_size": 64},
    "contiguous": {"block_size": 64, "paged": False},
    "block16": {"block_size": 16},
    "block8": {"block_size": 8},
    "fp8": {"block_size": 64, "cache_dtype": torch.float8_e4m3fn},
}


def plain(target_name, rows, block_size, dtype="16 bits"):
    """The plain kernel, whatever rows of tables ask for."""
    gpu, has_tma = gpu_of_arch(target_name), dtype == "16 bits"
    config = kernels.mla_heuristic(gpu, rows, block_size, dtype, has_tma)
    return kernels.mla_config.forced(config)


# On Hopper every cache, and the bytes of fp8 for every number of heads that has tiles of its own.
# Elsewhere fp8, which each converts in its own way, and between them every other cache, of which
# the matrix of bench cases has block64.
@pytest.mark.parametrize(
    ("target_name", "num_heads", "kind"),
    [
        ("sm_90", 16, "block64"),
        ("sm_90", 16, "contiguous"),
        ("sm_90", 16, "fp8"),
        ("sm_90", 32, "block16"),
        ("sm_90", 32, "fp8"),
        ("sm_90", 128, "block64"),
        ("sm_90", 128, "block8"),
        ("sm_90", 128, "fp8"),
        ("sm_80", 16, "contiguous"),
        ("sm_80", 16, "fp8"),
        pytest.param("sm_100", 128, "block64", marks=pytest.mark.every_gpu),
        ("sm_100", 128, "fp8"),
        ("gfx942", 32, "block16"),
        ("gfx942", 32, "fp8"),
    ],
)
def test_every_kind_of_cache_compiles_within_limits(target_name, num_heads, kind):
    target, cache = TARGETS[target_name], CACHES[kind]
    shape = {"batch": 2, "kv_lora_rank": 512, "rope_dim": 64, "max_blocks": 128, "lens": "full"}
    make = TensorFactory(torch.bfloat16, "meta")
    arguments = OP.make_sample(make, num_heads=num_heads, with_lse=True, **shape, **cache)
    block_size = cache["block_size"] if cache.get("paged", True) else 0
    dtype = "8 bits" if kind == "fp8" else "16 bits"
    with (
        plain(target_name, num_heads, block_size, dtype),
        record_launches(target.capability) as launches,
    ):
        OP.impls["triton"](**arguments)
    names = [launch.kernel.name for launch in launches]
    assert names == ["_mla_attention_kernel", "_merge_kernel"]
    for launch in launches:
        compiled(launch, target_name)


@pytest.mark.parametrize("num_heads", [64, 128])
@pytest.mark.parametrize("is_paged", [True, False])
def test_warps_share_the_scores_on_hopper(num_heads, is_paged):
    """What the branches in the loop are for: no score is worked out twice."""
    axes = {"kv_lora_rank": 512, "rope_dim": 64, "block_size": 64, "max_blocks": 128}
    arguments = OP.make_sample(
        TensorFactory(torch.bfloat16, "meta"),
        batch=2, num_heads=num_heads, lens="full", paged=is_paged, **axes,
    )  # fmt: skip
    block_size = 64 if is_paged else 0
    with plain("sm_90", num_heads, block_size), record_launches((9, 0)) as launches:
        OP.impls["triton"](**arguments)
    resources = compiled(launches[0])
    assert "async_tma_copy" in resources.asm["ttgir"]
    assert set(re.findall(r"nvidia_mma<.*?warpsPerCTA = (\[.*?\])", resources.asm["ttgir"])) == {
        "[4, 2]"
    }


@pytest.mark.parametrize(
    ("batch", "heads", "splits"),
    # By bench.timing.Replay on an H200 the best, or no more than 6 % behind it.
    [
        *((1, 16, 32), (6, 16, 16), (24, 16, 5), (33, 16, 4), (65, 16, 2)),
        *((6, 64, 13), (48, 64, 2), (65, 64, 2), (100, 64, 1)),
        *((1, 128, 16), (17, 128, 3), (24, 128, 2), (33, 128, 2), (48, 128, 1), (100, 128, 1)),
    ],
)
def test_splits_take_least_time(batch, heads, splits):
    """By sequences of 4,096 keys: merging counts beside the waves."""
    programs = batch * -(-heads // 64)
    picked = [
        kernels.pick_splits(programs, 132, 64, most, batch * heads * 512) for most in (1, 2, 32)
    ]
    assert picked == [1, min(splits, 2), splits]


def test_splits_are_never_more_than_asked_for():
    for programs in range(1, 300):
        for most in (1, 8, 128):
            for numbers in (0, 10**6, 10**9):
                assert 1 <= kernels.pick_splits(programs, 132, 128, most, numbers) <= most
    assert kernels.pick_splits(64, 132, 128, 64, 64 * 64 * 512) == 2
    assert kernels.pick_splits(256, 132, 64, 32, 128 * 128 * 512) == 1
