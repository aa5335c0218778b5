"""KV caches: what the host believes is what the device holds, whatever was grown and freed."""

import contextlib

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ferrum_triton import FerrumError, InputError, get_backend
from ferrum_triton.runtime.context import recording
from ferrum_triton.runtime.kv_cache import BlockAllocator, KvCache, PagedKvCache
from ferrum_triton.types import KvDtypeKind

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
KINDS = list(KvDtypeKind)


@contextlib.contextmanager
def recorded():
    token = recording.set(True)
    try:
        yield
    finally:
        recording.reset(token)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("device", DEVICES)
def test_contiguous_cache_keeps_its_rows_when_it_grows(kind, device):
    sizes = {"num_layers": 2, "num_kv_heads": 3, "head_dim": 8, "capacity": 5}
    cache = KvCache(**sizes, kind=kind, device=device)
    assert cache.k[1].dtype == kind.dtype and len(cache.tensors) == (8 if kind.quantised else 4)
    for tensor in cache.tensors:
        tensor.copy_(torch.randn(tensor.shape, device=device) * 40)
    cache.set_len(4)
    before = [tensor[:, :4].clone() for tensor in cache.tensors]
    pointers = [tensor.data_ptr() for tensor in cache.tensors]

    cache.ensure_contig_capacity(5)
    assert [tensor.data_ptr() for tensor in cache.tensors] == pointers
    cache.ensure_contig_capacity(6)
    assert cache.capacity == 10 and cache.length == 4
    cache.ensure_contig_capacity(37)
    assert cache.capacity == 37
    assert all(t.shape == (3, 37, 8) and t.is_contiguous() for t in (*cache.k, *cache.v))
    assert all(t.shape == (3, 37) for t in (*cache.k_scales, *cache.v_scales))
    for old, new in zip(before, cache.tensors, strict=True):
        assert torch.equal(old.float(), new[:, :4].float())


def test_contiguous_cache_is_what_the_ops_write():
    backend = get_backend("cpu")
    k, v = torch.randn(2, 2, 9, 16).half()
    cache = KvCache(num_kv_heads=2, head_dim=16, capacity=1, kind=KvDtypeKind.FP16)
    for start, end in ((0, 4), (4, 5), (5, 9)):
        cache.ensure_contig_capacity(end)
        new = (k[:, start:end].contiguous(), v[:, start:end].contiguous())
        backend.kv_cache_append_head_major(cache.k[0], cache.v[0], *new, cache_len=cache.length)
        cache.set_len(end)
    assert torch.equal(cache.k[0][:, :9], k)
    assert torch.equal(cache.v[0][:, :9], v)


def test_contiguous_cache_limits():
    cache = KvCache(num_kv_heads=2, head_dim=4, capacity=3)
    for length in (-1, 4):
        with pytest.raises(InputError, match="capacity of 3"):
            cache.set_len(length)
    with recorded(), pytest.raises(FerrumError, match="cannot be captured"):
        cache.ensure_contig_capacity(4)
    cache.set_len(3)
    cache.free()
    assert cache.length == cache.capacity == cache.k[0].shape[1] == 0
    for bad in ({"head_dim": 0}, {"num_layers": 0}, {"capacity": -1}):
        with pytest.raises(InputError):
            KvCache(**{"num_kv_heads": 2, "head_dim": 4, "capacity": 3, **bad})


def test_blocks_are_taken_once_and_freed_once():
    allocator = BlockAllocator(5)
    first = allocator.take(3)
    with pytest.raises(InputError, match="2 that are free"):
        allocator.take(3)
    assert allocator.num_free == 2
    second = allocator.take(2)
    assert sorted(first + second) == list(range(5))
    for bad in ([first[0], first[0]], [5], [-1]):
        with pytest.raises(InputError, match="in use"):
            allocator.give_back([first[1], *bad])
    assert allocator.num_free == 0
    allocator.give_back(first)
    with pytest.raises(InputError, match="in use"):
        allocator.give_back(first[:1])
    assert allocator.take(3) == first


def paged(device="cpu", **changes):
    sizes = {"num_layers": 2, "num_blocks": 9, "block_size": 4, "num_seqs": 3}
    heads = {"max_blocks_per_seq": 5, "num_kv_heads": 2, "head_dim": 16}
    return PagedKvCache(**{**sizes, **heads, "device": device, **changes})


def assert_mirrored(cache):
    """What the host believes is what the device holds, and no block has two holders."""
    assert cache.kv_lens.tolist() == cache.lengths
    width = cache.block_tables.shape[1]
    table = [blocks + [-1] * (width - len(blocks)) for blocks in cache.blocks]
    assert cache.block_tables.tolist() == table
    held = [block for blocks in cache.blocks for block in blocks]
    assert len(set(held)) == len(held)
    assert len(held) + cache.allocator.num_free == 9


