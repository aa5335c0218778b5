"""Hugging Face directories whose weights are packed integers: GPTQ, AWQ, compressed-tensors.

``quantization_config`` says how; a module's integers, scales and zeros are tensors of their own.
Here they are one, laid out anew as :mod:`ferrum_triton.quant.integers` tells.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ferrum_triton.errors import FileError
from ferrum_triton.files.json_file import read_json
from ferrum_triton.files.safetensors import SafetensorsFiles
from ferrum_triton.quant import (
    FORMATS,
    load_awq,
    load_compressed_tensors,
    load_gptq,
)
from ferrum_triton.quant.float4 import MXFP4_GROUP, NVFP4_GROUP
from ferrum_triton.quant.fp8 import BLOCK
from ferrum_triton.quant.integers import LaidOut, targets

METHODS = ("gptq", "awq", "compressed-tensors", "fp8", "modelopt")
# Formats of compressed-tensors whose codes are E2M1: what they are called, the weights that share a
# scale, and by what else they are scaled.
FP4_FORMATS = {
    "nvfp4-pack-quantized": ("NVFP4", NVFP4_GROUP, "tensor_group"),
    "mxfp4-pack-quantized": ("MXFP4", MXFP4_GROUP, "group"),
}
# What modelopt writes beside a config.json that says nothing of it.
MODELOPT_CONFIG = "hf_quant_config.json"
# The tensors of a module in integers, GPTQ's and AWQ's and then those of compressed-tensors.
PARTS = (
    *("qweight", "qzeros", "scales", "g_idx"),
    *("weight_packed", "weight_zero_point", "weight_scale", "weight_g_idx", "weight_shape"),
)


@dataclass(frozen=True)
class Packing:
    """What ``quantization_config`` says of a directory's integers, or codes in FP8.

    Attributes:
        method: one of METHODS.
        bits: bits of an integer or a code, 4 or 8.
        symmetric: whether every zero is the middle of the integers' range.
        has_zeros_less_one: GPTQ's first form, whose zeros are stored as one less.
        float_format: "NVFP4" or "MXFP4" where codes are of four bits and no integers; else "".
        some_of_eight: whether groups of modules differ, so that some may have 8 bits.
    """

    method: str
    bits: int
    symmetric: bool
    has_zeros_less_one: bool = False
    float_format: str = ""
    some_of_eight: bool = False

    def __str__(self) -> str:
        """What weights are, for people to read."""
        what = f"integers of {self.bits} bits"
        return f"{'FP8' if self.method == 'fp8' else self.float_format or what} of {self.method}"


def read_config(directory: Path) -> dict[str, Any]:
    """A model's ``config.json``, with what modelopt says of its weights in a file of its own.

    Raises:
        FileError: a file is missing or malformed.
    """
    config, beside = read_json(directory / "config.json"), directory / MODELOPT_CONFIG
    if not config.get("quantization_config") and beside.exists():
        config["quantization_config"] = {"quant_method": "modelopt"} | read_json(beside)
    return config


def packing_of(config: Mapping[str, Any], path: Path) -> Packing | None:
    """How a Hugging Face model's weights are packed; None where they are not.

    Raises:
        FileError: in a way that is not read here.
    """
    found = config.get("quantization_config")
    if not found:
        return None
    method = found.get("quant_method") if isinstance(found, Mapping) else None
    if method == "gptq":
        return _gptq(found, path)
    if method == "awq":
        return _awq(found, path)
    if method == "compressed-tensors":
        return _compressed_tensors(found, path)
    if method == "fp8":
        return _fp8(found, path)
    if method == "modelopt":
        return _modelopt(found, path)
    known = ", ".join(METHODS)
    raise FileError(path, f"quantisation {method!r:.80} is not supported; known: {known}")


def _expect(found: Mapping[str, Any], path: Path, **allowed: tuple[Any, ...]) -> None:
    """Raise unless each value is one of those allowed, of the same type."""
    for name, values in allowed.items():
        got = found.get(name)
        if not any(got == value and type(got) is type(value) for value in values):
            known = ", ".join(str(value) for value in values if value is not None)
            raise FileError(path, f"{name} of its quantisation is {got!r:.80}; known: {known}")


def _gptq(found: Mapping[str, Any], path: Path) -> Packing:
    forms = (None, "gptq", "gptq_v2")
    _expect(found, path, bits=(4, 8), checkpoint_format=forms, pack_dtype=(None, "int32"))
    if found.get("dynamic"):
        raise FileError(path, "settings of its quantisation for some modules are not supported")
    symmetric = found.get("sym", True) is True
    is_first = found.get("checkpoint_format") != "gptq_v2"
    return Packing("gptq", found["bits"], symmetric, is_first)


def _awq(found: Mapping[str, Any], path: Path) -> Packing:
    _expect(found, path, bits=(4,), version=(None, "gemm", "GEMM"), zero_point=(None, True))
    return Packing("awq", 4, symmetric=False)


def _compressed_tensors(found: Mapping[str, Any], path: Path) -> Packing:
    _expect(found, path, format=("pack-quantized", *FP4_FORMATS))
    groups = found.get("config_groups")
    listed = list(groups.values()) if isinstance(groups, Mapping) else []
    found_weights = [group.get("weights") for group in listed if isinstance(group, Mapping)]
    weights = [each for each in found_weights if isinstance(each, Mapping)]
    if not weights or len(weights) < len(listed):
        raise FileError(path, "config_groups of its quantisation are missing or malformed")
    if found["format"] in FP4_FORMATS:
        name, size, strategy = FP4_FORMATS[found["format"]]
        for each in weights:
            _expect(each, path, num_bits=(4,), type=("float",), strategy=(strategy,))
            _expect(each, path, group_size=(size,), symmetric=(None, True))
        # Activations in few bits are for the hardware that multiplies them; here they keep theirs.
        return Packing("compressed-tensors", 4, symmetric=True, float_format=name)
    for each in weights:
        _expect(each, path, num_bits=(4, 8), type=("int",), strategy=("group", "channel"))
    if any(group.get("input_activations") for group in listed):
        raise FileError(path, "activations in few bits are not supported")
    # Modules' own tensors say which group they are of; here is what most are.
    least = min(weights, key=lambda each: each["num_bits"])
    symmetric = least.get("symmetric", True) is True
    differ = {each["num_bits"] for each in weights} == {4, 8}
    return Packing("compressed-tensors", least["num_bits"], symmetric, some_of_eight=differ)


def _fp8(found: Mapping[str, Any], path: Path) -> Packing:
    blocks, schemes = ([BLOCK, BLOCK],), (None, "dynamic")
    _expect(found, path, fmt=(None, "e4m3"), weight_block_size=blocks, activation_scheme=schemes)
    _expect(found, path, scale_fmt=(None,))
    return Packing("fp8", 8, symmetric=True)


def _modelopt(found: Mapping[str, Any], path: Path) -> Packing:
    told = found.get("quantization", found)  # as a file of its own has it
    if not isinstance(told, Mapping):
        raise FileError(path, f"quantization of modelopt is {told!r:.80}")
    _expect(told, path, quant_algo=("NVFP4",), group_size=(None, NVFP4_GROUP))
    return Packing("modelopt", 4, symmetric=True, float_format="NVFP4")


class IntFiles(Mapping[str, LaidOut]):
    """Tensors of a directory by name, those in integers as one tensor ``<module>.weight``.

    Attributes:
        path: the directory.
        parts: names of tensors that are a part of some module's weight.
    """

    def __init__(self, files: SafetensorsFiles, packing: Packing) -> None:
        self.path, self._files, self._packing = files.path, files, packing
        codes = ".weight_packed" if packing.method == "compressed-tensors" else ".qweight"
        self._modules = {
            name.removesuffix(codes) + ".weight": name.removesuffix(codes)
            for name in files
            if name.endswith(codes)
        }
        self.parts = {f"{module}.{part}" for module in self._modules.values() for part in PARTS}
        # AutoGPTQ gives every module a bias, most of them zeros.
        biases = (f"{module}.bias" for module in self._modules.values())
        empty = {name for name in biases if name in files and not files[name].any()}
        plain = (name for name in files if name not in self.parts and name not in empty)
        self._names = [*plain, *self._modules]
        self._there = set(self._names)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __contains__(self, name: object) -> bool:
        return name in self._there

    def __getitem__(self, name: str) -> LaidOut:
        if name not in self._modules:
            return self._files[name]
        read = {
            "gptq": self._read_gptq,
            "awq": self._read_awq,
            "compressed-tensors": self._read_compressed,
        }
        return read[self._packing.method](self._modules[name])

    def sizes(self) -> list[tuple[str, int, int]]:
        """Of each module in integers: the format it gets most likely, its bytes and its weights."""
        return [self._size(module) for module in self._modules.values()]

    def _size(self, module: str) -> tuple[str, int, int]:
        bits = self._packing.bits
        if self._packing.method == "compressed-tensors":
            n, k, bits = self._compressed_sizes(module)
            count = n * k
        else:
            count = math.prod(self._files.shape(f"{module}.qweight")) * 32 // bits
        kind = targets(bits, self._packing.symmetric)[0]
        fmt = FORMATS[kind]
        return kind, count // fmt.block_size * fmt.block_bytes, count

    def _part(self, name: str, dtypes: tuple[torch.dtype, ...], *shape: int) -> Tensor:
        """A tensor of a module, of one of the dtypes; a size of -1 may be any."""
        if name not in self._files:
            raise FileError(self.path, f"tensor {name!r} is missing")
        found = self._files[name]
        fits = found.dim() == len(shape) and all(
            want in (got, -1) for got, want in zip(found.shape, shape, strict=True)
        )
        if not fits or found.dtype not in dtypes:
            known = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
            sizes = ", ".join("any" if size == -1 else str(size) for size in shape)
            got = f"{str(found.dtype).removeprefix('torch.')} {list(found.shape)}"
            raise FileError(self.path, f"tensor {name!r} is {got}; expected {known} [{sizes}]")
        return found

    def _read_gptq(self, module: str) -> LaidOut:
        bits, per = self._packing.bits, 32 // self._packing.bits
        codes = self._part(f"{module}.qweight", _WORDS, -1, -1)
        k, n = codes.shape[0] * per, codes.shape[1]
        scales = self._part(f"{module}.scales", _FLOATS, -1, n)
        zeros = self._part(f"{module}.qzeros", _WORDS, len(scales), -(-n // per))
        return load_gptq(
            codes,
            scales,
            zeros,
            self._groups(f"{module}.g_idx", k, len(scales)),
            bits=bits,
            symmetric=self._packing.symmetric,
            zeros_less_one=self._packing.has_zeros_less_one,
        )

    def _read_awq(self, module: str) -> LaidOut:
        codes = self._part(f"{module}.qweight", _WORDS, -1, -1)
        k, n = codes.shape[0], codes.shape[1] * 8
        scales = self._part(f"{module}.scales", _FLOATS, -1, n)
        zeros = self._part(f"{module}.qzeros", _WORDS, len(scales), n // 8)
        self._groups("", k, len(scales))
        return load_awq(codes, scales, zeros)

    def _read_compressed(self, module: str) -> LaidOut:
        n, k, bits = self._compressed_sizes(module)
        codes = self._part(f"{module}.weight_packed", _WORDS, n, -(-k * bits // 32))
        scales = self._part(f"{module}.weight_scale", _FLOATS, n, -1)
        zeros, name = None, f"{module}.weight_zero_point"
        if name in self._files:
            zeros = self._part(name, _WORDS, -(-n * bits // 32), scales.shape[1])
        return load_compressed_tensors(
            codes,
            scales,
            zeros,
            self._groups(f"{module}.weight_g_idx", k, scales.shape[1]),
            num_columns=k,
            bits=bits,
            symmetric=zeros is None,
        )

    def _compressed_sizes(self, module: str) -> tuple[int, int, int]:
        """Rows, columns and bits of a module, whose group may have others than most."""
        n, k = self._part(f"{module}.weight_shape", _INTS, 2).tolist()
        if not (0 < n < 1 << 31 and 0 < k < 1 << 31):
            raise FileError(self.path, f"tensor '{module}.weight_shape' is {[n, k]}")
        words = self._files.shape(f"{module}.weight_packed")
        is_of_eight = self._packing.some_of_eight and words == (n, -(-k // 4))
        return n, k, 8 if is_of_eight else self._packing.bits

    def _groups(self, name: str, k: int, groups: int) -> Tensor | None:
        """The group of each column, as the tensor ``name`` says; None where there is none."""
        if name in self._files:
            found = self._part(name, _INTS, k)
            if k and not 0 <= int(found.min()) <= int(found.max()) < groups:
                reason = f"tensor {name!r} names groups outside 0 to {groups - 1}"
                raise FileError(self.path, reason)
            return found
        if groups == 0 or k % groups:
            raise FileError(self.path, f"{k} columns are not in {groups} groups of one size")
        return None


_WORDS = (torch.int32,)
_INTS = (torch.int32, torch.int64)
_FLOATS = (torch.float16, torch.bfloat16, torch.float32)
