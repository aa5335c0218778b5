"""What a step of a product of weights in planes reads, by pointers or through tensor descriptors.

Both ways give a step's :class:`Loaded` tiles, so that the products that follow do not know which
way was taken. Words reach shared memory by the pipeline of the loop that takes the steps, or as
descriptors' tiles (:mod:`ferrum_triton.kernels.quant.descriptors`), and are unpacked after they are
read from it in the operand's layout (:mod:`ferrum_triton.kernels.quant.fragments`).

Of Q4_K and Q5_K the bytes of a scale and its min are read as one int16.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from ferrum_triton.kernels.jit import capability
from ferrum_triton.kernels.quant.fragments import unpacking_of
from ferrum_triton.kernels.quant.mma_config import MmaConfig
from ferrum_triton.kernels.quant.planes import d_bytes, halves
from ferrum_triton.quant.formats import FORMATS, BlockFormat
from ferrum_triton.quant.kinds import file_kind


@dataclass(frozen=True)
class Tile:
    """What is constant in a product's loop over K: the format, and the shape of a tile.

    Numbers derived from it are constexpr functions, whose source Triton's cache of compiled kernels
    is keyed by; of a property it would know nothing. So is the PTX a field.

    Attributes:
        format: the description of weights' format.
        asm: PTX that unpacks two words, "" where Triton does: in the interpreter and on AMD.
        rows: rows of W.
        tokens: tokens.
        words: words of eight weights in a step.
        parts: products a step is summed in.
        scale_after: d scales the product in float32, not the weights in float16.
        whole: K is whole steps.
    """

    format: BlockFormat
    asm: str
    rows: int
    tokens: int
    words: int
    parts: int
    scale_after: bool
    whole: bool


def halves_of(kind: str) -> int:
    """In how many parts words' pairs are taken, and activations arranged."""
    return 2 if FORMATS[file_kind(kind)].bits in (3, 5) else 1


def tile_of(kind: str, config: MmaConfig, k: int, device: torch.device) -> Tile:
    """The tile of a product of K ``k``."""
    has_ptx = capability(device) >= (8, 0)
    return _tile_of(file_kind(kind), config, k % (8 * config.words) == 0, has_ptx)


@lru_cache(maxsize=4096)
def _tile_of(kind: str, config: MmaConfig, whole: bool, has_ptx: bool) -> Tile:
    fmt = FORMATS[kind]
    return Tile(
        format=fmt,
        asm=unpacking_of(fmt) if has_ptx else "",
        rows=config.rows,
        tokens=config.tokens,
        words=config.words,
        parts=max(config.parts, halves_of(kind)),
        # Powers of two of MXFP4 are beyond float16 before the product. What scales whole rows
        # comes after all steps.
        scale_after=fmt.scale_code == "power"
        or (config.scale_after and fmt.scale_code != "" and not fmt.is_row_scaled),
        whole=whole,
    )


@triton.constexpr_function
def q_columns(tile):
    """int32 of a row's first plane in a step."""
    return {8: 2 * tile.words, 3: tile.words // 2, 2: tile.words // 2}.get(
        tile.format.bits, tile.words
    )


