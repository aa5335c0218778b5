"""Weights in planes as the first operand of Hopper's products, in registers.

A warpgroup takes 64 rows of W. The operand of ``wgmma.m64nNk16`` lies in registers: of a tile of
64 x 16 numbers, thread t of a quad has columns 2 t, 2 t + 1, 2 t + 8 and 2 t + 9 of row r and of
row r + 8, r being the quad's number in its warp and 16 for each warp before it.

The order of K within a sum is free, so that it is chosen for the planes as they are: **the form in
which matrices are stored is the operand's own order, and there is no second copy of them.** A block
of 256 weights of a row is shared out to the four threads of a quad, 64 to each, which are whole
words of every plane (:mod:`ferrum_triton.kernels.quant.quad_weights` has the same shares for other
instructions). A step takes 16 of a thread's weights, two words of four-bit codes: eight pairs of
float16, a pair being two codes 16 bits apart in a word, and pairs 2 i and 2 i + 1 the thread's four
columns of tile i. So the activations' element

    64 step + 8 pair + 2 thread + e    meets    weight 64 thread + 16 step + 8 h + 4 n + 2 e + o

where the pair is 4 h + 2 n + o; ``arrange(a, words=32, halves=4)`` brings them there.

All integers below are int32 [64, 4], an element for each row and thread of a quad, so that a thread
has two of each, and a tuple of them where a thread has several words.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ferrum_triton.kernels.hopper.packed_work import WARPGROUPS
from ferrum_triton.kernels.quant.fragments import (
    LESS,
    PLUS,
    PLUS_CONSTRAINTS,
    TIMES,
    TIMES_CONSTRAINTS,
    constraints_of,
)

# Rows of W that a warpgroup takes, and weights of each that are a stage.
ROWS, BLOCK = gl.constexpr(64), gl.constexpr(256)
# Words that d of whole blocks come by: the 16 bytes that a tensor map's tile has at least.
D_WORDS = gl.constexpr(4)
QUAD = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[8, 0]],
        lane_bases=[[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[64, 4],
    )
)
# Eight words or pairs, one for each operand of the assembly.
EIGHT = gl.constexpr((gl.int32,) * 8)


class Planes(NamedTuple):
    """One thing for each plane, None of a plane that a format has not.

    Tensor maps of a matrix, buffers for what they bring, or of a block a thread's 64 weights of two
    rows as they are stored, tuples of words.
    """

    q: Any
    h: Any
    s: Any
    d: Any


class Step(NamedTuple):
    """A thread's 16 weights of a step: eight pairs, and what they are still to be scaled by."""

    pairs: Any
    scale: Any  # a pair of d, or of d times the step's integer scale
    low: Any  # a pair of what is added, or of a zero; not read where there is neither


@gluon.constexpr_function
def words_of(plane, fmt):
    """Words that a thread has of a block in the plane q, h or s."""
    if plane == "q":
        return 2 * fmt.low_bits
    if plane == "h":
        return 2 * fmt.high_bits
    return 1 if fmt.scale_code else 0


@gluon.constexpr_function
def columns_of(plane, fmt):
    """Columns of a tile of a plane's tensor map: a block's words, or d of its groups.

    Where d is a whole block's, they are words of d and m, or of two blocks' d.
    """
    if plane == "d":
        return D_WORDS.value if fmt.scale_code else 8
    return 4 * words_of(plane, fmt)


@gluon.constexpr_function
def words_layout(rows, columns, each):
    """Where a tile has to lie for each thread of a quad to have its own columns of a row.

    Args:
        rows: 64, or 32 of each of two tiles whose rows alternate, eight by eight.
        each: columns of a thread; where it is all of them, all four threads have them.
    """
    inner = [[0, 1 << i] for i in range(each.bit_length() - 1)]
    threads = [[0, each], [0, 2 * each]] if columns > each else [[0, 0], [0, 0]]
    step = 8 * rows // 64
    return gl.DistributedLinearLayout(
        reg_bases=[*inner, [8, 0]] if rows == 64 else inner,
        lane_bases=[*threads, [1, 0], [2, 0], [4, 0]],
        warp_bases=[[2 * step, 0], [4 * step, 0]],
        block_bases=[],
        shape=[rows, columns],
    )


