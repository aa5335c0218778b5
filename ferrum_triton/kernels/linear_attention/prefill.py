"""The gated delta rule in chunks of 64 tokens, whose products run on tensor cores.

With the sum G_i of a chunk's g up to its token i, and the state S at its start, the changes D that
its tokens make of the state solve (I + A) D = β (V - e^G K S), where A is what lies below the
diagonal of β_i e^(G_i - G_j) k_i · k_j. So there are two launches:

* one for all chunks at once inverts I + A, and has the scores e^(G_i - G_j) q_i · k_j;
* one goes from chunk to chunk with the state of a head, or a block of its values, in registers:
  D = (I + A)⁻¹ β (V - e^G K S), y = e^G Q S + scores D, S ← e^G_last S + (e^(G_last - G) K)ᵀ D.

So states between chunks never come to memory. A third launch, for the products that no later chunk
waits for, would have them and the changes written and read: 96 KB a chunk and head of 128.

The second launch has two forms. By key it computes this as it is written: what one product gives
goes through shared memory to be the next one's second operand, and blocks of values may be small,
so that a few heads keep all SMs busy. By value it computes everything transposed, Sᵀ and Dᵀ with a
row for each value: what one product gives is the next one's first operand, which tensor cores take
from the registers it lies in.

Three kinds of tokens are taken one by one: those of float32, which tensor cores would round, those
that are sequences of their own, and those of heads that lie in no whole units (:func:`in_units`).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ferrum_triton.kernels.attention.softmax import LOG2_E
from ferrum_triton.kernels.gpu import Gpu
from ferrum_triton.kernels.jit import kernel
from ferrum_triton.kernels.linear_attention.delta import key_head_of, launch_tokens
from ferrum_triton.kernels.linear_attention.sequences import (
    Batch,
    block_of,
    in_units,
    layout_of,
    span_of,
)
from ferrum_triton.kernels.parameters import integer, one_of, power_of_two, tile_refusal
from ferrum_triton.kernels.pdl import pdl_trigger, pdl_wait
from ferrum_triton.kernels.rows import cdiv, next_power_of_2
from ferrum_triton.kernels.tuning import Config, Tunable
from ferrum_triton.ops.linear_attention import delta as ops

CHUNK, LEAST_GATE = tl.constexpr(ops.CHUNK), tl.constexpr(ops.LEAST_GATE)
# Tokens of a sequence that many programs are worth having for, and the share of SMs that is to have
# one at least.
LONG, LEAST_BUSY = 2048, 0.9


@triton.jit
def product(a, b):
    """a · b by TF32, over K in an order in which sums are first operands where they lie.

    Of eight columns a thread has sums of 2 t and 2 t + 1, and takes t and t + 4. ``a`` is to come
    from an instruction of its own: what moves registers, the assembler would put between products,
    and wait for each.
    """
    K: tl.constexpr = a.shape[-1]
    if len(a.shape) == 2:
        a = a.reshape(a.shape[0], K // 8, 4, 2).permute(0, 1, 3, 2).reshape(a.shape)
        b = b.reshape(K // 8, 4, 2, b.shape[1]).permute(0, 2, 1, 3).reshape(b.shape)
    else:
        a = a.reshape(a.shape[0], a.shape[1], K // 8, 4, 2).permute(0, 1, 2, 4, 3).reshape(a.shape)
        b = b.reshape(b.shape[0], K // 8, 4, 2, b.shape[2]).permute(0, 1, 3, 2, 4).reshape(b.shape)
    return tl.dot(a, b, input_precision="tf32")


@triton.jit
def below_blocks(a, i, j, LEVEL: tl.constexpr):
    """What of a lies below the diagonal blocks of size 2**LEVEL, in those of twice the size."""
    is_below = (i >> LEVEL != j >> LEVEL) & (i >> (LEVEL + 1) == j >> (LEVEL + 1))
    return tl.where(is_below, a, 0.0)


@triton.jit
def merged(inverse, a, i, j, LEVEL: tl.constexpr):
    """Inverses of diagonal blocks of size 2**LEVEL, merged two by two.

    [[P, 0], [B, Q]]⁻¹ is P⁻¹ and Q⁻¹ with -Q⁻¹ B P⁻¹ below. No power of a is taken, as would grow
    where keys are alike.
    """
    below = product(-inverse, below_blocks(a, i, j, LEVEL))
    return inverse - product(-below, inverse)


@triton.jit
def split_columns(x, LEVEL: tl.constexpr):
    """Columns of the first, third, ... blocks of size 2**LEVEL of a chunk, and of the others."""
    SIZE: tl.constexpr = 1 << LEVEL
    x = x.reshape(CHUNK, CHUNK // (2 * SIZE), 2, SIZE).permute(0, 1, 3, 2)
    first, second = tl.split(x)
    return first.reshape(CHUNK, CHUNK // 2), second.reshape(CHUNK, CHUNK // 2)


@triton.jit
def join_columns(first, second, LEVEL: tl.constexpr):
    """What :func:`split_columns` took apart."""
    SIZE: tl.constexpr = 1 << LEVEL
    COUNT: tl.constexpr = CHUNK // (2 * SIZE)
    x = tl.join(first.reshape(CHUNK, COUNT, SIZE), second.reshape(CHUNK, COUNT, SIZE))
    return x.permute(0, 1, 3, 2).reshape(CHUNK, CHUNK)


@triton.jit
def merged_columns(inverse, a, LEVEL: tl.constexpr):
    """As :func:`merged`, of a chunk: only columns of every other block change."""
    i, j = tl.arange(0, CHUNK)[:, None], tl.arange(0, CHUNK)[None, :]
    below, _ = split_columns(below_blocks(a, i, j, LEVEL), LEVEL)
    below = -product(-inverse, below)
    first, second = split_columns(inverse, LEVEL)
    first -= product(join_columns(below, tl.zeros_like(below), LEVEL), first)
    return join_columns(first, second, LEVEL)


@triton.jit
def inverse_of_unit(a):
    """The inverse of a [CHUNK, CHUNK] with ones for its diagonal; above that it has zeros."""
    # Four blocks of 16 on the diagonal, each a warp's own, then all.
    block, other = tl.arange(0, 4)[:, None, None, None], tl.arange(0, 4)[None, None, :, None]
    blocks = tl.sum(tl.where(block == other, a.reshape(4, 16, 4, 16), 0.0), axis=2)
    i, j = tl.arange(0, 16)[None, :, None], tl.arange(0, 16)[None, None, :]
    inverses = tl.where(i == j, 1.0, tl.where(i >> 1 == j >> 1, -blocks, 0.0))
    for level in tl.static_range(1, 4):
        inverses = merged(inverses, blocks, i, j, level)
    inverse = tl.where(block == other, inverses[:, :, None, :], 0.0).reshape(CHUNK, CHUNK)
    for level in tl.static_range(4, 6):
        inverse = merged_columns(inverse, a, level)
    return inverse


@kernel(dynamic=("num_seqs", "num_tokens", "num_slots", "query_scale"))
def _gdn_chunk_kernel(
    inverses_ptr,  # [num_v_heads, num_tokens, CHUNK]: rows of (I + A)⁻¹ β
    scores_ptr,  # [num_v_heads, num_tokens, CHUNK]: rows of e^(G_i - G_j) q_i · k_j
    decays_ptr,  # [blocks, num_v_heads, 2, CHUNK] float32: e^G and e^(G_last - G)
    q_ptr,  # [num_tokens, num_k_heads, head_k_dim]
    k_ptr,  # [num_tokens, num_k_heads, head_k_dim]
    g_ptr,  # [num_tokens, num_v_heads]
    beta_ptr,  # [num_tokens, num_v_heads]
    slots_ptr,  # [num_seqs] or None
    cu_seqlens_ptr,  # [num_seqs + 1] or None
    pos_offsets_ptr,  # [num_seqs] or None
    stride_q_token,
    stride_q_head,
    stride_k_token,
    stride_k_head,
    stride_g_token,
    stride_beta_token,
    num_v_heads,
    group,
    head_k_dim,
    num_seqs,
    num_tokens,
    num_slots,
    query_scale,
    TILED: tl.constexpr,
    BLOCK_K: tl.constexpr,  # power of two >= head_k_dim, 16 or more
    PDL: tl.constexpr,
):
    """What the tokens of a chunk are to each other, for one head."""
    pdl_wait(PDL)
    pdl_trigger(PDL)
    head = (tl.program_id(0) % num_v_heads).to(tl.int64)
    batch = Batch(cu_seqlens_ptr, slots_ptr, pos_offsets_ptr, num_seqs, num_tokens, num_slots)
    index = tl.program_id(0) // num_v_heads
    seq, block = block_of(batch, index, False, CHUNK)
    span = span_of(batch, seq, False)
    rest = span.length - block * CHUNK
    if (block >= 0) & (rest > 0):
        in_chunk = tl.arange(0, CHUNK)
        i, j = in_chunk[:, None], in_chunk[None, :]
        key = tl.arange(0, BLOCK_K)[None, :]
        first = span.start + block * CHUNK
        last = tl.minimum(rest, CHUNK).to(tl.int32) - 1
        # Rows past the last token repeat it: no row before them sees what they hold.
        token = tl.minimum(in_chunk, last).to(tl.int64)
        row = token[:, None]
        k_head = key_head_of(head, num_v_heads, group, TILED)
        keys = k_ptr + first * stride_k_token + k_head * stride_k_head + key
        queries = q_ptr + first * stride_q_token + k_head * stride_q_head + key
        k = tl.load(keys + row * stride_k_token, mask=key < head_k_dim, other=0.0)
        q = tl.load(queries + row * stride_q_token, mask=key < head_k_dim, other=0.0)
        gates = g_ptr + first * stride_g_token + head
        g = tl.load(gates + token * stride_g_token, mask=in_chunk <= last, other=0.0)
        betas = beta_ptr + first * stride_beta_token + head
        beta = tl.load(betas + token * stride_beta_token)
        g = tl.where(g < LEAST_GATE, LEAST_GATE, g) * LOG2_E
        total = tl.cumsum(g, axis=0)
        to = (index.to(tl.int64) * num_v_heads + head) * (2 * CHUNK) + in_chunk
        tl.store(decays_ptr + to, tl.exp2(total))
        tl.store(decays_ptr + CHUNK + to, tl.exp2(tl.sum(g, axis=0) - total))
        decay = tl.exp2(tl.where(i >= j, total[:, None] - total[None, :], float("-inf")))

        to = (head * num_tokens + first) * CHUNK + (i * CHUNK + j)
        element: tl.constexpr = inverses_ptr.dtype.element_ty
        scores = tl.dot(q, tl.trans(k)) * decay * query_scale
        tl.store(scores_ptr + to, scores.to(element), mask=i <= last)
        inverse = tl.where(i == j, 1.0, tl.zeros([CHUNK, CHUNK], tl.float32))
        if rest > 1:  # a batch may have many sequences of one token beside a prompt
            products = tl.dot(k, tl.trans(k)) * decay * beta[:, None]
            inverse = inverse_of_unit(products)
        inverse *= beta[None, :]
        tl.store(inverses_ptr + to, inverse.to(element), mask=i <= last)


@kernel(dynamic=("num_seqs", "num_tokens", "num_slots", "query_scale"))
def _gdn_scan_kernel(
    out_ptr,  # [num_tokens, num_v_heads, head_v_dim]
    states_ptr,  # [num_slots, num_v_heads, head_k_dim, head_v_dim] or None, updated
    q_ptr,  # [num_tokens, num_k_heads, head_k_dim]
    k_ptr,  # [num_tokens, num_k_heads, head_k_dim]
    v_ptr,  # [num_tokens, num_v_heads, head_v_dim]
    inverses_ptr,  # [num_v_heads, num_tokens, CHUNK]
    scores_ptr,  # [num_v_heads, num_tokens, CHUNK]
    decays_ptr,  # [blocks, num_v_heads, 2, CHUNK]
    slots_ptr,  # [num_seqs] or None
    cu_seqlens_ptr,  # [num_seqs + 1] or None
    pos_offsets_ptr,  # [num_seqs] or None
    stride_out_token,
    stride_out_head,
    stride_states_slot,
    stride_states_head,
    stride_states_key,
    stride_q_token,
    stride_q_head,
    stride_k_token,
    stride_k_head,
    stride_v_token,
    stride_v_head,
    num_v_heads,
    group,
    head_k_dim,
    head_v_dim,
    num_seqs,
    num_tokens,
    num_slots,
    query_scale,
    TILED: tl.constexpr,
    BLOCK_K: tl.constexpr,  # power of two >= head_k_dim, 16 or more
    BLOCK_V: tl.constexpr,
    BY_VALUE: tl.constexpr,
    PDL: tl.constexpr,
):
    """The chunks of one sequence in their order, for a block of values of one head.

    A state is [keys, values], or BY_VALUE [values, keys].
    """
    pdl_wait(PDL)
    pdl_trigger(PDL)
    pid = tl.program_id(0)
    blocks = tl.cdiv(head_v_dim, BLOCK_V)
    head = (pid // blocks % num_v_heads).to(tl.int64)
    batch = Batch(cu_seqlens_ptr, slots_ptr, pos_offsets_ptr, num_seqs, num_tokens, num_slots)
    seq = pid // (blocks * num_v_heads)
    span = span_of(batch, seq, False)

    i = tl.arange(0, CHUNK)
    key = tl.arange(0, BLOCK_K)
    value = pid % blocks * BLOCK_V + tl.arange(0, BLOCK_V)
    in_keys, in_values = key < head_k_dim, value < head_v_dim
    if BY_VALUE:
        in_state = in_values[:, None] & in_keys[None, :]
        in_head = value[:, None] + key[None, :].to(tl.int64) * stride_states_key
    else:
        in_state = in_keys[:, None] & in_values[None, :]
        in_head = key[:, None].to(tl.int64) * stride_states_key + value[None, :]
    state = tl.zeros(in_state.shape, tl.float32)
    if states_ptr is not None:
        in_head += head * stride_states_head
        source = tl.maximum(span.source, 0) * stride_states_slot
        is_read = in_state & (span.source >= 0)
        state = tl.load(states_ptr + source + in_head, mask=is_read, other=0.0).to(tl.float32)

    element: tl.constexpr = v_ptr.dtype.element_ty
    k_head = key_head_of(head, num_v_heads, group, TILED)
    keys = k_ptr + span.start * stride_k_token + k_head * stride_k_head + key[None, :]
    queries = q_ptr + span.start * stride_q_token + k_head * stride_q_head + key[None, :]
    values = v_ptr + span.start * stride_v_token + head * stride_v_head + value[None, :]
    results = out_ptr + span.start * stride_out_token + head * stride_out_head + value[None, :]
    index = tl.full([], 0, tl.int64)  # of the sequence's first block
    if cu_seqlens_ptr is not None:
        index = span.start // CHUNK + seq
    tile = (head * num_tokens + span.start) * CHUNK + (i[:, None] * CHUNK + i[None, :])
    decays = decays_ptr + (index * num_v_heads + head) * (2 * CHUNK)
    for first in range(0, span.length, CHUNK):
        last = tl.minimum(span.length - first, CHUNK).to(tl.int32) - 1
        # Rows past the last token repeat it, and make no change.
        row = tl.minimum(i, last)[:, None].to(tl.int64)
        k_rows = keys + first * stride_k_token + row * stride_k_token
        q_rows = queries + first * stride_q_token + row * stride_q_token
        v_rows = values + first * stride_v_token + row * stride_v_token
        k = tl.load(k_rows, mask=in_keys[None, :], other=0.0)
        q = tl.load(q_rows, mask=in_keys[None, :], other=0.0)
        v = tl.load(v_rows, mask=in_values[None, :], other=0.0)
        in_chunk = (i <= last)[:, None]
        inverse = tl.load(inverses_ptr + first * CHUNK + tile, mask=in_chunk, other=0.0)
        scores = tl.load(scores_ptr + first * CHUNK + tile, mask=in_chunk, other=0.0)
        of_block = decays + first * (2 * num_v_heads)
        in_all = tl.load(of_block + CHUNK - 1)

        before = state.to(element)
        decay = tl.load(of_block + i)
        if BY_VALUE:
            told = tl.dot(before, tl.trans(k)) * -decay[None, :]
            change = tl.dot(tl.trans(v), tl.trans(inverse))
            change = tl.dot(told.to(element), tl.trans(inverse), change)
            rest = tl.load(of_block + CHUNK + i)[None, :]
            state = tl.dot((change * rest).to(element), k, state * in_all)
            y = tl.dot(before, tl.trans(q)) * (decay * query_scale)[None, :]
            y = tl.dot(change.to(element), tl.trans(scores), y)
            y = tl.trans(y.to(out_ptr.dtype.element_ty))
        else:
            told = tl.dot(k, before)
            y = tl.dot(q, before) * (decay * query_scale)[:, None]
            wanted = (v.to(tl.float32) - decay[:, None] * told).to(element)
            change = tl.dot(inverse, wanted)
            y = tl.dot(scores, change.to(element), y).to(out_ptr.dtype.element_ty)
            rest = tl.load(of_block + CHUNK + i)[:, None]
            state = tl.dot(tl.trans(k), (change * rest).to(element), state * in_all)

        out_rows = results + first * stride_out_token + row * stride_out_token
        tl.store(out_rows, y, mask=in_chunk & in_values[None, :])
    if states_ptr is not None:
        target = states_ptr + tl.maximum(span.target, 0) * stride_states_slot + in_head
        is_written = in_state & (span.target >= 0)
        tl.store(target, state.to(states_ptr.dtype.element_ty), mask=is_written)


def heuristic(gpu: Gpu, num_heads: int, head_k_dim: int, head_v_dim: int) -> Config:
    """The next chunk on its way while one is computed, if there is room for it.

    On Hopper the next two are, and blocks of values are as large as leaves a program for nearly
    every SM, by value from 64 on. Eight sequences of 4096 tokens take 726 us in blocks of 128, 828
    of 64 and 1,180 of 32, two take 272, 215 and 299, and one takes 236, 171 and 152 (``device_us``
    of gdn_prefill under ``prefill_config.forced`` of each, H200, 1a5796b).

    Tensor cores that take both operands from registers want 8 warps' for them, as do more keys than
    128.

    Args:
        num_heads: see :func:`long_heads`.
    """
    block_k, values = next_power_of_2(head_k_dim), max(next_power_of_2(head_v_dim), 16)
    block_v, by_value = min(values, 32 if block_k <= 128 else 16), False
    warps = chunk_warps = 8 if gpu.capability[0] in (8, 12) or block_k > 128 else 4
    on_hopper = gpu.arch == "sm_90" and block_k <= 128
    for size in (64, 128) if on_hopper else ():
        programs = num_heads * (values // size)
        if programs >= LEAST_BUSY * gpu.num_sms:
            block_v, by_value, warps = size, True, size // 16
    room = gpu.shared_limit // stage_bytes(block_k, block_v)
    return {
        "CHUNK_WARPS": chunk_warps,
        "CHUNK_REGISTERS": 168 if on_hopper and block_k == 128 else 0,
        "BLOCK_V": block_v,
        "BY_VALUE": by_value,
        "num_warps": warps,
        "num_stages": min(max(room, 1), 3 if on_hopper else 2),
    }


def long_heads(num_tokens: int, num_seqs: int, num_v_heads: int) -> int:
    """Heads of the sequences of LONG tokens that there may be.

    How long each is, the device alone knows; beside a prompt there may be many of a token.
    """
    return min(num_seqs, max(num_tokens // LONG, 1)) * num_v_heads


def stage_bytes(block_k: int, block_v: int) -> int:
    """Shared memory of what is loaded of a chunk."""
    return 2 * CHUNK.value * (2 * block_k + 2 * CHUNK.value + block_v)


def candidates(gpu: Gpu, num_heads: int, head_k_dim: int, head_v_dim: int) -> list[Config]:
    """Other launches for the chunks, and for what goes from chunk to chunk.

    One stage is tried where two have no room. On Hopper it took all 255 registers, and blocks of 16
    values then reached past shared memory (``compute-sanitizer --tool memcheck``, 1137d98).
    """
    usual = heuristic(gpu, num_heads, head_k_dim, head_v_dim)
    chunks = [
        {**usual, "CHUNK_WARPS": warps, "CHUNK_REGISTERS": registers}
        for warps, registers in ((4, 0), (4, 128), (4, 168), (8, 0), (8, 128))
    ]
    scans = [
        {
            **usual,
            "BLOCK_V": block_v,
            "BY_VALUE": by_value,
            "num_warps": warps,
            "num_stages": stages,
        }
        for block_v in (16, 32, 64, 128)
        for by_value in (False, True)
        for warps in (4, 8)
        for stages in ((1, 2, 3) if usual["num_stages"] == 1 else (2, 3))
        if block_v < 2 * max(head_v_dim, 16)
    ]
    return chunks + scans


def fits(gpu: Gpu, config: Config, num_heads: int, head_k_dim: int, head_v_dim: int) -> str:
    return tile_refusal(gpu, config, max(next_power_of_2(head_k_dim), 16) * config["BLOCK_V"])


prefill_config = Tunable(
    "gdn_prefill",
    ("num_heads", "head_k_dim", "head_v_dim"),
    heuristic,
    candidates,
    fits=fits,
    parameters={
        "CHUNK_WARPS": power_of_two(1, 16),
        "CHUNK_REGISTERS": integer(0, 255),
        "BLOCK_V": power_of_two(16, 256),
        "BY_VALUE": one_of(False, True),
    },
)


@ops.gdn_prefill.impl("triton")
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
    num_tokens, num_k_heads, head_k_dim = q.shape
    num_v_heads, head_v_dim = v.shape[1:]
    y = v.new_empty(v.shape) if out is None else out
    layout = layout_of(num_tokens, states, slots, cu_seqlens, pos_offsets)
    if num_tokens * layout.num_seqs == 0:
        return y
    if v.dtype == torch.float32 or layout.each or not in_units(q, k):
        launch_tokens(y, q, k, v, g, beta, states, layout, None, query_scale, tiled_values)
        return y
    heads = layout.num_seqs * num_v_heads
    of_long = long_heads(num_tokens, layout.num_seqs, num_v_heads)
    config = dict(prefill_config.pick(q.device, of_long, head_k_dim, head_v_dim))
    chunk_warps, chunk_registers = config.pop("CHUNK_WARPS"), config.pop("CHUNK_REGISTERS")
    blocks = layout.blocks(num_tokens, CHUNK.value)
    shared = {
        "q_ptr": q,
        "k_ptr": k,
        "inverses_ptr": v.new_empty(num_v_heads, num_tokens, CHUNK.value),
        "scores_ptr": v.new_empty(num_v_heads, num_tokens, CHUNK.value),
        "decays_ptr": v.new_empty(blocks, num_v_heads, 2, CHUNK.value, dtype=torch.float32),
        "stride_q_token": q.stride(0),
        "stride_q_head": q.stride(1),
        "stride_k_token": k.stride(0),
        "stride_k_head": k.stride(1),
        "num_v_heads": num_v_heads,
        "group": num_v_heads // num_k_heads,
        "head_k_dim": head_k_dim,
        "query_scale": head_k_dim**-0.5 if query_scale is None else query_scale,
        "TILED": tiled_values,
        "BLOCK_K": max(next_power_of_2(head_k_dim), 16),
        **layout.tensors,
    }
    _gdn_chunk_kernel.launch(
        (blocks * num_v_heads,),
        g_ptr=g,
        beta_ptr=beta,
        stride_g_token=g.stride(0),
        stride_beta_token=beta.stride(0),
        num_warps=chunk_warps,
        maxnreg=chunk_registers or None,
        **shared,
    )
    strides = (0, 0, 0) if states is None else states.stride()
    _gdn_scan_kernel.launch(
        (heads * cdiv(head_v_dim, config["BLOCK_V"]),),
        out_ptr=y,
        states_ptr=states,
        v_ptr=v,
        stride_out_token=y.stride(0),
        stride_out_head=y.stride(1),
        stride_states_slot=strides[0],
        stride_states_head=strides[1],
        stride_states_key=strides[2],
        stride_v_token=v.stride(0),
        stride_v_head=v.stride(1),
        head_v_dim=head_v_dim,
        **shared,
        **config,
    )
    return y
