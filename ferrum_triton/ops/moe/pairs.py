"""Sorting pairs by expert.

A *pair* is one token at one of its experts. Pair ``p`` of ids [num_tokens, top_k] is token
``p // top_k`` in its slot ``p % top_k``. A *packed row* is a pair's place once the pairs are sorted
by expert. The sort is stable: pairs of one expert keep their order. An id outside
[0, num_experts) belongs to no expert, and its pair is dropped.
"""

import torch
from torch import Tensor

from ferrum_triton.registry import Case, Op, op

MAX_EXPERTS = 1024

# Not called num_tokens: where a pair lands depends on every other token's experts.
PAIRS = {"routed_tokens": (0, 1, 5, 70), "num_experts": (1, 4, 60), "top_k": (1, 2, 8)}


def _pair_cases() -> list[Case]:
    return [
        Case(f"e128k8/m{m}", torch.bfloat16, {"routed_tokens": m, "num_experts": 128, "top_k": 8})
        for m in (1, 64, 4096)
    ]


def _check_experts(of_op: Op, num_experts: int) -> None:
    if not 1 <= num_experts <= MAX_EXPERTS:
        of_op.reject("num_experts", str(num_experts), f"1 to {MAX_EXPERTS}")


def count_experts(expert: Tensor, num_experts: int) -> Tensor:
    """How often each of 0 .. num_experts - 1 occurs in expert, whose values reach num_experts."""
    counts = torch.zeros(num_experts + 1, dtype=torch.int32, device=expert.device)
    ones = torch.ones_like(expert, dtype=torch.int32)
    return counts.scatter_add(0, expert, ones)[:num_experts]


