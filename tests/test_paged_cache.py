"""Paged writers: what they write is found again, in every layout, quantised within its bound."""

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from ferrum_triton import InputError, get_backend
from ferrum_triton.ops.kv_pool import LAYOUTS, LIMITS, cache_shapes, token_view
from ferrum_triton.ops.rope import NORM_ROPE, ROPE
from ferrum_triton.registry import OPS
from tests.harness import BACKENDS, clone, place, place_far_apart, sample, tensors

on_backends = pytest.mark.parametrize("backend_name", BACKENDS)
on_layouts = pytest.mark.parametrize("layout", LAYOUTS)
QUANTISED = [pytest.param(dtype, id=str(dtype)[6:]) for dtype in LIMITS]
WRITERS = ["kv_cache_append_paged", "split_qkv_norm_rope_into_paged_cache"]
AXES = {"num_kv_heads": 2, "head_dim": 32, "block_size": 8}


def new_pool(layout, num_blocks, block_size, num_kv_heads, head_dim, dtype, device):
    """Caches, and scales where the dtype has them, of random bytes."""
    *shapes, per_token = cache_shapes(layout, num_blocks, block_size, num_kv_heads, head_dim, dtype)
    pool = {
        name: torch.randn(shape, device=device).to(dtype)
        for name, shape in zip(("k_cache", "v_cache"), shapes, strict=True)
    }
    if dtype in LIMITS:
        for name in ("k_scales", "v_scales"):
            pool[name] = torch.rand(per_token, device=device)
    return pool


def gather(cache, layout, slots, scales=None):
    """[len(slots), num_kv_heads, head_dim] of a cache, dequantised."""
    rows = token_view(cache, layout).flatten(3).flatten(0, 1).float()[slots]
    return (
        rows if scales is None else rows * token_view(scales, layout).flatten(0, 1)[slots, :, None]
    )


def slots_of(block_table, positions, block_size):
    return block_table[positions // block_size].long() * block_size + positions % block_size


def bits(x):
    return x.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[x.element_size()])