@gluon.jit
def pieces(x, COUNT: gl.constexpr):
    """Tensors [64, 4] of the last dimension of [64, 4, COUNT], which one thread holds."""
    if COUNT == 1:
        found = (gl.convert_layout(x.reshape([64, 4]), QUAD, assert_trivial=True),)
    else:
        HALF: gl.constexpr = COUNT // 2
        first, second = gl.split(x.reshape([64, 4, 2, HALF]).permute((0, 1, 3, 2)))
        found = pieces(first, HALF) + pieces(second, HALF)
    return found


@gluon.jit
def tile_words(buffers, at, COLUMNS: gl.constexpr, EACH: gl.constexpr, TILE: gl.constexpr):
    """A warpgroup's tile of a plane, [64, COLUMNS]; of gate and up eight rows of each in turn.

    Args:
        EACH: columns of a thread.
    """
    GATED: gl.constexpr = TILE.activation != ""
    LAYOUT: gl.constexpr = words_layout(32 if GATED else 64, COLUMNS, EACH)
    if GATED:
        gate = buffers.index(2 * at).slice(0, COLUMNS, dim=1).load(LAYOUT)
        up = buffers.index(2 * at + 1).slice(0, COLUMNS, dim=1).load(LAYOUT)
        x = gl.join(gate, up).reshape([4, 8, COLUMNS, 2]).permute((0, 3, 1, 2))
        x = x.reshape([64, COLUMNS])
    else:
        x = buffers.index(at).slice(0, COLUMNS, dim=1).load(LAYOUT)
    return x


@gluon.jit
def thread_words(buffers, at, COUNT: gl.constexpr, TILE: gl.constexpr):
    """COUNT words of each thread, of a tile [64, 4 COUNT]."""
    x = tile_words(buffers, at, 4 * COUNT, COUNT, TILE)
    return pieces(x.reshape([64, 4, COUNT]), COUNT)


@gluon.jit
def word_of_d(block, TILE: gl.constexpr):
    """Which word of a row has a block's d: one of d and m, or of two blocks' d."""
    return block if TILE.format.has_minimum else block // 2


@gluon.jit
def of_rows(buffers, at, column, TILE: gl.constexpr):
    """What each row has one of, a column of a tile, for each of its threads: [64, 4]."""
    x = tile_words(buffers, at, D_WORDS, D_WORDS, TILE).reshape([64, 2, 2])
    even, odd = gl.split(x)
    first, second = gl.split(gl.where(column % 2 == 0, even, odd))
    x = gl.where(column < 2, first, second)
    x = gl.convert_layout(x, gl.SliceLayout(1, QUAD), assert_trivial=True)
    each, _ = gl.broadcast(x[:, None], gl.zeros([64, 4], x.dtype, QUAD))
    return each


@gluon.jit
def load_block(buffers, stage, block, WARPGROUP: gl.constexpr, TILE: gl.constexpr):
    """A warpgroup's words of a block that has landed, as :class:`Planes`.

    Args:
        buffers: :class:`Planes` of the ring.
        block: the block's number in its row.
    """
    FORMAT: gl.constexpr = TILE.format
    H: gl.constexpr = words_of("h", FORMAT)
    at = stage * WARPGROUPS + WARPGROUP
    h, s = (), ()
    q = thread_words(buffers.q, at, words_of("q", FORMAT), TILE)
    if H > 0:
        h = thread_words(buffers.h, at, H, TILE)
    if FORMAT.scale_code == "":
        d = thread_words(buffers.d, at, 2, TILE)
    else:
        s = thread_words(buffers.s, at, 1, TILE)
        of_row = of_rows(buffers.d, at, word_of_d(block, TILE) % D_WORDS, TILE)
        if not FORMAT.has_minimum:
            of_row = of_row >> (16 * (block % 2))
        d = (of_row,)
    return Planes(q, h, s, d)


@gluon.jit
def lower_twice(d):
    """d, or the lower half of d and m, twice."""
    if d.dtype == gl.float16:
        pair = gl.inline_asm_elementwise("mov.b32 $0, {$1, $1};", "=r,h", [d], gl.int32, True, 1)
    else:
        pair = gl.inline_asm_elementwise(
            "prmt.b32 $0, $1, $1, 0x1010;", "=r,r", [d], gl.int32, True, 1
        )
    return pair


@gluon.jit
def upper_twice(both):
    """m of d and m, twice."""
    return gl.inline_asm_elementwise(
        "prmt.b32 $0, $1, $1, 0x3232;", "=r,r", [both], gl.int32, True, 1
    )


