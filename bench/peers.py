"""What ops are timed against: torch, torch.compile, and where they are installed Liger, FlashInfer
and flash-linear-attention; for attention torch's fused backends and FlexAttention, and for FP8
torch's product of codes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from bench.attention_peers import ATTENTION_PEERS, attention_call
from bench.fla_peers import fla_call
from bench.flashinfer_peers import flashinfer_call
from ferrum_triton.ops.fp8.codes import quantize_fp8_groups
from ferrum_triton.registry import Op

SCALED_MM = "scaled_mm"
PEERS = ("torch", "inductor", "liger", "flashinfer", "fla", SCALED_MM, *ATTENTION_PEERS)


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x, weight.shape, weight.to(x.dtype), eps)


def _layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    return F.layer_norm(x, weight.shape, weight.to(x.dtype), bias.to(x.dtype), eps)


def _fused_add_rms_norm(residual: Tensor, x: Tensor, weight: Tensor, eps: float) -> Tensor:
    residual.add_(x)
    return _rms_norm(residual, weight, eps)


def _silu_mul(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


# As a torch user would write each op.
TORCH: dict[str, Callable[..., Any]] = {
    "rms_norm": _rms_norm,
    "layer_norm": _layer_norm,
    "fused_add_rms_norm": _fused_add_rms_norm,
    "fused_silu_mul_split": _silu_mul,
    "argmax_rows": lambda logits, **_: logits.argmax(dim=-1),
    "embedding_lookup_dev": lambda table, ids: F.embedding(ids, table),
    "add_inplace": lambda residual, x: residual.add_(x),
    "transpose_head_to_token": lambda x: x.transpose(0, 1).contiguous(),
}


# What peers are imported from, where it is no part of torch.
PACKAGES = {"liger": "liger_kernel", "flashinfer": "flashinfer", "fla": "fla"}


def absent(peers: Iterable[str]) -> list[str]:
    """Those of the peers that are not installed."""
    return [name for name in peers if name in PACKAGES and find_spec(PACKAGES[name]) is None]


def peer_call(peer: str, op: Op, arguments: dict[str, Any]) -> Callable[..., Any] | None:
    """A function of the op's arguments, or None where the peer has no such op or is absent."""
    if absent([peer]):
        return None
    if peer == "liger":
        return _liger(op)
    if peer == "flashinfer":
        return flashinfer_call(op.name, arguments)
    if peer == "fla":
        return fla_call(op.name, arguments)
    if peer in ATTENTION_PEERS:
        return attention_call(peer, arguments) if op.name == "flash_attention" else None
    if peer == SCALED_MM:
        return _scaled_mm(**arguments) if op.name == "gemm_fp8_128x128" else None
    written = TORCH.get(op.name)
    if written is None or peer == "torch":
        return written
    return torch.compile(written, fullgraph=True, dynamic=False)


def _scaled_mm(a: Tensor, weight: Tensor, scales: Tensor) -> Callable[..., Any]:
    """cuBLAS by the codes of ``a``, which are made beforehand: not in its time, though in ours.

    It takes no fewer than 16 tokens: the rest are rows of zeros.
    """
    rows = F.pad(a, (0, 0, 0, max(16 - len(a), 0)))
    codes, steps = quantize_fp8_groups.reference(rows)
    steps = steps.T.contiguous().T  # as cuBLAS takes them
    return lambda a, weight, scales: torch._scaled_mm(
        codes, weight.T, steps, scales.T, out_dtype=a.dtype
    )


def _liger(op: Op) -> Callable[..., Any] | None:
    if op.name == "rms_norm":
        from liger_kernel.ops.rms_norm import rms_norm_forward

        return lambda x, weight, eps: rms_norm_forward(x, weight, eps, 0.0, "llama", None)[0]
    if op.name != "layer_norm":
        return None
    from liger_kernel.ops.layer_norm import layer_norm_forward

    return lambda x, weight, bias, eps: layer_norm_forward(x, weight, bias, eps)[0]
