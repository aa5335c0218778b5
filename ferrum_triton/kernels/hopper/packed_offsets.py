"""Minimums and zeros of packed weights, taken off by a product of their own.

A weight of a group of 32 is scale · code - offset, where the scale is d, or d times the group's
integer. So

    Σₖ a[k] · w[k]  =  Σₖ a[k] · (scale · code[k])  -  Σ over groups of offset · (Σ a of the group)

The weights of the first sum take one instruction a pair. A code that is masked out of its word is
M + code, M being 1024 or 64, and one fused multiply-add makes (M + code) · scale - M · scale of it,
rounded once. The last term has no room for the offset as well: it is rounded itself, to a 2048th of
M · scale. So a second product takes the offset off, which is one instruction for a block. Its
operand holds the offsets of the block's eight groups twice: for the sums of activations, and for
what rounding took off those sums.

Three things are rounded to float16: the scale; scale · code, which is larger than the weight; and
the offset. A scale of 64 or more makes M · scale infinite, and its row's results NaN.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ferrum_triton.kernels.hopper.packed_weights import (
    EIGHT,
    Step,
    halves,
    lower_twice,
    operand,
    words_of_step,
)
from ferrum_triton.kernels.quant.fragments import (
    codes_constraints,
    scaling_constraints,
)

# What sums of activations are a part of, see group_sums.
WHOLE = gl.constexpr(4)


@gluon.constexpr_function
def _scale_asm(byte):
    """PTX: $0 = a byte of $1 times the lower half of $2, as float16, twice."""
    return (
        "{\n.reg .b32 t, b, d;\nmov.b32 b, 0x64006400;\n"
        f"prmt.b32 t, $1, 0x64646464, {0x4040 + 0x101 * byte:#x};\n"
        "sub.rn.f16x2 t, t, b;\nprmt.b32 d, $2, $2, 0x1010;\n"
        "mul.rn.f16x2 $0, t, d;\n}"
    )


@gluon.constexpr_function
def _minimums_asm():
    """PTX: $0 = bytes 1 and 3 of $1 times the upper half of $2, as float16, times -WHOLE."""
    return (
        "{\n.reg .b32 t, b, m;\nmov.b32 b, 0x64006400;\n"
        "prmt.b32 t, $1, 0x64646464, 0x4341;\nsub.rn.f16x2 t, t, b;\n"
        "mov.b32 b, 0xC400C400;\nprmt.b32 m, $2, $2, 0x3232;\n"
        "mul.rn.f16x2 m, m, b;\nmul.rn.f16x2 $0, t, m;\n}"
    )


@gluon.constexpr_function
def _times_asm(power):
    """PTX: $0 = the pair $1 times a power of two, 1 and more, or minus one."""
    exponent = 14 + abs(power).bit_length()
    half = (exponent << 10) + ((1 << 15) if power < 0 else 0)
    return f"{{\n.reg .b32 n;\nmov.b32 n, {half * 0x10001:#x};\nmul.rn.f16x2 $0, $1, n;\n}}"


@gluon.jit
def times(pair, VALUE: gl.constexpr):
    """A pair of float16 times a power of two, 1 and more, or minus one."""
    ASM: gl.constexpr = _times_asm(VALUE)
    return gl.inline_asm_elementwise(ASM, "=r,r", [pair], gl.int32, True, 1)


@gluon.jit
def lower_of_both(d):
    """A pair of the lower halves of two words, or of two float16."""
    if d[0].dtype == gl.float16:
        pair = gl.inline_asm_elementwise(
            "mov.b32 $0, {$1, $2};", "=r,h,h", [d[0], d[1]], gl.int32, True, 1
        )
    else:
        pair = gl.inline_asm_elementwise(
            "prmt.b32 $0, $1, $2, 0x5410;", "=r,r,r", [d[0], d[1]], gl.int32, True, 1
        )
    return pair


@gluon.jit
def upper_of_both(d):
    """A pair of the upper halves of two words."""
    return gl.inline_asm_elementwise(
        "prmt.b32 $0, $1, $2, 0x7632;", "=r,r,r", [d[0], d[1]], gl.int32, True, 1
    )


@gluon.jit
def coded(block, J: gl.constexpr, TILE: gl.constexpr):
    """A block's :class:`Step` J: M + code, the scale, and -M times the scale for each M."""
    FORMAT: gl.constexpr = TILE.format
    ASM: gl.constexpr = TILE.asm
    CONSTRAINTS: gl.constexpr = codes_constraints(FORMAT)
    PLACES: gl.constexpr = TILE.places
    # A thread's 32 weights that share a scale are two steps.
    if FORMAT.scale_code == "":
        scale = lower_twice(block.d[J // 2])
    else:
        SCALE: gl.constexpr = _scale_asm(2 * (J // 2))
        scale = gl.inline_asm_elementwise(
            SCALE, "=r,r,r", [block.s[0], block.d[0]], gl.int32, True, 1
        )
    sizes = ()
    for i in gl.static_range(len(PLACES)):
        sizes += (times(scale, -(2 ** (10 - PLACES[i]))),)
    words = words_of_step(block, J, TILE)
    # Not pure, so that it stays before the wait for products that it runs beside.
    pairs = gl.inline_asm_elementwise(ASM, CONSTRAINTS, words, dtype=EIGHT, is_pure=False, pack=1)
    return Step(pairs, scale, sizes)


@gluon.jit
def scaled(step, TILE: gl.constexpr, LAYOUT: gl.constexpr):
    """scale · code of a step: float16 [64, 64], a first operand of products."""
    ASM: gl.constexpr = TILE.scaling
    CONSTRAINTS: gl.constexpr = scaling_constraints(TILE.places)
    args, scale, sizes = step
    args += (scale,)
    args += sizes
    p = gl.inline_asm_elementwise(ASM, CONSTRAINTS, args, dtype=EIGHT, is_pure=False, pack=1)
    return operand(p, LAYOUT)


@gluon.jit
def offsets(block, TILE: gl.constexpr):
    """What a thread's two groups of a block add to each weight, times WHOLE: a pair."""
    FORMAT: gl.constexpr = TILE.format
    OFFSET: gl.constexpr = TILE.format.offset
    if FORMAT.scale_code != "":
        ASM: gl.constexpr = _minimums_asm()
        found = gl.inline_asm_elementwise(
            ASM, "=r,r,r", [block.s[0], block.d[0]], gl.int32, True, 1
        )
    elif FORMAT.has_zero:
        zeros = times(upper_of_both(block.d), -WHOLE)
        found = gl.inline_asm_elementwise(
            "mul.rn.f16x2 $0, $1, $2;",
            "=r,r,r",
            [zeros, lower_of_both(block.d)],
            gl.int32,
            True,
            1,
        )
    elif FORMAT.has_minimum:
        found = times(upper_of_both(block.d), WHOLE)
    else:
        found = times(lower_of_both(block.d), -OFFSET * WHOLE)
    return found


@gluon.jit
def offsets_operand(pair, LAYOUT: gl.constexpr):
    """A thread's pair of offsets twice, for sums and for what is left of them: float16 [64, 16]."""
    each = halves(pair)
    # Row, thread, group, which.
    x = gl.join(each, each).permute((0, 3, 1, 2)).reshape([64, 16])
    return gl.convert_layout(x, LAYOUT, assert_trivial=True)
