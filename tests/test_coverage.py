"""No name of the trait is lost, and every call the table promises can be made as written."""

import ast
import inspect
from collections import Counter
from pathlib import Path

import pytest
import torch

import ferrum_triton
from docs.coverage.render import DOCUMENT, ROOTS, TABLE, counts, read_names, render
from ferrum_triton import OPS, get_backend, quant
from ferrum_triton.quant import FORMATS, QuantizedTensor, quantize_blocks
from ferrum_triton.runtime import buffers, context, kv_cache, timer
from ferrum_triton.runtime.collective import Collective
from ferrum_triton.runtime.graph import Graph

# Families of ops whose names may be planned: none is left.
FAMILIES: set[str] = set()
TESTS = Path(__file__).parent
MAPPED = [pytest.param(entry, id=f"{entry.where}.{entry.name}") for entry in TABLE if entry.call]


def experts():
    weights = torch.randn(3, 5, 64)
    return QuantizedTensor(quantize_blocks(weights, FORMATS["Q8_0"]), "Q8_0")


def paged():
    sizes = {"num_layers": 1, "num_blocks": 2, "block_size": 4, "num_seqs": 1}
    return kv_cache.PagedKvCache(**sizes, max_blocks_per_seq=2, num_kv_heads=1, head_dim=8)


INSTANCES = {
    "backend": get_backend("cpu"),
    "context": context.Context(),
    "device_scope": context.device_scope,
    "timer": timer.Timer(context.Context()),
    "Timer": timer.Timer,
    "Context": context.Context,
    "buffers": buffers,
    "graph": Graph(),
    "cache": kv_cache.KvCache(num_kv_heads=1, head_dim=8, capacity=4),
    "paged": paged(),
    "KvCache": kv_cache.KvCache,
    "PagedKvCache": kv_cache.PagedKvCache,
    "collective": Collective(),
    "types": ferrum_triton.types,
    "quant": quant,
    "QuantizedTensor": QuantizedTensor,
    "experts": experts(),
    "Backend": ferrum_triton.Backend,
    "get_backend": get_backend,
    "torch": torch,
}


def resolve(node):
    """What a dotted name of the table is."""
    if isinstance(node, ast.Attribute):
        return getattr(resolve(node.value), node.attr)
    return INSTANCES[node.id]


def test_every_name_has_one_entry():
    listed = Counter((entry.name, entry.where) for entry in TABLE)
    assert listed == Counter(read_names().keys())
    assert set(read_names().values()) == {"required", "later"}
    assert len(read_names()) > 200


def test_a_name_is_mapped_or_planned():
    for entry in TABLE:
        assert bool(entry.call) != bool(entry.family), entry
        assert bool(entry.call) == bool(entry.test), entry
        if entry.family:
            assert entry.family in FAMILIES, entry
            assert entry.name not in OPS, f"{entry.name} is an op now: map it"


def test_counts_add_up():
    names, totals = read_names(), counts()
    for status in ("required", "later"):
        assert sum(totals[status].values()) == list(names.values()).count(status)
        assert totals[status]["mapped"] > totals[status]["planned"]
    table = render().split("The first word")[0]
    assert (
        f"| required | {totals['required']['mapped']} | {totals['required']['planned']} |" in table
    )


@pytest.mark.parametrize("entry", MAPPED)
def test_calls_resolve(entry):
    """The name exists, and takes the arguments the table gives it."""
    node = ast.parse(entry.call, mode="eval").body
    target = resolve(node.func if isinstance(node, ast.Call) else node)
    assert target is not None
    if isinstance(node, ast.Call):
        keywords = {keyword.arg: None for keyword in node.keywords}
        if target is not torch.cat:
            inspect.signature(target).bind(*node.args, **keywords)
    name = entry.call.removeprefix("backend.").split("(")[0]
    if entry.call.startswith("backend.") and name not in ("supports", "name"):
        assert name in OPS
        parameters = list(OPS[name].signature.parameters)
        for given, wanted in zip(node.args, parameters, strict=False):
            if isinstance(given, ast.Name) and given.id in parameters:
                assert given.id == wanted, f"{given.id} is given as {wanted}"


@pytest.mark.parametrize("entry", MAPPED)
def test_tests_exist(entry):
    text = (TESTS / entry.test).read_text()
    if entry.test == "test_ops.py":
        assert entry.call.removeprefix("backend.").split("(")[0] in OPS
    else:
        word = ast.parse(entry.call, mode="eval").body
        word = word.func if isinstance(word, ast.Call) else word
        last = word.attr if isinstance(word, ast.Attribute) else word.id
        assert last in text, f"{entry.test} does not mention {last}"


def test_every_root_is_explained_and_used():
    used = {entry.call.split("(")[0].split(".")[0] for entry in TABLE if entry.call}
    assert set(ROOTS) == set(INSTANCES) == used


def test_document_is_current():
    assert DOCUMENT.read_text() == render(), "run python -m docs.coverage.render"
    for name, where in read_names():
        assert f"`{name}`" in DOCUMENT.read_text(), (name, where)


def test_gate_and_up_are_concatenated():
    gate, up = torch.randn(3, 4), torch.randn(3, 4)
    packed = torch.cat((gate, up), dim=-1)
    want = torch.nn.functional.silu(gate) * up
    assert torch.allclose(get_backend("cpu").fused_silu_mul_split(packed), want, atol=1e-6)


def test_expert_stacks_keep_their_shape():
    """num_experts, n_rows and n_cols are the shape of the packed weights."""
    stack = experts()
    assert stack.shape == (3, 5, 64)
    one = QuantizedTensor(stack.blocks[1], stack.kind)
    assert torch.equal(one.dequantize(), stack.dequantize()[1])
    assert not torch.equal(one.dequantize(), stack.dequantize()[0])
