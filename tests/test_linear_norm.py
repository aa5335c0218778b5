"""Norms behind dense products: numbers of two steps, a launch less for each, what models call."""

from collections import Counter

import pytest
import torch

from ferrum_triton import InputError, get_backend
from ferrum_triton.kernels.jit import record_launches
from ferrum_triton.kernels.linear_config import gemm_config, mma, tiles
from ferrum_triton.models import Llama
from ferrum_triton.models.linear import Linear, Norm, OpenNorm, ReadyNorm, norm_after
from ferrum_triton.models.weights import load_weights
from ferrum_triton.quant import QuantizedTensor, dequantize_rows
from ferrum_triton.registry import OPS
from ferrum_triton.testing import assert_close
from tests.test_quant_ops import seeded
from tests.tiny_models import PACKED, PackedSource

EPS = 1e-5
MMA, TILES = "_mma_norm_kernel", "_tiles_kernel"


@pytest.fixture(params=["interpret", pytest.param("cuda", marks=pytest.mark.gpu)])
def backend(request):
    return get_backend(request.param)


@pytest.fixture
def choose():
    """Forces a launch choice of dense products; the test's own tables are forgotten behind it."""
    forced = []

    def force(config):
        forced.append(gemm_config.forced(config))
        forced[-1].__enter__()

    yield force
    while forced:
        forced.pop().__exit__(None, None, None)


def draw(*shape, seed, dtype=torch.float32, device="cpu"):
    return torch.randn(shape, generator=seeded(seed)).to(device, dtype)


def operands(m, n, k, dtype, device, residual_dtype=torch.float32):
    a = draw(m, k, seed=1, dtype=dtype, device=device)
    b = draw(n, k, seed=2, dtype=dtype, device=device) * k**-0.5
    residual = draw(m, n, seed=3, dtype=residual_dtype, device=device)
    return a, b, residual, draw(n, seed=4, device=device)


@pytest.mark.parametrize(
    ("config", "m", "n", "k"),
    [
        (mma(16, 2, 2, 0), 1, 64, 256),
        (mma(8, 2, 2, 0), 2, 40, 136),  # columns past the end
        (mma(16, 2, 2, 0), 7, 37, 128),  # a last part of five rows
        (mma(32, 2, 2, 0), 8, 64, 128),
        (tiles(16, 64, 2, 4, 2), 9, 33, 200),
    ],
)
@pytest.mark.parametrize("residual_dtype", [torch.float32, torch.bfloat16])
def test_an_opened_norm_is_that_of_two_steps(backend, choose, config, m, n, k, residual_dtype):
    choose(config)
    call = operands(m, n, k, torch.bfloat16, backend.device, residual_dtype)
    a, b, residual, norm_weight = call
    before = residual.clone()
    y, h, squares = backend.linear_open_norm(*call)
    assert torch.equal(residual, before)
    want = residual.double() + a.double() @ b.double().T
    assert_close(y, want, scale=2)
    assert_close(h, want * norm_weight.double(), scale=2)
    columns = torch.nn.functional.pad(want.square(), (0, -n % 8))
    assert_close(squares, columns.unflatten(1, (-1, 8)).sum(dim=2), scale=4)


@pytest.mark.parametrize(
    ("config", "m", "k"),
    [
        (mma(16, 2, 2, 0), 1, 256),
        (mma(32, 2, 2, 0), 2, 128),
        (mma(16, 2, 2, 0), 3, 128),  # more tokens than a product divides itself
        (tiles(16, 64, 2, 4, 2), 9, 200),
    ],
)
def test_products_divide_as_the_norm_would(backend, choose, config, m, k):
    """A token of zeros, one that is not finite, and the others."""
    choose(config)
    r = 3 * draw(m, k, seed=5, device=backend.device)
    r[0] = 0 if m > 1 else r[0]
    h = (r * draw(k, seed=6, device=backend.device)).bfloat16()
    squares = r.square().unflatten(1, (-1, 8)).sum(dim=2)
    n = h.double() * torch.rsqrt(r.double().square().mean(dim=1, keepdim=True) + EPS)
    if m > 2:
        h[2, 7], squares[2, 0], n[2] = torch.inf, torch.inf, torch.nan
    b = draw(24, k, seed=7, dtype=torch.bfloat16, device=backend.device)
    want = n @ b.double().T
    assert_close(backend.open_norm_linear(h, squares, EPS, b), want, scale=4)
    gate, up = want.chunk(2, dim=1)
    gated = torch.nn.functional.gelu(gate, approximate="tanh") * up
    got = backend.open_norm_gate_up_silu(h, squares, EPS, b, "gelu_tanh")
    assert_close(got, gated, scale=8)


