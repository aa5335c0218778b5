"""Steps of a product of weights in planes on tensor cores: what they read, and their sums.

Of Q4_K and Q5_K the bytes of a scale and its min are read as one int16. Words reach shared memory
by the pipeline of the loop that takes the steps and are unpacked after they are read from it in the
operand's layout (:mod:`ferrum_triton.kernels.quant.fragments`).
"""

import triton
import triton.language as tl

from ferrum_triton.kernels.quant.fragments import (
    all_end_to_end,
    end_to_end,
    second_bytes,
    spread,
    times,
    unpack,
)
from ferrum_triton.kernels.tensor_cores import settled


@triton.constexpr_function
def words_of(bits, words):
    """int32 of a row's first plane that hold so many words of eight weights."""
    return 2 * words if bits == 8 else (words // 2 if bits < 4 else words)


@triton.jit
def _halves(word):
    """The two float16 of an int32."""
    low = (word & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True)
    high = ((word >> 16) & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True)
    return low, high


@triton.jit
def _every_other_pair(words, BITS: tl.constexpr):
    """Words whose high bits are in the low halves of a one-bit plane's bytes; the high halves'."""
    if BITS == 5:
        pairs = tl.reshape(words, [words.shape[0], words.shape[1] // 4, 2, 2])
        even, odd = tl.split(tl.permute(pairs, (0, 1, 3, 2)))
        even = tl.reshape(even, [words.shape[0], words.shape[1] // 2])
        odd = tl.reshape(odd, [words.shape[0], words.shape[1] // 2])
    else:
        even, odd = tl.split(tl.reshape(words, [words.shape[0], words.shape[1] // 2, 2]))
    return even, odd


@triton.jit
def _weights(
    words, more, scale, low, d, d_min, W: tl.constexpr, BITS: tl.constexpr, OFFSET: tl.constexpr,
    SCALED: tl.constexpr, MINS: tl.constexpr, LATE: tl.constexpr, ASM: tl.constexpr,
    CONSTRAINTS: tl.constexpr,
):  # fmt: skip
    """Eight products' weights, float16 [BLOCK_N, W]; up to d if that is taken late."""
    t = unpack(words, more, scale, BITS, OFFSET, SCALED, ASM, CONSTRAINTS)
    if not LATE:
        mins = 0.0
        if MINS:
            d_min = spread(d_min, W)
            if SCALED:
                mins = second_bytes(low, W, ASM)
        t = times(t, mins, spread(d, W), d_min, SCALED, MINS, ASM != "")
    return t


@triton.jit
def operands(
    planes_ptr, x_ptr, sums_ptr, q_row, h_row, s_row, t_row, d_row, stride_x_token, row, token,
    num_rows, BITS: tl.constexpr, SCALES: tl.constexpr, MINS: tl.constexpr,
    BLOCK_W: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Where rows of each plane begin, and tokens' activations and their sums.

    Args:
        planes_ptr: W [num_rows, row_bytes], or that of each row [BLOCK_N].
        q_row, h_row, s_row, t_row, d_row: of a row of each plane, units of 16 bytes.
        x_ptr, sums_ptr: of :func:`ferrum_triton.kernels.quant.activations.arrange`.
        row: int64 [BLOCK_N], any there are.
        token: int64 [BLOCK_M], any there are.
    """
    plane = tl.full((), 16, tl.int64) * num_rows  # bytes of a plane whose rows are a unit
    q_ptr = planes_ptr.to(tl.pointer_type(tl.int32))
    planes_ptr += plane * q_row
    h_ptr = planes_ptr.to(tl.pointer_type(tl.int32))
    planes_ptr += plane * h_row
    s_ptr = planes_ptr
    planes_ptr += plane * s_row
    t_ptr = planes_ptr.to(tl.pointer_type(tl.int32))
    planes_ptr += plane * t_row
    w_rows = (q_ptr + row * q_row * 4)[:, None]
    w_rows += tl.arange(0, words_of(BITS, BLOCK_W))[None, :]
    more_rows = h_ptr
    if BITS == 6:
        more_rows = (h_ptr + row * h_row * 4)[:, None]
        more_rows += tl.arange(0, BLOCK_W // 2)[None, :]
    elif BITS == 5 or BITS == 3:
        more_rows = (h_ptr + row * h_row * 4)[:, None]
        more_rows += tl.arange(0, BLOCK_W // 4)[None, :]
    s_rows, t_rows = s_ptr, t_ptr
    if SCALES == "pair":
        s_rows = (s_ptr.to(tl.pointer_type(tl.int16)) + row * s_row * 8)[:, None]
        s_rows += tl.arange(0, BLOCK_W // 4)[None, :]
    elif SCALES == "packed":
        # Two sub-blocks a column; the upper bits of all 16 of a block are in a word.
        s_rows = (s_ptr + row * s_row * 16)[:, None]
        s_rows += tl.arange(0, BLOCK_W // 4)[None, :]
        t_rows = (t_ptr + row * t_row * 4)[:, None]
    elif SCALES != "":
        S_TYPE: tl.constexpr = tl.int8 if SCALES == "byte" else tl.uint8
        s_rows = (s_ptr.to(tl.pointer_type(S_TYPE)) + row * s_row * 16)[:, None]
        s_rows += tl.arange(0, BLOCK_W // 2)[None, :]
    D_TYPE: tl.constexpr = tl.int32 if MINS else tl.float16
    d_rows = planes_ptr.to(tl.pointer_type(D_TYPE)) + row * d_row * (4 if MINS else 8)
    # Element p W + w of a step is product p of word w.
    x_rows = x_ptr + (token * stride_x_token)[:, None]
    x_rows += tl.arange(0, 8 * BLOCK_W // PARTS)[None, :]
    sum_rows = sums_ptr + (token * (stride_x_token // 8))[:, None] + tl.arange(0, BLOCK_W)[None, :]
    return w_rows, more_rows, s_rows, t_rows, d_rows, x_rows, sum_rows


@triton.jit
def block_scales(
    at, d_row, skipped, step, BLOCK_W: tl.constexpr, MINS: tl.constexpr, LATE: tl.constexpr
):
    """d and m of a step's block of each row, where they are taken late; else nothing."""
    d, m = 0.0, 0.0
    if LATE:
        # Too narrow for the compiler's pipeline where no product depends on them.
        d = tl.load(at[4] + (skipped * d_row * (4 if MINS else 8) + step * BLOCK_W // 32))
        if MINS:
            d, m = _halves(d)
    return d, m


@triton.jit
def add_step(
    acc, d, d_min, at, q_row, h_row, s_row, t_row, d_row, skipped, step, next_skipped, next_step,
    num_words, BITS: tl.constexpr, OFFSET: tl.constexpr, SCALES: tl.constexpr, MINS: tl.constexpr,
    ASM: tl.constexpr, CONSTRAINTS: tl.constexpr, BLOCK_W: tl.constexpr, PARTS: tl.constexpr,
    LATE: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """acc, float32 [BLOCK_N, BLOCK_M], and BLOCK_W words' products; d and d_min of the next step.

    Args:
        d, d_min: of :func:`block_scales` for this step.
        at: of :func:`operands`.
        skipped: rows of W between those of ``at`` and those that are meant, int64.
        step: of the row.
        next_skipped, next_step: likewise of the step after this one.
        num_words: of a row.
    """
    SCALED: tl.constexpr = SCALES != ""
    W_COLS: tl.constexpr = words_of(BITS, BLOCK_W)
    BLOCK_N: tl.constexpr = acc.shape[0]
    BLOCK_M: tl.constexpr = acc.shape[1]
    # Words past the end are as good as any: the activations are 0 there.
    left = num_words - step * BLOCK_W
    w_rows = at[0] + (skipped * q_row * 4 + step * W_COLS)
    if WHOLE:
        words = tl.load(w_rows, eviction_policy="evict_first")
    else:
        W_LEFT = left * 2 if BITS == 8 else (left // 2 if BITS < 4 else left)
        words = tl.load(w_rows, mask=tl.arange(0, W_COLS)[None, :] < W_LEFT, other=0)
    more, scale, low, upper = 0, 1, 0, 0
    if BITS == 6 or BITS == 5 or BITS == 3:
        COLS: tl.constexpr = BLOCK_W // 2 if BITS == 6 else BLOCK_W // 4
        has = left // 2 if BITS == 6 else left // 4
        more = tl.load(
            at[1] + (skipped * h_row * 4 + step * COLS),
            mask=WHOLE or tl.arange(0, COLS)[None, :] < has,
            other=0,
        )
    if SCALES == "pair":
        both = tl.load(at[2] + (skipped * s_row * 8 + step * (BLOCK_W // 4)))
        scale = both.to(tl.int32)
        low = scale
    elif SCALES == "nibbles":
        both = tl.load(at[2] + (skipped * s_row * 16 + step * (BLOCK_W // 2))).to(tl.int32)
        scale, low = both & 15, both << 4  # a min as the low bits of the second byte
    elif SCALES == "packed":
        scale = tl.load(at[2] + (skipped * s_row * 16 + step * (BLOCK_W // 4))).to(tl.int32)
        upper = tl.load(at[3] + (skipped * t_row * 4 + step * BLOCK_W // 32))
        s_col = tl.arange(0, BLOCK_W // 4)[None, :]
        upper = upper >> (s_col + step * (BLOCK_W // 4)) % 8 * 4
    elif SCALES == "byte":
        scale = tl.load(at[2] + (skipped * s_row * 16 + step * (BLOCK_W // 2))).to(tl.int32)

    # Here, not before: the loop's copies are asked for first.
    d_next, m_next = block_scales(at, d_row, next_skipped, next_step, BLOCK_W, MINS, LATE)
    if not LATE:
        d_rows = at[4][:, None] + skipped * d_row * (4 if MINS else 8)
        if SCALED:
            d = tl.load(d_rows + step * BLOCK_W // 32)  # [BLOCK_N, 1]
        else:
            # 0 where there are none: anything else may be no number.
            d_col = tl.arange(0, BLOCK_W // 4)[None, :]
            mask = WHOLE or d_col < left // 4
            d = tl.load(d_rows + (step * (BLOCK_W // 4) + d_col), mask=mask, other=0)
        if MINS:
            d, d_min = _halves(d)

    product = tl.zeros([BLOCK_N, BLOCK_M], tl.float32) if LATE else acc
    x_rows = at[5] + step * (8 * BLOCK_W)
    x = tl.load(x_rows)
    if BITS == 5 or BITS == 3:
        even, odd = _every_other_pair(words, BITS)
        if BITS == 3:
            even_scale = scale & 15 | upper << 4 & 48
            odd_scale = scale >> 4 | upper << 2 & 48
        else:
            even_scale, odd_scale = scale, scale
        t = _weights(
            even, spread(more, BLOCK_W // 2), even_scale, low, d, d_min, BLOCK_W // 2, BITS, OFFSET,
            SCALED, MINS, LATE, ASM, CONSTRAINTS,
        )  # fmt: skip
        product = tl.dot(all_end_to_end(t), tl.trans(x), product)
        t = _weights(
            odd, spread(more >> 4, BLOCK_W // 2), odd_scale, low, d, d_min, BLOCK_W // 2, BITS,
            OFFSET, SCALED, MINS, LATE, ASM, CONSTRAINTS,
        )  # fmt: skip
        x = tl.load(x_rows + 4 * BLOCK_W)
        product = tl.dot(all_end_to_end(t), tl.trans(x), product)
    else:
        t = _weights(
            words, more, scale, low, d, d_min, BLOCK_W, BITS, OFFSET, SCALED, MINS, LATE, ASM,
            CONSTRAINTS,
        )  # fmt: skip
        if PARTS == 1:
            product = tl.dot(all_end_to_end(t), tl.trans(x), product)
        else:
            product = tl.dot(end_to_end(t, 0), tl.trans(x), product)
            x = tl.load(x_rows + 4 * BLOCK_W)
            product = tl.dot(end_to_end(t, 4), tl.trans(x), product)
    if LATE:
        acc += product * d.to(tl.float32)[:, None]
        if MINS:
            mins = second_bytes(low, BLOCK_W, ASM)
            sums = tl.load(at[6] + step * BLOCK_W)
            acc -= tl.dot(mins, tl.trans(sums)) * d_min.to(tl.float32)[:, None]
    else:
        acc = settled(product, ASM != "")
    return acc, d_next, m_next
