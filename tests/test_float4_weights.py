"""NVFP4 and MXFP4 of Hugging Face directories: exact, whoever packed them, or one clear error."""

import json
from fractions import Fraction

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from ferrum_triton import FileError, InputError, get_backend
from ferrum_triton.cli.inspect import describe
from ferrum_triton.files.fp4_weights import Fp4Files
from ferrum_triton.files.int_weights import Packing, packing_of, read_config
from ferrum_triton.files.packed import open_packed
from ferrum_triton.files.safetensors import open_safetensors
from ferrum_triton.models import load_model
from ferrum_triton.models.experts import PackedExperts
from ferrum_triton.quant import FORMATS, QuantizedTensor, load_mxfp4, load_nvfp4, quantize_blocks
from ferrum_triton.quant.layout import E4m3, Run
from ferrum_triton.testing import assert_close
from tests.test_int_weights import COMPRESSED, packed_model
from tests.test_models import run, tokens

FIXTURE = __file__.replace("test_float4_weights.py", "fixtures/float4_weights.safetensors")
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
E2M1 = torch.cat([E2M1, -E2M1])
# By compressed-tensors' and modelopt's names.
PACKINGS = {
    "nvfp4": Packing("compressed-tensors", 4, True, float_format="NVFP4"),
    "mxfp4": Packing("compressed-tensors", 4, True, float_format="MXFP4"),
    "modelopt": Packing("modelopt", 4, True, float_format="NVFP4"),
}
WAYS = pytest.mark.parametrize("way", PACKINGS)


def drawn(way, n, k, seed=0, *, any_scale=True):
    """Codes, scales, and what scales the whole: every byte there may be, or moderate ones."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(256, (n, k // 2), generator=generator, dtype=torch.uint8)
    if way == "mxfp4":
        low, high = (0, 253) if any_scale else (118, 124)
        scales = torch.randint(low, high, (n, k // 32), generator=generator, dtype=torch.uint8)
        return codes, scales, None
    scales = torch.randint(256 if any_scale else 0x38, (n, k // 16), generator=generator)
    scales[(scales & 0x7F) == 0x7F] = 0x31  # NaN
    whole = torch.rand(1, generator=generator) * 0.1 + 0.01
    return codes, scales.byte().view(torch.float8_e4m3fn), 1 / whole if way == "nvfp4" else whole


def exact(codes, scales, whole, way):
    """The weights in float64, which holds a product of theirs exactly: the definition."""
    values = E2M1[torch.stack([codes & 15, codes >> 4], -1).flatten(1).int()]
    if way == "mxfp4":
        return values * (scales.double() - 127).exp2().repeat_interleave(32, 1)
    products = values * scales.double().repeat_interleave(16, 1)
    return products / whole.double() if way == "nvfp4" else products * whole.double()


def tensors_of(module, codes, scales, whole, way):
    """As a checkpoint has them, with scales of activations that are of no use here."""
    if way == "modelopt":
        found = {"weight": codes, "weight_scale": scales, "weight_scale_2": whole[0].clone()}
        return {
            f"{module}.{part}": t for part, t in (found | {"input_scale": 3 * whole[0]}).items()
        }
    found = {"weight_packed": codes, "weight_scale": scales}
    if way == "nvfp4":
        found |= {"weight_global_scale": whole, "input_global_scale": 3 * whole}
    return {f"{module}.{part}": t for part, t in found.items()}


def read(folder, tensors, way, name="m.weight"):
    save_file(tensors, folder / "model.safetensors")
    return Fp4Files(open_safetensors(folder), PACKINGS[way])[name]


def decoded(found):
    return found.dequantize() if isinstance(found, QuantizedTensor) else found


def test_every_byte_is_the_number_it_is_in_e4m3():
    block = torch.arange(256, dtype=torch.uint8)
    want = block.view(torch.float8_e4m3fn).float() / 2
    want[0x7F], want[0xFF] = 240.0, -240.0
    read = E4m3((Run(0, 8, lanes=256),))
    assert torch.equal(read.read(block), want)
    known = want.abs() <= 224
    again = torch.zeros_like(block)
    read.write(again, want)
    assert torch.equal(again[known], block[known])


@WAYS
@pytest.mark.parametrize("k", [64, 192, 256, 96])
def test_weights_are_what_the_checkpoint_says(tmp_path, way, k):
    """To the bit, of every code, scale and sign there is, in planes too."""
    parts = drawn(way, 24, k, seed=k)
    found = read(tmp_path, tensors_of("m", *parts, way), way)
    assert torch.equal(decoded(found), exact(*parts, way).float())
    kind = "MXFP4" if way == "mxfp4" else "NVFP4"
    if k == 96 and kind == "NVFP4":  # whole groups, but no whole blocks
        assert isinstance(found, torch.Tensor)
        return
    assert found.kind == kind
    planes = found.in_planes()
    assert torch.equal(planes.dequantize(), found.dequantize())
    assert torch.equal(planes.as_in_file().blocks, found.blocks)
    for stored in (found, planes):
        for dtype in (torch.float32, torch.bfloat16):
            got = get_backend("interpret").dequantize(stored.blocks, stored.kind, dtype)
            assert torch.equal(got, found.dequantize().to(dtype))


def test_a_weight_is_rounded_once():
    """As a fraction of whole numbers says, where the divisor's reciprocal would be off."""
    codes = torch.full((1, 32), 0x75, dtype=torch.uint8)  # 3 and 6
    scales = torch.full((1, 4), 0.6875, dtype=torch.float8_e4m3fn)
    for divisor in (3.1000001430511475, 1344.51806640625, 7.0, 1e-3):
        divisor = float(torch.tensor(divisor))
        weight = load_nvfp4(codes, scales, divisor=divisor).dequantize()[0, 0].item()
        want = Fraction(3) * Fraction(11, 16) / Fraction(divisor)
        below, above = (
            Fraction(float(torch.nextafter(torch.tensor(weight), torch.tensor(to))))
            for to in (0.0, 1e30)
        )
        off = abs(want - Fraction(weight))
        assert off <= abs(want - below) and off <= abs(want - above)


