"""The gated delta rule token by token: a program has a block of values of one head's state.

A state is read once, held in registers for all tokens of its sequence, and written once. Many small
programs keep the memory busy. Sizes of a head are compile-time constants: the rows of a state then
share one address, and need no masks. A thread with 64 numbers of a state takes 119 registers
instead of 155 (``compile_launch`` of gdn_decode/fp32/k16v32d128/b32 for sm_90). So four programs of
128 threads share an SM instead of three: 36.7 us instead of 37.7 (``device_us``, 8cdf6ad and
6afc1ed).
"""

import triton
import triton.language as tl
from torch import Tensor

from ferrum_triton.kernels.gpu import Gpu
from ferrum_triton.kernels.jit import kernel
from ferrum_triton.kernels.linear_attention.sequences import Batch, Layout, layout_of, span_of
from ferrum_triton.kernels.parameters import power_of_two, tile_refusal
from ferrum_triton.kernels.pdl import pdl_trigger, pdl_wait
from ferrum_triton.kernels.rows import cdiv, next_power_of_2
from ferrum_triton.kernels.tuning import Config, Tunable
from ferrum_triton.ops.linear_attention import delta as ops


@triton.jit
def key_head_of(head, num_v_heads, group, TILED: tl.constexpr):
    """The key head of a value head, ``group`` of which have the same."""
    return head % (num_v_heads // group) if TILED else head // group


@kernel(dynamic=("num_seqs", "num_tokens", "num_slots", "query_scale"))
def _gdn_decode_kernel(
    out_ptr,  # [num_tokens, num_v_heads, head_v_dim]
    states_ptr,  # [num_slots, num_v_heads, head_k_dim, head_v_dim] or None, updated
    q_ptr,  # [num_tokens, num_k_heads, head_k_dim]
    k_ptr,  # [num_tokens, num_k_heads, head_k_dim]
    v_ptr,  # [num_tokens, num_v_heads, head_v_dim]
    g_ptr,  # [num_tokens, num_v_heads]
    beta_ptr,  # [num_tokens, num_v_heads]
    slots_ptr,  # [num_seqs] or None
    cu_seqlens_ptr,  # [num_seqs + 1] or None
    pos_offsets_ptr,  # [num_seqs] or None
    kept_slots_ptr,  # [num_tokens] or None
    stride_out_token,
    stride_out_head,
    stride_states_slot,
    stride_states_head,
    stride_q_token,
    stride_q_head,
    stride_k_token,
    stride_k_head,
    stride_v_token,
    stride_v_head,
    stride_g_token,
    stride_beta_token,
    num_v_heads,
    group,
    num_seqs,
    num_tokens,
    num_slots,
    query_scale,
    TILED: tl.constexpr,
    EACH: tl.constexpr,
    HEAD_K_DIM: tl.constexpr,
    HEAD_V_DIM: tl.constexpr,
    BLOCK_K: tl.constexpr,  # power of two >= HEAD_K_DIM
    BLOCK_V: tl.constexpr,
    STRIDE_KEY: tl.constexpr,  # of states
    PDL: tl.constexpr,
):
    """S ← e^g · S; S ← S + k ⊗ β · (v - Sᵀ k); y = query_scale · Sᵀ q"""
    pdl_wait(PDL)
    pdl_trigger(PDL)
    pid = tl.program_id(0)
    blocks = tl.cdiv(HEAD_V_DIM, BLOCK_V)
    head = pid // blocks % num_v_heads
    seq = pid // (blocks * num_v_heads)
    batch = Batch(cu_seqlens_ptr, slots_ptr, pos_offsets_ptr, num_seqs, num_tokens, num_slots)
    span = span_of(batch, seq, EACH)

    key = tl.arange(0, BLOCK_K)
    value = pid % blocks * BLOCK_V + tl.arange(0, BLOCK_V)
    in_keys, in_values = key < HEAD_K_DIM, value < HEAD_V_DIM
    in_state = in_keys[:, None] & in_values[None, :]
    head = head.to(tl.int64)
    state = tl.zeros([BLOCK_K, BLOCK_V], tl.float32)
    if states_ptr is not None:
        in_head = head * stride_states_head + key[:, None].to(tl.int64) * STRIDE_KEY
        in_head += value[None, :]
        source = tl.maximum(span.source, 0) * stride_states_slot
        known = in_state & (span.source >= 0)
        state = tl.load(states_ptr + source + in_head, mask=known, other=0.0).to(tl.float32)

    k_head = key_head_of(head, num_v_heads, group, TILED)
    q_row = q_ptr + k_head * stride_q_head + key
    k_row = k_ptr + k_head * stride_k_head + key
    v_row = v_ptr + head * stride_v_head + value
    out_row = out_ptr + head * stride_out_head + value
    for step in range(span.length):
        token = span.start + step
        q_loaded = tl.load(q_row + token * stride_q_token, mask=in_keys, other=0.0)
        k_loaded = tl.load(k_row + token * stride_k_token, mask=in_keys, other=0.0)
        v_loaded = tl.load(v_row + token * stride_v_token, mask=in_values, other=0.0)
        g = tl.load(g_ptr + token * stride_g_token + head)
        beta = tl.load(beta_ptr + token * stride_beta_token + head)
        # Widening goes through a barrier, which no load would pass: all are on their way by now.
        q, k = q_loaded.to(tl.float32), k_loaded.to(tl.float32)
        v = v_loaded.to(tl.float32)
        decay = tl.exp(g)
        state *= decay
        change = beta * (v - tl.sum(state * k[:, None], axis=0))
        state += k[:, None] * change[None, :]
        y = tl.sum(state * (query_scale * q)[:, None], axis=0)
        out = y.to(out_ptr.dtype.element_ty)
        tl.store(out_row + token * stride_out_token, out, mask=in_values)
        if kept_slots_ptr is not None:
            kept = tl.load(kept_slots_ptr + token).to(tl.int64)
            known = in_state & span.alive & (kept >= 0) & (kept < num_slots)
            target = states_ptr + tl.where(kept > 0, kept, 0) * stride_states_slot + in_head
            tl.store(target, state.to(states_ptr.dtype.element_ty), mask=known)
    if states_ptr is not None and kept_slots_ptr is None:
        target = states_ptr + tl.maximum(span.target, 0) * stride_states_slot + in_head
        known = in_state & (span.target >= 0)
        tl.store(target, state.to(states_ptr.dtype.element_ty), mask=known)


def decode_heuristic(gpu: Gpu, num_heads: int, head_k_dim: int, head_v_dim: int) -> Config:
    """32 values, a line of a float32 state's row, and 64 numbers a thread: 2 warps of 128 keys."""
    block_k = next_power_of_2(head_k_dim)
    block_v = min(next_power_of_2(head_v_dim), 32)
    warps = max(block_k * block_v // (64 * gpu.warp_size), 1)
    return {"BLOCK_V": block_v, "num_warps": warps}


def decode_candidates(gpu: Gpu, num_heads: int, head_k_dim: int, head_v_dim: int) -> list[Config]:
    """8 to 128 values, of which a thread has 16 to 128."""
    block_k = next_power_of_2(head_k_dim)
    return [
        {"BLOCK_V": block_v, "num_warps": warps}
        for block_v in (8, 16, 32, 64, 128)
        for warps in (1, 2, 4, 8)
        if block_v < 2 * head_v_dim and 16 <= block_k * block_v // (32 * warps) <= 128
    ]


def decode_fits(gpu: Gpu, config: Config, num_heads: int, head_k_dim: int, head_v_dim: int) -> str:
    return tile_refusal(gpu, config, next_power_of_2(head_k_dim) * config["BLOCK_V"])


decode_config = Tunable(
    "gdn_decode",
    ("num_heads", "head_k_dim", "head_v_dim"),
    decode_heuristic,
    decode_candidates,
    fits=decode_fits,
    parameters={"BLOCK_V": power_of_two(1, 256)},
)


def launch_tokens(
    y: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    states: Tensor | None,
    layout: Layout,
    kept_slots: Tensor | None,
    query_scale: float | None,
    tiled_values: bool,
) -> None:
    """y ← the recurrence of tokens, one after the other."""
    num_k_heads, head_k_dim = q.shape[1:]
    num_v_heads, head_v_dim = v.shape[1:]
    heads = layout.num_seqs * num_v_heads
    config = decode_config.pick(q.device, heads, head_k_dim, head_v_dim)
    strides = (0, 0, 0) if states is None else states.stride()
    _gdn_decode_kernel.launch(
        (heads * cdiv(head_v_dim, config["BLOCK_V"]),),
        out_ptr=y,
        states_ptr=states,
        q_ptr=q,
        k_ptr=k,
        v_ptr=v,
        g_ptr=g,
        beta_ptr=beta,
        kept_slots_ptr=kept_slots,
        stride_out_token=y.stride(0),
        stride_out_head=y.stride(1),
        stride_states_slot=strides[0],
        stride_states_head=strides[1],
        stride_q_token=q.stride(0),
        stride_q_head=q.stride(1),
        stride_k_token=k.stride(0),
        stride_k_head=k.stride(1),
        stride_v_token=v.stride(0),
        stride_v_head=v.stride(1),
        stride_g_token=g.stride(0),
        stride_beta_token=beta.stride(0),
        num_v_heads=num_v_heads,
        group=num_v_heads // num_k_heads,
        query_scale=head_k_dim**-0.5 if query_scale is None else query_scale,
        TILED=tiled_values,
        EACH=layout.each,
        BLOCK_K=next_power_of_2(head_k_dim),
        HEAD_K_DIM=head_k_dim,
        HEAD_V_DIM=head_v_dim,
        STRIDE_KEY=strides[2],
        **layout.tensors,
        **config,
    )


@ops.gdn_decode.impl("triton")
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
    y = v.new_empty(v.shape) if out is None else out
    layout = layout_of(v.shape[0], states, slots, cu_seqlens, pos_offsets)
    if y.numel() and layout.num_seqs:
        launch_tokens(y, q, k, v, g, beta, states, layout, kept_slots, query_scale, tiled_values)
    return y
