"""Activations by weights in planes, on tensor cores: one program per tile of the product.

Rows of W [n, k] are in planes (:mod:`ferrum_triton.quant.planes`). Of Q4_K and Q5_K the bytes of a
scale and its min are read as one int16.

Weights are the tensor cores' first operand, from registers, and tokens the second: a tile takes 64
or 128 rows of W and 8 to 256 tokens. Words reach shared memory by the loop's pipeline and are
unpacked after they are read from it in the operand's layout
(:mod:`ferrum_triton.kernels.quant.fragments`).

Of formats with integer scales a product sums scale · code exactly over 256 weights and is scaled by
d in float32 ("late"); the mins are products of their own, with the activations' sums over words. Or
weights are scaled in registers, rounded to float16 like dequantised ones are, which takes more
instructions a weight and fewer a token ("early"); one beyond float16's range is infinite then.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_wait

from ferrum_triton.kernels.jit import capability, kernel
from ferrum_triton.kernels.quant.activations import arrange
from ferrum_triton.kernels.quant.fragments import (
    CODES,
    all_end_to_end,
    end_to_end,
    second_bytes,
    settled,
    spread,
    times,
    unpack,
)
from ferrum_triton.kernels.quant.planes import row_sizes
from ferrum_triton.quant.kinds import file_kind
from ferrum_triton.quant.planes import ROW_ALIGN


class Config(NamedTuple):
    """How a product is launched.

    Attributes:
        rows: of W in a tile.
        tokens: in a tile.
        words: of eight weights in a step of the loop: 16, or 32, the words of 256 weights. 8 tokens
            take 32: with 16 a thread need not hold both words of a pair. What is shipped is to be
            among the layouts that ``tests/test_quant_mma.py`` checks.
        parts: products a step is summed in: 1, or 2 for fewer registers.
        late: d is taken after the product.
        splits: programs that share a tile's K.
        warps: of a program.
        stages: of the loop's pipeline.
        registers: a thread may have, so that more programs fit a processor; 0 for any number.
        ahead: lines of 128 bytes of each row of W that are on their way to L2 before the
            activations are arranged, on GPUs that start a kernel before the last one's end; 0 of
            those that do not.
    """

    rows: int
    tokens: int
    words: int = 32
    parts: int = 1
    late: bool = True
    splits: int = 1
    warps: int = 4
    stages: int = 4
    registers: int = 0
    ahead: int = 0


@triton.jit
def _halves(word):
    """The two float16 of an int32."""
    low = (word & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True)
    high = ((word >> 16) & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True)
    return low, high


@triton.jit
def _prefetch(ptr):
    """Ask for the lines at ``ptr``, int32 pointers, to be brought to L2."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [ptr.to(tl.int64)], dtype=tl.int32,
        is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def _block_scales(ptr, block, MINS: tl.constexpr):
    """d and m of one block of each row."""
    word = tl.load(ptr + block)
    if MINS:
        d, m = _halves(word)
    else:
        d, m = word, word
    return d, m


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
def tile_product(
    planes_ptr, x_ptr, sums_ptr, q_row, h_row, s_row, t_row, d_row, stride_x_token, row, token,
    num_rows, num_words, split, BITS: tl.constexpr, OFFSET: tl.constexpr, SCALES: tl.constexpr,
    MINS: tl.constexpr, ASM: tl.constexpr, CONSTRAINTS: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_W: tl.constexpr, PARTS: tl.constexpr, LATE: tl.constexpr,
    SPLITS: tl.constexpr, WHOLE: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Rows ``row`` of W by tokens ``token``, float32 [BLOCK_N, BLOCK_M], up to x's factors.

    Args:
        planes_ptr: W [num_rows, row_bytes].
        q_row, h_row, s_row, t_row, d_row: of a row of each plane, units of 16 bytes.
        x_ptr, sums_ptr: of :func:`arrange`.
        row, token: int64 [BLOCK_N] and [BLOCK_M], any there are.
        split: which of SPLITS parts of K.
    """
    SCALED: tl.constexpr = SCALES != ""
    # Tiles of planes: words, what lies above them, and scales.
    plane = tl.full((), 16, tl.int64) * num_rows  # bytes of a plane whose rows are a unit
    q_ptr = planes_ptr.to(tl.pointer_type(tl.int32))
    planes_ptr += plane * q_row
    h_ptr = planes_ptr.to(tl.pointer_type(tl.int32))
    planes_ptr += plane * h_row
    s_ptr = planes_ptr
    planes_ptr += plane * s_row
    t_ptr = planes_ptr.to(tl.pointer_type(tl.int32))
    planes_ptr += plane * t_row
    D_TYPE: tl.constexpr = tl.int32 if MINS else tl.float16
    d_ptr = planes_ptr.to(tl.pointer_type(D_TYPE))
    W_COLS: tl.constexpr = 2 * BLOCK_W if BITS == 8 else (BLOCK_W // 2 if BITS < 4 else BLOCK_W)
    w_col = tl.arange(0, W_COLS)[None, :]
    w_rows = q_ptr + row[:, None] * q_row * 4 + w_col
    if BITS == 6:
        more_col = tl.arange(0, BLOCK_W // 2)[None, :]
        more_rows = h_ptr + row[:, None] * h_row * 4 + more_col
    elif BITS == 5 or BITS == 3:
        more_col = tl.arange(0, BLOCK_W // 4)[None, :]
        more_rows = h_ptr + row[:, None] * h_row * 4 + more_col
    if SCALES == "pair":
        s_col = tl.arange(0, BLOCK_W // 4)[None, :]
        s_rows = s_ptr.to(tl.pointer_type(tl.int16)) + row[:, None] * s_row * 8 + s_col
    elif SCALES == "packed":
        # Two sub-blocks a column; the upper bits of all 16 of a block are in a word.
        s_col = tl.arange(0, BLOCK_W // 4)[None, :]
        s_rows = s_ptr + row[:, None] * s_row * 16 + s_col
        t_rows = t_ptr + row[:, None] * t_row * 4
    elif SCALED:
        s_col = tl.arange(0, BLOCK_W // 2)[None, :]
        S_TYPE: tl.constexpr = tl.int8 if SCALES == "byte" else tl.uint8
        s_rows = s_ptr.to(tl.pointer_type(S_TYPE)) + row[:, None] * s_row * 16 + s_col
    D_UNIT: tl.constexpr = 4 if MINS else 8
    d_rows = d_ptr + row * d_row * D_UNIT
    if not SCALED:
        d_col = tl.arange(0, BLOCK_W // 4)[None, :]
        d_rows = d_rows[:, None] + d_col

    # Element p W + w of a step is product p of word w.
    k = tl.arange(0, 8 * BLOCK_W // PARTS)
    x_rows = x_ptr + token[:, None] * stride_x_token + k[None, :]
    sum_rows = sums_ptr + token[:, None] * (stride_x_token // 8) + tl.arange(0, BLOCK_W)[None, :]

    steps = tl.cdiv(num_words, BLOCK_W)
    per_split = tl.cdiv(steps, SPLITS)
    begin = split * per_split
    end = tl.minimum(begin + per_split, steps)
    if AHEAD > 0:
        # Weights were there before the kernel that arranges the activations was launched.
        ahead = begin * W_COLS + tl.arange(0, AHEAD) * 32
        ahead = tl.minimum(ahead, steps * W_COLS - 32)
        _prefetch(q_ptr + (row * q_row * 4)[:, None] + ahead[None, :])
        gdc_wait()

    # Too narrow for the compiler's pipeline where no product depends on them: a step ahead by hand.
    if LATE:
        d_next, m_next = _block_scales(d_rows, tl.minimum(begin, steps - 1) * BLOCK_W // 32, MINS)

    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for step in range(begin, end):
        # Words past the end are as good as any: the activations are 0 there.
        left = num_words - step * BLOCK_W
        W_LEFT = left * 2 if BITS == 8 else (left // 2 if BITS < 4 else left)
        if WHOLE:
            words = tl.load(w_rows + step * W_COLS, eviction_policy="evict_first")
        else:
            words = tl.load(w_rows + step * W_COLS, mask=w_col < W_LEFT, other=0)
        more, scale, low = 0, 1, 0
        if BITS == 6:
            more = tl.load(
                more_rows + step * (BLOCK_W // 2), mask=WHOLE or more_col < left // 2, other=0
            )
        elif BITS == 5 or BITS == 3:
            more = tl.load(
                more_rows + step * (BLOCK_W // 4), mask=WHOLE or more_col < left // 4, other=0
            )
        if SCALES == "pair":
            both = tl.load(s_rows + step * (BLOCK_W // 4))
            scale = both.to(tl.int32)
            low = scale
        elif SCALES == "nibbles":
            both = tl.load(s_rows + step * (BLOCK_W // 2)).to(tl.int32)
            scale, low = both & 15, both << 4  # a min as the low bits of the second byte
        elif SCALES == "packed":
            scale = tl.load(s_rows + step * (BLOCK_W // 4)).to(tl.int32)
            upper = tl.load(t_rows + step * BLOCK_W // 32)
            upper = upper >> (s_col + step * (BLOCK_W // 4)) % 8 * 4
        elif SCALES == "byte":
            scale = tl.load(s_rows + step * (BLOCK_W // 2)).to(tl.int32)

        d_min = 0.0
        if LATE:
            d, d_min = d_next, m_next
            following = tl.minimum(step + 1, steps - 1)
            d_next, m_next = _block_scales(d_rows, following * BLOCK_W // 32, MINS)
        elif SCALED:
            d = tl.load(d_rows[:, None] + step * BLOCK_W // 32)  # [BLOCK_N, 1]
        else:
            # 0 where there are none: anything else may be no number.
            d = tl.load(d_rows + step * (BLOCK_W // 4), mask=WHOLE or d_col < left // 4, other=0)
        if MINS and not LATE:
            d, d_min = _halves(d)

        product = tl.zeros([BLOCK_N, BLOCK_M], tl.float32) if LATE else acc
        x = tl.load(x_rows + step * (8 * BLOCK_W))
        if BITS == 5 or BITS == 3:
            even, odd = _every_other_pair(words, BITS)
            if BITS == 3:
                even_scale = scale & 15 | upper << 4 & 48
                odd_scale = scale >> 4 | upper << 2 & 48
            else:
                even_scale, odd_scale = scale, scale
            t = _weights(
                even, spread(more, BLOCK_W // 2), even_scale, low, d, d_min, BLOCK_W // 2, BITS,
                OFFSET, SCALED, MINS, LATE, ASM, CONSTRAINTS,
            )  # fmt: skip
            product = tl.dot(all_end_to_end(t), tl.trans(x), product)
            t = _weights(
                odd, spread(more >> 4, BLOCK_W // 2), odd_scale, low, d, d_min, BLOCK_W // 2, BITS,
                OFFSET, SCALED, MINS, LATE, ASM, CONSTRAINTS,
            )  # fmt: skip
            x = tl.load(x_rows + (step * (8 * BLOCK_W) + 4 * BLOCK_W))
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
                x = tl.load(x_rows + (step * (8 * BLOCK_W) + 4 * BLOCK_W))
                product = tl.dot(end_to_end(t, 4), tl.trans(x), product)
        if LATE:
            acc += product * d.to(tl.float32)[:, None]
            if MINS:
                mins = second_bytes(low, BLOCK_W, ASM)
                sums = tl.load(sum_rows + step * BLOCK_W)
                acc -= tl.dot(mins, tl.trans(sums)) * d_min.to(tl.float32)[:, None]
        else:
            acc = settled(product, ASM)

    return acc


@kernel(dynamic=("num_tokens",))
def _mma_quant_kernel(
    y_ptr,  # [m, n]; of splits float32 [splits, m, n]
    x_ptr,  # [m, padded k]
    sums_ptr,  # [m, padded k / 8]
    factor_ptr,  # [m]
    planes_ptr,  # [n, row_bytes]
    stride_y_split,
    stride_y_token,
    stride_x_token,
    q_row,  # of a row of each plane, units of 16 bytes
    h_row,
    s_row,
    t_row,
    d_row,
    num_rows,
    num_words,  # of eight weights
    num_tokens,
    BITS: tl.constexpr,
    OFFSET: tl.constexpr,
    SCALES: tl.constexpr,
    MINS: tl.constexpr,
    ASM: tl.constexpr,
    CONSTRAINTS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_W: tl.constexpr,
    PARTS: tl.constexpr,
    LATE: tl.constexpr,
    SPLITS: tl.constexpr,
    WHOLE: tl.constexpr,  # K is whole steps
    AHEAD: tl.constexpr,
):
    # Programs that share rows of W run side by side.
    tiles_m = tl.cdiv(num_tokens, BLOCK_M)
    m = (tl.program_id(0) % tiles_m).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = (tl.program_id(0) // tiles_m).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    # Past the end the last row and token are read again.
    row, token = tl.minimum(n, num_rows - 1), tl.minimum(m, num_tokens - 1)
    acc = tile_product(
        planes_ptr, x_ptr, sums_ptr, q_row, h_row, s_row, t_row, d_row, stride_x_token, row, token,
        num_rows, num_words, tl.program_id(1), BITS, OFFSET, SCALES, MINS, ASM, CONSTRAINTS,
        BLOCK_N, BLOCK_M, BLOCK_W, PARTS, LATE, SPLITS, WHOLE, AHEAD,
    )  # fmt: skip
    acc *= tl.load(factor_ptr + token)[None, :]
    y_split = y_ptr + tl.program_id(1).to(tl.int64) * stride_y_split
    tl.store(
        y_split + m[None, :] * stride_y_token + n[:, None],
        acc.to(y_ptr.dtype.element_ty),
        mask=(m < num_tokens)[None, :] & (n < num_rows)[:, None],
    )


@kernel
def _add_splits_kernel(
    y_ptr,  # [m, n]
    partial_ptr,  # [splits, m, n]
    stride_y_token,
    num_rows,
    stride_split,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = n < num_rows
    acc = tl.zeros([BLOCK], tl.float32)
    for split in tl.static_range(SPLITS):
        acc += tl.load(partial_ptr + split * stride_split + token * num_rows + n, mask=mask)
    tl.store(y_ptr + token * stride_y_token + n, acc.to(y_ptr.dtype.element_ty), mask=mask)


def halves_of(kind: str) -> int:
    """In how many parts words' pairs are taken, and activations arranged."""
    return 2 if CODES[file_kind(kind)].bits in (3, 5) else 1


def tile_meta(kind: str, config: Config, k: int, device: torch.device) -> dict[str, Any]:
    """The constants of :func:`tile_product` but its splits, and its kernel's options."""
    codes = CODES[file_kind(kind)]
    # PTX where there is some to be had; the interpreter and AMD unpack in Triton.
    ptx = capability(device) >= (8, 0)
    return {
        "BITS": codes.bits,
        "OFFSET": codes.offset,
        "SCALES": codes.scales,
        "MINS": codes.mins,
        "ASM": codes.asm if ptx else "",
        "CONSTRAINTS": codes.constraints if ptx else "",
        "BLOCK_N": config.rows,
        "BLOCK_M": config.tokens,
        "BLOCK_W": config.words,
        "PARTS": max(config.parts, halves_of(kind)),
        "LATE": config.late and codes.scales != "",
        "WHOLE": k % (8 * config.words) == 0,
        "num_warps": config.warps,
        "num_stages": config.stages,
        **({"maxnreg": config.registers} if config.registers else {}),
    }


def mma_quant(
    a: Tensor,
    planes: Tensor,
    kind: str,
    config: Config,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """y[m, n] = Σₖ a[m, k] · W[n, k], W in planes.

    Args:
        a: [m, k], float16 or bfloat16.
        planes: uint8 [n, row_bytes], W's rows in planes.
        kind: their kind, such as ``"Q4_K:planes"``.
        config: of the launch.
    """
    (num_tokens, k), num_rows = a.shape, planes.shape[0]
    y = a.new_empty((num_tokens, num_rows)) if out is None else out
    if y.numel() == 0:
        return y
    sizes = row_sizes(planes, kind, k)
    ahead = config.ahead if capability(a.device) >= (9, 0) else 0
    x, sums, factor = arrange(a, config.words, halves_of(kind), ahead > 0)
    splits = config.splits
    partial = y
    if splits > 1:
        partial = torch.empty((splits, *y.shape), dtype=torch.float32, device=a.device)
    options = {"launch_pdl": True} if ahead else {}
    _mma_quant_kernel.launch(
        (triton.cdiv(num_tokens, config.tokens) * triton.cdiv(num_rows, config.rows), splits),
        partial,
        x,
        sums,
        factor,
        planes,
        partial.stride(0) if splits > 1 else 0,
        partial.stride(-2),
        x.stride(0),
        *(size // ROW_ALIGN for size in sizes.values()),
        num_rows,
        k // 8,
        num_tokens,
        **tile_meta(kind, config, k, a.device),
        SPLITS=splits,
        AHEAD=ahead,
        **options,
    )
    if splits > 1:
        block = 1024
        _add_splits_kernel.launch(
            (num_tokens, triton.cdiv(num_rows, block)),
            y,
            partial,
            y.stride(0),
            num_rows,
            partial.stride(0),
            SPLITS=splits,
            BLOCK=block,
        )
    return y
