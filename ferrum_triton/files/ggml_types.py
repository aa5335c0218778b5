"""The element types a GGUF tensor can have: number, name and block geometry of each.

Source: the ``ggml_type`` enumeration and block structures of ggml (``ggml.h``, ``ggml-common.h``),
which the GGUF specification refers to. Numbers missing from the table belonged to types that ggml
has removed.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class GgmlType:
    """One element type.

    Attributes:
        name: ggml's name, e.g. ``"Q4_1"``.
        id: the type's number in files.
        block_size: weights in a block; 1 for plain types.
        block_bytes: bytes of a block.
        dtype: the torch dtype of a plain type, None for block-quantised ones.
    """

    name: str
    id: int
    block_size: int
    block_bytes: int
    dtype: torch.dtype | None = None


_TYPES = (
    GgmlType("F32", 0, 1, 4, torch.float32),
    GgmlType("F16", 1, 1, 2, torch.float16),
    GgmlType("Q4_0", 2, 32, 18),
    GgmlType("Q4_1", 3, 32, 20),
    GgmlType("Q5_0", 6, 32, 22),
    GgmlType("Q5_1", 7, 32, 24),
    GgmlType("Q8_0", 8, 32, 34),
    GgmlType("Q8_1", 9, 32, 36),
    GgmlType("Q2_K", 10, 256, 84),
    GgmlType("Q3_K", 11, 256, 110),
    GgmlType("Q4_K", 12, 256, 144),
    GgmlType("Q5_K", 13, 256, 176),
    GgmlType("Q6_K", 14, 256, 210),
    GgmlType("Q8_K", 15, 256, 292),
    GgmlType("IQ2_XXS", 16, 256, 66),
    GgmlType("IQ2_XS", 17, 256, 74),
    GgmlType("IQ3_XXS", 18, 256, 98),
    GgmlType("IQ1_S", 19, 256, 50),
    GgmlType("IQ4_NL", 20, 32, 18),
    GgmlType("IQ3_S", 21, 256, 110),
    GgmlType("IQ2_S", 22, 256, 82),
    GgmlType("IQ4_XS", 23, 256, 136),
    GgmlType("I8", 24, 1, 1, torch.int8),
    GgmlType("I16", 25, 1, 2, torch.int16),
    GgmlType("I32", 26, 1, 4, torch.int32),
    GgmlType("I64", 27, 1, 8, torch.int64),
    GgmlType("F64", 28, 1, 8, torch.float64),
    GgmlType("IQ1_M", 29, 256, 56),
    GgmlType("BF16", 30, 1, 2, torch.bfloat16),
    GgmlType("TQ1_0", 34, 256, 54),
    GgmlType("TQ2_0", 35, 256, 66),
    GgmlType("MXFP4", 39, 32, 17),
    GgmlType("NVFP4", 40, 64, 36),
    GgmlType("Q1_0", 41, 128, 18),
)

GGML_TYPES: dict[int, GgmlType] = {t.id: t for t in _TYPES}
"""Every known type by its number in files."""