def test_columns_need_be_no_whole_parts(backend):
    """The mean is over 33 columns, not over the 40 of five parts."""
    r = draw(2, 33, seed=5, device=backend.device)
    b = draw(6, 33, seed=7, device=backend.device)
    squares = torch.nn.functional.pad(r.square(), (0, 7)).unflatten(1, (-1, 8)).sum(dim=2)
    n = r.double() * torch.rsqrt(r.double().square().mean(dim=1, keepdim=True) + EPS)
    want = n @ b.double().T
    assert_close(backend.open_norm_linear(r, squares, EPS, b), want, scale=2)
    gate, up = want.chunk(2, dim=1)
    silu = torch.nn.functional.silu(gate) * up
    assert_close(backend.open_norm_gate_up_silu(r, squares, EPS, b), silu, scale=4)


@pytest.mark.parametrize(
    ("config", "m", "n"),
    [
        (tiles(16, 64, 3, 4, 2), 9, 200),
        (tiles(16, 64, 1, 4, 2), 20, 33),
        (mma(16, 2, 2, 0), 5, 64),
    ],
)
@pytest.mark.parametrize("residual_dtype", [torch.float32, torch.bfloat16])
def test_a_norm_adds_up_a_products_parts(backend, choose, config, m, n, residual_dtype):
    choose(config)
    a, b, residual, weight = operands(m, n, 256, torch.bfloat16, backend.device, residual_dtype)
    want = (residual.double() + a.double() @ b.double().T).to(residual_dtype)
    got = backend.linear_add_rms_norm(a, b, residual, weight, EPS)
    assert_close(residual, want.double(), scale=2)
    r = residual.double()
    norm = r * torch.rsqrt(r.square().mean(dim=1, keepdim=True) + EPS) * weight.double()
    assert_close(got, norm)


def launches(op, *arguments):
    placed = (a.to("meta") if isinstance(a, torch.Tensor) else a for a in arguments)
    with record_launches((9, 0)) as recorded:
        OPS[op].impls["triton"](*placed)
    return [launch.kernel.name for launch in recorded]


def test_what_is_one_launch():
    one = operands(1, 4096, 4096, torch.bfloat16, "meta")
    assert launches("linear_open_norm", *one) == [MMA]
    h, squares = torch.empty(1, 4096, dtype=torch.bfloat16), torch.empty(1, 512)
    b = torch.empty(6144, 4096, dtype=torch.bfloat16)
    assert launches("open_norm_linear", h, squares, EPS, b) == [MMA]
    wide = torch.empty(24576, 4096, dtype=torch.bfloat16)
    assert launches("open_norm_gate_up_silu", h, squares, EPS, wide) == ["_close_gated_kernel"]
    many = operands(32, 4096, 4096, torch.bfloat16, "meta")
    assert launches("linear_add_rms_norm", *many) == [TILES, "_add_partials_norm_kernel"]
    long = operands(4, 32776, 16, torch.bfloat16, "meta")
    assert launches("linear_add_rms_norm", *long)[-1] == "_fused_add_rms_norm_kernel"


def test_rows_longer_than_registers_are_normed_by_a_launch_more(backend):
    a, b, residual, weight = operands(2, 32776, 8, torch.bfloat16, backend.device)
    want = residual.double() + a.double() @ b.double().T
    got = backend.linear_add_rms_norm(a, b, residual, weight, EPS)
    norm = want * torch.rsqrt(want.square().mean(dim=1, keepdim=True) + EPS) * weight.double()
    assert_close(got, norm, scale=2)
    assert got.dtype == torch.bfloat16