def _sorted_pairs(ids: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """expert and packed row of each pair, count and first packed row of each expert.

    The expert of a dropped pair is num_experts; counts and firsts end with an entry for those.
    """
    flat = ids.reshape(-1).long()
    expert = torch.where((flat >= 0) & (flat < num_experts), flat, num_experts)
    order = expert.argsort(stable=True)
    row = torch.zeros_like(order).scatter(0, order, torch.arange(len(flat), device=ids.device))
    counts = count_experts(expert, num_experts + 1).long()
    return expert, row, counts, counts.cumsum(0) - counts


def _scatter(size: int, fill: int, index: Tensor, values: Tensor, kept: Tensor) -> Tensor:
    """[size] int32 of ``fill`` with values at index, where kept."""
    y = torch.full((size + 1,), fill, dtype=torch.int32, device=index.device)
    return y.scatter(0, torch.where(kept, index, size), values.to(torch.int32))[:size]


def _pair_sample(make, routed_tokens, num_experts, top_k):
    # Real routers choose different experts a token; nothing here relies on it.
    return {
        "ids": make.ints(-1, num_experts + 1, routed_tokens, top_k),
        "num_experts": num_experts,
    }


@op(
    tensors={"ids": "int[num_tokens, top_k]"},
    axes=PAIRS,
    bench=_pair_cases(),
    static=("num_experts",),
)
def compute_ids_tpe(
    ids: Tensor,
    num_experts: int,
    gate_up_rows: int,
    down_rows: int,
    token_tile: int = 32,
    row_tile: int = 64,
) -> tuple[Tensor, Tensor, Tensor]:
    """Bucket e = the pairs with ids[p] = e, ascending; tpe[e] = their number; one launch.

    Buckets cost num_experts · num_pairs entries. That is the layout of a decode step; for long
    prompts :func:`moe_align_block_size` and :func:`moe_build_pairs_by_token` are compact.

    Args:
        ids: [num_tokens, top_k] expert ids; num_pairs = num_tokens · top_k.
        num_experts: up to 1024.
        gate_up_rows, down_rows: output rows of an expert's gate-up and down matrices.
        token_tile, row_tile: pairs and rows one program of the expert product will take.

    Returns:
        bucket_ids [num_experts, num_pairs] int32, -1 from tpe[e] on; tpe [num_experts] int32;
        grid_args [2, 3] int32, a row for gate-up and one for down: tiles of the fullest bucket, at
        least 1, tiles of the rows, num_experts. The grid covers every bucket and stays on the
        device.
    """
    expert, row, counts, first = _sorted_pairs(ids, num_experts)
    num_pairs, tpe = len(expert), counts[:num_experts]
    pair = torch.arange(num_pairs, device=ids.device)
    slot = expert * num_pairs + row - first[expert]
    buckets = _scatter(num_experts * num_pairs, -1, slot, pair, expert < num_experts)
    tiles = ((tpe.amax() + token_tile - 1) // token_tile).clamp(min=1)
    fixed = [[-(-rows // row_tile), num_experts] for rows in (gate_up_rows, down_rows)]
    grid_args = torch.cat(
        (tiles.expand(2, 1), torch.tensor(fixed, dtype=torch.int64, device=ids.device)), dim=1
    )
    buckets = buckets.view(num_experts, num_pairs)
    return buckets, tpe.to(torch.int32), grid_args.to(torch.int32)


@compute_ids_tpe.rule
def _(ids, num_experts, gate_up_rows, down_rows, token_tile, row_tile):
    _check_experts(compute_ids_tpe, num_experts)


@compute_ids_tpe.call_rule
def _(ids, num_experts, gate_up_rows, down_rows, token_tile, row_tile):
    sizes = {"gate_up_rows": gate_up_rows, "down_rows": down_rows}
    for name, size in {**sizes, "token_tile": token_tile, "row_tile": row_tile}.items():
        if size < 1:
            compute_ids_tpe.reject(name, str(size), "at least 1")


@compute_ids_tpe.sample
def _(make, **axes):
    return {**_pair_sample(make, **axes), "gate_up_rows": 1536, "down_rows": 2048, "token_tile": 3}


def align_capacity(num_pairs: int, num_experts: int, block_size: int) -> int:
    """Entries that hold num_pairs in blocks of one expert each, however they are distributed."""
    padding = min(num_pairs, num_experts) * (block_size - 1)
    return (num_pairs + padding) // block_size * block_size


@op(
    tensors={"ids": "int[num_tokens, top_k]"},
    axes={**PAIRS, "block_size": (1, 3, 16), "pair_ids": (False, True)},
    bench=_pair_cases(),
    static=("num_experts", "block_size"),
)
def moe_align_block_size(
    ids: Tensor, num_experts: int, block_size: int, pair_ids: bool = True
) -> tuple[Tensor, Tensor, Tensor]:
    """Pairs sorted by expert, each expert padded to whole blocks; one launch.

    Args:
        ids: [num_tokens, top_k] expert ids; num_pairs = num_tokens · top_k.
        num_experts: up to 1024.
        block_size: entries of a block; a block belongs to one expert.
        pair_ids: entries are pair numbers: the consumer reads token ``entry // top_k`` and writes
            row ``entry``. False: entries are packed rows, for activations gathered beforehand.

    Returns:
        sorted_ids [capacity] int32, num_pairs where an entry is padding; block_experts
        [capacity / block_size] int32, -1 past the last block; total [1] int32, entries in use, a
        multiple of block_size. capacity is the largest total there can be:
        num_pairs + min(num_pairs, num_experts) · (block_size - 1), rounded down to whole blocks.
    """
    expert, row, counts, first = _sorted_pairs(ids, num_experts)
    num_pairs, device = len(expert), ids.device
    capacity = align_capacity(num_pairs, num_experts, block_size)
    padded = (counts + block_size - 1) // block_size * block_size
    end = padded[:num_experts].cumsum(0)
    start = padded.cumsum(0) - padded
    entries = torch.arange(num_pairs, device=device) if pair_ids else row
    place = start[expert] + row - first[expert]
    sorted_ids = _scatter(capacity, num_pairs, place, entries, expert < num_experts)
    block = torch.arange(capacity // block_size, device=device) * block_size
    owner = torch.searchsorted(end, block, right=True)
    block_experts = torch.where(owner < num_experts, owner, -1)
    return sorted_ids, block_experts.to(torch.int32), end[-1:].to(torch.int32)


@moe_align_block_size.rule
def _(ids, num_experts, block_size, pair_ids):
    _check_experts(moe_align_block_size, num_experts)
    if block_size < 1:
        moe_align_block_size.reject("block_size", str(block_size), "at least 1")


@moe_align_block_size.sample
def _(make, block_size=16, pair_ids=True, **axes):
    return {**_pair_sample(make, **axes), "block_size": block_size, "pair_ids": pair_ids}


@op(
    tensors={"ids": "int[num_tokens, top_k]"},
    axes=PAIRS,
    bench=_pair_cases(),
    static=("num_experts",),
)
def moe_build_pairs_by_token(ids: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """The stable sort of pairs by expert, and its inverse; one launch.

    Args:
        ids: [num_tokens, top_k] expert ids; num_pairs = num_tokens · top_k.
        num_experts: up to 1024.

    Returns:
        pairs [num_tokens, top_k] int32, the packed row of each pair, -1 if it is dropped;
        packed_tokens [num_pairs] int32, the token of each packed row, -1 past the last;
        expert_offsets [num_experts + 1] int32: expert e owns the packed rows from
        expert_offsets[e] to expert_offsets[e + 1].
    """
    expert, row, _, first = _sorted_pairs(ids, num_experts)
    kept = expert < num_experts
    pairs = torch.where(kept, row, -1).view(ids.shape).to(torch.int32)
    token = torch.arange(len(expert), device=ids.device) // max(ids.shape[1], 1)
    return pairs, _scatter(len(expert), -1, row, token, kept), first.to(torch.int32)


@moe_build_pairs_by_token.rule
def _(ids, num_experts):
    _check_experts(moe_build_pairs_by_token, num_experts)


moe_build_pairs_by_token.sample(_pair_sample)
