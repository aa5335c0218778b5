"""KV caches: what the host believes is what the device holds, whatever was grown and freed."""

import contextlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ferrum_triton import FerrumError, InputError, get_backend
from ferrum_triton.runtime.blocks import BlockAllocator, PrefixIndex
from ferrum_triton.runtime.context import recording
from ferrum_triton.runtime.kv_cache import KvCache, PagedKvCache
from ferrum_triton.types import KvDtypeKind

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
KINDS = list(KvDtypeKind)
# Orders of many steps, each of microseconds: the profile's few examples would be as good as none.
many = settings(max_examples=max(300, settings.default.max_examples))


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


def test_what_anyone_holds_is_not_free():
    allocator = BlockAllocator(4)
    blocks = allocator.take(2)
    allocator.hold(blocks)
    allocator.hold(blocks[:1])
    assert [allocator.holders(block) for block in range(4)] == [3, 2, 0, 0]
    allocator.give_back(blocks)
    allocator.give_back(blocks)
    assert allocator.num_free == 3 and allocator.holders(blocks[0]) == 1
    with pytest.raises(InputError, match="in use"):
        allocator.give_back(blocks)
    assert allocator.holders(blocks[0]) == 1  # nothing has changed
    allocator.hold([blocks[1]])  # a free one is taken up as it is
    assert allocator.num_free == 2 and allocator.holders(blocks[1]) == 1
    assert allocator.take(2) == [2, 3]


@many
@given(steps=st.lists(st.tuples(st.sampled_from("thg"), st.integers(0, 7)), max_size=40))
def test_allocator_against_a_model_of_it(steps):
    """Free blocks are taken in the order in which they were freed."""
    taken: list[int] = []
    allocator = BlockAllocator(7, taken.append)
    free, holders = list(range(7)), [0] * 7
    for step, number in steps:
        if step == "t" and number > len(free):
            with pytest.raises(InputError):
                allocator.take(number)
        elif step == "t":
            oldest, free = sorted(free[:number]), free[number:]
            del taken[:]
            assert allocator.take(number) == oldest == taken
            for block in oldest:
                holders[block] = 1
        elif number < 7 and step == "h":
            allocator.hold([number])
            holders[number] += 1
            free = [block for block in free if block != number]
        elif number < 7 and holders[number]:
            # With another one: the last of a list is freed first.
            group = [number, *(b for b in (0,) if holders[b] and b != number)]
            allocator.give_back(group)
            for block in reversed(group):
                holders[block] -= 1
                free += [block] * (holders[block] == 0)
        assert allocator.num_free == len(free)
        assert [allocator.holders(block) for block in range(7)] == holders


IDS = st.lists(st.integers(0, 1), max_size=9)


