"""The bytes and operations that benches count, against plain loops over what a call does."""

import pytest
import torch

from ferrum_triton.quant import quantize_rows
from ferrum_triton.registry import OPS
from ferrum_triton.testing import TensorFactory
from tests.harness import as_tuple, clone, sample, typical_axes

HEADS, GROUP, WIDTH = 2, 3, 16  # KV heads, queries of each, head_dim


def nbytes(*tensors):
    return sum(t.numel() * t.element_size() for t in tensors)


def counts(name, arguments, outputs=()):
    """Operations and bytes of a call."""
    op = OPS[name]
    bound = op.signature.bind(**arguments)
    bound.apply_defaults()
    return op.operations(bound.arguments), op.bytes_moved(bound.arguments, outputs)


def seen(first, count, keys, window=0):
    """For each query, the keys it sees."""
    positions = [first + i for i in range(count)]
    return [
        {key for key in range(keys) if key <= at and (not window or key > at - window)}
        for at in positions
    ]


@pytest.mark.parametrize("window", [0, 3])
@pytest.mark.parametrize("keys", [5, 9])
def test_flash_attention(window, keys):
    q = torch.empty(2, HEADS * GROUP, 5, WIDTH, dtype=torch.float16)
    k, v = (torch.empty(2, HEADS, 12, WIDTH, dtype=torch.float16) for _ in range(2))
    visible = seen(keys - 5, 5, keys, window)
    operations, moved = counts(
        "flash_attention", {"q": q, "k": k, "v": v, "kv_len": keys, "sliding_window": window}
    )
    heads = 2 * HEADS * GROUP
    assert operations == heads * sum(map(len, visible)) * 2 * 2 * WIDTH
    read = len(set.union(*visible))
    assert moved == 2 * nbytes(q) + 2 * 2 * HEADS * read * WIDTH * 2


@pytest.mark.parametrize("dtype", [torch.float16, torch.int8])
@pytest.mark.parametrize("window", [0, 6])
def test_paged_attention(window, dtype):
    lengths, new = [9, 20], 2
    pool = torch.empty(8, HEADS, 8, WIDTH, dtype=dtype)
    scales = torch.empty(8, HEADS, 8, dtype=torch.float32) if dtype == torch.int8 else None
    tables = torch.arange(8, dtype=torch.int32).view(2, 4)
    q = torch.empty(2, new, HEADS * GROUP, WIDTH, dtype=torch.float16)
    visible = [seen(length - new, new, length, window) for length in lengths]
    read = sum(len(set.union(*each)) for each in visible)
    pairs = sum(len(keys) for each in visible for keys in each)
    per_key = HEADS * 2 * (WIDTH * pool.element_size() + (4 if scales is not None else 0))
    shared = {"k_cache": pool, "v_cache": pool, "block_tables": tables, "sliding_window": window}
    shared |= {"k_scales": scales, "v_scales": scales}
    lens = torch.tensor(lengths, dtype=torch.int32)
    _, moved = counts("paged_decode_attention", {"q": q, "kv_lens": lens, **shared})
    assert moved == 2 * nbytes(q) + read * per_key
    if scales is None:
        call = {
            "q": q.flatten(0, 1),
            "cu_seqlens_q": torch.tensor([0, new, 2 * new], dtype=torch.int32),
            "pos_offsets": lens - new,
            **shared,
        }
        operations, moved = counts("paged_varlen_attention", call)
        assert operations == HEADS * GROUP * pairs * 2 * 2 * WIDTH
        assert moved == 2 * nbytes(q) + read * per_key


def test_mla_attention():
    rank, rope, heads = 32, 16, 4
    q = torch.empty(2, 1, heads, rank + rope, dtype=torch.float16)
    cache = torch.empty(6, 8, rank + rope, dtype=torch.float16)
    tables = torch.arange(6, dtype=torch.int32).view(2, 3)
    call = {"q": q, "cache": cache, "block_tables": tables, "kv_lora_rank": rank}
    call |= {"kv_lens": torch.tensor([24, 24], dtype=torch.int32), "softmax_scale": 1.0}
    operations, moved = counts("mla_attention", call)
    keys = 3 * 8
    assert operations == 2 * heads * keys * (2 * (rank + rope) + 2 * rank)
    assert moved == nbytes(q) + 2 * heads * rank * 2 + 2 * keys * (rank + rope) * 2


