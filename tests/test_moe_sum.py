"""Products of experts summed over a token's slots: in one launch, or slots and then their sum."""

import pytest
import torch

from ferrum_triton import OPS, get_backend
from ferrum_triton.kernels.jit import record_launches
from ferrum_triton.kernels.moe.sum_config import FP8_SUMS, IN_SLOTS, SUMS, one_launch
from ferrum_triton.kernels.resources import TARGETS
from ferrum_triton.models.experts import DenseExperts, Fp8Experts
from ferrum_triton.models.gpt_oss import DenseBiasedExperts
from ferrum_triton.quant import Fp8Blocks
from ferrum_triton.testing import TensorFactory, assert_close
from tests import test_fp8_experts, test_moe_dense
from tests.compiling import compiled, in_turns, launches_of
from tests.test_pdl import PREFETCHED, WAIT, find_fault

CPU, INTERPRET = get_backend("cpu"), get_backend("interpret")
DENSE, FP8 = "gemm_moe_id_sum", "gemm_moe_id_sum_fp8_128x128"
TUNABLES = {DENSE: SUMS, FP8: FP8_SUMS}
PATHS = {
    DENSE: [IN_SLOTS, one_launch(4, 32, 4), one_launch(1, 256, 1)],
    FP8: [IN_SLOTS, one_launch(8, 128, 4), one_launch(2, 512, 2)],
}
ON_EVERY_PATH = pytest.mark.parametrize(
    ("op", "path"), [(op, path) for op, paths in PATHS.items() for path in paths]
)


def call(op, num_tokens=3, top_k=3, per_slot=True, dtype=torch.float32):
    axes = {"num_tokens": num_tokens, "top_k": top_k, "per_slot": per_slot, "dtype": dtype}
    drawn = (test_fp8_experts if op == FP8 else test_moe_dense).call(**axes)
    generator = torch.Generator().manual_seed(7)
    return drawn | {"slot_weights": torch.rand(drawn["ids"].shape, generator=generator)}


def run(op, path, arguments, backend=INTERPRET, **options):
    with TUNABLES[op].forced(path):
        return getattr(backend, op)(**arguments, **options)


def exact(op, arguments):
    """In float64, of each slot's product by itself."""
    arguments = dict(arguments)
    weights = arguments.pop("slot_weights").double()
    if op == FP8:
        slots = test_fp8_experts.exact(**arguments)
    else:
        slots = OPS["gemm_moe_id"].reference(**test_moe_dense.wide(arguments))
    return (slots * weights[..., None]).sum(1)


