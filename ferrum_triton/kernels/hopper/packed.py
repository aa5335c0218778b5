"""Activations by weights in planes, unpacked in registers while tensor cores multiply.

y[m, n] = Σₖ a[m, k] · W[n, k] + bias[n] + residual[m, n], for nine tokens and more. W is the tensor
cores' first operand, from registers (:mod:`.packed_weights`), tokens the second, from shared memory.

A program has one or two warpgroups that multiply, of 64 rows of W each, and two warps that ask for
what they take: one for weights, one for activations, each a ring of stages ahead. Weights are asked
for before the kernel that arranges the activations has ended (PDL). Tokens past the last one are
zeros by the tensor map, and so are rows past W's last one.

A step is 64 of K. Taken in turns, a warpgroup unpacks a step, multiplies it and waits, and another
one's step fills the time: two programs of two warpgroups on an SM. Overlapped, it has the next
step's codes ready before it waits for the product, and only scales them afterwards: a fragment
that is written while a product is in flight would have the assembler wait for each product (C7513).
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ferrum_triton.kernels.gluon import describe, gluon_kernel
from ferrum_triton.kernels.hopper import packed_config
from ferrum_triton.kernels.hopper.packed_config import (
    BLOCK,
    REGISTERS,
    ROWS,
    STEP,
    PackedConfig,
    block_bytes,
)
from ferrum_triton.kernels.hopper.packed_weights import (
    columns_of,
    fragment,
    held,
    load_block,
    unpacked,
)
from ferrum_triton.kernels.hopper.packed_work import Sizes, segment, share_of_program, summed
from ferrum_triton.kernels.hopper.rings import Ring, acquire, make_barriers, release, wait_full
from ferrum_triton.kernels.jit import processors
from ferrum_triton.kernels.quant.activations import TICKETS, Arranged
from ferrum_triton.kernels.quant.fragments import unpacking_of
from ferrum_triton.kernels.quant.planes import row_sizes
from ferrum_triton.kernels.rows import cdiv
from ferrum_triton.quant.formats import FORMATS, BlockFormat
from ferrum_triton.quant.kinds import file_kind

TURNS, HELD = gl.constexpr(packed_config.TURNS), gl.constexpr(packed_config.HELD)


@dataclass(frozen=True)
class Tile:
    """What is constant in a launch.

    Attributes:
        format: the description of the weights' format.
        asm: PTX that unpacks two words of their codes.
        tokens: tokens of a tile.
        warpgroups: warpgroups that multiply, of 64 rows of W each.
        order: when a step is unpacked, see PackedConfig.
        streamed: programs share tiles' K.
        stages: blocks of 256 weights in the ring of weights.
        x_stages: stages in the ring of activations.
        x_steps: steps of 64 of K in one of them.
        block_bytes: bytes of a stage of weights.
        registers: of a thread that multiplies.
    """

    format: BlockFormat
    asm: str
    tokens: int
    warpgroups: int
    order: str
    streamed: bool
    stages: int
    x_stages: int
    x_steps: int
    block_bytes: int
    registers: int


class Planes(NamedTuple):
    """Tensor maps of W's planes, or what they bring; None of a plane that a format has not."""

    q: Any
    h: Any
    s: Any
    d: Any


class Output(NamedTuple):
    """Where products go, and what is added to them."""

    y: Any
    partial: Any
    tickets: Any
    factor: Any
    bias: Any
    residual: Any
    stride_y: Any
    stride_residual: Any
    num_tokens: Any
    num_rows: Any


@gluon.jit
def wait_for_launch_before(PDL: gl.constexpr):
    """Wait until everything launched before has ended; see :mod:`ferrum_triton.kernels.pdl`."""
    if PDL:
        gl.inline_asm_elementwise("griddepcontrol.wait; mov.b32 $0, 0;", "=r", [], gl.int32, False, 1)


@gluon.jit
def let_next_launch_begin(PDL: gl.constexpr):
    if PDL:
        gl.inline_asm_elementwise(
            "griddepcontrol.launch_dependents; mov.b32 $0, 0;", "=r", [], gl.int32, False, 1
        )


