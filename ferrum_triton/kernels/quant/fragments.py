"""Weights in planes, unpacked into fragments of the tensor cores where they lie in registers.

A row's weights lie in planes of int32 words (:mod:`ferrum_triton.quant.planes`). Two words of
four-bit codes are 16 weights and give eight pairs of float16; so do one word of a two-bit plane and
half a word of a one-bit plane. A pair takes two weights whose codes lie 16 bits apart in one word,
so that one instruction masks both and sets the exponent that makes the bits a float16 of M + code::

    weight 16 i + 8 h + 4 n + 2 e + o  is  element 2 i + e of product 4 h + 2 n + o

(h: which word, n: which nibble, 2 e + o: which byte). The order of K within a sum is free, so the
activations are brought into that order instead, once. One fused multiply-add then takes M off and
applies the sub-block's integer scale: M is a power of two for each place of a code in its word, and
small enough that (M + offset) · scale is a float16 too, so that scale · (code - offset) comes out
rounded once; it is exact up to 2048, and so in every format but Q6_K and Q8_0 scaled.

The words' elements need not be computed apart from each other: PTX sees two neighbours of K at a
time (``pack=2``), which in an operand's layout one thread holds side by side.
"""

import struct
from functools import cache

import triton
import triton.language as tl

from ferrum_triton.kernels.quant.codebooks import value_of
from ferrum_triton.kernels.quant.planes import halved_power, small_e4m3
from ferrum_triton.kernels.quant.ptx import Asm
from ferrum_triton.quant.formats import BlockFormat

# What a scale is below where M times it is to be a float16, M being 1024 at most.
LARGEST_SCALE = 64
# An exponent whose float16 has a code's lowest bit at a place: 2^(10 - place).
_MAGIC = {place: ((25 - place) << 10) * 0x10001 for place in range(7)}


def _half(value: float) -> str:
    """Two copies of a float16 that holds ``value``, as a PTX constant."""
    return f"0x{int.from_bytes(struct.pack('<e', value), 'little') * 0x10001:08X}"


def _pairs(asm: Asm, outs: tuple[str, str], word: str, place: int, bits: int) -> None:
    """M + code of the codes at ``place`` in bytes 0 and 2, and in bytes 1 and 3."""
    mask = ((1 << bits) - 1 << place) * 0x10001
    for out, source in zip(outs, (word, asm.shifted(word, -8)), strict=True):
        asm.op("lop3.b32", source, f"0x{mask:08X}", f"0x{_MAGIC[place]:08X}", "0xEA", to=out)


def _signed_pairs(asm: Asm, outs: tuple[str, str], word: str) -> None:
    """M + 128 + byte of the signed bytes 0 and 2, and of bytes 1 and 3."""
    for out, source in zip(outs, (word, asm.shifted(word, -8)), strict=True):
        asm.op("lop3.b32", source, "0x00FF00FF", "0x64806480", "0x6A", to=out)


def _codes(asm: Asm, fmt: BlockFormat, first: int) -> list[int]:
    """Write M + code to $0 .. $7; the place of each product's codes.

    Args:
        asm: where to.
        fmt: the format. Signed bytes, and values of a codebook, come out as M + 128 + value.
        first: operand. There are two of each tile: two words of four bits, or twice the word that
            both share. Of eight bits the low and the high halves of two words of 64.
    """
    places = []
    bits, words, more = fmt.bits, (f"${first}", f"${first + 1}"), f"${first + 2}"
    for h in range(2):
        found = asm.looked_up(words[h], fmt.values, 0) if fmt.values else None
        for n in range(2):
            p = 2 * h + n
            outs = (f"${2 * p}", f"${2 * p + 1}")
            place = 0
            if found:
                _signed_pairs(asm, outs, found[n])
            elif bits == 8:
                _signed_pairs(asm, outs, f"${first + h + 2 * n}")
            else:
                if bits == 6:
                    # Bits 2 .. 5 of a byte from the nibble, 6 and 7 from the two bits above.
                    nibble = asm.shifted(words[h], 2 - 4 * n)
                    word = asm.merged(0x3C3C3C3C, nibble, asm.shifted(more, 6 - 2 * p))
                    place = 2
                elif bits == 5:
                    nibble = asm.shifted(words[h], -4 * n)
                    word = asm.merged(0x0F0F0F0F, nibble, asm.shifted(more, 4 - p))
                elif bits == 4:
                    word, place = words[h], 4 * n
                elif bits == 3:
                    # At place 4, where (M + 4) · scale is a float16.
                    low = asm.shifted(words[0], 4 - 2 * p)
                    word = asm.merged(0x30303030, low, asm.shifted(more, 6 - p))
                    place = 4
                else:
                    word, place = words[0], 2 * p
                _pairs(asm, outs, word, place, bits)
            places += [place, place]
    return places


