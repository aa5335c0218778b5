"""The products that transformers calls for weights it keeps in a GGUF file's blocks.

The names and arguments are those of the kernel that its loader looks for on a model hub
(``transformers/integrations/gguf/kernels.py`` of 5.23). Modules of its own that a conversion leaves
alone, or gives back, compute with them.
"""

from __future__ import annotations

import sys

import torch
from torch import Tensor

from ferrum_triton.errors import InputError
from ferrum_triton.integrations.transformers.layers import backend_of
from ferrum_triton.integrations.transformers.library import part
from ferrum_triton.ops.quant import MAX_GEMV_ROWS as MAX_GEMV_ROWS
from ferrum_triton.quant.formats import GGUF_FORMATS

KINDS = {number: fmt.name for number, fmt in GGUF_FORMATS.items()}
"""The formats served, by the number a file has for them."""

GEMV_TYPES = frozenset(KINDS)


def keep_packed() -> None:
    """Let transformers leave a GGUF file's weights in their blocks when it loads one.

    It does so if there is a kernel to multiply by them, for the architectures that its own loader
    knows (``GGUF_CONFIG_ARCHS``). Call this before ``from_pretrained``; a second call does nothing.

    Raises:
        FerrumError: transformers is absent, or not of the version this was tested with.
    """
    kernels = part("integrations.gguf.kernels")
    kernels._gguf_kernel = kernels.GgufKernel(sys.modules[__name__])


def mul_mat_vec(weight: Tensor, x: Tensor, ggml_type: int, out_features: int) -> Tensor:
    """x @ Wᵀ for a few rows.

    Args:
        weight: uint8 [out_features, row_bytes].
        x: [rows, K].
        ggml_type: the blocks' format, as files number it.
        out_features: rows of the weight.

    Returns:
        [rows, out_features] in x's dtype.
    """
    _check_rows("mul_mat_vec", weight, out_features)
    return backend_of(x).gemm_quant(x, weight, _kind("mul_mat_vec", ggml_type))


def mul_mat_id(blocks: Tensor, x: Tensor, ids: Tensor, ggml_type: int, out_features: int) -> Tensor:
    """x[t] @ W[ids[t, s]]ᵀ for each slot s of a token.

    Args:
        blocks: uint8 [num_experts, out_features, row_bytes].
        x: [num_tokens, K].
        ids: [num_tokens, top_k] int32.

    Returns:
        [num_tokens, top_k, out_features] in x's dtype.
    """
    _check_rows("mul_mat_id", blocks, out_features)
    return backend_of(x).gemv_quant_moe_id(x, blocks, ids, _kind("mul_mat_id", ggml_type))


def dequantize(weight: Tensor, ggml_type: int, rows: int, cols: int, dtype: torch.dtype) -> Tensor:
    """[rows, cols] in ``dtype`` of uint8 [rows, row_bytes]."""
    out = backend_of(weight).dequantize(weight, _kind("dequantize", ggml_type), dtype)
    return out.view(rows, cols)


def get_rows(
    weight: Tensor, indices: Tensor, ggml_type: int, cols: int, dtype: torch.dtype
) -> Tensor:
    """[num_indices, cols] in ``dtype``: the rows of a packed table that ``indices`` name."""
    kind = _kind("get_rows", ggml_type)
    return backend_of(weight).embedding_lookup_quant(weight, indices, kind, dtype).view(-1, cols)


def _kind(call: str, ggml_type: int) -> str:
    if ggml_type not in KINDS:
        served = ", ".join(f"{number} ({name})" for number, name in KINDS.items())
        raise InputError(call, "ggml_type", str(ggml_type), served, "Dequantise it at load.")
    return KINDS[ggml_type]


def _check_rows(call: str, weight: Tensor, out_features: int) -> None:
    if weight.shape[-2] != out_features:
        allowed = f"{weight.shape[-2]}, the rows of the weight"
        raise InputError(call, "out_features", str(out_features), allowed, "Pass that.")
