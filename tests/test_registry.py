"""The registry as a whole: every op is declared in full, and what is generated is current."""

import re

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from ferrum_triton import get_backend
from ferrum_triton.backends import stub
from ferrum_triton.registry import OPS, Case, op
from ferrum_triton.testing import TensorFactory
from tests.harness import ALL_OPS, as_tuple, clone, in_planes, sample, tensors, typical_axes


@pytest.mark.parametrize("op", ALL_OPS)
def test_declarations_are_whole(op):
    assert op.bench, "no bench case"
    assert len({case.id for case in op.bench}) == len(op.bench)
    doc = op.reference.__doc__
    assert doc and len(doc.split("\n")[0]) > 20, "no equation"
    declared = set(op.contract.specs)
    annotated = {
        name for name, p in op.signature.parameters.items() if "Tensor" in str(p.annotation)
    }
    assert declared == annotated, "the contract and the signature name different tensors"


@pytest.mark.parametrize("op", ALL_OPS)
def test_traffic_is_at_least_the_outputs(op):
    arguments = sample(op, torch.float32, "cpu", 0, **typical_axes(op))
    outputs = as_tuple(op.reference(**clone(arguments)))
    moved = op.bytes_moved(arguments, outputs)
    assert moved >= sum(t.numel() * t.element_size() for t in outputs)
    everything = [*tensors(arguments).values(), *outputs]
    assert moved <= 2 * sum(t.numel() * t.element_size() for t in everything) + 64
    operations = op.operations(arguments)
    assert operations is None or operations > 0


@pytest.mark.parametrize("op", ALL_OPS)
def test_bench_samples_build_without_memory(op):
    for case in op.bench:
        arguments = op.make_sample(TensorFactory(case.dtype, "meta"), **case.axes)
        assert all(t.device.type == "meta" for t in tensors(arguments).values())


@pytest.mark.parametrize("op", ALL_OPS)
def test_fakes_return_contiguous_tensors(op):
    """As kernels do, whatever the strides of what they are given."""
    arguments = sample(op, op.dtypes[0], "cpu", 1, **typical_axes(op))
    for name, value in tensors(arguments).items():
        if value.dim() > 1 and not in_planes(arguments, name):
            wide = value.new_empty([*value.shape[:-1], value.shape[-1] + 3])
            arguments[name] = wide[..., :-3]
            if value.dim() > 2:
                arguments[name] = wide.transpose(0, 1).contiguous().transpose(0, 1)[..., :-3]
    with FakeTensorMode() as mode:
        arguments |= {n: mode.from_tensor(value) for n, value in tensors(arguments).items()}
        results = as_tuple(op.torch_op(**arguments))
    assert len(results) == op.num_outputs and all(t.is_contiguous() for t in results)


def test_flash_attention_counts_what_is_visible():
    """A causal square needs half the operations of a full one; a window caps each row."""
    flash = OPS["flash_attention"]
    shape = {"batch": 1, "num_kv_heads": 1, "group_size": 1, "head_dim": 16, "q_len": 64}
    count = {
        (causal, window): flash.operations(
            sample(flash, torch.float32, "meta", 0, **shape, kv_len=64, causal=causal)
            | {"sliding_window": window}
        )
        for causal, window in ((False, 0), (True, 0), (True, 8))
    }
    assert count[False, 0] == 4 * 16 * 64 * 64
    assert count[True, 0] == 4 * 16 * 64 * 65 // 2
    assert count[True, 8] == 4 * 16 * (36 + 56 * 8)


def test_stub_is_current():
    assert stub.STUB.read_text() == stub.render(), "run `make stubs`"
    compile(stub.render(), "backend.pyi", "exec")


def test_stub_names_every_op():
    assert set(OPS) <= set(re.findall(r"def (\w+)\(", stub.render()))


def test_implementations_must_match_the_reference():
    with pytest.raises(TypeError, match="its op declares"):

        @OPS["rms_norm"].impl("mistaken")
        def _(x, w, eps=1e-6, *, out=None):
            return x


def test_doors_have_the_ops_own_signature():
    door = get_backend("cpu").rms_norm
    x, weight = torch.randn(2, 8), torch.randn(8)
    assert torch.equal(door(x, weight), door(weight=weight, x=x, eps=1e-6))
    assert door.__doc__ == OPS["rms_norm"].reference.__doc__
    with pytest.raises(TypeError, match="unexpected keyword"):
        door(x, weight, epsilon=1e-6)


def test_doors_forget_before_they_grow_without_bound(monkeypatch):
    from ferrum_triton.backends import door as door_module

    monkeypatch.setattr(door_module, "MAX_ADMITTED", 3)
    backend = get_backend("cpu")
    door = door_module.make_door(OPS["add_bias"], OPS["add_bias"].reference, "cpu")
    for n in range(1, 12):
        door(torch.zeros(2, n), torch.zeros(n))
    assert len(door.__globals__["admitted"]) <= 3
    assert backend.supports("add_bias")


def test_a_declaration_without_contract_errors_early():
    with pytest.raises(ValueError, match="not a tensor spec"):

        @op(tensors={"x": "Q[n]"}, axes={}, bench=[Case("x", torch.float32)])
        def never_registered(x: torch.Tensor) -> torch.Tensor:
            return x

    assert "never_registered" not in OPS
