"""Flash attention on Hopper: the softmax of one tile beside the products of its neighbours.

A persistent program on each SM has one producer warp and two or three consumer warpgroups
(:mod:`.attention_roles`), and takes blocks of queries in turn, the longest first
(:mod:`.attention_tiles`). Nothing depends on which program is faster: results repeat bit for bit.
"""

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from ferrum_triton.kernels.attention.flash_config import (
    HOPPER_REGISTERS,
    comes_early,
    hopper_shared,
    padded,
    split_columns,
)
from ferrum_triton.kernels.attention.flash_plan import FlashPlan
from ferrum_triton.kernels.attention.merge import strides_of
from ferrum_triton.kernels.attention.softmax import LOG2_E
from ferrum_triton.kernels.attention.tensor_maps import sizes_of
from ferrum_triton.kernels.gluon import TensorDescriptor, describe, gluon_kernel
from ferrum_triton.kernels.gpu import SHARED_LIMITS, gpu_of
from ferrum_triton.kernels.hopper.attention_roles import (
    Outputs,
    Stream,
    Streams,
    allocate,
    consume,
    make_ring,
    produce,
)
from ferrum_triton.kernels.hopper.attention_tiles import ROWS, Call, Variant
from ferrum_triton.kernels.pdl import pdl_trigger, pdl_wait
from ferrum_triton.kernels.rows import cdiv

# Registers of a thread as a program starts, by its consumers: an even share for all its warps.
# Then the producer gives up all but 24 of them to the consumers.
LAUNCH_REGISTERS = {2: 168, 3: 128}


@gluon_kernel(
    dynamic=(
        "blocks",
        "blocks_at_once",
        "last_row",
        "q_len",
        "kv_len",
        "pos_offset",
        "scale_log2",
        "softcap_log2",
    )
)
def _hopper_attention_kernel(
    out_ptr,  # [batch, num_heads, q_len, value_dim], stored through its map
    lse_ptr,  # [batch, num_heads, q_len] or None
    sinks_ptr,  # [num_heads] or None
    kv_lens_ptr,  # [batch] or None
    q_desc,  # q in blocks of [1, 1, 64, block_d]
    q_rest_desc,  # the columns of q and k from block_d on, block_e wide, or None
    k_desc,  # k and v in blocks of [1, 1, block_n, block_d or block_v]
    k_rest_desc,
    v_desc,
    out_desc,  # out in blocks of [1, 1, 64, block_v]
    stride_lse_batch,
    stride_lse_head,
    stride_lse_token,
    num_heads,
    sliding_window,
    heads_at_once,
    blocks,
    blocks_at_once,
    last_row,
    q_len,
    kv_len,
    pos_offset,
    scale_log2,
    softcap_log2,
    VARIANT: gl.constexpr,
    PDL: gl.constexpr,
):
    """out = softmax(scale · q kᵀ + mask) v, a persistent program on each SM."""
    pdl_wait(PDL)
    pdl_trigger(PDL)
    CONSUMERS: gl.constexpr = VARIANT.consumers
    STAGES: gl.constexpr = VARIANT.stages
    q_rest, k_rest = None, None
    if q_rest_desc is not None:
        q_rest, k_rest = allocate(q_rest_desc, VARIANT.query_stages), allocate(k_rest_desc, STAGES)
    q = Stream(q_desc, q_rest_desc, make_ring(q_desc, VARIANT.query_stages, 1), q_rest)
    k = Stream(k_desc, k_rest_desc, make_ring(k_desc, STAGES, CONSUMERS), k_rest)
    v = Stream(v_desc, None, make_ring(v_desc, STAGES, CONSUMERS), None)
    outs = q.ring.buffers
    if VARIANT.own_out:
        outs = allocate(out_desc, CONSUMERS)
    fence_async_shared()
    streams = Streams(q, k, v, out_desc, outs)
    outputs = Outputs(lse_ptr, sinks_ptr, stride_lse_batch, stride_lse_head, stride_lse_token)
    call = Call(
        kv_lens_ptr,
        blocks,
        blocks_at_once,
        heads_at_once,
        last_row,
        num_heads,
        q_len,
        kv_len,
        pos_offset,
        sliding_window,
        scale_log2,
        softcap_log2,
    )
    if CONSUMERS == 2:
        gl.warp_specialize(
            [
                (consume, (streams, outputs, call, 0, VARIANT)),
                (consume, (streams, outputs, call, 1, VARIANT)),
                (produce, (streams, call, VARIANT)),
            ],
            [4, 1],
            [VARIANT.registers, 24],
        )
    else:
        gl.warp_specialize(
            [
                (consume, (streams, outputs, call, 0, VARIANT)),
                (consume, (streams, outputs, call, 1, VARIANT)),
                (consume, (streams, outputs, call, 2, VARIANT)),
                (produce, (streams, call, VARIANT)),
            ],
            [4, 4, 1],
            [VARIANT.registers, VARIANT.registers, 24],
        )


