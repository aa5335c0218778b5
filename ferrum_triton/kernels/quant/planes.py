"""Reading a matrix in planes (:mod:`ferrum_triton.quant.planes`): threads take groups as words.

A thread takes one group of 32 weights of a row at a time, or of Q2_K and Q3_K, whose groups have 8
bytes of low bits, a pair of neighbours: fewer instructions load and scale as many weights.

Every tensor here is [threads]: a thread loads 16, 8 or 4 bytes of each plane at once. PTX says so,
as Triton's own loads can only in a layout that the activations would have to be moved to. Elsewhere
(the interpreter, AMD) each word is loaded by itself. Words are kept in tuples.

An eight is eight weights in a row, of which a group has four. ``eight_words`` gives its integers as
the bytes of two words::

    format          first word         second word        bits below, above
    Q4_0 .. Q4_K    w                  w                  0 and 4, others
    Q2_K            w                  w                  4(e % 2) and 2 more, others
    Q5_0 .. Q6_K    low | high << 4    the same           0, others
    Q8_0            w ^ 0x80 each      the same           0, none
    IQ4, FP4        table[w] each      the same           0, none
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from ferrum_triton.errors import InputError
from ferrum_triton.kernels.jit import capability
from ferrum_triton.kernels.quant.codebooks import looked_up
from ferrum_triton.quant.formats import FORMATS, BlockFormat
from ferrum_triton.quant.kinds import file_kind
from ferrum_triton.quant.planes import PLANE_FORMATS, ROW_ALIGN

# Groups in a row from more than which on rows are long.
MANY_GROUPS = 256
# Weights are read once: they leave the first-level cache to the activations.
STREAM = tl.constexpr(".L1::evict_first")


@dataclass(frozen=True)
class Layout:
    """A matrix in planes, as kernels know it.

    Attributes:
        format: the format's description.
        q, h, s, t, d: bytes of a row of low bits, high bits, scales, their high bits, and block
            scales; 0 of a plane that there is not.
        groups: groups of 32 weights in a row.
        span: groups a thread takes at a time.
        asm: PTX that unpacks 16 weights for tensor cores; "" where none is used.
    """

    format: BlockFormat
    q: int
    h: int
    s: int
    t: int
    d: int
    groups: int
    span: int
    asm: str = ""


class Matrix(NamedTuple):
    """W [num_rows, k] in planes; ``ptr`` None where there is no such matrix."""

    ptr: Any
    num_rows: Any


@triton.constexpr_function
def shift_of(e, word, fmt):
    """Bits below the integers in word 0 or 1 of eight ``e``."""
    if fmt.high_bits or has_bytes(fmt):
        return 0
    return 4 * word if fmt.low_bits == 4 else 4 * (e % 2) + 2 * word


@triton.constexpr_function
def bits_of(fmt):
    """Bits of an integer that ``eight_words`` gives."""
    return 8 if has_bytes(fmt) else fmt.bits


@triton.constexpr_function
def has_bytes(fmt):
    """Whether ``eight_words`` gives whole bytes, signed if asked for."""
    return fmt.signed or fmt.values is not None


@triton.constexpr_function
def offset_of(fmt):
    """What formats without a minimum take from every integer ``eight_words`` gives; else 1."""
    return 128 if fmt.signed else fmt.bias or fmt.offset or 1


@triton.constexpr_function
def span_of(fmt, num_groups):
    """Groups that a thread takes at a time of a row of so many."""
    # Packed scales of two groups share a byte. Pairs of short rows of Q2_K would leave too few
    # threads for their loads.
    code = fmt.scale_code
    return 2 if code == "packed" or (code == "nibbles" and num_groups > MANY_GROUPS) else 1


@triton.constexpr_function
def _singles_by_ptx(layout, plan):
    """Whether PTX loads scales too, and high bits of which a part has one word.

    Triton goes through the whole kernel for each load of its own: Q5_K 4096x12288 by one token
    compiles in 11 s with such loads, in 2 with PTX (``compile_launch`` for sm_90, which tells the
    registers below too). Elsewhere Triton's stay. Where they are few, in
    loops, of codebooks and for float32 activations, PTX gains little, and may need more registers,
    as narrow integers are no longer packed: IQ4_XS 4096x12288 by one token 128 for 96. Of many rows
    or tokens they are slower: Q4_K 5120x5120 by one token takes 5.7 us for 5.6, 4096x14336 by two
    13.0 for 12.6 (``bench.run gemv_quant gemm_quant``). Q2_K and Q3_K, of most scales, always use
    PTX: Q2_K 6144x4096 by two tokens takes 80 registers for 95.
    """
    in_loop = layout.groups > plan.threads * layout.span or (plan.persistent and not plan.deferred)
    few = plan.rows <= 8 and plan.tokens == 1
    many = plan.integers and layout.format.values is None and few and not in_loop
    return plan.ptx and (many or layout.format.low_bits == 2)


@triton.jit
def load_rows(matrix, row, at, mask, LAYOUT: tl.constexpr, PLAN: tl.constexpr):
    """What a thread needs of a block of rows from ``row`` on: [row] of words (low, high, scales).

    Bytes of a row of each plane are constants: rows differ by an immediate of the load's address.

    Args:
        matrix: Matrix.
        row: first row, int64.
        at: parts of LAYOUT.span groups, [threads].
        mask: parts that there are, [threads] or None.
        PLAN: GemvPlan.
    """
    ROWS: tl.constexpr = PLAN.rows
    PTX: tl.constexpr = PLAN.ptx
    SINGLES: tl.constexpr = _singles_by_ptx(LAYOUT, PLAN)
    FORMAT: tl.constexpr = LAYOUT.format
    LOW: tl.constexpr = LAYOUT.span * FORMAT.low_bits  # words of a part
    HIGH: tl.constexpr = LAYOUT.span * FORMAT.high_bits
    num_rows = tl.full((), 1, tl.int64) * matrix.num_rows
    plane = matrix.ptr
    q_ptr = (plane + row * LAYOUT.q).to(tl.pointer_type(tl.int32)) + at * LOW
    plane += num_rows * LAYOUT.q
    h_ptr = (plane + row * LAYOUT.h).to(tl.pointer_type(tl.int32)) + at * HIGH
    plane += num_rows * LAYOUT.h
    s_ptr = plane + row * LAYOUT.s
    plane += num_rows * LAYOUT.s
    t_ptr = plane + row * LAYOUT.t
    d_ptr = plane + num_rows * LAYOUT.t + row * LAYOUT.d  # not read where d is in s
    rows = ()
    for r in tl.static_range(ROWS):
        q_row, h_row = q_ptr + r * (LAYOUT.q // 4), h_ptr + r * (LAYOUT.h // 4)
        q = load_words(q_row, mask, min(LOW, 4), PTX, STREAM)
        if LOW == 8:
            q += load_words(q_row + 4, mask, 4, PTX, STREAM)
        h = ()
        if HIGH > 1:
            h = load_words(h_row, mask, HIGH, PTX, STREAM)
        elif HIGH == 1:
            h = load_words(h_row, mask, 1, SINGLES, "")
        d_row, s_row, t_row = d_ptr + r * LAYOUT.d, s_ptr + r * LAYOUT.s, t_ptr + r * LAYOUT.t
        rows += ((q, h, _load_scales(d_row, s_row, t_row, at, mask, LAYOUT, SINGLES)),)
    return rows


@triton.constexpr_function
def pointer_to(num_bytes):
    """Pointers to unsigned integers of one or two bytes, or to words."""
    return tl.pointer_type({1: tl.uint8, 2: tl.uint16}.get(num_bytes, tl.int32))


@triton.constexpr_function
def _scale_bytes(layout):
    """Bytes of a part's scales in the plane s."""
    code = layout.format.scale_code
    return 1 if code == "byte32" else 2 * layout.span if code == "nibbles" else 2


