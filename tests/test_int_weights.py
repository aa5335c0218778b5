"""Hugging Face directories of packed integers: exact, whoever packed them, or one clear error."""

import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from ferrum_triton import FileError, InputError, get_backend
from ferrum_triton.cli.inspect import describe
from ferrum_triton.files.int_weights import IntFiles, Packing, packing_of
from ferrum_triton.files.safetensors import open_safetensors
from ferrum_triton.models import load_model
from ferrum_triton.models.experts import DenseExperts, PackedExperts
from ferrum_triton.quant import QuantizedTensor, load_awq, load_gptq
from ferrum_triton.testing import assert_close
from tests.test_models import run, tokens

FIXTURE = __file__.replace("test_int_weights.py", "fixtures/int_weights.safetensors")


def words_of(rows, bits):
    """Rows of whole numbers in 32-bit words, the first in a word's lowest bits."""
    per = 32 // bits
    found = []
    for row in rows.tolist():
        row += [0] * (-len(row) % per)
        words = []
        for i in range(0, len(row), per):
            word = sum(value << bits * j for j, value in enumerate(row[i : i + per]))
            words.append(word - (1 << 32) if word >= 1 << 31 else word)
        found.append(words)
    return torch.tensor(found, dtype=torch.int32)


def drawn(bits, n, k, size, symmetric, seed=0):
    """q [n, k], zeros and scales [n, k / size]."""
    generator = torch.Generator().manual_seed(seed)
    groups = 1 if size == -1 else k // size
    q = torch.randint(1 << bits, (n, k), generator=generator)
    zeros = torch.randint(1, 1 << bits, (n, groups), generator=generator)
    if symmetric:
        zeros.fill_(1 << (bits - 1))
    scales = (torch.rand(n, groups, generator=generator) * 0.02 + 0.001).half()
    return q, zeros, scales


def exact(q, zeros, scales):
    """The weights in float64: the definition."""
    size = q.shape[1] // scales.shape[1]
    wide = (part.double().repeat_interleave(size, 1) for part in (zeros, scales))
    zero, scale = wide
    return scale * (q.double() - zero)