@gluon.constexpr_function
def _minimum_asm(byte):
    """PTX: $0 = minus a byte of $1 as float16, twice, times the upper half of $2."""
    return (
        "{\n.reg .b32 t, b, m;\nmov.b32 b, 0x64006400;\n"
        f"prmt.b32 t, $1, 0x64646464, {0x4040 + 0x101 * byte:#x};\n"
        "sub.rn.f16x2 t, t, b;\nprmt.b32 m, $2, $2, 0x3232;\n"
        "mul.rn.f16x2 t, t, m;\nneg.f16x2 $0, t;\n}"
    )


@gluon.jit
def minimum(s, both, BYTE: gl.constexpr):
    """Minus m times the byte BYTE of a word of scales and minimums, twice."""
    ASM: gl.constexpr = _minimum_asm(BYTE)
    return gl.inline_asm_elementwise(ASM, "=r,r,r", [s, both], gl.int32, True, 1)


@gluon.jit
def words_of_step(block, J: gl.constexpr, TILE: gl.constexpr):
    """The words that a block's step J is unpacked from, as the assembly takes them."""
    BITS: gl.constexpr = TILE.format.bits
    q, h = block.q, block.h
    if BITS == 8:
        args = (q[4 * J], q[4 * J + 2], q[4 * J + 1], q[4 * J + 3])
    else:
        args = (q[2 * J], q[2 * J + 1])
    if BITS == 6:
        args += (h[J], h[J])
    elif BITS == 5:
        more = h[J // 2] >> (4 * (J % 2))
        args += (more, more)
    return args


@gluon.jit
def unpacked(block, J: gl.constexpr, TILE: gl.constexpr):
    """A block's :class:`Step` J: its codes times their integer scales, exactly, less an offset.

    The assembly is not pure, so that it stays before the wait for products that it runs beside.
    """
    FORMAT: gl.constexpr = TILE.format
    SCALES: gl.constexpr = TILE.format.scale_code
    ASM: gl.constexpr = TILE.asm
    CONSTRAINTS: gl.constexpr = constraints_of(FORMAT)
    _, _, s, d = block
    args = words_of_step(block, J, TILE)
    # A thread's 32 weights that share a scale are two steps.
    of_step = d[J // 2] if SCALES == "" else d[0]
    scale = lower_twice(of_step)
    low = scale
    if SCALES == "" and FORMAT.has_minimum:
        low = upper_twice(of_step)
    elif SCALES != "":
        integer = s[0] >> (16 * (J // 2) if SCALES == "pair" else 8 * J)
        args += (integer, integer)
        if FORMAT.has_minimum:
            low = minimum(s[0], of_step, 2 * (J // 2) + 1)
    pairs = gl.inline_asm_elementwise(ASM, CONSTRAINTS, args, dtype=EIGHT, is_pure=False, pack=1)
    return Step(pairs, scale, low)


@gluon.jit
def halves(word):
    """The two float16 of each word, as a last dimension of two."""
    low = word.to(gl.int16).to(gl.float16, bitcast=True)
    high = (word >> 16).to(gl.int16).to(gl.float16, bitcast=True)
    return gl.join(low, high)


@gluon.jit
def operand(p, LAYOUT: gl.constexpr):
    """Eight pairs of each thread as float16 [64, 64], a first operand of products."""
    first = gl.join(
        gl.join(halves(p[0]), halves(p[1])),
        gl.join(halves(p[2]), halves(p[3])),
    )
    second = gl.join(
        gl.join(halves(p[4]), halves(p[5])),
        gl.join(halves(p[6]), halves(p[7])),
    )
    # Row, thread, e, o, n, h.
    x = gl.join(first, second).permute((0, 5, 4, 3, 1, 2)).reshape([64, 64])
    return gl.convert_layout(x, LAYOUT, assert_trivial=True)


@gluon.jit
def fragment(step, TILE: gl.constexpr, LAYOUT: gl.constexpr):
    """The weights of a step, rounded once: float16 [64, 64], a first operand of products."""
    FORMAT: gl.constexpr = TILE.format
    args, scale, low = step
    args += (scale,)
    if FORMAT.has_minimum:
        ASM: gl.constexpr = LESS if FORMAT.has_zero else PLUS
        args += (low,)
        p = gl.inline_asm_elementwise(
            ASM, PLUS_CONSTRAINTS, args, dtype=EIGHT, is_pure=False, pack=1
        )
    else:
        p = gl.inline_asm_elementwise(
            TIMES, TIMES_CONSTRAINTS, args, dtype=EIGHT, is_pure=False, pack=1
        )
    return operand(p, LAYOUT)