@triton.constexpr_function
def d_bytes(fmt):
    """Bytes of d, and of m where there is one."""
    return 4 if fmt.has_minimum or fmt.is_row_scaled else 2


@triton.jit
def _load_scales(d_ptr, s_ptr, t_ptr, at, mask, LAYOUT: tl.constexpr, PTX: tl.constexpr):
    """The scales of a part, as they are stored: those of d, s and t that there are."""
    CODE: tl.constexpr = LAYOUT.format.scale_code
    PARTS: tl.constexpr = 8 // LAYOUT.span if CODE != "" else 1  # that share d
    if CODE == "power":
        raw = (load_one(s_ptr + at, mask),)  # bytes still, which loops carry packed
    else:
        d_ptr = d_ptr.to(pointer_to(d_bytes(LAYOUT.format)))
        block = tl.zeros_like(at) if LAYOUT.format.is_row_scaled else at // PARTS
        raw = load_words(d_ptr + block, mask, 1, PTX, "")
        if CODE != "":
            s_ptr = s_ptr.to(pointer_to(_scale_bytes(LAYOUT)))
            raw += load_words(s_ptr + at, mask, 1, PTX, "")
        if CODE == "packed":
            raw += load_words(t_ptr + at, mask, 1, PTX, "")
    return raw


