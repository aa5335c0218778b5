"""Causal depthwise convolution: a program has a block of a sequence's tokens and some channels.

Blocks begin where their sequence does. So the first one has all the tokens that read the state, and
writes the new one after it has read the old.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from ferrum_triton.kernels.elementwise import activated
from ferrum_triton.kernels.gpu import Gpu
from ferrum_triton.kernels.jit import kernel
from ferrum_triton.kernels.linear_attention.sequences import (
    Batch,
    Layout,
    block_of,
    layout_of,
    span_of,
)
from ferrum_triton.kernels.parameters import power_of_two, tile_refusal
from ferrum_triton.kernels.pdl import pdl_trigger, pdl_wait
from ferrum_triton.kernels.rows import cdiv, next_power_of_2
from ferrum_triton.kernels.tuning import Config, Tunable
from ferrum_triton.ops.linear_attention import conv as ops


class Inputs(NamedTuple):
    """A convolution's inputs, those before a sequence's start in its state."""

    x_ptr: Any
    states_ptr: Any
    kept_slots_ptr: Any
    stride_x_token: Any
    stride_states_slot: Any
    stride_states_row: Any
    num_slots: Any


@triton.jit
def load_inputs(inputs, span, local, channel, mask, HISTORY: tl.constexpr):
    """Inputs at places of a sequence, -HISTORY and more, in float32; zeros where masked out."""
    x_at = inputs.x_ptr + (span.start + local) * inputs.stride_x_token + channel
    x = tl.load(x_at, mask=mask & (local >= 0), other=0.0).to(tl.float32)
    if HISTORY > 0 and inputs.states_ptr is not None:
        is_old = mask & (local < 0) & (span.source >= 0)
        slot = inputs.states_ptr + tl.maximum(span.source, 0) * inputs.stride_states_slot
        old_at = slot + (HISTORY + local) * inputs.stride_states_row + channel
        old = tl.load(old_at, mask=is_old, other=0.0).to(tl.float32)
        x = tl.where(local < 0, old, x)
    return x


@triton.jit
def convolve_block(
    inputs,
    weight_ptr,
    stride_weight_channel,
    span,
    block,
    channel,
    in_channels,
    WIDTH: tl.constexpr,
    BLOCK_T: tl.constexpr,  # WIDTH - 1 or more, unless each token is a sequence
    BLOCK_W: tl.constexpr,  # power of two >= WIDTH
):
    """The convolution of a block's tokens [BLOCK_T, channels]; the first block writes the state."""
    HISTORY: tl.constexpr = WIDTH - 1
    first = block.to(tl.int64) * BLOCK_T
    local = first + tl.arange(0, BLOCK_T)
    tap = tl.arange(0, BLOCK_W).to(tl.int64)
    weight_row = weight_ptr + channel.to(tl.int64) * stride_weight_channel
    if BLOCK_T == 1:
        # All taps at once: in a decode step, loads that wait for each other take the time.
        in_tile = (tap < WIDTH)[:, None] & in_channels[None, :]
        weight = tl.load(weight_row[None, :] + tap[:, None], mask=in_tile, other=0.0)
        in_tile = in_tile & (first < span.length)
        at = first - HISTORY + tap[:, None]
        x = load_inputs(inputs, span, at, channel[None, :], in_tile, HISTORY)
        y = tl.sum(x * weight.to(tl.float32), axis=0)[None, :]
    else:
        in_tile = (local < span.length)[:, None] & in_channels[None, :]
        y = tl.zeros([BLOCK_T, channel.shape[0]], tl.float32)
        for j in tl.static_range(WIDTH):
            at = local[:, None] - HISTORY + j
            x = load_inputs(inputs, span, at, channel[None, :], in_tile, HISTORY)
            weight = tl.load(weight_row + j, mask=in_channels, other=0.0).to(tl.float32)
            y += x * weight[None, :]
    if HISTORY > 0 and inputs.states_ptr is not None:
        element: tl.constexpr = inputs.states_ptr.dtype.element_ty
        in_state = (tap < HISTORY)[:, None] & in_channels[None, :]
        state_at = tap[:, None] * inputs.stride_states_row + channel[None, :]
        if inputs.kept_slots_ptr is None:
            mask = in_state & (block == 0) & (span.target >= 0)
            last = span.length - HISTORY + tap[:, None]
            new = load_inputs(inputs, span, last, channel[None, :], mask, HISTORY)
            slot = inputs.states_ptr + tl.maximum(span.target, 0) * inputs.stride_states_slot
            # All threads have read the old state before any writes the new one.
            tl.debug_barrier()
            tl.store(slot + state_at, new.to(element), mask=mask)
        else:
            for step in range(BLOCK_T):
                is_token = first + step < span.length
                token = tl.where(is_token, span.start + first + step, 0)
                kept = tl.load(inputs.kept_slots_ptr + token).to(tl.int64)
                mask = in_state & is_token & span.alive & (kept >= 0) & (kept < inputs.num_slots)
                last = first + step + 1 - HISTORY + tap[:, None]
                new = load_inputs(inputs, span, last, channel[None, :], mask, HISTORY)
                slot = inputs.states_ptr + tl.maximum(kept, 0) * inputs.stride_states_slot
                tl.store(slot + state_at, new.to(element), mask=mask)
    return y


