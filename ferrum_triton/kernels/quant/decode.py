"""Blocks as a file has them, decoded to float32 tiles: what every kernel of that layout shares.

A lane is a byte position that holds PLANES weights, one a plane (in the low and the high half of
the byte, say); or, of neighbours that share one, one of them. A group is the run of lanes whose
weights share their scales, plane by plane. A lane's bytes are loaded once for all its planes. A
tile is [rows, groups, lanes] of one plane. Where a weight lies follows from the format's
description alone; with it::

    format                  weights  groups  lanes  planes  first weight of group s in plane p
    Q4_0, Q4_1, Q5_0, Q5_1       32       1     16       2  16p
    IQ4_NL, MXFP4                32       1     16       2  16p
    Q8_0                         32       1     32       1  0
    Q4_K, Q5_K                  256       4     32       2  64s + 32p
    Q2_K, Q3_K, Q6_K            256       4     16       4  128(s // 2) + 32p + 16(s mod 2)
    IQ4_XS                      256       8     16       2  32s + 16p
    NVFP4                        64       4     16       1  16s

The order of operations is that of :mod:`ferrum_triton.quant.formats`. Compiled with
``enable_fp_fusion=False`` the results are equal to its bit for bit.
"""

import math
from dataclasses import dataclass
from functools import lru_cache

import triton
import triton.language as tl
from torch import Tensor

from ferrum_triton.kernels.quant.codebooks import value_of
from ferrum_triton.kernels.quant.planes import fp16_pair, halved_power, small_e4m3
from ferrum_triton.kernels.rows import next_power_of_2
from ferrum_triton.quant.formats import FORMATS, BlockFormat


@dataclass(frozen=True)
class BlockLayout:
    """What is constant of packed rows.

    Attributes:
        format: the format's description.
        groups: groups of a block.
        lanes: lanes of a group.
        planes: weights of a lane.
        run_lanes: lanes of the run of integers that gives the planes.
        align: power of two, up to 16, that divides every row's address.
    """

    format: BlockFormat
    groups: int
    lanes: int
    planes: int
    run_lanes: int
    align: int


def block_layout(kind: str, blocks: Tensor) -> BlockLayout:
    """The layout of packed rows."""
    return _block_layout(kind, math.gcd(blocks.data_ptr(), *blocks.stride()[:-1], 16))