def _scaled(fmt: BlockFormat) -> str:
    """PTX: scale · (code - offset) to $0 .. $7; the operand after the words has the scale."""
    asm = Asm()
    places = _codes(asm, fmt, 8)
    both = f"${8 + _word_operands(fmt)}"
    if fmt.scale_code == "power":
        scale = both  # a pair already
    elif fmt.scale_code == "e4m3":
        # 2^-8 of it, twice: the byte's sign at a float16's, its other bits below.
        upper = asm.op("prmt.b32", both, "0", "0x0404")
        low = asm.op("lop3.b32", asm.shifted(upper, -1), "0x3F803F80", "0", "0xC0")
        scale = asm.op("lop3.b32", upper, "0x80008000", low, "0xEA")
    else:
        # As a byte under the exponent of 1024; a signed one plus 128, packed ones are stored so.
        signed = fmt.scale_code in ("byte", "byte32")
        byte = asm.op("xor.b32", both, "0x80") if signed else both
        raw = asm.op("prmt.b32", byte, "0x64646464", "0x4040")
        packed = fmt.scales.offset if fmt.scales and fmt.scale_code == "packed" else 0
        bias = asm.op("mov.b32", _half(1024 + (128 if signed else packed)))
        scale = asm.op("sub.rn.f16x2", raw, bias)
    taken = {}
    for place in dict.fromkeys(places):
        size = asm.op("mov.b32", _half(-(2 ** (10 - place) + _code_offset(fmt))))
        taken[place] = asm.op("mul.rn.f16x2", scale, size)
    for i, place in enumerate(places):
        asm.op("fma.rn.f16x2", f"${i}", scale, taken[place], to=f"${i}")
    return asm.text()


def _plain(fmt: BlockFormat) -> str:
    """PTX: code - offset to $0 .. $7."""
    asm = Asm()
    places = _codes(asm, fmt, 8)
    sizes = {
        place: asm.op("mov.b32", _half(2 ** (10 - place) + _code_offset(fmt)))
        for place in dict.fromkeys(places)
    }
    for i, place in enumerate(places):
        asm.op("sub.rn.f16x2", f"${i}", sizes[place], to=f"${i}")
    return asm.text()


def _code_offset(fmt: BlockFormat) -> int:
    """What :func:`_codes` leaves beside M and the weight's integer."""
    return 128 if fmt.signed or fmt.values else fmt.offset


@triton.constexpr_function
def _word_operands(fmt):
    """Operands of codes: two words of low bits, or of bytes four, and two of the bits above."""
    return 4 if fmt.high_bits or fmt.bits == 8 else 2


@cache
def unpacking_of(fmt: BlockFormat) -> str:
    """PTX that unpacks two words of a format in planes."""
    return _scaled(fmt) if fmt.scale_code else _plain(fmt)


@cache
def codes_of(fmt: BlockFormat) -> str:
    """PTX: M + code of two words of a format in planes to $0 .. $7, as they are masked out."""
    asm = Asm()
    _codes(asm, fmt, 8)
    return asm.text()


@cache
def places_of(fmt: BlockFormat) -> tuple[int, ...]:
    """Where codes lie in the words that :func:`codes_of` makes, each place once."""
    return tuple(dict.fromkeys(_codes(Asm(), fmt, 8)))


