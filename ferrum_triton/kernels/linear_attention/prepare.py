"""What comes before the gated delta rule, in one launch: a program has a head of some tokens."""

from dataclasses import dataclass

import triton.language as tl
from torch import Tensor

from ferrum_triton.kernels.elementwise import activated
from ferrum_triton.kernels.jit import kernel
from ferrum_triton.kernels.linear_attention.conv import (
    Inputs,
    block_config,
    convolve_block,
    tunable_blocks,
)
from ferrum_triton.kernels.linear_attention.sequences import (
    Batch,
    block_of,
    layout_of,
    span_of,
)
from ferrum_triton.kernels.pdl import pdl_trigger, pdl_wait
from ferrum_triton.kernels.rows import next_power_of_2
from ferrum_triton.ops.linear_attention import prepare as ops

prepare_config = tunable_blocks("gdn_prepare")


@kernel(dynamic=("num_seqs", "num_tokens", "num_slots", "eps"))
def _gdn_prepare_kernel(
    q_ptr,  # [num_tokens, num_k_heads, head_k_dim]
    k_ptr,  # [num_tokens, num_k_heads, head_k_dim]
    v_ptr,  # [num_tokens, num_v_heads, head_v_dim]
    g_ptr,  # [num_tokens, num_v_heads]
    beta_ptr,  # [num_tokens, num_v_heads]
    states_ptr,  # [num_slots, WIDTH - 1, num_channels] or None, updated
    qkv_ptr,  # [num_tokens, num_channels]
    b_ptr,  # [num_tokens, num_v_heads]
    a_ptr,  # [num_tokens, num_v_heads]
    weight_ptr,  # [num_channels, WIDTH]
    a_log_ptr,  # [num_v_heads]
    dt_bias_ptr,  # [num_v_heads]
    slots_ptr,  # [num_seqs] or None
    cu_seqlens_ptr,  # [num_seqs + 1] or None
    pos_offsets_ptr,  # [num_seqs] or None
    kept_slots_ptr,  # [num_tokens] or None
    stride_q_token,
    stride_q_head,
    stride_k_token,
    stride_k_head,
    stride_v_token,
    stride_v_head,
    stride_g_token,
    stride_beta_token,
    stride_states_slot,
    stride_states_row,
    stride_qkv_token,
    stride_b_token,
    stride_a_token,
    stride_weight_channel,
    num_seqs,
    num_tokens,
    num_slots,
    eps,
    SHAPE: tl.constexpr,
    EACH: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_W: tl.constexpr,
    PDL: tl.constexpr,
):
    """What :func:`ferrum_triton.ops.linear_attention.prepare.gdn_prepare` returns of one head."""
    pdl_wait(PDL)
    pdl_trigger(PDL)
    NUM_K: tl.constexpr = SHAPE.num_k_heads
    HEADS: tl.constexpr = 2 * NUM_K + SHAPE.num_v_heads
    head = tl.program_id(0) % HEADS
    batch = Batch(cu_seqlens_ptr, slots_ptr, pos_offsets_ptr, num_seqs, num_tokens, num_slots)
    seq, block = block_of(batch, tl.program_id(0) // HEADS, EACH, BLOCK_T)
    span = span_of(batch, seq, EACH)
    if (block >= 0) & (block * BLOCK_T < span.length):
        is_value = head >= 2 * NUM_K
        v_head = tl.maximum(head - 2 * NUM_K, 0)
        d = tl.arange(0, SHAPE.block_d)
        in_head = d < tl.where(is_value, SHAPE.head_v_dim, SHAPE.head_k_dim)
        first = tl.minimum(head, 2 * NUM_K) * SHAPE.head_k_dim + v_head * SHAPE.head_v_dim
        inputs = Inputs(
            qkv_ptr, states_ptr, kept_slots_ptr, stride_qkv_token, stride_states_slot,
            stride_states_row, num_slots,
        )  # fmt: skip
        local = block.to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
        known = local < span.length
        token = span.start + local
        # Before anything waits for what it loads.
        gated = known & is_value
        b = tl.load(b_ptr + token * stride_b_token + v_head, mask=gated, other=0.0)
        a = tl.load(a_ptr + token * stride_a_token + v_head, mask=gated, other=0.0)
        dt_bias = tl.load(dt_bias_ptr + v_head)
        a_log = tl.load(a_log_ptr + v_head)
        x = convolve_block(
            inputs, weight_ptr, stride_weight_channel, span, block, first + d, in_head, WIDTH,
            BLOCK_T, BLOCK_W,
        )  # fmt: skip
        x = activated(x, "silu")
        in_tile = known[:, None] & in_head[None, :]
        if is_value:
            v_rows = v_ptr + token[:, None] * stride_v_token + v_head.to(tl.int64) * stride_v_head
            tl.store(v_rows + d[None, :], x.to(v_ptr.dtype.element_ty), mask=in_tile)
            beta = tl.sigmoid(b.to(tl.float32))
            tl.store(beta_ptr + token * stride_beta_token + v_head, beta, mask=known)
            dt = a.to(tl.float32) + dt_bias.to(tl.float32)
            # log(1 + e) as e · log(u) / (u - 1) of u = 1 + e rounded, which keeps a small e's bits.
            e = tl.exp(tl.where(dt > 20.0, 20.0, dt))  # of NaN too
            u = 1.0 + e
            softplus = tl.where(u == 1.0, e, tl.log(u) * (e / tl.where(u == 1.0, 1.0, u - 1.0)))
            softplus = tl.where(dt > 20.0, dt, softplus)
            g = -tl.exp(a_log.to(tl.float32)) * softplus
            tl.store(g_ptr + token * stride_g_token + v_head, g, mask=known)
        else:
            if SHAPE.l2_norm:
                squares = tl.sum(tl.where(in_head[None, :], x * x, 0.0), axis=1)
                x *= tl.rsqrt(squares + eps)[:, None]
            normed = x.to(q_ptr.dtype.element_ty)
            if head < NUM_K:
                q_rows = q_ptr + token[:, None] * stride_q_token + head.to(tl.int64) * stride_q_head
                tl.store(q_rows + d[None, :], normed, mask=in_tile)
            else:
                k_head = (head - NUM_K).to(tl.int64)
                k_rows = k_ptr + token[:, None] * stride_k_token + k_head * stride_k_head
                tl.store(k_rows + d[None, :], normed, mask=in_tile)


@dataclass(frozen=True)
class Shape:
    """What the kernel specialises on.

    Attributes:
        num_k_heads, num_v_heads: heads of keys, and of values.
        head_k_dim, head_v_dim: their widths.
        block_d: power of two >= both.
        l2_norm: whether q and k are divided by their norms.
    """

    num_k_heads: int
    num_v_heads: int
    head_k_dim: int
    head_v_dim: int
    block_d: int
    l2_norm: bool


@ops.gdn_prepare.impl("triton")
def gdn_prepare(
    qkv: Tensor,
    b: Tensor,
    a: Tensor,
    weight: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    num_k_heads: int,
    head_k_dim: int,
    states: Tensor | None = None,
    slots: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    pos_offsets: Tensor | None = None,
    kept_slots: Tensor | None = None,
    l2_norm: bool = True,
    eps: float = 1e-6,
    *,
    out: tuple[Tensor, Tensor, Tensor, Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    if out is None:
        out = ops.gdn_prepare.fake(qkv, b, a, weight, a_log, dt_bias, num_k_heads, head_k_dim)
    q, k, v, g, beta = out
    num_tokens, num_v_heads, head_v_dim = v.shape
    layout = layout_of(num_tokens, states, slots, cu_seqlens, pos_offsets)
    if num_tokens == 0 or layout.num_seqs == 0:
        return q, k, v, g, beta
    config = block_config(prepare_config, qkv, weight, layout)
    block_d = next_power_of_2(max(head_k_dim, head_v_dim))
    shape = Shape(num_k_heads, num_v_heads, head_k_dim, head_v_dim, block_d, l2_norm)
    blocks = layout.blocks(num_tokens, config["BLOCK_T"])
    _gdn_prepare_kernel.launch(
        (blocks * (2 * num_k_heads + num_v_heads),),
        q_ptr=q,
        k_ptr=k,
        v_ptr=v,
        g_ptr=g,
        beta_ptr=beta,
        states_ptr=states,
        qkv_ptr=qkv,
        b_ptr=b,
        a_ptr=a,
        weight_ptr=weight,
        a_log_ptr=a_log,
        dt_bias_ptr=dt_bias,
        kept_slots_ptr=kept_slots,
        stride_q_token=q.stride(0),
        stride_q_head=q.stride(1),
        stride_k_token=k.stride(0),
        stride_k_head=k.stride(1),
        stride_v_token=v.stride(0),
        stride_v_head=v.stride(1),
        stride_g_token=g.stride(0),
        stride_beta_token=beta.stride(0),
        stride_states_slot=0 if states is None else states.stride(0),
        stride_states_row=0 if states is None else states.stride(1),
        stride_qkv_token=qkv.stride(0),
        stride_b_token=b.stride(0),
        stride_a_token=a.stride(0),
        stride_weight_channel=weight.stride(0),
        eps=eps,
        SHAPE=shape,
        EACH=layout.each,
        **layout.tensors,
        **config,
    )
    return q, k, v, g, beta
