"""Reading planes (:mod:`ferrum_triton.quant.planes`): threads take groups of 32 weights as words.

A thread takes one group of a row at a time, or of Q2_K and Q3_K, whose groups have 8 bytes of low
bits, a pair of neighbours: fewer instructions load and scale as many weights.

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
    IQ4, MXFP4      table[w] each      the same           0, none
"""

from functools import lru_cache

import triton
import triton.language as tl
from torch import Tensor

from ferrum_triton.errors import InputError
from ferrum_triton.kernels.jit import can_overlap, capability
from ferrum_triton.kernels.quant.loads import load_narrow, load_one, load_words
from ferrum_triton.kernels.quant.words import looked_up
from ferrum_triton.quant.formats import FORMATS
from ferrum_triton.quant.planes import PLANE_FORMATS, ROW_ALIGN

# Groups in a row from more than which on rows are long.
MANY_GROUPS = 256
GROUP = tl.constexpr(32)  # weights


@triton.constexpr_function
def described(kind):
    """The description of a format, or of what a file calls it; of None, None.

    A description is what to pass on: unlike a name it is part of Triton's cache keys.
    """
    return FORMATS[kind] if isinstance(kind, str) else kind


@triton.constexpr_function
def shift_of(e, word, kind):
    """Bits below the integers in word 0 or 1 of eight ``e``."""
    fmt = described(kind)
    if fmt.high_bits or has_bytes(fmt):
        return 0
    return 4 * word if fmt.low_bits == 4 else 4 * (e % 2) + 2 * word


@triton.constexpr_function
def bits_of(kind):
    """Bits of an integer that ``eight_words`` gives."""
    return 8 if has_bytes(kind) else described(kind).bits


@triton.constexpr_function
def has_bytes(kind):
    """Whether ``eight_words`` gives whole bytes, signed if asked for."""
    fmt = described(kind)
    return fmt.signed or fmt.values is not None