@cache
def scaling_of(fmt: BlockFormat) -> str:
    """PTX: $16 times the codes of :func:`codes_of`'s pairs $8 .. $15, rounded once, to $0 .. $7.

    From $17 on there is -M · $16 for each of :func:`places_of`. It is exact, since M is a power of
    two, and finite below the scale that :data:`LARGEST_SCALE` is.
    """
    places = places_of(fmt)
    return "\n".join(
        f"fma.rn.f16x2 ${i}, ${8 + i}, $16, ${17 + places.index(place)};"
        for i, place in enumerate(_codes(Asm(), fmt, 8))
    )


@triton.constexpr_function
def codes_constraints(fmt):
    """Constraints of the operands of :func:`codes_of`."""
    return ",".join(["=&r"] * 8 + ["r"] * _word_operands(fmt))


@triton.constexpr_function
def scaling_constraints(places):
    """Constraints of the operands of :func:`scaling_of`."""
    return ",".join(["=r"] * 8 + ["r"] * (9 + len(places)))


@triton.constexpr_function
def constraints_of(fmt):
    """Constraints of the operands of :func:`unpacking_of`."""
    # A power of two is a float16, two of which are an operand.
    scales = {"": 0, "power": 1}.get(fmt.scale_code, 2)
    return ",".join(["=&r"] * 8 + ["r"] * (_word_operands(fmt) + scales))


# $0 .. $7 = $8 .. $15 times $16, plus $17 or minus $17 · $18. Or less $17, which is exact, and then
# times $16.
TIMES = tl.constexpr("\n".join(f"mul.rn.f16x2 ${i}, ${8 + i}, $16;" for i in range(8)))
PLUS = tl.constexpr("\n".join(f"fma.rn.f16x2 ${i}, ${8 + i}, $16, $17;" for i in range(8)))
LESS = tl.constexpr(
    "\n".join(
        f"{{ .reg .b32 t; sub.rn.f16x2 t, ${8 + i}, $17; mul.rn.f16x2 ${i}, t, $16; }}"
        for i in range(8)
    )
)
_MINUS = tl.constexpr(
    "{\n.reg .b32 low;\nmul.rn.f16x2 low, $17, $18;\nneg.f16x2 low, low;\n"
    + "\n".join(f"fma.rn.f16x2 ${i}, ${8 + i}, $16, low;" for i in range(8))
    + "\n}"
)


# The largest power of two is 2^POWER, with which (M + 128) · 2^POWER is a float16.
POWER, ONE = tl.constexpr(5), tl.constexpr(2.0**-5)
_EIGHT = tl.constexpr((tl.float16,) * 8)
TIMES_CONSTRAINTS = tl.constexpr(",".join(["=r"] * 8 + ["r"] * 9))
PLUS_CONSTRAINTS = tl.constexpr(",".join(["=r"] * 8 + ["r"] * 10))
_DIFFERENCE_CONSTRAINTS = tl.constexpr(",".join(["=&r"] * 8 + ["r"] * 11))


@triton.constexpr_function
def byte_asm(byte):
    """PTX: an unsigned byte of $1 as a float16, twice."""
    return (
        "{\n.reg .b32 t, b;\nmov.b32 b, 0x64006400;\n"
        f"prmt.b32 t, $1, 0x64646464, {0x4040 + 0x101 * byte:#x};\nsub.rn.f16x2 $0, t, b;\n}}"
    )


@triton.jit
def spread(x, W: tl.constexpr):
    """[N, W / c] -> [N, W], each element c times."""
    each: tl.constexpr = W // x.shape[1]
    return tl.reshape(
        tl.broadcast_to(x[:, :, None], [x.shape[0], x.shape[1], each]), [x.shape[0], W]
    )


