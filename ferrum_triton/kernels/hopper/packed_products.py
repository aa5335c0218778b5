"""Launches of packed products on Hopper: tensor maps of planes, and what is constant."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate

import torch
from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ferrum_triton.kernels.gluon import describe
from ferrum_triton.kernels.hopper.packed import packed_kernel
from ferrum_triton.kernels.hopper.packed_weights import columns_of
from ferrum_triton.kernels.jit import processors
from ferrum_triton.kernels.quant.activations import TICKETS, Arranged
from ferrum_triton.kernels.quant.fragments import (
    codes_of,
    places_of,
    scaling_of,
    unpacking_of,
)
from ferrum_triton.kernels.quant.packed_config import (
    BLOCK,
    ROWS,
    STEP,
    SUMS_BYTES,
    WARPGROUPS,
    PackedConfig,
    block_bytes,
    early_programs,
    last_tile,
    registers_of,
)
from ferrum_triton.kernels.quant.packed_costs import programs_of
from ferrum_triton.kernels.quant.planes import row_sizes
from ferrum_triton.kernels.rows import cdiv
from ferrum_triton.quant.formats import FORMATS, BlockFormat
from ferrum_triton.quant.kinds import file_kind


@dataclass(frozen=True)
class Tile:
    """What is constant in a launch.

    Attributes:
        format: the description of the weights' format.
        asm: PTX that unpacks two words of their codes.
        activation: y = activation(gate) * up, "silu" or "gelu_tanh"; or "".
        matrices: how many there are.
        tokens: tokens of a tile.
        span: steps of 64 of K that are multiplied in a row.
        overlapped: steps are unpacked while those before them are multiplied.
        pingpong: warpgroups begin their products in turn.
        streamed: programs share tiles' K.
        stages: blocks of 256 weights in the ring of weights.
        x_stages: stages in the ring of activations; 0 where they come with weights.
        block_bytes: bytes of a stage of weights.
        registers: of a thread that multiplies.
        slices: parts of its tokens that a tile's programs add up, each its own; 1 where one program
            adds all, or a tile is not shared.
        ragged: the last tokens fill a half of a tile or less, and their tiles come last.
        scaling: PTX that scales what ``asm`` leaves, where offsets are a product of their own; "".
        places: where codes lie in what ``asm`` leaves, which ``scaling`` takes them from.
    """

    format: BlockFormat
    asm: str
    activation: str
    matrices: int
    tokens: int
    span: int
    overlapped: bool
    pingpong: bool
    streamed: bool
    stages: int
    x_stages: int
    block_bytes: int
    registers: int
    slices: int = 1
    ragged: bool = False
    scaling: str = ""
    places: tuple[int, ...] = ()

    @property
    def joined(self) -> bool:
        """Whether a stage of weights comes with its block's activations."""
        return self.x_stages == 0

    @property
    def sums_offsets(self) -> bool:
        """Whether offsets are a product of their own."""
        return self.scaling != ""

    @property
    def sums_bytes(self) -> int:
        """Bytes of a block's sums of activations, which come with a stage of weights."""
        return self.tokens * SUMS_BYTES if self.sums_offsets else 0

    @property
    def producers(self) -> int:
        """Warps that fill a stage of weights."""
        return 2 if self.joined or self.sums_offsets else 1

    @property
    def x_steps(self) -> int:
        """Steps of K whose activations are a stage."""
        return BLOCK // STEP if self.joined else self.span

    def part(self, parts: int) -> "Tile":
        """A tile of fewer tokens."""
        return replace(self, tokens=self.tokens // parts, ragged=False)


@lru_cache(maxsize=1024)
def tile_of(
    fmt: BlockFormat,
    config: PackedConfig,
    registers: int,
    activation: str,
    matrices: int,
    slices: int = 1,
    ragged: bool = False,
) -> Tile:
    shape = config.tokens, config.span, config.overlapped, config.pingpong, config.streamed
    rings = config.stages, config.x_stages
    parts = slices, ragged
    num_bytes = WARPGROUPS * block_bytes(fmt)
    if config.sums_offsets:
        asm, scaling = codes_of(fmt), (scaling_of(fmt), places_of(fmt))
    else:
        asm, scaling = unpacking_of(fmt), ()
    return Tile(
        fmt, asm, activation, matrices, *shape, *rings, num_bytes, registers, *parts, *scaling
    )


def descriptors_of(
    rows_of: Callable[[str, torch.dtype], Tensor | None], kind: str, num_weights: int, num_rows: int
) -> list[TensorDescriptor | None]:
    """Tensor maps of planes q, h, s and d, in tiles of a block of K by ``num_rows`` rows.

    Rows end with their last weight's numbers: what fills them up is any, and a d that is no number
    would not become 0 by activations that are.

    Args:
        rows_of: a plane's rows as numbers of a dtype, [rows, columns] or of several matrices; or
            None of a plane that there is not.
    """
    fmt = FORMATS[file_kind(kind)]
    d_type = torch.int32 if fmt.has_minimum or fmt.scale_code else torch.float16
    found: list[TensorDescriptor | None] = []
    for plane in "qhsd":
        rows = rows_of(plane, d_type if plane == "d" else torch.int32)
        if rows is None:
            found.append(None)
            continue
        columns = num_weights // (BLOCK if fmt.scale_code else 32)
        if fmt.scale_code and not fmt.has_minimum:
            columns = cdiv(columns, 2)  # a word has two blocks' d
        shape = *rows.shape[:-1], columns if plane == "d" else rows.shape[-1]
        tile = *(1 for _ in rows.shape[2:]), num_rows, columns_of(plane, fmt)
        # Rows of 128 bytes would lie in the same banks.
        wide = tile[-1] * rows.element_size() >= 128
        found.append(describe(rows, tile, shape, rows.stride(), swizzled=wide))
    return found


def plane_offsets(sizes: Mapping[str, int], num_rows: int) -> dict[str, int]:
    """Where each plane of a matrix begins, in bytes; those of no size are left out."""
    ends = list(accumulate(sizes[plane] * num_rows for plane in "qhstd"))
    begins = dict(zip("qhstd", [0, *ends], strict=False))
    return {plane: begin for plane, begin in begins.items() if sizes[plane]}


def _descriptors(
    planes: Tensor | None, kind: str, num_weights: int, num_rows: int
) -> list[TensorDescriptor | None]:
    """Tensor maps of a matrix's planes, or None where there is no matrix."""
    if planes is None or not len(planes):
        return [None] * 4
    sizes, data = row_sizes(planes, kind, num_weights), planes.flatten()
    begins = plane_offsets(sizes, len(planes))

    def rows_of(plane: str, dtype: torch.dtype) -> Tensor | None:
        if plane not in begins:
            return None
        rows = data[begins[plane] : begins[plane] + sizes[plane] * len(planes)]
        return rows.view(dtype).view(len(planes), -1)

    return descriptors_of(rows_of, kind, num_weights, num_rows)


def packed_products(
    y: Tensor,
    arranged: Arranged,
    matrices: Sequence[Tensor],
    kind: str,
    config: PackedConfig,
    k: int,
    *,
    activation: str = "",
    bias: Tensor | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """y[m, n] = Σₖ a[m, k] · W[n, k] + bias[n] + residual[m, n], rounded once.

    Args:
        y: [m, n], of at least one element.
        arranged: a, float16 or bfloat16 [m, k], in :func:`~.packed_config.order_of` ``config``.
        matrices: W, or up to three side by side in y; or gate and up. uint8 [rows, row_bytes].
        kind: theirs, such as ``"Q4_K:planes"``.
        config: the launch's configuration; of gate and up half of a tile's rows are either's.
        activation: what gate passes through, ``"silu"`` or ``"gelu_tanh"``.
        bias: [n], contiguous, in any float dtype.
        residual: [m, n] in any float dtype.
    """
    num_tokens, rows = y.shape[0], ROWS // 2 if activation else ROWS
    matrices = [w for w in matrices if len(w)]
    counted = matrices[:1] if activation else matrices
    tiles_m, blocks = cdiv(num_tokens, config.tokens), cdiv(k, BLOCK)
    tiles = tiles_m * sum(cdiv(len(w), rows * WARPGROUPS) for w in counted)
    if tiles > TICKETS.value:  # a measured choice may serve a shape of more than it was measured at
        config = config._replace(streamed=False)
    num_sms = processors(y.device)
    programs, partial = programs_of(config, tiles, blocks, num_sms), None
    if config.streamed:
        parts = programs.count, 2, WARPGROUPS, ROWS, config.tokens
        partial = torch.empty(parts, dtype=torch.float32, device=y.device)
    fmt = FORMATS[file_kind(kind)]
    registers = registers_of(config, fmt)
    tile = tile_of(
        fmt,
        config,
        registers.multiplying,
        activation,
        len(matrices),
        slices=programs.slices,
        ragged=last_tile(config, num_tokens) < config.tokens,
    )
    first, second, third = [*matrices, None, None][:3]
    each = {"": first, "second_": second, "third_": third}
    descriptors = {
        f"{prefix}{plane}_desc": descriptor
        for prefix, w in each.items()
        for plane, descriptor in zip("qhsd", _descriptors(w, kind, k, rows), strict=True)
    }
    packed_kernel.launch(
        (programs.count,),
        y_ptr=y,
        partial_ptr=partial,
        tickets_ptr=arranged.tickets,
        factor_ptr=arranged.factor,
        bias_ptr=bias,
        residual_ptr=residual,
        **descriptors,
        x_desc=describe(arranged.x, (config.tokens, STEP)),
        sums_desc=describe(arranged.sums, (config.tokens, 16)) if config.sums_offsets else None,
        stride_y_token=y.stride(0),
        stride_residual_token=0 if residual is None else residual.stride(0),
        num_rows=len(first),
        num_rows_second=0 if second is None else len(second),
        num_rows_third=0 if third is None else len(third),
        blocks=blocks,
        tiles=tiles,
        tiles_m=tiles_m,
        num_tokens=num_tokens,
        early=early_programs(config, num_tokens, num_sms),
        TILE=tile,
        num_warps=4,
        maxnreg=registers.average,
    )
    return y