def gptq(module, q, zeros, scales, bits, *, less=1):
    """As AutoGPTQ packs a module; of its second form ``less`` is 0."""
    k, groups = q.shape[1], scales.shape[1]
    return {
        f"{module}.qweight": words_of(q, bits).T.contiguous(),
        f"{module}.qzeros": words_of((zeros - less).T, bits),
        f"{module}.scales": scales.T.contiguous(),
        f"{module}.g_idx": (torch.arange(k) // (k // groups)).to(torch.int32),
    }


def awq(module, q, zeros, scales):
    """As AutoAWQ packs a module: of eight columns 0, 2, 4, 6, 1, 3, 5, 7 in a word."""

    def packed(part):
        columns = part.T.unflatten(1, (-1, 8))[..., [0, 2, 4, 6, 1, 3, 5, 7]]
        return words_of(columns.flatten(1), 4)

    codes = {"qweight": packed(q), "qzeros": packed(zeros), "scales": scales.T.contiguous()}
    return {f"{module}.{part}": value for part, value in codes.items()}


def compressed(module, q, zeros, scales, bits, *, symmetric):
    """As compressed-tensors packs a module."""
    found = {"weight_packed": words_of(q, bits), "weight_scale": scales}
    found["weight_shape"] = torch.tensor(q.shape)
    if not symmetric:
        found["weight_zero_point"] = words_of(zeros.T, bits).T.contiguous()
    return {f"{module}.{part}": value for part, value in found.items()}


def read(folder, tensors, packing, name="m.weight"):
    save_file(tensors, folder / "model.safetensors")
    return IntFiles(open_safetensors(folder), packing)[name]


def decoded(found):
    return (found.dequantize() if isinstance(found, QuantizedTensor) else found).double()


@pytest.mark.parametrize("size", [32, 64, -1])
@pytest.mark.parametrize(
    ("method", "bits", "symmetric", "kind"),
    [
        ("gptq", 4, True, "Q4_0"),
        ("gptq_v2", 4, True, "Q4_0"),
        ("gptq", 4, False, "Q4_Z"),
        ("gptq_v2", 4, False, "Q4_Z"),
        ("gptq", 8, True, "Q8_0"),
        ("gptq", 8, False, None),
        ("awq", 4, False, "Q4_Z"),
        ("compressed-tensors", 4, True, "Q4_0"),
        ("compressed-tensors", 4, False, "Q4_Z"),
        ("compressed-tensors", 8, True, "Q8_0"),
    ],
)
def test_weights_are_what_the_checkpoint_says(tmp_path, method, bits, symmetric, kind, size):
    """To the bit, in a packed format where one holds them."""
    parts = drawn(bits, 24, 192, size, symmetric)
    packing = Packing(method.removesuffix("_v2"), bits, symmetric, method == "gptq")
    if packing.method == "gptq":
        tensors = gptq("m", *parts, bits, less=int(method == "gptq"))
    elif method == "awq":
        tensors = awq("m", *parts)
    else:
        tensors = compressed("m", *parts, bits, symmetric=symmetric)
    found = read(tmp_path, tensors, packing)
    assert (found.kind if isinstance(found, QuantizedTensor) else None) == kind
    assert torch.equal(decoded(found), exact(*parts).to(torch.float32).double())


@pytest.mark.parametrize("name", ["symmetric4", "zeros4", "symmetric8", "awq"])
def test_what_another_packed_is_read(tmp_path, name):
    """By compressed-tensors, as its file says; the integers of AWQ are random words."""
    with safe_open(FIXTURE, "pt") as file:
        assert "compressed-tensors" in file.metadata()["packed_by"]
    stored = {n: t for n, t in load_file(FIXTURE).items() if n.startswith(f"{name}.")}
    wanted = stored.pop(f"{name}.wanted")
    method = "awq" if name == "awq" else "compressed-tensors"
    packing = Packing(method, 8 if name.endswith("8") else 4, name.startswith("symmetric"))
    found = read(tmp_path, stored, packing, f"{name}.weight")
    assert isinstance(found, QuantizedTensor) and torch.equal(found.dequantize(), wanted)


@pytest.mark.parametrize("stored", [7, 8])
@pytest.mark.parametrize("says_less", [True, False])
def test_zeros_of_the_middle_tell_the_form_by_themselves(tmp_path, stored, says_less):
    """Files of GPTQ's second form are about whose config says nothing of it."""
    q, zeros, scales = drawn(4, 8, 64, 32, True)
    tensors = gptq("m", q, zeros, scales, 4, less=8 - stored)
    found = read(tmp_path, tensors, Packing("gptq", 4, True, says_less))
    assert torch.equal(decoded(found), exact(q, zeros, scales))


@pytest.mark.parametrize(
    ("size", "scale"), [(16, None), (32, torch.tensor(1.0009765625 + 2**-13)), (32, 1e-9)]
)
def test_what_no_format_holds_is_decoded(tmp_path, size, scale):
    """Groups of half a block, and scales that float16 would round."""
    q, zeros, scales = drawn(4, 8, 64, size, True)
    scales = scales.float()
    if scale is not None:
        scales[3, 1] = scale
    found = read(tmp_path, gptq("m", q, zeros, scales, 4), Packing("gptq", 4, True, True))
    assert isinstance(found, torch.Tensor)
    assert torch.equal(found.double(), exact(q, zeros, scales).float().double())


def test_biases_of_zeros_are_left_out(tmp_path):
    tensors = gptq("m", *drawn(4, 8, 64, 32, True), 4)
    tensors |= gptq("b", *drawn(4, 8, 64, 32, True), 4)
    tensors |= {"m.bias": torch.zeros(8), "b.bias": torch.ones(8), "norm.weight": torch.ones(4)}
    save_file(tensors, tmp_path / "model.safetensors")
    files = IntFiles(open_safetensors(tmp_path), Packing("gptq", 4, True, True))
    assert {*files} == {"m.weight", "b.weight", "b.bias", "norm.weight"} and len(files) == 4
    assert "m.bias" not in files and "m.qweight" not in files and "b.bias" in files
    assert [sizes[2] for sizes in files.sizes()] == [8 * 64] * 2


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "desc_act": False}
INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "symmetric": True, "group_size": 128}
COMPRESSED = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {"group_0": {"weights": INT4, "targets": ["Linear"]}},
}