class Masks(NamedTuple):
    """What a call's queries see, as the op's arguments of these names have it.

    Attributes:
        kv_len: valid keys, or the capacity where kv_lens is given.
        sliding_window: 0 unless causal.
    """

    kv_len: int
    kv_lens: Tensor | None
    pos_offset: int | None
    causal: bool
    sliding_window: int


def attend_prefill(
    out: Tensor,
    lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    masks: Masks,
    factor: float,
    softcap: float,
    plan: FlashPlan,
    *,
    negate: bool,
) -> None:
    """out = softmax(scale · q kᵀ + mask) v, of tensors that can have tensor maps.

    Args:
        factor: |scale| · log2(e); with a cap twice that over the cap.
        negate: the scale is negative.
    """
    batch, num_heads, q_len, head_dim = q.shape
    value_dim = v.shape[3]
    block_m, block_n = plan.tile["BLOCK_M"], plan.tile["BLOCK_N"]
    block_d, block_e = split_columns(head_dim)
    consumers, gpu = block_m // ROWS.value, gpu_of(q.device)
    newest = masks.kv_lens is not None and masks.pos_offset is None
    pos_offset = masks.kv_len - q_len if masks.pos_offset is None else masks.pos_offset
    blocks_per_head = cdiv(q_len, block_m)
    blocks = blocks_per_head * batch * num_heads
    keys = masks.kv_len - q_len // 2 if masks.causal else masks.kv_len
    keys = min(keys, masks.sliding_window or keys)
    shared = hopper_shared(plan.tile, head_dim, value_dim, own_out=True)
    variant = Variant(
        consumers=consumers,
        registers=HOPPER_REGISTERS[consumers],
        block_n=block_n,
        stages=plan.tile["num_stages"],
        block_d=block_d,
        block_e=block_e,
        block_v=padded(value_dim),
        own_out=shared <= SHARED_LIMITS["sm_90"],
        ahead=comes_early(plan.tile, head_dim, value_dim, blocks / gpu.num_sms, keys),
        group=num_heads // k.shape[1],
        negate=negate,
        newest=newest,
        is_causal=masks.causal,
        has_window=masks.sliding_window > 0,
        has_softcap=softcap > 0,
    )
    of_q, of_out = (_rows_of(x, q_len, ROWS.value) for x in (q, out))
    of_k, of_v = (_rows_of(x, masks.kv_len, block_n) for x in (k, v))
    _hopper_attention_kernel.launch(
        (min(blocks, gpu.num_sms),),
        out_ptr=out,
        lse_ptr=lse,
        sinks_ptr=sinks,
        kv_lens_ptr=masks.kv_lens,
        q_desc=columns_of(q, *of_q, 0, block_d),
        q_rest_desc=columns_of(q, *of_q, block_d, block_e),
        k_desc=columns_of(k, *of_k, 0, block_d),
        k_rest_desc=columns_of(k, *of_k, block_d, block_e),
        v_desc=columns_of(v, *of_v, 0, variant.block_v),
        out_desc=columns_of(out, *of_out, 0, variant.block_v),
        **strides_of("lse", lse, "batch", "head", "token"),
        num_heads=num_heads,
        sliding_window=masks.sliding_window,
        heads_at_once=plan.heads_at_once,
        blocks=blocks,
        blocks_at_once=blocks_per_head * plan.heads_at_once,
        last_row=(blocks_per_head - 1) * block_m,
        q_len=q_len,
        kv_len=masks.kv_len,
        pos_offset=pos_offset,
        scale_log2=factor,
        softcap_log2=softcap * LOG2_E.value,
        VARIANT=variant,
        num_warps=4,
        maxnreg=LAUNCH_REGISTERS[consumers],
    )


def _rows_of(
    x: Tensor, num_rows: int, block: int
) -> tuple[list[int], list[int], tuple[int, int, int]]:
    """The first rows of x as a map takes them, without columns: sizes, strides, and a block."""
    sizes, steps = sizes_of(x, num_rows)
    return sizes[:-1], steps[:-1], (1, 1, block)


def columns_of(
    x: Tensor,
    sizes: Sequence[int],
    steps: Sequence[int],
    block: tuple[int, ...],
    first: int,
    width: int,
) -> TensorDescriptor | None:
    """A map of some of x's columns, in blocks of what sizes and their strides say; None of none."""
    if width == 0:
        return None
    shape = [*sizes, min(x.shape[-1] - first, width)]
    return describe(x[..., first:], (*block, width), shape, [*steps, 1])
