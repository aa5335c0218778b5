"""Launch choices of products by 9 tokens and more: tiles, and how K is split."""

import pytest
import torch

from ferrum_triton.kernels.gpu import gpu_of_arch, gpu_of_capability
from ferrum_triton.kernels.jit import record_launches
from ferrum_triton.kernels.quant.mma_config import (
    at_once,
    least_tile,
    mma_candidates,
    mma_fits,
    mma_heuristic,
)
from ferrum_triton.kernels.quant.products import mma, product, products
from ferrum_triton.kernels.rows import next_power_of_2
from ferrum_triton.quant.planes import PLANE_FORMATS
from tests.compiling import compiled, in_turns

NAMES = [form.file.name for form in PLANE_FORMATS.values()]


@pytest.mark.parametrize(("num_rows", "num_groups"), [(4096, 448), (28672, 128), (6144, 128)])
def test_rows_of_a_table_serve_the_tokens_that_their_tiles_are_for(num_rows, num_groups):
    """The row of 16 tokens is the nearest for 17, and where there is none that of 32 for 16."""
    gpu = gpu_of_capability((9, 0))
    with record_launches((9, 0)):
        for num_tokens in (9, 16, 17, 20, 31, 33, 40, 47, 64, 65, 100, 129, 300):
            shape = ("Q4_K", "many", num_tokens, num_rows, num_groups)
            config = products.pick(torch.device("meta"), *shape)
            if config["path"] == "small_m":
                assert num_tokens <= 16 and num_rows <= 6144
                continue
            assert config["tokens"] >= min(num_tokens, 128)
            assert num_tokens > 128 or config["tokens"] <= max(next_power_of_2(num_tokens), 16)
            if config["path"] == "mma":
                assert config["tokens"] >= least_tile(gpu, "Q4_K", num_tokens)
    small = mma(mma_heuristic(gpu, "Q4_K", 16, num_rows, 32 * num_groups))
    refused = products.fits(gpu, small, "Q4_K", "many", 16, num_rows, num_groups)
    # 28672 rows are 3.4 tiles of 64 for an SM, which packed products take in less.
    assert ("by count" in refused) == (num_rows == 28672)
    assert "in tiles of 16" in products.fits(gpu, small, "Q4_K", "many", 17, num_rows, num_groups)
    large = mma(mma_heuristic(gpu, "Q4_K", 32, num_rows, 32 * num_groups))
    refused = products.fits(gpu, large, "Q4_K", "many", 16, num_rows, num_groups)
    assert "for more than 16 tokens" in refused


@pytest.mark.parametrize("num_tokens", [9, 16, 17, 32])
@pytest.mark.parametrize("k", [768, 4096, 9728, 25600])
@pytest.mark.parametrize("num_rows", [64, 1000, 4096, 5120, 6144, 14336, 24576, 28672])
def test_k_is_split_among_programs_that_run_at_once(num_rows, k, num_tokens):
    """As many as an H200 holds, three to an SM, each with steps of its own."""
    gpu = gpu_of_arch("sm_90")
    config = mma_heuristic(gpu, "Q4_K", num_tokens, num_rows, k)
    tiles, steps, room = -(-num_rows // 64), -(-k // 256), at_once(gpu, config, "Q4_K")
    assert room == 3 * 132
    each = -(-steps // config.splits)
    assert -(-steps // each) == config.splits  # none without steps
    assert config.splits == 1 or tiles * config.splits <= room
    assert config.splits == 1 or k >= 512 * config.splits
    more = -(-steps // max(each - 1, 1))  # parts of a step less each
    assert each == 1 or tiles * more > room or 512 * more > k
    assert bool(config.maxnreg) == (num_tokens <= 16 and tiles * config.splits > room)


def test_rows_of_a_table_serve_shapes_whose_programs_run_at_once_too():
    """Six parts of 64 tiles are 384 programs, of 96 tiles more than run at once."""
    gpu = gpu_of_arch("sm_90")
    few, many = (mma(mma_heuristic(gpu, "Q4_K", 16, n, 4096)) for n in (4096, 28672))
    assert (few["splits"], many["splits"], many["maxnreg"]) == (6, 1, 128)

    def refused(config, num_rows):
        return products.fits(gpu, config, "Q4_K", "many", 16, num_rows, 128)

    assert refused(few, 4096) == refused(many, 57344) == ""
    assert "by count" in refused(many, 28672)
    assert "do not run at once" in refused(few, 6144)
    assert "without a bound on registers" in refused(many, 24576)


@pytest.mark.parametrize(
    ("name", "num_tokens"),
    in_turns(("Q4_K", "Q5_K", "Q6_K", "Q8_0", "Q3_K", "MXFP4"), [(16,), (32,)]),
)
def test_an_sm_holds_as_many_programs_as_k_is_split_among(name, num_tokens):
    """By registers, which come by eights, and by shared memory, of which each takes 1 KB more."""
    gpu, kind = gpu_of_arch("sm_90"), f"{name}:planes"
    config = mma_heuristic(gpu, kind, num_tokens, 4096, 12288)
    assert config.splits > 1
    a = torch.empty(num_tokens, 12288, dtype=torch.bfloat16, device="meta")
    row_bytes = PLANE_FORMATS[kind].row_bytes(12288)
    planes = torch.empty(4096, row_bytes, dtype=torch.uint8, device="meta")
    with record_launches((9, 0)) as launches, products.forced(mma(config)):
        product(a, planes, kind)
    used = compiled(launches[-1])
    held = min(
        65536 // (-(-used.registers // 8) * 8 * 128),
        (gpu.shared_limit + 1024) // (used.shared + 1024),
    )
    assert 132 * min(held, 3) == at_once(gpu, config, kind)


def test_tiles_fit_every_gpu():
    for arch, capability in (("sm_80", (8, 0)), ("sm_86", (8, 6)), ("sm_120", (12, 0))):
        gpu = gpu_of_capability(capability)
        assert gpu.arch == arch
        for kind in NAMES:
            for num_tokens in (9, 32, 64, 300):
                config = mma_heuristic(gpu, f"{kind}:planes", num_tokens, 4096, 4096)
                assert mma_fits(gpu, config, kind) == ""
                assert all(
                    mma_fits(gpu, each, kind) == ""
                    for each in mma_candidates(gpu, kind, num_tokens, 4096, 4096)
                )