def test_settings_are_read():
    path = "config.json"
    assert packing_of({}, path) is None
    assert packing_of({"quantization_config": GPTQ}, path) == Packing("gptq", 4, True, True)
    second = GPTQ | {"checkpoint_format": "gptq_v2", "sym": False, "bits": 8}
    assert packing_of({"quantization_config": second}, path) == Packing("gptq", 8, False)
    found = {"quant_method": "awq", "bits": 4, "version": "gemm", "zero_point": True}
    assert packing_of({"quantization_config": found}, path) == Packing("awq", 4, False)
    want = Packing("compressed-tensors", 4, True)
    assert packing_of({"quantization_config": COMPRESSED}, path) == want


@pytest.mark.parametrize(
    ("found", "message"),
    [
        ([1], "quantisation None is not supported"),
        ({"quant_method": "hqq"}, "'hqq' is not supported; known: gptq, awq, compressed-tensors"),
        (GPTQ | {"bits": 3}, "bits of its quantisation is 3; known: 4, 8"),
        (GPTQ | {"bits": 4.0}, "bits of its quantisation is 4.0"),
        (GPTQ | {"checkpoint_format": "marlin"}, "checkpoint_format .* 'marlin'"),
        (GPTQ | {"pack_dtype": "int16"}, "pack_dtype .* 'int16'"),
        (GPTQ | {"dynamic": {"-:x": {}}}, "for some modules"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "version .* 'gemv'"),
        ({"quant_method": "awq", "bits": 4, "zero_point": False}, "zero_point .* False"),
        (COMPRESSED | {"format": "float-quantized"}, "format .* 'float-quantized'"),
        (COMPRESSED | {"config_groups": {}}, "missing or malformed"),
        (COMPRESSED | {"config_groups": {"a": None}}, "missing or malformed"),
        (
            COMPRESSED | {"config_groups": {"a": {"weights": INT4}, "b": {"weights": {}}}},
            "num_bits .* None",
        ),
        (
            COMPRESSED | {"config_groups": {"a": {"weights": INT4 | {"type": "float"}}}},
            "type .* 'float'",
        ),
        (
            COMPRESSED | {"config_groups": {"a": {"weights": INT4, "input_activations": {"x": 1}}}},
            "activations in few bits",
        ),
    ],
)
def test_settings_that_are_not_read_are_refused(found, message):
    with pytest.raises(FileError, match=message):
        packing_of({"quantization_config": found}, "config.json")


def without(part):
    return lambda tensors: {n: t for n, t in tensors.items() if not n.endswith(part)}


def changed(part, change):
    return lambda tensors: tensors | {f"m.{part}": change(tensors[f"m.{part}"])}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without("qzeros"), "'m.qzeros' is missing"),
        (without("scales"), "'m.scales' is missing"),
        (changed("qweight", lambda t: t.long()), "'m.qweight' is int64"),
        (changed("qweight", lambda t: t[0]), r"'m.qweight' is int32 \[8\]"),
        (changed("scales", lambda t: t[:, :-1].contiguous()), r"'m.scales' is float16 \[4, 7\]"),
        (changed("scales", lambda t: t.int()), "'m.scales' is int32"),
        (changed("qzeros", lambda t: t[1:].contiguous()), r"'m.qzeros' is int32 \[3, 1\]"),
        (changed("g_idx", lambda t: t + 1), "names groups outside 0 to 3"),
        (changed("g_idx", lambda t: t - 1), "names groups outside 0 to 3"),
        (changed("g_idx", lambda t: t[1:].contiguous()), r"'m.g_idx' is int32 \[127\]"),
    ],
)
def test_modules_that_do_not_fit_are_refused(tmp_path, change, message):
    tensors = change(gptq("m", *drawn(4, 8, 128, 32, True), 4))
    with pytest.raises(FileError, match=message):
        read(tmp_path, tensors, Packing("gptq", 4, True, True))


