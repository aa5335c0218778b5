"""Latent attention on Hopper: 64 heads to a program, whose columns two warpgroups share.

What a program does is in :mod:`.mla_roles`. Sequences are split, and parts merged, as for the plain
kernel (:mod:`ferrum_triton.kernels.attention.mla`). Programs of the same keys are neighbours: what
the first asks for the others find in L2.
"""

from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from ferrum_triton.kernels.attention.flash_config import HOPPER_REGISTERS
from ferrum_triton.kernels.attention.mla import Cut
from ferrum_triton.kernels.attention.softmax import LEAST_SCALE, LOG2_E
from ferrum_triton.kernels.attention.tensor_maps import steps_fit
from ferrum_triton.kernels.gluon import TensorDescriptor, gluon_kernel
from ferrum_triton.kernels.hopper.attention import LAUNCH_REGISTERS, columns_of
from ferrum_triton.kernels.hopper.attention_roles import Stream, make_ring
from ferrum_triton.kernels.hopper.attention_tiles import ROWS
from ferrum_triton.kernels.hopper.mla_roles import (
    KEYS,
    STAGES,
    LatentVariant,
    Room,
    Work,
    consume,
    produce,
)
from ferrum_triton.kernels.hopper.rings import Ring, make_barriers
from ferrum_triton.kernels.pdl import pdl_trigger, pdl_wait
from ferrum_triton.kernels.tuning import Config

# Latents whose halves are products' columns, and the most columns of a rope.
LATENTS, MOST_ROPE = (128, 256, 512), KEYS.value


@gluon_kernel(dynamic=("q_len", "factor"))
def _hopper_mla_kernel(
    out_ptr,  # [batch, q_len, num_heads, latents], in float32 for each split if there are several
    lse_ptr,  # [batch, q_len, num_heads], for each split if there are several, or None
    block_tables_ptr,  # [batch, max_blocks] or None
    kv_lens_ptr,  # [batch]
    q_left_desc,  # halves of q's latents in blocks of [1, 1, 64, half]
    q_right_desc,
    q_rope_desc,  # its other columns in blocks of [1, 1, 64, 64]
    left_desc,  # the same of the cache [num_blocks, 1, block_size, latents + rope]
    right_desc,
    rope_desc,
    stride_out_batch,
    stride_out_query,
    stride_out_head,
    stride_out_split,
    stride_lse_batch,
    stride_lse_query,
    stride_lse_head,
    stride_lse_split,
    stride_block_tables_batch,
    num_heads,  # a multiple of 64
    num_row_blocks,
    num_splits,
    num_blocks,
    capacity,  # keys a sequence may have
    q_len,
    factor,  # of scores, > 0
    VARIANT: gl.constexpr,
    PDL: gl.constexpr,
):
    """out = softmax(scale · q rowᵀ + mask) row[:latents] over a split of the cache's rows."""
    pdl_wait(PDL)
    pdl_trigger(PDL)
    row_block = gl.program_id(0) % num_row_blocks
    split = gl.program_id(0) // num_row_blocks % num_splits
    sequence = gl.program_id(0) // num_row_blocks // num_splits
    query = row_block * ROWS // num_heads
    head = row_block * ROWS - query * num_heads
    kv_len = gl.minimum(gl.maximum(gl.load(kv_lens_ptr + sequence), 0), capacity).to(gl.int32)
    keys = gl.maximum(gl.cdiv(kv_len, num_splits), VARIANT.min_keys)
    keys = gl.cdiv(keys, KEYS) * KEYS
    start = split * keys
    # All rows are of one query, and see the same keys.
    end = gl.minimum(start + keys, kv_len - q_len + query + 1)
    tiles = gl.maximum(gl.cdiv(end - start, KEYS), 0)
    batch = sequence.to(gl.int64)
    out_ptr += batch * stride_out_batch + query.to(gl.int64) * stride_out_query
    out_ptr += head.to(gl.int64) * stride_out_head + split.to(gl.int64) * stride_out_split
    if lse_ptr is not None:
        lse_ptr += batch * stride_lse_batch + query.to(gl.int64) * stride_lse_query
        lse_ptr += head.to(gl.int64) * stride_lse_head + split.to(gl.int64) * stride_lse_split
    table_ptr = None
    if block_tables_ptr is not None:
        table_ptr = block_tables_ptr + batch * stride_block_tables_batch
    work = Work(
        start,
        end,
        tiles,
        sequence,
        table_ptr,
        num_blocks,
        query,
        head,
        factor,
        out_ptr,
        lse_ptr,
        stride_out_head,
        stride_lse_head,
        (tiles > 0) | (num_splits == 1),
    )
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    room = Room(
        Stream(q_left_desc, None, make_ring(q_left_desc, 1, 1), None),
        Stream(q_right_desc, None, make_ring(q_right_desc, 1, 1), None),
        Stream(q_rope_desc, None, make_ring(q_rope_desc, 1, 1), None),
        Stream(left_desc, None, make_ring(left_desc, STAGES, 1), None),
        Stream(right_desc, None, make_ring(right_desc, STAGES, 1), None),
        Stream(rope_desc, None, make_ring(rope_desc, STAGES, 1), None),
        Ring(None, make_barriers(STAGES, 1), None),
        gl.allocate_shared_memory(gl.float32, [STAGES, ROWS], PLAIN),
        make_barriers(2, 1),
        gl.allocate_shared_memory(gl.float32, [2, ROWS], PLAIN),
    )
    fence_async_shared()
    gl.warp_specialize(
        [
            (consume, (room, work, 0, VARIANT)),
            (consume, (room, work, 1, VARIANT)),
            (produce, (room, work, VARIANT)),
        ],
        [4, 1],
        [VARIANT.registers, 24],
    )