@triton.jit
def value_at(
    words, more, scale, H: tl.constexpr, N: tl.constexpr, BYTE: tl.constexpr, FORMAT: tl.constexpr
):
    """scale · the integers of the codes at bit BYTE of each word, float16."""
    P: tl.constexpr = 2 * H + N
    BITS: tl.constexpr = FORMAT.bits
    VALUES: tl.constexpr = FORMAT.values
    if BITS == 8:
        code = (words[H + 2 * N] << (24 - BYTE)) >> 24
    elif BITS >= 4:
        code = (words[H] >> (BYTE + 4 * N)) & 15
        if BITS == 6:
            code = code | (((more >> (BYTE + 2 * P)) & 3) << 4)
        elif BITS == 5:
            code = code | (((more >> (BYTE + P)) & 1) << 4)
    else:
        code = (words[0] >> (BYTE + 2 * P)) & 3
        if BITS == 3:
            code = code | (((more >> (BYTE + P)) & 1) << 2)
    if VALUES is not None:
        integer = value_of(code, VALUES)
    else:
        integer = code - FORMAT.offset
    return (scale * integer).to(tl.float16)


@triton.jit
def _product(words, more, scale, P: tl.constexpr, FORMAT: tl.constexpr):
    """Product P without PTX: float16 [N, 2 x], from what has an element a pair."""
    first = value_at(words, more, scale, P // 4, P // 2 % 2, 8 * (P % 2), FORMAT)
    second = value_at(words, more, scale, P // 4, P // 2 % 2, 16 + 8 * (P % 2), FORMAT)
    return tl.reshape(tl.join(first, second), [first.shape[0], 2 * first.shape[1]])


@triton.jit
def unpack(words, more, scale, FORMAT: tl.constexpr, ASM: tl.constexpr):
    """The eight products' weights, float16 [N, W], up to the block's scale.

    Args:
        words: int32 [N, W] of four-bit codes; [N, W / 2] of two-bit codes; [N, 2 W] of bytes.
        more: the bits above, or 0: int32 [N, W / 2] of a two-bit plane; of a one-bit plane [N, W],
            shifted so that the four lowest bits of each byte are those of the word's pair.
        scale: int32 [N, W / c], signed in its lowest byte, what lies above is not read; of codes of
            three bits plus 32. Powers of two are float16, as :func:`relative_power` makes them.
            Of E4M3 the weights come out times 2^-8. Not read where FORMAT has none.
        FORMAT: the format.
        ASM: :func:`unpacking_of` it, or "".
    """
    BITS: tl.constexpr = FORMAT.bits
    SCALED: tl.constexpr = FORMAT.scale_code != ""
    CONSTRAINTS: tl.constexpr = constraints_of(FORMAT)
    if BITS == 8:
        halves = tl.split(tl.reshape(words, [words.shape[0], words.shape[1] // 2, 2]))
    if ASM != "":
        if BITS == 8:
            args = halves
        elif BITS == 6:
            args = (words, spread(more, words.shape[1]))
        elif BITS == 5:
            args = (words, more)
        elif BITS == 4:
            args = (words,)
        elif BITS == 3:
            args = (spread(words, more.shape[1]), more)
        else:
            args = (spread(words, 2 * words.shape[1]),)
        if SCALED:
            args += (spread(scale, args[0].shape[1]),)
        t = tl.inline_asm_elementwise(ASM, CONSTRAINTS, args, dtype=_EIGHT, is_pure=True, pack=2)
    else:
        if BITS == 8:
            l0, l1 = tl.split(tl.reshape(halves[0], [words.shape[0], words.shape[1] // 4, 2]))
            h0, h1 = tl.split(tl.reshape(halves[1], [words.shape[0], words.shape[1] // 4, 2]))
            w = (l0, l1, h0, h1)
        elif BITS >= 4:
            w = tl.split(tl.reshape(words, [words.shape[0], words.shape[1] // 2, 2]))
        else:
            w = (words,)
        if BITS == 3 or BITS == 5:
            more, _ = tl.split(tl.reshape(more, [more.shape[0], more.shape[1] // 2, 2]))
        if SCALED:
            if scale.dtype == tl.float16:
                signed = scale.to(tl.float32)
            elif FORMAT.scale_code == "e4m3":
                signed = small_e4m3(scale)
            else:
                signed = scale - 32 if BITS == 3 else (scale << 24) >> 24
            scale = spread(signed, w[0].shape[1])
        t = ()
        for p in tl.static_range(8):
            t += (_product(w, more, scale, p, FORMAT),)
    return t


@triton.jit
def relative_power(e, largest):
    """2^(e - largest + POWER) of bytes e, float16; what is beyond its range is 0.

    Weights are exact while e is at most 29 below the largest of its 256 weights. A block may have a
    larger one where all its weights are 0.
    """
    exponent = tl.minimum(e - largest, 0) + (15 + POWER)
    denormal = 1024 >> tl.minimum(1 - exponent, 31)
    bits = tl.where(exponent > 0, exponent << 10, denormal)
    return bits.to(tl.int16).to(tl.float16, bitcast=True)


@triton.jit
def largest_power(e):
    """What a sum of weights that :func:`relative_power` scaled is multiplied by, float32."""
    return halved_power(e) * ONE


@triton.jit
def second_bytes(x, W: tl.constexpr, ASM: tl.constexpr):
    """The second bytes of int32 [N, W / c] as float16 [N, W], each c times."""
    if ASM != "":
        y = tl.inline_asm_elementwise(
            byte_asm(1), "=r,r,r", [spread(x, W)], dtype=tl.float16, is_pure=True, pack=2
        )
    else:
        y = spread(((x >> 8) & 255).to(tl.float16), W)
    return y


@triton.jit
def times(t, mins, d, low, FORMAT: tl.constexpr, PTX: tl.constexpr):
    """t · d, + low of formats of 32 weights, - mins · low of the others; float16 each.

    Where low is a zero it is (t - low) · d.

    Args:
        t: of :func:`unpack`.
        d: float16 [N, W].
        low: float16 [N, W].
    """
    DIFFERENCE: tl.constexpr = FORMAT.has_minimum and FORMAT.scale_code != ""
    args = t
    if PTX and DIFFERENCE:
        args += (d, mins, low)
        t = tl.inline_asm_elementwise(
            _MINUS, _DIFFERENCE_CONSTRAINTS, args, dtype=_EIGHT, is_pure=True, pack=2
        )
    elif PTX and FORMAT.has_minimum:
        args += (d, low)
        ASM: tl.constexpr = LESS if FORMAT.has_zero else PLUS
        t = tl.inline_asm_elementwise(
            ASM, PLUS_CONSTRAINTS, args, dtype=_EIGHT, is_pure=True, pack=2
        )
    elif PTX:
        args += (d,)
        t = tl.inline_asm_elementwise(
            TIMES, TIMES_CONSTRAINTS, args, dtype=_EIGHT, is_pure=True, pack=2
        )
    else:
        if DIFFERENCE:
            low = -(low * mins)
        if FORMAT.has_zero:
            low = -(low.to(tl.float32) * d.to(tl.float32))  # exact
        elif FORMAT.has_minimum:
            low = low.to(tl.float32)
        t = ()
        for p in tl.static_range(8):
            # Rounded once, near enough: the product is exact in float32.
            t += ((args[p].to(tl.float32) * d.to(tl.float32) + low).to(tl.float16),)
    return t


@triton.jit
def end_to_end(t, FIRST: tl.constexpr):
    """Four products [N, W] as one of [N, 4 W], in registers."""
    x = tl.join(tl.join(t[FIRST], t[FIRST + 2]), tl.join(t[FIRST + 1], t[FIRST + 3]))
    return tl.reshape(tl.permute(x, (0, 2, 3, 1)), [x.shape[0], 4 * x.shape[1]])


@triton.jit
def all_end_to_end(t):
    """The eight products [N, W] as one of [N, 8 W], in registers."""
    first = tl.join(tl.join(t[0], t[2]), tl.join(t[1], t[3]))
    second = tl.join(tl.join(t[4], t[6]), tl.join(t[5], t[7]))
    x = tl.join(first, second)  # [N, W, 2, 2, 2]
    return tl.reshape(tl.permute(x, (0, 4, 2, 3, 1)), [x.shape[0], 8 * x.shape[1]])