@pytest.mark.parametrize("shape", [[8, -1], [0, 128], [8, 64], [9, 128]])
def test_shapes_beside_the_words_are_checked(tmp_path, shape):
    tensors = compressed("m", *drawn(4, 8, 128, 32, True), 4, symmetric=True)
    tensors["m.weight_shape"] = torch.tensor(shape)
    with pytest.raises(FileError, match=r"weight_shape|weight_packed"):
        read(tmp_path, tensors, Packing("compressed-tensors", 4, True))


def test_columns_that_are_in_no_groups_are_refused(tmp_path):
    tensors = awq("m", *drawn(4, 8, 128, 32, False))
    tensors |= {n: tensors[n][:3].contiguous() for n in ("m.qzeros", "m.scales")}
    with pytest.raises(FileError, match="128 columns are not in 3 groups of one size"):
        read(tmp_path, tensors, Packing("awq", 4, False))


@pytest.mark.parametrize("planes", [False, True])
def test_kernels_multiply_them(planes):
    q, zeros, scales = drawn(4, 24, 128, 32, False)
    tensors = gptq("m", q, zeros, scales, 4)
    parts = (tensors[f"m.{part}"] for part in ("qweight", "scales", "qzeros"))
    packed = load_gptq(*parts, symmetric=False)
    packed = packed.in_planes() if planes else packed
    a = torch.randn(3, 128, generator=torch.Generator().manual_seed(1))
    got = get_backend("interpret").gemm_quant(a, packed.blocks, packed.kind)
    assert_close(got, a.double() @ exact(q, zeros, scales).T)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bits": 3}, "bits is 3; allowed: 4 or 8"),
        ({"g_idx": torch.arange(128) // 16}, "g_idx is 0 to 7; allowed: 0 to 3"),
        ({"g_idx": -torch.ones(128)}, "g_idx is -1 to -1"),
    ],
)
def test_wrong_calls_are_refused(change, message):
    tensors = gptq("m", *drawn(4, 8, 128, 32, True), 4)
    parts = [tensors[f"m.{part}"] for part in ("qweight", "scales", "qzeros")]
    with pytest.raises(InputError, match=message):
        load_gptq(*parts, **change)
    tensors = awq("m", *drawn(4, 8, 128, 32, False))
    with pytest.raises(InputError, match="scales is 3 groups; allowed: a divisor of 128"):
        load_awq(tensors["m.qweight"], tensors["m.scales"][:3], tensors["m.qzeros"][:3])


def packed_model(folder, model, pack, config):
    """A directory of transformers' model whose linear layers are packed ones.

    The model's weights become what those say.

    Args:
        pack: of a module's name, a shape and a seed the module's tensors and its weights.
    """
    model.save_pretrained(folder)
    file = folder / "model.safetensors"
    state, stored = load_file(file), {}
    for i, name in enumerate(sorted(state)):
        if "_proj.weight" in name:
            parts, state[name] = pack(name.removesuffix(".weight"), state[name].shape, i)
            stored |= parts
    save_file(state, file)
    again = type(model).from_pretrained(folder).eval()
    save_file({n: t for n, t in state.items() if "_proj.weight" not in n} | stored, file)
    values = json.loads((folder / "config.json").read_text()) | {"quantization_config": config}
    (folder / "config.json").write_text(json.dumps(values))
    return again


def packed_as(method):
    """``pack`` of :func:`packed_model`."""

    def pack(module, shape, seed):
        parts = drawn(4, *shape, 32, method != "awq", seed=seed)
        tensors = gptq(module, *parts, 4) if method == "gptq" else awq(module, *parts)
        return tensors, exact(*parts).float()

    return pack


