"""Several matrices at once: one launch for few rows in planes, and the same numbers by any way."""

import pytest
import torch

from ferrum_triton import OPS, InputError, get_backend
from ferrum_triton.kernels.jit import record_launches
from ferrum_triton.kernels.quant.gemv_config import gemv, persistent
from ferrum_triton.kernels.quant.mma_config import MmaConfig
from ferrum_triton.kernels.quant.partials import add_partials
from ferrum_triton.kernels.quant.products import (
    gemm_quant,
    linear_quant,
    mma,
    product,
    products,
    small_m,
)
from ferrum_triton.kernels.quant.small_m_config import SmallM
from ferrum_triton.models.linear import Linear, Norm, apply, apply_to_norm, gated_norm
from ferrum_triton.quant import FusedTensor, QuantizedTensor
from ferrum_triton.quant.kinds import quantize_rows
from ferrum_triton.testing import TensorFactory, assert_close
from tests.harness import BACKENDS
from tests.test_quant_ops import seeded


@pytest.fixture(params=BACKENDS)
def backend(request):
    return get_backend(request.param)


def weight(kind, n, seed, device="cpu", k=512):
    dense = torch.randn(n, k, generator=seeded(seed)) * k**-0.5
    return QuantizedTensor(quantize_rows(dense, kind), kind).to(device)


def activations(m, device, dtype=torch.float32, k=512):
    return torch.randn(m, k, generator=seeded(9)).to(device, dtype)


def launches(op, *arguments):
    placed = (a.to("meta") if isinstance(a, torch.Tensor) else a for a in arguments)
    with record_launches() as recorded:
        getattr(get_backend("interpret"), op).__globals__["implementation"](*placed)
    return [launch.kernel.name for launch in recorded]


@pytest.mark.parametrize(
    ("kinds", "m", "count"),
    [
        (("Q4_K:planes", "Q6_K:planes"), 2, 1),
        (("Q4_K:planes", "Q6_K"), 2, 3),
        (("Q4_K:planes", "Q4_K:planes"), 3, 5),
    ],
)
def test_few_rows_in_planes_are_one_launch(kinds, m, count):
    gate, up = (weight(kind, 4, i) for i, kind in enumerate(kinds))
    a = activations(m, "meta", torch.bfloat16)
    assert len(launches("gemv_quant_gate_up_silu", a, gate.blocks, up.blocks, *kinds)) == count
    qkv = launches("gemv_quant_qkv", a, gate.blocks, None, up.blocks, kinds[0], "", kinds[1])
    assert (len(qkv) == 1) == (count == 1)


@pytest.mark.parametrize(
    ("m", "num_rows", "num_blocks", "rows"),
    [(1, 5120, 16, 16), (2, 5120, 16, 8), (1, 2560, 8, 8), (1, 9216, 16, 8), (1, 5120, 8, 8)],
)
def test_programs_of_one_token_by_q_k_and_v_have_16_rows(m, num_rows, num_blocks, rows):
    """Of a Q4_K_M model's Q and K in Q4_K beside V in Q6_K, where 8 took 20 % longer."""
    op = OPS["gemv_quant_qkv"]
    kinds = {"q_kind": "Q4_K:planes", "k_kind": None, "v_kind": "Q6_K:planes"}
    axes = {"nq": num_rows, "nkv": 512, "num_blocks": num_blocks, "m": m}
    sample = op.make_sample(TensorFactory(torch.bfloat16, "meta"), **kinds, **axes)
    with record_launches((9, 0)) as recorded:
        op.impls["triton"](**sample)
    assert [launch.meta["PLAN"].rows for launch in recorded] == [rows]


