"""Partial attentions merged: the whole, whatever the parts, their order or their grouping."""

import itertools

import pytest
import torch

from ferrum_triton import InputError, get_backend
from ferrum_triton.kernels.attention.merge import merge_candidates, merge_config
from ferrum_triton.kernels.gpu import gpu_of
from ferrum_triton.kernels.jit import record_launches
from ferrum_triton.registry import OPS
from ferrum_triton.testing import TensorFactory, assert_close
from tests.compiling import compiled
from tests.harness import BACKENDS

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
INF = float("inf")


@pytest.fixture(params=BACKENDS)
def backend(request):
    return get_backend(request.param)


def normal(backend, *shape, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(backend.device, dtype)


def attend(q, k, v):
    """Attention in float64: q [tokens, heads, dim] over k, v [keys, heads, dim]; out and lse."""
    scores = torch.einsum("thd,khd->thk", q.double(), k.double()) * q.shape[-1] ** -0.5
    lse = scores.logsumexp(dim=-1)
    return torch.einsum("thk,khd->thd", (scores - lse[..., None]).exp(), v.double()), lse


def parts_of(q, k, v, bounds, dtype):
    """Attention over the pieces of k and v between ``bounds``, stacked."""
    pieces = [attend(q, k[a:b], v[a:b]) for a, b in itertools.pairwise(bounds)]
    outs, lses = zip(*pieces, strict=True)
    return torch.stack(outs).to(dtype), torch.stack(lses).float()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bounds", [(0, 37), (0, 30, 37), (0, 1, 2, 30, 37)])
def test_parts_of_the_keys_make_attention_over_all(backend, dtype, bounds):
    q, k, v = normal(backend, 5, 3, 40), *(normal(backend, 37, 3, 40, seed=s) for s in (1, 2))
    out, lse = backend.merge_attention_states(*parts_of(q, k, v, bounds, dtype))
    want, want_lse = attend(q, k, v)
    assert_close(out, want)
    assert_close(lse, want_lse)


def test_a_shared_prefix_is_attended_to_once(backend):
    """Four sequences with one prefix: a single pass over it joins each one's own suffix."""
    q = normal(backend, 4, 2, 16)
    prefix_k, prefix_v = (normal(backend, 50, 2, 16, seed=s) for s in (1, 2))
    shared = attend(q, prefix_k, prefix_v)
    outs, lses, wants = [], [], []
    for i, suffix_len in enumerate((1, 9, 0, 20)):
        suffix = [normal(backend, suffix_len, 2, 16, seed=10 * i + s) for s in (3, 4)]
        own = attend(q[i : i + 1], *suffix)
        outs.append(torch.stack((shared[0][i], own[0][0])))
        lses.append(torch.stack((shared[1][i], own[1][0])))
        whole = [torch.cat(pair) for pair in zip((prefix_k, prefix_v), suffix, strict=True)]
        wants.append(attend(q[i : i + 1], *whole))
    out, lse = backend.merge_attention_states(
        torch.stack(outs, dim=1).float(), torch.stack(lses, dim=1).float()
    )
    assert_close(out, torch.cat([want for want, _ in wants]))
    assert_close(lse, torch.cat([want for _, want in wants]))


@pytest.mark.parametrize("num_parts", [2, 3, 9])
def test_order_and_grouping_do_not_matter(backend, num_parts):
    outs = normal(backend, num_parts, 5, 3, 40)
    lses = 3 * normal(backend, num_parts, 5, 3, seed=1)
    lses[0, 0], lses[:, 1] = -INF, -INF
    want = backend.merge_attention_states(outs, lses)
    order = torch.randperm(num_parts, generator=torch.Generator().manual_seed(2))
    shuffled = backend.merge_attention_states(outs[order], lses[order])
    folded = outs[0], lses[0]
    for part in range(1, num_parts):
        pair = [torch.stack((a, b)) for a, b in zip(folded, (outs[part], lses[part]), strict=True)]
        folded = backend.merge_attention_states(*pair)
    for got in (shuffled, folded):
        assert_close(got[0], want[0], scale=2.0)  # each merge rounds
        assert_close(got[1], want[1], scale=2.0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_part_and_parts_that_saw_nothing_change_nothing(backend, dtype):
    outs, lses = normal(backend, 1, 5, 3, 40, dtype=dtype), normal(backend, 1, 5, 3, seed=1)
    out, lse = backend.merge_attention_states(outs, lses)
    assert torch.equal(out, outs[0]) and torch.equal(lse, lses[0])
    nothing = torch.full_like(outs, float("nan")), torch.full_like(lses, -INF)
    padded = [torch.cat((b, a, b)) for a, b in zip((outs, lses), nothing, strict=True)]
    out, lse = backend.merge_attention_states(*padded)
    assert torch.equal(out, outs[0]) and torch.equal(lse, lses[0])


@pytest.mark.parametrize("num_parts", [0, 1, 3])
def test_only_empty_parts_are_empty(backend, num_parts):
    outs = torch.full((num_parts, 2, 3, 16), float("nan"), device=backend.device)
    lses = torch.full((num_parts, 2, 3), -INF, device=backend.device)
    out, lse = backend.merge_attention_states(outs, lses)
    assert torch.equal(out, torch.zeros(2, 3, 16, device=backend.device))
    assert torch.equal(lse, torch.full((2, 3), -INF, device=backend.device))


@pytest.mark.parametrize("backend_name", BACKENDS[1:])
def test_every_candidate_computes_the_same(backend_name):
    """Few parts at a time or all of them, with maxima that rise from part to part and fall."""
    backend = get_backend(backend_name)
    outs, lses = normal(backend, 9, 5, 3, 40), normal(backend, 9, 5, 3, seed=1)
    lses[:, :2] += torch.arange(9.0, device=lses.device)[:, None, None]
    lses[:, 3:] -= torch.arange(9.0, device=lses.device)[:, None, None]
    want = lses.double().logsumexp(dim=0)
    weights = (lses.double() - want).exp()[..., None]
    for config in merge_candidates(gpu_of(torch.device(backend.device)), 15, 9, 40, False):
        with merge_config.forced(config):
            out, lse = backend.merge_attention_states(outs, lses)
        assert_close(out, (weights * outs).sum(dim=0))
        assert_close(lse, want)


def test_more_parts_than_a_program_loads_at_once(backend):
    outs, lses = normal(backend, 150, 2, 1, 16), 3 * normal(backend, 150, 2, 1, seed=1)
    out, lse = backend.merge_attention_states(outs, lses)
    want = lses.double().logsumexp(dim=0)
    assert_close(out, ((lses.double() - want).exp()[..., None] * outs).sum(dim=0))
    assert_close(lse, want)


def test_a_common_factor_of_the_denominators_cancels(backend):
    """Logarithms of any size are safe: exp of none of them is ever taken alone."""
    outs = normal(backend, 3, 5, 3, 40)
    lses = normal(backend, 3, 5, 3, seed=1).round(decimals=2)
    out, lse = backend.merge_attention_states(outs, lses)
    for shift in (-4096.0, 4096.0):
        moved, moved_lse = backend.merge_attention_states(outs, (lses + shift).float())
        # The sum lses + shift itself is rounded, to 2^-12.
        torch.testing.assert_close(moved, out, rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(moved_lse - shift, lse, rtol=0, atol=1e-3)
    far = lses.clone()
    far[1] -= 500
    assert_close(
        backend.merge_attention_states(outs, far)[0],
        backend.merge_attention_states(outs[[0, 2]], lses[[0, 2]])[0],
    )


def test_lses_are_float32(backend):
    outs, lses = normal(backend, 2, 5, 3, 40), normal(backend, 2, 5, 3)
    with pytest.raises(InputError, match="lses"):
        backend.merge_attention_states(outs, lses.half())


@pytest.mark.parametrize("num_parts", [2, 9])
def test_is_one_launch(num_parts):
    op = OPS["merge_attention_states"]
    get_backend("interpret")
    make = TensorFactory(torch.bfloat16, "meta")
    with record_launches() as launches:
        op.impls["triton"](
            **op.make_sample(make, num_parts=num_parts, num_tokens=7, num_heads=3, head_dim=40)
        )
    assert len(launches) == 1


@pytest.mark.parametrize(
    ("op", "axes", "warps", "late"),
    [
        ("paged_decode_attention", {"batch": 1, "max_len": 8192, "full": True}, 2, False),
        (
            "paged_decode_attention",
            {"batch": 8, "max_len": 16384, "full": True, "q_len": 4},
            2,
            True,
        ),
        ("paged_varlen_attention", {"q_lens": (4,) * 8, "offsets": (4092,) * 8}, 4, False),
    ],
)
def test_the_launch_behind_many_programs_begins_at_their_end(op, axes, warps, late):
    """Its trigger then stands behind the last store, else before the first load."""
    axes = {"num_kv_heads": 8, "group_size": 4, "head_dim": 128, **axes}
    arguments = OPS[op].make_sample(TensorFactory(torch.bfloat16, "meta"), **axes)
    with record_launches((9, 0)) as launches:
        OPS[op].impls["triton"](**arguments)
    merging = launches[-1]
    assert merging.kernel.name == "_merge_kernel"
    assert merging.meta["num_warps"] == warps
    ptx = compiled(merging).asm["ptx"]
    trigger = ptx.index("griddepcontrol.launch_dependents")
    assert ptx.index("griddepcontrol.wait") < trigger
    assert (trigger > ptx.rindex("st.global")) == late
    assert (trigger < ptx.index("ld.global")) != late