@pytest.mark.parametrize("backend_name", ["cpu", "interpret"])
@pytest.mark.parametrize("method", ["gptq", "awq"])
@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_models_equal_transformers(tmp_path, family, method, backend_name):
    transformers = pytest.importorskip("transformers", reason="transformers is the oracle here")
    sizes = {"vocab_size": 96, "hidden_size": 64, "num_hidden_layers": 2, "head_dim": 32}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    if family == "qwen3":
        config = transformers.Qwen3Config(**sizes, intermediate_size=96)
    else:
        experts = {"moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2}
        config = transformers.Qwen3MoeConfig(**sizes, **experts, norm_topk_prob=True)
    settings = GPTQ if method == "gptq" else {"quant_method": "awq", "bits": 4}
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    theirs = packed_model(tmp_path, model, packed_as(method), settings)
    ours, ids = load_model(tmp_path, get_backend(backend_name)), tokens(12)
    described = describe(tmp_path)
    assert described["model"].startswith("one that generate runs"), described["model"]
    ways = {t["name"].rpartition(".")[2]: t["runs"] for t in described["tensors"]}
    assert ways["qweight"] == ways["scales"] == "packed" and ways["weight"] == "plain"
    layer = ours.weights.layers[0]
    if family == "qwen3_moe":
        assert isinstance(layer.mlp, PackedExperts) and not isinstance(layer.mlp, DenseExperts)
    if backend_name == "interpret":
        assert isinstance(layer.attn_out.weight, QuantizedTensor), "integers stay packed"
    with torch.inference_mode():
        want = theirs(ids[None]).logits[0]
    torch.testing.assert_close(run(ours, ids[:9], ids[9:]), want, rtol=1e-4, atol=1e-4)


def test_experts_are_stacked_and_sliced():
    """A stack multiplies as its matrices do, and gives each back without a copy."""
    parts = []
    for expert in range(3):
        drawn_of = drawn(4, 8, 64, 32, True, seed=expert)
        stored = gptq("m", *drawn_of, 4)
        parts.append(load_gptq(*(stored[f"m.{p}"] for p in ("qweight", "scales", "qzeros"))))
    stack = QuantizedTensor.stack(parts)
    assert (stack.kind, stack.shape) == ("Q4_0", (3, 8, 64))
    backend, a = get_backend("cpu"), torch.randn(2, 64)
    ids = torch.tensor([[2, 0], [1, 2]], dtype=torch.int32)
    slots = backend.gemv_quant_moe_id(a, stack.blocks, ids, stack.kind)
    for token, chosen in enumerate(ids.tolist()):
        for slot, expert in enumerate(chosen):
            one = stack.expert(expert)
            assert one.blocks.data_ptr() == stack.blocks[expert].data_ptr()
            assert torch.equal(one.blocks, parts[expert].blocks)
            want = backend.gemm_quant(a[token : token + 1], one.blocks, one.kind)[0]
            assert_close(slots[token, slot], want)


def test_what_is_no_stack_is_refused():
    one = QuantizedTensor(torch.zeros(4, 18, dtype=torch.uint8), "Q4_0")
    other = QuantizedTensor(torch.zeros(4, 34, dtype=torch.uint8), "Q8_0")
    less = QuantizedTensor(torch.zeros(3, 18, dtype=torch.uint8), "Q4_0")
    stack = QuantizedTensor.stack([one, one])
    for wrong, message in (
        ([], "at least one"),
        ([one, other], "Q8_0 of .* at 1"),
        ([one, less], r"\[3, 32\] at 1"),
        ([stack, stack], r"\[2, 4, 32\] at 0"),
        ([one, one.to("meta")], "meta at 1"),
    ):
        with pytest.raises(InputError, match=message) as error:
            QuantizedTensor.stack(wrong)
        assert error.value.argument == "matrices"
    for index in (-1, 2):
        with pytest.raises(InputError, match="0 to 1"):
            stack.expert(index)
    with pytest.raises(InputError, match="one matrix"):
        one.expert(0)
