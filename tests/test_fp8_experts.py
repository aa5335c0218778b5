"""Products with experts in FP8: by pair or sorted, of any ids, and models that have such."""

import pytest
import torch

from ferrum_triton import InputError, get_backend
from ferrum_triton.files.fp8_weights import Fp8Files
from ferrum_triton.files.safetensors import open_safetensors
from ferrum_triton.kernels.fp8.config import gemv
from ferrum_triton.kernels.fp8.experts_config import GATE_UP_TILES, TILES, tiles
from ferrum_triton.models import Llama, load_model
from ferrum_triton.models.experts import Fp8Experts
from ferrum_triton.quant import Fp8Blocks
from ferrum_triton.testing import UNROUNDED, assert_close
from tests.test_fp8 import bits, decoded, drawn, exact_product, tiny
from tests.test_models import run, tokens

CPU, INTERPRET = get_backend("cpu"), get_backend("interpret")
PATHS = {
    "gemv": gemv(16, 128, 4),
    "sorted": tiles(16, 64, 4, 2),
    "sorted, tall": tiles(64, 128, 4, 2),
}


def stack(num_experts, n, k, seed=0):
    """Weights and scales of experts."""
    found = [drawn(n, k, seed + i) for i in range(num_experts)]
    codes = torch.stack([bits(weight) for weight, _ in found])
    return codes.view(torch.float8_e4m3fn), torch.stack([scales for _, scales in found])


def call(num_tokens=21, num_experts=5, top_k=3, n=200, k=300, per_slot=False, dtype=torch.float32):
    weights, scales = stack(num_experts, n, k)
    make = torch.Generator().manual_seed(1)
    ids = torch.randint(-1, num_experts + 1, (num_tokens, top_k), generator=make)
    rows = (num_tokens, top_k) if per_slot else (num_tokens,)
    a = torch.randn(*rows, k, generator=make).to(dtype)
    return {"a": a, "weights": weights, "scales": scales, "ids": ids}


def exact(a, weights, scales, ids):
    """In float64, a pair after the other."""
    y = torch.zeros(*ids.shape, weights.shape[1], dtype=torch.float64)
    for t, s in ((t, s) for t in range(ids.shape[0]) for s in range(ids.shape[1])):
        if 0 <= (e := int(ids[t, s])) < len(weights):
            row = a[t, s] if a.dim() == 3 else a[t]
            y[t, s] = exact_product(row[None], weights[e], scales[e])[0]
    return y