@triton.constexpr_function
def _load_asm(count, bits, hint, masked):
    """PTX that loads ``count`` integers of so many bits at once, 0 where masked off."""
    to = ", ".join(f"${i}" for i in range(count))
    to = f".v{count}.b{bits} {{{to}}}" if count > 1 else f".b{bits} {to}"
    load = f"ld.global{hint}{to}, [${count}];"
    if not masked:
        return load
    zeros = " ".join(f"mov.b32 ${i}, 0;" for i in range(count))
    return f"{{ .reg .pred p; setp.ne.b32 p, ${count + 1}, 0; {zeros} @p {load} }}"


@triton.constexpr_function
def _load_constraints(count, masked):
    return ",".join(["=r"] * count + ["l"] + ["r"] * masked)


@triton.constexpr_function
def _int32s(count):
    return (tl.int32,) * count


@triton.jit
def load_words(ptr, mask, COUNT: tl.constexpr, PTX: tl.constexpr, HINT: tl.constexpr):
    """COUNT integers that follow each other, as a tuple of int32; 0 where masked off.

    Args:
        ptr: pointers [threads] to int32, or to narrower unsigned integers; for PTX at multiples of
            COUNT of them.
        mask: [threads], or None.
        PTX: load them at once, by PTX, where COUNT is 1, 2 or 4.
        HINT: of that PTX, to the caches.

    Not pure, so that loads stay on their side of a wait for the launch before.
    """
    if PTX:
        MASKED: tl.constexpr = mask is not None
        args = [ptr.to(tl.int64)]
        if MASKED:
            args = [ptr.to(tl.int64), mask.to(tl.int32)]
        BITS: tl.constexpr = ptr.dtype.element_ty.primitive_bitwidth
        asm: tl.constexpr = _load_asm(COUNT, BITS, HINT, MASKED)
        constraints: tl.constexpr = _load_constraints(COUNT, MASKED)
        dtypes: tl.constexpr = _int32s(COUNT)
        words = tl.inline_asm_elementwise(
            asm, constraints, args, dtype=dtypes, is_pure=False, pack=1
        )
    else:
        words = ()
        for i in tl.static_range(COUNT):
            words += (load_one(ptr + i, mask).to(tl.int32),)
    return words


@triton.jit
def load_one(ptr, mask):
    """What ``ptr`` points at, 0 where masked off."""
    if mask is None:
        x = tl.load(ptr)
    else:
        x = tl.load(ptr, mask=mask, other=0)
    return x


@triton.jit
def tied_zero(parts, zero):
    """``zero`` [threads], 0, as if it depended on every load of the rows, [part][row].

    The assembler would move loads of scales down to where they are used, and their time would add
    to that of the weights, which is over by then; barriers do not keep it from that. Sums that
    start here do. ``zero`` has to be what no compiler knows to be 0.
    """
    bits = parts[0][0][0][0]
    for p in tl.static_range(len(parts)):
        for r in tl.static_range(len(parts[p])):
            q, h, raw = parts[p][r]
            bits |= q[0] | q[len(q) - 1]
            for i in tl.static_range(len(h)):
                bits |= h[i]
            for i in tl.static_range(len(raw)):
                bits |= raw[i]
    return bits & zero


