"""The gated delta rule in the ``"torch"`` provider: on a CPU the host reads where sequences are.

The reference takes tokens one by one, and any sequences without looking at where they are, at the
price of copies of all states a call. Here states are read and written where they lie, and prompts
go by chunks, whose products :mod:`ferrum_triton.kernels.linear_attention.prefill` writes out.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ferrum_triton.ops.linear_attention import delta
from ferrum_triton.ops.linear_attention.sequences import sequences


@delta.gdn_prefill.impl("torch")
def gdn_prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    states: Tensor | None = None,
    slots: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    pos_offsets: Tensor | None = None,
    query_scale: float | None = None,
    tiled_values: bool = False,
    *,
    out: Tensor | None = None,
) -> Tensor:
    given = (q, k, v, g, beta, states, slots, cu_seqlens, pos_offsets)
    y = v.new_zeros(v.shape) if out is None else out
    if v.device.type != "cpu":
        return y.copy_(delta.gdn_prefill.reference(*given, query_scale, tiled_values))
    return _in_parts(_chunk, delta.CHUNK, y, *given, query_scale, tiled_values)


@delta.gdn_decode.impl("torch")
def gdn_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    states: Tensor | None = None,
    slots: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    pos_offsets: Tensor | None = None,
    kept_slots: Tensor | None = None,
    query_scale: float | None = None,
    tiled_values: bool = False,
    *,
    out: Tensor | None = None,
) -> Tensor:
    given = (q, k, v, g, beta, states, slots, cu_seqlens, pos_offsets)
    y = v.new_zeros(v.shape) if out is None else out
    if v.device.type != "cpu" or kept_slots is not None:
        return y.copy_(delta.gdn_decode.reference(*given, kept_slots, query_scale, tiled_values))
    return _in_parts(_token, 1, y, *given, query_scale, tiled_values)


def _in_parts(
    take: Callable[..., tuple[Tensor, Tensor]],
    most: int,
    y: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    states: Tensor | None,
    slots: Tensor | None,
    cu_seqlens: Tensor | None,
    pos_offsets: Tensor | None,
    query_scale: float | None,
    tiled_values: bool,
) -> Tensor:
    """y ← the results of all sequences, ``take`` of up to ``most`` tokens; states are written."""
    heads = delta.key_heads(q.shape[1], v.shape[1], tiled_values, v.device)
    scale = q.shape[2] ** -0.5 if query_scale is None else query_scale
    batch = sequences(v.shape[0], states, slots, cu_seqlens, pos_offsets, v.device)
    places = (batch.start, batch.end, batch.source, batch.slot)
    for start, end, source, slot in zip(*(place.tolist() for place in places), strict=False):
        state = torch.zeros(v.shape[1], q.shape[2], v.shape[2])
        if states is not None and source >= 0:
            state = states[source].float()
        for first in range(start, end, most):
            part = slice(first, min(first + most, end))
            queries, keys = (t[part][:, heads].transpose(0, 1).float() for t in (q, k))
            values, gates = v[part].transpose(0, 1).float(), (g[part].T, beta[part].T)
            result, state = take(scale * queries, keys, values, *gates, state)
            y[part] = result.transpose(0, 1).to(y.dtype)
        if states is not None and slot >= 0:
            states[slot] = state.to(states.dtype)
    return y


def _token(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """:func:`_chunk` of one token, as the definition has it."""
    state = g.exp()[..., None] * state
    change = beta[..., None] * (v - k @ state)
    state = state + k.mT * change
    return q @ state, state


def _chunk(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """The results of a chunk's tokens and the state behind it, for each head.

    Args:
        q, k: [num_heads, tokens, head_k_dim].
        v: [num_heads, tokens, head_v_dim].
        g, beta: [num_heads, tokens].
        state: [num_heads, head_k_dim, head_v_dim].
    """
    total = g.clamp(min=delta.LEAST_GATE).cumsum(dim=1)[..., None]
    decay = (total - total.mT).exp().tril()  # from one token to another behind it
    alike = (beta[..., None] * decay * (k @ k.mT)).tril(-1)
    wanted = beta[..., None] * (v - total.exp() * (k @ state))
    change = torch.linalg.solve_triangular(alike, wanted, upper=False, unitriangular=True)
    y = total.exp() * (q @ state) + (decay * (q @ k.mT)) @ change
    last = total[:, -1:]
    return y, last.exp() * state + (k * (last - total).exp()).mT @ change
