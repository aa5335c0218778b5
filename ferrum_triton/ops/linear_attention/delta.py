"""The gated delta rule: a recurrence over tokens, token by token or in chunks.

A state S [head_k_dim, head_v_dim] is a map from keys to values. A token lets it fade, asks what it
says of the token's key, and moves that towards the token's value::

    S ← e^g · S
    S ← S + k ⊗ β · (v - Sᵀ k)
    y = query_scale · Sᵀ q

States are [num_slots, num_v_heads, head_k_dim, head_v_dim], values innermost: sums over keys then
run along the registers of a thread, where keys innermost would be summed across a warp for each
value.

Value head h has key head h // (num_v_heads / num_k_heads); with ``tiled_values`` it has key head
h % num_k_heads, as in llama.cpp's files of Qwen3.5, whose products then need no other order.
"""

import torch
from torch import Tensor

from ferrum_triton.ops.linear_attention.sequences import (
    SEQUENCE_AXES,
    SEQUENCE_TENSORS,
    check_kept,
    check_sequences,
    lengths,
    read_states,
    refuse_shared_slots,
    sequence_sample,
    sequences,
    write_states,
)
from ferrum_triton.ops.precision import widen
from ferrum_triton.registry import Case, Op, op

MAX_HEAD_DIM = 256

CHUNK = 64
"""Tokens that are taken together."""

LEAST_GATE = -104.0
"""Below it e^g is zero in float32. Sums of a chunk of these stay finite, and so do differences."""

MOST_IN_TURN = 16
"""Tokens of a sequence that models take in turn; more are taken in chunks.

A quarter of a chunk, which has not been measured.
"""

DELTA_TENSORS = {
    "q": "T[num_tokens, num_k_heads, head_k_dim]",
    "k": "T[num_tokens, num_k_heads, head_k_dim]",
    "v": "T[num_tokens, num_v_heads, head_v_dim]",
    "g": "float32[num_tokens, num_v_heads]",
    "beta": "float32[num_tokens, num_v_heads]",
    "states": "float[num_slots, num_v_heads, head_k_dim, head_v_dim]",
    **SEQUENCE_TENSORS,
}
DELTA_AXES = {
    "num_k_heads": (1, 2),
    "group_size": (1, 3),
    "head_k_dim": (1, 16, 40),
    "head_v_dim": (1, 16, 24),
    "state_dtype": (torch.bfloat16, torch.float32),
    "query_scale": (None, 0.5),
    "tiled_values": (False, True),
    **SEQUENCE_AXES,
}
HEADS = {"num_k_heads": 16, "group_size": 2, "head_k_dim": 128, "head_v_dim": 128}


def key_heads(num_k_heads: int, num_v_heads: int, tiled_values: bool, device) -> Tensor:
    """The key head of each value head."""
    head = torch.arange(num_v_heads, device=device)
    return head % num_k_heads if tiled_values else head // (num_v_heads // num_k_heads)


def delta_rule(
    q, k, v, g, beta, states, slots, cu_seqlens, pos_offsets, kept_slots, query_scale, tiled_values
) -> Tensor:
    """The recurrence, token by token; states are written."""
    (num_tokens, num_v_heads, head_v_dim), head_k_dim = v.shape, q.shape[2]
    batch = sequences(num_tokens, states, slots, cu_seqlens, pos_offsets, v.device)
    if states is None:
        state = widen(v.new_zeros(batch.start.shape[0], num_v_heads, head_k_dim, head_v_dim))
    else:
        state = read_states(states, batch.source)
    heads = key_heads(q.shape[1], num_v_heads, tiled_values, v.device)
    q, k = (widen(t)[:, heads, :, None] for t in (q, k))
    query_scale = head_k_dim**-0.5 if query_scale is None else query_scale
    decay = widen(g).exp()[..., None, None]
    y = widen(torch.zeros_like(v))
    kept = widen(v.new_zeros(0 if kept_slots is None else num_tokens, *state.shape[1:]))
    for t in range(num_tokens):
        seq = batch.seq[t : t + 1]
        now = state[seq][0] * decay[t]
        told = (now * k[t]).sum(dim=-2)
        change = beta[t][:, None] * (widen(v[t]) - told)
        now = now + k[t] * change[:, None, :]
        y[t] = (now * (query_scale * q[t])).sum(dim=-2)
        state[seq] = now[None]
        if kept_slots is not None:
            kept[t] = now
    if kept_slots is not None:
        write_states(states, torch.where(batch.alive[batch.seq], kept_slots, -1), kept)
    elif states is not None:
        write_states(states, batch.slot, state[:-1])
    return y.to(v.dtype)