@gluon.jit
def copy_plane(desc, at, full, buffers, stage, WARPGROUPS: gl.constexpr):
    """Ask for the rows of all warpgroups of a plane's tile."""
    if desc is not None:
        for w in gl.static_range(WARPGROUPS):
            tma.async_copy_global_to_shared(
                desc, [at[0] + 64 * w, at[1]], full, buffers.index(stage * WARPGROUPS + w)
            )


@gluon.constexpr_function
def block_columns(plane, fmt):
    """Columns of a plane's tensor map from one block of K to the next."""
    return 1 if plane == "d" and fmt.scale_code != "" else columns_of(plane, fmt)


@gluon.jit
def fetch_weights(planes, ring, sizes, TILE: gl.constexpr):
    """The warp that asks for weights."""
    share = share_of_program(sizes, TILE.streamed)
    FORMAT: gl.constexpr = TILE.format
    NUMBER: gl.constexpr = TILE.warpgroups
    BYTES: gl.constexpr = TILE.block_bytes
    Q: gl.constexpr = block_columns("q", FORMAT)
    H: gl.constexpr = block_columns("h", FORMAT)
    S: gl.constexpr = block_columns("s", FORMAT)
    D: gl.constexpr = block_columns("d", FORMAT)
    to = ring.buffers
    step = 0
    for i in range(share.count):
        part = segment(share, i, sizes)
        row = part.tile // sizes.tiles_m * (64 * NUMBER)
        for k in range(part.begin, part.end):
            stage, full = acquire(ring, step, BYTES, TILE.stages)
            copy_plane(planes.q, (row, k * Q), full, to.q, stage, NUMBER)
            copy_plane(planes.h, (row, k * H), full, to.h, stage, NUMBER)
            copy_plane(planes.s, (row, k * S), full, to.s, stage, NUMBER)
            copy_plane(planes.d, (row, k * D), full, to.d, stage, NUMBER)
            step += 1


@gluon.jit
def fetch_tokens(x_desc, ring, sizes, TILE: gl.constexpr, PDL: gl.constexpr):
    """The warp that asks for activations."""
    share = share_of_program(sizes, TILE.streamed)
    STEPS: gl.constexpr = TILE.x_steps
    wait_for_launch_before(PDL)
    let_next_launch_begin(PDL)
    step = 0
    for i in range(share.count):
        part = segment(share, i, sizes)
        token = part.tile % sizes.tiles_m * TILE.tokens
        for k in range(part.begin * 4 // STEPS, part.end * 4 // STEPS):
            BYTES: gl.constexpr = STEPS * TILE.tokens * 128
            stage, full = acquire(ring, step, BYTES, TILE.x_stages)
            for j in gl.static_range(STEPS):
                tma.async_copy_global_to_shared(
                    x_desc, [token, (k * STEPS + j) * 64], full, ring.buffers.index(stage * STEPS + j)
                )
            step += 1


@gluon.jit
def tile_block(ring, stage, WARPGROUP: gl.constexpr, TILE: gl.constexpr):
    """A warpgroup's words of a block that has landed."""
    at = stage * TILE.warpgroups + WARPGROUP
    buffers = ring.buffers
    h, s = None, None
    if buffers.h is not None:
        h = buffers.h.index(at)
    if buffers.s is not None:
        s = buffers.s.index(at)
    return load_block(buffers.q.index(at), h, s, buffers.d.index(at), TILE)


@gluon.constexpr_function
def accumulator(tokens):
    return gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, tokens, 16]
    )


@gluon.constexpr_function
def operand(tokens):
    return gl.DotOperandLayout(operand_index=0, parent=accumulator(tokens), k_width=2)


@gluon.jit
def multiply(acc, step, x, stage, J: gl.constexpr, TILE: gl.constexpr):
    """Start a step's product."""
    LAYOUT: gl.constexpr = operand(TILE.tokens)
    a = fragment(step, TILE, LAYOUT)
    tokens = x.buffers.index(stage * TILE.x_steps + J % TILE.x_steps).permute((1, 0))
    return warpgroup_mma(a, tokens, acc, is_async=True), a