def can_attend(q: Tensor, block_size: int, kv_lora_rank: int) -> bool:
    """Whether the kernel takes such queries over blocks of a cache that has tensor maps.

    Args:
        block_size: rows of a block, 0 of a contiguous cache.
    """
    rope, size = q.shape[3] - kv_lora_rank, q.element_size()
    strides = [step for n, step in zip(q.shape[:3], q.stride()[:3], strict=True) if n > 1]
    return (
        block_size % KEYS.value == 0
        and kv_lora_rank in LATENTS
        and rope <= MOST_ROPE
        and rope * size % 16 == 0
        and size == 2
        and q.shape[2] % ROWS.value == 0
        and q.data_ptr() % 16 == 0
        and steps_fit(strides, size)
    )


def attend_latents(
    out: Tensor,
    lse: Tensor | None,
    q: Tensor,
    cache: Tensor,
    scale: None,
    block_tables: Tensor | None,
    kv_lens: Tensor,
    kv_lora_rank: int,
    softmax_scale: float,
    cut: Cut,
    config: Config,
) -> None:
    """The result, or its parts if there are several splits; of :func:`attend_plain`'s arguments."""
    batch, _, num_heads, _ = q.shape
    num_blocks, block_size = cache.shape[:2]
    paged, half = block_tables is not None, kv_lora_rank // 2
    variant = LatentVariant(
        half=half,
        block_size=block_size if paged else 0,
        min_keys=cut.min_keys,
        negate=softmax_scale < 0,
        registers=HOPPER_REGISTERS[2],
        scores_first=config["SCORES_FIRST"],
    )
    q_left, q_right, q_rope = _parts_of(q, kv_lora_rank, ROWS.value)
    left, right, rope = _parts_of(cache[:, None], kv_lora_rank, KEYS.value)
    _hopper_mla_kernel.launch(
        (cut.row_blocks * cut.splits * batch,),
        out_ptr=out,
        lse_ptr=lse,
        block_tables_ptr=block_tables,
        kv_lens_ptr=kv_lens,
        q_left_desc=q_left,
        q_right_desc=q_right,
        q_rope_desc=q_rope,
        left_desc=left,
        right_desc=right,
        rope_desc=rope,
        **cut.steps,
        stride_block_tables_batch=block_tables.stride(0) if paged else 0,
        num_heads=num_heads,
        num_row_blocks=cut.row_blocks,
        num_splits=cut.splits,
        num_blocks=num_blocks,
        capacity=cut.capacity,
        q_len=q.shape[1],
        factor=max(abs(softmax_scale) * LOG2_E.value, LEAST_SCALE.value),
        VARIANT=variant,
        num_warps=4,
        maxnreg=LAUNCH_REGISTERS[2],
    )


def _parts_of(x: Tensor, latents: int, rows: int) -> list[TensorDescriptor]:
    """Maps of the halves of x's latents and of its rope, x [.., .., rows, latents + rope]."""
    sizes, half = list(x.shape[:3]), latents // 2
    # The stride of a single index is never used, but must look like one.
    steps = [s if n > 1 else x.shape[3] for n, s in zip(sizes, x.stride()[:3], strict=True)]
    block = (1, 1, rows)
    return [
        columns_of(x, sizes, steps, block, first, width)
        for first, width in ((0, half), (half, half), (latents, MOST_ROPE))
    ]