@pytest.mark.parametrize(
    ("kinds", "n", "num_blocks", "names"),
    [
        (("Q4_K", "Q4_K"), 8192, 8, ["_arrange_kernel", "_small_m_kernel"]),
        (("Q4_K", "Q4_K"), 12288, 16, ["_arrange_kernel", "packed_kernel"]),
        (("Q4_K", "Q6_K"), 12288, 16, ["_arrange_kernel", "_small_m_kernel"]),
    ],
)
def test_a_pair_of_16_tokens_is_one_launch(kinds, n, num_blocks, names):
    """Tiles would take gate and up of two kinds in a launch each."""
    op, (gate, up) = OPS["gemv_quant_gate_up_silu"], kinds
    axes = {"n": n, "num_blocks": num_blocks, "activation": "silu", "m": 16}
    sample = op.make_sample(
        TensorFactory(torch.bfloat16, "meta"),
        gate_kind=f"{gate}:planes",
        up_kind=f"{up}:planes",
        **axes,
    )
    with record_launches((9, 0)) as recorded:
        op.impls["triton"](**sample)
    assert [launch.kernel.name for launch in recorded] == names


@pytest.mark.parametrize(
    ("kinds", "nq", "name"),
    [
        (("Q4_K", "Q6_K"), 4096, "_small_m_kernel"),
        (("Q4_K", "Q6_K"), 8192, "_mma_quant_kernel"),
        (("Q5_K", "Q6_K"), 8192, "_small_m_kernel"),
    ],
)
def test_q_k_and_v_of_two_kinds_are_one_launch(kinds, nq, name):
    """Where the kinds have no tile together, even if tiles of one kind would take less time."""
    op, (qk, v) = OPS["gemv_quant_qkv"], kinds
    sample = op.make_sample(
        TensorFactory(torch.bfloat16, "meta"),
        q_kind=f"{qk}:planes",
        k_kind=None,
        v_kind=f"{v}:planes",
        nq=nq,
        nkv=2048,
        num_blocks=16,
        m=12,
    )
    with record_launches((9, 0)) as recorded:
        op.impls["triton"](**sample)
    assert [launch.kernel.name for launch in recorded] == ["_arrange_kernel", name]


@pytest.mark.parametrize("m", [1, 2, 3, 8, 12, 70])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_products_are_those_of_gemv_quant(backend, m, dtype):
    """Parts of no rows and of fewer than a program takes."""
    kinds = ("Q4_K:planes", "Q8_0:planes", "Q3_K:planes")
    parts = [weight(kinds[i], n, i, backend.device) for i, n in enumerate((7, 0, 2))]
    a = activations(m, backend.device, dtype)
    want = torch.cat([backend.gemm_quant(a, p.blocks, p.kind) for p in parts], dim=1)
    got = backend.gemv_quant_qkv(a, *(p.blocks for p in parts), *kinds)
    assert_close(got, want)


@pytest.mark.parametrize(
    "kinds",
    [
        ("Q4_K:planes", "Q4_K:planes"),
        ("Q4_K:planes", "Q6_K:planes"),
        ("Q4_K", "Q4_K"),
    ],
)
def test_gate_and_up_take_many_rows(backend, kinds):
    """In one launch, or by two products whose sums are rounded to 16 bits from 65 rows on."""
    gate, up = (weight(kind, 40, i, backend.device) for i, kind in enumerate(kinds))
    a = activations(70, backend.device, torch.float16)
    got = backend.gemv_quant_gate_up_silu(a, gate.blocks, up.blocks, *kinds)
    wide = a.double(), gate.blocks, up.blocks, *kinds
    assert_close(got, OPS["gemv_quant_gate_up_silu"].reference(*wide))


