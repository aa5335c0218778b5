"""Hugging Face directories whose weights are in NVFP4 or MXFP4, by compressed-tensors or modelopt.

A module's codes, the scales of its groups and, of NVFP4, what scales the whole matrix are tensors
of their own. Here they are one, as :mod:`ferrum_triton.quant.float4` makes it. Scales of
activations and of caches are left out: both keep their bits.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from torch import Tensor

from ferrum_triton.errors import FileError, InputError
from ferrum_triton.files.int_weights import Packing
from ferrum_triton.files.safetensors import SafetensorsFiles
from ferrum_triton.quant import FORMATS, QuantizedTensor, load_mxfp4, load_nvfp4
from ferrum_triton.quant.float4 import MXFP4_GROUP, NVFP4_GROUP

LEFT_OUT = (".input_scale", ".input_global_scale", ".k_scale", ".v_scale")
# How codes, scales and the whole matrix' scale are called, by who packs them.
NAMES = {
    "modelopt": (".weight", ".weight_scale", ".weight_scale_2"),
    "compressed-tensors": (".weight_packed", ".weight_scale", ".weight_global_scale"),
}


class _Module(NamedTuple):
    """A matrix: the names of its tensors, and what scales all of it."""

    codes: str
    scales: str
    whole: float


class Fp4Files(Mapping[str, "Tensor | QuantizedTensor"]):
    """Tensors of a directory by name, those in codes of E2M1 as one tensor ``<module>.weight``.

    Attributes:
        path: the directory.
        parts: names of tensors that are a part of some module's weight.

    Raises:
        FileError: codes are no matrix in whole groups, or what scales them is missing, of another
            type or shape than they say, or not finite and above zero where it scales a whole
            matrix. No codes are read to find that out.
    """

    def __init__(self, files: SafetensorsFiles, packing: Packing) -> None:
        self.path, self._files, self._packing = files.path, files, packing
        self._modules: dict[str, _Module] = {}
        self.parts: set[str] = set()
        suffix = NAMES[packing.method][0]
        for name in files:
            # Of modelopt, weights that are no codes have the name too.
            if name.endswith(suffix) and (
                suffix != ".weight" or files.stored_as(name)[0] in ("U8", "I8")
            ):
                module = name.removesuffix(suffix)
                self._modules[f"{module}.weight"] = self._module_of(module)
        plain = (name for name in files if name not in self.parts and not name.endswith(LEFT_OUT))
        self._names = [*plain, *self._modules]
        self._there = set(self._names)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __contains__(self, name: object) -> bool:
        return name in self._there

    def __getitem__(self, name: str) -> Tensor | QuantizedTensor:
        """The tensor ``name``.

        Raises:
            FileError: it cannot be read, or scales of its groups are NaN.
        """
        if name not in self._modules:
            return self._files[name]
        module = self._modules[name]
        codes, scales = self._files[module.codes], self._files[module.scales]
        try:
            if self._packing.float_format == "MXFP4":
                return load_mxfp4(codes, scales)
            if self._packing.method == "modelopt":
                return load_nvfp4(codes, scales, factor=module.whole)
            return load_nvfp4(codes, scales, divisor=module.whole)
        except InputError as error:
            told = f"{error.argument} is {error.got}; allowed: {error.allowed}"
            raise FileError(self.path, f"weight of {name!r}: {told}") from error

    def sizes(self) -> list[tuple[str, int, int]]:
        """Of each module in codes: its format, its bytes and its weights."""
        fmt = FORMATS[self._packing.float_format]
        counts = [2 * math.prod(self._files.shape(each.codes)) for each in self._modules.values()]
        return [(fmt.name, n // fmt.block_size * fmt.block_bytes, n) for n in counts]

    def _module_of(self, module: str) -> _Module:
        """The tensors of a module, which fit each other."""
        is_mx = self._packing.float_format == "MXFP4"
        codes, scales, whole = (module + suffix for suffix in NAMES[self._packing.method])
        kind, shape = self._files.stored_as(codes)
        group = MXFP4_GROUP if is_mx else NVFP4_GROUP
        if kind != "U8" or len(shape) != 2 or 2 * shape[1] % group:
            want = f"U8 [rows, columns / 2] in groups of {group}"
            raise FileError(self.path, f"tensor {codes!r} is {kind} {list(shape)}; expected {want}")
        size = [shape[0], 2 * shape[1] // group]
        self._expect(scales, "U8" if is_mx else "F8_E4M3", [size])
        self.parts |= {codes, scales}
        if is_mx:
            return _Module(codes, scales, 1.0)
        self._expect(whole, "F32", [[], [1]])
        self.parts.add(whole)
        value = float(self._files[whole])
        if not 0.0 < value < math.inf:
            reason = f"is {value}; expected a number that is finite and above zero"
            raise FileError(self.path, f"tensor {whole!r} {reason}")
        return _Module(codes, scales, value)

    def _expect(self, name: str, kind: str, shapes: list[list[int]]) -> None:
        """Raise unless there is a tensor of a type, in one of some shapes."""
        if name not in self._files:
            raise FileError(self.path, f"tensor {name!r} is missing")
        got, shape = self._files.stored_as(name)
        if got != kind or list(shape) not in shapes:
            want = f"{kind} {' or '.join(map(str, shapes))}"
            raise FileError(self.path, f"tensor {name!r} is {got} {list(shape)}; expected {want}")