@kernel(dynamic=("num_seqs", "num_tokens", "num_slots"))
def _causal_conv1d_kernel(
    y_ptr,  # [num_tokens, num_channels]
    states_ptr,  # [num_slots, WIDTH - 1, num_channels] or None, updated
    x_ptr,  # [num_tokens, num_channels]
    weight_ptr,  # [num_channels, WIDTH]
    bias_ptr,  # [num_channels] or None
    slots_ptr,  # [num_seqs] or None
    cu_seqlens_ptr,  # [num_seqs + 1] or None
    pos_offsets_ptr,  # [num_seqs] or None
    kept_slots_ptr,  # [num_tokens] or None
    stride_y_token,
    stride_states_slot,
    stride_states_row,
    stride_x_token,
    stride_weight_channel,
    num_channels,
    num_seqs,
    num_tokens,
    num_slots,
    ACTIVATION: tl.constexpr,
    EACH: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_W: tl.constexpr,
    PDL: tl.constexpr,
):
    """y[t, c] = f(bias[c] + Σ_j weight[c, j] · x[t - (WIDTH - 1) + j, c])"""
    pdl_wait(PDL)
    pdl_trigger(PDL)
    pieces = tl.cdiv(num_channels, BLOCK_C)
    batch = Batch(cu_seqlens_ptr, slots_ptr, pos_offsets_ptr, num_seqs, num_tokens, num_slots)
    seq, block = block_of(batch, tl.program_id(0) // pieces, EACH, BLOCK_T)
    span = span_of(batch, seq, EACH)
    if (block >= 0) & (block * BLOCK_T < span.length):
        channel = tl.program_id(0) % pieces * BLOCK_C + tl.arange(0, BLOCK_C)
        in_channels = channel < num_channels
        inputs = Inputs(
            x_ptr, states_ptr, kept_slots_ptr, stride_x_token, stride_states_slot,
            stride_states_row, num_slots,
        )  # fmt: skip
        y = convolve_block(
            inputs, weight_ptr, stride_weight_channel, span, block, channel, in_channels, WIDTH,
            BLOCK_T, BLOCK_W,
        )  # fmt: skip
        if bias_ptr is not None:
            y += tl.load(bias_ptr + channel, mask=in_channels, other=0.0).to(tl.float32)[None, :]
        if ACTIVATION == "silu":
            y = activated(y, ACTIVATION)
        local = block.to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
        y_rows = y_ptr + (span.start + local)[:, None] * stride_y_token + channel[None, :]
        in_tile = (local < span.length)[:, None] & in_channels[None, :]
        tl.store(y_rows, y.to(y_ptr.dtype.element_ty), mask=in_tile)


# Channels of a program: as many as a head usually has.
BLOCK_C = 128


def block_heuristic(
    gpu: Gpu, each: bool, num_tokens: int, num_seqs: int, num_channels: int
) -> Config:
    """32 tokens of 128 channels on 4 warps, as far as sequences have them.

    What a warp does beside its elements is then a third of its instructions: `gdn_prepare` has 1904
    on sm_90, and 1288 with 16 tokens, as :mod:`ferrum_triton.kernels.sass` lists them.
    """
    if each:
        return {"BLOCK_T": 1, "num_warps": 1}
    return {"BLOCK_T": 32 if num_tokens >= 32 * num_seqs else 8, "num_warps": 4}


def block_candidates(
    gpu: Gpu, each: bool, num_tokens: int, num_seqs: int, num_channels: int
) -> list[Config]:
    """8 to 64 tokens, of which a thread has 8 to 64 values."""
    if each:
        return [{"BLOCK_T": 1, "num_warps": warps} for warps in (1, 2, 4)]
    return [
        {"BLOCK_T": block_t, "num_warps": warps}
        for block_t in (8, 16, 32, 64)
        for warps in (2, 4, 8)
        if 8 <= block_t * BLOCK_C // (32 * warps) <= 64
    ]


def block_fits(
    gpu: Gpu, config: Config, each: bool, num_tokens: int, num_seqs: int, num_channels: int
) -> str:
    return tile_refusal(gpu, config, config["BLOCK_T"] * BLOCK_C)


def tunable_blocks(op: str) -> Tunable:
    """The choice of an op that convolves blocks of tokens."""
    return Tunable(
        op,
        ("each", "num_tokens", "num_seqs", "num_channels"),
        block_heuristic,
        block_candidates,
        fits=block_fits,
        parameters={"BLOCK_T": power_of_two(1, 128)},
    )


conv_config = tunable_blocks("causal_conv1d")


def block_config(tunable: Tunable, x: Tensor, weight: Tensor, layout: Layout) -> dict[str, Any]:
    """A launch's configuration, whose first block has all the tokens that read a state."""
    history = weight.shape[1] - 1
    config = dict(tunable.pick(x.device, layout.each, x.shape[0], layout.num_seqs, x.shape[1]))
    least = 1 if layout.each else next_power_of_2(max(history, 1))
    config["BLOCK_T"] = max(config["BLOCK_T"], least)
    return config | {"BLOCK_W": next_power_of_2(history + 1), "WIDTH": history + 1}


@ops.causal_conv1d.impl("triton")
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
    *,
    out: Tensor | None = None,
) -> Tensor:
    num_tokens, num_channels = x.shape
    y = x.new_empty(x.shape) if out is None else out
    layout = layout_of(num_tokens, states, slots, cu_seqlens, pos_offsets)
    if y.numel() == 0 or layout.num_seqs == 0:
        return y
    config = block_config(conv_config, x, weight, layout)
    _causal_conv1d_kernel.launch(
        (layout.blocks(num_tokens, config["BLOCK_T"]) * cdiv(num_channels, BLOCK_C),),
        y_ptr=y,
        states_ptr=states,
        x_ptr=x,
        weight_ptr=weight,
        bias_ptr=bias,
        kept_slots_ptr=kept_slots,
        stride_y_token=y.stride(0),
        stride_states_slot=0 if states is None else states.stride(0),
        stride_states_row=0 if states is None else states.stride(1),
        stride_x_token=x.stride(0),
        stride_weight_channel=weight.stride(0),
        num_channels=num_channels,
        ACTIVATION=activation,
        EACH=layout.each,
        BLOCK_C=BLOCK_C,
        **layout.tensors,
        **config,
    )
    return y
