"""Norms that products share: the numbers of closed ones, and a launch less for each."""

from collections import Counter

import pytest
import torch

from ferrum_triton import InputError, get_backend
from ferrum_triton.kernels.jit import record_launches
from ferrum_triton.kernels.quant import open_norm
from ferrum_triton.models import Llama
from ferrum_triton.models.linear import Linear, OpenNorm, norm_after
from ferrum_triton.models.weights import load_weights
from ferrum_triton.registry import OPS
from ferrum_triton.testing import assert_close
from tests.test_quant_fused import weight
from tests.test_quant_ops import seeded
from tests.test_replay import assert_same as assert_launched_alike
from tests.test_replay import door_of, kinds_of
from tests.tiny_models import PACKED, PackedSource

EPS = 1e-5
GEMV, SEVERAL = "_gemv_repacked_kernel", "_gemv_several_kernel"
OPENING, CLOSING = "_open_norm_kernel", "_close_norm_kernel"


@pytest.fixture(params=["interpret", pytest.param("cuda", marks=pytest.mark.gpu)])
def backend(request):
    return get_backend(request.param)


def draw(*shape, seed, dtype=torch.float32, device="cpu"):
    return torch.randn(shape, generator=seeded(seed)).to(device, dtype)


@pytest.mark.parametrize("residual_dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    ("kind", "m", "n", "k"),
    [
        ("Q4_K", 1, 256, 512),
        ("Q6_K", 2, 64, 256),
        ("Q4_0", 1, 96, 1024),  # rows that no program's steps divide
        ("Q8_0", 1, 17, 64),  # a last part of one column
        ("Q5_1", 3, 64, 256),
        ("Q3_K", 12, 40, 512),
        ("Q4_K", 70, 40, 512),
    ],
)
def test_the_norm_is_that_of_two_steps(backend, kind, m, n, k, residual_dtype):
    device = backend.device
    a = draw(m, k, seed=1, dtype=torch.float16, device=device)
    residual = draw(m, n, seed=2, dtype=residual_dtype, device=device)
    norm_weight = draw(n, seed=3, device=device)
    w = weight(f"{kind}:planes", n, 4, device, k)
    before = residual.clone()
    y, h, squares = backend.linear_quant_open_norm(a, w.blocks, w.kind, residual, norm_weight)
    assert torch.equal(residual, before)
    x = backend.gemm_quant(a, w.blocks, w.kind, wide=True)
    want = residual.double() + x.double()
    assert_close(y, want, scale=12)
    assert_close(h, want * norm_weight.double())
    mean = squares.double().sum(dim=1) / n
    assert_close(mean.float(), want.square().mean(dim=1), scale=12)
    assert squares.shape == (m, (n + 7) // 8)


@pytest.mark.parametrize(
    ("kinds", "m", "dtype"),
    [
        (("Q4_K",), 1, torch.bfloat16),
        (("Q4_K", "Q6_K"), 1, torch.float16),
        (("Q2_K", "Q8_0", "Q3_K"), 2, torch.bfloat16),
        (("Q4_K", "Q4_K"), 2, torch.float32),
        (("Q5_K", "Q5_K"), 5, torch.float16),
        (("Q4_1", "Q4_1"), 12, torch.bfloat16),
        (("Q4_K", "Q4_K"), 70, torch.float16),
    ],
)
def test_products_divide_as_the_norm_would(backend, kinds, m, dtype):
    """A token of zeros, one that is not finite, and the others."""
    k, device = 512, backend.device
    r = 3 * draw(m, k, seed=5, device=device)
    r[0] = 0 if m > 1 else r[0]
    norm_weight = draw(k, seed=6, device=device)
    h, squares = (r * norm_weight).to(dtype), r.square().unflatten(1, (-1, 8)).sum(dim=2)
    n = (h.double() * torch.rsqrt(r.double().square().mean(dim=1, keepdim=True) + EPS)).to(dtype)
    if m > 2:
        h[2, 7], n[2, 7], squares[2, 0] = torch.inf, torch.inf, torch.inf
        n[2] = torch.nan
    parts = [weight(f"{kind}:planes", 16, i, device, k) for i, kind in enumerate(kinds)]
    blocks = [*(w.blocks for w in parts), None, None][:3]
    names = [*(w.kind for w in parts), "", ""][:3]
    got = backend.open_norm_quant_qkv(h, squares, EPS, *blocks, *names)
    each = [backend.gemm_quant(n, w.blocks, w.kind) for w in parts]
    assert_close(got, torch.cat(each, dim=1), scale=4)
    gate, up = parts[0], parts[-1]
    call = gate.blocks, up.blocks, gate.kind, up.kind, "gelu_tanh"
    got = backend.open_norm_quant_gate_up_silu(h, squares, EPS, *call)
    assert_close(got, backend.gemv_quant_gate_up_silu(n, *call), scale=4)


def launches(op, *arguments, capability=(9, 0)):
    placed = (a.to("meta") if isinstance(a, torch.Tensor) else a for a in arguments)
    with record_launches(capability) as recorded:
        OPS[op].impls["triton"](*placed)
    return [launch.kernel.name for launch in recorded]


@pytest.mark.parametrize(
    ("m", "n", "dtype", "opening"),
    [
        (1, 4096, torch.bfloat16, [GEMV]),
        (2, 4096, torch.bfloat16, [GEMV]),
        (1, 4104, torch.bfloat16, [GEMV, OPENING]),  # a last block that begins early
        (1, 4096, torch.float32, [GEMV, OPENING]),
        (8, 4096, torch.float16, ["_arrange_blocks_kernel", "_small_m_kernel", OPENING]),
    ],
)
def test_what_opens_a_norm(m, n, dtype, opening):
    k = 4096
    w = torch.empty(n, k // 256 * 148, dtype=torch.uint8, device="meta")
    a, residual = torch.empty(m, k, dtype=dtype), torch.empty(m, n)
    arguments = a, w, "Q4_K:planes", residual, torch.empty(n)
    assert launches("linear_quant_open_norm", *arguments) == opening


@pytest.mark.parametrize(
    ("m", "kinds", "qkv", "gated"),
    [
        (1, ("Q4_K:planes",) * 2, [SEVERAL], [SEVERAL]),
        (2, ("Q4_K:planes", "Q6_K:planes"), [SEVERAL], [SEVERAL]),
        (1, ("Q4_K:planes",), [GEMV], [SEVERAL]),
        (3, ("Q4_K:planes",) * 2, [CLOSING, "_arrange_kernel", "_small_m_kernel"], None),
        (1, ("Q4_K",) * 2, [CLOSING, "_gemv_quant_kernel", "_gemv_quant_kernel"], None),
    ],
)
def test_what_closes_a_norm(m, kinds, qkv, gated):
    """Once for all products that take it closed."""
    q, *more = (weight(kind, 16, i, k=512) for i, kind in enumerate(kinds))
    v = more[0] if more else None
    h, squares = torch.empty(m, 512, dtype=torch.bfloat16), torch.empty(m, 64)
    rest = (None, v and v.blocks, q.kind, "", v.kind if v else "")
    assert launches("open_norm_quant_qkv", h, squares, EPS, q.blocks, *rest) == qkv
    up = v or q
    call = q.blocks, up.blocks, q.kind, up.kind
    names = launches("open_norm_quant_gate_up_silu", h, squares, EPS, *call)
    assert names == gated if gated else names[0] == CLOSING and CLOSING not in names[1:]


@pytest.mark.parametrize(
    ("device", "sizes", "most"),
    [("cpu", (8, 16, 24, 32, 40, 64, 96, 100), 3), ("meta", (576, 2048, 4096, 5120, 8200), 1)],
)
def test_programs_that_open_a_norm_have_whole_parts(device, sizes, most):
    """At the sizes that have such programs: rows that two had would be added up by both."""
    without = 0
    for n in sizes:
        a = torch.empty(1, 4096, dtype=torch.bfloat16, device=device)
        w = torch.empty(n, 16 * 148, dtype=torch.uint8, device=device)
        with record_launches((9, 0)):
            config = open_norm.opening_choice(a, w, "Q4_K:planes")
            if config is None:
                without += 1
                continue
            layout = open_norm.layout_of(w, "Q4_K:planes", 4096)
            plan, programs = open_norm.launch_plan(config, a, layout, n, opens=True)
        rows = plan.rows * plan.deferred
        assert rows * programs == n and rows % 8 == 0 and plan.opens
    assert without <= most


def model(backend, dtype):
    planes = backend.name != "cpu"
    weights = load_weights(PackedSource(), PACKED, backend, dtype, planes=planes)
    return Llama(PACKED, weights, backend, dtype)


def test_a_step_opens_every_norm_between_its_products(monkeypatch):
    """But the first, before which there is no product, and the last, which the head follows."""
    ours, calls = model(get_backend("interpret"), torch.bfloat16), Counter()
    for name in [name for name in OPS if "norm" in name]:

        def counted(*args, name=name, call=getattr(ours.backend, name), **kwargs):
            calls[name] += 1
            return call(*args, **kwargs)

        monkeypatch.setattr(ours.backend, name, counted, raising=False)
    ours.forward([5], ours.new_cache(8))
    layers = PACKED.num_layers
    assert calls["linear_quant_open_norm"] == 2 * layers - 1
    assert calls["open_norm_quant_qkv"] == layers - 1
    assert calls["open_norm_quant_gate_up_silu"] == layers
    assert calls["add_rms_norm_quant_qkv"] == calls["fused_add_rms_norm"] == 1


@pytest.mark.parametrize(
    ("name", "m", "dtype", "kinds", "opened"),
    [
        ("interpret", 1, torch.bfloat16, ("Q4_K:planes", "Q6_K:planes"), True),
        ("interpret", 2, torch.bfloat16, ("Q4_K:planes", "Q6_K:planes"), False),
        ("interpret", 1, torch.float16, ("Q4_K:planes", "Q6_K:planes"), False),
        ("interpret", 1, torch.bfloat16, ("Q4_K", "Q6_K:planes"), False),
        ("interpret", 1, torch.bfloat16, ("Q4_K:planes", "Q6_K"), False),
        ("cpu", 1, torch.bfloat16, ("Q4_K:planes", "Q6_K:planes"), False),
    ],
)
def test_what_models_open(name, m, dtype, kinds, opened):
    """Norms of one token in bfloat16, before and behind which weights are in planes."""
    backend = get_backend(name)
    before, after = (Linear(weight(kind, 256, 1, k=256)) for kind in kinds)
    x, residual = draw(m, 256, seed=1, dtype=dtype), draw(m, 256, seed=2)
    for then, bias in ((after, None), (None, None), (after, torch.zeros(256))):
        product = Linear(before.weight, bias)
        norm = norm_after(backend, x, product, residual, torch.ones(256), EPS, then)
        assert isinstance(norm, OpenNorm) == (opened and then is not None and bias is None)


def test_a_models_logits_are_those_of_closed_norms(backend):
    """A step of one token behind others, in bfloat16, beside float32 on a CPU."""
    ids = [3, 1, 4, 1, 5]
    exact = model(get_backend("cpu"), torch.float32)
    want = exact.forward(ids, exact.new_cache(8))[0]
    ours = model(backend, torch.bfloat16)
    cache = ours.new_cache(8)
    ours.forward(ids[:-1], cache)
    got = ours.forward(ids[-1:], cache)[0].float().cpu()
    assert (got - want).norm() < 0.02 * want.norm()


def test_rows_of_many_parts_are_divided_by_all_of_them(backend):
    """More sums of squares than a program takes at a time, and one more."""
    k = 8 * 1025 + 24  # 1028 parts
    w = weight("Q8_0:planes", 16, 7, backend.device, k)
    h = draw(1, k, seed=8, dtype=torch.float16, device=backend.device)
    squares = draw(1, k // 8, seed=9, device=backend.device).abs()
    squares[0, -1] = 2.0 * k  # of which the last is most
    got = backend.open_norm_quant_qkv(h, squares, EPS, w.blocks, None, None, w.kind, "", "")
    n = h.double() * torch.rsqrt(squares.double().sum() / k + EPS)
    want = n.float() @ backend.dequantize(w.blocks, w.kind, torch.float32).T
    assert_close(got, want)


def test_wrong_calls_are_refused():
    backend = get_backend("cpu")
    w = weight("Q8_0:planes", 3, 1, k=64)
    h, squares, a = torch.ones(2, 64), torch.ones(2, 8), torch.ones(2, 64)
    one, both = (w.blocks, None, None, w.kind, "", ""), (w.blocks, w.blocks, w.kind, w.kind)
    qkv, gated = backend.open_norm_quant_qkv, backend.open_norm_quant_gate_up_silu
    product = backend.linear_quant_open_norm
    residual, norm_weight = torch.ones(2, 3), torch.ones(3)
    for door, arguments, name in (
        (qkv, (h, squares[:, :7], EPS, *one), "squares"),
        (gated, (h, torch.ones(2, 9), EPS, *both), "squares"),
        (qkv, (h, squares.double(), EPS, *one), "squares"),
        (qkv, (h, squares, -1.0, *one), "eps"),
        (gated, (h, squares, float("nan"), *both), "eps"),
        (qkv, (h[:, :32], squares[:, :4], EPS, *one), "h"),
        (gated, (h, squares, EPS, *both, "gelu"), "activation"),
        (product, (a, w.blocks, w.kind, residual.half(), norm_weight), "residual"),
        (product, (a, w.blocks, w.kind, residual[:1], norm_weight), "residual"),
        (product, (a, w.blocks, "Q8_1", residual, norm_weight), "kind"),
    ):
        with pytest.raises(InputError) as error:
            door(*arguments)
        assert error.value.argument == name


@pytest.mark.parametrize("name", ["linear_quant_open_norm", "open_norm_quant_qkv"])
def test_calls_are_replayed(name):
    op = OPS[name]
    door = door_of(op)
    for seed in range(4):
        w = weight("Q4_K:planes", 64, seed, k=512)
        a = draw(1, 512, seed=seed, dtype=torch.float16)
        if name == "linear_quant_open_norm":
            call = a, w.blocks, w.kind, draw(1, 64, seed=seed + 9), torch.ones(64)
        else:
            squares = draw(1, 64, seed=seed + 9).abs()
            call = a, squares, EPS, w.blocks, None, None, w.kind, "", ""
        arguments = dict(zip(op.signature.parameters, call, strict=True))
        assert_launched_alike(op, door, arguments)
    assert kinds_of(door) == [True]
