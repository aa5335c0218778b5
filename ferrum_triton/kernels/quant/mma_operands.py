"""What a step of a product of weights in planes reads, by pointers or through descriptors.

Of Q4_K and Q5_K the bytes of a scale and its min are read as one int16. Words reach shared memory
by the pipeline of the loop that takes the steps, or by descriptors' tiles
(:mod:`ferrum_triton.kernels.quant.descriptors`), and are unpacked after they are read from it in
the operand's layout (:mod:`ferrum_triton.kernels.quant.fragments`).
"""

import triton
import triton.language as tl

from ferrum_triton.kernels.quant.descriptors import (
    blocks_described,
    high_words_of,
    scales_described,
    scales_of,
    words_of,
)


@triton.jit
def operands(
    planes_ptr, x_ptr, sums_ptr, q_row, h_row, s_row, t_row, d_row, stride_x_token, row, token,
    num_rows, BITS: tl.constexpr, SCALES: tl.constexpr, MINS: tl.constexpr,
    BLOCK_W: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Pointers to the first step of rows of each plane, and of tokens' activations and their sums.

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
    more_rows, s_rows, t_rows = h_ptr, s_ptr, t_ptr
    if high_words_of(BITS, BLOCK_W) > 0:
        more_rows = (h_ptr + row * h_row * 4)[:, None]
        more_rows += tl.arange(0, high_words_of(BITS, BLOCK_W))[None, :]
    if SCALES == "pair":
        s_rows = (s_ptr.to(tl.pointer_type(tl.int16)) + row * s_row * 8)[:, None]
    elif SCALES == "byte" or SCALES == "byte32":
        s_rows = (s_ptr.to(tl.pointer_type(tl.int8)) + row * s_row * 16)[:, None]
    elif SCALES != "":
        s_rows = (s_ptr + row * s_row * 16)[:, None]
    if SCALES == "packed":
        # Two sub-blocks a column; the upper bits of all 16 of a block are in a word.
        t_rows = (t_ptr + row * t_row * 4)[:, None]
    if SCALES != "":
        s_rows += tl.arange(0, scales_of(SCALES, BLOCK_W))[None, :]
    if SCALES == "power":
        d_rows = planes_ptr + row * d_row * 16
    else:
        D_TYPE: tl.constexpr = tl.int32 if MINS else tl.float16
        d_rows = planes_ptr.to(tl.pointer_type(D_TYPE)) + row * d_row * (4 if MINS else 8)
    # Element p W + w of a step is product p of word w.
    x_rows = x_ptr + (token * stride_x_token)[:, None]
    x_rows += tl.arange(0, 8 * BLOCK_W // PARTS)[None, :]
    sum_rows = sums_ptr + (token * (stride_x_token // 8))[:, None] + tl.arange(0, BLOCK_W)[None, :]
    return w_rows, more_rows, s_rows, t_rows, d_rows, x_rows, sum_rows


@triton.jit
def _given(desc, other):
    """A descriptor, or where there is none what takes its place in a tuple."""
    if desc is None:
        taken = other
    else:
        taken = desc
    return taken


@triton.jit
def described_operands(
    at, w_desc, h_desc, s_desc, d_desc, up_w_desc, up_h_desc, up_s_desc, up_d_desc, x_desc,
    sums_desc, row, expert, up_expert, token,
):  # fmt: skip
    """Likewise through descriptors, where there are any: what is left of ``at`` stays pointers.

    Args:
        at: of :func:`operands`.
        w_desc, h_desc, s_desc, d_desc: of the planes.
        up_w_desc, up_h_desc, up_s_desc, up_d_desc: of a second matrix, whose rows come in turn with
            those of the first, eight of each; or None.
        x_desc, sums_desc: of the activations.
        row, expert, up_expert, token: where the tile begins.
    """
    if w_desc is not None:
        at = (
            w_desc, _given(h_desc, at[1]), _given(s_desc, at[2]), at[3], at[4], x_desc,
            _given(sums_desc, at[6]), row, expert, token, _given(d_desc, at[4]),
        )  # fmt: skip
        if up_w_desc is not None:
            at += (
                up_w_desc, _given(up_h_desc, at[1]), _given(up_s_desc, at[2]),
                _given(up_d_desc, at[4]), up_expert,
            )  # fmt: skip
    return at


@triton.jit
def halves(word):
    """The two float16 of an int32."""
    low = (word & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True)
    high = ((word >> 16) & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True)
    return low, high


@triton.jit
def block_scales(
    at, d_row, skipped, step, BLOCK_W: tl.constexpr, MINS: tl.constexpr, LATE: tl.constexpr
):
    """d and m of a step's block of each row, where they are taken late; else nothing."""
    d, m = 0.0, 0.0
    if LATE:
        # Too narrow for the compiler's pipeline where no product depends on them.
        BYTES: tl.constexpr = at[4].dtype.element_ty == tl.uint8  # exponents
        UNIT: tl.constexpr = 16 if BYTES else 4 if MINS else 8
        d = tl.load(at[4] + (skipped * d_row * UNIT + step * BLOCK_W // 32))
        if MINS:
            d, m = halves(d)
    return d, m


@triton.jit
def load_early_scales(
    at, described, d_row, skipped, step, left, SCALES: tl.constexpr, MINS: tl.constexpr,
    BLOCK_W: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """d and m of each row's weights of a step, float16 [BLOCK_N, blocks], where taken early.

    Args:
        described: d as a descriptor brought it, where it did.
        left: words of the row from this step on.
    """
    DESCRIBED: tl.constexpr = len(at) > 7 and blocks_described(SCALES, MINS, BLOCK_W)
    m = 0.0
    if SCALES != "":
        # Halves, which the compiler's pipeline leaves alone: they come from L1, and each thread
        # asks for those of its rows.
        EACH: tl.constexpr = 2 if MINS else 1
        d_ptr = at[4].to(tl.pointer_type(tl.float16))[:, None]
        d_ptr += skipped * d_row * 8 + step * BLOCK_W // 32 * EACH
        d = tl.load(d_ptr)
        if MINS:
            m = tl.load(d_ptr + 1)
    else:
        if DESCRIBED:
            d = described
        else:
            d_rows = at[4][:, None] + skipped * d_row * (4 if MINS else 8)
            # 0 where there are none: anything else may be no number.
            d_col = tl.arange(0, BLOCK_W // 4)[None, :]
            mask = (d_col < left // 4) | WHOLE
            d = tl.load(d_rows + (step * (BLOCK_W // 4) + d_col), mask=mask, other=0)
        if MINS:
            d, m = halves(d)
    return d, m


@triton.jit
def _matrix(tile, up, GATED: tl.constexpr):
    """A descriptor's tile [1, R, C] as [R, C]; eight rows of each in turn of two, as [2 R, C]."""
    tile = tl.reshape(tile, tile.shape[1:])
    if GATED:
        R: tl.constexpr = tile.shape[0]
        C: tl.constexpr = tile.shape[1]
        both = tl.join(tl.reshape(tile, [R // 8, 8, C]), tl.reshape(up, [R // 8, 8, C]))
        tile = tl.reshape(tl.permute(both, (0, 3, 1, 2)), [2 * R, C])
    return tile


@triton.jit
def _load_described(
    at, skipped, step, BITS: tl.constexpr, SCALES: tl.constexpr, MINS: tl.constexpr,
    BLOCK_W: tl.constexpr, PARTS: tl.constexpr, LATE: tl.constexpr,
):  # fmt: skip
    """What descriptors bring of a step: words, those above, scales, d, activations and sums.

    One load after the other with nothing between, as the compiler then waits once for all of them;
    and words last, as it would change their layout right behind their load.
    """
    row, expert, token = at[7] + skipped.to(tl.int32), at[8], at[9]
    GATED: tl.constexpr = len(at) > 11
    HAS_MORE: tl.constexpr = high_words_of(BITS, BLOCK_W) > 0
    HAS_SCALES: tl.constexpr = scales_described(SCALES, BLOCK_W)
    HAS_BLOCKS: tl.constexpr = blocks_described(SCALES, MINS, BLOCK_W)
    W_COLS: tl.constexpr = words_of(BITS, BLOCK_W)
    H_COLS: tl.constexpr = high_words_of(BITS, BLOCK_W)
    S_COLS: tl.constexpr = scales_of(SCALES, BLOCK_W)
    more, scale, d, sums = 0, 1, 0, 0
    up_words, up_more, up_scale, up_d = 0, 0, 0, 0
    x = at[5].load([token, step * (8 * BLOCK_W)])
    second = x
    if PARTS == 2:
        second = at[5].load([token, step * (8 * BLOCK_W) + 4 * BLOCK_W])
    if LATE and MINS:
        sums = at[6].load([token, step * BLOCK_W])
    if HAS_SCALES:
        scale = at[2].load([expert, row, step * S_COLS])
        if GATED:
            up_scale = at[13].load([at[15], row, step * S_COLS])
    if HAS_BLOCKS:
        d = at[10].load([expert, row, step * (BLOCK_W // 4)])
        if GATED:
            up_d = at[14].load([at[15], row, step * (BLOCK_W // 4)])
    if HAS_MORE:
        more = at[1].load([expert, row, step * H_COLS])
        if GATED:
            up_more = at[12].load([at[15], row, step * H_COLS])
    words = at[0].load([expert, row, step * W_COLS])
    if GATED:
        up_words = at[11].load([at[15], row, step * W_COLS])
    words = _matrix(words, up_words, GATED)
    if HAS_MORE:
        more = _matrix(more, up_more, GATED)
    if HAS_SCALES:
        scale = _matrix(scale, up_scale, GATED)
    if HAS_BLOCKS:
        d = _matrix(d, up_d, GATED)
    return words, more, scale, d, x, second, sums


@triton.jit
def load_weights(
    at, q_row, h_row, s_row, t_row, skipped, step, left, BITS: tl.constexpr, SCALES: tl.constexpr,
    MINS: tl.constexpr, BLOCK_W: tl.constexpr, PARTS: tl.constexpr, LATE: tl.constexpr,
    WHOLE: tl.constexpr,
):  # fmt: skip
    """Words of a step, the bits above, scales and their upper bits; and what is described, or 0.

    Words past the end of a row are any: the activations are 0 there.

    Args:
        left: words of the row from this step on.

    Returns:
        words, int32 [BLOCK_N, ..]; more, likewise; scale, int32; upper, int32 of packed scales;
        and of descriptors d, activations, those of the step's second part, and sums.
    """
    DESCRIBED: tl.constexpr = len(at) > 7
    W_COLS: tl.constexpr = words_of(BITS, BLOCK_W)
    H_COLS: tl.constexpr = high_words_of(BITS, BLOCK_W)
    more, scale, upper, d, x, second, sums = 0, 1, 0, 0, 0, 0, 0
    if DESCRIBED:
        words, more, scale, d, x, second, sums = _load_described(
            at, skipped, step, BITS, SCALES, MINS, BLOCK_W, PARTS, LATE
        )
    else:
        w_rows = at[0] + (skipped * q_row * 4 + step * W_COLS)
        if WHOLE:
            words = tl.load(w_rows, eviction_policy="evict_first")
        else:
            W_LEFT = left * 2 if BITS == 8 else (left // 2 if BITS < 4 else left)
            words = tl.load(w_rows, mask=tl.arange(0, W_COLS)[None, :] < W_LEFT, other=0)
        if H_COLS > 0:
            more = tl.load(
                at[1] + (skipped * h_row * 4 + step * H_COLS),
                mask=(tl.arange(0, H_COLS)[None, :] < left // (BLOCK_W // H_COLS)) | WHOLE,
                other=0,
            )
    if SCALES != "" and not (DESCRIBED and scales_described(SCALES, BLOCK_W)):
        UNIT: tl.constexpr = 8 if SCALES == "pair" else 16
        scale = tl.load(at[2] + (skipped * s_row * UNIT + step * scales_of(SCALES, BLOCK_W)))
    if SCALES != "":
        scale = scale.to(tl.int32)
    if SCALES == "packed":
        upper = tl.load(at[3] + (skipped * t_row * 4 + step * BLOCK_W // 32))
        s_col = tl.arange(0, BLOCK_W // 4)[None, :]
        upper = upper >> (s_col + step * (BLOCK_W // 4)) % 8 * 4
    return words, more, scale, upper, d, x, second, sums