def check_delta(of_op: Op, q, v, states, slots, cu_seqlens, pos_offsets) -> None:
    """Hold heads, their widths and the sequences against each other."""
    num_k_heads, head_k_dim = q.shape[1:]
    num_v_heads, head_v_dim = v.shape[1:]
    if num_k_heads == 0 or num_v_heads == 0 or num_v_heads % num_k_heads:
        got = f"of {num_v_heads} heads over {num_k_heads} key heads"
        of_op.reject("v", got, "a multiple of the key heads")
    for name, width in (("q", head_k_dim), ("v", head_v_dim)):
        if not 1 <= width <= MAX_HEAD_DIM:
            of_op.reject(name, f"of heads of {width}", f"heads of 1 to {MAX_HEAD_DIM}")
    check_sequences(of_op, q.shape[0], states, slots, cu_seqlens, pos_offsets)


def delta_sample(
    make, num_k_heads, group_size, head_k_dim, head_v_dim, seq_lens=None, batch=1, q_len=1,
    state_dtype=torch.float32, query_scale=None, tiled_values=False, decay=1.0, **axes,
):  # fmt: skip
    """Tokens as :func:`gdn_prepare` makes them: keys of norm 1, decays and betas up to 1."""
    seq_lens = lengths(seq_lens, batch, q_len)
    num_tokens, num_v_heads = sum(seq_lens), num_k_heads * group_size
    num_slots, arguments = sequence_sample(make, seq_lens, **axes)
    if num_slots is not None:
        states = make.randn(num_slots, num_v_heads, head_k_dim, head_v_dim)
        arguments["states"] = states.to(state_dtype)
    q, k = (
        torch.nn.functional.normalize(make.randn(num_tokens, num_k_heads, head_k_dim), dim=-1)
        for _ in range(2)
    )
    return {
        "q": q,
        "k": k,
        "v": make.randn(num_tokens, num_v_heads, head_v_dim),
        "g": -decay * make.randn(num_tokens, num_v_heads).float().abs(),
        "beta": make.randn(num_tokens, num_v_heads, scale=2.0).float().sigmoid(),
        "query_scale": query_scale,
        "tiled_values": tiled_values,
        **arguments,
    }


def _bytes(q, k, v, g, beta, states, slots, written) -> int:
    moved = sum(t.numel() * t.element_size() for t in (q, k, v, v, g, beta))
    if states is None:
        return moved
    each = states.shape[1:].numel() * states.element_size()
    return moved + (slots.numel() + written.numel()) * each


def _flops(q, v) -> int:
    """Of the recurrence: what a state says of a key, what is added to it, and the result."""
    return 6 * v.numel() * q.shape[2]


def _fake(q, k, v, *_, **__):
    return torch.empty_like(v, memory_format=torch.contiguous_format)


@op(
    tensors={**DELTA_TENSORS, "kept_slots": "int[num_tokens]"},
    axes={
        **DELTA_AXES,
        "seq_lens": ((), (1,), (1, 1, 1), (2, 0, 4, 1), (5, 3)),
        "with_kept": (False, True),
    },
    bench=[
        Case(
            f"fp32/k16v32d128/{name}",
            torch.bfloat16,
            {"batch": batch, "q_len": q_len, **HEADS, **axes},
        )
        for name, batch, q_len, axes in (
            ("b1", 1, 1, {}),
            ("b32", 32, 1, {}),
            ("b256", 256, 1, {}),
            ("verify4/b32", 32, 4, {"with_kept": True}),
            ("tiled/b32", 32, 1, {"tiled_values": True}),
        )
    ],
    mutates=("states",),
)
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
) -> Tensor:
    """S ← e^g · S; S ← S + k ⊗ β · (v - Sᵀ k); y = query_scale · Sᵀ q, token by token.

    For a decode step, and for the few tokens of a sequence whose guesses are verified. Any number
    of tokens is right; :func:`gdn_prefill` is faster for many.

    Args:
        q, k: [num_tokens, num_k_heads, head_k_dim], normalised by the caller; widths up to 256.
        v: [num_tokens, num_v_heads, head_v_dim].
        g: [num_tokens, num_v_heads] in float32, the logarithm of what a state is multiplied by;
            0 or less in a model, -inf forgets.
        beta: [num_tokens, num_v_heads] in float32.
        states: [num_slots, num_v_heads, head_k_dim, head_v_dim], written in place; any float
            dtype, to which a state is rounded when it is written, while it is float32 from token to
            token of a call. None means zeros, and that none is kept.
        slots, cu_seqlens, pos_offsets, kept_slots: as in
            :mod:`ferrum_triton.ops.linear_attention.sequences`.
        query_scale: None means 1 / sqrt(head_k_dim).
        tiled_values: whether value head h has key head h % num_k_heads, and not
            h // (num_v_heads / num_k_heads).

    Returns:
        [num_tokens, num_v_heads, head_v_dim] in v's dtype; computed in float32.

    Source: Yang et al., "Gated Delta Networks", 2024.
    """
    return delta_rule(
        q, k, v, g, beta, states, slots, cu_seqlens, pos_offsets, kept_slots, query_scale,
        tiled_values,
    )  # fmt: skip


