"""Laws of attention over paged pools, beyond agreement with the reference."""

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from torch.nn import functional as F
from triton.runtime.interpreter import interpreter_builder

from ferrum_triton import InputError, get_backend
from ferrum_triton.kernels.attention import decode_config, paged_prefill
from ferrum_triton.kernels.attention.pages import Pool, as_pool, scaled_queries
from ferrum_triton.kernels.interpreter import run_raw
from ferrum_triton.registry import OPS
from ferrum_triton.testing import assert_close
from tests.harness import BACKENDS, clone, in_float64, place_far_apart, sample

KERNELS = ["interpret", pytest.param("cuda", marks=pytest.mark.gpu)]
AXES = {
    "num_kv_heads": 2,
    "group_size": 3,
    "head_dim": 16,
    "block_size": 8,
    "layout": "hnd",
    "cache_dtype": None,
    "scales": "slot",
    "sliding_window": 0,
    "softcap": 0.0,
    "with_sinks": False,
    "with_lse": True,
}


def decode(backend, seed=0, dtype=torch.float32, **axes):
    axes = AXES | {"batch": 3, "q_len": 2, "max_len": 100} | axes
    return sample(OPS["paged_decode_attention"], dtype, backend.device, seed, **axes)


def varlen(backend, seed=0, dtype=torch.float32, **axes):
    axes = AXES | {"q_lens": (1, 20, 3), "max_offset": 30, "padding": 0} | axes
    return sample(OPS["paged_varlen_attention"], dtype, backend.device, seed, **axes)


def lengths_of(call):
    """Keys of each sequence."""
    if "kv_lens" in call:
        return call["kv_lens"]
    return call["pos_offsets"] + call["cu_seqlens_q"].diff()


@pytest.fixture
def cut_fine():
    """Units of one tile, as many programs as there are tiles."""
    config = {
        "BLOCK_N": 16,
        "PROGRAMS": 1000,
        "LEAST_KEYS": 16,
        "PREFETCH": 2,
        "AHEAD": 0,
        "num_warps": 4,
        "num_stages": 2,
    }
    with decode_config.decode_config.forced(config):
        yield


@pytest.mark.parametrize("backend_name", BACKENDS)
def test_pages_are_a_contiguous_cache(backend_name):
    """Pages gathered into one cache, and attended by torch."""
    backend = get_backend(backend_name)
    call = decode(backend)
    out = backend.paged_decode_attention(**call)
    for b, length in enumerate(call["kv_lens"].tolist()):
        blocks = call["block_tables"][b].long().clamp(min=0)
        k, v = (
            call[name][blocks].transpose(1, 2).flatten(0, 1)[:length].movedim(0, 1).double()
            for name in ("k_cache", "v_cache")
        )
        q = call["q"][b].movedim(0, 1).double()
        position = length - 2 + torch.arange(2, device=q.device)
        mask = torch.arange(length, device=q.device) <= position[:, None]
        want = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
        seen = mask.any(dim=1)
        assert_close(out[b][seen], want.movedim(0, 1)[seen])
        assert not out[b][~seen].any()
        assert (call["lse"][b][~seen] == -torch.inf).all()


@pytest.mark.parametrize("backend_name", BACKENDS)
@pytest.mark.parametrize("layout", ["hnd", "nhd", "vllm_x"])
def test_which_page_a_block_is_does_not_matter(backend_name, layout):
    backend = get_backend(backend_name)
    call = decode(backend, layout=layout, dtype=torch.float16)
    num_blocks = call["k_cache"].shape[0]
    order = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(1))
    order = order.to(backend.device)
    moved = clone(call)
    for name in ("k_cache", "v_cache"):
        moved[name][order] = call[name]
    tables = call["block_tables"]
    moved["block_tables"] = torch.where(tables < 0, -1, order[tables.long().clamp(min=0)]).int()
    assert torch.equal(
        backend.paged_decode_attention(**call), backend.paged_decode_attention(**moved)
    )


