"""Packed weights whose columns lie in another order than activations: GPTQ's ``desc_act``."""

import pytest
import torch

from ferrum_triton import get_backend
from ferrum_triton.files.int_weights import Packing
from ferrum_triton.models import load_model
from ferrum_triton.models.experts import DenseExperts
from ferrum_triton.models.linear import (
    Linear,
    Norm,
    apply,
    apply_to_norm,
    gated_norm,
    norm_after,
    stacked,
)
from ferrum_triton.quant import FusedTensor, QuantizedTensor, Reordered, quantize_rows
from ferrum_triton.quant.finite import count_out_of_range
from tests.test_int_weights import GPTQ, compressed, decoded, drawn, exact, gptq, packed_model, read
from tests.test_models import run, tokens


def seeded(seed):
    return torch.Generator().manual_seed(seed)


def acted(module, order, n, bits=4, symmetric=True, seed=0):
    """As AutoGPTQ packs a module whose columns it took in an order; and its weights in float64."""
    k = len(order)
    q, zeros, scales = drawn(bits, n, k, 32, symmetric, seed)
    place = order.argsort()
    tensors = gptq(module, q[:, place], zeros, scales, bits)
    tensors[f"{module}.g_idx"] = (place // 32).to(torch.int32)
    return tensors, exact(q, zeros, scales)[:, place]


@pytest.mark.parametrize(
    ("bits", "symmetric", "kind"), [(4, True, "Q4_0"), (4, False, "Q4_Z"), (8, True, "Q8_0")]
)
def test_weights_stay_packed_in_the_order_of_their_groups(tmp_path, bits, symmetric, kind):
    order = torch.randperm(128, generator=seeded(3))
    tensors, weights = acted("m", order, 8, bits, symmetric)
    found = read(tmp_path, tensors, Packing("gptq", bits, symmetric, True))
    assert isinstance(found, Reordered) and (found.kind, found.shape) == (kind, (8, 128))
    assert torch.equal(found.dequantize().double(), weights)
    assert torch.equal(found.weight.dequantize().double(), weights[:, found.order])
    assert count_out_of_range(found, torch.float32) == 0


def test_weights_of_compressed_tensors_may_be_out_of_order_too(tmp_path):
    place = torch.randperm(128, generator=seeded(4))
    q, zeros, scales = drawn(4, 8, 128, 32, False)
    tensors = compressed("m", q[:, place], zeros, scales, 4, symmetric=False)
    tensors["m.weight_g_idx"] = (place // 32).to(torch.int32)
    found = read(tmp_path, tensors, Packing("compressed-tensors", 4, False))
    assert isinstance(found, Reordered) and found.kind == "Q4_Z"
    assert torch.equal(found.dequantize().double(), exact(q, zeros, scales)[:, place])


def test_groups_of_several_sizes_are_decoded(tmp_path):
    tensors, _ = acted("m", torch.arange(128), 8)
    tensors["m.g_idx"][5] = 3
    found = read(tmp_path, tensors, Packing("gptq", 4, True, True))
    assert isinstance(found, torch.Tensor)
    q, zeros, scales = drawn(4, 8, 128, 32, True)
    wide = exact(q, zeros, scales)
    wide[:, 5] = scales[:, 3].double() * (q[:, 5] - 8)
    assert torch.equal(decoded(found), wide)


def parts_of(kinds, k=256, seed=0):
    """Packed matrices of one order, and what they are without it."""
    order = torch.randperm(k, generator=seeded(seed + 9))
    rows = [torch.randn(32, k, generator=seeded(seed + i)) / 16 for i in range(len(kinds))]
    packed = [
        QuantizedTensor(quantize_rows(w, kind), kind) for w, kind in zip(rows, kinds, strict=True)
    ]
    parts = [Reordered(w, order) for w in packed]
    return parts, torch.cat([part.dequantize() for part in parts])


@pytest.mark.parametrize("kinds", [("Q4_0", "Q4_0"), ("Q4_0", "Q5_0"), ("Q4_Z",) * 3, ("Q8_0",)])
@pytest.mark.parametrize("in_planes", [False, True])
@pytest.mark.parametrize("m", [1, 3, 20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layers_take_activations_in_their_order(kinds, in_planes, m, dtype):
    """Alone, after a norm, and between two."""
    backend = get_backend("interpret")
    parts, dense = parts_of(kinds)
    layer = stacked(parts, (), dtype, in_planes=in_planes, apart=True)
    assert layer.order is not None
    plain = Linear(dense)
    x = torch.randn(m, 256, generator=seeded(5)).to(dtype)

    def normed(call, linear, x):
        norm = Norm(torch.ones_like(x), x, torch.ones(256), 1e-6)
        return call(backend, norm, linear)

    def chained(linear, x):
        residual = torch.ones(m, linear.weight.shape[0], dtype=x.dtype)
        weight = torch.ones(residual.shape[1])
        norm = norm_after(backend, x, linear, residual, weight, 1e-6, None)
        return norm.values(backend)

    calls = [
        lambda linear, x: apply(backend, x, linear),
        lambda linear, x: normed(apply_to_norm, linear, x),
        chained,
    ]
    if len(kinds) == 2:
        calls.append(lambda linear, x: normed(gated_norm, linear, x))
    tolerance = {torch.float32: 1e-4, torch.bfloat16: 3e-2}[dtype]
    for call in calls:
        got, want = call(layer, x), call(plain, x.float())
        assert (got - want).norm() <= tolerance * want.norm()


def test_a_norm_before_such_a_layer_is_closed():
    """One that is open has its columns in its own order."""
    backend, x = get_backend("interpret"), torch.randn(1, 256).bfloat16()
    parts, _ = parts_of(("Q4_0",) * 8)
    layer = stacked(parts, (), x.dtype, in_planes=True)
    norm = norm_after(backend, x, layer, torch.ones(1, 256), torch.ones(256), 1e-6, layer)
    assert isinstance(norm, Norm) and apply_to_norm(backend, norm, layer).shape == (1, 256)


def test_what_is_moved_takes_its_order_along():
    (part,), _ = parts_of(("Q4_0",))
    assert part.to("meta").order.is_meta and part.to("meta").weight.blocks.is_meta


def test_matrices_of_several_orders_are_decoded():
    (first, *_), (second, *_) = (parts_of(("Q4_0",), seed=i)[0] for i in (0, 50))
    layer = stacked([first, second], (), torch.float32)
    assert layer.order is None and isinstance(layer.weight, torch.Tensor)
    want = torch.cat([first.dequantize(), second.dequantize()])
    assert torch.equal(layer.weight, want)
    other = torch.randn(4, 256)
    layer = stacked([first, other], (), torch.float32)
    assert layer.order is None and torch.equal(layer.weight[32:], other)


def test_rows_in_another_order_take_their_biases_along():
    parts, dense = parts_of(("Q4_0", "Q4_Z"))
    rows, biases = torch.randperm(32), list(torch.randn(2, 32))
    layer = stacked(parts, biases, torch.float32, rows=rows)
    assert isinstance(layer.weight, FusedTensor)
    want = torch.cat([dense[:32][rows], dense[32:][rows]])[:, layer.order]
    assert torch.equal(layer.weight.dequantize(), want)
    assert torch.equal(layer.bias, torch.cat([bias[rows] for bias in biases]))


@pytest.mark.parametrize("backend_name", ["cpu", "interpret"])
@pytest.mark.parametrize("family", ["qwen3", "qwen2", "qwen3_moe"])
def test_models_equal_transformers(tmp_path, family, backend_name):
    """Q, K and V have one order, as what their input says; so have gate and up."""
    transformers = pytest.importorskip("transformers", reason="transformers is the oracle here")
    sizes = {"vocab_size": 96, "hidden_size": 64, "num_hidden_layers": 2, "head_dim": 32}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    if family == "qwen3":
        config = transformers.Qwen3Config(**sizes, intermediate_size=96)
    elif family == "qwen2":
        config = transformers.Qwen2Config(**sizes | {"hidden_size": 128}, intermediate_size=96)
    else:
        experts = {"moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2}
        config = transformers.Qwen3MoeConfig(**sizes, **experts, norm_topk_prob=True)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    for name, parameter in model.named_parameters():
        if name.endswith(".bias"):
            torch.nn.init.normal_(parameter)

    def pack(module, shape, seed):
        kept, last = module.rsplit(".", 1)
        place = {"o_proj": 1, "down_proj": 2, "gate_proj": 3, "up_proj": 3}.get(last, 4)
        order = torch.randperm(shape[1], generator=seeded(hash(kept) % 1000 * 8 + place))
        tensors, weights = acted(module, order, shape[0], seed=seed)
        return tensors, weights.float()

    theirs = packed_model(tmp_path, model, pack, GPTQ | {"desc_act": True})
    ours, ids = load_model(tmp_path, get_backend(backend_name)), tokens(12)
    layer = ours.weights.layers[0]
    if backend_name == "interpret":
        assert isinstance(layer.attn_out.weight, QuantizedTensor), "integers stay packed"
        assert layer.qkv.weight.kind == "Q4_0" and layer.qkv.order is not None
        if family == "qwen3_moe":  # each expert has an order of its own
            assert isinstance(layer.mlp, DenseExperts)
        else:
            assert layer.mlp.down.weight.kind == "Q4_0" and layer.mlp.down.order is None
            assert layer.mlp.gate_up.order is not None
    with torch.inference_mode():
        want = theirs(ids[None]).logits[0]
    torch.testing.assert_close(run(ours, ids[:9], ids[9:]), want, rtol=1e-4, atol=1e-4)