@pytest.mark.parametrize("way", ["nvfp4", "mxfp4"])
def test_what_another_packed_is_read(tmp_path, way):
    """By compressed-tensors, as the file says; it rounds twice where a weight is rounded once."""
    with safe_open(FIXTURE, "pt") as file:
        assert "compressed-tensors" in file.metadata()["packed_by"]
    stored = {n: t for n, t in load_file(FIXTURE).items() if n.startswith(f"{way}.")}
    wanted = stored.pop(f"{way}.wanted")
    found = read(tmp_path, stored, way, f"{way}.weight")
    assert isinstance(found, QuantizedTensor)
    torch.testing.assert_close(
        found.dequantize(), wanted, rtol=0 if way == "mxfp4" else 2.0**-22, atol=0
    )


@WAYS
@pytest.mark.parametrize("planes", [False, True])
@pytest.mark.parametrize("m", [1, 3, 9])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernels_multiply_them(tmp_path, way, planes, m, dtype):
    parts = drawn(way, 20, 320, seed=m, any_scale=False)
    found = read(tmp_path, tensors_of("m", *parts, way), way)
    found = found.in_planes() if planes else found
    a = torch.randn(m, 320, generator=torch.Generator().manual_seed(1)).to(dtype)
    want = a.double() @ exact(*parts, way).T
    for backend in ("cpu", "interpret"):
        got = get_backend(backend).gemm_quant(a, found.blocks, found.kind)
        assert_close(got, want)


def test_rows_that_are_scaled_apart_are_no_planes():
    """Matrices may be stacked whose scales differ, and a row has one."""
    weight = torch.randn(3, 128)
    blocks = quantize_blocks(weight, FORMATS["NVFP4"])
    both = QuantizedTensor(
        torch.cat([blocks, quantize_blocks(9 * weight, FORMATS["NVFP4"])]), "NVFP4"
    )
    assert torch.equal(both.in_planes().dequantize(), both.dequantize())
    blocks[1, 44] ^= 1
    with pytest.raises(InputError, match="one scale d"):
        QuantizedTensor(blocks, "NVFP4").in_planes()


FP4 = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
NVFP4 = COMPRESSED | {
    "format": "nvfp4-pack-quantized",
    "config_groups": {"a": {"weights": FP4, "input_activations": FP4 | {"dynamic": "local"}}},
}
MXFP4 = COMPRESSED | {
    "format": "mxfp4-pack-quantized",
    "config_groups": {"a": {"weights": FP4 | {"strategy": "group", "group_size": 32}}},
}
MODELOPT = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]}
SETTINGS = {"nvfp4": NVFP4, "mxfp4": MXFP4, "modelopt": MODELOPT}