@many
@given(steps=st.lists(st.tuples(st.sampled_from("jjle"), st.integers(0, 9), IDS), max_size=25))
def test_prefixes_against_a_model_of_them(steps):
    """Sequences join, leave and take blocks: what is found was added and not taken since."""
    size, allocator = 2, BlockAllocator(9)
    index = PrefixIndex(allocator, size)
    written: dict[int, list[int]] = {}  # all tokens up to the end of what a block holds
    running: list[tuple[list[int], list[int]]] = []

    def check(ids):
        found = index.find(ids)
        assert len(found) <= len(ids) // size and len(set(found)) == len(found)
        for i, block in enumerate(found):
            assert written.get(block) == ids[: (i + 1) * size]
        return found

    def take(ids, blocks):
        """Blocks for the tokens past those in ``blocks``; what they held is overwritten."""
        count = -(-len(ids) // size) - len(blocks)
        if count > allocator.num_free:
            return False
        for block in allocator.take(count):
            written.pop(block, None)
            blocks.append(block)
        return True

    def add(ids, blocks):
        for i, block in enumerate(blocks):
            assert block not in written or written[block] == ids[: (i + 1) * size]
            if len(ids) >= (i + 1) * size:
                written[block] = ids[: (i + 1) * size]
        index.add(ids, blocks)
        assert len(check(ids)) == len(ids) // size  # every full block, or its like

    for step, number, ids in steps:
        check(ids)
        if step == "j":
            blocks = check(ids)
            allocator.hold(blocks)
            if take(ids, blocks):
                add(ids, blocks)
                running.append((ids, blocks))
            else:
                allocator.give_back(blocks)
        elif running and step == "l":
            allocator.give_back(running.pop(number % len(running))[1])
        elif running:  # one extends what it has, without a word to the index until it is full
            old, blocks = running[number % len(running)]
            if take(old + ids, blocks):
                running[number % len(running)] = (old + ids, blocks)
                add(old + ids, blocks)


def test_found_blocks_keep_their_contents_until_they_are_taken():
    allocator = BlockAllocator(4)
    index = PrefixIndex(allocator, 2)
    blocks = allocator.take(3)
    index.add([1, 2, 3, 4, 5], blocks)
    assert index.find([1, 2, 3, 4, 5, 6]) == blocks[:2]
    assert index.find([3, 4]) == index.find([1]) == index.find([1, 3]) == []
    assert index.find([1, 2, 9, 9]) == blocks[:1]
    allocator.give_back(blocks)
    assert index.find([1, 2, 3, 4]) == blocks[:2]
    # The block never taken goes first, then the end of the sequence, its beginning last.
    for left in (2, 2, 1, 0):
        allocator.take(1)
        assert index.find([1, 2, 3, 4]) == blocks[:left]


def test_equal_contents_are_remembered_once():
    allocator = BlockAllocator(6)
    index = PrefixIndex(allocator, 2)
    first, second = allocator.take(2), allocator.take(2)
    index.add([1, 2, 3, 4], first)
    index.add([1, 2, 5, 6], second)
    assert index.find([1, 2, 5, 6]) == [first[0], second[1]]
    allocator.give_back(first)
    allocator.take(4)  # what was known of the beginning is lost, and with it what follows
    assert index.find([1, 2, 5, 6]) == []
    index.add([1, 2, 5, 6], second)
    assert index.find([1, 2, 5, 6]) == second


def paged(device="cpu", **changes):
    sizes = {"num_layers": 2, "num_blocks": 9, "block_size": 4, "num_seqs": 3}
    heads = {"max_blocks_per_seq": 5, "num_kv_heads": 2, "head_dim": 16}
    return PagedKvCache(**{**sizes, **heads, "device": device, **changes})


def assert_mirrored(cache, shared=False):
    """What the host believes is what the device holds, and who has a block is its holder."""
    assert cache.kv_lens.tolist() == cache.lengths
    width = cache.block_tables.shape[1]
    table = [blocks + [-1] * (width - len(blocks)) for blocks in cache.blocks]
    assert cache.block_tables.tolist() == table
    held = [block for blocks in cache.blocks for block in blocks]
    assert [cache.allocator.holders(block) for block in range(9)] == list(map(held.count, range(9)))
    assert shared or len(set(held)) == len(held)
    assert len(set(held)) + cache.allocator.num_free == 9


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
    assert len(cache.tensors) == 4 + len(scales) + 3


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


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", ["hnd", "nhd", "vllm_x"])
def test_writing_to_a_copy_leaves_what_is_shared(layout, kind, device):
    cache = paged(device, kind=kind, layout=layout)
    pools = (*cache.k, *cache.v, *cache.k_scales, *cache.v_scales)
    for pool in pools:
        pool.copy_(torch.randn(pool.shape, device=device) * 40)
    cache.reserve({0: 10})
    cache.set_lens({0: 10})
    old = list(cache.blocks[0])
    cache.share(1, old[:2])
    cache.share(2, old[:1])
    assert cache.blocks == [old, old[:2], old[:1]]
    assert [cache.allocator.holders(block) for block in old] == [3, 2, 1]
    cache.set_lens({1: 8, 2: 4})
    assert_mirrored(cache, shared=True)

    before = [[page.clone() for page in pool] for pool in pools]
    cache.make_writable(1, 7)
    new = cache.blocks[1][1]
    assert new not in old and cache.blocks[1][0] == old[0]
    assert cache.allocator.holders(old[1]) == cache.allocator.holders(new) == 1
    for pool, pages in zip(pools, before, strict=True):
        pages[new] = pages[old[1]]  # and no other page is touched
        assert torch.equal(pool.float(), torch.stack([page.float() for page in pages]))
    assert_mirrored(cache, shared=True)
    cache.make_writable(1, 4)  # it has that block to itself already
    assert cache.blocks[1] == [old[0], new]

    for seq in range(3):
        cache.free(seq)
    assert cache.allocator.num_free == 9
    assert_mirrored(cache)


def test_sharing_limits():
    cache = paged()
    cache.reserve({0: 20})
    cache.share(1, cache.blocks[0][:1])
    before = [list(blocks) for blocks in cache.blocks]
    with pytest.raises(InputError, match="an empty sequence"):
        cache.share(1, cache.blocks[0][:1])
    with pytest.raises(InputError, match="up to 5"):
        cache.share(2, list(range(6)))
    with pytest.raises(InputError, match="seq is 3"):
        cache.share(3, [])
    with pytest.raises(InputError, match="4 positions"):
        cache.make_writable(1, 4)
    with recorded():
        for call in (lambda: cache.share(2, before[0]), lambda: cache.make_writable(1, 0)):
            with pytest.raises(FerrumError, match="cannot be captured"):
                call()
        cache.make_writable(0, 5)  # nothing to do
    cache.reserve({2: 16})
    with pytest.raises(InputError, match="0 that are free"):
        cache.make_writable(1, 0)
    assert cache.blocks[:2] == before[:2]
    assert_mirrored(cache, shared=True)


STEPS = st.tuples(
    st.sampled_from(["append", "append", "rewrite", "share", "free"]),
    st.integers(0, 2),
    st.integers(0, 20),
)


@pytest.mark.parametrize("device", DEVICES)
@many
@given(steps=st.lists(STEPS, max_size=20))
def test_shared_sequences_against_a_model_of_them(device, steps):
    """However sequences share and rewrite, each reads what it wrote or began with."""
    cache = paged(device, layout="nhd")
    rows = cache.k[1].flatten(0, 1)
    wanted: list[list[int]] = [[], [], []]
    for number, (step, seq, position) in enumerate(steps):
        try:
            if step == "append":
                length = len(wanted[seq])
                cache.reserve({seq: length + 1})
                cache.make_writable(seq, length)
                rows[cache.slots(seq, length, length + 1)] = number
                wanted[seq].append(number)
            elif step == "rewrite" and position < len(wanted[seq]):
                cache.make_writable(seq, position)
                rows[cache.slots(seq, position, position + 1)] = number
                wanted[seq][position] = number
            elif step == "share":
                other = (seq + 1) % 3
                count = min(position // 4 + 1, len(cache.blocks[other]))
                cache.share(seq, cache.blocks[other][:count])
                wanted[seq] = wanted[other][: count * 4]
            elif step == "free":
                cache.free(seq)
                wanted[seq] = []
        except InputError:  # no room, or not empty: nothing has changed
            pass
        cache.set_lens({i: len(ids) for i, ids in enumerate(wanted)})
        assert_mirrored(cache, shared=True)
        for i, ids in enumerate(wanted):
            assert rows[cache.slots(i, 0, len(ids)), 1, 15].tolist() == ids


def test_blocks_that_are_none_are_not_shared():
    cache = paged()
    for bad in ([-1], [1, 99], [3, 3]):
        with pytest.raises(InputError, match="blocks"):
            cache.share(0, bad)
        assert cache.allocator.num_free == 9 and cache.blocks[0] == []
