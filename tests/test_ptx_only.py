"""Branches that no interpreter runs, since they need PTX, compile: a decoder's few tokens."""

import pytest
import torch

from ferrum_triton.backends.triton_provider import load_kernels
from ferrum_triton.kernels.jit import record_launches
from ferrum_triton.kernels.resources import TARGETS, compile_launch
from ferrum_triton.registry import OPS
from ferrum_triton.testing import TensorFactory

load_kernels("interpret")


@pytest.mark.parametrize(
    ("dtype", "num_tokens", "kernel"),
    [(torch.float32, 1, "gemv"), (torch.bfloat16, 5, "small_m")],
)
def test_products_of_few_tokens_compile(dtype, num_tokens, kernel):
    op, target = OPS["gemm_quant"], TARGETS["sm_90"]
    axes = {"kind": "Q4_K:planes", "m": num_tokens, "n": 256, "num_blocks": 8}
    call = op.make_sample(TensorFactory(dtype, "meta"), **axes)
    with record_launches(target.capability) as launches:
        op.impls["triton"](**call)
    assert kernel in launches[-1].kernel.name
    assert all(not compile_launch(launch, target).spilled for launch in launches)