@pytest.mark.parametrize("backend_name", BACKENDS)
@pytest.mark.parametrize("name", ["paged_decode_attention", "paged_varlen_attention"])
@pytest.mark.parametrize("cache_dtype", [None, torch.int8])
def test_what_no_query_sees_may_be_anything(backend_name, name, cache_dtype):
    """NaN in unused pages and past the end of the last one, table entries far out of range."""
    backend = get_backend(backend_name)
    make = decode if "decode" in name else varlen
    call = make(backend, cache_dtype=cache_dtype)
    clean = getattr(backend, name)(**clone(call))
    lens = lengths_of(call)
    used = torch.zeros(*call["k_cache"].shape[:3:2], dtype=torch.bool, device=backend.device)
    tables = call["block_tables"]
    for b, length in enumerate(lens.tolist()):
        for p in range(length):
            used[tables[b, p // 8], p % 8] = True
        tables[b, -(-length // 8) :] = 2147480000
    spoiled, unused = "cache", ~used[:, None, :, None]
    if cache_dtype is not None:
        spoiled, unused = "scales", ~used[:, None]
    for letter in "kv":
        call[f"{letter}_{spoiled}"].masked_fill_(unused, torch.nan)
    assert torch.equal(getattr(backend, name)(**call), clean)


@pytest.mark.parametrize("backend_name", BACKENDS)
@pytest.mark.parametrize("make", [decode, varlen])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_quantised_pool_is_the_pool_of_its_values(backend_name, make, dtype):
    """Each slot with a scale of its own, over several tiles of keys."""
    backend = get_backend(backend_name)
    call = make(backend, dtype=dtype, cache_dtype=torch.int8)
    plain = clone(call) | {"k_scales": None, "v_scales": None, "q": call["q"].double()}
    for letter in "kv":
        scales = torch.rand_like(call[f"{letter}_scales"]) / 64
        call[f"{letter}_scales"] = scales
        plain[f"{letter}_cache"] = call[f"{letter}_cache"] * scales.double()[..., None]
    assert lengths_of(call).max() > 40
    name = f"paged_{make.__name__}_attention"
    assert_close(getattr(backend, name)(**call), OPS[name].reference(**plain))
    assert_close(call["lse"], plain["lse"], scale=4 if dtype == torch.bfloat16 else 1)


@triton.jit
def _products_kernel(y_ptr, x_ptr, POOL: tl.constexpr):
    at = tl.arange(0, 64)
    x = tl.load(x_ptr + at).to(tl.bfloat16)
    head = Pool(x_ptr, x_ptr, x_ptr, x_ptr, 0)  # none of which is read
    queries = scaled_queries(x, 0, 0.5, 0.0, 0, head, POOL)
    tl.store(y_ptr + at, queries.q.to(tl.float32) * queries.score_factor)


def test_what_is_taken_from_queries_comes_back_in_scores():
    """A bfloat16 becomes a float16, and smaller for it, where the pool holds codes."""
    codes, scales = torch.zeros(2, 1, 16, 64, dtype=torch.int8), torch.ones(2, 1, 16)
    x, y = torch.randn(64).bfloat16().float(), torch.empty(64)
    pool = as_pool(codes, codes, scales, scales, "hnd")
    run_raw(_products_kernel, (1,), (y, x, pool.layout), {})
    assert_close(y, x / 2)


@pytest.fixture
def loads(monkeypatch):
    """Addresses that interpreted kernels load from, an array for each load."""
    seen, load = [], interpreter_builder.create_masked_load

    def note(pointers, mask, *rest):
        seen.append(pointers.data[mask.data])
        return load(pointers, mask, *rest)

    monkeypatch.setattr(interpreter_builder, "create_masked_load", note)
    return seen


def test_room_for_more_queries_costs_single_ones_nothing(loads):
    """Programs of rows that a sequence has not read none of its keys."""
    backend = get_backend("interpret")
    call = varlen(backend, q_lens=(1,) * 8)
    start, size = call["k_cache"].data_ptr(), call["k_cache"].nbytes
    counts = []
    for max_q_len in (1, 8):
        loads.clear()
        backend.paged_varlen_attention(**call | {"max_q_len": max_q_len})
        counts.append(sum(((at >= start) & (at < start + size)).sum() for at in loads))
    assert counts[0] == counts[1] > 0


@pytest.mark.parametrize("make", [decode, varlen])
@pytest.mark.parametrize("cache_dtype", [None, torch.int8])
@pytest.mark.parametrize("sliding_window", [0, 20])
def test_no_entry_past_the_last_key_is_read(make, cache_dtype, sliding_window, loads):
    """A row of a block table may end where memory does."""
    backend = get_backend("interpret")
    call = make(backend, cache_dtype=cache_dtype, sliding_window=sliding_window)
    num_seqs, columns = call["block_tables"].shape
    table = torch.zeros(num_seqs + 1, columns + 20, dtype=torch.int32)
    table[:-1, :columns] = call["block_tables"]
    call["block_tables"] = table[:-1, :columns]
    getattr(backend, f"paged_{make.__name__}_attention")(**call)
    entry = np.concatenate([of_load.ravel() for of_load in loads]).astype(np.int64)
    entry = (entry - table.data_ptr()) // 4
    entry = entry[(entry >= 0) & (entry < table.numel())]
    assert entry.size
    # The first one may be read ahead for a sequence without keys.
    used = np.append((-(-lengths_of(call) // 8)).clamp(min=1).numpy(), 0)
    assert (entry % table.shape[1] < used[entry // table.shape[1]]).all()


@pytest.mark.parametrize("backend_name", BACKENDS)
@pytest.mark.parametrize("name", ["paged_decode_attention", "paged_varlen_attention"])
def test_an_entry_that_is_no_block_is_the_last_one(backend_name, name):
    backend = get_backend(backend_name)
    call = decode(backend) if "decode" in name else varlen(backend)
    last = call["k_cache"].shape[0] - 1
    call["block_tables"][0, 0] = call["block_tables"][1, 1] = last
    want = getattr(backend, name)(**clone(call))
    call["block_tables"][0, 0], call["block_tables"][1, 1] = -1, last + 1
    assert torch.equal(getattr(backend, name)(**call), want)


@pytest.mark.parametrize("backend_name", KERNELS)
def test_cutting_changes_rounding_only(backend_name, cut_fine):
    backend = get_backend(backend_name)
    for axes in ({}, {"sliding_window": 20}, {"with_sinks": True}, {"q_len": 1, "batch": 1}):
        call, plain = (decode(backend, seed=4, **axes) for _ in range(2))
        out = backend.paged_decode_attention(**call)
        want = OPS["paged_decode_attention"].reference(**plain)
        assert_close(out, want)
        assert_close(call["lse"], plain["lse"])


@pytest.mark.parametrize("backend_name", KERNELS)
def test_batch_invariant_results_are_those_of_a_batch_of_one(backend_name, monkeypatch):
    monkeypatch.setattr(decode_config, "INVARIANT_KEYS", 32)
    monkeypatch.setattr("ferrum_triton.kernels.attention.paged_decode.INVARIANT_KEYS", 32)
    backend = get_backend(backend_name)
    call = decode(backend, max_len=200) | {"batch_invariant": True}
    together = backend.paged_decode_attention(**call)
    for b in range(3):
        rows = {n: call[n][b : b + 1] for n in ("q", "block_tables", "kv_lens", "lse")}
        alone = backend.paged_decode_attention(**{**call, **rows})
        assert torch.equal(alone[0], together[b])


@pytest.mark.parametrize("backend_name", BACKENDS)
def test_lengths_past_the_table_are_all_it_holds(backend_name):
    """Those of 64 bits too, whose lower half is a small number."""
    backend = get_backend(backend_name)
    call = decode(backend)
    capacity = call["block_tables"].shape[1] * 8
    call["block_tables"].clamp_(min=0)
    lens = torch.tensor([2**40 + 3, capacity, 7], device=backend.device)
    want = backend.paged_decode_attention(**clone(call) | {"kv_lens": lens.clamp(max=capacity)})
    assert torch.equal(backend.paged_decode_attention(**call | {"kv_lens": lens}), want)


@pytest.mark.parametrize("backend_name", BACKENDS)
def test_a_window_ends_where_it_says(backend_name):
    """The value of the oldest key inside counts, that of the one before does not."""
    backend = get_backend(backend_name)
    call = decode(backend, batch=1, q_len=1, sliding_window=20)
    call["kv_lens"].fill_(77)
    before = backend.paged_decode_attention(**clone(call))
    for age, counts in ((20, False), (19, True)):
        changed = clone(call)
        position = 76 - age
        block = changed["block_tables"][0, position // 8]
        changed["v_cache"][block, :, position % 8] += 3.0
        after = backend.paged_decode_attention(**changed)
        assert torch.equal(after, before) != counts


@pytest.mark.parametrize("backend_name", KERNELS)
def test_a_window_may_begin_at_any_key_of_a_tile(backend_name, cut_fine):
    """That of the oldest of five queries, which may lie in a tile before the newest one's."""
    backend = get_backend(backend_name)
    call = decode(backend, batch=16, q_len=5, sliding_window=20, num_kv_heads=1, group_size=1)
    call["kv_lens"].copy_(torch.arange(40, 56))
    fresh = clone(call)
    out = backend.paged_decode_attention(**call)
    assert_close(out, OPS["paged_decode_attention"].reference(**fresh))
    assert_close(call["lse"], fresh["lse"])


@pytest.mark.parametrize("backend_name", BACKENDS)
def test_a_mixed_batch_is_its_sequences(backend_name):
    """Prompts, chunks and single tokens attended together, and each as a decode of its own."""
    backend = get_backend(backend_name)
    call = varlen(backend, q_lens=(1, 20, 3, 9), padding=2)
    out = backend.paged_varlen_attention(**call)
    ends = call["cu_seqlens_q"].tolist()
    shared = {n: call[n] for n in ("k_cache", "v_cache")}
    for s in range(4):
        start, end = ends[s], ends[s + 1]
        alone = backend.paged_decode_attention(
            call["q"][None, start:end],
            **shared,
            block_tables=call["block_tables"][s : s + 1],
            kv_lens=call["pos_offsets"][s : s + 1] + end - start,
        )
        assert_close(out[start:end], alone[0])


@pytest.mark.parametrize("backend_name", BACKENDS)
def test_the_future_does_not_change_the_past(backend_name):
    backend = get_backend(backend_name)
    call = varlen(backend, q_lens=(20,), max_offset=0)
    before = backend.paged_varlen_attention(**clone(call))
    block = call["block_tables"][0, 12 // 8]
    for cache in ("k_cache", "v_cache"):
        call[cache][block, :, 12 % 8] += 1.0
    after = backend.paged_varlen_attention(**call)
    assert torch.equal(after[:12], before[:12])
    assert not torch.equal(after[12:], before[12:])


@pytest.mark.parametrize("backend_name", BACKENDS)
def test_soft_caps_hold_large_scores(backend_name):
    backend = get_backend(backend_name)
    call = decode(backend, softcap=5.0)
    call["q"] *= 1000.0
    out = backend.paged_decode_attention(**call)
    assert out.isfinite().all()
    assert (call["lse"][call["kv_lens"] > 1] < 5.0 + torch.tensor(100.0).log()).all()


@pytest.mark.parametrize("backend_name", BACKENDS)
@pytest.mark.parametrize("make", [decode, varlen])
def test_a_cap_far_above_the_scores_keeps_their_bits(backend_name, make):
    """It takes a millionth of them; tanh as a difference of numbers near 1 would round more."""
    name = f"paged_{make.__name__}_attention"
    call = make(get_backend(backend_name), softcap=1000.0)
    wide = in_float64(clone(call))
    out = getattr(get_backend(backend_name), name)(**call)
    assert_close(out, OPS[name].reference(**wide))
    assert_close(call["lse"], wide["lse"])


@pytest.mark.parametrize("backend_name", BACKENDS)
def test_a_sink_is_a_key_without_a_value(backend_name):
    backend = get_backend(backend_name)
    call = decode(backend, with_sinks=True)
    plain = clone(call) | {"sinks": None}
    out = backend.paged_decode_attention(**call)
    without = backend.paged_decode_attention(**plain)
    share = torch.exp(plain["lse"] - torch.logaddexp(plain["lse"], call["sinks"].expand(3, 2, 6)))
    assert_close(out, without * share[..., None])


@pytest.mark.parametrize("change", ["heads", "scales", "window", "block"])
def test_calls_that_make_no_sense_are_refused(change):
    backend = get_backend("cpu")
    call = decode(backend, cache_dtype=torch.int8)
    if change == "heads":
        call["q"] = call["q"][:, :, :5]
    elif change == "scales":
        call["k_scales"] = None
    elif change == "window":
        call["sliding_window"] = -1
    else:
        for name in ("k_cache", "v_cache", "k_scales", "v_scales"):
            call[name] = call[name][:, :, :6]
    with pytest.raises(InputError):
        backend.paged_decode_attention(**call)


@pytest.mark.gpu
@pytest.mark.parametrize("batch_invariant", [False, True])
def test_replays_follow_lengths_across_units(batch_invariant):
    """One captured step, at lengths on both sides of pages, tiles and units, and at none."""
    backend = get_backend("cuda")
    call = decode(backend, dtype=torch.float16, max_len=5000, head_dim=64, block_size=16, q_len=1)
    call["batch_invariant"] = batch_invariant
    out = torch.empty_like(call["q"])
    backend.paged_decode_attention(**call, out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        backend.paged_decode_attention(**call, out=out)
    tables = call["block_tables"].clone()
    for lens in (
        (0, 1, 15), (16, 17, 127), (128, 129, 1023), (1024, 1025, 5000), (0, 0, 0), (4999, 2, 640),
    ):  # fmt: skip
        call["kv_lens"].copy_(torch.tensor(lens))
        call["block_tables"].copy_(tables)
        for row, length in enumerate(lens):
            if length == 0:
                call["block_tables"][row] = -1  # a padding row
        out.fill_(torch.nan)
        graph.replay()
        fresh = clone(call)
        assert_close(out, OPS["paged_decode_attention"].reference(**fresh))
        assert_close(call["lse"], fresh["lse"])


@pytest.mark.gpu
@pytest.mark.parametrize("blocks", [140_000, 280_000])
@pytest.mark.parametrize("make", [decode, varlen])
def test_pages_past_two_to_the_31_elements(make, blocks):
    """Real memory: the last pages of a pool of 2.3e9 elements, and of 4.6e9."""
    backend = get_backend("cuda")
    call = make(backend, dtype=torch.float16, head_dim=128, num_kv_heads=8, block_size=16)
    attend = backend.paged_decode_attention if make is decode else backend.paged_varlen_attention
    near = clone(call)
    want = attend(**near)
    first = blocks - call["k_cache"].shape[0]
    for name in ("k_cache", "v_cache"):
        far = torch.empty(blocks, *call[name].shape[1:], dtype=torch.float16, device="cuda")
        far[first:] = call[name]
        call[name] = far
    tables = call["block_tables"]
    call["block_tables"] = torch.where(tables < 0, tables, tables + first)
    assert torch.equal(attend(**call), want)
    assert torch.equal(call["lse"], near["lse"])


@pytest.mark.parametrize("backend_name", BACKENDS)
@pytest.mark.parametrize("cost", [1e-6, 1.0, 1e6])
def test_programs_take_blocks_in_turns(backend_name, cost, monkeypatch):
    """One program, some or all of them, beside as many blocks as a launch has without turns."""
    backend = get_backend(backend_name)
    axes = {"q_lens": (1, 200, 3, 90), "max_offset": 100, "head_dim": 64}
    call = varlen(backend, dtype=torch.float16, **axes)
    monkeypatch.setattr(paged_prefill, "processors", lambda device: 1 << 20)
    alone = clone(call)
    want = backend.paged_varlen_attention(**alone)
    monkeypatch.setattr(paged_prefill, "BLOCK_COST", cost)
    monkeypatch.setattr(paged_prefill, "processors", lambda _: 5)
    assert torch.equal(backend.paged_varlen_attention(**call), want)
    assert torch.equal(call["lse"], alone["lse"])


@pytest.mark.parametrize("backend_name", BACKENDS)
@pytest.mark.parametrize("layout", ["hnd", "vllm_x"])
def test_narrow_offsets_are_the_wide_ones(backend_name, layout, monkeypatch):
    backend = get_backend(backend_name)
    call = varlen(backend, dtype=torch.float16, layout=layout)
    want = backend.paged_varlen_attention(**call)
    monkeypatch.setattr(paged_prefill, "is_narrow", lambda _: False)
    assert torch.equal(backend.paged_varlen_attention(**call), want)


@pytest.mark.parametrize("name", ["k_cache", "v_cache"])
@pytest.mark.parametrize("layout", ["hnd", "vllm_x"])
def test_pools_past_two_to_the_32_elements(name, layout):
    """More than offsets of 32 bits hold, unsigned ones too."""
    backend = get_backend("interpret")
    call = varlen(backend, dtype=torch.float16, layout=layout)
    want = backend.paged_varlen_attention(**clone(call))
    call[name] = place_far_apart(call[name], 0, apart=2**33)
    assert torch.equal(backend.paged_varlen_attention(**call), want)


@pytest.mark.parametrize("backend_name", BACKENDS)
@pytest.mark.parametrize("block_size", [8, 32, 256])
@pytest.mark.parametrize("sliding_window", [0, 20])
def test_tiles_of_many_pages_and_pages_of_many_tiles(backend_name, block_size, sliding_window):
    backend = get_backend(backend_name)
    axes = {"q_lens": (70, 9), "max_offset": 150, "sliding_window": sliding_window}
    call = varlen(backend, dtype=torch.float16, block_size=block_size, **axes)
    fresh = clone(call)
    got = backend.paged_varlen_attention(**call)
    assert_close(got, OPS["paged_varlen_attention"].reference(**fresh))
    assert_close(call["lse"], fresh["lse"])


@pytest.mark.parametrize("backend_name", BACKENDS)
@pytest.mark.parametrize("scale", [-0.3, 0.0])
def test_prefill_with_odd_scales(backend_name, scale):
    backend = get_backend(backend_name)
    call = varlen(backend) | {"softmax_scale": scale}
    fresh = clone(call)
    got = backend.paged_varlen_attention(**call)
    assert_close(got, OPS["paged_varlen_attention"].reference(**fresh))
    assert_close(call["lse"], fresh["lse"])


@pytest.mark.parametrize("backend_name", ["cpu", "interpret"])
def test_a_bound_below_a_sequence_is_refused_where_the_host_sees_it(backend_name):
    backend = get_backend(backend_name)
    call = varlen(backend, q_lens=(1, 5, 3)) | {"lse": None}
    want = backend.paged_varlen_attention(**call)
    for bound in (5, 6, 100):
        assert_close(backend.paged_varlen_attention(**call | {"max_q_len": bound}), want.double())
    for bound in (4, 1, 0, -1):
        with pytest.raises(InputError, match="allowed: 5 or more") as error:
            backend.paged_varlen_attention(**call | {"max_q_len": bound})
        assert error.value.argument == "max_q_len"
