"""Few activations by weights in planes, exactly: one program some rows, its threads all along K.

Weights never become floats by an instruction of their own. Bits 0 to 23 of a float32 whose others
are 0 mean that many 2^-149: masked where they lie, an integer q with s bits below it is the float
q 2^(s - 149), and times an activation that was multiplied by 2^(UNIT - s) once for all rows the
product is a q 2^(UNIT - 149), of which the sum is rounded as ever, since a fused multiply-add takes
denormal factors as they are. So a weight costs a mask and a multiply-add.

Offsets and minimums count by the group's sum of activations. Every byte of a plane is read once for
all activations; partial sums are float32 and meet once, at the end.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ferrum_triton.kernels.jit import kernel
from ferrum_triton.kernels.quant.planes import (
    bits_of,
    eight_words,
    has_halves,
    load_group,
    load_one,
    load_words,
    offset_of,
    place_of,
    summed,
    words_of,
)
from ferrum_triton.quant.planes import Planes

GROUP = tl.constexpr(32)  # weights a thread takes at a time
# Sums are of a q 2^-63. Activations up to 2^41 stay finite, and what a product loses below
# float32's smallest number is less than 2^-86.
UNIT = 86
SMALL, LARGE = tl.constexpr(2.0**-63), tl.constexpr(2.0**63)


@triton.jit
def _float_pair(word, DTYPE: tl.constexpr):
    """The two 16-bit floats of a word as float32."""
    if DTYPE == tl.bfloat16:
        low = (word << 16).to(tl.float32, bitcast=True)
        high = (word & -65536).to(tl.float32, bitcast=True)
    else:
        low = word.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        high = (word >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    return low, high


@triton.jit
def _eight_activations(ptr, mask, VECTOR: tl.constexpr):
    """Eight activations in a row as a tuple of float32 [threads]."""
    dtype: tl.constexpr = ptr.dtype.element_ty
    if VECTOR and dtype == tl.float32:
        ints = ptr.to(tl.pointer_type(tl.int32))
        words = load_words(ints, mask, 4, True, False) + load_words(ints + 4, mask, 4, True, False)
        x = ()
        for i in tl.static_range(8):
            x += (words[i].to(tl.float32, bitcast=True),)
    elif VECTOR:
        words = load_words(ptr.to(tl.pointer_type(tl.int32)), mask, 4, True, False)
        x = ()
        for i in tl.static_range(4):
            x += _float_pair(words[i], dtype)
    else:
        x = ()
        for i in tl.static_range(8):
            x += (load_one(ptr + i, mask, False).to(tl.float32),)
    return x


@triton.constexpr_function
def power_of(e, i, kind):
    return 2.0 ** (UNIT - place_of(e, i, kind))


@triton.jit
def _scaled_eight(x, E: tl.constexpr, KIND: tl.constexpr):
    """Each times the power of two that its weight's place in the word asks for."""
    y = ()
    for i in tl.static_range(8):
        y += (x[i] * power_of(E, i, KIND),)
    return y


