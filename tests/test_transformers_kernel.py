"""transformers' own models over packed GGUF weights, with this package's products."""

import pytest
import torch

from ferrum_triton import FerrumError, InputError
from ferrum_triton.integrations import transformers as kernel
from ferrum_triton.quant import FORMATS, dequantize_blocks, quantize_blocks
from tests import gguf_writer as w

HIDDEN, VOCAB, KV_HEADS = 256, 64, 1

LINEAR = {  # of layer 0, a convolution, and layer 1, an attention
    "blk.0.shortconv.in_proj": (3 * HIDDEN, HIDDEN, "Q4_0"),
    "blk.0.shortconv.out_proj": (HIDDEN, HIDDEN, "Q5_K"),
    "blk.1.attn_q": (HIDDEN, HIDDEN, "Q4_K"),
    "blk.1.attn_k": (HIDDEN // 4, HIDDEN, "Q4_K"),
    "blk.1.attn_v": (HIDDEN // 4, HIDDEN, "Q6_K"),
    "blk.1.attn_output": (HIDDEN, HIDDEN, "Q8_0"),
    "token_embd": (VOCAB, HIDDEN, "Q6_K"),
}
for layer in range(2):
    LINEAR |= {
        f"blk.{layer}.ffn_{part}": (HIDDEN, HIDDEN, "Q3_K") for part in ("gate", "up", "down")
    }
NORMS = {
    "token_embd_norm": HIDDEN,
    **{f"blk.{i}.{name}": HIDDEN for i in range(2) for name in ("attn_norm", "ffn_norm")},
    "blk.1.attn_q_norm": HIDDEN // 4,
    "blk.1.attn_k_norm": HIDDEN // 4,
}


@pytest.fixture
def tiny_file(tmp_path):
    """A random LFM2 of two layers."""
    torch.manual_seed(0)
    records, data = [], b""

    def add(name, shape, number, payload):
        nonlocal data
        data += b"\0" * (-len(data) % 32)
        records.append(w.tensor(f"{name}.weight", shape[::-1], number, len(data)))
        data += payload

    for name, (rows, cols, kind) in LINEAR.items():
        packed = quantize_blocks(torch.randn(rows, cols) * cols**-0.5, FORMATS[kind])
        add(name, (rows, cols), FORMATS[kind].ggml_id, packed.numpy().tobytes())
    for name, size in NORMS.items():
        add(name, (size,), 0, (1 + 0.1 * torch.randn(size)).numpy().tobytes())
    add("blk.0.shortconv.conv", (HIDDEN, 3), 0, torch.randn(HIDDEN, 3).numpy().tobytes())
    sizes = {
        "context_length": 128,
        "embedding_length": HIDDEN,
        "feed_forward_length": HIDDEN,
        "block_count": 2,
        "attention.head_count": 4,
        "shortconv.l_cache": 3,
    }
    pairs = [
        w.pair("general.architecture", w.STRING, "lfm2"),
        *(w.pair(f"lfm2.{key}", w.U32, value) for key, value in sizes.items()),
        w.array("lfm2.attention.head_count_kv", w.U32, [0, KV_HEADS]),
        w.pair("lfm2.attention.layer_norm_rms_epsilon", w.F32, 1e-5),
        w.pair("lfm2.rope.freq_base", w.F32, 10000.0),
        w.array("tokenizer.ggml.tokens", w.STRING, [f"t{i}" for i in range(VOCAB)]),
    ]
    (tmp_path / "tiny.gguf").write_bytes(w.gguf(pairs, records, data + b"\0" * 32))
    return tmp_path


def load(directory, **options):
    transformers = pytest.importorskip("transformers", reason="transformers runs the model")
    return transformers.AutoModelForCausalLM.from_pretrained(
        directory,
        gguf_file="tiny.gguf",
        dtype=torch.float32,
        attn_implementation="eager",
        quantization_config=transformers.GgufConfig(**options),
    )


def test_a_model_generates_the_same_text(tiny_file):
    plain = load(tiny_file, dequantize=True)
    with pytest.warns(UserWarning, match="lfm2 alone"):
        served = kernel.enable_transformers()
    assert "lfm2" in served and "llama" not in served
    packed = load(tiny_file)
    assert packed.model.layers[1].self_attn.q_proj.weight.dtype == torch.uint8
    prompt = torch.randint(VOCAB, (1, 12))
    options = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    want, got = (model.generate(prompt, **options) for model in (plain, packed))
    assert torch.equal(got, want)
    with torch.inference_mode():
        logits, want = packed(prompt).logits, plain(prompt).logits
    torch.testing.assert_close(logits, want, rtol=1e-4, atol=1e-4)


def test_every_format_has_its_products():
    assert set(kernel.GEMV_TYPES) == {fmt.ggml_id for fmt in FORMATS.values()}
    x = torch.randn(3, 512)
    for fmt in FORMATS.values():
        packed = quantize_blocks(torch.randn(5, 512), fmt)
        wide = dequantize_blocks(packed, fmt)
        number = fmt.ggml_id
        torch.testing.assert_close(kernel.mul_mat_vec(packed, x, number, 5), x @ wide.T)
        assert torch.equal(kernel.dequantize(packed, number, 5, 512, torch.float32), wide)
        rows = kernel.get_rows(packed, torch.tensor([4, 0]), number, 512, torch.float32)
        assert torch.equal(rows, wide[[4, 0]])


def test_experts_are_chosen_by_id():
    fmt = FORMATS["Q4_K"]
    stack = torch.stack([quantize_blocks(torch.randn(6, 256), fmt) for _ in range(3)])
    x, ids = torch.randn(4, 256), torch.tensor([[0, 2], [1, 1], [2, 0], [0, 1]], dtype=torch.int32)
    got = kernel.mul_mat_id(stack, x, ids, fmt.ggml_id, 6)
    want = torch.einsum("tk,tsnk->tsn", x, dequantize_blocks(stack, fmt)[ids.long()])
    torch.testing.assert_close(got, want)


def test_what_is_not_served_is_named(monkeypatch):
    with pytest.raises(InputError, match="ggml_type"):
        kernel.mul_mat_vec(torch.zeros(2, 66, dtype=torch.uint8), torch.randn(1, 256), 16, 2)
    with pytest.raises(InputError, match="out_features"):
        kernel.mul_mat_vec(torch.zeros(2, 18, dtype=torch.uint8), torch.randn(1, 32), 2, 3)
    monkeypatch.setattr(kernel, "version", lambda _: "5.22.0")
    with pytest.raises(FerrumError, match=r"5\.22\.0"):
        kernel.enable_transformers()
