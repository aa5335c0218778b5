"""Laws of the sums over experts that are one launch, beyond agreement with the reference."""

import dataclasses

import pytest
import torch

from bench import moe_layer
from bench.launches import record
from ferrum_triton import get_backend
from ferrum_triton.kernels.interpreter import python_twin
from ferrum_triton.kernels.jit import record_launches
from ferrum_triton.kernels.moe import expert_sum
from ferrum_triton.kernels.resources import TARGETS
from ferrum_triton.ops.moe.expert_sum import FEW_TOKENS
from ferrum_triton.quant.kinds import format_of
from ferrum_triton.quant.planes import PLANE_FORMATS
from ferrum_triton.registry import OPS
from ferrum_triton.testing import assert_close
from tests.compiling import compiled
from tests.harness import BACKENDS
from tests.test_moe_planes import _late_ids_kernel, empty, empty_stack
from tests.test_moe_quant import BOTH_WAYS, FAR, rows_for, seeded, stack

KINDS = pytest.mark.parametrize("kind", PLANE_FORMATS)
# Tokens of one launch, and of two.
FEW_AND_MORE = pytest.mark.parametrize("num_tokens", [2, FEW_TOKENS + 1])
SOME_KINDS = pytest.mark.parametrize("kind", ["Q8_0", "Q4_K:planes", "Q3_K:planes", "MXFP4:planes"])


@pytest.fixture(params=BACKENDS)
def backend(request):
    return get_backend(request.param)


def weights_of(ids, seed=2):
    return torch.rand(*ids.shape, generator=seeded(seed)) + 0.1


def ids_of(num_tokens, top_k, num_experts):
    return torch.randint(num_experts, (num_tokens, top_k), generator=seeded(3))


def placed(backend, *tensors):
    return [tensor.to(backend.device) for tensor in tensors]


