"""Branches that no interpreter runs, since they need PTX, compile: a decoder's few tokens."""

import pytest
import torch

from ferrum_triton.backends.triton_provider import load_kernels
from ferrum_triton.kernels.jit import record_launches
from ferrum_triton.kernels.quant import quad_products
from ferrum_triton.kernels.quant.ptx import word_of_values
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


def test_operands_of_the_instruction_are_in_its_order(monkeypatch):
    """d = a · b + c of mma.m16n8k16: four of a, two of b, four of c, which an interpreter skips."""
    passed = lambda asm, constraints, args, **options: args  # noqa: E731
    monkeypatch.setattr(quad_products.tl, "inline_asm_elementwise", passed)
    acc, a, b = ("c0", "c1", "c2", "c3"), ("a0", "a1", "a2", "a3"), ("b0", "b1")
    assert quad_products._mma.fn(acc, a, b, PTX=True) == (*a, *b, *acc)


@pytest.mark.parametrize(("i", "bias"), [(0, 128), (1, 0), (1, 7)])
def test_a_word_has_four_values_and_the_bias(i, bias):
    values = (-127, -1, 0, 5, 100, 127)
    word = word_of_values(values, i, bias)
    found = int(getattr(word, "value", word)).to_bytes(4, "little")
    some = [(value + bias) % 256 for value in values[4 * i : 4 * i + 4]]
    assert list(found) == some + [0] * (4 - len(some))