@gluon.jit
def add_in_turns(acc, w, x, at, x_at, blocks, WARPGROUP: gl.constexpr, TILE: gl.constexpr):
    """acc plus so many blocks' products, a step after the other.

    Args:
        w, x: the rings.
        at, x_at: their steps.
    """
    x_stage = 0
    for _ in range(blocks):
        block = tile_block(w, wait_full(w, at, TILE.stages), WARPGROUP, TILE)
        release(w, at, TILE.stages)
        at += 1
        for j in gl.static_range(4):
            step = unpacked(block, j, TILE)
            if j % TILE.x_steps == 0:
                x_stage = wait_full(x, x_at, TILE.x_stages)
            acc, a = multiply(acc, step, x, x_stage, j, TILE)
            acc, _ = warpgroup_mma_wait(0, deps=(acc, a))
            if (j + 1) % TILE.x_steps == 0:
                release(x, x_at, TILE.x_stages)
                x_at += 1
    return acc, at, x_at


@gluon.jit
def add_overlapped(acc, out, w, x, at, x_at, blocks, WARPGROUP: gl.constexpr, TILE: gl.constexpr):
    """acc plus so many blocks' products, each step unpacked beside the product before it.

    The wait for the next step's activations stands before that for the product, though it is for
    the next product only: ptxas moves a wait for products up past what does not touch them, but not
    past another wait.
    """
    block = tile_block(w, wait_full(w, at, TILE.stages), WARPGROUP, TILE)
    step = unpacked(block, 0, TILE)
    x_stage = wait_full(x, x_at, TILE.x_stages)
    for k in range(blocks):
        for j in gl.static_range(4):
            acc, a = multiply(acc, step, x, x_stage, j, TILE)
            # After the last step this reads what is at hand once more, and nobody uses it.
            more = 1
            if j == 3:
                more = (k + 1 < blocks).to(gl.int32)
                block = tile_block(w, wait_full(w, at + more, TILE.stages), WARPGROUP, TILE)
                step = unpacked(block, 0, TILE)
            else:
                step = unpacked(block, j + 1, TILE)
            if TILE.order == HELD:
                step = held(step, (out.num_tokens < 0).to(gl.int32), out.factor)
            x_next = x_at
            if (j + 1) % TILE.x_steps == 0:
                x_next += more
            next_stage = wait_full(x, x_next, TILE.x_stages)
            acc, _ = warpgroup_mma_wait(0, deps=(acc, a))
            if (j + 1) % TILE.x_steps == 0:
                release(x, x_at, TILE.x_stages)
                x_at += 1
            x_stage = next_stage
        release(w, at, TILE.stages)
        at += 1
    return acc, at, x_at


@gluon.constexpr_function
def output_layout(tokens):
    """Threads side by side along the rows of a tile's transpose, which lie together in y."""
    return gl.BlockedLayout([8, 1], [8, 4], [1, 4], [0, 1])


