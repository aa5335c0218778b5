"""Laws of the elementwise, activation, layout and embedding ops."""

from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional as F

from ferrum_triton import InputError, get_backend
from ferrum_triton.kernels import interpreter
from ferrum_triton.kernels.gpu import gpu_of, gpu_of_capability
from ferrum_triton.kernels.tuning import TUNABLES
from ferrum_triton.ops.embedding import check_ids
from ferrum_triton.registry import OPS
from ferrum_triton.testing import assert_close
from tests.harness import (
    BACKENDS,
    as_tuple,
    assert_call_matches,
    expected,
    place_far_apart,
    sample,
)


@pytest.fixture(params=BACKENDS)
def backend(request):
    return get_backend(request.param)


def normal(backend, *shape, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(backend.device, dtype)


def test_gelu_is_the_exact_one(backend):
    x = torch.linspace(-9, 9, 1201, device=backend.device)[None]
    y = backend.gelu(x)
    assert_close(y, F.gelu(x.double()))
    assert (y - F.gelu(x, approximate="tanh")).abs().max() > 1e-4, "that would be the tanh form"
    assert_close(y - backend.gelu(-x), x)


def test_gelu_keeps_the_bits_of_small_results(backend):
    x = torch.linspace(-12, -1, 1201, device=backend.device)[None]
    want = x.double() * torch.erfc(-x.double() * 0.5**0.5) / 2
    # What torch and GPUs take e to the power of is rounded: that alone is up to 2⁻²⁴ x² of the
    # result. numpy's exp is exact, and so shows whether the kernel's square is.
    scale = 0.25 if backend.name == "interpret" else 4
    assert_close((backend.gelu(x) / want).float(), torch.ones_like(x), scale=scale)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_gated_activations_agree_with_their_parts(backend, dtype):
    gate_up = normal(backend, 5, 2 * 200, dtype=dtype)
    gate, up = gate_up.chunk(2, dim=1)
    split = backend.fused_silu_mul_split(gate_up)
    assert_close(backend.silu_mul(gate, up), split)
    assert_close(backend.silu_mul(gate.contiguous(), up.contiguous()), split)
    wide, gate_up[:, 200:] = gate.double(), 1.0
    assert_close(backend.fused_gelu_mul_split(gate_up), F.gelu(wide))
    assert_close(backend.fused_gelu_tanh_mul_split(gate_up), F.gelu(wide, approximate="tanh"))
    assert_close(backend.gelu(gate), F.gelu(wide))
    assert_close(backend.fused_silu_mul_split(gate_up), F.silu(wide))


def test_silu_of_x_minus_silu_of_minus_x_is_x(backend):
    x, ones = normal(backend, 3, 500), torch.ones(3, 500, device=backend.device)
    assert_close(backend.silu_mul(x, ones) - backend.silu_mul(-x, ones), x)


def test_a_row_window_of_packed_buffers_is_a_view(backend):
    """What takes offsets in rows elsewhere takes views here."""
    packed, out = normal(backend, 10, 2 * 48), torch.full((9, 48), 7.0, device=backend.device)
    backend.fused_silu_mul_split(packed[3:7], out=out[2:6])
    assert_close(out[2:6], F.silu(packed[3:7, :48]) * packed[3:7, 48:])
    assert (out[:2] == 7).all()
    assert (out[6:] == 7).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_scaling_is_undone_by_its_inverse(backend, dtype):
    x = normal(backend, 7, 300, dtype=dtype)
    y = x.clone()
    backend.scale_inplace(y, 4.0)
    assert torch.equal(y, 4 * x)
    backend.scale_inplace(y, 0.25)
    assert torch.equal(y, x)
    backend.scale_inplace(y, 300**0.5)
    assert torch.equal(y, (x.float() * 300**0.5).to(dtype))


def test_adding_in_place_is_linear(backend):
    x, y = normal(backend, 4, 130), normal(backend, 4, 130, seed=1)
    total = x.clone()
    backend.add_inplace(total, y)
    assert torch.equal(total, x + y)
    backend.scaled_add_inplace(total, y, -1.0)
    assert_close(total, x)
    backend.add_bias(total, y[0])
    assert_close(total, x + y[:1])


@pytest.mark.parametrize(("dtype", "large"), [(torch.float16, 2048.0), (torch.bfloat16, 256.0)])
def test_what_is_scaled_is_not_rounded_before_the_sum(backend, dtype, large):
    """Half a step of the sum and a little more: rounded alone it is half a step, a tie."""
    total = torch.full((3, 40), large, device=backend.device, dtype=dtype)
    backend.scaled_add_inplace(total, torch.ones_like(total), 1.0 + torch.finfo(dtype).eps / 4)
    assert torch.equal(total, torch.full_like(total, large + 2))


def test_the_last_block_of_a_copy_past_int32(monkeypatch):
    """Of which the interpreter runs only that: the others are two million."""
    backend, length = get_backend("interpret"), 2**31 + 32
    far = [place_far_apart(torch.zeros(2, 1, dtype=torch.uint8), 0) for _ in range(2)]
    source, target = (x.as_strided((length,), (1,), x.storage_offset()) for x in far)
    source[-10:] = torch.arange(1, 11)
    last = SimpleNamespace(product=lambda *grid: [tuple(ids[-1] for ids in grid)])
    monkeypatch.setattr(interpreter, "itertools", last)
    backend.copy_slice(source, target)
    assert torch.equal(target[-10:], source[-10:])


def test_transposes_undo_each_other(backend):
    x = normal(backend, 3, 17, 40)
    tokens_first = backend.transpose_head_to_token(x)
    assert torch.equal(tokens_first, x.transpose(0, 1))
    assert torch.equal(backend.transpose_token_to_head(tokens_first), x)


SPLIT = {"num_tokens": 3, "intermediate_size": 2500}
TUNED = {
    "fused_silu_mul_split": SPLIT,
    "fused_gelu_mul_split": SPLIT,
    "fused_gelu_tanh_mul_split": SPLIT,
    "embedding_lookup_dev": {"num_tokens": 3, "vocab_size": 19, "hidden_size": 2500},
}


@pytest.mark.parametrize("backend_name", BACKENDS[1:])
@pytest.mark.parametrize("name", TUNED)
def test_every_candidate_computes_the_same(backend_name, name):
    backend, op, tunable = get_backend(backend_name), OPS[name], TUNABLES[name]
    arguments = sample(op, torch.float16, backend.device, 5, **TUNED[name])
    want, left = expected(op, arguments)
    gpu, shape = gpu_of(torch.device(backend.device)), [TUNED[name][dim] for dim in tunable.dims]
    for config in (*tunable.candidates(gpu, *shape), tunable.heuristic(gpu, 10**6, shape[1])):
        with tunable.forced(config):
            got = as_tuple(getattr(backend, name)(**arguments))
        assert_call_matches(op, got, arguments, want, left)


@pytest.mark.parametrize("name", ["silu_mul", "gelu", "scale_inplace", "add_bias", "add_inplace"])
def test_blocks_of_a_large_tensor(backend, name):
    """The configuration that only tensors of millions of elements get."""
    tunable, gpu = TUNABLES[name], gpu_of_capability((9, 0))
    large = tunable.heuristic(gpu, 4096, 4096)
    assert large["BLOCK_C"] > tunable.heuristic(gpu, 1, 4096)["BLOCK_C"]
    op = OPS[name]
    axes = dict(zip(op.axes, (3, 2500), strict=False))
    arguments = sample(op, torch.float16, backend.device, 5, **axes)
    want, left = expected(op, arguments)
    with tunable.forced(large):
        got = as_tuple(getattr(backend, name)(**arguments))
    assert_call_matches(op, got, arguments, want, left)


def test_embedding_is_a_product_with_one_hot_rows(backend):
    table = normal(backend, 19, 33)
    ids = torch.tensor([3, 18, 0, 3, 7], device=backend.device)
    one_hot = F.one_hot(ids, 19).to(table.dtype)
    rows = backend.embedding_lookup_dev(table, ids)
    assert torch.equal(rows, one_hot @ table)
    assert torch.equal(rows, backend.embedding_lookup(table, ids.tolist()))


def test_ids_outside_the_table_give_zeros_and_can_be_checked_for(backend):
    table = normal(backend, 19, 33)
    for bad in (-1, 19, 2**31 - 1, -(2**31)):
        ids = torch.tensor([[3, bad]], device=backend.device, dtype=torch.int32)
        rows = backend.embedding_lookup_dev(table, ids)
        assert torch.equal(rows[0, 0], table[3])
        assert torch.equal(rows[0, 1], torch.zeros_like(table[3]))
        with pytest.raises(InputError, match=str(bad)):
            check_ids(ids, 19)
    check_ids(torch.tensor([0, 18], device=backend.device), 19)
    check_ids(torch.empty(0, dtype=torch.int32, device=backend.device), 19)
