"""Weights in FP8 by blocks of 128 x 128: codes of activations, products, and directories."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from ferrum_triton import FileError, InputError, get_backend
from ferrum_triton.cli.inspect import describe
from ferrum_triton.files.fp8_weights import Fp8Files
from ferrum_triton.files.int_weights import Packing, packing_of
from ferrum_triton.files.safetensors import SafetensorsFiles, open_safetensors
from ferrum_triton.kernels.fp8.config import TILES, gemv, tiles
from ferrum_triton.kernels.gpu import gpu_of_arch
from ferrum_triton.kernels.jit import record_launches
from ferrum_triton.models import Llama, load_model
from ferrum_triton.models.experts import DenseExperts
from ferrum_triton.models.linear import matmul
from ferrum_triton.quant import Fp8Blocks, FusedTensor
from ferrum_triton.quant.finite import count_out_of_range
from ferrum_triton.testing import UNROUNDED, assert_close
from tests.test_models import run, tokens

CPU, INTERPRET = get_backend("cpu"), get_backend("interpret")
BACKENDS = pytest.mark.parametrize("backend", [CPU, INTERPRET], ids=["cpu", "interpret"])
E4M3 = torch.float8_e4m3fn

# What each code stands for, by the format's definition; NaN is left out.
VALUES = np.array(
    [
        (-1) ** (code >> 7)
        * ((code & 7) / 8 + bool(code >> 3 & 15))
        * 2.0 ** (max(code >> 3 & 15, 1) - 7)
        for code in range(256)
    ]
)
POSITIVE = VALUES[:127]


def nearest_codes(x):
    """Of float64 values up to 448, those to even where two are as near."""
    above = np.searchsorted(POSITIVE, abs(x)).clip(1, 126)
    below = above - 1
    down, up = abs(x) - POSITIVE[below], POSITIVE[above] - abs(x)
    code = np.where((down < up) | ((down == up) & (below % 2 == 0)), below, above)
    return (code + 128 * np.signbit(x)).astype(np.uint8)


def exact_groups(x):
    """Codes as bytes [m, k] and scales [m, groups] of finite x, one group after the other."""
    x = x.float().numpy()
    codes, scales = np.zeros(x.shape, np.uint8), []
    for first in range(0, x.shape[1], 128):
        group = x[:, first : first + 128]
        largest = abs(group).max(axis=1)
        scale = np.where(largest >= 2.0**-100, largest / np.float32(448), np.float32(1))
        scale = scale.astype(np.float32)
        codes[:, first : first + 128] = nearest_codes((group / scale[:, None]).astype(np.float64))
        scales.append(scale)
    return torch.from_numpy(codes), torch.from_numpy(np.stack(scales, 1))


def exact_product(a, weight, scales):
    """In float64, from codes and scales that are written out for every weight."""
    codes, steps = exact_groups(a)
    wide = torch.from_numpy(VALUES)[codes.long()]
    wide = wide * steps.double().repeat_interleave(128, 1)[:, : a.shape[1]]
    return wide @ decoded(weight, scales).T


def decoded(weight, scales):
    rows, columns = (torch.arange(size) // 128 for size in weight.shape)
    return weight.double() * scales.double()[rows][:, columns]


def drawn(n, k, seed=0):
    make = torch.Generator().manual_seed(seed)
    weight = torch.randn(n, k, generator=make).to(E4M3)
    scales = torch.rand(-(-n // 128), -(-k // 128), generator=make) + 0.5
    return weight, scales * k**-0.5


def call(m=5, n=200, k=300, dtype=torch.bfloat16, seed=0):
    weight, scales = drawn(n, k, seed)
    a = torch.randn(m, k, generator=torch.Generator().manual_seed(seed + 1))
    return {"a": a.to(dtype), "weight": weight, "scales": scales}


def bits(codes):
    return codes.view(torch.uint8)


# Both orientations of a tile, K in parts or not, tiles side by side, of several programs.
CONFIGS = {
    "gemv": gemv(16, 256, 4),
    "narrow": tiles(16, 32, 1, 0, 4, 2),
    "narrow in parts": tiles(16, 64, 3, 0, 4, 2),
    "tall": tiles(64, 64, 1, 0, 4, 2),
    "tall in parts": tiles(64, 128, 2, 0, 4, 2),
    "together": tiles(16, 128, 1, 0, 4, 2) | {"GROUP_M": 2},
}


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize(
    ("m", "n", "k"), [(5, 200, 300), (70, 130, 513), (1, 1, 1), (33, 128, 256)]
)
def test_products_are_what_codes_and_scales_say(config, m, n, k):
    for dtype in (torch.bfloat16, torch.float32):
        arguments = call(m, n, k, dtype)
        with TILES.forced(CONFIGS[config]):
            assert_close(INTERPRET.gemm_fp8_128x128(**arguments), exact_product(**arguments))
        assert_close(CPU.gemm_fp8_128x128(**arguments), exact_product(**arguments))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(
    ("m", "n", "k"), [(1, 4096, 4096), (20, 300, 700), (64, 512, 4096), (200, 520, 1160)]
)
def test_products_of_a_gpu(dtype, m, n, k):
    """Of more tokens and columns than are interpreted."""
    arguments = call(m, n, k, dtype)
    moved = {name: value.cuda() for name, value in arguments.items()}
    got, want = get_backend("cuda").gemm_fp8_128x128(**moved), exact_product(**arguments)
    assert_close(got, want, scale=UNROUNDED if dtype == torch.float32 else 1)


@BACKENDS
@pytest.mark.parametrize(("m", "n", "k"), [(0, 200, 300), (5, 0, 300), (5, 200, 0), (0, 0, 0)])
def test_of_nothing_sums_are_zeros(backend, m, n, k):
    weight = torch.zeros(n, k).to(E4M3)
    scales = torch.ones(-(-n // 128), -(-k // 128))
    out = torch.full((m, n), float("nan"))
    backend.gemm_fp8_128x128(torch.ones(m, k), weight, scales, out=out)
    assert out.shape == (m, n) and not out.any()
    codes, steps = backend.quantize_fp8_groups(torch.ones(m, k))
    assert codes.shape == (m, k) and steps.shape == (m, scales.shape[1])


@BACKENDS
def test_weights_may_be_a_slice_and_results_columns_of_more(backend):
    """As of a shard, and of parts that fill one result."""
    weight, scales = drawn(512, 640)
    a = torch.randn(5, 900)[:, 100:356].half()
    part = {"weight": weight[128:328, 256:512], "scales": scales[1:3, 2:4]}
    whole = torch.full((5, 300), 7.0).half()
    backend.gemm_fp8_128x128(a, **part, out=whole[:, 50:250])
    want = {
        "weight": bits(part["weight"]).contiguous().view(E4M3),
        "scales": part["scales"].clone(),
    }
    assert torch.equal(whole[:, 50:250], backend.gemm_fp8_128x128(a.clone(), **want))
    assert (whole[:, :50] == 7).all() and (whole[:, 250:] == 7).all()


@BACKENDS
def test_what_is_not_finite_stays_where_it_is(backend):
    """A token with an infinity, a row with a code of NaN, and a block with a scale of NaN."""
    arguments = call(dtype=torch.float32)
    want = backend.gemm_fp8_128x128(**arguments)
    arguments["a"][3, 290] = float("inf")
    bits(arguments["weight"])[7, 5] = 0x7F
    bits(arguments["weight"])[9, 5] = 0xFF
    arguments["scales"][1, 2] = float("nan")
    lost = torch.zeros(5, 200, dtype=torch.bool)
    lost[3] = lost[:, 7] = lost[:, 9] = lost[:, 128:] = True
    got = backend.gemm_fp8_128x128(**arguments)
    assert torch.equal(got.isnan(), lost) and torch.equal(got[~lost], want[~lost])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scales": torch.ones(2, 2)}, r"scales is of shape \[2, 2\]; allowed: \[2, 3\], one for"),
        ({"scales": torch.ones(1, 3)}, r"scales is of shape \[1, 3\]"),
        ({"scales": torch.ones(2, 3).bfloat16()}, "scales is bfloat16; allowed: float32"),
        ({"weight": torch.zeros(200, 300)}, "weight is float32; allowed: float8_e4m3fn"),
        ({"weight": torch.zeros(200, 300).to(torch.float8_e5m2)}, "weight is float8_e5m2"),
        ({"a": torch.zeros(5, 299)}, "weight is of shape"),
        ({"a": torch.zeros(5, 300).double()}, "a is float64"),
    ],
)
@BACKENDS
def test_wrong_calls_are_refused(backend, change, message):
    with pytest.raises(InputError, match=message):
        backend.gemm_fp8_128x128(**call() | change)


def test_no_tile_has_rows_of_two_blocks():
    gpu = gpu_of_arch("sm_90")
    assert "BLOCK_N is 256" in TILES.refusal(gpu, tiles(16, 256, 1, 0, 8, 2), True, 5, 512, 512)
    assert "of 2 steps" in TILES.refusal(gpu, tiles(16, 32, 3, 0, 4, 2), True, 5, 512, 256)
    assert "shared memory" in TILES.refusal(gpu, tiles(128, 128, 1, 0, 8, 9), True, 200, 512, 512)


def test_matrices_in_fp8_stack_where_blocks_end():
    parts = [Fp8Blocks(*drawn(n, 300, seed=n)) for n in (256, 128, 100, 60)]
    fused = FusedTensor.of(parts)
    assert [part.shape for part in fused.parts] == [(484, 300), (60, 300)]
    want = torch.cat([decoded(part.weight, part.scales) for part in parts])
    assert torch.equal(fused.dequantize(torch.float32).double(), want.float().double())
    a = torch.randn(3, 300)
    for backend in (CPU, INTERPRET):
        got = matmul(backend, a, fused)
        products = [exact_product(a, part.weight, part.scales) for part in parts]
        assert_close(got, torch.cat(products, 1))


@pytest.mark.parametrize(
    ("weight", "scales", "message"),
    [
        (torch.zeros(5, 9), torch.ones(1, 1), "weight is float32"),
        (torch.zeros(9).to(E4M3), torch.ones(1, 1), r"weight is float8_e4m3fn \[9\]"),
        (torch.zeros(5, 129).to(E4M3), torch.ones(1, 1), r"allowed: float32 \[1, 2\]"),
        (torch.zeros(5, 9).to(E4M3), torch.ones(1, 1).half(), "scales is float16"),
    ],
)
def test_parts_that_do_not_fit_are_refused(weight, scales, message):
    with pytest.raises(InputError, match=message):
        Fp8Blocks(weight, scales)


def test_weights_out_of_range_are_counted():
    weight, scales = drawn(200, 300)
    assert count_out_of_range(Fp8Blocks(weight, scales), torch.float16) == 0
    bits(weight)[1, 5], bits(weight)[150, 299] = 0x7F, 0xFF
    assert count_out_of_range(Fp8Blocks(weight, scales), torch.float16) == 2
    scales[1, 2] = 1e6
    count = int((weight[128:, 256:].float().abs() > 0.0655).sum()) + 2
    assert count_out_of_range(Fp8Blocks(weight, scales), torch.float16) == count


FP8 = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
}


def test_settings_are_read():
    want = Packing("fp8", 8, symmetric=True)
    assert packing_of({"quantization_config": FP8}, "config.json") == want
    short = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    assert packing_of({"quantization_config": short}, "config.json") == want


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"fmt": "e5m2"}, "fmt of its quantisation is 'e5m2'; known: e4m3"),
        ({"activation_scheme": "static"}, "activation_scheme .* 'static'; known: dynamic"),
        (
            {"weight_block_size": [64, 128]},
            r"weight_block_size .* \[64, 128\]; known: \[128, 128\]",
        ),
        ({"weight_block_size": None}, "weight_block_size .* None"),
        ({"scale_fmt": "ue8m0"}, "scale_fmt .* 'ue8m0'"),
    ],
)
def test_settings_that_are_not_read_are_refused(change, message):
    with pytest.raises(FileError, match=message):
        packing_of({"quantization_config": FP8 | change}, "config.json")


def in_fp8(weight):
    """Codes and scales of a matrix, as the makers of such files round."""
    n, k = weight.shape
    blocks = torch.zeros(-(-n // 128) * 128, -(-k // 128) * 128)
    blocks[:n, :k] = weight
    blocks = blocks.unflatten(0, (-1, 128)).unflatten(2, (-1, 128))
    scales = blocks.abs().amax(dim=(1, 3)) / 448
    codes = (blocks / scales[:, None, :, None]).flatten(2).flatten(0, 1)[:n, :k]
    return codes.to(E4M3), scales


def fp8_directory(folder, model, dtype=torch.float32):
    """transformers' model in a directory whose linear layers are in FP8.

    Returns:
        The model whose weights are what codes and scales say.
    """
    model.save_pretrained(folder)
    file = folder / "model.safetensors"
    stored, plain = {}, load_file(file)
    for name, weight in plain.items():
        if "_proj.weight" in name:
            codes, scales = in_fp8(weight)
            stored[name], stored[f"{name}_scale_inv"] = codes, scales.to(dtype)
            plain[name] = decoded(codes, scales.to(dtype)).float()
        else:
            stored[name] = weight
    save_file(plain, file)
    again = type(model).from_pretrained(folder).eval()
    save_file(stored, file)
    config = folder / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"quantization_config": FP8}))
    return again


def tiny(folder, family="qwen3", dtype=torch.float32):
    """Q, K and V end where blocks do, and so are one product; gate and up do not."""
    transformers = pytest.importorskip("transformers", reason="transformers is the oracle here")
    sizes = {"vocab_size": 96, "hidden_size": 192, "num_hidden_layers": 2, "head_dim": 64}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    if family == "qwen3":
        config = transformers.Qwen3Config(**sizes, intermediate_size=200)
    else:
        experts = {"moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2}
        config = transformers.Qwen3MoeConfig(**sizes, **experts, norm_topk_prob=True)
    torch.manual_seed(0)
    return fp8_directory(folder, transformers.AutoModelForCausalLM.from_config(config), dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_models_equal_transformers(tmp_path, family, dtype):
    """Decoded, as they are where no kernel multiplies."""
    theirs = tiny(tmp_path, family, dtype)
    ours, ids = load_model(tmp_path, CPU), tokens(12)
    with torch.inference_mode():
        want = theirs(ids[None]).logits[0]
    torch.testing.assert_close(run(ours, ids[:9], ids[9:]), want, rtol=1e-4, atol=1e-4)
    layer = ours.weights.layers[0]
    assert isinstance(layer.attn_out.weight, torch.Tensor)
    assert isinstance(layer.mlp, DenseExperts) == (family == "qwen3_moe")


def test_kernels_multiply_what_the_directory_holds(tmp_path):
    tiny(tmp_path)
    ours, ids = load_model(tmp_path, INTERPRET), tokens(12)
    layer = ours.weights.layers[1]
    assert isinstance(layer.qkv.weight, Fp8Blocks) and layer.qkv.weight.shape == (512, 192)
    assert [part.shape for part in layer.mlp.gate_up.weight.parts] == [(200, 192)] * 2
    got = run(ours, ids[:9], ids[9:])
    by_definition = Llama(ours.config, ours.weights, CPU, torch.float32)
    torch.testing.assert_close(got, run(by_definition, ids[:9], ids[9:]), rtol=1e-2, atol=1e-2)
    # Activations are rounded to codes: by 2^-4 at most, and most by less.
    want = run(load_model(tmp_path, CPU), ids)
    assert (got - want).norm() < 0.1 * want.norm()


def test_a_head_in_fp8_is_decoded(tmp_path):
    tiny(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    codes, scales = in_fp8(tensors["lm_head.weight"])
    save_file(tensors | {"lm_head.weight": codes, "lm_head.weight_scale_inv": scales}, file)
    head = load_model(tmp_path, INTERPRET).weights.head
    assert torch.equal(head.double(), decoded(codes, scales).float().double())


def test_inspect_tells_what_is_in_fp8(tmp_path):
    tiny(tmp_path)
    described = describe(tmp_path)
    assert described["model"].startswith("one that generate runs"), described["model"]
    assert described["metadata"]["quantization_config"] == FP8
    runs = {(t["type"], t["runs"]) for t in described["tensors"] if "_proj." in t["name"]}
    assert runs == {("F8_E4M3", "packed"), ("F32", "packed")}
    plain = {t["runs"] for t in described["tensors"] if "norm" in t["name"]}
    assert plain == {"plain"}
    files = Fp8Files(open_safetensors(tmp_path))
    assert len(files) == len([*files]) and "lm_head.weight" in files
    name = "model.layers.0.self_attn.q_proj.weight"
    assert name in files and f"{name}_scale_inv" not in files
    assert ("FP8", 256 * 192, 256 * 192) in files.sizes()


NAME = "model.layers.1.mlp.down_proj.weight"


@pytest.mark.parametrize(
    ("part", "change", "message"),
    [
        ("_scale_inv", None, f"'{NAME}_scale_inv' is missing, which scales '{NAME}'"),
        ("", None, f"'{NAME}_scale_inv' is scales without F8_E4M3 codes"),
        ("", torch.Tensor.float, f"'{NAME}_scale_inv' is scales without F8_E4M3 codes"),
        ("", lambda t: t[:128].clone(), r"is F32 \[2, 2\]; expected F32 or BF16 \[1, 2\], one"),
        ("", lambda t: t[0].clone(), r"is F8_E4M3 \[200\], no matrix"),
        ("_scale_inv", lambda t: t[:1].clone(), r"is F32 \[1, 2\]; expected F32 or BF16 \[2, 2\]"),
        ("_scale_inv", torch.Tensor.half, r"is F16 \[2, 2\]; expected F32 or BF16"),
        ("_scale_inv", lambda t: t * 0, "holds 4 scales that are not finite and above zero"),
        ("_scale_inv", lambda t: t * float("nan"), "holds 4 scales that are not finite"),
        ("_scale_inv", lambda t: t * float("inf"), "holds 4 scales that are not finite"),
        ("_scale_inv", lambda t: -t, "holds 4 scales that are not finite and above zero"),
    ],
)
def test_directories_that_do_not_fit_are_refused(tmp_path, monkeypatch, part, change, message):
    """Before any codes are read."""
    tiny(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    tensor = tensors.pop(NAME + part)
    save_file(tensors if change is None else tensors | {NAME + part: change(tensor)}, file)
    read, get = [], SafetensorsFiles.__getitem__
    monkeypatch.setattr(
        SafetensorsFiles, "__getitem__", lambda self, name: read.append(name) or get(self, name)
    )
    with pytest.raises(FileError, match=message):
        load_model(tmp_path, CPU)
    assert all(name.endswith("_scale_inv") for name in read)
    assert "not one that generate runs" in describe(tmp_path)["model"]


def test_codes_of_nan_are_refused(tmp_path):
    tiny(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    bits(tensors[NAME])[3, 4] = 0xFF
    save_file(tensors, file)
    for backend in (CPU, INTERPRET):
        with pytest.raises(FileError, match=f"'{NAME}' holds 1 weights not finite in float32"):
            load_model(tmp_path, backend)


@pytest.mark.parametrize("num_rows", [4096, 28672])
def test_no_row_of_a_table_serves_more_tokens_than_its_tile_takes_at_once(num_rows):
    """The row of 16 tokens is the nearest for 17, which would read all weights twice."""
    with record_launches((9, 0)):
        for num_tokens in (2, 16, 17, 31, 33, 64, 100):
            config = TILES.pick(torch.device("meta"), True, num_tokens, num_rows, 4096)
            assert config["path"] != "tiles" or config["BLOCK_M"] >= min(num_tokens, 64)