@pytest.mark.parametrize("device", DEVICES)
@given(steps=st.lists(st.tuples(st.integers(0, 2), st.integers(-1, 22)), max_size=12))
def test_paged_cache_against_a_model_of_it(device, steps):
    """Any order of growing, filling and freeing keeps host and device in step."""
    cache = paged(device)
    wanted = [0, 0, 0]
    for seq, length in steps:
        free = cache.allocator.num_free
        need = max(-(-length // 4) - len(cache.blocks[seq]), 0)
        if length < 0:
            cache.free(seq)
            wanted[seq] = 0
            assert cache.blocks[seq] == []
        elif length > 20 or need > free:
            before = [list(blocks) for blocks in cache.blocks]
            with pytest.raises(InputError):
                cache.reserve({seq: length})
            assert cache.blocks == before and cache.allocator.num_free == free
        else:
            cache.reserve({seq: length})
            cache.set_lens({seq: length})
            wanted[seq] = length
        assert cache.lengths == wanted
        assert_mirrored(cache)


def test_reserving_is_all_or_nothing():
    cache = paged()
    cache.reserve({0: 17, 1: 3})
    assert [len(blocks) for blocks in cache.blocks] == [5, 1, 0]
    with pytest.raises(InputError, match="3 that are free"):
        cache.reserve({1: 8, 2: 9})
    with pytest.raises(InputError, match="capacity of 20"):
        cache.reserve({1: 8, 2: 21})
    with pytest.raises(InputError, match="seq is 3"):
        cache.reserve({1: 8, 3: 1})
    assert [len(blocks) for blocks in cache.blocks] == [5, 1, 0]
    with pytest.raises(InputError, match="4 positions"):
        cache.set_lens({0: 17, 1: 5})
    assert cache.lengths == [0, 0, 0]
    cache.reserve({1: 8, 2: 8})
    assert cache.allocator.num_free == 0
    assert_mirrored(cache)


def test_slots_name_the_row_of_each_position():
    cache = paged()
    cache.reserve({0: 5})
    cache.reserve({1: 6})
    cache.reserve({0: 11})
    rows = torch.full((9 * 4,), -1)
    for seq, length in ((0, 11), (1, 6)):
        rows[cache.slots(seq, 0, length)] = torch.arange(length) + 100 * seq
    for seq, length in ((0, 11), (1, 6)):
        pages = rows.view(9, 4)[cache.block_tables[seq, : -(-length // 4)].long()]
        assert pages.flatten()[:length].tolist() == [p + 100 * seq for p in range(length)]
    assert cache.slots(0, 4, 6) == cache.slots(0, 0, 11)[4:6]
    with pytest.raises(InputError, match="8 positions"):
        cache.slots(1, 0, 9)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", ["hnd", "nhd", "vllm_x"])
def test_paged_layouts(layout, kind):
    cache = paged(kind=kind, layout=layout)
    x = 16 // kind.bytes_per_elem
    pages = {
        "hnd": [(9, 2, 4, 16)] * 2,
        "nhd": [(9, 4, 2, 16)] * 2,
        "vllm_x": [(9, 2, 16 // x, 4, x), (9, 2, 16, 4)],
    }[layout]
    assert [[tuple(t.shape) for t in pool] for pool in zip(cache.k, cache.v, strict=True)] == [
        pages,
        pages,
    ]
    assert all(t.dtype == kind.dtype for t in (*cache.k, *cache.v))
    scales = [tuple(t.shape) for t in (*cache.k_scales, *cache.v_scales)]
    per_page = (9, 4, 2) if layout == "nhd" else (9, 2, 4)
    assert scales == ([per_page] * 4 if kind.quantised else [])
    assert len(cache.tensors) == 4 + len(scales) + 2


def test_paged_cache_refuses_impossible_sizes():
    for change in ({"num_blocks": 0}, {"layout": "xnh"}, {"layout": "vllm_x", "head_dim": 12}):
        with pytest.raises(InputError):
            paged(**change)


def test_paged_cache_is_not_changed_in_a_capture():
    cache = paged()
    cache.reserve({0: 4})
    with recorded():
        for call in (
            lambda: cache.reserve({0: 5}),
            lambda: cache.set_lens({0: 1}),
            lambda: cache.free(0),
        ):
            with pytest.raises(FerrumError, match="cannot be captured"):
                call()
        cache.reserve({0: 4})
    assert len(cache.blocks[0]) == 1
    assert_mirrored(cache)
