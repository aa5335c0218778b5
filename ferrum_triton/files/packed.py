"""Hugging Face directories whose weights are in few bits, whichever way."""

from __future__ import annotations

from typing import TypeAlias

from ferrum_triton.files.fp4_weights import Fp4Files
from ferrum_triton.files.fp8_weights import Fp8Files
from ferrum_triton.files.int_weights import IntFiles, Packing
from ferrum_triton.files.safetensors import SafetensorsFiles

PackedFiles: TypeAlias = IntFiles | Fp8Files | Fp4Files


def open_packed(files: SafetensorsFiles, packing: Packing) -> PackedFiles:
    """A directory's tensors, those in few bits as weights that are multiplied as they are.

    Raises:
        FileError: parts of a weight are missing or do not fit each other.
    """
    if packing.float_format:
        return Fp4Files(files, packing)
    return Fp8Files(files) if packing.method == "fp8" else IntFiles(files, packing)