@triton.constexpr_function
def place_of(e, i, kind):
    """Bits below integer ``i`` of eight ``e`` once those of byte 3 are moved down to byte 2."""
    return 8 * min(i % 4, 2) + shift_of(e, i // 4, kind)


@triton.constexpr_function
def offset_of(kind):
    """What formats without a minimum take from every integer ``eight_words`` gives; else 1."""
    fmt = described(kind)
    return 128 if fmt.signed else fmt.bias or fmt.offset or 1


@triton.constexpr_function
def has_halves(kind):
    """Whether each half of a group has a scale of its own."""
    return described(kind).has_halves


@triton.constexpr_function
def has_minimum(kind):
    """Whether a block has a minimum beside d."""
    return described(kind).has_minimum


@triton.constexpr_function
def span_of(kind, num_groups):
    """Groups that a thread takes at a time of a row of so many."""
    # Packed scales of two groups share a byte. Pairs of short rows of Q2_K would leave too few
    # threads for their loads.
    code = described(kind).scale_code
    return 2 if code == "packed" or (code == "nibbles" and num_groups > MANY_GROUPS) else 1


@triton.constexpr_function
def words_of(plane, kind, span):
    """Words that ``span`` groups have in the plane of low ("q") or high ("h") bits."""
    fmt = described(kind)
    return span * (fmt.high_bits if plane == "h" else fmt.low_bits)


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
                bits |= _bits(raw[i])
    return bits & zero


@triton.jit
def _bits(x):
    if x.dtype == tl.float16:
        x = x.to(tl.int16, bitcast=True)
    return x.to(tl.int32)


@triton.jit
def load_group(
    q_ptr, h_ptr, mask, KIND: tl.constexpr, SPAN: tl.constexpr, ASM: tl.constexpr,
    HINT: tl.constexpr,
):  # fmt: skip
    """The words of SPAN groups: (those of the low bits, those of the high bits).

    Args:
        q_ptr: the first word in the plane of low bits, [threads].
        h_ptr: likewise of high bits, where KIND has them.
    """
    LOW: tl.constexpr = words_of("q", KIND, SPAN)
    HIGH: tl.constexpr = words_of("h", KIND, SPAN)
    q = load_words(q_ptr, mask, min(LOW, 4), ASM, HINT)
    if LOW == 8:
        q += load_words(q_ptr + 4, mask, 4, ASM, HINT)
    if HIGH > 1:
        h = load_words(h_ptr, mask, HIGH, ASM, HINT)
    elif HIGH == 1:
        h = (load_one(h_ptr, mask),)
    else:
        h = ()
    return q, h


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
    q, h, E: tl.constexpr, KIND: tl.constexpr, SIGNED: tl.constexpr, ASM: tl.constexpr
):  # fmt: skip
    """The integers of eight E, four a word; ``shift_of`` bits lie below and foreign bits above.

    Args:
        SIGNED: leave bytes as they are, two's complement. Else they are ``offset_of`` more.
    """
    VALUES: tl.constexpr = described(KIND).values
    LOW: tl.constexpr = described(KIND).low_bits
    HIGH: tl.constexpr = described(KIND).high_bits
    if LOW == 8:
        first, second = q[2 * E], q[2 * E + 1]
        if not SIGNED:
            flip: tl.constexpr = -0x7F7F7F80  # 0x80808080
            first, second = first ^ flip, second ^ flip
    elif VALUES is not None:
        BIAS: tl.constexpr = 0 if SIGNED else offset_of(KIND)
        first, second = looked_up(q[E], VALUES, BIAS, ASM)
    elif HIGH == 0:
        first = q[E * LOW // 4]
        second = first
    elif LOW == 2:
        first = merged(_shifted(q[E // 2], -4 * (E % 2)), h[0], 0x03030303, 2 - 2 * E, ASM)
        second = merged(_shifted(q[E // 2], -4 * (E % 2) - 2), h[0], 0x03030303, 1 - 2 * E, ASM)
    elif HIGH == 2:
        first = merged(q[E], h[E // 2], 0x0F0F0F0F, 4 - 4 * (E % 2), ASM)
        second = merged(q[E] >> 4, h[E // 2], 0x0F0F0F0F, 2 - 4 * (E % 2), ASM)
    else:
        first = merged(q[E], h[0], 0x0F0F0F0F, 4 - 2 * E, ASM)
        second = merged(q[E] >> 4, h[0], 0x0F0F0F0F, 3 - 2 * E, ASM)
    return first, second


@triton.constexpr_function
def merge_asm(mask):
    return f"lop3.b32 $0, $1, $2, {mask:#x}, 0xE4;"


@triton.jit
def merged(low, high, LOW: tl.constexpr, LEFT: tl.constexpr, ASM: tl.constexpr):
    """Bits of ``low`` where LOW has them, above them those of ``high``, moved there."""
    high = _shifted(high, LEFT)
    if ASM:  # in one instruction, which the compiler does not find
        word = tl.inline_asm_elementwise(
            merge_asm(LOW), "=r,r,r", [low, high], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        word = (low & LOW) | (high & ~LOW)
    return word


@triton.jit
def load_scales(
    d_ptr, s_ptr, t_ptr, at, mask, KIND: tl.constexpr, SPAN: tl.constexpr, ASM: tl.constexpr
):
    """The scales of SPAN groups from SPAN · at on, as they are stored: (d, s, t)."""
    CODE: tl.constexpr = described(KIND).scale_code
    if CODE == "":
        raw = (load_one(d_ptr + at, mask),)
    elif CODE == "power":
        raw = (load_one(s_ptr + at, mask),)
    elif CODE == "byte32":
        raw = (load_one(d_ptr + at // 8, mask), load_one(s_ptr + at, mask))
    elif CODE == "packed":
        raw = (
            load_narrow(d_ptr.to(tl.pointer_type(tl.uint16)) + at // 4, mask, ASM),
            load_narrow(s_ptr.to(tl.pointer_type(tl.uint16)) + at, mask, ASM),
            load_narrow(t_ptr + at, mask, ASM),
        )
    elif CODE == "nibbles" and SPAN == 2:
        s_ptr = s_ptr.to(tl.pointer_type(tl.int32))
        raw = (load_one(d_ptr + at // 4, mask), load_one(s_ptr + at, mask))
    elif CODE == "nibbles":
        s_ptr = s_ptr.to(tl.pointer_type(tl.uint16))
        raw = (load_one(d_ptr + at // 8, mask), load_narrow(s_ptr + at, mask, ASM))
    else:
        s_ptr = s_ptr.to(tl.pointer_type(tl.uint16))
        raw = (load_one(d_ptr + at // 8, mask), load_one(s_ptr + at, mask))
    return raw


@triton.jit
def fp16_pair(word):
    """The two fp16 of an int32 as float32."""
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
def group_of(row, AT: tl.constexpr, KIND: tl.constexpr, SPAN: tl.constexpr):
    """Group AT of SPAN that were loaded of a row."""
    q, h, raw = row
    CODE: tl.constexpr = described(KIND).scale_code
    if CODE == "nibbles" and SPAN == 2:
        q, raw = (q[2 * AT], q[2 * AT + 1]), (raw[0], (raw[1] >> (16 * AT)) & 0xFFFF)
    elif CODE == "packed":
        raw = (raw[0], (raw[1] >> (8 * AT)) & 0xFF, raw[2] >> (4 * AT))
        q, h = (q[2 * AT], q[2 * AT + 1]), (h[AT],)
    return q, h, raw


@triton.jit
def half_scales(raw, KIND: tl.constexpr):
    """Scales of halves of groups as bytes of a word, packed ones with their offset still."""
    if described(KIND).scale_code == "nibbles":
        word = raw[1] & 0x0F0F0F0F
    else:
        low = (raw[1] & 0xFF) | ((raw[1] & 0xFF00) << 8)
        low = (low | (low << 4)) & 0x0F0F0F0F
        # Two bits of each: copies of the byte where none reaches into what is kept of another.
        high = (raw[2] * 0x1001) & 0x000F000F
        word = low | ((high * 0x410) & 0x30303030)
    return word


@triton.jit
def sub_scales(raw, KIND: tl.constexpr):
    """The integers of a group's sub-blocks: scales, then minimums where there are."""
    CODE: tl.constexpr = described(KIND).scale_code
    if CODE == "pair":
        s = raw[1].to(tl.int32)
        integers = (s & 0xFF, s >> 8)
    elif CODE == "byte32":
        integers = (raw[1].to(tl.int8, bitcast=True).to(tl.int32),)
    elif CODE == "byte":
        s = raw[1].to(tl.int16, bitcast=True).to(tl.int32)
        integers = ((s << 24) >> 24, s >> 8)
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
def block_scales(raw, KIND: tl.constexpr):
    """d, and the minimum where there is one, as float32."""
    if has_minimum(KIND):
        d, m = fp16_pair(raw[0])
        scales = (d, m)
    elif described(KIND).is_exponent:
        scales = (halved_power(raw[0]),)
    elif described(KIND).scale_code == "packed":
        scales = (raw[0].to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32),)
    else:
        scales = (raw[0].to(tl.float32),)
    return scales


@triton.jit
def load_rows(
    planes_ptr, num_rows, first, at, mask,
    Q: tl.constexpr, H: tl.constexpr, S: tl.constexpr, T: tl.constexpr, D: tl.constexpr,
    KIND: tl.constexpr, SPAN: tl.constexpr, ROWS: tl.constexpr, ASM: tl.constexpr,
    HINT: tl.constexpr,
):  # fmt: skip
    """What a thread needs of SPAN groups of each of ROWS rows: tuples (low, high, scales).

    Bytes of a row of each plane are constants: rows differ by an immediate of the load's address.

    Args:
        planes_ptr: of a matrix of num_rows rows, int64.
        first: of the rows, int64.
        at: [threads]; groups from SPAN · at on.
        Q, H, S, T, D: bytes of a row of each plane, 0 of one that KIND has not.
    """
    q_ptr = (planes_ptr + first * Q).to(tl.pointer_type(tl.int32))
    q_ptr += at * words_of("q", KIND, SPAN)
    planes_ptr += num_rows * Q
    h_ptr = (planes_ptr + first * H).to(tl.pointer_type(tl.int32))
    h_ptr += at * words_of("h", KIND, SPAN)
    planes_ptr += num_rows * H
    s_ptr = planes_ptr + first * S
    planes_ptr += num_rows * S
    t_ptr = planes_ptr + first * T
    planes_ptr += num_rows * T + first * D  # not read where d is in s
    D_BYTES: tl.constexpr = 4 if has_minimum(KIND) else 2
    if has_minimum(KIND):
        d_ptr = planes_ptr.to(tl.pointer_type(tl.int32))
    else:
        d_ptr = planes_ptr.to(tl.pointer_type(tl.float16))
    rows = ()
    for r in tl.static_range(ROWS):
        q, h = load_group(q_ptr + r * (Q // 4), h_ptr + r * (H // 4), mask, KIND, SPAN, ASM, HINT)
        raw = load_scales(
            d_ptr + r * (D // D_BYTES), s_ptr + r * S, t_ptr + r * T, at, mask, KIND, SPAN, ASM
        )
        rows += ((q, h, raw),)
    return rows


def uses_ptx(x: Tensor) -> bool:
    return capability(x.device) >= (8, 0)


def may_chain(x: Tensor) -> bool:
    """Whether a launch on activations [..., K] can wait for the one before by itself."""
    return x.shape[-1] > 0 and can_overlap(x.device)


def is_aligned(x: Tensor) -> bool:
    """Whether rows start at multiples of 16 bytes."""
    apart = any(stride * x.element_size() % 16 for stride in x.stride()[:-1])
    return not apart and x.data_ptr() % 16 == 0


def row_sizes(planes: Tensor, kind: str, num_weights: int) -> dict[str, int]:
    """Bytes of a row of each plane, as kernels name them: Q, H, S, T and D, 0 of one there is not.

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
    return {plane.upper(): sizes.get(plane, 0) for plane in "qhstd"}