class DenseSource(PackedSource):
    """The same weights, decoded."""

    def packed(self):
        return []

    def fetch(self, name):
        found = super().fetch(name)
        is_packed = isinstance(found, QuantizedTensor)
        return dequantize_rows(found.blocks, found.kind) if is_packed else found


def tiny(backend, dtype):
    return Llama(PACKED, load_weights(DenseSource(), PACKED, backend, dtype), backend, dtype)


@pytest.mark.parametrize(
    ("num_tokens", "opened", "closed", "gated", "whole"),
    [(1, 3, 1, 2, 1), (3, 1, 0, 1, 3)],
)
def test_what_a_step_calls(monkeypatch, num_tokens, opened, closed, gated, whole):
    """Norms are open for one token, as the last layer's MLP has; for more the product norms."""
    ours, calls = tiny(get_backend("interpret"), torch.bfloat16), Counter()
    for name in [name for name in OPS if "norm" in name]:

        def counted(*args, name=name, call=getattr(ours.backend, name), **kwargs):
            calls[name] += 1
            return call(*args, **kwargs)

        monkeypatch.setattr(ours.backend, name, counted, raising=False)
    ours.forward(list(range(num_tokens)), ours.new_cache(8))
    assert calls["linear_open_norm"] == opened
    assert calls["open_norm_linear"] == closed
    assert calls["open_norm_gate_up_silu"] == gated
    assert calls["linear_add_rms_norm"] == whole
    assert calls["fused_add_rms_norm"] == 1


@pytest.mark.parametrize(
    ("name", "m", "dtype", "kind"),
    [
        ("interpret", 1, torch.bfloat16, OpenNorm),
        ("interpret", 1, torch.float16, ReadyNorm),
        ("interpret", 2, torch.bfloat16, ReadyNorm),
        ("interpret", 65, torch.bfloat16, Norm),
        ("interpret", 1, torch.float32, Norm),
        ("cpu", 1, torch.bfloat16, Norm),
    ],
)
def test_what_models_ask_of_a_norm(name, m, dtype, kind):
    backend = get_backend(name)
    weight = draw(64, 64, seed=1, dtype=dtype)
    x, residual = draw(m, 64, seed=2, dtype=dtype), draw(m, 64, seed=3)
    norm = norm_after(backend, x, Linear(weight), residual, torch.ones(64), EPS, Linear(weight))
    assert type(norm) is kind
    biased = Linear(weight, torch.zeros(64))
    assert type(norm_after(backend, x, biased, residual, torch.ones(64), EPS, biased)) is Norm


def test_a_models_logits_are_those_of_closed_norms(backend):
    """A step of one token behind others, in bfloat16, beside float32 on a CPU."""
    ids = [3, 1, 4, 1, 5]
    exact = tiny(get_backend("cpu"), torch.float32)
    want = exact.forward(ids, exact.new_cache(8))[0]
    ours = tiny(backend, torch.bfloat16)
    cache = ours.new_cache(8)
    ours.forward(ids[:-1], cache)
    got = ours.forward(ids[-1:], cache)[0].float().cpu()
    assert (got - want).norm() < 0.03 * want.norm()


def test_wrong_calls_are_refused():
    backend = get_backend("cpu")
    a, b, residual, weight = operands(2, 3, 64, torch.float32, "cpu")
    h, squares = torch.ones(2, 64), torch.ones(2, 8)
    odd = torch.ones(3, 64)
    for door, arguments, name in (
        (backend.open_norm_linear, (h, squares[:, :7], EPS, b), "squares"),
        (backend.open_norm_gate_up_silu, (h, squares[:, :7], EPS, b[:2]), "squares"),
        (backend.open_norm_gate_up_silu, (h, squares, EPS, odd), "b"),
        (backend.open_norm_gate_up_silu, (h, squares, EPS, b[:2], "relu"), "activation"),
        (backend.linear_open_norm, (a, b, residual.half(), weight), "residual"),
        (backend.linear_add_rms_norm, (a, b, residual.half(), weight), "residual"),
    ):
        with pytest.raises(InputError) as error:
            door(*arguments)
        assert error.value.argument == name
