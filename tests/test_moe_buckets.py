"""Tiles of buckets, large ones and small ones for what they spare: each entry is in one of them."""

import pytest
import torch
import triton.language as tl
from hypothesis import given
from hypothesis import strategies as st

from ferrum_triton.kernels.jit import kernel
from ferrum_triton.kernels.moe.buckets import bucket_tiles, pairs_of_tile, tile_bound

EXPERTS = 8


@kernel
def _tiles_of_buckets_kernel(
    found_ptr,  # [num_tiles, 3]
    tpe_ptr,
    num_experts,
    capacity,
    BLOCK_E: tl.constexpr,
    BLOCK_M: tl.constexpr,
    SPARED: tl.constexpr,
    BIG: tl.constexpr,
):
    tile = tl.program_id(0)
    buckets = bucket_tiles(tpe_ptr, num_experts, capacity, BLOCK_E, BLOCK_M, SPARED, BIG)
    if tile < buckets.total:
        pairs = pairs_of_tile(tile, buckets, BLOCK_E, BLOCK_M)
        tl.store(found_ptr + 3 * tile, pairs.expert.to(tl.int32))
        tl.store(found_ptr + 3 * tile + 1, pairs.first)
        tl.store(found_ptr + 3 * tile + 2, pairs.left)


def entries(counts, capacity, block_m, spared=0, big=0):
    """The entries of each tile there is, as (expert, entry)."""
    bound = tile_bound(sum(counts), len(counts), capacity, block_m)
    found = torch.full((bound, 3), -1, dtype=torch.int32)
    _tiles_of_buckets_kernel.launch(
        (bound,),
        found_ptr=found,
        tpe_ptr=torch.tensor(counts, dtype=torch.int32),
        num_experts=len(counts),
        capacity=capacity,
        BLOCK_E=EXPERTS,
        BLOCK_M=block_m,
        SPARED=spared,
        BIG=big,
    )
    for expert, first, left in found.tolist():
        if expert >= 0:
            yield [(expert, first + i) for i in range(min(block_m, left))]


@pytest.mark.parametrize(("big", "small", "spared"), [(16, 4, 4), (16, 16, 8), (8, 2, 5)])
@given(counts=st.lists(st.integers(0, 40), min_size=2, max_size=EXPERTS))
def test_large_and_small_tiles_share_every_entry(big, small, spared, counts):
    capacity = max(*counts, 1)
    large = list(entries(counts, capacity, big, spared))
    rest = list(entries(counts, capacity, small, spared, big))
    taken = sorted(entry for tile in large + rest for entry in tile)
    assert taken == [(e, i) for e, count in enumerate(counts) for i in range(count)]
    # A large tile that is part full has more than what is spared; else small ones take it.
    assert all(len(tile) == big or len(tile) > spared for tile in large)
    assert sum(map(len, rest)) <= spared * len(counts)
