"""Safetensors files and sharded directories, good and bad; bounded JSON."""

import json
import os
import struct

import pytest
import torch
from safetensors.torch import save_file

from ferrum_triton.errors import FileError
from ferrum_triton.files.safetensors import INDEX, open_safetensors, read_json


def random_tensors(seed, names):
    make = torch.Generator().manual_seed(seed)
    dtypes = [torch.float32, torch.float16, torch.bfloat16, torch.int8]
    return {
        name: (100 * torch.randn(i + 1, 3, generator=make)).to(dtypes[i % 4])
        for i, name in enumerate(names)
    }


def write_shards(directory, seed):
    """A model directory of two shards; returns its tensors."""
    tensors = random_tensors(seed, "abcdef")
    homes = {}
    for number, names in enumerate(("abc", "def")):
        shard = f"model-{number}.safetensors"
        save_file({name: tensors[name] for name in names}, directory / shard)
        homes |= dict.fromkeys(names, shard)
    (directory / INDEX).write_text(json.dumps({"weight_map": homes}))
    return tensors


def assert_holds(files, tensors):
    assert set(files) == set(tensors)
    assert len(files) == len(tensors)
    for name, tensor in tensors.items():
        assert name in files
        assert files.shape(name) == tuple(tensor.shape)
        assert files[name].dtype == tensor.dtype
        assert torch.equal(files[name], tensor)


@pytest.mark.parametrize("seed", range(3))
def test_single_file_and_directory_of_one(tmp_path, seed):
    tensors = random_tensors(seed, ["x", "y.weight", "ü"])
    save_file(tensors, tmp_path / "model.safetensors")
    assert_holds(open_safetensors(tmp_path / "model.safetensors"), tensors)
    assert_holds(open_safetensors(str(tmp_path)), tensors)


@pytest.mark.parametrize("seed", range(3))
def test_shards(tmp_path, seed):
    tensors = write_shards(tmp_path, seed)
    files = open_safetensors(tmp_path)
    assert_holds(files, tensors)
    with pytest.raises(KeyError):
        files["none"]
    assert "none" not in files


@pytest.mark.parametrize(
    "shard",
    [
        "../model-0.safetensors",
        "/model-0.safetensors",
        "sub/model-0.safetensors",
        "..\\model-0.safetensors",
        "C:model-0.safetensors",
        "./model-0.safetensors",
        "model-0.safetensors/",
        "model-0.safetensors\0.safetensors",
        "config.json",
        "..",
        "",
        7,
        None,
    ],
)
def test_index_stays_in_its_directory(tmp_path, shard):
    inside = tmp_path / "model"
    (inside / "sub").mkdir(parents=True)
    write_shards(inside, 0)
    for place in (tmp_path, inside / "sub"):
        save_file({"a": torch.ones(1)}, place / "model-0.safetensors")
    (inside / INDEX).write_text(json.dumps({"weight_map": {"a": shard}}))
    with pytest.raises(FileError, match="plain file name"):
        open_safetensors(inside)


@pytest.mark.parametrize(
    ("index", "reason"),
    [
        ("", "not JSON"),
        ("[]", "not a JSON object"),
        ("{}", "weight_map"),
        ('{"weight_map": []}', "weight_map"),
        ('{"weight_map": {}}', "weight_map"),
        ('{"weight_map": {"zzz": "model-0.safetensors"}}', "'zzz' is not in"),
        ('{"weight_map": {"d": "model-0.safetensors"}}', "'d' is not in"),
        ('{"weight_map": {"a": "model-9.safetensors"}}', "no such file"),
    ],
)
def test_bad_index(tmp_path, index, reason):
    write_shards(tmp_path, 1)
    (tmp_path / INDEX).write_text(index)
    with pytest.raises(FileError, match=reason):
        open_safetensors(tmp_path)


def header(text, data=b""):
    raw = text if isinstance(text, bytes) else text.encode()
    return struct.pack("<Q", len(raw)) + raw + data


def entry(dtype="F32", shape="[2]", offsets="[0, 8]"):
    return f'{{"t": {{"dtype": "{dtype}", "shape": {shape}, "data_offsets": {offsets}}}}}'


@pytest.mark.parametrize(
    "contents",
    [
        b"",
        b"\1\2",
        struct.pack("<Q", 2**63) + b"{}",
        struct.pack("<Q", 100) + b"{}",
        header("not json"),
        header(b"\xff\xfe"),
        header(entry(offsets="[0, 16]"), b"\1" * 8),
        header(entry(offsets="[8, 0]"), b"\1" * 8),
        header(entry(shape="[3]"), b"\1" * 8),
        header(entry(shape="[4611686018427387904, 4]"), b"\1" * 8),
        header(entry(dtype="F33"), b"\1" * 8),
        header(entry(), b"\1" * 9),
        header("[" * 100_000),
    ],
)
def test_malformed_file(tmp_path, contents):
    path = tmp_path / "model.safetensors"
    path.write_bytes(header(entry(), b"\1" * 8))
    assert open_safetensors(path)["t"].shape == (2,)
    path.write_bytes(contents)
    with pytest.raises(FileError, match="not a safetensors file"):
        open_safetensors(path)


def test_missing(tmp_path):
    with pytest.raises(FileError, match="no such file"):
        open_safetensors(tmp_path / "none.safetensors")
    with pytest.raises(FileError, match="neither"):
        open_safetensors(tmp_path)


def test_read_json(tmp_path):
    path = tmp_path / "config.json"
    path.write_text('{"hidden_size": 576, "name": "é"}', encoding="utf-8")
    size = path.stat().st_size
    assert read_json(path, size) == {"hidden_size": 576, "name": "é"}
    with pytest.raises(FileError, match="larger than"):
        read_json(path, size - 1)


@pytest.mark.parametrize(
    ("contents", "reason"),
    [
        (b"", "not JSON"),
        (b"{", "not JSON"),
        (b'{"a": "\xff"}', "not UTF-8"),
        (b"[1]", "not a JSON object"),
        (b"null", "not a JSON object"),
        (b'{"a":' + b"[" * 100_000, "not JSON"),
        (b'{"a":' + b"9" * 100_000 + b"}", "not JSON"),
    ],
)
def test_bad_json(tmp_path, contents, reason):
    path = tmp_path / "config.json"
    path.write_bytes(contents)
    with pytest.raises(FileError, match=reason):
        read_json(path)


def test_json_must_be_a_regular_file(tmp_path):
    with pytest.raises(FileError, match="No such file"):
        read_json(tmp_path / "none.json")
    with pytest.raises(FileError, match="not a regular file"):
        read_json(tmp_path)
    if hasattr(os, "mkfifo"):
        os.mkfifo(tmp_path / "pipe")
        with pytest.raises(FileError, match="not a regular file"):
            read_json(tmp_path / "pipe")