@ON_EVERY_PATH
@pytest.mark.parametrize("per_slot", [False, True])
@pytest.mark.parametrize("top_k", [1, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_products_are_summed_by_their_weights(op, path, per_slot, top_k, dtype):
    arguments = call(op, top_k=top_k, per_slot=per_slot, dtype=dtype)
    # Slots in float16 are rounded before their sum, each of them as much as the sum is.
    scale = 1 + top_k if path is IN_SLOTS and dtype == torch.float16 else 1
    assert_close(run(op, path, arguments), exact(op, arguments), scale=scale)
    assert_close(getattr(CPU, op)(**arguments), exact(op, arguments))


@ON_EVERY_PATH
@pytest.mark.parametrize("backend", [CPU, INTERPRET], ids=["cpu", "interpret"])
def test_slots_without_an_expert_add_nothing(op, path, backend):
    """Whatever their weights and their activations are, also where a token has no other slots."""
    arguments = call(op)
    ids = arguments["ids"].clone().clamp(0, 4)
    ids[0, 1], ids[1, 0], ids[2] = -1, 5, -(2**62)
    lost = (ids < 0) | (ids >= 5)
    zeros = {
        "ids": torch.where(lost, 0, ids),
        "slot_weights": arguments["slot_weights"].masked_fill(lost, 0.0),
    }
    want = run(op, path, arguments | zeros, backend)
    for nothing in (float("nan"), float("inf")):
        arguments["slot_weights"][lost] = nothing
        arguments["a"][lost] = nothing
        out = torch.full_like(want, float("nan"))
        run(op, path, arguments | {"ids": ids}, backend, out=out)
        assert torch.equal(out, want) and out[:2].all() and not out[2].any()


@ON_EVERY_PATH
def test_tokens_are_by_themselves(op, path):
    arguments = call(op)
    want = run(op, path, arguments)
    arguments["a"][1] = float("nan")
    got = run(op, path, arguments)
    assert torch.equal(got[::2], want[::2]) and got[1].isnan().all()


@pytest.mark.parametrize("op", PATHS)
def test_no_expert_is_read_that_nobody_chose(op):
    arguments = call(op)
    ids = arguments["ids"].clone()
    for unread in (0, 3):
        ids[ids == unread] = 1
        (arguments["scales"] if op == FP8 else arguments["weights"])[unread] = float("nan")
    for path in PATHS[op]:
        got = run(op, path, arguments | {"ids": ids})
        assert got.isfinite().all() and got.any()


def test_biases_are_weighted_too():
    arguments = call(DENSE) | {"bias": torch.randn(5, 40)}
    for path in PATHS[DENSE]:
        assert_close(run(DENSE, path, arguments), exact(DENSE, arguments))


@pytest.mark.gpu
@ON_EVERY_PATH
@pytest.mark.parametrize("lines", [0, 2, 8])
@pytest.mark.parametrize("num_tokens", [1, 3, 16])
def test_sums_of_a_gpu(op, path, lines, num_tokens):
    """Also where lines are asked for ahead, by ids that lead nowhere."""
    arguments = call(op, num_tokens, dtype=torch.bfloat16)
    arguments["ids"][0, 0], arguments["ids"][0, 1] = 2**31 - 1, -(2**31)
    want = exact(op, arguments)
    moved = {name: value.cuda() for name, value in arguments.items()}
    path = path if path is IN_SLOTS else path | {"LINES": lines}
    # Slots are rounded before their sum, each of them as much as the sum is.
    scale = 4 if path is IN_SLOTS else 1
    assert_close(run(op, path, moved, get_backend("cuda")), want, scale=scale)


def test_one_launch_rounds_no_product():
    """2049 is none of float16: rounded first, the two products would cancel."""
    weights = torch.zeros(2, 8, 16, dtype=torch.float16)
    weights[:, :, 0], weights[0, :, 1] = 2048, 1
    arguments = {"a": torch.ones(1, 16).half(), "weights": weights, "ids": torch.tensor([[0, 1]])}
    arguments["slot_weights"] = torch.tensor([[1.0, -1.0]])
    assert run(DENSE, one_launch(4, 16, 4), arguments).eq(1).all()
    assert run(DENSE, IN_SLOTS, arguments).eq(0).all()


def test_an_infinite_weight_meets_a_sum_and_no_part_of_it():
    """Of products with either sign, which sum up to 2."""
    a = torch.tensor([[3.0, -1.0, 0.0]])
    arguments = {"a": a, "weights": torch.ones(1, 4, 3), "ids": torch.tensor([[0]])}
    arguments["slot_weights"] = torch.tensor([[float("inf")]])
    for path in PATHS[DENSE]:
        assert run(DENSE, path, arguments).eq(float("inf")).all()


@pytest.mark.parametrize("op", PATHS)
def test_few_tokens_are_one_launch(op):
    """Of more slots than registers hold products have a launch of their own."""
    layer = {"num_experts": 128, "n": 2048, "k": 768, "per_slot": True}
    layer |= {} if op == FP8 else {"with_bias": False}
    for num_tokens, top_k, is_one in ((1, 8, True), (4, 8, True), (64, 8, False), (1, 256, False)):
        axes = {"num_tokens": num_tokens, "top_k": top_k}
        sample = OPS[op].make_sample(TensorFactory(torch.bfloat16, "meta"), **layer, **axes)
        with record_launches((9, 0)) as launches:
            OPS[op].impls["triton"](**sample)
        assert (len(launches) == 1) == is_one


@pytest.mark.parametrize(
    ("top_k", "op", "target_name"),
    in_turns((1, 2, 4, 10), [(op, name) for name in TARGETS for op in PATHS]),
)
def test_any_number_of_slots_fits_registers(top_k, op, target_name):
    layer = {"num_experts": 128, "n": 2048, "k": 768, "per_slot": True, "num_tokens": 1}
    layer |= {} if op == FP8 else {"with_bias": True}
    sample = OPS[op].make_sample(TensorFactory(torch.bfloat16, "meta"), **layer, top_k=top_k)
    with record_launches(TARGETS[target_name].capability) as launches:
        OPS[op].impls["triton"](**sample)
    (launch,) = launches
    compiled(launch, target_name)


@pytest.mark.parametrize("op", PATHS)
def test_lines_asked_for_ahead_are_no_reads_before_the_wait(op):
    case = OPS[op].bench[0]
    with TUNABLES[op].forced(one_launch(4, 128, 4, lines=2)):
        (launch,) = launches_of(OPS[op], case, TARGETS["sm_90"])
    before, _, _ = compiled(launch).asm["ptx"].partition(WAIT)
    assert PREFETCHED.search(before) and not find_fault(launch)


def layers():
    """Experts without a router, with the dtype of their activations."""
    common = {"router": torch.empty(0), "top_k": 2}
    down, gate_up = torch.randn(4, 32, 48) / 6, torch.randn(4, 96, 32) / 6
    yield torch.float32, DenseExperts(**common, gate_up=gate_up, down=down)
    biased = {"router_bias": torch.empty(0), "swiglu_alpha": 1.702, "swiglu_limit": 7.0}
    biased |= {"down_bias": torch.randn(4, 32), "gate_up_bias": torch.randn(4, 96)}
    yield torch.float32, DenseBiasedExperts(**common, **biased, gate_up=gate_up, down=down)
    stacks = [*gate_up.chunk(2, 1), down]
    codes = [Fp8Blocks(w.to(torch.float8_e4m3fn), torch.rand(4, 1, 1)) for w in stacks]
    gate, up, down = codes
    yield torch.bfloat16, Fp8Experts(**common, gate=gate, up=up, down=down)


@pytest.mark.parametrize("backend", [CPU, INTERPRET], ids=["cpu", "interpret"])
@pytest.mark.parametrize("num_tokens", [1, 9])
def test_layers_sum_what_their_experts_give(backend, num_tokens):
    for dtype, experts in layers():
        h = torch.randn(num_tokens, 32).to(dtype)
        ids = torch.rand(num_tokens, 4).topk(2).indices.int()
        weights = torch.rand(num_tokens, 2)
        want = backend.weighted_sum(experts.slots(backend, h, ids), weights)
        # Slots in bfloat16 are rounded before their sum.
        assert_close(experts.summed(backend, h, ids, weights), want, scale=2)