@WAYS
def test_settings_are_read(way):
    assert packing_of({"quantization_config": SETTINGS[way]}, "config.json") == PACKINGS[way]


@pytest.mark.parametrize("is_there", [False, True])
def test_settings_of_modelopt_may_lie_beside(tmp_path, is_there):
    beside = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4"}}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(beside))
    config = {"quantization_config": MODELOPT} if is_there else {}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert packing_of(read_config(tmp_path), tmp_path) == PACKINGS["modelopt"]


@pytest.mark.parametrize(
    ("found", "message"),
    [
        (MODELOPT | {"quant_algo": "FP8"}, "quant_algo .* 'FP8'; known: NVFP4"),
        (MODELOPT | {"quant_algo": "NVFP4_AWQ"}, "quant_algo .* 'NVFP4_AWQ'"),
        (MODELOPT | {"group_size": 32}, "group_size .* 32"),
        (MODELOPT | {"quantization": ["NVFP4"]}, "quantization of modelopt"),
        (NVFP4 | {"format": "mixed-precision"}, "format .* 'mixed-precision'"),
        (NVFP4 | {"format": "float-quantized"}, "format .* 'float-quantized'"),
        (NVFP4 | {"format": ["nvfp4-pack-quantized"]}, "format of"),
        (NVFP4 | {"config_groups": MXFP4["config_groups"]}, "strategy .* 'group'"),
        (NVFP4 | {"config_groups": COMPRESSED["config_groups"]}, "type .* 'int'"),
        (MXFP4 | {"config_groups": NVFP4["config_groups"]}, "strategy .* 'tensor_group'"),
        (
            NVFP4 | {"config_groups": {"a": {"weights": FP4}, "b": {"weights": {"num_bits": 8}}}},
            "num_bits of its quantisation is 8",
        ),
        (NVFP4 | {"config_groups": {"a": {"weights": FP4 | {"symmetric": False}}}}, "symmetric"),
    ],
)
def test_settings_that_are_not_read_are_refused(found, message):
    with pytest.raises(FileError, match=message):
        packing_of({"quantization_config": found}, "config.json")


def without(part):
    return lambda tensors: {n: t for n, t in tensors.items() if n != f"m.{part}"}


def changed(part, change):
    return lambda tensors: tensors | {f"m.{part}": change(tensors[f"m.{part}"].clone())}


def filled(value):
    return lambda t: t.fill_(value)


def as_nan(t):
    t.view(torch.uint8)[1, 2] = 0xFF
    return t


@pytest.mark.parametrize(
    ("way", "change", "message"),
    [
        ("nvfp4", without("weight_scale"), "'m.weight_scale' is missing"),
        ("nvfp4", without("weight_global_scale"), "'m.weight_global_scale' is missing"),
        ("modelopt", without("weight_scale_2"), "'m.weight_scale_2' is missing"),
        ("mxfp4", without("weight_scale"), "'m.weight_scale' is missing"),
        ("nvfp4", changed("weight_packed", lambda t: t.int()), r"is I32 \[8, 64\]"),
        ("nvfp4", changed("weight_packed", lambda t: t[0]), r"is U8 \[64\]; expected U8 \[rows"),
        ("modelopt", changed("weight", lambda t: t[:, :60].clone()), r"is U8 \[8, 60\]"),
        ("nvfp4", changed("weight_scale", lambda t: t.float()), "is F32 .*expected F8_E4M3"),
        ("mxfp4", changed("weight_scale", lambda t: t.int()), r"is I32 \[8, 4\]; expected U8"),
        ("modelopt", changed("weight_scale", lambda t: t[:7].clone()), r"is F8_E4M3 \[7, 8\]"),
        ("nvfp4", changed("weight_global_scale", lambda t: t.repeat(2)), r"is F32 \[2\]"),
        ("nvfp4", changed("weight_global_scale", lambda t: t.double()), "is F64"),
        ("nvfp4", changed("weight_global_scale", filled(0.0)), "is 0.0; expected a number"),
        ("modelopt", changed("weight_scale_2", filled(float("nan"))), "is nan; expected a number"),
        ("modelopt", changed("weight_scale_2", filled(float("inf"))), "is inf; expected a number"),
        ("nvfp4", changed("weight_global_scale", filled(-1.0)), "is -1.0; expected a number"),
        ("nvfp4", changed("weight_scale", as_nan), "weight of 'm.weight': scales is 1 times NaN"),
        ("modelopt", changed("weight_scale", as_nan), "scales is 1 times NaN"),
        ("mxfp4", changed("weight_scale", as_nan), "scales is 1 times NaN"),
    ],
)
def test_modules_that_do_not_fit_are_refused(tmp_path, way, change, message):
    parts = drawn(way, 8, 128, any_scale=False)
    with pytest.raises(FileError, match=message):
        read(tmp_path, change(tensors_of("m", *parts, way)), way)


