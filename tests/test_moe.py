"""Mixture of experts: who is chosen, where pairs go, and that nothing is lost on the way."""

import math

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from transformers import DeepseekV3Config, Qwen3MoeConfig
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from ferrum_triton import InputError, get_backend
from ferrum_triton.kernels.moe.pairs import aligned_pairs
from tests.harness import BACKENDS

both = pytest.mark.parametrize("backend_name", BACKENDS)
INF, NAN = math.inf, math.nan


@pytest.fixture
def backend(backend_name):
    return get_backend(backend_name)


def generator(seed):
    return torch.Generator().manual_seed(seed)


def distinct_logits(num_tokens, num_experts, seed, dtype=torch.float32):
    """Rows without ties, whatever the dtype: multiples of 1/8 in random order."""
    order = torch.rand(num_tokens, num_experts, generator=generator(seed)).argsort(dim=-1)
    return ((order - num_experts // 2) / 8).to(dtype)


def random_ids(num_tokens, top_k, num_experts, seed):
    """Ids from -2 to num_experts + 1: some belong to no expert."""
    return torch.randint(-2, num_experts + 2, (num_tokens, top_k), generator=generator(seed))


def run(backend, name, *args, **kwargs):
    """Call an op with CPU tensors; its results on the CPU."""
    moved = [a.to(backend.device) if isinstance(a, torch.Tensor) else a for a in args]
    result = getattr(backend, name)(*moved, **kwargs)
    return tuple(t.cpu() for t in result) if isinstance(result, tuple) else result.cpu()


pair_shapes = {
    "num_tokens": st.sampled_from([0, 1, 3, 40, 300]),
    "top_k": st.integers(1, 8),
    "num_experts": st.sampled_from([1, 2, 5, 64]),
    "seed": st.integers(0, 2**31),
}


@both
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "top_k"),
    [(1, 1, 1), (3, 7, 7), (70, 60, 8), (9, 128, 8), (300, 128, 2), (2, 200, 5), (3, 1024, 32)],
)
def test_softmax_routing_is_torch_topk(backend, dtype, num_tokens, num_experts, top_k):
    logits = distinct_logits(num_tokens, num_experts, num_tokens).clamp(-100, 100)
    logits = logits.to(dtype) if num_experts <= 200 else logits
    probabilities = logits.double().softmax(dim=-1)
    want, want_ids = probabilities.topk(top_k, dim=-1)
    for norm in (False, True):
        ids, weights, counts = run(backend, "route_topk_softmax", logits, top_k, norm)
        assert torch.equal(ids, want_ids.to(torch.int32))
        expected = want / want.sum(dim=-1, keepdim=True) if norm else want
        torch.testing.assert_close(weights.double(), expected, rtol=2e-6, atol=2e-6)
        assert torch.equal(counts.long(), want_ids.flatten().bincount(minlength=num_experts))


@both
@given(
    seed=st.integers(0, 2**31),
    num_tokens=st.integers(1, 20),
    num_experts=st.integers(1, 150),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
)
def test_ties_go_to_the_lower_id(backend_name, seed, num_tokens, num_experts, dtype):
    values = torch.tensor([-INF, -1.0, -0.0, 0.0, 1.0, NAN], dtype=dtype)
    pick = torch.randint(0, 6, (num_tokens, num_experts), generator=generator(seed))
    logits, top_k = values[pick], min(num_experts, 8)
    ids, _, _ = run(get_backend(backend_name), "route_topk_softmax", logits, top_k)
    for row, chosen in zip(logits.tolist(), ids.tolist(), strict=True):
        rank = [-INF if math.isnan(x) else x for x in row]
        assert chosen == sorted(range(num_experts), key=lambda e: (-rank[e], e))[:top_k]


