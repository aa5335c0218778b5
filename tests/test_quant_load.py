"""Packed weights from raw bytes: what they hold, and which calls are refused."""

import mmap

import numpy as np
import pytest
import torch

from ferrum_triton import InputError, get_backend
from ferrum_triton.models.linear import matmul
from ferrum_triton.quant import (
    FORMATS,
    FusedTensor,
    QuantizedTensor,
    load_quant,
    load_quant_experts,
    load_quant_fused,
    quantize_blocks,
)
from ferrum_triton.testing import assert_close
from ferrum_triton.types import GgufQuantType
from tests.harness import BACKENDS

K = 256
KINDS = pytest.mark.parametrize("kind", FORMATS)


def packed(kind, *rows, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return quantize_blocks(torch.randn(*rows, K, generator=generator), FORMATS[kind])


def raw(blocks):
    return blocks.numpy().tobytes()


@KINDS
def test_bytes_become_the_matrix_they_hold(kind):
    blocks = packed(kind, 5)
    loaded = load_quant(kind, raw(blocks), 5, K)
    assert loaded.shape == (5, K) and loaded.kind == kind
    assert torch.equal(loaded.blocks, blocks)
    stack = packed(kind, 3, 5)
    loaded = load_quant_experts(kind, raw(stack), 3, 5, K)
    assert loaded.shape == (3, 5, K)
    assert torch.equal(loaded.blocks, stack)


def test_any_holder_of_bytes_will_do():
    blocks = packed("Q6_K", 4)
    data = raw(blocks)
    with mmap.mmap(-1, len(data)) as mapping:
        mapping.write(data)
        holders = [data, bytearray(data), memoryview(data), mapping, np.frombuffer(data, "<u2"),
                   blocks, blocks.view(-1), blocks[None]]  # fmt: skip
        for holder in holders:
            loaded = load_quant("Q6_K", holder, 4, K)
            assert torch.equal(loaded.blocks, blocks)
            del loaded, holder  # the mapping closes only when no view is left
        holders.clear()
    assert load_quant(GgufQuantType("Q6_K"), data, 4, K).kind == "Q6_K"
    assert load_quant("Q6_K", data, 4, K, device="meta").device.type == "meta"


def test_a_tensor_is_not_copied():
    blocks = packed("Q4_0", 4)
    assert load_quant("Q4_0", blocks, 4, K).blocks.data_ptr() == blocks.data_ptr()
    data = bytearray(raw(blocks))
    loaded = load_quant("Q4_0", data, 4, K)
    data[0] ^= 1
    assert loaded.blocks[0, 0] == data[0]


@pytest.mark.parametrize("sizes", [(0, K), (3, 0), (0, 0)])
def test_empty_matrices(sizes):
    assert load_quant("Q4_K", b"", *sizes).shape == sizes
    assert load_quant_experts("Q4_K", b"", 2, *sizes).shape == (2, *sizes)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_tokens", [0, 2, 9])
@pytest.mark.parametrize("backend_name", BACKENDS)
def test_fused_parts_fill_their_columns(backend_name, num_tokens, dtype):
    """One output of the columns of all, and nothing beside it is written."""
    backend = get_backend(backend_name)
    sizes = {"Q4_K": 6, "Q6_K": 3, "Q8_0": 1}
    parts = [(kind, packed(kind, rows, seed=rows), rows) for kind, rows in sizes.items()]
    weight = load_quant_fused(parts, K, device=backend.device)
    assert weight.shape == (10, K)
    assert weight.columns == (slice(0, 6), slice(6, 9), slice(9, 10))
    a = torch.randn(num_tokens, K).to(backend.device, dtype)
    want = a.double() @ weight.dequantize(torch.float32).double().T
    assert_close(matmul(backend, a, weight), want, scale=K**0.5)
    wide = torch.full((num_tokens, 14), 7.0, dtype=dtype, device=backend.device)
    assert_close(matmul(backend, a, weight, out=wide[:, 2:12]), want, scale=K**0.5)
    assert (wide[:, :2] == 7).all() and (wide[:, 12:] == 7).all()


def test_neighbours_of_one_kind_are_joined():
    kinds = ["Q4_K", "Q4_K", "Q6_K", "Q4_K"]
    blocks = [packed(kind, i + 1, seed=i) for i, kind in enumerate(kinds)]
    parts = [(kind, raw(b), len(b)) for kind, b in zip(kinds, blocks, strict=True)]
    weight = load_quant_fused(parts, K)
    assert [part.kind for part in weight.parts] == ["Q4_K", "Q6_K", "Q4_K"]
    assert [part.shape[0] for part in weight.parts] == [3, 3, 4]
    apart = [QuantizedTensor(b, kind).dequantize() for b, kind in zip(blocks, kinds, strict=True)]
    assert torch.equal(weight.dequantize(), torch.cat(apart))
    assert weight.to("meta").device.type == "meta"


def test_dense_parts_stay_dense():
    dense = torch.randn(2, K)
    weight = FusedTensor.of([dense, dense, QuantizedTensor(packed("Q8_0", 3), "Q8_0"), dense])
    assert [part.shape[0] for part in weight.parts] == [4, 3, 2]
    assert torch.equal(weight.dequantize()[:2], dense)
    a = torch.randn(3, K)
    got = matmul(get_backend("cpu"), a, weight)
    torch.testing.assert_close(got, a @ weight.dequantize().T, rtol=1e-4, atol=1e-3)


DATA = bytes(4 * FORMATS["Q4_K"].row_bytes(K))


@pytest.mark.parametrize(
    ("call", "argument", "got"),
    [
        (lambda: load_quant("Q4_J", DATA, 4, K), "kind", "Q4_J"),
        (lambda: load_quant(7, DATA, 4, K), "kind", "7"),
        (lambda: load_quant("Q4_K", DATA[:-1], 4, K), "data", "575 bytes"),
        (lambda: load_quant("Q4_K", DATA + b"\0", 4, K), "data", "577 bytes"),
        (lambda: load_quant("Q6_K", DATA, 4, K), "data", "576 bytes"),
        (lambda: load_quant("Q4_K", DATA, 4, K + 32), "num_cols", "288"),
        (lambda: load_quant("Q4_K", DATA, -4, -K), "data", "-256"),
        (lambda: load_quant("Q4_K", [1, 2], 4, K), "data", "unreadable"),
        (lambda: load_quant("Q4_K", "text", 4, K), "data", "unreadable"),
        (lambda: load_quant("Q4_K", None, 4, K), "data", "unreadable"),
        (lambda: load_quant("Q4_K", memoryview(DATA)[::2], 2, K), "data", "unreadable"),
        (lambda: load_quant("Q4_K", torch.zeros(576), 4, K), "data", "float32"),
        (lambda: load_quant("Q4_K", torch.zeros(2, 576).byte().T, 8, K), "data", "strides"),
        (lambda: load_quant_experts("Q4_K", DATA, 4, 2, K), "data", "576 bytes"),
        (lambda: load_quant_experts("Q4_K", DATA, -1, 4, K), "data", "-1"),
        (lambda: load_quant_fused([], K), "parts", "empty"),
        (lambda: load_quant_fused([("Q4_K", DATA, 4), ("Q6_K", DATA, 4)], K), "parts[1]", "576"),
        (lambda: load_quant_fused([("Q4_K", DATA, 4), ("IQ1", DATA, 4)], K), "parts[1]", "IQ1"),
        (lambda: FusedTensor(()), "parts", "empty"),
        (lambda: FusedTensor((torch.zeros(2, 3), torch.zeros(2, 4))), "parts", "[2, 4]"),
        (lambda: FusedTensor((torch.zeros(2, 3, 3),)), "parts", "[2, 3, 3]"),
    ],
)
def test_wrong_loads_are_refused(call, argument, got):
    with pytest.raises(InputError) as error:
        call()
    assert error.value.argument == argument
    assert got in error.value.got and error.value.allowed and error.value.advice
