"""Norms that are arranged for tensor cores where they are computed: the numbers of two launches."""

import pytest
import torch

from ferrum_triton import InputError, get_backend
from ferrum_triton.kernels.jit import record_launches
from ferrum_triton.kernels.norm import fused_add_rms_norm
from ferrum_triton.kernels.quant import add_norm, small_m
from ferrum_triton.kernels.quant.activations import Order, arrange
from ferrum_triton.kernels.quant.add_norm import NormedTokens
from ferrum_triton.kernels.quant.products import products
from ferrum_triton.kernels.quant.products import small_m as choice
from ferrum_triton.kernels.quant.small_m import small_m_order
from ferrum_triton.kernels.quant.small_m_config import SmallM
from ferrum_triton.kernels.resources import TARGETS, compile_launch
from ferrum_triton.registry import OPS
from ferrum_triton.testing import assert_close
from tests.test_quant_fused import weight
from tests.test_quant_ops import seeded
from tests.test_replay import assert_same as assert_launched_alike
from tests.test_replay import door_of, kinds_of

NORM, FUSED, ARRANGE = (
    "_fused_add_rms_norm_kernel",
    "_add_norm_arrange_kernel",
    "_arrange_kernel",
)
EPS = 1e-5


@pytest.fixture(params=["interpret", pytest.param("cuda", marks=pytest.mark.gpu)])
def backend(request):
    return get_backend(request.param)


def norm_arguments(m, k, dtype, residual_dtype, device):
    """Residual, x and a weight. Squares of their sums add up exactly in whatever order."""
    residual, x = (
        torch.randint(-9, 10, (m, k), generator=seeded(seed)).to(device) / 4 for seed in (m, k)
    )
    norm_weight = 1 + torch.randn(k, generator=seeded(7)) / 8
    return residual.to(residual_dtype), x.to(dtype), norm_weight.to(device, dtype), EPS


def assert_same(got, want):
    """To the bit, but for bfloat16 interpreted: on a CPU kernels keep it as float32."""
    if got.dtype == torch.bfloat16 and got.device.type == "cpu":
        assert_close(got, want.float())
    else:
        torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


def assert_two_steps(backend, norm, matrices):
    """By one op as by two: the products, side by side and gated, and the residual."""
    residual, x, norm_weight, eps = norm
    before, two, one = residual.clone(), residual.clone(), residual.clone()
    h = backend.fused_add_rms_norm(two, x, norm_weight, eps)
    blocks, kinds = [w.blocks for w in matrices], [w.kind for w in matrices]
    if len(matrices) < 3:  # one of two is None, or two of three
        blocks, kinds = [blocks[0], None, *blocks[1:]], [kinds[0], "", *kinds[1:]]
    blocks, kinds = [*blocks, None][:3], [*kinds, ""][:3]
    got = backend.add_rms_norm_quant_qkv(one, x, norm_weight, eps, *blocks, *kinds)
    if len(matrices) == 1:
        want = backend.gemm_quant(h, blocks[0], kinds[0])
    else:
        want = backend.gemv_quant_qkv(h, *blocks, *kinds)
    assert_same(got, want)
    assert_same(one, two)
    assert not torch.equal(before, one)
    gate, up = matrices[0], matrices[-1]
    if gate.shape == up.shape:
        call = gate.blocks, up.blocks, gate.kind, up.kind, "gelu_tanh"
        got = backend.add_rms_norm_quant_gate_up_silu(before, x, norm_weight, eps, *call)
        assert_same(got, backend.gemv_quant_gate_up_silu(h, *call))
        assert_same(before, two)


