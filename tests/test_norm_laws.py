"""Laws of the norms, softmax and the float32 residual: what must hold whatever the inputs."""

import pytest
import torch

from ferrum_triton import InputError, get_backend
from ferrum_triton.kernels.gpu import gpu_of, gpu_of_capability
from ferrum_triton.kernels.resources import TARGETS
from ferrum_triton.kernels.tuning import TUNABLES
from ferrum_triton.registry import OPS, Case
from ferrum_triton.testing import assert_close
from tests.compiling import compiled, launches_of
from tests.harness import (
    BACKENDS,
    as_tuple,
    assert_call_matches,
    clone,
    expected,
    place_far_apart,
    sample,
)

HALVES = (torch.float16, torch.bfloat16)
SHAPES = [(1, 33), (3, 576), (40, 100)]


@pytest.fixture(params=BACKENDS)
def backend(request):
    return get_backend(request.param)


def normal(backend, *shape, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(backend.device, dtype)


@pytest.mark.parametrize("shape", SHAPES)
def test_rms_norm_sees_direction_not_length(backend, shape):
    x, weight = normal(backend, *shape), normal(backend, shape[1], seed=1)
    y = backend.rms_norm(x, weight, 0.0)
    for factor in (3.0, 1e-3, 1e4):
        assert_close(backend.rms_norm(x * factor, weight, 0.0), y)
    assert torch.equal(backend.rms_norm(-x, weight, 0.0), -y)


@pytest.mark.parametrize("shape", SHAPES)
def test_rms_norm_of_a_row_has_unit_mean_square(backend, shape):
    x, ones = normal(backend, *shape), torch.ones(shape[1], device=backend.device)
    y = backend.rms_norm(x, ones, 0.0)
    assert_close(y.square().mean(dim=1), torch.ones(shape[0], device=backend.device))


@pytest.mark.parametrize("name", ["rms_norm", "layer_norm"])
@pytest.mark.parametrize("shape", SHAPES)
def test_norms_are_linear_in_the_weight_and_blind_to_order(backend, name, shape):
    bias = () if name == "rms_norm" else (None,)
    x, weight = normal(backend, *shape), normal(backend, shape[1], seed=1)
    norm = getattr(backend, name)
    y = norm(x, weight, *bias)
    assert torch.equal(norm(x, 2 * weight, *bias), 2 * y)
    order = torch.randperm(shape[1], generator=torch.Generator().manual_seed(2))
    shuffled = norm(x[:, order].contiguous(), weight[order].contiguous(), *bias)
    assert_close(shuffled, y[:, order])


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
@pytest.mark.parametrize("wide", [False, True])
def test_fused_add_rms_norm_is_the_norm_of_what_it_stores(backend, dtype, wide):
    residual, x = (normal(backend, 40, 100, seed=i, dtype=dtype) for i in (3, 4))
    residual = residual.float() if wide else residual
    weight = normal(backend, 100, seed=5)
    want = (residual.float() + x.float()).to(residual.dtype)
    y = backend.fused_add_rms_norm(residual, x, weight)
    assert torch.equal(residual, want)
    again = backend.rms_norm_to(residual, weight, dtype)
    assert_close(y, again)
    if dtype == torch.float16:  # bfloat16 is float32 inside the interpreter
        # The norm of the sum before it was rounded differs in the last bit of many elements.
        assert (y != again).float().mean() < 0.02


@pytest.mark.parametrize("shape", SHAPES)
def test_layer_norm_sees_neither_shift_nor_scale(backend, shape):
    x, weight = normal(backend, *shape), normal(backend, shape[1], seed=1)
    bias = normal(backend, shape[1], seed=2)
    y = backend.layer_norm(x, weight, bias, 0.0)
    assert_close(backend.layer_norm(8 * x, weight, bias, 0.0), y)
    assert_close(backend.layer_norm(x + 4.0, weight, bias, 0.0), y, scale=20)  # x + 4 is rounded
    plain = backend.layer_norm(x, torch.ones_like(weight), None, 0.0)
    assert_close(plain.mean(dim=1), torch.zeros(shape[0], device=backend.device))
    assert_close(plain.square().mean(dim=1), torch.ones(shape[0], device=backend.device))
    assert_close(backend.layer_norm(x, weight, None, 0.0) + bias, y)


def test_layer_norm_does_not_cancel_far_from_zero(backend):
    """The mean square minus the squared mean would be wrong in the third digit here."""
    x = normal(backend, 3, 576) + 300.0
    ones = torch.ones(576, device=backend.device)
    want = torch.nn.functional.layer_norm(x.double(), (576,), eps=0.0)
    torch.testing.assert_close(
        backend.layer_norm(x, ones, None, 0.0).double(), want, rtol=2e-4, atol=2e-4
    )


def test_gated_rms_norm_is_a_norm_times_a_gate(backend):
    core, z = normal(backend, 40, 128), normal(backend, 40, 128, seed=1, dtype=torch.bfloat16)
    weight = normal(backend, 128, seed=2)
    y = backend.gated_rms_norm(core, z, weight)
    assert y.dtype == torch.float32
    wide = z.float()
    assert_close(y, backend.rms_norm(core, weight) * torch.nn.functional.silu(wide))
    assert torch.equal(backend.gated_rms_norm(core, z * 0, weight), torch.zeros_like(core))
    assert_close(backend.gated_rms_norm(core * 5, z, weight, 0.0), y, scale=2)


# 20000 columns are read block by block, 300 are held in registers.
@pytest.mark.parametrize("shape", [(3, 300), (40, 100), (2, 20000)])
def test_softmax_rows_are_distributions_blind_to_a_shift(backend, shape):
    x = 3 * normal(backend, *shape)
    y = backend.softmax_rows(x)
    assert_close(y.sum(dim=1), torch.ones(shape[0], device=backend.device))
    assert_close(backend.softmax_rows(x + 8.0), y, scale=4)  # x + 8 is rounded
    assert torch.equal(y.argmax(dim=1), x.argmax(dim=1))
    torch.testing.assert_close(y, torch.softmax(x, dim=1), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("size", [300, 20000])
def test_softmax_of_rows_with_infinities(backend, size):
    x = normal(backend, 5, size)
    x[0, : size // 2] = -torch.inf  # more than a block of it
    x[1] = -torch.inf
    x[2, size - 2] = torch.inf
    x[3, 1] = torch.nan
    y, want = backend.softmax_rows(x), torch.softmax(x, dim=1)
    torch.testing.assert_close(y, want, rtol=1e-5, atol=1e-7, equal_nan=True)
    assert not y[0].isnan().any()
    assert not y[4].isnan().any()
    assert y[1:4].isnan().all()


@pytest.mark.parametrize("name", ["rms_norm", "layer_norm", "gated_rms_norm", "softmax_rows"])
def test_norms_of_some_of_the_heads_of_a_product(backend, name):
    """Heads of packed rows: one stride from head to head, another from token to token."""
    qkv = normal(backend, 7, 6 * 40)
    weight = normal(backend, 40, seed=1)
    heads = qkv.view(7, 6, 40)
    rest = {"gated_rms_norm": (heads[:, 2:5], weight), "layer_norm": (weight, None)}
    rest = rest.get(name, (weight,)) if name != "softmax_rows" else ()
    got = getattr(backend, name)(heads[:, :3], *rest)
    copies = [r.contiguous() if r is not None else None for r in rest]
    assert_close(got, getattr(backend, name)(heads[:, :3].contiguous(), *copies))


@pytest.mark.parametrize("dtype", HALVES)
def test_sandwich_norms_do_not_round_on_the_way(backend, dtype):
    residual, x = normal(backend, 40, 100), normal(backend, 40, 100, seed=1, dtype=dtype)
    weight = normal(backend, 100, seed=2)
    assert torch.equal(backend.rms_norm_to(x, weight, dtype), backend.rms_norm(x, weight))
    wide = backend.rms_norm_to(x, weight, torch.float32)
    want = OPS["rms_norm"].reference(x.double(), weight.double())
    assert_close(wide, want)
    assert_close(wide.to(dtype), backend.rms_norm(x, weight))
    total = residual.clone()
    backend.rms_norm_add_inplace(total, x, weight)
    assert_close(total, residual.double() + want)


def test_a_float32_shadow_keeps_what_16_bits_lose(backend):
    small = torch.full((1, 64), 2.0**-9, device=backend.device, dtype=torch.bfloat16)
    shadow = torch.empty(1, 64, device=backend.device)
    narrow = torch.ones_like(small)
    backend.copy_slice(narrow, shadow)
    for _ in range(16):
        backend.add_inplace(shadow, small)
        backend.add_inplace(narrow, small)
    assert torch.equal(narrow, torch.ones_like(narrow))
    assert torch.equal(shadow, torch.full_like(shadow, 1 + 16 * 2.0**-9))
    backend.copy_slice(shadow, narrow)
    assert torch.equal(narrow, shadow.bfloat16())


@pytest.mark.parametrize("name", ["add_inplace", "rms_norm_add_inplace", "fused_add_rms_norm"])
def test_a_residual_is_of_its_inputs_dtype_or_float32(backend, name):
    x, weight = torch.zeros(2, 8, device=backend.device), torch.ones(8, device=backend.device)
    rest = () if name == "add_inplace" else (weight,)
    for residual, other in ((x.half(), x.bfloat16()), (x.half(), x)):
        with pytest.raises(InputError, match="residual"):
            getattr(backend, name)(residual, other, *rest)
    with pytest.raises(InputError, match="shape"):
        getattr(backend, name)(x, x[:1], *rest)


def test_rms_norm_to_takes_activation_dtypes_only(backend):
    x, weight = torch.ones(2, 8, device=backend.device), torch.ones(8, device=backend.device)
    with pytest.raises(InputError, match="dtype"):
        backend.rms_norm_to(x, weight, torch.float64)


ROW_OPS = ("rms_norm", "fused_add_rms_norm", "layer_norm", "rms_norm_to", "rms_norm_add_inplace")


@pytest.mark.parametrize("backend_name", BACKENDS[1:])
@pytest.mark.parametrize("name", [*ROW_OPS, "gated_rms_norm", "softmax_rows"])
@pytest.mark.parametrize("size", [5, 100, 600])
def test_every_candidate_computes_the_same(backend_name, name, size):
    """Seven rows, which tiles of two and four do not divide."""
    backend, op, tunable = get_backend(backend_name), OPS[name], TUNABLES[name]
    arguments = sample(
        op, torch.float16, backend.device, 3, **dict(zip(tunable.dims, (7, size), strict=True))
    )
    want, left = expected(op, arguments)
    gpu = gpu_of(torch.device(backend.device))
    configs = [*tunable.candidates(gpu, 7, size), tunable.heuristic(gpu, 10**6, size)]
    assert any(config["BLOCK_T"] > 1 for config in configs)
    for config in configs:
        fresh = clone(arguments)
        with tunable.forced(config):
            got = as_tuple(getattr(backend, name)(**fresh))
        assert_call_matches(op, got, fresh, want, left)


TWICE = {"READS": 2, "BLOCK_T": 1, "BLOCK_H": 64, "num_warps": 4}
TWICE_OPS = ("rms_norm", "fused_add_rms_norm", "rms_norm_to")


@pytest.mark.parametrize("backend_name", BACKENDS[1:])
@pytest.mark.parametrize("name", TWICE_OPS)
def test_rows_read_twice_go_on_where_a_block_ends(backend_name, name):
    """Two blocks and a part of a third, each with weights of its own."""
    backend, op = get_backend(backend_name), OPS[name]
    arguments = sample(op, torch.float16, backend.device, 3, num_tokens=4, hidden_size=150)
    want, left = expected(op, arguments)
    with TUNABLES[name].forced(TWICE):
        got = as_tuple(getattr(backend, name)(**arguments))
    assert_call_matches(op, got, arguments, want, left)


@pytest.mark.parametrize("name", TWICE_OPS)
def test_rows_read_twice_past_int32(name):
    """Whichever tensor it is whose rows lie 2^31 elements apart."""
    backend, op = get_backend("interpret"), OPS[name]
    near = sample(op, torch.float16, backend.device, 3, num_tokens=3, hidden_size=5)
    want, left = expected(op, near)
    empty = op.fake(**clone(near))
    with TUNABLES[name].forced(TWICE):
        for far in {"x", "residual"} & near.keys():
            arguments = clone(near)
            arguments[far] = place_far_apart(arguments[far], 0)
            got = as_tuple(getattr(backend, name)(**arguments))
            assert_call_matches(op, got, arguments, want, left)
        arguments, out = clone(near), place_far_apart(torch.zeros_like(empty), 0)
        getattr(backend, name)(**arguments, out=out)
        assert_call_matches(op, (out,), arguments, want, left)


@pytest.mark.parametrize("name", ROW_OPS)
@pytest.mark.parametrize("num_rows", [1, 100, 5000, 10**6])
@pytest.mark.parametrize("num_cols", [1, 576, 4096, 16384, 65536])
def test_heuristics_fit_the_row(name, num_rows, num_cols):
    config = TUNABLES[name].heuristic(gpu_of_capability((9, 0)), num_rows, num_cols)
    once = config.get("READS", 1) == 1
    assert (num_cols <= config["BLOCK_H"] or not once) and config["BLOCK_H"] < 2 * num_cols
    assert config["BLOCK_T"] == 1 or config["BLOCK_T"] * config["BLOCK_H"] <= 2048
    assert config["num_warps"] <= (32 if num_cols > 16384 else 16)


@pytest.mark.parametrize("target_name", TARGETS)
@pytest.mark.parametrize("name", ROW_OPS)
@pytest.mark.parametrize("num_tokens", [1, 4096])
def test_the_widest_rows_do_not_spill(name, target_name, num_tokens):
    target = TARGETS[target_name]
    axes = {"num_tokens": num_tokens, "hidden_size": 16384}
    for launch in launches_of(OPS[name], Case("wide", torch.bfloat16, axes), target):
        compiled(launch, target_name)
