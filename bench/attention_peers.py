"""Attention peers: torch's fused backends and FlexAttention, for the calls they have."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

FLASH = SDPBackend.FLASH_ATTENTION
SDPA_BACKENDS = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash2": FLASH}
ATTENTION_PEERS = (*SDPA_BACKENDS, "flex")


def attention_call(peer: str, arguments: Mapping[str, Any]) -> Callable[..., Any] | None:
    """What a peer makes of a call of flash_attention, or None where it has no such call."""
    if peer == "flex":
        return flex_call(arguments, compiled=True)
    return sdpa_call(SDPA_BACKENDS[peer], arguments)


def sdpa_call(backend: SDPBackend, arguments: Mapping[str, Any]) -> Callable[..., Any] | None:
    """torch's attention through one of its backends, for square causal calls without a window."""
    if not _is_plain(arguments) or arguments["sliding_window"] or not _is_square(arguments):
        return None
    if arguments["q"].shape[-1] != arguments["v"].shape[-1] and backend is FLASH:
        return None  # "No available kernel" (torch 2.11)

    def call(q: Tensor, k: Tensor, v: Tensor, softmax_scale: float | None, **_: Any) -> Tensor:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(
                q, k, v, is_causal=True, scale=softmax_scale, enable_gqa=q.shape[1] != k.shape[1]
            )

    return call


def flex_call(arguments: Mapping[str, Any], *, compiled: bool) -> Callable[..., Any] | None:
    """FlexAttention with a causal mask, and a window if there is one."""
    if not _is_plain(arguments) or not _is_square(arguments):
        return None
    window, q = arguments["sliding_window"], arguments["q"]

    def visible(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        seen = key <= query
        return seen & (key > query - window) if window else seen

    mask = create_block_mask(visible, None, None, q.shape[2], q.shape[2], device=q.device)
    attend = torch.compile(flex_attention, dynamic=False) if compiled else flex_attention

    def call(q: Tensor, k: Tensor, v: Tensor, softmax_scale: float | None, **_: Any) -> Any:
        gqa = q.shape[1] != k.shape[1]
        return attend(q, k, v, block_mask=mask, scale=softmax_scale, enable_gqa=gqa)

    return call


def _is_plain(arguments: Mapping[str, Any]) -> bool:
    return arguments["causal"] and not arguments["softcap"] and arguments["sinks"] is None


def _is_square(arguments: Mapping[str, Any]) -> bool:
    """Whether there are as many queries as keys, all valid."""
    total = arguments["k"].shape[2]
    lengths = (arguments["kv_len"], arguments["pos_offset"], arguments["kv_lens"])
    return arguments["q"].shape[2] == total and lengths in ((total, None, None), (None,) * 3)