@gluon.jit
def finish(acc, out, part, sizes, WARPGROUP: gl.constexpr, TILE: gl.constexpr, PDL: gl.constexpr):
    """Add up a tile's sums where they were shared out, and store it."""
    wait_for_launch_before(PDL)
    finishes = True
    if TILE.streamed:
        acc, finishes = summed(acc, out.partial, out.tickets, part, sizes, WARPGROUP, TILE)
    if finishes:
        LAYOUT: gl.constexpr = output_layout(TILE.tokens)
        y = gl.convert_layout(acc, LAYOUT)
        row = (part.tile // sizes.tiles_m * TILE.warpgroups + WARPGROUP) * 64
        row = row.to(gl.int64) + gl.arange(0, 64, gl.SliceLayout(1, LAYOUT))
        token = (part.tile % sizes.tiles_m * TILE.tokens).to(gl.int64)
        token += gl.arange(0, TILE.tokens, gl.SliceLayout(0, LAYOUT))
        has_row, has_token = row < out.num_rows, token < out.num_tokens
        mask = has_row[:, None] & has_token[None, :]
        y *= gl.load(out.factor + token, mask=has_token, other=0.0)[None, :]
        if out.bias is not None:
            y += gl.load(out.bias + row, mask=has_row, other=0.0).to(gl.float32)[:, None]
        if out.residual is not None:
            residual = out.residual + token[None, :] * out.stride_residual + row[:, None]
            y += gl.load(residual, mask=mask, other=0.0).to(gl.float32)
        to = out.y + token[None, :] * out.stride_y + row[:, None]
        gl.store(to, y.to(out.y.dtype.element_ty), mask=mask)


@gluon.jit
def multiply_tiles(
    out, w, x, sizes, WARPGROUP: gl.constexpr, TILE: gl.constexpr, PDL: gl.constexpr
):
    """A warpgroup that multiplies."""
    TOKENS: gl.constexpr = TILE.tokens
    LAYOUT: gl.constexpr = accumulator(TOKENS)
    share = share_of_program(sizes, TILE.streamed)
    at, x_at = 0, 0
    for i in range(share.count):
        part = segment(share, i, sizes)
        acc = gl.zeros([64, TOKENS], gl.float32, LAYOUT)
        blocks = part.end - part.begin
        if TILE.order == TURNS:
            acc, at, x_at = add_in_turns(acc, w, x, at, x_at, blocks, WARPGROUP, TILE)
        else:
            acc, at, x_at = add_overlapped(acc, out, w, x, at, x_at, blocks, WARPGROUP, TILE)
        finish(acc, out, part, sizes, WARPGROUP, TILE, PDL)


@gluon.jit
def plane_buffers(desc, NUMBER: gl.constexpr):
    if desc is not None:
        shape: gl.constexpr = [NUMBER] + desc.block_type.shape
        buffers = gl.allocate_shared_memory(desc.dtype, shape, desc.layout)
    else:
        buffers = None
    return buffers


@gluon_kernel(dynamic=("tiles", "tiles_m", "num_tokens"))
def _packed_kernel(
    y_ptr,  # [m, n]
    partial_ptr,  # float32 [programs, 2, warpgroups, 64, tokens], or None of whole tiles
    tickets_ptr,  # int32 [tiles] zeros, which are left so
    factor_ptr,  # [m]
    bias_ptr,  # [n], or None
    residual_ptr,  # [m, n], or None
    q_desc,  # of planes
    h_desc,
    s_desc,
    d_desc,
    x_desc,  # of activations, float16 [m, padded k]
    stride_y_token,
    stride_residual_token,
    num_rows,
    blocks,  # of K
    tiles,
    tiles_m,
    num_tokens,
    TILE: gl.constexpr,
    PDL: gl.constexpr,
):
    NUMBER: gl.constexpr = TILE.warpgroups
    planes = Planes(q_desc, h_desc, s_desc, d_desc)
    buffers = Planes(
        plane_buffers(q_desc, TILE.stages * NUMBER),
        plane_buffers(h_desc, TILE.stages * NUMBER),
        plane_buffers(s_desc, TILE.stages * NUMBER),
        plane_buffers(d_desc, TILE.stages * NUMBER),
    )
    w = Ring(buffers, make_barriers(TILE.stages, 1), make_barriers(TILE.stages, NUMBER))
    x = Ring(
        plane_buffers(x_desc, TILE.x_stages * TILE.x_steps),
        make_barriers(TILE.x_stages, 1),
        make_barriers(TILE.x_stages, NUMBER),
    )
    fence_async_shared()
    sizes = Sizes(tiles, tiles_m, blocks)
    out = Output(
        y_ptr, partial_ptr, tickets_ptr, factor_ptr, bias_ptr, residual_ptr,
        stride_y_token, stride_residual_token, num_tokens, num_rows,
    )
    if NUMBER == 2:
        gl.warp_specialize(
            [
                (multiply_tiles, (out, w, x, sizes, 0, TILE, PDL)),
                (multiply_tiles, (out, w, x, sizes, 1, TILE, PDL)),
                (fetch_weights, (planes, w, sizes, TILE)),
                (fetch_tokens, (x_desc, x, sizes, TILE, PDL)),
            ],
            [4, 1, 1],
            [TILE.registers, 24, 24],
        )
    else:
        gl.warp_specialize(
            [
                (multiply_tiles, (out, w, x, sizes, 0, TILE, PDL)),
                (fetch_weights, (planes, w, sizes, TILE)),
                (fetch_tokens, (x_desc, x, sizes, TILE, PDL)),
            ],
            [1, 1],
            [24, 24],
        )


@lru_cache(maxsize=1024)
def _tile_of(fmt: BlockFormat, config: PackedConfig) -> Tile:
    registers, _ = REGISTERS[config.warpgroups, config.ctas_per_sm]
    shape = config.tokens, config.warpgroups, config.order, config.streamed
    rings = config.stages, config.x_stages, config.x_steps
    num_bytes = config.warpgroups * block_bytes(fmt)
    return Tile(fmt, unpacking_of(fmt), *shape, *rings, num_bytes, registers)


def _descriptors(
    planes: Tensor, kind: str, num_weights: int, fmt: BlockFormat
) -> dict[str, TensorDescriptor | None]:
    """Tensor maps of W's planes, whose tiles are a block of a warpgroup's rows.

    Rows end with their last weight's numbers: what fills them up is any, and a d that is no number
    would not become 0 by activations that are.
    """
    sizes, num_rows, data = row_sizes(planes, kind, num_weights), len(planes), planes.flatten()
    d_type = torch.int32 if fmt.has_minimum else torch.float16
    found: dict[str, TensorDescriptor | None] = {}
    first = 0
    for plane in "qhstd":
        size = sizes[plane] * num_rows
        dtype = d_type if plane == "d" else torch.int32
        found[f"{plane}_desc"] = None
        if size:
            rows = data[first : first + size].view(dtype).view(num_rows, -1)
            used = num_weights // (32 if fmt.scale_code == "" else BLOCK)
            shape = num_rows, used if plane == "d" else rows.shape[1]
            tile = ROWS, columns_of(plane, fmt)
            # Rows of 128 bytes lie apart by a multiple of all banks.
            wide = tile[1] * rows.element_size() >= 128
            found[f"{plane}_desc"] = describe(rows, tile, shape, swizzled=wide)
        first += size
    del found["t_desc"]
    return found


def packed_product(
    y: Tensor,
    arranged: Arranged,
    planes: Tensor,
    kind: str,
    config: PackedConfig,
    k: int,
    *,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """y[m, n] = Σₖ a[m, k] · W[n, k] + bias[n] + residual[m, n], rounded once.

    Args:
        y: [m, n], of at least one element.
        arranged: a, float16 or bfloat16 [m, k], in :data:`~.packed_config.ORDER`.
        planes: W, uint8 [n, row_bytes].
        kind: W's, such as ``"Q4_K:planes"``.
        config: the launch's configuration.
        bias: [n], contiguous, in any float dtype.
        residual: [m, n] in any float dtype.
    """
    (num_tokens, num_rows), fmt = y.shape, FORMATS[file_kind(kind)]
    tiles_m, blocks = cdiv(num_tokens, config.tokens), cdiv(k, BLOCK)
    tiles = tiles_m * cdiv(num_rows, ROWS * config.warpgroups)
    if tiles > TICKETS.value:  # a measured choice may serve a shape of more than it was measured at
        config = config._replace(streamed=False)
    units = tiles * blocks if config.streamed else tiles
    programs, partial = min(processors(y.device) * config.ctas_per_sm, units), None
    if config.streamed:
        parts = programs, 2, config.warpgroups, ROWS, config.tokens
        partial = torch.empty(parts, dtype=torch.float32, device=y.device)
    _, maxnreg = REGISTERS[config.warpgroups, config.ctas_per_sm]
    _packed_kernel.launch(
        (programs,),
        y_ptr=y,
        partial_ptr=partial,
        tickets_ptr=arranged.tickets,
        factor_ptr=arranged.factor,
        bias_ptr=bias,
        residual_ptr=residual,
        **_descriptors(planes, kind, k, fmt),
        x_desc=describe(arranged.x, (config.tokens, STEP)),
        stride_y_token=y.stride(0),
        stride_residual_token=0 if residual is None else residual.stride(0),
        num_rows=num_rows,
        blocks=blocks,
        tiles=tiles,
        tiles_m=tiles_m,
        num_tokens=num_tokens,
        TILE=_tile_of(fmt, config),
        num_warps=4,
        maxnreg=maxnreg,
    )
    return y