@lru_cache(maxsize=256)
def _block_layout(kind: str, align: int) -> BlockLayout:
    fmt = FORMATS[kind]
    runs = list(fmt.q.low)
    if fmt.q.high is not None and fmt.q.high.lanes >= 16:
        runs.append(fmt.q.high)
    # The smallest chunk has whole bytes of every run; of equal ones, that with the most planes.
    run = min(runs, key=lambda run: (run.lanes * run.planes, -run.planes))
    lanes, planes, run_lanes = min(run.lanes, fmt.sub_size), run.planes, run.lanes
    if lanes == 1:  # neighbours in a byte: each is a lane, and they load it together
        lanes, planes, run_lanes = fmt.sub_size, 1, fmt.sub_size
    return BlockLayout(fmt, fmt.block_size // (lanes * planes), lanes, planes, run_lanes, align)


def groups_of(num_weights: int, layout: BlockLayout) -> int:
    """Groups in a row of so many weights."""
    return num_weights // layout.format.block_size * layout.groups


def rows_and_groups(
    num_rows: int, num_groups: int, layout: BlockLayout, lanes: int
) -> tuple[int, int]:
    """Rows and groups of a tile of at most ``lanes`` lanes: a part of a row, or whole rows."""
    tile = lanes // layout.lanes
    groups = min(next_power_of_2(max(num_groups, 1)), tile)
    return min(next_power_of_2(num_rows), tile // groups), groups


@triton.jit
def first_weight(s, PLANE: tl.constexpr, LAYOUT: tl.constexpr):
    """Index in its block of the first weight of group ``s`` in a plane."""
    RUN_LANES: tl.constexpr = LAYOUT.run_lanes
    PARTS: tl.constexpr = LAYOUT.run_lanes // LAYOUT.lanes  # groups of a run's chunk
    index = _quotient(s, PARTS) * (RUN_LANES * LAYOUT.planes) + RUN_LANES * PLANE
    if PARTS > 1:
        index += _remainder(s, PARTS) * LAYOUT.lanes
    return index


@triton.jit
def decode(rows, g, lane, mask, PLANE: tl.constexpr, LAYOUT: tl.constexpr):
    """The weights of one plane, float32 [rows, groups, lanes]; 0 or -0 where masked off.

    Args:
        rows: uint8 pointers to the rows' first bytes, [rows, 1, 1].
        g: index of each group in its row, [1, groups, 1].
        lane: index of each lane in its group, [1, 1, lanes].
        mask: groups to read, [rows, groups, 1].
        PLANE: number of the plane.
        LAYOUT: BlockLayout.
    """
    FORMAT: tl.constexpr = LAYOUT.format
    ALIGN: tl.constexpr = LAYOUT.align
    INTEGERS: tl.constexpr = FORMAT.q
    VALUES: tl.constexpr = FORMAT.values
    SCALES: tl.constexpr = FORMAT.scales
    MINS: tl.constexpr = FORMAT.mins
    block = rows + g // LAYOUT.groups * FORMAT.block_bytes
    first = first_weight(g % LAYOUT.groups, PLANE, LAYOUT)
    q = _integer(block, first, lane, mask, INTEGERS, LAYOUT.lanes)
    if VALUES is None:
        q = q.to(tl.float32)
    else:
        q = value_of(q, VALUES).to(tl.float32)
    if FORMAT.is_row_scaled:
        scale = small_e4m3(_integer(block, _quotient(first, 16), 0, mask, SCALES, 1)) * 128.0
        at = block + FORMAT.d.at
        ALIGN_D: tl.constexpr = _alignment_at(FORMAT.d.at, FORMAT, ALIGN)
        above = _word_at(at, mask, ALIGN_D).to(tl.float32, bitcast=True)
        below = _word_at(at + 4, mask, ALIGN_D).to(tl.float32, bitcast=True)
        return tl.div_rn(scale * q * above, tl.where(mask, below, 1.0))
    step, low = _scales(block, mask, FORMAT, ALIGN)
    if FORMAT.has_zero:
        weights = step * (q - low)
    elif SCALES is None:
        weights = step * q
        if FORMAT.has_minimum:
            weights += low
    else:
        sub = _quotient(first, FORMAT.sub_size)
        step *= _integer(block, sub, 0, mask, SCALES, 1).to(tl.float32)
        weights = step * q
        if FORMAT.has_minimum:
            weights -= low * _integer(block, sub, 0, mask, MINS, 1).to(tl.float32)
    return weights


@triton.jit
def _scales(block, mask, FORMAT: tl.constexpr, ALIGN: tl.constexpr):
    """d and m of each block, float32; without m 0."""
    low = 0.0
    if FORMAT.is_exponent:
        d = halved_power(tl.load(block + FORMAT.d.at, mask=mask, other=0))
    elif not FORMAT.has_minimum:
        d = _half_at(block + FORMAT.d.at, mask, _alignment_at(FORMAT.d.at, FORMAT, ALIGN))
    elif FORMAT.m.at == FORMAT.d.at + 2:
        word = _word_at(block + FORMAT.d.at, mask, _alignment_at(FORMAT.d.at, FORMAT, ALIGN))
        d, low = fp16_pair(word)
    else:
        d = _half_at(block + FORMAT.d.at, mask, _alignment_at(FORMAT.d.at, FORMAT, ALIGN))
        low = _half_at(block + FORMAT.m.at, mask, _alignment_at(FORMAT.m.at, FORMAT, ALIGN))
    return d, low


@triton.constexpr_function
def _alignment_at(at, fmt, align):
    """The power of two that divides the address of byte ``at`` of every block."""
    return math.gcd(at, fmt.block_bytes, align)


@triton.constexpr_function
def _num_runs(integers):
    """Runs of the integers' low bits."""
    return len(integers.low)


@triton.constexpr_function
def _run_start(integers, i):
    """The first integer of the i-th of them."""
    return sum(len(run) for run in integers.low[:i])


@triton.jit
def _integer(block, index, lane, mask, INTEGERS: tl.constexpr, LANES: tl.constexpr):
    """Integer ``index + lane`` of each block, int32.

    Args:
        index: multiple of LANES.
        lane: below LANES.
        INTEGERS: where they lie.
    """
    FIRST: tl.constexpr = INTEGERS.low[0]
    HIGH: tl.constexpr = INTEGERS.high
    byte, shift = _place(index, lane, FIRST, LANES)
    for i in tl.static_range(1, _num_runs(INTEGERS)):
        START: tl.constexpr = _run_start(INTEGERS, i)
        RUN: tl.constexpr = INTEGERS.low[i]
        more, by = _place(index - START, lane, RUN, LANES)
        byte = tl.where(index < START, byte, more)
        shift = tl.where(index < START, shift, by)
    if INTEGERS.signed:
        value = tl.load(block + byte, mask=mask, other=0).to(tl.int8, bitcast=True).to(tl.int32)
    else:
        value = _bits_at(block + byte, mask, shift, FIRST.bits)
    if HIGH is not None:
        byte, shift = _place(index, lane, HIGH, LANES)
        value |= _bits_at(block + byte, mask, shift, HIGH.bits) << FIRST.bits
    return value - INTEGERS.offset


@triton.jit
def _place(index, lane, RUN: tl.constexpr, LANES: tl.constexpr):
    """Byte of a block, and bits of that byte below, of value ``index + lane`` of a run."""
    CHUNK: tl.constexpr = RUN.lanes * RUN.planes
    LINE: tl.constexpr = RUN.lanes
    if LINE >= LANES:  # lanes that follow each other are bytes that do
        # As a multiple of LANES, by which the compiler sees how wide loads may be.
        byte = RUN.at + _quotient(index, CHUNK) * LINE
        byte = byte + _remainder(_quotient(index, LANES), LINE // LANES) * LANES + lane
        plane = _remainder(_quotient(index, LINE), RUN.planes)
    elif CHUNK <= LANES:  # whole chunks; of divisions the compiler sees which lanes share a byte
        byte = RUN.at + _quotient(index, CHUNK) * LINE
        byte = byte + lane // CHUNK * LINE + lane % LINE
        plane = lane // LINE % RUN.planes
    else:
        index = index + lane
        byte = RUN.at + _quotient(index, CHUNK) * LINE + _remainder(index, LINE)
        plane = _remainder(_quotient(index, LINE), RUN.planes)
    return byte, plane * RUN.bits + RUN.shift


@triton.constexpr_function
def _log2(n):
    return n.bit_length() - 1


@triton.jit
def _quotient(i, N: tl.constexpr):
    """i // N of numbers that are not negative, N a power of two."""
    return i >> _log2(N)


@triton.jit
def _remainder(i, N: tl.constexpr):
    """i % N of numbers that are not negative, N a power of two."""
    return i & (N - 1)


@triton.jit
def _half_at(ptr, mask, ALIGN: tl.constexpr):
    """The fp16 at ``ptr``, an address that ALIGN divides, as float32."""
    if ALIGN % 2 == 0:
        half = tl.load(ptr.to(tl.pointer_type(tl.float16)), mask=mask, other=0.0)
    else:
        low = tl.load(ptr, mask=mask, other=0).to(tl.uint16)
        high = tl.load(ptr + 1, mask=mask, other=0).to(tl.uint16)
        half = (low | (high << 8)).to(tl.float16, bitcast=True)
    return half.to(tl.float32)


@triton.jit
def _word_at(ptr, mask, ALIGN: tl.constexpr):
    """The uint32 at ``ptr``, an address that ALIGN divides."""
    if ALIGN % 4 == 0:
        word = tl.load(ptr.to(tl.pointer_type(tl.uint32)), mask=mask, other=0)
    else:
        word = tl.load(ptr, mask=mask, other=0).to(tl.uint32)
        for i in tl.static_range(1, 4):
            word |= tl.load(ptr + i, mask=mask, other=0).to(tl.uint32) << (8 * i)
    return word


@triton.jit
def _bits_at(ptr, mask, shift, BITS: tl.constexpr):
    """``BITS`` bits of the bytes at ``ptr``, above the lowest ``shift``, int32."""
    return (tl.load(ptr, mask=mask, other=0).to(tl.int32) >> shift) & ((1 << BITS) - 1)