@triton.jit
def _shifted(w, LEFT: tl.constexpr):
    """w << LEFT, or >> -LEFT: what comes in from above is masked off later."""
    if LEFT > 0:
        w = w << LEFT
    if LEFT < 0:
        w = w >> -LEFT
    return w


@triton.jit
def eight_words(
    q, h, E: tl.constexpr, FORMAT: tl.constexpr, SIGNED: tl.constexpr, PTX: tl.constexpr
):
    """The integers of eight E, four a word; ``shift_of`` bits lie below and foreign bits above.

    Args:
        SIGNED: leave bytes as they are, two's complement. Else they are ``offset_of`` more.
    """
    VALUES: tl.constexpr = FORMAT.values
    LOW: tl.constexpr = FORMAT.low_bits
    HIGH: tl.constexpr = FORMAT.high_bits
    if LOW == 8:
        first, second = q[2 * E], q[2 * E + 1]
        if not SIGNED:
            flip: tl.constexpr = -0x7F7F7F80  # 0x80808080
            first, second = first ^ flip, second ^ flip
    elif VALUES is not None:
        BIAS: tl.constexpr = 0 if SIGNED else offset_of(FORMAT)
        first, second = looked_up(q[E], VALUES, BIAS, PTX)
    elif HIGH == 0:
        first = q[E * LOW // 4]
        second = first
    elif LOW == 2:
        first = merged(_shifted(q[E // 2], -4 * (E % 2)), h[0], 0x03030303, 2 - 2 * E, PTX)
        second = merged(_shifted(q[E // 2], -4 * (E % 2) - 2), h[0], 0x03030303, 1 - 2 * E, PTX)
    elif HIGH == 2:
        first = merged(q[E], h[E // 2], 0x0F0F0F0F, 4 - 4 * (E % 2), PTX)
        second = merged(q[E] >> 4, h[E // 2], 0x0F0F0F0F, 2 - 4 * (E % 2), PTX)
    else:
        first = merged(q[E], h[0], 0x0F0F0F0F, 4 - 2 * E, PTX)
        second = merged(q[E] >> 4, h[0], 0x0F0F0F0F, 3 - 2 * E, PTX)
    return first, second


@triton.constexpr_function
def _merge_asm(mask):
    return f"lop3.b32 $0, $1, $2, {mask:#x}, 0xE4;"


@triton.jit
def merged(low, high, LOW: tl.constexpr, LEFT: tl.constexpr, PTX: tl.constexpr):
    """Bits of ``low`` where LOW has them, above them those of ``high``, moved there."""
    high = _shifted(high, LEFT)
    if PTX:  # in one instruction, which the compiler does not find
        word = tl.inline_asm_elementwise(
            _merge_asm(LOW), "=r,r,r", [low, high], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        word = (low & LOW) | (high & ~LOW)
    return word


@triton.jit
def halves(word):
    """The two float16 of a word."""
    low = word.to(tl.int16).to(tl.float16, bitcast=True)
    high = (word >> 16).to(tl.int16).to(tl.float16, bitcast=True)
    return low, high


@triton.jit
def fp16_pair(word):
    """The two float16 of a word as float32."""
    low = word.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    high = (word >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    return low, high


@triton.jit
def halved_power(e):
    """2^(e - 128) of a byte e, float32: 2^-128 and 2^-127 are denormal."""
    e = e.to(tl.int32)
    bits = tl.where(e == 0, 1 << 21, tl.maximum((e - 1) << 23, 1 << 22))
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def small_e4m3(e4m3):
    """2^-8 of what the lowest byte of an int32 stands for in E4M3, float32."""
    half = ((e4m3 & 0x80) << 8) | ((e4m3 & 0x7F) << 7)
    return half.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def sub_scales(raw, FORMAT: tl.constexpr):
    """The integers of a group's sub-blocks: scales, then minimums where there are.

    Of E4M3 they are float32, 2^-8 of what is meant.
    """
    CODE: tl.constexpr = FORMAT.scale_code
    if CODE == "pair":
        integers = (raw[1] & 0xFF, raw[1] >> 8)
    elif CODE == "byte32":
        integers = ((raw[1] << 24) >> 24,)
    elif CODE == "byte":
        integers = ((raw[1] << 24) >> 24, (raw[1] << 16) >> 24)
    elif CODE == "e4m3":
        # Both at once, as the upper bytes of halves of a word.
        both = (raw[1] & 0xFF) << 8 | (raw[1] & 0xFF00) << 16
        integers = fp16_pair(((both >> 1) & 0x3F803F80) | (both & -0x7FFF8000))
    elif CODE == "nibbles":
        s = raw[1]
        integers = (s & 0xF, (s >> 8) & 0xF, (s >> 4) & 0xF, s >> 12)
    elif CODE == "packed":
        s = raw[1]
        integers = (
            ((s & 0xF) | ((raw[2] & 3) << 4)) - 32,
            ((s >> 4) | ((raw[2] & 12) << 2)) - 32,
        )
    else:
        integers = ()
    return integers


@triton.jit
def block_scales(raw, FORMAT: tl.constexpr):
    """d, and the minimum where there is one or a zero makes one, as float32."""
    if FORMAT.has_minimum:
        d, m = fp16_pair(raw[0])
        if FORMAT.has_zero:
            m = -(d * m)  # exact
        scales = (d, m)
    elif FORMAT.is_exponent:
        scales = (halved_power(raw[0]),)
    elif FORMAT.is_row_scaled:
        scales = (raw[0].to(tl.float32, bitcast=True),)
    else:
        scales = (raw[0].to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32),)
    return scales


def uses_ptx(x: Tensor) -> bool:
    return capability(x.device) >= (8, 0)


def is_aligned(x: Tensor) -> bool:
    """Whether rows start at multiples of 16 bytes."""
    apart = any(stride * x.element_size() % 16 for stride in x.stride()[:-1])
    return not apart and x.data_ptr() % 16 == 0


def layout_of(planes: Tensor, kind: str, num_weights: int) -> Layout:
    """The layout of a matrix whose rows have ``num_weights`` weights."""
    fmt, groups = FORMATS[file_kind(kind)], num_weights // 32
    sizes = row_sizes(planes, kind, num_weights)
    return Layout(fmt, **sizes, groups=groups, span=span_of(fmt, groups))


def row_sizes(planes: Tensor, kind: str, num_weights: int) -> dict[str, int]:
    """Bytes of a row of the planes q, h, s, t and d; 0 of one that there is not.

    Raises:
        InputError: a matrix is not contiguous, or starts between multiples of 16 bytes.
    """
    apart = planes.stride()[-2:] != (planes.shape[-1], 1)
    if planes.numel() and (
        (apart and planes.shape[-2] > 1)
        or planes.data_ptr() % ROW_ALIGN
        or any(stride % ROW_ALIGN for stride in planes.stride()[:-2])
    ):
        got = f"of strides {list(planes.stride())} bytes at address {planes.data_ptr():#x}"
        allowed = f"contiguous planes at a multiple of {ROW_ALIGN} bytes"
        advice = "Copy it: .clone(memory_format=torch.contiguous_format)."
        raise InputError(kind, "blocks", got, allowed, advice)
    return _row_sizes(kind, num_weights)


@lru_cache(maxsize=4096)
def _row_sizes(kind: str, num_weights: int) -> dict[str, int]:
    sizes = PLANE_FORMATS[kind].row_sizes(num_weights)
    return {plane: sizes.get(plane, 0) for plane in "qhstd"}


def row_units(sizes: dict[str, int]) -> dict[str, int]:
    """A kernel's units of 16 bytes of a row in each plane, of what ``row_sizes`` gives."""
    return {f"{plane}_row": size // ROW_ALIGN for plane, size in sizes.items()}
