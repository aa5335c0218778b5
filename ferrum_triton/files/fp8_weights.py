"""Hugging Face directories whose weights are in FP8 by blocks, as DeepSeek-V3's and Qwen3's.

A module's codes are ``<module>.weight``. The scales of their blocks, by which they are multiplied,
are ``<module>.weight_scale_inv``. Here the two are one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from ferrum_triton.errors import FileError
from ferrum_triton.files.safetensors import SafetensorsFiles
from ferrum_triton.quant.fp8 import KIND, Fp8Blocks, num_blocks

CODES = "F8_E4M3"
SCALE_TYPES = ("F32", "BF16")
SUFFIX = "_scale_inv"


class Fp8Files(Mapping[str, "Tensor | Fp8Blocks"]):
    """Tensors of a directory by name, codes together with their scales.

    Attributes:
        path: the directory.
        parts: names of tensors that are codes or scales.

    Raises:
        FileError: codes are no matrix or have no scales, or scales have another type or shape than
            their codes say, or are not finite and above zero. No codes are read to find that out.
    """

    def __init__(self, files: SafetensorsFiles) -> None:
        self.path, self._files = files.path, files
        stored = {name: files.stored_as(name) for name in files}
        codes = [name for name, (kind, _) in stored.items() if kind == CODES]
        scales = [name for name in stored if name.endswith(SUFFIX)]
        for name in scales:
            if stored.get(name.removesuffix(SUFFIX), ("",))[0] != CODES:
                raise FileError(self.path, f"tensor {name!r} is scales without {CODES} codes")
        self._scales = {name: self._scales_of(name, stored[name][1]) for name in codes}
        self.parts = {*codes, *scales}
        self._names = [name for name in stored if name not in {*scales}]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __contains__(self, name: object) -> bool:
        return name in self._files and not str(name).endswith(SUFFIX)

    def __getitem__(self, name: str) -> Tensor | Fp8Blocks:
        if name in self._scales:
            return Fp8Blocks(self._files[name], self._scales[name])
        return self._files[name]

    def sizes(self) -> list[tuple[str, int, int]]:
        """Of each module in FP8: what it is called, its bytes and its weights."""
        counts = [math.prod(self._files.shape(name)) for name in self._scales]
        return [(KIND, n, n) for n in counts]

    def _scales_of(self, codes: str, shape: tuple[int, ...]) -> Tensor:
        """The scales of a matrix of codes, in float32."""
        name, want = codes + SUFFIX, [num_blocks(size) for size in shape]
        if len(shape) != 2 or 0 in shape:
            raise FileError(self.path, f"tensor {codes!r} is {CODES} {list(shape)}, no matrix")
        if name not in self._files:
            raise FileError(self.path, f"tensor {name!r} is missing, which scales {codes!r}")
        kind, got = self._files.stored_as(name)
        if kind not in SCALE_TYPES or list(got) != want:
            known = f"{' or '.join(SCALE_TYPES)} {want}, one for each block of 128 x 128"
            raise FileError(self.path, f"tensor {name!r} is {kind} {list(got)}; expected {known}")
        scales = self._files[name].to(torch.float32)
        unusable = int((~(scales.isfinite() & (scales > 0))).sum())
        if unusable:
            reason = f"tensor {name!r} holds {unusable} scales that are not finite and above zero"
            raise FileError(self.path, reason)
        return scales