@pytest.mark.parametrize("m", [1, 2, 3, 70])
@pytest.mark.parametrize("kinds", [("Q4_K", "Q4_K"), ("Q4_K", "Q6_K"), ("Q4_K", "Q5_0", "Q6_K")])
def test_layers_take_packed_parts_in_planes_or_not(backend, kinds, m):
    sizes = {2: (8, 8), 3: (8, 4, 4)}[len(kinds)]
    parts = [weight(kind, sizes[i], i, backend.device) for i, kind in enumerate(kinds)]
    stored, planes = FusedTensor.of(parts), FusedTensor(tuple(parts)).in_planes()
    a = activations(m, backend.device)

    def normed(layer):
        def call(backend, a, linear):
            residual = torch.ones_like(a)
            y = layer(backend, Norm(residual, a, torch.ones_like(a[0]), 1e-6), linear)
            assert torch.equal(residual, a + 1)
            return y

        return call

    gated = normed(gated_norm)
    for one, other in ((stored, planes), (parts[0], planes.parts[0])):
        for layer in (apply, normed(apply_to_norm), gated):
            want, got = layer(backend, a, Linear(one)), layer(backend, a, Linear(other))
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    bias = torch.ones(16, device=backend.device)
    for layer in (normed(apply_to_norm), gated):
        got, want = (layer(backend, a, Linear(w, bias)) for w in (planes, stored))
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
        assert not torch.allclose(got, layer(backend, a, Linear(planes)), atol=1e-2)


def test_wrong_calls_are_refused(backend):
    w, narrow = (weight("Q8_0:planes", 3, 1, backend.device, k) for k in (64, 32))
    kinds = (w.kind, w.kind)
    a = activations(2, backend.device, k=64)
    both, qkv = backend.gemv_quant_gate_up_silu, backend.gemv_quant_qkv
    refused = [
        (both, (a, w.blocks, w.blocks, w.kind, "Q8_1"), "up_kind"),
        (both, (a, narrow.blocks, w.blocks, *kinds), "gate_blocks", "a"),
        (both, (a, w.blocks, w.blocks[:2], *kinds), "up_blocks"),
        (both, (a, w.blocks, w.blocks, *kinds, "gelu"), "activation"),
        (qkv, (a, w.blocks, w.blocks, w.blocks, w.kind, "", w.kind), "k_kind"),
    ]
    for door, arguments, *names in refused:
        with pytest.raises(InputError) as error:
            door(*arguments)
        assert error.value.argument in names


PATHS = {
    "gemv": (2, gemv(4, 2)),
    "persistent": (1, persistent(4, 1)),
    "small_m": (5, small_m(SmallM(1))),
    "mma": (9, mma(MmaConfig(32, 16))),
    "split": (9, mma(MmaConfig(32, 16, splits=2))),
    "decode": (9, {"path": "decode"}),
}


@pytest.mark.parametrize("path", [*PATHS, "file of few", "file of many"])
def test_a_residual_is_added_to_the_product_before_its_one_rounding(path):
    """It leaves of the product no more than a rounding would take away."""
    if path in PATHS:
        (m, config), w = PATHS[path], weight("Q4_K:planes", 19, 1)
        a = 100 * activations(m, "cpu", torch.float16)
        with products.forced(config):
            sums = product(a, w.blocks, w.kind, out=torch.empty(m, 19))
            residual = -sums.half()
            got = product(a, w.blocks, w.kind, residual=residual)
    else:
        m, w = 3 if path == "file of few" else 20, weight("Q4_K", 19, 1)
        a = 100 * activations(m, "cpu", torch.float16)
        sums = gemm_quant(a, w.blocks, w.kind, out=torch.empty(m, 19))
        residual = -sums.half()
        got = linear_quant(a, w.blocks, w.kind, residual=residual)
    want = sums.double() + residual.double()
    assert want.abs().max() > 0.05
    assert_close(got, want)


@pytest.mark.parametrize("n", [37, 2100])  # a program's rows in part, and three programs'
def test_partial_sums_are_rounded_once(n):
    """Parts that are large, of a sum that is not."""
    partial = 100 * torch.randn(3, 5, n, generator=seeded(1))
    partial[2] = torch.randn(5, n, generator=seeded(2)) - partial[0] - partial[1]
    bias, residual = (torch.randn(5, n, generator=seeded(i)).half() for i in (3, 4))
    want = partial.double().sum(0) + bias[0].double() + residual.double()
    got = add_partials(torch.empty(5, n).half(), partial, bias[0], residual)
    # Float32 sums of parts of a hundred are off by some 2^-17 of them.
    assert_close(got, want)