def gate_up(num_experts=5, **axes):
    """A call, and what it should give."""
    arguments = call(num_experts=num_experts, **axes)
    gate, gate_scales = arguments.pop("weights"), arguments.pop("scales")
    up, up_scales = stack(num_experts, *gate.shape[1:], seed=50)
    a, ids = arguments["a"], arguments["ids"]
    left, right = exact(a, gate, gate_scales, ids), exact(a, up, up_scales, ids)
    arguments |= {"gate_weights": gate, "gate_scales": gate_scales}
    arguments |= {"up_weights": up, "up_scales": up_scales}
    return arguments, torch.nn.functional.silu(left) * right


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("per_slot", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_are_what_codes_and_scales_say(path, per_slot, dtype):
    arguments = call(per_slot=per_slot, dtype=dtype)
    with TILES.forced(PATHS[path]):
        assert_close(INTERPRET.gemm_moe_id_fp8_128x128(**arguments), exact(**arguments))
    assert_close(CPU.gemm_moe_id_fp8_128x128(**arguments), exact(**arguments))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("per_slot", [False, True])
def test_gate_and_up_are_one_launch(path, per_slot):
    arguments, want = gate_up(per_slot=per_slot)
    with GATE_UP_TILES.forced(PATHS[path]):
        assert_close(INTERPRET.gemm_moe_id_gate_up_fp8_128x128(**arguments), want)
    assert_close(CPU.gemm_moe_id_gate_up_fp8_128x128(**arguments), want)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("num_tokens", [1, 21, 400])
def test_products_of_a_gpu(num_tokens, dtype):
    """Of as many pairs as each path and orientation takes."""
    backend, scale = get_backend("cuda"), UNROUNDED if dtype == torch.float32 else 1
    axes = {"num_tokens": num_tokens, "num_experts": 8, "n": 260, "k": 520, "dtype": dtype}
    arguments = call(**axes)
    moved = {name: value.cuda() for name, value in arguments.items()}
    got = backend.gemm_moe_id_fp8_128x128(**moved)
    assert_close(got, exact(**arguments), scale=scale)
    arguments, want = gate_up(**axes)
    moved = {name: value.cuda() for name, value in arguments.items()}
    assert_close(backend.gemm_moe_id_gate_up_fp8_128x128(**moved), want, scale=scale)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("backend_name", ["cpu", "interpret"])
def test_no_expert_is_read_that_nobody_chose(path, backend_name):
    arguments = call()
    ids = arguments["ids"].clone()
    for unread in (0, 3):
        ids[ids == unread] = 1
        arguments["scales"][unread] = float("nan")
        bits(arguments["weights"])[unread] = 0x7F
    with TILES.forced(PATHS[path]):
        got = get_backend(backend_name).gemm_moe_id_fp8_128x128(**arguments | {"ids": ids})
    assert got.isfinite().all() and got.any()


@pytest.mark.parametrize("path", PATHS)
def test_pairs_without_an_expert_get_zeros(path):
    """Also where nobody has one, and in memory that held something else."""
    arguments = call()
    ids = arguments["ids"].clone()
    ids[::2, 1], ids[1::2, 0], ids[4] = -1, 5, -(2**62)
    out = torch.full((21, 3, 200), float("nan"))
    with TILES.forced(PATHS[path]):
        INTERPRET.gemm_moe_id_fp8_128x128(**arguments | {"ids": ids}, out=out)
        lost = (ids < 0) | (ids >= 5)
        assert out.isfinite().all() and not out[lost].any() and out[~lost].any()
        none = INTERPRET.gemm_moe_id_fp8_128x128(**arguments | {"ids": ids * 0 - 1}, out=out)
    assert not none.any()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scales": torch.ones(5, 2, 2)}, r"scales is of shape \[5, 2, 2\]; allowed: \[5, 2, 3\]"),
        ({"scales": torch.ones(4, 2, 3)}, "scales is of shape"),
        ({"weights": torch.zeros(5, 200, 300)}, "weights is float32; allowed: float8_e4m3fn"),
        ({"a": torch.zeros(20, 300)}, r"a is of shape \[20, 300\]; allowed: \[21, k\]"),
    ],
)
def test_wrong_calls_are_refused(change, message):
    for backend in (CPU, INTERPRET):
        with pytest.raises(InputError, match=message):
            backend.gemm_moe_id_fp8_128x128(**call() | change)


def test_of_no_expert_there_are_no_products():
    none = {"weights": torch.zeros(0, 200, 300).to(torch.float8_e4m3fn)}
    none["scales"] = torch.ones(0, 2, 3)
    for backend in (CPU, INTERPRET):
        with pytest.raises(InputError, match="at least one expert"):
            backend.gemm_moe_id_fp8_128x128(**call() | none)


def test_stacks_decode_matrix_by_matrix():
    weights, scales = stack(3, 200, 300)
    got = Fp8Blocks(weights, scales).dequantize()
    want = [decoded(*parts) for parts in zip(weights, scales, strict=True)]
    assert torch.equal(got.double(), torch.stack(want).float().double())


def test_kernels_multiply_what_the_directory_holds(tmp_path):
    tiny(tmp_path, "qwen3_moe")
    ours, ids = load_model(tmp_path, INTERPRET), tokens(9)
    experts = ours.weights.layers[1].mlp
    assert isinstance(experts, Fp8Experts) and len(experts.matrices) == 3
    stored = Fp8Files(open_safetensors(tmp_path))
    for part in ("gate", "up", "down"):
        one = stored[f"model.layers.1.mlp.experts.2.{part}_proj.weight"]
        held = getattr(experts, part)
        assert torch.equal(bits(held.weight)[2], bits(one.weight))
        assert torch.equal(held.scales[2], one.scales)
    got = run(ours, ids[:6], ids[6:])
    by_definition = Llama(ours.config, ours.weights, CPU, torch.float32)
    torch.testing.assert_close(got, run(by_definition, ids[:6], ids[6:]), rtol=1e-2, atol=1e-2)