@triton.constexpr_function
def h_columns(tile):
    """int32 of its second plane, 0 of formats that have none."""
    by_bits = {6: tile.words // 2, 5: tile.words // 4, 3: tile.words // 4}
    return by_bits.get(tile.format.bits, 0)


@triton.constexpr_function
def s_columns(tile):
    """Scales of its sub-blocks, of the kind of ``scale_code``."""
    if tile.format.scale_code == "":
        return 0
    return tile.words // (2 if tile.format.scale_code in ("byte", "nibbles", "e4m3") else 4)


@triton.constexpr_function
def d_columns(tile):
    """Blocks of 32 weights in a step, of formats that have no others."""
    return 0 if tile.format.scale_code else tile.words // 4


@triton.constexpr_function
def d_unit(tile):
    """Entries of d, or of d and m, in 16 bytes: exponents of MXFP4 are bytes."""
    return 16 if tile.format.scale_code == "power" else 16 // d_bytes(tile.format)


@triton.constexpr_function
def s_by_tma(tile):
    """Whether a descriptor brings scales: those of 16 words are too narrow for one."""
    return tile.format.scale_code in ("pair", "nibbles", "byte", "e4m3") and tile.words == 32


@triton.constexpr_function
def d_by_tma(tile):
    """Likewise d, or d and m: a row of a descriptor's tile has 16 bytes at least."""
    return d_columns(tile) * (4 if tile.format.has_minimum else 2) >= 16


class PlaneRows(NamedTuple):
    """Units of 16 bytes that a row takes in each plane; 0 of a plane there is not."""

    q: Any
    h: Any
    s: Any
    t: Any
    d: Any


class Pointers(NamedTuple):
    """Where the first step of a tile's rows and tokens lies."""

    q: Any  # int32 [rows, q_columns]
    h: Any  # int32 [rows, h_columns]
    s: Any  # [rows, s_columns]
    t: Any  # int32 [rows, 1], upper bits of packed scales
    d: Any  # [rows], float16, or float16 d and m as int32; float32 of what scales rows
    x: Any  # float16 [tokens, 8 words / parts]
    sums: Any  # float16 [tokens, words]


class MatrixTma(NamedTuple):
    """Descriptors of a matrix's planes, None of one that is read by pointers, and its expert."""

    q: Any
    h: Any
    s: Any
    d: Any
    expert: Any


class TokensTma(NamedTuple):
    """Descriptors of arranged activations, and of their sums or None; a tile's first token."""

    x: Any
    sums: Any
    token: Any


class Operands(NamedTuple):
    """Everything a tile's steps are read through."""

    at: Any  # Pointers
    rows: Any  # PlaneRows
    matrix: Any  # MatrixTma
    up: Any  # likewise of a second matrix, whose rows alternate with the first's, eight of each
    tokens: Any  # TokensTma
    row: Any  # the tile's first row in descriptors


class Place(NamedTuple):
    """A step: rows of W past those of the operands, int64, and the step's number in the row."""

    rows: Any
    step: Any


class Scales(NamedTuple):
    """d and m: of a step's block [rows], or of its weights float16 [rows, blocks]; m may be 0."""

    d: Any
    m: Any


class Loaded(NamedTuple):
    """A step's tiles; 0 in place of one that the format has not."""

    words: Any  # int32 [rows, q_columns]
    more: Any  # int32 [rows, h_columns], the bits above
    scale: Any  # [rows, s_columns]
    d: Any  # [rows, d_columns], of formats without integer scales
    x: Any  # float16 [tokens, 8 words / parts]
    x_second: Any  # likewise of the step's second part
    sums: Any  # float16 [tokens, words]


@triton.jit
def pointers(
    planes_ptr, x_ptr, sums_ptr, rows, stride_x_token, row, token, num_rows, TILE: tl.constexpr
):
    """:class:`Pointers` of a tile.

    Args:
        planes_ptr: W [num_rows, row_bytes], or that of each row, [rows].
        x_ptr, sums_ptr: the activations :func:`~.activations.arrange` returned.
        rows: :class:`PlaneRows`.
        row: rows of W, int64 [rows], any there are.
        token: rows of x, int64 [tokens], any there are.
    """
    SCALES: tl.constexpr = TILE.format.scale_code
    plane = tl.full((), 16, tl.int64) * num_rows  # bytes of a plane whose rows are a unit
    q_ptr = planes_ptr.to(tl.pointer_type(tl.int32))
    planes_ptr += plane * rows.q
    h_ptr = planes_ptr.to(tl.pointer_type(tl.int32))
    planes_ptr += plane * rows.h
    s_ptr = planes_ptr
    planes_ptr += plane * rows.s
    t_ptr = planes_ptr.to(tl.pointer_type(tl.int32))
    planes_ptr += plane * rows.t
    q = (q_ptr + row * rows.q * 4)[:, None] + tl.arange(0, q_columns(TILE))[None, :]
    h, s, t = h_ptr, s_ptr, t_ptr
    if h_columns(TILE) > 0:
        h = (h_ptr + row * rows.h * 4)[:, None] + tl.arange(0, h_columns(TILE))[None, :]
    if SCALES != "":
        if SCALES == "pair":
            s = s_ptr.to(tl.pointer_type(tl.int16)) + row * rows.s * 8
        elif SCALES == "byte" or SCALES == "byte32":
            s = s_ptr.to(tl.pointer_type(tl.int8)) + row * rows.s * 16
        else:
            s = s_ptr + row * rows.s * 16
        s = s[:, None] + tl.arange(0, s_columns(TILE))[None, :]
    if SCALES == "packed":
        # Two sub-blocks a column; the upper bits of all 16 of a block are in a word.
        t = (t_ptr + row * rows.t * 4)[:, None]
    if SCALES == "power":
        d = planes_ptr
    elif TILE.format.has_minimum:
        d = planes_ptr.to(tl.pointer_type(tl.int32))
    elif TILE.format.is_row_scaled:
        d = planes_ptr.to(tl.pointer_type(tl.float32))
    else:
        d = planes_ptr.to(tl.pointer_type(tl.float16))
    d += row * rows.d * d_unit(TILE)
    # Element p W + w of a step is product p of word w.
    x = (x_ptr + token * stride_x_token)[:, None]
    x += tl.arange(0, 8 * TILE.words // TILE.parts)[None, :]
    sums = (sums_ptr + token * (stride_x_token // 8))[:, None]
    sums += tl.arange(0, TILE.words)[None, :]
    return Pointers(q, h, s, t, d, x, sums)


@triton.jit
def block_scales(operands, place, TILE: tl.constexpr):
    """d and m of a step's block of each row, where they scale products; else nothing."""
    d, m = 0.0, 0.0
    if TILE.scale_after:
        # Too narrow for the compiler's pipeline where no product depends on them.
        skipped = place.rows * operands.rows.d * d_unit(TILE)
        d = tl.load(operands.at.d + (skipped + place.step * TILE.words // 32))
        if TILE.format.has_minimum:
            d, m = halves(d)
    return Scales(d, m)


@triton.jit
def weight_scales(operands, loaded, place, TILE: tl.constexpr):
    """d and m of each row's weights of a step, float16 [rows, blocks], where they scale weights."""
    d, m = 1.0, 0.0
    if TILE.format.scale_code == "":
        d = loaded.d
        if TILE.format.has_minimum:
            d, m = halves(d)
    elif not TILE.format.is_row_scaled:
        # Halves, which the compiler's pipeline leaves alone: they come from L1, and each thread
        # asks for those of its rows.
        EACH: tl.constexpr = 2 if TILE.format.has_minimum else 1
        d_ptr = operands.at.d.to(tl.pointer_type(tl.float16))[:, None]
        d_ptr += place.rows * operands.rows.d * 8 + place.step * TILE.words // 32 * EACH
        d = tl.load(d_ptr)
        if TILE.format.has_minimum:
            m = tl.load(d_ptr + 1)
    return Scales(d, m)


@triton.jit
def times_row_scales(acc, operands, rows, TILE: tl.constexpr):
    """acc, the sums over all steps of rows, times what scales whole rows where there is such."""
    if TILE.format.is_row_scaled:
        d = tl.load(operands.at.d + rows * operands.rows.d * d_unit(TILE))
        acc *= d[:, None]
    return acc


@triton.jit
def load_step(operands, place, left, TILE: tl.constexpr):
    """A step's :class:`Loaded` tiles.

    Words past the end of a row are any: the activations are 0 there.

    Args:
        left: words of the row from this step on.
    """
    if operands.matrix.q is None:
        loaded = _load_by_pointers(operands, place, left, TILE)
    else:
        loaded = _load_by_tma(operands, place, left, TILE)
    return loaded


@triton.jit
def _load_scales(operands, place, TILE: tl.constexpr):
    UNIT: tl.constexpr = 8 if TILE.format.scale_code == "pair" else 16
    skipped = place.rows * operands.rows.s * UNIT
    return tl.load(operands.at.s + (skipped + place.step * s_columns(TILE)))


@triton.jit
def _load_d(operands, place, left, TILE: tl.constexpr):
    skipped = place.rows * operands.rows.d * (4 if TILE.format.has_minimum else 8)
    column = tl.arange(0, d_columns(TILE))[None, :]
    # 0 where there are none: anything else may be no number.
    return tl.load(
        operands.at.d[:, None] + skipped + (place.step * d_columns(TILE) + column),
        mask=(column < left // 4) | TILE.whole,
        other=0,
    )


@triton.jit
def upper_scales(operands, place, TILE: tl.constexpr):
    """The upper bits of a step's packed scales, in the lowest bits of each column's word."""
    upper = tl.load(
        operands.at.t + (place.rows * operands.rows.t * 4 + place.step * TILE.words // 32)
    )
    column = tl.arange(0, TILE.words // 4)[None, :]
    return upper >> (column + place.step * (TILE.words // 4)) % 8 * 4


@triton.jit
def _load_by_pointers(operands, place, left, TILE: tl.constexpr):
    at = operands.at
    Q_COLUMNS: tl.constexpr = q_columns(TILE)
    H_COLUMNS: tl.constexpr = h_columns(TILE)
    more, scale, d, x_second, sums = 0, 1, 0, 0, 0
    q = at.q + (place.rows * operands.rows.q * 4 + place.step * Q_COLUMNS)
    if TILE.whole:
        words = tl.load(q, eviction_policy="evict_first")
    else:
        # Words of eight weights are Q_COLUMNS / TILE.words int32 each.
        left_columns = left * 2 if TILE.format.bits == 8 else left // (TILE.words // Q_COLUMNS)
        words = tl.load(q, mask=tl.arange(0, Q_COLUMNS)[None, :] < left_columns, other=0)
    if H_COLUMNS > 0:
        column = tl.arange(0, H_COLUMNS)[None, :]
        more = tl.load(
            at.h + (place.rows * operands.rows.h * 4 + place.step * H_COLUMNS),
            mask=(column < left // (TILE.words // H_COLUMNS)) | TILE.whole,
            other=0,
        )
    if TILE.format.scale_code != "":
        scale = _load_scales(operands, place, TILE)
    else:
        d = _load_d(operands, place, left, TILE)
    x_rows = at.x + place.step * (8 * TILE.words)
    x = tl.load(x_rows)
    if TILE.parts == 2:
        x_second = tl.load(x_rows + 4 * TILE.words)
    if TILE.scale_after and TILE.format.has_minimum:
        sums = tl.load(at.sums + place.step * TILE.words)
    return Loaded(words, more, scale, d, x, x_second, sums)


@triton.jit
def _load_by_tma(operands, place, left, TILE: tl.constexpr):
    """One load after the other with nothing between, as the compiler then waits once for all of
    them; and words last, as it would change their layout right behind their load."""
    matrix, up, tokens = operands.matrix, operands.up, operands.tokens
    row, step = operands.row + place.rows.to(tl.int32), place.step
    GATED: tl.constexpr = up.q is not None
    more, scale, d, x_second, sums = 0, 1, 0, 0, 0
    up_words, up_more, up_scale, up_d = 0, 0, 0, 0
    x = tokens.x.load([tokens.token, step * (8 * TILE.words)])
    if TILE.parts == 2:
        x_second = tokens.x.load([tokens.token, step * (8 * TILE.words) + 4 * TILE.words])
    if TILE.scale_after and TILE.format.has_minimum:
        sums = tokens.sums.load([tokens.token, step * TILE.words])
    if s_by_tma(TILE):
        scale = matrix.s.load([matrix.expert, row, step * s_columns(TILE)])
        if GATED:
            up_scale = up.s.load([up.expert, row, step * s_columns(TILE)])
    if d_by_tma(TILE):
        d = matrix.d.load([matrix.expert, row, step * d_columns(TILE)])
        if GATED:
            up_d = up.d.load([up.expert, row, step * d_columns(TILE)])
    if h_columns(TILE) > 0:
        more = matrix.h.load([matrix.expert, row, step * h_columns(TILE)])
        if GATED:
            up_more = up.h.load([up.expert, row, step * h_columns(TILE)])
    words = matrix.q.load([matrix.expert, row, step * q_columns(TILE)])
    if GATED:
        up_words = up.q.load([up.expert, row, step * q_columns(TILE)])
    words = _alternating(words, up_words, GATED)
    if h_columns(TILE) > 0:
        more = _alternating(more, up_more, GATED)
    if s_by_tma(TILE):
        scale = _alternating(scale, up_scale, GATED)
    elif TILE.format.scale_code != "":
        scale = _load_scales(operands, place, TILE)
    if d_by_tma(TILE):
        d = _alternating(d, up_d, GATED)
    elif d_columns(TILE) > 0:
        d = _load_d(operands, place, left, TILE)
    return Loaded(words, more, scale, d, x, x_second, sums)


@triton.jit
def _alternating(tile, up, GATED: tl.constexpr):
    """A descriptor's tile [1, R, C] as [R, C]; of two matrices eight rows of each in turn."""
    tile = tl.reshape(tile, tile.shape[1:])
    if GATED:
        R: tl.constexpr = tile.shape[0]
        C: tl.constexpr = tile.shape[1]
        both = tl.join(tl.reshape(tile, [R // 8, 8, C]), tl.reshape(up, [R // 8, 8, C]))
        tile = tl.reshape(tl.permute(both, (0, 3, 1, 2)), [2 * R, C])
    return tile