@triton.jit
def _dot_eight(acc, x, words, E: tl.constexpr, KIND: tl.constexpr):
    """acc + sum of x times the integers of eight E."""
    for i in tl.static_range(8):
        word = words[i // 4]
        if i % 4 == 3:
            word = word >> 8  # out of the exponent's bits
        integer = word & (((1 << bits_of(KIND)) - 1) << place_of(E, i, KIND))
        acc = tl.fma(integer.to(tl.float32, bitcast=True), x[i], acc)
    return acc


@triton.jit
def _sum_eight(x):
    return ((x[0] + x[1]) + (x[2] + x[3])) + ((x[4] + x[5]) + (x[6] + x[7]))


@triton.jit
def load_scales(d_ptr, s_ptr, t_ptr, group, mask, KIND: tl.constexpr):
    """A group's scales as they are stored, from the pointers to the row's: (d, s, t)."""
    if KIND == "Q2_K" or KIND == "Q3_K" or KIND == "Q4_K" or KIND == "Q5_K" or KIND == "Q6_K":
        d = load_one(d_ptr + group // 8, mask, False)
        if KIND == "Q3_K":
            s = load_one(s_ptr + group, mask, False)
            t = load_one(t_ptr + group // 2, mask, False)
            raw = (d, s, t)
        else:
            raw = (d, load_one(s_ptr.to(tl.pointer_type(tl.uint16)) + group, mask, False))
    else:
        raw = (load_one(d_ptr + group, mask, False),)
    return raw


@triton.jit
def _halves(word):
    """The two fp16 of an int32 as float32."""
    low = word.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    high = (word >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    return low, high


@triton.jit
def sub_scales(raw, group, KIND: tl.constexpr):
    """The integers of a group's sub-blocks: scales, then minimums where there are."""
    if KIND == "Q4_K" or KIND == "Q5_K":
        s = raw[1].to(tl.int32)
        integers = (s & 0xFF, s >> 8)
    elif KIND == "Q6_K":
        s = raw[1].to(tl.int16, bitcast=True).to(tl.int32)
        integers = ((s << 24) >> 24, s >> 8)
    elif KIND == "Q2_K":
        s = raw[1].to(tl.int32)
        integers = (s & 0xF, (s >> 8) & 0xF, (s >> 4) & 0xF, s >> 12)
    elif KIND == "Q3_K":
        s = raw[1].to(tl.int32)
        t = raw[2].to(tl.int32) >> (group % 2 * 4)
        integers = (
            ((s & 0xF) | ((t & 3) << 4)) - 32,
            ((s >> 4) | ((t & 12) << 2)) - 32,
        )
    else:
        integers = ()
    return integers


@triton.jit
def block_scales(raw, KIND: tl.constexpr):
    """d, and the minimum where there is one, as float32."""
    if KIND == "Q4_1" or KIND == "Q5_1" or KIND == "Q2_K" or KIND == "Q4_K" or KIND == "Q5_K":
        d, m = _halves(raw[0])
        scales = (d, m)
    else:
        scales = (raw[0].to(tl.float32),)
    return scales


@triton.jit
def _group_value(total, dots, sums, raw, group, M: tl.constexpr, KIND: tl.constexpr):
    """total[m] plus the group's product, from the dots of its integers.

    Args:
        dots: of all the group, [m], or of its two halves, [2 m].
        sums: of the activations, likewise.
    """
    scales = block_scales(raw, KIND)
    factors = sub_scales(raw, group, KIND)
    new = ()
    for m in tl.static_range(M):
        if KIND == "Q4_0" or KIND == "Q5_0" or KIND == "Q8_0":
            # sums hold the offset as a factor.
            value = tl.fma(scales[0], dots[m] - sums[m], total[m])
        elif KIND == "Q4_1" or KIND == "Q5_1":
            value = tl.fma(scales[1], sums[m], tl.fma(scales[0], dots[m], total[m]))
        elif KIND == "Q4_K" or KIND == "Q5_K":
            scale = scales[0] * factors[0].to(tl.float32)
            low = scales[1] * factors[1].to(tl.float32)
            value = tl.fma(scale, dots[m], tl.fma(-low, sums[m], total[m]))
        elif KIND == "Q2_K":
            both = factors[0].to(tl.float32) * dots[m]
            both = tl.fma(factors[1].to(tl.float32), dots[M + m], both)
            low = factors[2].to(tl.float32) * sums[m]
            low = tl.fma(factors[3].to(tl.float32), sums[M + m], low)
            value = tl.fma(scales[0], both, tl.fma(-scales[1], low, total[m]))
        else:  # Q3_K, Q6_K
            both = factors[0].to(tl.float32) * (dots[m] - sums[m])
            both = tl.fma(factors[1].to(tl.float32), dots[M + m] - sums[M + m], both)
            value = tl.fma(scales[0], both, total[m])
        new += (value,)
    return new


@triton.jit
def _load_rows(
    q_ptr, h_ptr, d_ptr, s_ptr, t_ptr, group, mask,
    Q: tl.constexpr, H: tl.constexpr, D: tl.constexpr, S: tl.constexpr, T: tl.constexpr,
    KIND: tl.constexpr, ROWS: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """What a thread needs of each row for its group: ROWS tuples (low, high, scales).

    Strides are constants: rows differ by an immediate of the load's address.
    """
    rows = ()
    for r in tl.static_range(ROWS):
        h_at = h_ptr
        if h_ptr is not None:
            h_at = h_ptr + r * H + group * words_of("h", KIND)
        s_at = s_ptr
        if s_ptr is not None:
            s_at = s_ptr + r * S
        t_at = t_ptr
        if t_ptr is not None:
            t_at = t_ptr + r * T
        q, h = load_group(q_ptr + r * Q + group * words_of("q", KIND), h_at, mask, KIND, ASM)
        rows += ((q, h, load_scales(d_ptr + r * D, s_at, t_at, group, mask, KIND)),)
    return rows


@triton.jit
def _add_group(
    totals, rows, a_ptr, stride_a_token, group, mask,
    KIND: tl.constexpr, ROWS: tl.constexpr, M: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """totals[r][m] plus the products of each row's group."""
    HALVES: tl.constexpr = has_halves(KIND)
    OFFSET: tl.constexpr = offset_of(KIND)
    zero = tl.zeros(group.shape, tl.float32)
    sums = ()  # of the halves, or of the group
    kept = ()  # [r]: dots of the first half, [m]
    dots = ()  # [r][m]
    for e in tl.static_range(4):
        scaled = ()
        eights = ()
        for m in tl.static_range(M):
            at = a_ptr + m * stride_a_token + group * GROUP + 8 * e
            x = _eight_activations(at, mask, VECTOR)
            scaled += (_scaled_eight(x, e, KIND),)
            eights += (_sum_eight(x) * (OFFSET * SMALL),)
        if e == 0:
            sums = eights
        elif HALVES and e == 2:
            sums += eights
        else:
            more = ()
            for i in tl.static_range(len(sums)):
                if HALVES and e == 3 and i < M:
                    more += (sums[i],)
                else:
                    more += (sums[i] + eights[i % M],)
            sums = more
        if HALVES and e == 2:
            kept = dots
        new = ()
        for r in tl.static_range(ROWS):
            words = eight_words(rows[r][0], rows[r][1], e, KIND, False)
            each = ()
            for m in tl.static_range(M):
                if e == 0 or (HALVES and e == 2):
                    each += (_dot_eight(zero, scaled[m], words, e, KIND),)
                else:
                    each += (_dot_eight(dots[r][m], scaled[m], words, e, KIND),)
            new += (each,)
        dots = new
    out = ()
    for r in tl.static_range(ROWS):
        if HALVES:
            out += (_group_value(totals[r], kept[r] + dots[r], sums, rows[r][2], group, M, KIND),)
        else:
            out += (_group_value(totals[r], dots[r], sums, rows[r][2], group, M, KIND),)
    return out


@kernel(dynamic=("num_rows",))
def _gemv_planes_kernel(
    y_ptr,  # [m, n]
    a_ptr,  # [m, k]
    q_ptr,  # int32 [n, words]
    h_ptr,  # int32 [n, words]
    d_ptr,  # fp16 or int32 [n, blocks]
    s_ptr,  # uint8 [n, bytes]
    t_ptr,  # uint8 [n, bytes]
    stride_y_token,
    stride_a_token,
    num_rows,
    Q: tl.constexpr,  # strides of the planes' rows
    H: tl.constexpr,
    D: tl.constexpr,
    S: tl.constexpr,
    T: tl.constexpr,
    GROUPS: tl.constexpr,  # of 32 in a row
    KIND: tl.constexpr,
    M: tl.constexpr,
    ROWS: tl.constexpr,  # at most num_rows
    SUMS: tl.constexpr,  # power of two >= M * ROWS
    THREADS: tl.constexpr,
    PREFETCH: tl.constexpr,
    ASM: tl.constexpr,
    VECTOR: tl.constexpr,
):
    # The last program starts early enough to have all its rows: some are computed twice, alike.
    first = tl.minimum(tl.program_id(0) * ROWS, num_rows - ROWS).to(tl.int64)
    thread = tl.arange(0, THREADS)
    EVEN: tl.constexpr = GROUPS % THREADS == 0
    STEPS: tl.constexpr = (GROUPS + THREADS - 1) // THREADS
    q_ptr += first * Q
    d_ptr += first * D
    if h_ptr is not None:
        h_ptr += first * H
    if s_ptr is not None:
        s_ptr += first * S
    if t_ptr is not None:
        t_ptr += first * T

    zero = tl.zeros([THREADS], tl.float32)
    totals = ()
    for _r in tl.static_range(ROWS):
        each = ()
        for _m in tl.static_range(M):
            each += (zero,)
        totals += (each,)

    if PREFETCH and STEPS > 1:
        rows = _load_rows(
            q_ptr, h_ptr, d_ptr, s_ptr, t_ptr, thread, thread < GROUPS,
            Q, H, D, S, T, KIND, ROWS, ASM,
        )  # fmt: skip
        for step in range(STEPS):
            group = step * THREADS + thread
            ahead = group + THREADS
            later = _load_rows(
                q_ptr, h_ptr, d_ptr, s_ptr, t_ptr, ahead, ahead < GROUPS,
                Q, H, D, S, T, KIND, ROWS, ASM,
            )  # fmt: skip
            mask = group < GROUPS
            if EVEN:
                mask = None
            totals = _add_group(
                totals, rows, a_ptr, stride_a_token, group, mask, KIND, ROWS, M, VECTOR
            )
            rows = later
    elif STEPS > 1:
        for step in range(STEPS):
            group = step * THREADS + thread
            mask = group < GROUPS
            if EVEN:
                mask = None
            rows = _load_rows(
                q_ptr, h_ptr, d_ptr, s_ptr, t_ptr, group, mask, Q, H, D, S, T, KIND, ROWS, ASM
            )
            totals = _add_group(
                totals, rows, a_ptr, stride_a_token, group, mask, KIND, ROWS, M, VECTOR
            )
    elif STEPS == 1:
        mask = thread < GROUPS
        if EVEN:
            mask = None
        rows = _load_rows(
            q_ptr, h_ptr, d_ptr, s_ptr, t_ptr, thread, mask, Q, H, D, S, T, KIND, ROWS, ASM
        )
        totals = _add_group(
            totals, rows, a_ptr, stride_a_token, thread, mask, KIND, ROWS, M, VECTOR
        )

    flat = ()
    for r in tl.static_range(ROWS):
        flat += totals[r]
    y = summed(flat, ROWS * M, SUMS) * LARGE
    i = tl.arange(0, SUMS)
    tl.store(
        y_ptr + (i % M).to(tl.int64) * stride_y_token + first + i // M,
        y.to(y_ptr.dtype.element_ty),
        mask=i < ROWS * M,
    )


def plane_arguments(planes: Planes) -> tuple[tuple[Tensor | None, ...], dict[str, Any]]:
    """The five pointers, and the constants that follow of kind and K."""
    tensors = (planes.q, planes.h, planes.d, planes.s, planes.t)
    strides = {
        name: 0 if plane is None else plane.stride(-2)
        for name, plane in zip("QHDST", tensors, strict=True)
    }
    constants = strides | {"GROUPS": planes.num_weights // 32, "KIND": planes.kind}
    return tensors, constants


def tile_of(num_rows: int, num_groups: int, num_tokens: int) -> tuple[int, int]:
    """Rows a program and its warps."""
    rows = {1: 4, 2: 4}.get(num_tokens, 2)
    rows = min(rows, 1 << max(num_rows.bit_length() - 1, 0))
    return rows, max(1, min(4, num_groups // 32))


def is_nvidia(x: Tensor) -> bool:
    """Whether PTX may be used: not in the interpreter, and not on AMD."""
    return not x.is_cpu and (x.is_meta or torch.version.hip is None)


def gemv_planes(
    a: Tensor,
    planes: Planes,
    *,
    out: Tensor | None = None,
    rows: int | None = None,
    num_warps: int | None = None,
    prefetch: bool = False,
    asm: bool | None = None,
) -> Tensor:
    """y[m, n] = Σₖ a[m, k] · W[n, k], summed in float32, for m <= 8.

    Args:
        a: [m, K] in float32, float16 or bfloat16; magnitudes below 2^41.
        planes: W.
        out: [m, n] to write to.
        rows: of W a program, a power of two; measured choice if None.
        num_warps: of a program, likewise.
        prefetch: load a step's weights before the step before is computed.
        asm: use PTX; if None, where it can be.
    """
    num_tokens, num_rows = a.shape[0], planes.shape[0]
    y = a.new_empty(num_tokens, num_rows) if out is None else out
    if y.numel() == 0:
        return y
    tensors, constants = plane_arguments(planes)
    best_rows, best_warps = tile_of(num_rows, constants["GROUPS"], num_tokens)
    rows = min(rows or best_rows, 1 << (num_rows.bit_length() - 1))
    warps = num_warps or best_warps
    asm = is_nvidia(a) if asm is None else asm
    aligned = a.stride(0) * a.element_size() % 16 == 0 and (a.is_meta or a.data_ptr() % 16 == 0)
    _gemv_planes_kernel.launch(
        (triton.cdiv(num_rows, rows),),
        y,
        a,
        *tensors,
        y.stride(0),
        a.stride(0),
        num_rows,
        **constants,
        M=num_tokens,
        ROWS=rows,
        SUMS=triton.next_power_of_2(rows * num_tokens),
        THREADS=32 * warps,
        PREFETCH=prefetch,
        ASM=asm,
        VECTOR=asm and aligned,
        num_warps=warps,
    )
    return y