@both
@given(seed=st.integers(0, 2**31), shift=st.integers(-50, 50))
def test_softmax_routing_ignores_a_shift(backend_name, seed, shift):
    logits = distinct_logits(5, 33, seed)
    for norm in (False, True):
        a, b = (
            run(get_backend(backend_name), "route_topk_softmax", x, 4, norm)
            for x in (logits, logits + shift)
        )
        assert torch.equal(a[0], b[0])
        assert torch.equal(a[2], b[2])
        torch.testing.assert_close(a[1], b[1], rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(a[1].sum(dim=-1), torch.ones(5))


@both
def test_what_is_no_number_has_defined_weights(backend):
    rows = {
        "nan": ([NAN, 1.0, 1.0, NAN], [1, 2], [0.5, 0.5], [0.5, 0.5]),
        "few numbers": ([NAN, NAN, 3.0, NAN], [2, 0], [1.0, 0.0], [1.0, 0.0]),
        "no number": ([NAN, -INF, NAN, -INF], [0, 1], [0.0, 0.0], [0.5, 0.5]),
        "one infinity": ([0.0, INF, 5.0, -INF], [1, 2], [1.0, 0.0], [1.0, 0.0]),
        "infinities": ([INF, 0.0, INF, INF], [0, 2], [1 / 3, 1 / 3], [0.5, 0.5]),
        "far below": ([0.0, -200.0, -300.0, -INF], [0, 1], [1.0, 0.0], [1.0, 0.0]),
    }
    logits = torch.tensor([row[0] for row in rows.values()])
    for norm in (False, True):
        ids, weights, _ = run(backend, "route_topk_softmax", logits, 2, norm)
        for i, (name, row) in enumerate(rows.items()):
            assert ids[i].tolist() == row[1], name
            assert weights[i].tolist() == pytest.approx(row[2 + norm]), (name, norm)


@both
@pytest.mark.parametrize("op", ["route_topk_softmax", "route_topk_sigmoid_grouped"])
@pytest.mark.parametrize("num_tokens", [0, 1, 5, 200])
def test_counts_start_from_zero_at_every_call(backend, op, num_tokens):
    """The same buffers again and again, as a replayed graph has them."""
    arguments = (4,) if op == "route_topk_softmax" else (None, 4)
    out = (
        torch.full((num_tokens, 4), 77, dtype=torch.int32, device=backend.device),
        torch.full((num_tokens, 4), 77.0, device=backend.device),
        torch.full((48,), 77, dtype=torch.int32, device=backend.device),
    )
    for seed in range(3):
        logits = distinct_logits(num_tokens, 48, seed).to(backend.device)
        getattr(backend, op)(logits, *arguments, out=out)
        assert torch.equal(out[2].cpu().long(), out[0].cpu().flatten().bincount(minlength=48))
        assert int(out[2].sum()) == 4 * num_tokens


@both
def test_one_expert_may_take_every_token(backend):
    logits = torch.randn(90, 40, generator=generator(0))
    logits[:, 17] = 50.0
    ids, weights, counts = run(backend, "route_topk_softmax", logits, 1)
    assert (ids == 17).all()
    assert (weights == 1).all()
    assert counts[17] == 90
    assert counts.sum() == 90


def test_softmax_routing_agrees_with_transformers():
    config = Qwen3MoeConfig(
        hidden_size=24, num_experts=24, num_experts_per_tok=4, norm_topk_prob=True
    )
    router = Qwen3MoeTopKRouter(config)
    router.weight.data = torch.eye(24)
    logits = distinct_logits(11, 24, 1)
    _, want, want_ids = router(logits)
    ids, weights, _ = get_backend("cpu").route_topk_softmax(logits, 4)
    assert torch.equal(ids.long(), want_ids)
    torch.testing.assert_close(weights, want)


@both
@given(seed=st.integers(0, 2**31), norm=st.booleans(), shape=st.sampled_from([(4, 2), (2, 1)]))
def test_grouped_routing_agrees_with_transformers(backend_name, seed, norm, shape):
    num_groups, topk_groups = shape
    config = DeepseekV3Config(
        hidden_size=32,
        n_routed_experts=32,
        num_local_experts=32,
        num_experts_per_tok=6,
        n_group=num_groups,
        topk_group=topk_groups,
        norm_topk_prob=norm,
        routed_scaling_factor=2.5,
    )
    router = DeepseekV3TopkRouter(config)
    router.weight.data = torch.eye(32)
    logits = distinct_logits(7, 32, seed)
    bias = 0.3 * torch.randn(32, generator=generator(seed))
    router.e_score_correction_bias.copy_(bias)
    _, want, want_ids = router(logits)
    ids, weights, counts = run(
        get_backend(backend_name),
        "route_topk_sigmoid_grouped",
        *(logits, bias, 6, num_groups, topk_groups, norm, 2.5),
    )
    # transformers leaves the order open.
    order, want_order = ids.long().argsort(dim=-1), want_ids.argsort(dim=-1)
    assert torch.equal(ids.long().gather(1, order), want_ids.gather(1, want_order))
    torch.testing.assert_close(weights.gather(1, order), want.gather(1, want_order))
    assert torch.equal(counts.long(), ids.flatten().bincount(minlength=32))
    choice = (logits.sigmoid() + bias).gather(1, ids.long())
    assert (choice.diff(dim=-1) <= 1e-6).all()


@both
@pytest.mark.parametrize(("num_experts", "num_groups"), [(12, 3), (60, 5), (8, 8), (40, 1)])
def test_no_more_groups_are_used_than_allowed(backend, num_experts, num_groups):
    size = num_experts // num_groups
    logits = distinct_logits(20, num_experts, num_groups)
    for topk_groups in range(1, num_groups + 1):
        top_k = min(6, topk_groups * size)
        # So low that a score of 0 for the groups left out would win.
        bias = torch.full((num_experts,), -10.0)
        ids, _, _ = run(
            backend, "route_topk_sigmoid_grouped", logits, bias, top_k, num_groups, topk_groups
        )
        for chosen in ids.tolist():
            assert len(set(chosen)) == top_k
            assert len({e // size for e in chosen}) <= topk_groups


@both
def test_groups_of_one_expert_are_experts(backend):
    logits = distinct_logits(20, 8, 9)
    grouped = run(backend, "route_topk_sigmoid_grouped", logits, None, 3, 8, 3)
    plain = run(backend, "route_topk_sigmoid_grouped", logits, None, 3)
    assert all(torch.equal(a, b) for a, b in zip(grouped, plain, strict=True))
    assert torch.equal(plain[0].long(), logits.topk(3).indices)


@both
def test_a_bias_chooses_but_does_not_weigh(backend):
    logits = distinct_logits(6, 16, 3)
    bias = torch.zeros(16)
    bias[5], bias[11] = 7.0, 3.0
    ids, weights, _ = run(backend, "route_topk_sigmoid_grouped", logits, bias, 2, 1, 1, False, 2.0)
    assert (ids == torch.tensor([5, 11])).all()
    torch.testing.assert_close(weights, 2.0 * logits[:, [5, 11]].sigmoid())


@both
def test_nan_in_grouped_routing_loses(backend):
    logits = torch.tensor([[NAN, -3.0, NAN, -4.0, 1.0, NAN, NAN, NAN]])
    ids, weights, _ = run(backend, "route_topk_sigmoid_grouped", logits, None, 2, 2, 1)
    # Groups count sigmoid(-3) + sigmoid(-4) and sigmoid(1) + 0.
    assert ids.tolist() == [[4, 5]]
    assert weights.tolist() == [[1.0, 0.0]]
    bias = torch.tensor([0.0, 0.0, 0.0, 0.0, NAN, 0.0, 0.0, 0.0])
    ids, _, _ = run(backend, "route_topk_sigmoid_grouped", logits, bias, 2, 2, 1)
    assert ids.tolist() == [[1, 3]]
    none = torch.full((1, 8), NAN)
    _, weights, _ = run(backend, "route_topk_sigmoid_grouped", none, None, 4, 2, 1, True, 3.0)
    assert weights.tolist() == [[0.75] * 4]


@pytest.mark.parametrize(
    ("op", "arguments", "argument"),
    [
        ("route_topk_softmax", (9,), "top_k"),
        ("route_topk_softmax", (0,), "top_k"),
        ("route_topk_sigmoid_grouped", (None, 2, 3), "num_groups"),
        ("route_topk_sigmoid_grouped", (None, 2, 2, 3), "topk_groups"),
        ("route_topk_sigmoid_grouped", (None, 5, 4, 2), "top_k"),
    ],
)
def test_impossible_choices_are_refused(op, arguments, argument):
    with pytest.raises(InputError, match=argument):
        getattr(get_backend("cpu"), op)(torch.randn(3, 8), *arguments)


def test_bounds_are_refused():
    cpu = get_backend("cpu")
    ids = torch.zeros(2, 2, dtype=torch.int32)
    with pytest.raises(InputError, match="logits"):
        cpu.route_topk_softmax(torch.randn(1, 1025), 2)
    with pytest.raises(InputError, match="top_k"):
        cpu.route_topk_softmax(torch.randn(1, 64), 33)
    for op, *rest in (("compute_ids_tpe", 8, 8), ("moe_align_block_size", 8)):
        for num_experts in (0, 1025):
            with pytest.raises(InputError, match="num_experts"):
                getattr(cpu, op)(ids, num_experts, *rest)
    with pytest.raises(InputError, match="num_experts"):
        cpu.moe_build_pairs_by_token(ids, 0)
    with pytest.raises(InputError, match="block_size"):
        cpu.moe_align_block_size(ids, 4, 0)
    with pytest.raises(InputError, match="token_tile"):
        cpu.compute_ids_tpe(ids, 4, 8, 8, 0)


def pairs_of(ids, expert):
    """Pairs of one expert, ascending."""
    return (ids.flatten() == expert).nonzero().flatten().tolist()


@both
@given(**pair_shapes)
def test_buckets_hold_each_experts_pairs_in_order(
    backend_name, num_tokens, top_k, num_experts, seed
):
    ids = random_ids(num_tokens, top_k, num_experts, seed)
    buckets, tpe, grid = run(
        get_backend(backend_name), "compute_ids_tpe", ids, num_experts, 100, 64, 8, 16
    )
    for e in range(num_experts):
        want = pairs_of(ids, e)
        assert tpe[e] == len(want)
        assert buckets[e].tolist() == want + [-1] * (ids.numel() - len(want))
    tiles = max(math.ceil(int(tpe.max()) / 8), 1)
    assert grid.tolist() == [[tiles, 7, num_experts], [tiles, 4, num_experts]]


@both
@given(**pair_shapes, block_size=st.sampled_from([1, 3, 8, 64]))
def test_aligned_blocks_hold_one_expert_and_each_pair_once(
    backend_name, num_tokens, top_k, num_experts, seed, block_size
):
    ids = random_ids(num_tokens, top_k, num_experts, seed)
    backend, num_pairs = get_backend(backend_name), ids.numel()
    entries, experts, total = run(backend, "moe_align_block_size", ids, num_experts, block_size)
    total = int(total)
    assert total % block_size == 0
    assert total <= len(entries)
    assert len(experts) * block_size == len(entries)
    assert total == sum(
        math.ceil(len(pairs_of(ids, e)) / block_size) * block_size for e in range(num_experts)
    )
    assert (entries[total:] == num_pairs).all()
    assert (experts[total // block_size :] == -1).all()
    seen = []
    flat = ids.flatten()
    blocks = entries[:total].view(-1, block_size).tolist()
    for block, expert in zip(blocks, experts.tolist(), strict=False):
        real = [p for p in block if p < num_pairs]
        assert real, "a block of nothing but padding"
        assert block == real + [num_pairs] * (block_size - len(real))
        assert all(flat[p] == expert for p in real)
        seen += real
    assert seen == [p for e in range(num_experts) for p in pairs_of(ids, e)]

    packed, same_experts, same_total = run(
        backend, "moe_align_block_size", ids, num_experts, block_size, False
    )
    assert torch.equal(experts, same_experts)
    assert total == int(same_total)
    assert torch.equal(packed == num_pairs, entries == num_pairs)
    # Packed rows count the real entries up.
    assert packed[packed < num_pairs].tolist() == list(range(len(seen)))


@both
@pytest.mark.parametrize("block_size", [1, 16])
def test_the_worst_distribution_just_fits(backend, block_size):
    ids = torch.arange(24, dtype=torch.int32).view(12, 2)  # an expert a pair
    entries, experts, total = run(backend, "moe_align_block_size", ids, 24, block_size)
    assert int(total) == len(entries) == 24 * block_size
    assert experts.tolist() == list(range(24))


@given(**pair_shapes, block_size=st.sampled_from([2, 8, 64]))
def test_short_blocks_come_last(num_tokens, top_k, num_experts, seed, block_size):
    """The blocks are the same: first those that are more than half full, then the others."""
    ids = random_ids(num_tokens, top_k, num_experts, seed)
    entries, experts, total = aligned_pairs(ids, num_experts, block_size)
    entries, experts = entries.view(-1, block_size), experts.tolist()
    is_short = (entries < ids.numel()).sum(1) * 2 <= block_size
    used = range(int(total) // block_size)
    unused = range(len(used), len(experts))
    order = [*sorted(used, key=lambda block: bool(is_short[block])), *unused]
    got = aligned_pairs(ids, num_experts, block_size, short_last=True)
    assert torch.equal(got[0].view(-1, block_size), entries[order])
    assert got[1].tolist() == [experts[block] for block in order]
    assert torch.equal(got[2], total)


@both
@given(**pair_shapes)
def test_packing_is_a_stable_sort_with_its_inverse(
    backend_name, num_tokens, top_k, num_experts, seed
):
    ids = random_ids(num_tokens, top_k, num_experts, seed)
    pairs, packed_tokens, offsets = run(
        get_backend(backend_name), "moe_build_pairs_by_token", ids, num_experts
    )
    order = [p for e in range(num_experts) for p in pairs_of(ids, e)]
    sizes = [len(pairs_of(ids, e)) for e in range(num_experts)]
    assert offsets.diff().tolist() == sizes
    assert offsets[0] == 0
    assert packed_tokens.tolist() == [p // top_k for p in order] + [-1] * (ids.numel() - len(order))
    flat = pairs.flatten()
    assert [int(flat[p]) for p in order] == list(range(len(order)))
    assert (flat < 0).sum() == ids.numel() - len(order)


@both
@pytest.mark.parametrize("is_dense", [True, False])
@pytest.mark.parametrize("skewed", [False, True])
@pytest.mark.parametrize("num_tokens", [1500, 4700])
def test_many_pairs_are_counted_by_a_launch_before(backend, num_tokens, skewed, is_dense):
    """More than a histogram takes, or than lanes have bits for; once all of them at one expert."""
    ids = random_ids(num_tokens, 7, 3, 5)
    if skewed:
        ids[:] = 2
    if not is_dense:
        ids = torch.cat([ids, ids], dim=1)[:, :7]
    pairs, packed_tokens, offsets = run(backend, "moe_build_pairs_by_token", ids, 3)
    want = get_backend("cpu").moe_build_pairs_by_token(ids, 3)
    assert torch.equal(pairs, want[0])
    assert torch.equal(packed_tokens, want[1])
    assert torch.equal(offsets, want[2])
    aligned = run(backend, "moe_align_block_size", ids, 3, 32)
    want = get_backend("cpu").moe_align_block_size(ids, 3, 32)
    assert all(torch.equal(got, expected) for got, expected in zip(aligned, want, strict=True))
    found = run(backend, "compute_ids_tpe", ids, 3, 100, 64, 8, 16)
    want = get_backend("cpu").compute_ids_tpe(ids, 3, 100, 64, 8, 16)
    assert all(torch.equal(got, expected) for got, expected in zip(found, want, strict=True))


@both
@pytest.mark.parametrize("num_tokens", [4096, 4097])
def test_more_pairs_than_words_of_all_lanes_have_bits(backend, num_tokens):
    ids = random_ids(num_tokens, 8, 2, 7)
    buckets, tpe, _ = run(backend, "compute_ids_tpe", ids, 2, 64, 64)
    for e in range(2):
        assert buckets[e, : tpe[e]].tolist() == pairs_of(ids, e)
        assert (buckets[e, tpe[e] :] == -1).all()


@both
def test_ids_beyond_32_bits_belong_to_no_expert(backend):
    ids = torch.tensor([[2**32, 1], [0, -(2**40)], [2**31, 2**32 + 1]])
    pairs, _, offsets = run(backend, "moe_build_pairs_by_token", ids, 2)
    assert pairs.tolist() == [[-1, 1], [0, -1], [-1, -1]]
    assert offsets.tolist() == [0, 1, 2]
    _, tpe, _ = run(backend, "compute_ids_tpe", ids, 2, 64, 64)
    assert tpe.tolist() == [1, 1]


@both
@given(seed=st.integers(0, 2**31), block_size=st.sampled_from([4, 16]))
def test_the_parts_make_a_mixture_of_experts(backend_name, seed, block_size):
    """Route, sort, a matrix an expert, combine: the sum over experts written out."""
    backend = get_backend(backend_name)
    num_tokens, num_experts, top_k, size = 12, 6, 2, 8
    x = torch.randn(num_tokens, size, generator=generator(seed))
    matrices = torch.randn(num_experts, size, size, generator=generator(seed + 1)) / 3
    ids, weights, counts = run(
        backend, "route_topk_softmax", distinct_logits(num_tokens, num_experts, seed), top_k
    )
    pairs, packed_tokens, offsets = run(backend, "moe_build_pairs_by_token", ids, num_experts)
    assert torch.equal(offsets.diff(), counts)
    packed = x[packed_tokens.long()]
    rows = torch.cat(
        [packed[offsets[e] : offsets[e + 1]] @ matrices[e] for e in range(num_experts)]
    )
    dense = torch.zeros(num_tokens, num_experts).scatter(1, ids.long(), weights)
    want = torch.einsum("te,th,ehd->td", dense, x, matrices)
    y = run(backend, "moe_combine", rows, pairs, weights)
    torch.testing.assert_close(y, want, rtol=1e-5, atol=1e-5)

    entries, experts, total = run(backend, "moe_align_block_size", ids, num_experts, block_size)
    slots = torch.zeros(num_tokens * top_k, size)
    for b in range(int(total) // block_size):
        block = entries[b * block_size : (b + 1) * block_size].long()
        block = block[block < num_tokens * top_k]
        slots[block] = x[block // top_k] @ matrices[experts[b]]
    y = run(backend, "weighted_sum", slots.view(num_tokens, top_k, size), weights)
    torch.testing.assert_close(y, want, rtol=1e-5, atol=1e-5)
