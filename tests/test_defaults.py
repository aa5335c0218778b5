"""One default for all: an implementation called without an argument does what its op declares."""

import inspect

import pytest

from ferrum_triton.backends import torch_ops  # noqa: F401
from ferrum_triton.backends.metal import load_shaders
from ferrum_triton.backends.triton_provider import load_kernels
from ferrum_triton.registry import OPS

load_kernels("interpret")
load_shaders()


@pytest.mark.parametrize("op", [pytest.param(op, id=name) for name, op in OPS.items()])
def test_implementations_have_the_defaults_of_their_op(op):
    declared = {name: p.default for name, p in op.signature.parameters.items()}
    for provider, implementation in op.impls.items():
        parameters = inspect.signature(implementation).parameters
        assert {name: parameters[name].default for name in declared} == declared, provider