def test_shards_that_are_cut_off_are_refused(tmp_path):
    read(tmp_path, tensors_of("m", *drawn("nvfp4", 8, 128), "nvfp4"), "nvfp4")
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-40])
    with pytest.raises(FileError, match="not a safetensors file"):
        open_safetensors(tmp_path)


@pytest.mark.parametrize(
    ("call", "argument"),
    [
        (lambda c, s: load_nvfp4(c.int(), s), "codes"),
        (lambda c, s: load_nvfp4(c[:, :5], s), "codes"),
        (lambda c, s: load_nvfp4(c, s.float()), "scales"),
        (lambda c, s: load_nvfp4(c, s[:1]), "scales"),
        (lambda c, s: load_nvfp4(c, s, factor=0.0), "factor"),
        (lambda c, s: load_nvfp4(c, s, divisor=float("nan")), "divisor"),
        (lambda c, s: load_mxfp4(c, s), "scales"),
        (lambda c, s: load_mxfp4(c[0], s), "codes"),
    ],
)
def test_wrong_calls_are_refused(call, argument):
    with pytest.raises(InputError) as error:
        call(*drawn("nvfp4", 2, 64)[:2])
    assert error.value.argument == argument


def test_scales_of_activations_and_caches_are_left_out(tmp_path):
    tensors = tensors_of("m", *drawn("modelopt", 8, 64), "modelopt")
    tensors |= {"k_proj.k_scale": torch.ones(1), "v_proj.v_scale": torch.ones(1)}
    tensors |= {"norm.weight": torch.ones(4), "head.weight": torch.ones(4, 4)}
    save_file(tensors, tmp_path / "model.safetensors")
    files = open_packed(open_safetensors(tmp_path), PACKINGS["modelopt"])
    assert {*files} == {"m.weight", "norm.weight", "head.weight"} and len(files) == 3
    assert "m.weight_scale" not in files and files.sizes() == [("NVFP4", 8 * 44, 8 * 64)]
    assert files.parts == {"m.weight", "m.weight_scale", "m.weight_scale_2"}


def packed_as(way):
    """``pack`` of ``packed_model``."""

    def pack(module, shape, seed):
        parts = drawn(way, *shape, seed, any_scale=False)
        return tensors_of(module, *parts, way), exact(*parts, way).float()

    return pack


@pytest.mark.parametrize("backend_name", ["cpu", "interpret"])
@WAYS
@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_models_equal_transformers(tmp_path, family, way, backend_name):
    transformers = pytest.importorskip("transformers", reason="transformers is the oracle here")
    sizes = {"vocab_size": 96, "hidden_size": 64, "num_hidden_layers": 2, "head_dim": 32}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    if family == "qwen3":
        config = transformers.Qwen3Config(**sizes, intermediate_size=96)
    else:
        experts = {"moe_intermediate_size": 64, "num_experts": 4, "num_experts_per_tok": 2}
        config = transformers.Qwen3MoeConfig(**sizes, **experts, norm_topk_prob=True)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    theirs = packed_model(tmp_path, model, packed_as(way), SETTINGS[way])
    ours, ids = load_model(tmp_path, get_backend(backend_name)), tokens(12)
    described = describe(tmp_path)
    assert described["model"].startswith("one that generate runs"), described["model"]
    kind = "MXFP4" if way == "mxfp4" else "NVFP4"
    assert described["format"] == f"safetensors, weights in {kind} of {PACKINGS[way].method}"
    ways = {t["name"].rpartition(".")[2]: t["runs"] for t in described["tensors"]}
    assert ways["weight_scale"] == "packed"
    layer = ours.weights.layers[0]
    if family == "qwen3_moe":
        assert isinstance(layer.mlp, PackedExperts) and layer.mlp.down.kind == kind
    if backend_name == "interpret":
        assert layer.attn_out.weight.kind == kind, "codes stay packed"
    with torch.inference_mode():
        want = theirs(ids[None]).logits[0]
    torch.testing.assert_close(run(ours, ids[:9], ids[9:]), want, rtol=1e-4, atol=1e-4)
