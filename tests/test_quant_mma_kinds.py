"""Two matrices of two kinds of weights, multiplied in one launch of tensor cores."""

import pytest
import torch

from ferrum_triton.kernels.jit import record_launches
from ferrum_triton.kernels.quant.activations import arrange
from ferrum_triton.kernels.quant.gemv_fused import gemv_quant_qkv
from ferrum_triton.kernels.quant.mma import mma_products, order_of
from ferrum_triton.kernels.resources import TARGETS
from ferrum_triton.quant.planes import PLANE_FORMATS
from tests.compiling import compiled, in_turns
from tests.test_quant_formats import assert_same_bits
from tests.test_quant_mma import SMALL, packed, planes_of


@pytest.mark.parametrize(
    "kinds", (("Q4_K", "Q6_K"), ("Q6_K", "Q4_K"), ("Q3_K", "Q5_K"), ("Q4_K", "NVFP4"))
)
@pytest.mark.parametrize("splits", (1, 2))
@pytest.mark.parametrize("use_tma", (False, True))
def test_two_kinds_in_one_launch_give_the_bits_of_two(kinds, splits, use_tma):
    rows = 70, 37
    config = SMALL._replace(splits=splits, use_tma=use_tma)
    planes = [
        planes_of(packed(kind, n, 1024), kind) for kind, n in zip(kinds, (70, 37), strict=True)
    ]
    first, second = [f"{kind}:planes" for kind in kinds]
    arranged = arrange(torch.randn(17, 1024).bfloat16(), order_of(first, config))
    got, want = (torch.full((17, 107), torch.nan, dtype=torch.bfloat16) for _ in range(2))
    mma_products(got, arranged, planes, first, config, 1024, second_kind=second)
    for y, w, kind in zip(want.split(rows, dim=1), planes, (first, second), strict=True):
        mma_products(y, arranged, [w], kind, config, 1024)
    assert_same_bits(got, want)
    assert got.isfinite().all()


@pytest.mark.parametrize("arch", ("sm_80", "sm_90", "sm_100", "gfx942"))
@pytest.mark.parametrize(
    ("kinds", "count"),
    [
        (("Q4_K", "Q6_K"), 1),
        (("Q6_K", "Q4_K"), 1),
        (("Q4_K", "Q5_K"), 2),  # of another order
        (("Q4_K", "Q6_K", "Q4_K"), 3),
    ],
)
def test_what_takes_activations_in_one_order_is_one_launch(kinds, count, arch):
    names = [f"{kind}:planes" for kind in kinds]
    q, *key, value = (
        torch.empty(1024, PLANE_FORMATS[n].row_bytes(4096), dtype=torch.uint8, device="meta")
        for n in names
    )
    a = torch.empty(32, 4096, dtype=torch.bfloat16, device="meta")
    with record_launches(TARGETS[arch].capability) as launches:
        gemv_quant_qkv(a, q, *(key or [None]), value, names[0], names[1], names[-1])
    products_of = [launch for launch in launches if "mma" in launch.kernel.name]
    assert len(products_of) == count


@pytest.mark.parametrize(
    ("kinds", "num_tokens"), in_turns((("Q4_K", "Q6_K"), ("Q3_K", "Q5_K")), [(64,), (16,)])
)
def test_two_kinds_compiled_for_hopper(kinds, num_tokens):
    kinds = [f"{kind}:planes" for kind in kinds]
    a = torch.empty(num_tokens, 4096, dtype=torch.bfloat16, device="meta")
    q, value = (
        torch.empty(1024, PLANE_FORMATS[kind].row_bytes(4096), dtype=torch.uint8, device="meta")
        for kind in kinds
    )
    with record_launches(capability=(9, 0)) as launches:
        gemv_quant_qkv(a, q, None, value, kinds[0], "", kinds[1])
    compiled(launches[-1])