def dense_product(m, n, k):
    """Multiplications and additions of a product."""
    return sum(2 for _ in range(m) for _ in range(n)) * k


@pytest.mark.parametrize("name", ["gemm_quant", "linear_quant"])
def test_packed_products(name):
    a, blocks = torch.empty(9, 256), quantize_rows(torch.randn(5, 256), "Q4_K")
    y = torch.empty(9, 5)
    operations, moved = counts(name, {"a": a, "blocks": blocks, "kind": "Q4_K"}, [y])
    assert operations == dense_product(9, 5, 256)
    assert moved == nbytes(a, blocks, y)


@pytest.mark.parametrize("wide", [False, True])
def test_dense_products(wide):
    a, b = torch.empty(9, 7, dtype=torch.float16), torch.empty(5, 7, dtype=torch.float16)
    y = torch.empty(9, 5, dtype=torch.float32 if wide else torch.float16)
    operations, moved = counts("gemm", {"a": a, "b": b, "wide": wide}, [y])
    assert operations == dense_product(9, 5, 7)
    assert moved == nbytes(a, b, y)


@pytest.mark.parametrize("num_tokens", [2, 12])
def test_products_of_experts(num_tokens):
    num_experts, top_k, n, k = 8, 2, 5, 256
    blocks = quantize_rows(torch.randn(num_experts * n, k), "Q4_K").view(num_experts, n, -1)
    a = torch.empty(num_tokens, k, dtype=torch.float16)
    ids = torch.zeros(num_tokens, top_k, dtype=torch.int32)
    pairs = num_tokens * top_k
    read = min(pairs, num_experts) * nbytes(blocks[0])
    written = pairs * n * 2
    _, moved = counts("gemv_quant_moe_id", {"a": a, "blocks": blocks, "ids": ids, "kind": "Q4_K"})
    assert moved == nbytes(a, ids) + read + written
    weights = torch.empty(num_tokens, top_k)
    call = {"a": a, "blocks": blocks, "ids": ids, "weights": weights, "kind": "Q4_K"}
    _, moved = counts("gemv_quant_moe_id_sum", call)
    assert moved == nbytes(a, ids, weights) + read + num_tokens * n * 2
    both = {"gate_blocks": blocks, "up_blocks": blocks, "gate_kind": "Q4_K", "up_kind": "Q4_K"}
    _, moved = counts("gemv_quant_moe_id_gate_up_silu", {"a": a, "ids": ids, **both})
    assert moved == nbytes(a, ids) + 2 * read + written
    buckets = torch.zeros(num_experts, pairs, dtype=torch.int32)
    tpe = torch.zeros(num_experts, dtype=torch.int32)
    call = {"a": a, "bucket_ids": buckets, "tpe": tpe, "top_k": top_k}
    operations, moved = counts(
        "gemm_quant_moe_id", call | {"blocks": blocks, "kind": "Q4_K"}
    )  # fmt: skip
    assert operations == dense_product(pairs, n, k)
    assert moved == nbytes(a, tpe) + pairs * 4 + read + written
    operations, moved = counts("gemm_quant_moe_id_gate_up_silu", call | both)
    assert operations == 2 * dense_product(pairs, n, k)
    assert moved == nbytes(a, tpe) + pairs * 4 + 2 * read + written


EVERY_TENSOR = [name for name, op in OPS.items() if op._traffic is None]


@pytest.mark.parametrize("name", EVERY_TENSOR)
def test_every_tensor_once(name):
    """Inputs are read once, what is changed in place is read and written, outputs are written."""
    op = OPS[name]
    arguments = sample(op, op.dtypes[0], "cpu", 2, **typical_axes(op))
    outputs = as_tuple(op.fake(**clone(arguments)))
    inputs = [value for value in arguments.values() if isinstance(value, torch.Tensor)]
    changed = [arguments[n] for n in op.mutates if arguments[n] is not None]
    assert op.bytes_moved(arguments, outputs) == nbytes(*inputs, *changed, *outputs)


