"""Causal depthwise convolution over sequences, with the last tokens of each as its state."""

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
from ferrum_triton.ops.pointwise import silu
from ferrum_triton.ops.precision import widen
from ferrum_triton.registry import Case, Op, op

ACTIVATION = ("none", "silu")

# Kernels are written out tap by tap.
MAX_WIDTH = 16

CONV_TENSORS = {
    "states": "float[num_slots, history, num_channels]",
    **SEQUENCE_TENSORS,
    "kept_slots": "int[num_tokens]",
}
SEQ_LENS = ((), (0,), (1,), (1, 1, 1), (2, 0, 7, 1), (70,), (5, 3))


def convolve(x, weight, bias, states, slots, cu_seqlens, pos_offsets, kept_slots) -> Tensor:
    """The convolution of x [num_tokens, num_channels], not rounded; states are written."""
    num_tokens, num_channels = x.shape
    history = weight.shape[1] - 1
    if num_tokens == 0:
        return widen(x)
    batch = sequences(num_tokens, states, slots, cu_seqlens, pos_offsets, x.device)
    if states is None:
        before = widen(x.new_zeros(batch.start.shape[0], history, num_channels))
    else:
        before = read_states(states, batch.source)

    def inputs(seq: Tensor, token: Tensor) -> Tensor:
        """Inputs of tokens, which before a sequence's start are in its state."""
        local = token - batch.start[seq]
        rows = widen(x)[token.clamp(0, num_tokens - 1)]
        if history == 0:
            return rows
        old = before[seq, (history + local).clamp(0, history - 1)]
        return torch.where((local >= 0)[..., None], rows, old)

    token = torch.arange(num_tokens, device=x.device)
    y = widen(x.new_zeros(num_tokens, num_channels))
    for tap in range(history + 1):
        y = y + inputs(batch.seq, token - history + tap) * widen(weight)[:, tap]
    if bias is not None:
        y = y + widen(bias)
    if states is None or history == 0:
        return y
    if kept_slots is None:
        seq, last, target = torch.arange(len(slots), device=x.device), batch.end[:-1], batch.slot
    else:
        seq, last = batch.seq, token + 1
        target = torch.where(batch.alive[seq], kept_slots, -1)
    newest = [inputs(seq, last - history + row) for row in range(history)]
    write_states(states, target, torch.stack(newest, dim=1))
    return y


def check_conv(of_op: Op, num_channels: int, weight: Tensor, states: Tensor | None) -> None:
    """Hold the state against the width of the convolution."""
    if not 1 <= weight.shape[1] <= MAX_WIDTH:
        of_op.reject("weight", f"of width {weight.shape[1]}", f"a width of 1 to {MAX_WIDTH}")
    if states is not None and tuple(states.shape[1:]) != (weight.shape[1] - 1, num_channels):
        want = f"[num_slots, {weight.shape[1] - 1}, {num_channels}]"
        of_op.reject("states", f"of shape {list(states.shape)}", f"{want}, after weight")


def conv_sample(make, num_channels, width, seq_lens, state_dtype=None, **axes):
    """The tensors of a convolution, and its sequences."""
    num_slots, arguments = sequence_sample(make, seq_lens, **axes)
    if num_slots is not None:
        states = make.randn(num_slots, width - 1, num_channels)
        arguments["states"] = states.to(state_dtype or make.dtype)
    return {"weight": make.weight(num_channels, width), **arguments}


def _conv_case(name: str, batch: int, q_len: int) -> Case:
    axes = {"batch": batch, "q_len": q_len, "num_channels": 8192, "width": 4}
    return Case(f"bf16/c8192w4/{name}", torch.bfloat16, axes)


@op(
    tensors={
        "x": "T[num_tokens, num_channels]",
        "weight": "float[num_channels, width]",
        "bias": "float[num_channels]",
        **CONV_TENSORS,
    },
    axes={
        "num_channels": (1, 33, 64),
        "width": (1, 2, 4),
        "seq_lens": SEQ_LENS,
        "activation": ACTIVATION,
        "with_bias": (False, True),
        "with_kept": (False, True),
        "state_dtype": (None, torch.float32),
        **SEQUENCE_AXES,
    },
    bench=[
        _conv_case("b1", 1, 1),
        _conv_case("b256", 256, 1),
        _conv_case("1x4096", 1, 4096),
    ],
    mutates=("states",),
)
def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    states: Tensor | None = None,
    slots: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    pos_offsets: Tensor | None = None,
    kept_slots: Tensor | None = None,
    bias: Tensor | None = None,
    activation: str = "silu",
) -> Tensor:
    """y[t, c] = f(bias[c] + Σ_j weight[c, j] · x[t - (width - 1) + j, c]), within each sequence.

    Inputs before a sequence's first token are in its state: its last width - 1 inputs, oldest
    first, unrounded by the activation f. A decode step is a call of one token a sequence.

    Args:
        x: [num_tokens, num_channels]; rows may be strided.
        weight: [num_channels, width], any float dtype; width up to 16.
        states: [num_slots, width - 1, num_channels], written in place; None means zeros, and that
            none is kept. Channels are innermost, as in x, so that both are read alike.
        slots, cu_seqlens, pos_offsets, kept_slots: as in
            :mod:`ferrum_triton.ops.linear_attention.sequences`.
        bias: [num_channels], or None.
        activation: ``"silu"`` or ``"none"``.

    Returns:
        [num_tokens, num_channels] in x's dtype; computed in float32, rounded once.
    """
    y = convolve(x, weight, bias, states, slots, cu_seqlens, pos_offsets, kept_slots)
    if activation == "silu":
        y = silu(y)
    return y.to(x.dtype)


causal_conv1d.fake = lambda x, *_, **__: torch.empty_like(x, memory_format=torch.contiguous_format)


@causal_conv1d.rule
def _(x, weight, states, slots, cu_seqlens, pos_offsets, kept_slots, bias, activation):
    this = causal_conv1d
    if activation not in ACTIVATION:
        this.reject("activation", repr(activation), ", ".join(map(repr, ACTIVATION)))
    check_conv(this, x.shape[1], weight, states)
    check_sequences(this, x.shape[0], states, slots, cu_seqlens, pos_offsets)
    check_kept(this, x.shape[0], states, kept_slots)


@causal_conv1d.data_rule
def _(x, weight, states, slots, cu_seqlens, pos_offsets, kept_slots, bias, activation):
    refuse_shared_slots(causal_conv1d, states, slots, kept_slots)


@causal_conv1d.sample
def _(
    make, num_channels, seq_lens=None, batch=1, q_len=1, activation="silu", with_bias=False, **axes
):
    seq_lens = lengths(seq_lens, batch, q_len)
    return {
        "x": make.randn(sum(seq_lens), num_channels),
        "bias": make.weight(num_channels) if with_bias else None,
        "activation": activation,
        **conv_sample(make, num_channels, seq_lens=seq_lens, **axes),
    }


@causal_conv1d.traffic
def _(x, weight, states, slots, cu_seqlens, pos_offsets, kept_slots, bias, activation):
    return 2 * x.numel() * x.element_size() + conv_bytes(weight, states, slots, kept_slots)


def conv_bytes(weight: Tensor, states: Tensor | None, slots, kept_slots) -> int:
    """Bytes of weights, and of the states that are read and written."""
    moved = weight.numel() * weight.element_size()
    if states is None:
        return moved
    written = slots if kept_slots is None else kept_slots
    each = states.shape[1:].numel() * states.element_size()
    return moved + (slots.numel() + written.numel()) * each
