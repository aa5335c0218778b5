"""Products of experts in 16 and 32 bits: both ways of taking pairs, and what is read of experts."""

import pytest
import torch

from ferrum_triton import OPS, InputError, get_backend
from ferrum_triton.kernels.moe.dense_config import GATE_UP_TILES, TILES, tiles
from ferrum_triton.ops.moe.dense import EXPERT_GATES
from ferrum_triton.testing import assert_close

INTERPRET = get_backend("interpret")
PATHS = {
    "per_pair": tiles("per_pair", 16, 32, 64, 4, 2),
    "sorted": tiles("sorted", 16, 32, 64, 4, 2),
    "sorted, wide": tiles("sorted", 64, 64, 32, 4, 2),
}


def call(num_tokens=21, num_experts=5, top_k=3, n=40, k=100, dtype=torch.float16, per_slot=False):
    generator = torch.Generator().manual_seed(num_tokens)
    rows = (num_tokens, top_k) if per_slot else (num_tokens,)
    scores = torch.rand(num_tokens, num_experts, generator=generator)
    return {
        "a": torch.randn(*rows, k, generator=generator).to(dtype),
        "weights": (torch.randn(num_experts, n, k, generator=generator) * k**-0.5).to(dtype),
        "ids": scores.topk(min(top_k, num_experts)).indices,
    }


def wide(arguments):
    return {n: v.double() if v.is_floating_point() else v for n, v in arguments.items()}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("per_slot", [False, True])
def test_pairs_are_taken_by_themselves_or_sorted(path, per_slot):
    arguments = call(per_slot=per_slot)
    want = OPS["gemm_moe_id"].reference(**wide(arguments))
    with TILES.forced(PATHS[path]):
        assert_close(INTERPRET.gemm_moe_id(**arguments), want)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("activation", EXPERT_GATES)
def test_gate_and_up_have_their_biases_before_the_activation(path, activation):
    arguments = call(n=80) | {"bias": torch.randn(5, 80), "activation": activation, "limit": 0.5}
    floats = {n: v for n, v in arguments.items() if isinstance(v, torch.Tensor)}
    want = OPS["gemm_moe_id_gate_up"].reference(**arguments | wide(floats))
    with GATE_UP_TILES.forced(PATHS[path]):
        assert_close(INTERPRET.gemm_moe_id_gate_up(**arguments), want)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("backend_name", ["cpu", "interpret"])
def test_no_expert_is_read_that_nobody_chose(path, backend_name):
    """Of the others weights are NaN, and so are their biases."""
    arguments = call() | {"bias": torch.randn(5, 40)}
    ids = arguments["ids"].clone()
    for unread in (0, 3):
        ids[ids == unread] = 1
        arguments["weights"][unread] = arguments["bias"][unread] = float("nan")
    with TILES.forced(PATHS[path]):
        got = get_backend(backend_name).gemm_moe_id(**arguments | {"ids": ids})
    assert got.isfinite().all() and got.any()


@pytest.mark.parametrize("path", PATHS)
def test_pairs_without_an_expert_get_zeros(path):
    """Also where nobody has one, and in memory that held something else."""
    arguments = call()
    ids = arguments["ids"].clone()
    ids[::2, 1], ids[1::2, 0], ids[4] = -1, 5, -(2**62)
    out = torch.full((21, 3, 40), float("nan"), dtype=torch.float16)
    with TILES.forced(PATHS[path]):
        INTERPRET.gemm_moe_id(**arguments | {"ids": ids}, out=out)
        lost = (ids < 0) | (ids >= 5)
        assert out.isfinite().all() and not out[lost].any() and out[~lost].any()
        assert not INTERPRET.gemm_moe_id(**arguments | {"ids": ids * 0 - 1}, out=out).any()


@pytest.mark.parametrize("path", PATHS)
def test_one_expert_may_have_all_pairs(path):
    arguments = call(num_tokens=70, num_experts=4, top_k=1)
    arguments["ids"] = torch.full((70, 1), 2)
    with TILES.forced(PATHS[path]):
        got = INTERPRET.gemm_moe_id(**arguments)[:, 0]
    assert_close(got, arguments["a"].double() @ arguments["weights"][2].double().T)


def test_weights_may_be_a_slice_of_experts_and_rows():
    """As of one rank's experts, and of the columns that a shard has."""
    arguments = call()
    whole = torch.randn(9, 64, 160).half()
    part = whole[2:7, 8:48, 16:116]
    want = INTERPRET.gemm_moe_id(**arguments | {"weights": part.contiguous()})
    assert torch.equal(INTERPRET.gemm_moe_id(**arguments | {"weights": part}), want)


def test_more_experts_than_are_sorted_are_taken_by_pair():
    arguments = call(num_tokens=3, num_experts=1100, top_k=2, n=8, k=32)
    want = OPS["gemm_moe_id"].reference(**wide(arguments))
    assert_close(INTERPRET.gemm_moe_id(**arguments), want)


def test_shards_of_experts_add_up():
    """Of experts that another rank has the ids are none of this one's."""
    arguments = call(dtype=torch.float32)
    whole = INTERPRET.gemm_moe_id(**arguments)
    total = torch.zeros_like(whole)
    for first, last in ((0, 2), (2, 5)):
        part = arguments["weights"][first:last]
        total += INTERPRET.gemm_moe_id(arguments["a"], part, arguments["ids"] - first)
    assert torch.equal(total, whole)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weights": torch.zeros(0, 40, 100).half()}, "at least one expert"),
        ({"weights": torch.zeros(5, 40, 99).half()}, "weights is of shape"),
        ({"weights": torch.zeros(5, 40, 100)}, "weights is"),
        ({"ids": torch.zeros(20, 3, dtype=torch.int32)}, r"allowed: \[20, k\] or \[20, 3, k\]"),
        ({"bias": torch.zeros(5, 39)}, "bias is of shape"),
    ],
)
def test_wrong_calls_are_refused(change, message):
    for name in ("cpu", "interpret"):
        with pytest.raises(InputError, match=message):
            get_backend(name).gemm_moe_id(**call() | change)


def test_gate_and_up_have_as_many_rows():
    with pytest.raises(InputError, match="as many of G as of U"):
        INTERPRET.gemm_moe_id_gate_up(**call(n=41))
    with pytest.raises(InputError, match="'clamped_swiglu'"):
        INTERPRET.gemm_moe_id_gate_up(**call(), activation="relu")