@KINDS
@BOTH_WAYS
@pytest.mark.parametrize(
    ("top_k", "groups", "per_slot"), [(1, 8, False), (3, 40, True), (10, 8, True)]
)
def test_it_is_the_sum_of_the_products(backend, kind, dtype, top_k, groups, per_slot):
    """Of lanes without a part of a row and of several steps; slots are padded, and rows too."""
    blocks = stack(kind, 4, 11, groups * 32 // format_of(kind).block_size)
    a = rows_for(blocks, kind, 2, *([top_k] if per_slot else [])).to(dtype)
    ids = ids_of(2, top_k, 4)
    call = placed(backend, a, blocks, ids, weights_of(ids))
    y = backend.gemv_quant_moe_id_sum(*call, kind)
    products = OPS["gemv_quant_moe_id"].reference(a.double(), blocks, ids, kind)
    want = (products * weights_of(ids)[..., None]).sum(1)
    assert y.dtype == dtype and y.shape == (2, 11)
    assert_close(y.cpu(), want)


@SOME_KINDS
@BOTH_WAYS
@FEW_AND_MORE
def test_ids_out_of_range_add_nothing(backend, kind, dtype, num_tokens):
    """Whatever their weights and their activations; of a token of no expert y is zeros."""
    blocks = stack(kind, 3, 5, 1)
    a = rows_for(blocks, kind, num_tokens, len(FAR) + 2).to(dtype)
    ids = torch.tensor([[0, *FAR, 2]]).repeat(num_tokens, 1)
    ids[1] = 3
    weights = weights_of(ids)
    known = (ids >= 0) & (ids < 3)
    want = OPS["gemv_quant_moe_id_sum"].reference(a.double(), blocks, ids, weights, kind)
    none = torch.tensor([torch.nan, torch.inf, -torch.inf]).repeat(ids.numel())
    weights[~known] = none[: (~known).sum()]
    a[~known] = torch.nan
    call = placed(backend, a, blocks, ids, weights)
    y = backend.gemv_quant_moe_id_sum(*call, kind).cpu()
    assert_close(y, want)
    assert not y[1].any()


@SOME_KINDS
@BOTH_WAYS
@FEW_AND_MORE
def test_what_is_no_number_stays_in_its_token(backend, kind, dtype, num_tokens):
    """One of its activations or its weights is a NaN."""
    blocks = stack(kind, 3, 5, 1)
    a = rows_for(blocks, kind, num_tokens, 2).to(dtype)
    ids = ids_of(num_tokens, 2, 3)
    weights = weights_of(ids)
    call = placed(backend, a, blocks, ids, weights)
    want = backend.gemv_quant_moe_id_sum(*call, kind)
    for spoilt in (a, weights):
        changed = [x.clone() for x in (a, blocks, ids, weights)]
        changed[0 if spoilt is a else 3][0, 1] = torch.nan
        y = backend.gemv_quant_moe_id_sum(*placed(backend, *changed), kind)
        assert torch.equal(y[1:], want[1:]) and y[0].isnan().all()


@pytest.mark.parametrize("shape", [(0, 2, 3), (2, 0, 3), (2, 2, 0)])
@pytest.mark.parametrize("kind", ["Q8_0", "Q8_0:planes"])
def test_nothing_to_do(backend, shape, kind):
    num_tokens, top_k, n = shape
    blocks = torch.zeros(2, n, format_of(kind).row_bytes(32), dtype=torch.uint8)
    ids = torch.zeros(num_tokens, top_k, dtype=torch.int64)
    a, weights = torch.ones(num_tokens, 32), torch.ones(ids.shape)
    y = backend.gemv_quant_moe_id_sum(*placed(backend, a, blocks, ids, weights), kind)
    assert y.shape == (num_tokens, n) and not y.any()


@pytest.mark.parametrize("kind", ["Q4_K", "Q4_K:planes"])
def test_rows_without_blocks_are_zeros(backend, kind):
    blocks = torch.empty(3, 4, 0, dtype=torch.uint8)
    ids = torch.tensor([[0, 2], [1, 1]])
    call = placed(backend, torch.empty(2, 0), blocks, ids, weights_of(ids))
    assert torch.equal(backend.gemv_quant_moe_id_sum(*call, kind).cpu(), torch.zeros(2, 4))


@pytest.mark.parametrize("stale", [0, -1, 3])
@BOTH_WAYS
def test_ids_that_change_before_the_wait_are_made_good(monkeypatch, stale, dtype):
    """To and from what is no expert, as if a launch before were still writing them."""
    kind, new = "Q4_K:planes", torch.tensor([[2, -1, 0], [1, 1, 3]])
    blocks, weights = stack(kind, 3, 5, 1), weights_of(new)
    a, ids = rows_for(blocks, kind, 2, 3).to(dtype), torch.full_like(new, stale)
    run = OPS["gemv_quant_moe_id_sum"].impls["triton"]
    want, waits = run(a, blocks, new, weights, kind), []

    def wait(_):
        waits.append(ids.clone())
        ids.copy_(new)

    twin = python_twin(expert_sum._plane_sum_kernel.jit)
    monkeypatch.setitem(twin.__globals__, "pdl_wait", wait)
    monkeypatch.setitem(twin.__globals__, "pdl_trigger", lambda _: None)
    monkeypatch.setattr(expert_sum, "can_overlap", lambda _: True)
    # Ids are stale for the first program alone, which is of the first token.
    got = run(a, blocks, ids, weights, kind)
    assert torch.equal(waits[0], torch.full_like(new, stale)) and len(waits) > 1
    assert torch.equal(got, want)


@pytest.mark.gpu
@pytest.mark.parametrize("stale", [0, -1, 3])
def test_a_wrong_guess_is_made_good(stale):
    """On a GPU, where a launch that is still running writes the ids."""
    kind, new = "Q4_K:planes", torch.tensor([[5, 3, -1, 16, 0, 9, 9, 2]], dtype=torch.int32)
    blocks, weights = stack(kind, 16, 512, 2).cuda(), weights_of(new).cuda()
    a, new = torch.randn(1, 8, 512, device="cuda").bfloat16(), new.cuda()
    run = OPS["gemv_quant_moe_id_sum"].impls["triton"]
    want = run(a, blocks, new, weights, kind)
    for _ in range(5):
        ids = torch.full_like(new, stale)
        torch.cuda.synchronize()
        _late_ids_kernel[(1,)](ids, new, 20000, num_warps=1)
        got = run(a, blocks, ids, weights, kind)
        assert torch.equal(ids, new) and torch.equal(got, want)


def sum_launches(kind, top_k=8, num_tokens=1, dtype=torch.bfloat16, target="sm_90", k=768):
    """What the sum launches for products of 2048 rows."""
    with record_launches(TARGETS[target].capability) as launches:
        expert_sum.gemv_quant_moe_id_sum(
            empty(num_tokens, top_k, k, dtype=dtype),
            empty_stack(kind, 128, 2048, k),
            empty(num_tokens, top_k, dtype=torch.int32),
            empty(num_tokens, top_k, dtype=torch.float32),
            kind,
        )
    return launches


@KINDS
def test_compiled_for_hopper(kind):
    """A program of ten slots has 16 warps, whose registers are 128 at most."""
    (launch,) = sum_launches(kind, top_k=10)
    assert ".ftz" not in compiled(launch).asm["ptx"]


@pytest.mark.parametrize(
    ("top_k", "dtype", "k"),
    [
        (1, torch.bfloat16, 768),
        (2, torch.float16, 14336),
        (4, torch.bfloat16, 2880),
        (8, torch.float32, 768),
        (16, torch.float32, 768),
    ],
)
def test_numbers_of_slots_compiled(top_k, dtype, k):
    kind = "Q4_K:planes" if k % 256 == 0 else "MXFP4:planes"
    (launch,) = sum_launches(kind, top_k=top_k, dtype=dtype, k=k)
    compiled(launch)


@pytest.mark.parametrize("target", ["sm_80", "sm_100", "gfx942"])
def test_compiled_elsewhere(target):
    (launch,) = sum_launches("Q4_K:planes", top_k=10, target=target)
    compiled(launch, target)


def test_weights_of_all_slots_are_loaded_before_the_wait():
    """Eight rows by each thread of 16 bytes; those of a wrong guess come again behind it."""
    (launch,) = sum_launches("Q4_K:planes")
    before, *after = compiled(launch).asm["ptx"].split("griddepcontrol.wait;")
    assert [part.count("ld.global.L1::evict_first") for part in (before, *after)] == [8, 8]


@pytest.mark.parametrize(
    ("kind", "num_tokens", "top_k", "is_one"),
    [
        ("Q4_K:planes", 1, 8, True),
        ("Q4_K:planes", FEW_TOKENS, 16, True),
        ("Q4_K:planes", FEW_TOKENS + 1, 8, False),
        ("Q4_K:planes", 1, 17, False),
        ("Q4_K", 1, 8, False),
    ],
)
def test_what_is_one_launch(kind, num_tokens, top_k, is_one):
    names = [each.kernel.name for each in sum_launches(kind, top_k, num_tokens)]
    assert names[-1] == ("_plane_sum_kernel" if is_one else "_weighted_sum_kernel")
    assert (len(names) == 1) == is_one


@pytest.mark.parametrize("num_tokens", [1, FEW_TOKENS, FEW_TOKENS + 1])
@pytest.mark.parametrize("form", moe_layer.FORMATS)
def test_a_layer_takes_it_for_few_tokens(form, num_tokens):
    """Behind gate and up in one launch."""
    row = f"moe_layer/{form}/{moe_layer.SHAPE}/t{num_tokens}"
    names = [launch.kernel.name for launch in record(moe_layer.meta_call(row)).launches]
    takes_it = num_tokens <= FEW_TOKENS
    assert ("_weighted_sum_kernel" in names) != takes_it
    assert len(names) == 2 or not takes_it


def test_experts_summed_by_a_layer():
    """What a layer of few tokens gives is its definition."""
    backend = get_backend("interpret")
    experts = moe_layer.experts_of("q4_K", "cpu", num_experts=4, hidden=256, intermediate=256)
    experts = dataclasses.replace(experts, top_k=2)
    call = moe_layer.tokens("cpu", 2, num_experts=4, top_k=2, hidden=256)[0]
    want = moe_layer.defined(experts, **call)
    h, ids, weights = call["x"], call["ids"], call["weights"]
    assert_close(experts.summed(backend, h, ids, weights), want, scale=2)