@pytest.mark.parametrize(
    ("kinds", "m", "k", "dtype", "residual_dtype"),
    [
        (("Q4_K", "Q6_K"), 3, 512, torch.bfloat16, torch.float32),
        (("Q5_K", "Q2_K"), 5, 256, torch.float16, torch.float32),
        (("Q4_0", "Q8_0", "Q3_K"), 3, 256, torch.bfloat16, torch.bfloat16),
        (("Q4_K", "Q4_K"), 8, 512, torch.float16, torch.float32),
        (("Q4_K", "Q4_K"), 9, 768, torch.bfloat16, torch.float32),
        (("Q5_0", "Q4_1"), 9, 544, torch.float16, torch.float32),
        (("Q4_K", "Q6_K"), 32, 256, torch.float16, torch.float32),
        (("Q8_0",), 12, 32, torch.float16, torch.float16),
    ],
)
def test_the_numbers_are_those_of_two_steps(
    backend, kinds, m, k, dtype, residual_dtype, monkeypatch
):
    """Whole steps of K or not; a token that is not finite; kinds of one order and of two."""
    monkeypatch.setattr(small_m, "uses_ptx", lambda a: True)
    matrices = [weight(f"{kind}:planes", 16, i, backend.device, k) for i, kind in enumerate(kinds)]
    norm = norm_arguments(m, k, dtype, residual_dtype, backend.device)
    norm[1][1, k // 2] = torch.nan
    assert_two_steps(backend, norm, matrices)


def test_two_groups_of_tokens_are_arranged_behind_a_norm(backend, monkeypatch):
    monkeypatch.setattr(small_m, "uses_ptx", lambda a: True)
    matrices = [weight("Q4_K:planes", 16, i, backend.device, 512) for i in range(2)]
    norm = norm_arguments(13, 512, torch.bfloat16, torch.float32, backend.device)
    with products.forced(choice(SmallM(2, late_tokens=True))):
        assert_two_steps(backend, norm, matrices)


def slots_and_weights(m, k, dtype, device):
    """Five slots of each token; a token that is not finite."""
    slots = torch.randn(m, 5, k, generator=seeded(3)).to(device, dtype)
    slots[1, 2, k // 2] = torch.nan
    return slots, torch.rand(m, 5, generator=seeded(4)).to(device)


@pytest.mark.parametrize(
    ("kinds", "m", "k", "dtype", "residual_dtype"),
    [
        (("Q4_K", "Q6_K"), 3, 512, torch.bfloat16, torch.float32),
        (("Q4_K", "Q4_K"), 17, 768, torch.float16, torch.float32),
        (("Q5_0", "Q4_1"), 17, 544, torch.float16, torch.float32),
        (("Q4_K", "Q6_K"), 32, 256, torch.float16, torch.float16),
        (("Q4_K", "Q6_K"), 17, 256, torch.float32, torch.float32),
    ],
)
def test_a_sum_over_slots_is_that_of_a_launch_before(
    backend, kinds, m, k, dtype, residual_dtype, monkeypatch
):
    monkeypatch.setattr(small_m, "uses_ptx", lambda a: True)
    q, v = (weight(f"{kind}:planes", 16, i, backend.device, k) for i, kind in enumerate(kinds))
    matrices = q.blocks, None, v.blocks, q.kind, "", v.kind
    residual, _, *norm = norm_arguments(m, k, dtype, residual_dtype, backend.device)
    slots, weights = slots_and_weights(m, k, dtype, backend.device)
    one, two = residual.clone(), residual.clone()
    got = backend.weighted_sum_norm_quant_qkv(one, slots, weights, *norm, *matrices)
    x = backend.weighted_sum(slots, weights)
    assert_same(got, backend.add_rms_norm_quant_qkv(two, x, *norm, *matrices))
    assert_same(one, two)
    assert not torch.equal(residual, one)


def launches(op, *arguments, capability=(9, 0)):
    placed = (a.to("meta") if isinstance(a, torch.Tensor) else a for a in arguments)
    with record_launches(capability) as recorded:
        OPS[op].impls["triton"](*placed)
    return [launch.kernel.name for launch in recorded]


@pytest.mark.parametrize(
    ("m", "k", "dtype", "kinds", "first"),
    [
        (2, 512, torch.bfloat16, ("Q4_K:planes",) * 2, [NORM]),
        (3, 512, torch.bfloat16, ("Q4_K:planes", "Q6_K:planes"), [FUSED]),
        (3, 512, torch.float32, ("Q4_K:planes",) * 2, [NORM]),
        (3, 512, torch.bfloat16, ("Q4_K", "Q6_K"), [NORM]),
        (3, 512, torch.bfloat16, ("Q4_K", "Q4_K:planes"), [NORM, "_gemv_quant_kernel", ARRANGE]),
        (64, 512, torch.bfloat16, ("Q4_K:planes",) * 2, [FUSED]),
        (9, 16384, torch.bfloat16, ("Q4_K:planes",) * 2, [FUSED]),
        (9, 16640, torch.bfloat16, ("Q4_K:planes",) * 2, [NORM, ARRANGE]),
    ],
)
def test_what_is_launched(m, k, dtype, kinds, first):
    q, v = (weight(kind, 16, i, k=k) for i, kind in enumerate(kinds))
    norm = norm_arguments(m, k, dtype, torch.float32, "meta")
    qkv = launches("add_rms_norm_quant_qkv", *norm, q.blocks, None, v.blocks, q.kind, "", v.kind)
    gate_up = q.blocks, v.blocks, q.kind, v.kind
    gated = launches("add_rms_norm_quant_gate_up_silu", *norm, *gate_up)
    for names in (qkv, gated):
        assert names[: len(first)] == first
        assert not {NORM, FUSED, ARRANGE} & {*names[len(first) :]}


@pytest.mark.parametrize(
    ("m", "top_k", "kind", "first"),
    [
        (16, 4, "Q4_K:planes", ["_weighted_sum_kernel", FUSED]),
        (17, 4, "Q4_K:planes", [FUSED]),
        (17, 0, "Q4_K:planes", ["_weighted_sum_kernel", FUSED]),
        (17, 4, "Q4_K", ["_weighted_sum_kernel", NORM]),
    ],
)
def test_a_sum_over_slots_costs_many_tokens_no_launch(m, top_k, kind, first):
    w = weight(kind, 16, 1, k=512)
    residual, _, *norm = norm_arguments(m, 512, torch.bfloat16, torch.float32, "meta")
    slots, weights = torch.empty(m, top_k, 512, dtype=torch.bfloat16), torch.empty(m, top_k)
    matrices = w.blocks, None, None, kind, "", ""
    names = launches("weighted_sum_norm_quant_qkv", residual, slots, weights, *norm, *matrices)
    assert names[: len(first)] == first
    assert not {"_weighted_sum_kernel", NORM, FUSED} & {*names[len(first) :]}


def test_x_is_added_once_however_h_is_asked_for():
    """In two orders, as itself, and where products have no rows."""
    residual, x, norm_weight, eps = norm_arguments(9, 512, torch.float16, torch.float32, "cpu")
    want = residual.clone()
    h = fused_add_rms_norm(want, x, norm_weight, eps)
    orders = Order(16), Order(32, halves=2), Order(32, interleave=9), Order(32, halves=4, sums=32)
    for first in (*orders, None):
        left = residual.clone()
        tokens = NormedTokens(left, x, norm_weight, eps)
        if first is None:
            assert torch.equal(tokens.values(), h)
        for order in (first, *orders) if first else orders:
            got = tokens.arranged(order)
            assert tokens.arranged(order) is got
            for part, part_of_h in zip(got[:3], arrange(h, order)[:3], strict=True):
                assert_same(part, part_of_h)
        if first:
            assert torch.equal(tokens.values(), h)
        assert torch.equal(left, want)
    none = torch.empty(0, 16, dtype=torch.uint8)
    for op, arguments in (
        (add_norm.add_rms_norm_quant_qkv, (none, None, None, "Q4_K", "", "")),
        (add_norm.add_rms_norm_quant_gate_up_silu, (none, none, "Q4_K", "Q4_K")),
    ):
        left = residual.clone()
        assert op(left, x, norm_weight, eps, *arguments).shape == (9, 0)
        assert torch.equal(left, want)


def test_what_norms_is_arranged_by_rows():
    """Where a product would take factors of blocks too: a program has the row in any case."""
    residual, x, norm_weight, eps = norm_arguments(5, 512, torch.float16, torch.float32, "cpu")
    by_blocks = small_m_order(5, by_blocks=True)
    got = NormedTokens(residual.clone(), x, norm_weight, eps).arranged(by_blocks)
    want = NormedTokens(residual.clone(), x, norm_weight, eps).arranged(small_m_order(5))
    for part, by_rows in zip(got[:3], want[:3], strict=True):
        assert_same(part, by_rows)


def test_past_a_rows_end_there_are_zeros():
    """Even where the root of the mean square is 0, NaN or infinite."""
    x = torch.zeros(4, 544, dtype=torch.float16)
    x[1, 5], x[2, 6] = torch.inf, torch.nan
    residual = torch.tensor([0.0, 1.0, 1.0, 1e-30])[:, None].repeat(1, 544)
    ones, order = torch.ones(544), Order(16)
    h = fused_add_rms_norm(residual.clone(), x, ones, 0.0)
    assert h[0].isnan().all() and h[3].isinf().all()
    got = NormedTokens(residual, x, ones, 0.0).arranged(order)
    for part, part_of_h in zip(got[:3], arrange(h, order)[:3], strict=True):
        assert_same(part, part_of_h)


@pytest.mark.parametrize("m", [2, 9])
def test_products_over_nothing_are_zeros(backend, m):
    w = torch.empty(16, 0, dtype=torch.uint8, device=backend.device)
    kind = "Q8_0:planes"
    norm = norm_arguments(m, 0, torch.float16, torch.float32, backend.device)
    assert not backend.add_rms_norm_quant_qkv(*norm, w, None, w, kind, "", kind).any()
    assert not backend.add_rms_norm_quant_gate_up_silu(*norm, w, w, kind, kind).any()


def test_products_over_nothing_compile():
    w, kind = torch.empty(16, 0, dtype=torch.uint8, device="meta"), "Q8_0:planes"
    norm = norm_arguments(9, 0, torch.float16, torch.float32, "meta")
    with record_launches((9, 0)) as launches:
        OPS["add_rms_norm_quant_qkv"].impls["triton"](*norm, w, None, w, kind, "", kind)
    for launch in launches:
        compile_launch(launch, TARGETS["sm_90"])


def test_wrong_calls_are_refused():
    backend = get_backend("cpu")
    w = weight("Q8_0:planes", 3, 1, k=64)
    residual, x, norm_weight, eps = norm_arguments(2, 64, torch.float16, torch.float32, "cpu")
    gated, qkv = backend.add_rms_norm_quant_gate_up_silu, backend.add_rms_norm_quant_qkv
    norm, one = (residual, x, norm_weight, eps), (w.blocks, None, None, w.kind, "", "")
    both = w.blocks, w.blocks, w.kind, w.kind
    short = residual[:, :32], x[:, :32], norm_weight[:32], eps
    odd = residual.bfloat16(), x, norm_weight, eps
    before = residual.clone()
    for door, arguments, name in (
        (qkv, (*short, *one), "x"),
        (gated, (*short, *both), "x"),
        (qkv, (*odd, *one), "residual"),
        (gated, (*odd, *both), "residual"),
        (gated, (*norm, *both, "gelu"), "activation"),
        (qkv, (*norm, w.blocks, w.blocks, None, w.kind, "Q8_1", ""), "k_kind"),
        (qkv, (*norm, w.blocks, None, w.blocks, w.kind, "", ""), "v_kind"),
    ):
        with pytest.raises(InputError) as error:
            door(*arguments)
        assert error.value.argument == name
    assert torch.equal(residual, before)


@pytest.mark.parametrize("op", ["add_rms_norm_quant_qkv", "add_rms_norm_quant_gate_up_silu"])
def test_calls_are_replayed(op):
    """With the norm that arranges, and with what is arranged in a second order."""
    op, kinds = OPS[op], ("Q4_K:planes", "Q5_K:planes")
    door = door_of(op)
    for seed in range(4):
        q, v = (weight(kind, 16, seed, k=256) for kind in kinds)
        norm = norm_arguments(9, 256, torch.float16, torch.float32, "cpu")
        matrices = (q.blocks, None, v.blocks, q.kind, "", v.kind)
        if "gate" in op.name:
            matrices = (q.blocks, q.blocks, q.kind, q.kind, "silu")
        arguments = dict(zip(op.signature.parameters, (*norm, *matrices), strict=True))
        arguments["x"] += seed
        assert_launched_alike(op, door, arguments)
    assert kinds_of(door) == [True]
