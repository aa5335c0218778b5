"""GGUF products for transformers: the module its loader takes for a kernel.

transformers keeps a GGUF file's weights packed if something can multiply by them, which it looks
for on a model hub. :func:`enable_transformers` puts this module in that place: on CUDA tensors the
Triton kernels compute, on CPU tensors the reference.

    from ferrum_triton.integrations.transformers import enable_transformers

    enable_transformers()
    model = AutoModelForCausalLM.from_pretrained(
        directory, gguf_file="model.gguf", quantization_config=GgufConfig(), dtype=torch.float32
    )

The names and arguments below are those that transformers 5.23 calls
(``transformers/integrations/gguf/kernels.py``).
"""

from __future__ import annotations

import importlib
import sys
import warnings
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import Tensor

from ferrum_triton.backends import Backend, get_backend
from ferrum_triton.errors import FerrumError, InputError
from ferrum_triton.ops.quant import MAX_GEMV_ROWS as MAX_GEMV_ROWS
from ferrum_triton.quant import FORMATS

# transformers keeps what stands here private, so it is only touched where it was tested.
TESTED = "5.23."

KINDS = {fmt.ggml_id: kind for kind, fmt in FORMATS.items()}
"""The formats served, by the number a file has for them."""

GEMV_TYPES = frozenset(KINDS)


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
    return _backend(x).gemm_quant(x, weight, _kind("mul_mat_vec", ggml_type))


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
    return _backend(x).gemv_quant_moe_id(x, blocks, ids, _kind("mul_mat_id", ggml_type))


def dequantize(weight: Tensor, ggml_type: int, rows: int, cols: int, dtype: torch.dtype) -> Tensor:
    """[rows, cols] in ``dtype`` of uint8 [rows, row_bytes]."""
    out = _backend(weight).dequantize(weight, _kind("dequantize", ggml_type), dtype)
    return out.view(rows, cols)


def get_rows(
    weight: Tensor, indices: Tensor, ggml_type: int, cols: int, dtype: torch.dtype
) -> Tensor:
    """[num_indices, cols] in ``dtype``: the rows of a packed table that ``indices`` name."""
    kind = _kind("get_rows", ggml_type)
    return _backend(weight).embedding_lookup_quant(weight, indices, kind, dtype).view(-1, cols)


def enable_transformers() -> tuple[str, ...]:
    """Let transformers keep GGUF weights packed and multiply by them with these kernels.

    Call it before ``from_pretrained``; again, it does nothing more. Files of an architecture that
    transformers decodes as it loads them stay as slow as they were: a warning says which do not.

    Returns:
        The architectures whose weights transformers keeps packed, as files name them.

    Raises:
        FerrumError: transformers is absent, or not of the version this was tested with.
    """
    try:
        found = version("transformers")
    except PackageNotFoundError as error:
        raise FerrumError("transformers is not installed; pip install transformers") from error
    if not found.startswith(TESTED):
        raise FerrumError(
            f"transformers is {found}; its GGUF loader is known to take these kernels in "
            f"{TESTED}*. Install that, or load the file with this package's own models."
        )
    package = "transformers.integrations.gguf"
    kernels: Any = importlib.import_module(f"{package}.kernels")
    configs: Any = importlib.import_module(f"{package}.gguf_config_mapping")
    kernels._gguf_kernel = kernels.GgufKernel(sys.modules[__name__])
    served = tuple(configs.GGUF_CONFIG_ARCHS)
    warnings.warn(
        f"transformers keeps GGUF weights packed for {', '.join(served)} alone. It decodes files "
        "of other architectures as it loads them, and calls no kernel of this package for them.",
        stacklevel=2,
    )
    return served


def _backend(x: Tensor) -> Backend:
    return get_backend({"cuda": "cuda", "mps": "metal"}.get(x.device.type, "cpu"))


def _kind(call: str, ggml_type: int) -> str:
    if ggml_type not in KINDS:
        served = ", ".join(f"{number} ({name})" for number, name in KINDS.items())
        raise InputError(call, "ggml_type", str(ggml_type), served, "Dequantise it at load.")
    return KINDS[ggml_type]


def _check_rows(call: str, weight: Tensor, out_features: int) -> None:
    if weight.shape[-2] != out_features:
        allowed = f"{weight.shape[-2]}, the rows of the weight"
        raise InputError(call, "out_features", str(out_features), allowed, "Pass that.")