@on_backends
@on_layouts
def test_what_is_written_is_gathered(backend_name, layout):
    """Two prompts, a continued sequence and padding, in blocks in any order."""
    backend = get_backend(backend_name)
    device, block_size = backend.device, 8
    num_heads, num_kv_heads, head_dim = 4, 2, 32
    pool = new_pool(layout, 20, block_size, num_kv_heads, head_dim, torch.float32, device)
    before = clone(pool)
    block_tables = torch.randperm(20, device=device)[:18].view(3, 6).int()
    lengths, starts = [21, 1, 9], [0, 37, 14]
    padded = sum(lengths) + 3
    cu_seqlens_q = torch.tensor([0, 21, 22, 31], dtype=torch.int32, device=device)
    qkv = torch.randn(padded, (num_heads + 2 * num_kv_heads) * head_dim, device=device)
    weights = torch.rand(2, head_dim, device=device) + 0.5
    angle = 6.3 * torch.rand(48, head_dim // 2, device=device)
    tables = angle.cos(), angle.sin()
    got = backend.split_qkv_norm_rope_into_paged_cache(
        qkv,
        *weights,
        *tables,
        num_heads=num_heads,
        block_tables=block_tables,
        pos_offsets=torch.tensor(starts, device=device),
        cu_seqlens_q=cu_seqlens_q,
        layout=layout,
        **pool,
    )
    assert got.shape == (padded, num_heads, head_dim)
    written, first = [], 0
    for seq, (length, start) in enumerate(zip(lengths, starts, strict=True)):
        rows = slice(first, first + length)
        q, k, v = backend.split_qkv_norm_rope(
            qkv[rows], *weights, *tables, num_heads, num_kv_heads, pos_offset=start
        )
        positions = torch.arange(start, start + length, device=device)
        slots = slots_of(block_tables[seq], positions, block_size)
        for name, want in (("k_cache", k), ("v_cache", v)):
            found = gather(pool[name], layout, slots)
            torch.testing.assert_close(found, want.transpose(0, 1), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(got[rows], q.transpose(0, 1), rtol=1e-5, atol=1e-5)
        written.append(slots)
        first += length
    others = torch.ones(20 * block_size, dtype=torch.bool, device=device)
    others[torch.cat(written)] = False
    for name, cache in pool.items():
        assert torch.equal(gather(cache, layout, others), gather(before[name], layout, others))


@on_backends
@pytest.mark.parametrize("name", WRITERS)
@pytest.mark.parametrize("dtype", [torch.float16, *QUANTISED])
@pytest.mark.parametrize("placement", ["slots", "varlen"])
def test_layouts_are_equal_after_relayout(backend_name, name, dtype, placement):
    backend = get_backend(backend_name)
    pools = []
    for layout in LAYOUTS:
        axes = AXES | {"layout": layout, "placement": placement, "num_tokens": 5, "group_size": 2}
        if name == "kv_cache_append_paged":
            del axes["group_size"]
        arguments = sample(OPS[name], torch.float16, backend.device, 4, **axes, cache_dtype=dtype)
        for key in ("k_cache", "v_cache", "k_scales", "v_scales"):
            arguments[key] = torch.zeros_like(arguments[key])
        # The draws behind the pool differ by layout: take the inputs of the first.
        for key, value in (pools[0][1] if pools else {}).items():
            if key not in ("k_cache", "v_cache", "k_scales", "v_scales", "layout"):
                arguments[key] = value
        getattr(backend, name)(**arguments)
        pools.append((layout, arguments))
    reference = pools[0][1]
    for layout, arguments in pools[1:]:
        for key in ("k_cache", "v_cache"):
            want = token_view(bits(reference[key]), LAYOUTS[0]).flatten(3)
            assert want.any()
            assert torch.equal(token_view(bits(arguments[key]), layout).flatten(3), want)
        for key in ("k_scales", "v_scales"):
            want = token_view(reference[key], LAYOUTS[0])
            assert torch.equal(token_view(arguments[key], layout), want)


@on_backends
@pytest.mark.parametrize("name", WRITERS)
@given(data=st.data(), seed=st.integers(0, 2**31))
def test_quantised_writers_match_the_reference(backend_name, name, data, seed):
    """As every op is held to its reference, but codes may be a step off where rounding ties."""
    backend, op = get_backend(backend_name), OPS[name]
    axes = data.draw(
        st.fixed_dictionaries({k: st.sampled_from(v) for k, v in op.axes.items()}), label="axes"
    )
    axes["head_dim"] = data.draw(st.sampled_from((16, 48, 64)), label="head_dim")
    axes["cache_dtype"] = data.draw(st.sampled_from(list(LIMITS)), label="cache_dtype")
    scales_dtype = data.draw(st.sampled_from((torch.float16, torch.float32)), label="scales_dtype")
    dtype = data.draw(st.sampled_from(op.dtypes), label="dtype")
    arguments = sample(op, dtype, backend.device, seed, **axes, scales_dtype=scales_dtype)
    layouts = st.sampled_from(("plain", "misaligned", "padded", "permuted"))
    buffers = {
        key: place(bits(value) if value.itemsize == 1 else value, data.draw(layouts, label=key))
        for key, value in tensors(arguments).items()
    }
    for key, buffer in buffers.items():
        arguments[key] = buffer.tensor.view(arguments[key].dtype)
    left = clone(arguments)
    want = op.reference(**left)
    got = getattr(backend, name)(**arguments)
    if want is not None:
        torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2)
    for key, buffer in buffers.items():
        assert buffer.guards_intact(), f"wrote outside {key}"
        if key not in op.mutates:
            assert buffer.unchanged(), f"changed {key}"
    for key in ("k_cache", "v_cache"):
        steps = [ordered_codes(a[key]) for a in (arguments, left)]
        assert (steps[0] - steps[1]).abs().max() <= 1
    for key in ("k_scales", "v_scales"):
        torch.testing.assert_close(arguments[key], left[key], rtol=1e-3, atol=1e-7)


def ordered_codes(x):
    """Integers in which neighbouring codes differ by one."""
    if x.dtype == torch.int8:
        return x.int()
    code = x.view(torch.uint8).int()
    return torch.where(code < 128, code, 128 - code)


@on_backends
@on_layouts
@pytest.mark.parametrize("dtype", QUANTISED)
def test_quantisation_error_is_bounded(backend_name, layout, dtype):
    """Half a step: of the scale for int8, of the code's own binade for E4M3, 2^-4 of the value."""
    backend = get_backend(backend_name)
    device = backend.device
    pool = new_pool(layout, 6, 8, 2, 64, dtype, device)
    magnitude = torch.logspace(-6, 4, 40, device=device)[:, None, None]
    k, v = (torch.randn(40, 2, 64, device=device) * magnitude for _ in "kv")
    k[7] = 0.0
    slots = torch.randperm(48, device=device)[:40]
    backend.kv_cache_append_paged(k=k, v=v, slots=slots, layout=layout, **pool)
    for x, key in ((k, "k"), (v, "v")):
        scales = pool[f"{key}_scales"]
        got = gather(pool[f"{key}_cache"], layout, slots, scales)
        scale = token_view(scales, layout).flatten(0, 1)[slots, :, None]
        torch.testing.assert_close(
            scale[..., 0], x.abs().amax(-1).clamp_min(1e-8) / LIMITS[dtype], rtol=1e-6, atol=0
        )
        if dtype == torch.int8:
            bound = 0.5 * scale
        else:
            bound = torch.maximum(x.abs() * 2**-4, 2**-10 * scale)
        assert bool(((got - x).abs() <= bound * 1.001).all())


@on_backends
@pytest.mark.parametrize("dtype", QUANTISED)
def test_codes_are_rounded_to_nearest_even(backend_name, dtype):
    """With the limit in each head the scale is one, and codes are torch's own conversion."""
    backend = get_backend(backend_name)
    limit = LIMITS[dtype]
    if dtype == torch.int8:
        values = torch.arange(-254, 255).float() / 2
    else:
        # Every bfloat16, among them all of E4M3's ties and its subnormals.
        values = torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.bfloat16).float()
        values = values[values.isfinite() & (values.abs() <= limit)]
    heads = -(-len(values) // 127)
    x = torch.zeros(heads, 1, 128)
    x[..., :127] = torch.cat((values, values.new_zeros(heads * 127 - len(values)))).view(-1, 1, 127)
    x[..., 127] = limit
    x = x.to(backend.device)
    pool = new_pool("hnd", -(-heads // 16), 16, 1, 128, dtype, backend.device)
    slots = torch.arange(heads, device=backend.device)
    backend.kv_cache_append_paged(k=x, v=-x, slots=slots, **pool)
    exact = x.round() if dtype == torch.int8 else x
    for key, want in (("k_cache", exact.to(dtype)), ("v_cache", (-exact).to(dtype))):
        got = token_view(pool[key], "hnd").flatten(0, 1)[:heads]
        # Not by bits: the sign of a zero is of no account.
        assert torch.equal(got.float(), want.float())
    assert bool((pool["k_scales"].flatten()[:heads] == 1).all())


@on_backends
@pytest.mark.parametrize("dtype", QUANTISED)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_values_not_finite_show_in_the_scale(backend_name, dtype, value):
    """Of the head that holds one there is no more to tell: its codes are zeros."""
    backend = get_backend(backend_name)
    pool = new_pool("hnd", 1, 8, 2, 16, dtype, backend.device)
    x = torch.randn(8, 2, 16, device=backend.device)
    spoiled = x.clone()
    spoiled[3, 1, 5] = value
    slots = torch.arange(8, device=backend.device)
    backend.kv_cache_append_paged(k=spoiled, v=x, slots=slots, **pool)
    finite = torch.ones(1, 2, 8, dtype=torch.bool, device=backend.device)
    finite[0, 1, 3] = False
    assert torch.equal(pool["k_scales"].isfinite(), finite)
    assert bool(pool["v_scales"].isfinite().all() and pool["k_cache"].float().isfinite().all())
    is_zero = ~pool["k_cache"].float().any(dim=-1)
    assert torch.equal(is_zero, ~finite)


@on_backends
@pytest.mark.parametrize("name", WRITERS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, *QUANTISED])
def test_tokens_without_a_place_leave_all_bytes(backend_name, name, dtype):
    backend, op = get_backend(backend_name), OPS[name]
    extra = {} if name == "kv_cache_append_paged" else {"group_size": 2}
    nowhere = {
        "slots": {"slots": [-1, -(2**31), 10**6, 2**31 - 1, 64]},
        "single": {"block_tables": [[-1, 10**6]]},
        "decode": {"pos_offsets": [-1, 10**6, 2**31 - 1, -(2**31), 24]},
        "varlen": {"cu_seqlens_q": [0, 0, 0, 0]},
    }
    for placement, changes in nowhere.items():
        axes = AXES | extra | {"num_tokens": 5, "placement": placement, "cache_dtype": dtype}
        arguments = sample(op, torch.bfloat16, backend.device, 9, **axes)
        if placement == "slots":
            *shapes, per_token = cache_shapes("hnd", 8, 8, 2, 32, dtype)
            for key, shape in zip(("k_cache", "v_cache"), shapes, strict=True):
                arguments[key] = torch.randn(shape, device=backend.device).to(dtype)
            for key in ("k_scales", "v_scales"):
                arguments[key] = torch.rand(per_token, device=backend.device)
        for key, value in changes.items():
            changed = torch.tensor(value, dtype=torch.int32, device=backend.device)
            assert arguments[key].shape == changed.shape
            arguments[key] = changed
        before = clone(arguments)
        out = getattr(backend, name)(**arguments)
        assert out is None or bool(out.isfinite().all())
        for key in op.mutates:
            assert torch.equal(bits(arguments[key]), bits(before[key])), (placement, key)


@on_backends
def test_more_sequences_than_one_load_of_them(backend_name):
    """Empty sequences among 300, and so a count of ends in several turns."""
    backend = get_backend(backend_name)
    device = backend.device
    lengths = torch.randint(0, 2, (300,)) * torch.randint(0, 2, (300,))
    num_tokens = int(lengths.sum())
    starts = torch.randint(0, 16, (300,))
    block_tables = torch.randperm(600).view(300, 2)
    pool = new_pool("hnd", 600, 8, 1, 16, torch.float32, device)
    x = torch.randn(num_tokens, 1, 16, device=device)
    cu_seqlens_q = torch.cat((torch.zeros(1), lengths.cumsum(0))).to(device, torch.int32)
    backend.kv_cache_append_paged(
        k=x,
        v=-x,
        block_tables=block_tables.to(device),
        pos_offsets=starts.to(device),
        cu_seqlens_q=cu_seqlens_q,
        **pool,
    )
    seqs = torch.arange(300).repeat_interleave(lengths)
    slots = block_tables[seqs, starts[seqs] // 8] * 8 + starts[seqs] % 8
    assert torch.equal(gather(pool["k_cache"], "hnd", slots.to(device)), x)


@on_backends
def test_a_contiguous_cache_is_a_pool_of_one_page(backend_name):
    backend = get_backend(backend_name)
    device = backend.device
    caches = torch.randn(2, 2, 3, 16, 16, device=device)  # keys and values of two caches
    k, v = torch.randn(2, 4, 3, 16, device=device)
    slots = torch.tensor([5, 0, 17, 15], device=device)  # the third is outside
    one = caches.clone()
    backend.kv_cache_append_head_major(
        one[0, 0], one[1, 0], k.transpose(0, 1), v.transpose(0, 1), slots=slots
    )
    pools = caches[:, :1].clone()
    backend.kv_cache_append_paged(*pools, k, v, slots=slots)
    assert torch.equal(pools[:, 0], one[:, 0])
    # One token for each of several caches.
    both = caches.clone()
    tables = torch.arange(2, device=device)[:, None]
    lengths = torch.tensor([7, 2], device=device)
    backend.kv_cache_append_paged(*both, k[:2], v[:2], block_tables=tables, pos_offsets=lengths)
    for item, row in enumerate((7, 2)):
        assert torch.equal(both[0, item, :, row], k[item])
        assert torch.equal(both[1, item, :, row], v[item])


@on_backends
def test_queries_head_major_and_other_rotary_positions(backend_name):
    backend, op = get_backend(backend_name), OPS["split_qkv_norm_rope_into_paged_cache"]
    axes = AXES | {"num_tokens": 5, "group_size": 2, "placement": "single", "qk_mode": ROPE}
    arguments = sample(op, torch.float32, backend.device, 2, **axes)
    shifted = clone(arguments)
    plain = backend.split_qkv_norm_rope_into_paged_cache(**arguments)
    buffer = torch.zeros(4, 5, 32, device=backend.device)
    start = int(arguments["pos_offsets"][0])
    positions = torch.arange(start, start + 5, dtype=torch.int32, device=backend.device)
    shifted["positions"] = positions
    backend.split_qkv_norm_rope_into_paged_cache(**shifted, out=buffer.transpose(0, 1))
    torch.testing.assert_close(buffer.transpose(0, 1), plain)
    torch.testing.assert_close(shifted["k_cache"], arguments["k_cache"])
    shifted["positions"] = positions.flip(0)
    moved = backend.split_qkv_norm_rope_into_paged_cache(**shifted)
    assert not torch.allclose(moved, plain)
    assert torch.equal(shifted["v_cache"], arguments["v_cache"])


@pytest.mark.parametrize("backend_name", ["cpu", "interpret"])
@on_layouts
@pytest.mark.parametrize("dtype", [torch.float16, torch.int8])
def test_offsets_past_int32(backend_name, layout, dtype):
    """Every layout and its scales, with the pool's last block and its last row written."""
    backend, op = get_backend(backend_name), OPS["kv_cache_append_paged"]
    # Three sequences of 24 tokens in all reach the last row of a page.
    axes = AXES | {"num_tokens": 24, "layout": layout, "placement": "varlen", "cache_dtype": dtype}
    near = sample(op, torch.float16, backend.device, 3, **axes)
    num_blocks, table = len(near["k_cache"]), near["block_tables"]
    near["block_tables"] = (num_blocks - 1 - torch.arange(table.numel())).view(table.shape).int()
    left = clone(near)
    backend.kv_cache_append_paged(**left)
    for name in op.mutates:
        for dim in range(near[name].dim() - 1):
            arguments = clone(near)
            arguments[name] = place_far_apart(arguments[name], dim)
            backend.kv_cache_append_paged(**arguments)
            for key in op.mutates:
                assert torch.equal(arguments[key], left[key]), (name, dim, key)


@pytest.mark.parametrize(
    ("change", "argument"),
    [
        ({"layout": "dnh"}, "layout"),
        ({"layout": "vllm_x"}, "k_cache"),
        ({"v_cache": torch.zeros(9, 2, 8, 16, dtype=torch.int8)}, "v_cache"),
        ({"v_cache": torch.zeros(9, 2, 8, 32)}, "v_cache"),
        ({"k_scales": None}, "k_scales"),
        ({"v_scales": torch.zeros(9, 8, 2)}, "v_scales"),
        ({"v_scales": torch.zeros(9, 2, 8, dtype=torch.bfloat16)}, "v_scales"),
        ({"slots": None}, "slots"),
        ({"block_tables": torch.zeros(1, 2, dtype=torch.int32)}, "slots"),
        ({"pos_offsets": torch.zeros(1, dtype=torch.int32)}, "pos_offsets"),
        ({"cu_seqlens_q": torch.zeros(2, dtype=torch.int32)}, "cu_seqlens_q"),
        ({"slots": None, "block_tables": torch.zeros(1, 2, dtype=torch.int32)}, "pos_offsets"),
        (
            {
                "slots": None,
                "block_tables": torch.zeros(3, 2, dtype=torch.int32),
                "pos_offsets": torch.zeros(3, dtype=torch.int32),
            },
            "block_tables",
        ),
        (
            {
                "slots": None,
                "block_tables": torch.zeros(3, 2, dtype=torch.int32),
                "pos_offsets": torch.zeros(3, dtype=torch.int32),
                "cu_seqlens_q": torch.zeros(3, dtype=torch.int32),
            },
            "cu_seqlens_q",
        ),
        ({"positions": None}, "positions"),
        ({"num_heads": 3}, "num_heads"),
        ({"num_heads": 6}, "qkv"),
        ({"qk_mode": 4}, "qk_mode"),
        ({"q_weight": None}, "q_weight"),
    ],
)
@pytest.mark.parametrize("backend_name", ["cpu", "interpret"])
def test_calls_that_make_no_sense_are_refused(backend_name, change, argument):
    backend = get_backend(backend_name)
    arguments = {
        "qkv": torch.randn(5, 8 * 32),
        "q_weight": torch.ones(32),
        "k_weight": torch.ones(32),
        "cos": torch.ones(9, 16),
        "sin": torch.zeros(9, 16),
        "num_heads": 4,
        "slots": torch.arange(5),
        "positions": torch.arange(5),
        "qk_mode": NORM_ROPE,
        **new_pool("hnd", 9, 8, 2, 32, torch.int8, "cpu"),
    }
    backend.split_qkv_norm_rope_into_paged_cache(**arguments)
    before = clone(arguments)
    with pytest.raises(InputError) as error:
        backend.split_qkv_norm_rope_into_paged_cache(**arguments | change)
    assert error.value.argument == argument
    for name in ("k_cache", "v_cache", "k_scales", "v_scales"):
        assert torch.equal(arguments[name], before[name])


def test_no_pool_is_written_that_attention_would_not_read():
    """But for a contiguous cache, which is a pool of one block."""
    backend = get_backend("cpu")
    new, slots = torch.ones(1, 2, 32), torch.zeros(1, dtype=torch.int64)
    pool = torch.zeros(3, 2, 12, 32)
    with pytest.raises(InputError, match="block_size 12; allowed: a power of two, or a pool of"):
        backend.kv_cache_append_paged(pool, pool.clone(), new, new, slots=slots)
    backend.kv_cache_append_paged(pool[:1], pool[1:2], new, new, slots=slots)
    assert pool[:2].sum() == 2 * new.sum()
