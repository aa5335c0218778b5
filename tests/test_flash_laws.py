"""Laws of attention over a contiguous cache, beyond agreement with the reference."""

import re

import pytest
import torch
from torch.nn import functional as F

from ferrum_triton import InputError, get_backend
from ferrum_triton.kernels.attention import flash, flash_config, flash_plan
from ferrum_triton.kernels.attention.tensor_maps import can_describe
from ferrum_triton.kernels.gpu import gpu_of
from ferrum_triton.kernels.jit import record_launches
from ferrum_triton.kernels.resources import TARGETS
from ferrum_triton.registry import OPS
from ferrum_triton.testing import assert_close
from tests.compiling import compiled, launches_of
from tests.harness import BACKENDS, place_far_apart

on_backends = pytest.mark.parametrize("backend_name", BACKENDS)
KERNELS = ["interpret", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture
def forced(monkeypatch):
    """Override fields of the plan of every call."""

    def force(**fields):
        original = flash_plan.choose_plan
        monkeypatch.setattr(flash, "choose_plan", lambda *args: original(*args)._replace(**fields))

    return force


def draw(backend, q_len, kv_len, heads=4, kv_heads=2, head_dim=32, batch=1, dtype=torch.float32):
    """q, k and v with scores of some spread, so that no key's weight is negligible."""
    shapes = [(heads, q_len), (kv_heads, kv_len), (kv_heads, kv_len)]
    return [torch.randn(batch, h, n, head_dim, device=backend.device).to(dtype) for h, n in shapes]


def new_lse(q):
    return torch.full(q.shape[:3], float("nan"), device=q.device)


@on_backends
def test_future_tokens_cannot_change_the_past(backend_name):
    backend = get_backend(backend_name)
    q, k, v = draw(backend, 40, 70)
    before = backend.flash_attention(q, k, v)
    k[:, :, 51:], v[:, :, 51:] = 9.0, -9.0  # seen by queries of position 51 and later
    after = backend.flash_attention(q, k, v)
    assert torch.equal(after[:, :, :21], before[:, :, :21])
    assert (after[:, :, 21:] != before[:, :, 21:]).any(dim=-1).all()


@on_backends
def test_lengths_past_the_capacity_are_all_it_holds(backend_name):
    """Those of 64 bits too, whose lower half is a small number."""
    backend = get_backend(backend_name)
    q, k, v = draw(backend, 3, 40)
    want = backend.flash_attention(q, k, v)
    lens = torch.tensor([2**40 + 3], device=q.device)
    assert_close(backend.flash_attention(q, k, v, kv_lens=lens), want.double())


@on_backends
@pytest.mark.parametrize("window", [1, 7, 40])
def test_window_edges_are_exact(backend_name, window):
    """The oldest key of the window counts, the one before it does not."""
    backend = get_backend(backend_name)
    q, k, v = draw(backend, 36, 100)
    before = backend.flash_attention(q, k, v, sliding_window=window)
    query = 20  # at position 84
    for key, counts in ((84 - window, False), (84 - window + 1, True), (84, True), (85, False)):
        other = v.clone()
        other[:, :, key] += 100.0
        after = backend.flash_attention(q, k, other, sliding_window=window)
        changed = not torch.equal(after[:, :, query], before[:, :, query])
        assert changed == counts, f"key {key}"


@on_backends
@pytest.mark.parametrize("with_sinks", [False, True])
def test_rows_that_see_nothing_are_zero(backend_name, with_sinks):
    """Queries before the first key, and sequences without keys, on the host or the device."""
    backend = get_backend(backend_name)
    q, k, v = draw(backend, 20, 33, batch=2)
    sinks = torch.randn(4, device=q.device) if with_sinks else None
    nothing = torch.full((4,), -torch.inf, device=q.device) if sinks is None else sinks
    lens = torch.tensor([0, 33], device=q.device)
    for options in ({"kv_len": 0}, {"kv_lens": lens}, {"pos_offset": -7}):
        lse = new_lse(q)
        got = backend.flash_attention(q, k, v, **options, sinks=sinks, lse=lse)
        rows = slice(0, 7) if "pos_offset" in options else slice(0, 20)
        assert (got[0, :, rows] == 0).all()
        assert_close(lse[0, :, rows], nothing[:, None].expand(4, 20)[:, rows])
        if "kv_len" not in options:
            assert got[1, :, 7:].ne(0).all() and lse[1, :, 7:].isfinite().all()
        assert not lse.isnan().any()


@on_backends
@pytest.mark.parametrize("device_lens", [False, True])
@pytest.mark.parametrize("q_len", [1, 20])
def test_unseen_cache_rows_may_hold_anything(backend_name, q_len, device_lens):
    backend = get_backend(backend_name)
    q, k, v = draw(backend, q_len, 70)
    valid = 41
    length = {"kv_len": valid}
    if device_lens:
        length = {"kv_lens": torch.tensor([valid], device=q.device)}
    want = backend.flash_attention(q, k[:, :, :valid], v[:, :, :valid])
    k[:, :, valid:], v[:, :, valid:] = float("nan"), float("nan")
    for causal in (True, False):
        got = backend.flash_attention(q, k, v, **length, causal=causal)
        assert got.isfinite().all()
        if causal:
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


@on_backends
@pytest.mark.parametrize("size", [1e3, 1e18])
def test_soft_caps_of_large_scores_stay_finite(backend_name, size):
    """Capped scores are ±softcap there: the softmax is known."""
    backend = get_backend(backend_name)
    q, k, v = draw(backend, 18, 33)
    q = torch.sign(q) * size
    lse = new_lse(q)
    got = backend.flash_attention(q, k, v, softcap=3.0, causal=False, lse=lse)
    signs = torch.sign(q.double() @ k.repeat_interleave(2, dim=1).double().transpose(-1, -2))
    scores = 3.0 * signs
    if size > 1e3:  # where a score of 1e3 may still be small enough for the cap to bend it
        want = torch.softmax(scores, dim=-1) @ v.repeat_interleave(2, dim=1).double()
        torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(
            lse.double(), torch.logsumexp(scores, dim=-1), rtol=1e-5, atol=1e-5
        )
    assert got.isfinite().all() and lse.isfinite().all()


@on_backends
def test_a_cap_far_above_the_scores_keeps_their_bits(backend_name):
    """It takes a millionth of them; tanh as a difference of numbers near 1 would round more."""
    backend = get_backend(backend_name)
    q, k, v = draw(backend, 18, 33)
    lse = new_lse(q)
    got = backend.flash_attention(q, k, v, softcap=1000.0, causal=False, lse=lse)
    k, v = (x.double().repeat_interleave(2, dim=1) for x in (k, v))
    scores = 1000.0 * torch.tanh(q.double() @ k.transpose(-1, -2) * 32**-0.5 / 1000.0)
    assert_close(got, torch.softmax(scores, dim=-1) @ v)
    assert_close(lse, torch.logsumexp(scores, dim=-1))


@on_backends
@pytest.mark.parametrize(("q_len", "window"), [(1, 0), (18, 0), (18, 9)])
def test_lse_is_the_log_of_the_sum(backend_name, q_len, window):
    backend = get_backend(backend_name)
    q, k, v = draw(backend, q_len, 90)
    lse = new_lse(q)
    backend.flash_attention(q, k, v, softmax_scale=0.4, sliding_window=window, lse=lse)
    scores = 0.4 * q.double() @ k.double().repeat_interleave(2, dim=1).transpose(-1, -2)
    position = torch.arange(90 - q_len, 90, device=q.device)[:, None]
    key = torch.arange(90, device=q.device)
    visible = (key <= position) & (key > position - (window or 90))
    want = torch.logsumexp(scores.masked_fill(~visible, -torch.inf), dim=-1)
    torch.testing.assert_close(lse.double(), want, rtol=1e-6, atol=2e-6)


@on_backends
@pytest.mark.parametrize("q_len", [1, 18])
def test_a_sink_is_a_key_without_a_value(backend_name, q_len):
    """Against a key whose score is the sink's logit for every query, seen by all, of value 0."""
    backend = get_backend(backend_name)
    q, k, v = draw(backend, q_len, 50)
    sinks = torch.tensor([0.7, -1.3, 5.0, float("-inf")], device=q.device)
    lse, plain_lse = new_lse(q), new_lse(q)
    got = backend.flash_attention(q, k, v, sinks=sinks, lse=lse, causal=False)
    plain = backend.flash_attention(q, k, v, lse=plain_lse, causal=False)
    assert_close(lse, torch.logaddexp(plain_lse, sinks[:, None].expand_as(lse)), name="lse")
    assert_close(got, plain * torch.exp(plain_lse - lse)[..., None], scale=4)  # by way of two lse
    assert torch.equal(got[:, 3], plain[:, 3]), "a sink of -inf is none"

    # One dimension of q is 1 in every query: a key that is zero elsewhere scores what it holds.
    q = F.pad(q, (0, 1), value=1.0)
    wide_k, wide_v = F.pad(k, (0, 1)), F.pad(v, (0, 1))
    extra = torch.zeros_like(wide_k[:, :, :1])
    extra[..., -1] = 0.7
    with_key = backend.flash_attention(
        q, torch.cat((extra, wide_k), 2), torch.cat((extra * 0, wide_v), 2),
        softmax_scale=1.0, causal=False,
    )  # fmt: skip
    with_sink = backend.flash_attention(
        q, wide_k, wide_v, softmax_scale=1.0, causal=False, sinks=torch.full_like(sinks, 0.7)
    )
    assert_close(with_sink, with_key.double(), scale=2)


@pytest.mark.parametrize("backend_name", KERNELS)
@pytest.mark.parametrize("q_len", [1, 3])
def test_splits_change_nothing_beyond_rounding(backend_name, q_len, forced):
    """Whatever their number, also where most of them are left without keys."""
    backend = get_backend(backend_name)
    q, k, v = draw(backend, q_len, 200)
    sinks = torch.randn(4, device=q.device)
    lens = torch.tensor([77], device=q.device)
    for options in ({}, {"kv_lens": lens}, {"sliding_window": 50}):
        results = {}
        for splits in (1, 2, 5, 64):
            forced(splits=splits, use_tma=False, one_loop=False)
            lse = new_lse(q)
            results[splits] = backend.flash_attention(q, k, v, **options, sinks=sinks, lse=lse), lse
        for splits in (2, 5, 64):
            for got, want in zip(results[splits], results[1], strict=True):
                assert_close(got, want.double())


@pytest.mark.parametrize("backend_name", KERNELS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("device_lens", [False, True])
def test_every_way_to_read_the_cache_agrees(backend_name, dtype, device_lens, forced):
    """Descriptors or pointers, one loop or three, packed or not."""
    backend = get_backend(backend_name)
    q, k, v = draw(backend, 40, 150, head_dim=80, dtype=dtype)
    lens = torch.tensor([133], device=q.device) if device_lens else None
    want = None
    ways = [(d, o, p) for d in (True, False) for o in (True, False) for p in (True, False)]
    if backend_name == "interpret" and dtype == torch.bfloat16:
        ways = [way for way in ways if not way[0]]  # numpy lacks it
    for use_tma, one_loop, packed in ways:
        if use_tma and one_loop and device_lens:
            continue  # would leave rows past the lengths uncleared
        forced(use_tma=use_tma, one_loop=one_loop, packed=packed, splits=1)
        for window in (0, 60):
            got = backend.flash_attention(q, k, v, kv_lens=lens, sliding_window=window)
            if want is None:
                want = {}
            if window not in want:
                want[window] = OPS["flash_attention"].reference(
                    q.double(), k.double(), v.double(), kv_lens=lens, sliding_window=window
                )
            assert_close(got, want[window])


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_offsets_past_int32(dim, forced):
    """Of all tensors at once, where no tensor map stands for their strides."""
    backend = get_backend("interpret")
    forced(use_tma=False)
    q, k, v = draw(backend, 3, 20, heads=3, kv_heads=3, batch=3, head_dim=16, dtype=torch.float16)
    near = {"q": q, "k": k, "v": v, "out": torch.empty_like(q), "lse": new_lse(q)}
    far = {
        name: place_far_apart(tensor, dim) if dim < tensor.dim() - 1 else tensor.clone()
        for name, tensor in near.items()
    }
    for call in (near, far):
        backend.flash_attention(**call)
    assert torch.equal(far["out"], near["out"])
    assert torch.equal(far["lse"], near["lse"])


@pytest.mark.parametrize("backend_name", KERNELS)
@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize(("q_len", "kv_len", "pos_offset"), [(129, 300, 171), (150, 280, 0)])
def test_a_group_of_many_queries_may_share_blocks(
    backend_name, splits, q_len, kv_len, pos_offset, forced
):
    backend = get_backend(backend_name)
    q, k, v = draw(backend, q_len, kv_len, heads=4, kv_heads=1, head_dim=64, dtype=torch.bfloat16)
    blocks = (16, 16, 1, 1) if backend_name == "interpret" else (128, 64, 8, 3)
    forced(packed=True, splits=splits, heads_at_once=1, tile=flash_config.tile(*blocks))
    lse = new_lse(q)
    got = backend.flash_attention(q, k, v, pos_offset=pos_offset, lse=lse)
    cpu = [x.double().cpu() for x in (q, k, v)]
    want_lse = new_lse(cpu[0])
    want = OPS["flash_attention"].reference(*cpu, pos_offset=pos_offset, lse=want_lse)
    assert_close(got.cpu(), want)
    assert_close(lse.cpu(), want_lse.double())


@pytest.mark.parametrize("capacity", [1, 100, 1000, 5000, 8192, 70_001])
@pytest.mark.parametrize(("batch", "kv_heads"), [(1, 8), (1, 3), (7, 4), (64, 8)])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_splits_are_as_few_as_share_the_keys_alike(capacity, batch, kv_heads, head_dim):
    """Found by trying every number of them: the least that leaves none more than the most would."""
    q = torch.empty(batch, 4 * kv_heads, 1, head_dim, dtype=torch.float16, device="meta")
    k = torch.empty(batch, kv_heads, capacity, head_dim, dtype=torch.float16, device="meta")
    with record_launches((9, 0)):
        plan = flash_plan.choose_plan(q, k, k, q, capacity, None, 0, True)
        on_an_sm = 4 if plan.tile["BLOCK_M"] <= 32 else 1
        programs_at_once = on_an_sm * gpu_of(q.device).num_sms
    most = min(max(programs_at_once // (batch * kv_heads), 1), flash_plan.MAX_SPLITS)
    tiles = -(-capacity // plan.tile["BLOCK_N"])
    shares = [max(-(-tiles // splits), plan.min_tiles) for splits in range(1, most + 1)]
    assert plan.splits == 1 + shares.index(min(shares))
    assert plan.min_tiles * plan.tile["BLOCK_N"] >= flash_plan.MIN_KEYS


def test_descriptors_want_aligned_tensors():
    aligned = torch.empty(2, 3, 50, 64, dtype=torch.float16)
    assert can_describe(aligned)
    flat = torch.empty(2 * 3 * 50 * 64 + 1, dtype=torch.float16)
    bad = {
        "address": flat[1:].view(2, 3, 50, 64),
        "row stride": torch.empty(2, 3, 50, 68, dtype=torch.float16)[..., :64],
        "row length": torch.empty(2, 3, 50, 60, dtype=torch.float16),
        "repeated": aligned[:, :1].expand(2, 3, 50, 64),
        "dtype": aligned.bfloat16(),
    }
    for what, tensor in bad.items():
        assert not can_describe(tensor), what
    one = torch.empty(1, 3, 50, 64, dtype=torch.float16).as_strided(
        (1, 3, 50, 64), (7, 3200, 64, 1)
    )
    assert can_describe(one), "the stride of a single index does not count"


@pytest.mark.parametrize(
    ("backend_name", "dtype"),
    [
        ("cpu", torch.float16),
        ("interpret", torch.float16),
        ("interpret", torch.float32),
        pytest.param("cuda", torch.float16, marks=pytest.mark.gpu),
        pytest.param("cuda", torch.bfloat16, marks=pytest.mark.gpu),
    ],
)
@pytest.mark.parametrize("scale", [1.0, 4.0])
def test_error_is_at_most_twice_that_of_torch(backend_name, dtype, scale):
    """Both against float64, also where large scores leave few keys with weight."""
    backend = get_backend(backend_name)
    length = 1000 if backend_name == "cuda" else 100
    q, k, v = draw(backend, length, length, dtype=dtype, head_dim=64)
    q = q * scale
    got = backend.flash_attention(q, k, v)
    both = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    want = F.scaled_dot_product_attention(
        q.double(), k.double(), v.double(), is_causal=True, enable_gqa=True
    )
    errors = [(t.double() - want).abs().max() for t in (got, both)]
    assert errors[0] <= 2 * errors[1] + torch.finfo(dtype).eps / 8


@on_backends
@pytest.mark.parametrize("head_dim", [32, 48])
def test_negative_and_zero_scales(backend_name, head_dim):
    """48 columns are products of 32 and of 16."""
    backend = get_backend(backend_name)
    q, k, v = draw(backend, 18, 33, head_dim=head_dim)
    turned = backend.flash_attention(q, k, v, softmax_scale=-0.3)
    assert_close(turned, backend.flash_attention(-q, k, v, softmax_scale=0.3).double(), scale=2)
    even = backend.flash_attention(q, k, v, softmax_scale=0.0, causal=False)
    mean = v.double().mean(dim=2, keepdim=True).repeat_interleave(2, dim=1)
    assert_close(even, mean.expand_as(even))


@pytest.mark.parametrize("backend_name", KERNELS)
def test_tiles_outside_the_window_are_skipped(backend_name):
    """Values there are infinite, and 0 * inf would show; the work counted does not see them."""
    backend, op = get_backend(backend_name), OPS["flash_attention"]
    window, q_len = 40, 32
    counts = set()
    for length in (500, 1000):
        q, k, v = draw(backend, q_len, length, heads=1, kv_heads=1)
        want = backend.flash_attention(q, k, v, sliding_window=window)
        unseen = length - q_len - window - 128  # a tile of grace
        k[:, :, :unseen], v[:, :, :unseen] = float("inf"), float("inf")
        got = backend.flash_attention(q, k, v, sliding_window=window)
        assert torch.equal(got, want)
        call = {"q": q, "k": k, "v": v, "sliding_window": window}
        counts.add((op.operations(_complete(op, call)), op.bytes_moved(_complete(op, call), [])))
    assert len(counts) == 1


def _complete(op, arguments):
    bound = op.signature.bind(**arguments)
    bound.apply_defaults()
    return dict(bound.arguments)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [0, 1, 5, 30])
@pytest.mark.parametrize("pos_offset", [None, -4, 0, 3, 40])
def test_operations_count_visible_pairs(causal, window, pos_offset):
    op = OPS["flash_attention"]
    q, k = torch.empty(2, 3, 7, 16, device="meta"), torch.empty(2, 1, 20, 16, device="meta")
    arguments = {
        "q": q, "k": k, "v": k, "causal": causal, "sliding_window": window, "kv_len": 17,
        "pos_offset": pos_offset,
    }  # fmt: skip
    first = 17 - 7 if pos_offset is None else pos_offset
    pairs = sum(
        not causal or (j <= first + i and (window == 0 or j > first + i - window))
        for i in range(7)
        for j in range(17)
    )
    assert op.operations(_complete(op, arguments)) == 4 * 2 * 3 * 16 * pairs


@on_backends
def test_bad_options_are_refused(backend_name):
    backend = get_backend(backend_name)
    q, k, v = draw(backend, 3, 5)
    for name, wrong in (
        ("softcap", -1.0),
        ("softcap", float("inf")),
        ("sliding_window", -1),
        ("kv_len", 6),
        ("lse", torch.empty(1, 4, 3, dtype=torch.float16, device=q.device)),
        ("lse", torch.empty(1, 4, 2, device=q.device)),
        ("sinks", torch.empty(2, device=q.device)),
    ):
        with pytest.raises(InputError) as error:
            backend.flash_attention(q, k, v, **{name: wrong})
        assert error.value.argument == name


PREFILLS = [case for case in OPS["flash_attention"].bench if "decode" not in case.id]


@pytest.mark.parametrize("case", PREFILLS, ids=lambda case: case.id)
def test_prefill_uses_what_hopper_has(case):
    """Tensor maps and warpgroup products, within an SM's shared memory and without spills."""
    (launch,) = launches_of(OPS["flash_attention"], case, TARGETS["sm_90"])
    used = compiled(launch)
    assert "wgmma.mma_async" in used.asm["ptx"]
    assert not re.search(r"mma\.sync", used.asm["ptx"])
    assert "cp.async.bulk.tensor" in used.asm["ptx"]