def test_rows_that_are_looked_up():
    ids = torch.tensor([1, 1, 3])
    table = torch.empty(9, 32, dtype=torch.float16)
    y = torch.empty(3, 32, dtype=torch.float16)
    assert counts("embedding_lookup_dev", {"table": table, "ids": ids}, [y])[1] == nbytes(
        table[:3], y, ids
    )
    blocks = quantize_rows(torch.randn(9, 256), "Q4_K")
    y = torch.empty(3, 256, dtype=torch.float16)
    call = {"blocks": blocks, "ids": ids, "kind": "Q4_K", "dtype": torch.float16}
    assert counts("embedding_lookup_quant", call, [y])[1] == nbytes(blocks[:3], ids, y)


def drawn(name, **axes):
    """An op's bytes and the call that moves them, in float16."""
    op = OPS[name]
    call = op.make_sample(TensorFactory(torch.float16, "cpu"), **axes)
    return op.bytes_moved(call, ()), call


@pytest.mark.parametrize("placement", ["slots", "single"])
@pytest.mark.parametrize("cache_dtype", [None, torch.int8])
def test_tokens_that_are_appended(placement, cache_dtype):
    """Written in the pool's dtype, with a scale for each head of K and V if that is quantised."""
    axes = {"num_tokens": 5, "num_kv_heads": 2, "head_dim": 16, "placement": placement}
    axes["cache_dtype"] = cache_dtype
    moved, call = drawn("kv_cache_append_paged", **axes)
    written = 2 * 5 * 2 * 16 * call["k_cache"].element_size()
    written += 2 * 5 * 2 * call["k_scales"].element_size() if cache_dtype else 0
    assert moved == nbytes(call["k"], call["v"]) + written
    moved, call = drawn("split_qkv_norm_rope_into_paged_cache", group_size=3, **axes)
    tables = nbytes(call["cos"][:5], call["sin"][:5])
    assert moved == nbytes(call["qkv"]) + 5 * 6 * 16 * 2 + written + tables


@pytest.mark.parametrize("window", [0, 7])
def test_a_token_that_is_appended_and_attends(window):
    """The new key is written, those before it in sight are read."""
    axes = {"batch": 3, "num_kv_heads": 2, "group_size": 3, "head_dim": 16, "max_len": 40}
    axes |= {"sliding_window": window}
    moved, call = drawn("qkv_paged_decode_attention", **axes)
    keys = int(call["kv_lens"].clamp(max=window or 40).sum())
    tables = nbytes(call["cos"][:3], call["sin"][:3])
    size = call["qkv"].element_size()
    assert moved == nbytes(call["qkv"]) + size * (3 * 6 * 16 + keys * 2 * 2 * 16) + tables


def test_tokens_that_are_appended_to_rows():
    axes = {"num_tokens": 5, "num_kv_heads": 2, "head_dim": 16}
    moved, call = drawn("kv_cache_append_head_major", **axes)
    assert moved == 2 * nbytes(call["k"], call["v"])
    moved, call = drawn("split_qkv_norm_rope_into_cache", group_size=3, **axes)
    assert moved == 2 * nbytes(call["qkv"]) + nbytes(call["cos"][:5], call["sin"][:5])


def test_elements_that_are_touched():
    """Of a longer tensor only those that a call reads or writes."""
    moved, _ = drawn("copy_slice", length=7, src_offset=3, dst_offset=5)
    assert moved == 7 * (2 + 2)
    moved, call = drawn("embedding_lookup", num_tokens=3, vocab_size=9, hidden_size=32)
    assert moved == 2 * nbytes(call["table"][:3]) + 3 * 8
    for listed, touched in ((3, 3), (50, 2 * 20)):
        moved, call = drawn(
            "repetition_penalty_inplace", num_rows=2, vocab_size=20, num_listed=listed
        )
        lists = nbytes(call["row_offsets"], call["token_ids"], call["penalties"])
        assert moved == lists + 2 * touched * 2
    axes = {"num_experts": 8, "intermediate_size": 24, "top_k": 2}
    for num_tokens, rows in ((3, 6), (9, 8)):
        moved, call = drawn("clamped_swiglu_moe_id", num_tokens=num_tokens, **axes)
        biases = nbytes(call["gate_bias"][:rows], call["up_bias"][:rows])
        assert moved == nbytes(call["gate"], call["up"], call["ids"], call["gate"]) + biases
