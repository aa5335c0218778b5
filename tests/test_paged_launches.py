"""What calls over pages launch: queries of long sequences share tiles, few are decoded in units."""

import pytest
import torch

from ferrum_triton.backends.triton_provider import load_kernels
from ferrum_triton.kernels.attention import plan
from ferrum_triton.kernels.attention.paged import FEW_QUERIES
from ferrum_triton.kernels.jit import record_launches
from ferrum_triton.registry import OPS
from ferrum_triton.testing import TensorFactory
from tests.test_paged_attention import AXES

load_kernels("interpret")


@pytest.mark.parametrize("told", [None, 1, FEW_QUERIES, FEW_QUERIES + 1, 500])
@pytest.mark.parametrize("q_lens", [(3,), (FEW_QUERIES,), (FEW_QUERIES + 1,), (1, 20, 3), (300,)])
def test_prefill_is_launched_where_a_sequence_may_be_long(q_lens, told):
    """By the bound that the caller tells, or the number of all tokens."""
    op = OPS["paged_varlen_attention"]
    axes = {"num_kv_heads": 16, "group_size": 2, "head_dim": 64, "q_lens": q_lens}
    call = op.make_sample(TensorFactory(torch.bfloat16, "meta"), **axes)
    with record_launches((9, 0)) as launches:
        op.impls["triton"](**call | {"max_q_len": told})
    names = [launch.kernel.name for launch in launches]
    longest = min(told or sum(q_lens), call["q"].shape[0])
    before = names[: names.index("_paged_decode_kernel")]
    assert before == (["_hopper_paged_kernel"] if longest > FEW_QUERIES else [])


@pytest.mark.parametrize(
    ("seqs", "queries", "group", "told", "before", "cache_dtype", "by_prefill"),
    [
        (8, 5, 4, 5, 100, None, True),
        (8, 4, 4, 4, 100, None, False),  # sixteen rows are decode's
        (8, 5, 2, 5, 100, None, False),
        (8, 2, 32, 2, 100, None, True),
        (4, 5, 4, 5, 100, None, False),  # too few for the SMs
        (4, 5, 4, 5, 300, None, True),  # but not their parts
        (4, 4, 4, 4, 300, None, False),
        (8, 5, 4, None, 100, None, False),  # any may be long
        (8, 3, 4, 8, 100, None, False),
        (8, 5, 4, 5, 100, torch.int8, False),
    ],
)
def test_prefill_takes_few_queries_of_many_sequences_or_keys(
    seqs, queries, group, told, before, cache_dtype, by_prefill
):
    op = OPS["paged_varlen_attention"]
    axes = {"num_kv_heads": 8, "group_size": group, "head_dim": 128, "q_lens": (queries,) * seqs}
    more = {"cache_dtype": cache_dtype, "max_offset": before}
    call = op.make_sample(TensorFactory(torch.bfloat16, "meta"), **axes, **more)
    with record_launches((9, 0)) as launches:
        op.impls["triton"](**call | {"max_q_len": told})
    (prefill,) = [x for x in launches if x.kernel.name == "_hopper_paged_kernel"] or [None]
    last = ("_paged_decode_kernel", "_merge_kernel", "_prefill_merge_kernel")
    assert launches[-1].kernel.name in last
    # Where a sequence may have many queries, those of few are still decode's.
    taken = prefill is not None and prefill.meta["VARIANT"].few < queries
    assert taken == by_prefill


@pytest.mark.parametrize(
    ("q_lens", "told", "cache_dtype", "shared"),
    [
        ((300, 1, 1, 1), None, None, True),
        ((300, 280, 250, 1), 300, None, False),  # of about as many queries, by what the host knows
        ((300,), None, None, False),
        ((300, 1, 1, 1), None, torch.int8, False),
    ],
)
def test_sms_are_left_to_decodes_where_there_may_be_some(q_lens, told, cache_dtype, shared):
    op = OPS["paged_varlen_attention"]
    axes = {"num_kv_heads": 8, "group_size": 4, "head_dim": 128, "q_lens": q_lens}
    more = {"cache_dtype": cache_dtype, "max_offset": 100}
    call = op.make_sample(TensorFactory(torch.bfloat16, "meta"), **axes, **more)
    with record_launches((9, 0)) as launches:
        op.impls["triton"](**call | {"max_q_len": told})
    assert launches[0].kernel.name == "_hopper_paged_kernel"
    assert launches[0].meta["VARIANT"].shared == shared


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_batch_invariant_tiles_are_those_of_any_batch(batch_invariant):
    """What the products are cut into may follow from the batch and its capacity otherwise."""
    op, chosen = OPS["paged_decode_attention"], set()
    for batch, max_len in ((1, 100), (4, 70_000), (64, 5000), (300, 2000)):
        axes = AXES | {"batch": batch, "q_len": 1, "max_len": max_len, "head_dim": 128}
        call = op.make_sample(TensorFactory(torch.float16, "meta"), **axes)
        with record_launches((9, 0)) as launches:
            op.impls["triton"](**call | {"batch_invariant": batch_invariant})
        meta = launches[0].meta
        options = (meta.get(name) for name in ("num_warps", "num_stages", "maxnreg"))
        chosen.add((meta["ATTENTION"], *options))
    assert (len(chosen) == 1) == batch_invariant


@pytest.mark.parametrize("lengths", [(7,), (0, 100, 0), (300, 5, 5, 1), (64,) * 5])
@pytest.mark.parametrize("shares", [1, 4, 50])
def test_plans_cover_every_tile_once(lengths, shares):
    """The device's arithmetic, on the host: units of a sequence, and the bound on all of them."""
    tiles = [-(-length // 16) for length in lengths]
    size = max(-(-sum(tiles) // shares), 2)
    units = [max(-(-count // size), 1) for count in tiles]
    for count, own in zip(tiles, units, strict=True):
        assert (own - 1) * size < max(count, 1) <= own * size or count == 0
    assert sum(units) <= plan.most_units(len(lengths), max(tiles), shares, 2, False)