gdn_decode.fake = _fake


@gdn_decode.rule
def _(
    q, k, v, g, beta, states, slots, cu_seqlens, pos_offsets, kept_slots, query_scale, tiled_values
):
    check_delta(gdn_decode, q, v, states, slots, cu_seqlens, pos_offsets)
    check_kept(gdn_decode, q.shape[0], states, kept_slots)


@gdn_decode.data_rule
def _(
    q, k, v, g, beta, states, slots, cu_seqlens, pos_offsets, kept_slots, query_scale, tiled_values
):
    refuse_shared_slots(gdn_decode, states, slots, kept_slots)


gdn_decode.sample(delta_sample)


@gdn_decode.traffic
def _(
    q, k, v, g, beta, states, slots, cu_seqlens, pos_offsets, kept_slots, query_scale, tiled_values
):
    written = slots if kept_slots is None else kept_slots
    return _bytes(q, k, v, g, beta, states, slots, written)


@op(
    tensors=DELTA_TENSORS,
    # Keys of one number are all alike: docs/linear-attention.md says what 16 bits make of that.
    axes={
        **DELTA_AXES,
        "head_k_dim": (16, 24, 32),
        "seq_lens": ((), (1, 1), (2, 0, 70, 1), (64,), (5, 3)),
    },
    bench=[
        Case(
            f"bf16/k16v32d128/{name}{batch}x{q_len}",
            torch.bfloat16,
            {"batch": batch, "q_len": q_len, **HEADS, **axes},
        )
        for name, batch, q_len, axes in (
            ("", 1, 4096, {}),
            ("", 1, 8192, {}),
            ("", 2, 4096, {}),
            ("", 8, 4096, {}),
            ("tiled/", 1, 4096, {"tiled_values": True}),
        )
    ],
    mutates=("states",),
    # Tokens of a chunk meet in products, where one is multiplied by another's zero.
    finite=("q", "k", "v", "g", "beta", "states"),
    rounded={"states": "v"},
)
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
) -> Tensor:
    """S ← e^g · S; S ← S + k ⊗ β · (v - Sᵀ k); y = query_scale · Sᵀ q, by chunks of 64 tokens.

    :func:`gdn_decode` for prompts: the same result, from products of matrices. A value that is not
    finite may make NaN of any result of its sequence from its own chunk on; other sequences do not
    see it.

    Args:
        q, k: [num_tokens, num_k_heads, head_k_dim], normalised by the caller; widths up to 256.
        v: [num_tokens, num_v_heads, head_v_dim].
        g: [num_tokens, num_v_heads] in float32, 0 or less; -inf forgets.
        beta: [num_tokens, num_v_heads] in float32.
        states: [num_slots, num_v_heads, head_k_dim, head_v_dim], written in place, as in
            :func:`gdn_decode`.
        slots, cu_seqlens, pos_offsets: as in
            :mod:`ferrum_triton.ops.linear_attention.sequences`.
        query_scale: None means 1 / sqrt(head_k_dim).
        tiled_values: whether value head h has key head h % num_k_heads, and not
            h // (num_v_heads / num_k_heads).

    Returns:
        [num_tokens, num_v_heads, head_v_dim] in v's dtype. Products are of values in v's dtype,
        summed in float32; a state is in float32 from chunk to chunk. Float32 itself is computed
        token by token, as by :func:`gdn_decode`.

    Source: Yang et al., "Gated Delta Networks", 2024; Yang et al., "Parallelizing Linear
    Transformers with the Delta Rule over Sequence Length", 2024 (the WY form).
    """
    return delta_rule(
        q, k, v, g, beta, states, slots, cu_seqlens, pos_offsets, None, query_scale, tiled_values
    )


gdn_prefill.fake = _fake


@gdn_prefill.rule
def _(q, k, v, g, beta, states, slots, cu_seqlens, pos_offsets, query_scale, tiled_values):
    check_delta(gdn_prefill, q, v, states, slots, cu_seqlens, pos_offsets)


@gdn_prefill.data_rule
def _(q, k, v, g, beta, states, slots, cu_seqlens, pos_offsets, query_scale, tiled_values):
    refuse_shared_slots(gdn_prefill, states, slots)


gdn_prefill.sample(delta_sample)


@gdn_prefill.traffic
def _(q, k, v, g, beta, states, slots, cu_seqlens, pos_offsets, query_scale, tiled_values):
    return _bytes(q, k, v, g, beta, states, slots, slots)


@gdn_prefill.flops
def _(q, k, v, g, beta, states, slots, cu_seqlens, pos_offsets, query_scale, tiled_values):
    return _flops(q, v)
