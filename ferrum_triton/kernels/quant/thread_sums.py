"""Sums over the threads of a program, of which each has a value of many sums."""

import triton
import triton.language as tl


@triton.jit
def _filled_up(values, PADDED: tl.constexpr):
    """A tuple of PADDED tensors: the values, then zeros."""
    zero = tl.zeros_like(values[0])
    out = values
    for _ in tl.static_range(PADDED - len(values)):
        out += (zero,)
    return out


@triton.jit
def _side_by_side(parts, PADDED: tl.constexpr):
    """Tensors [threads] laid beside each other in each thread: [threads, PADDED]."""
    THREADS: tl.constexpr = parts[0].shape[0]
    # The first half beside the second, so that the first new axis tells them apart; and so on.
    for _ in tl.static_range(6):
        if len(parts) > 1:
            joined = ()
            for i in tl.static_range(len(parts) // 2):
                joined += (tl.join(parts[i], parts[i + len(parts) // 2]),)
            parts = joined
    return tl.reshape(parts[0], (THREADS, PADDED))


@triton.constexpr_function
def swap_asm(lanes):
    return f"shfl.sync.bfly.b32 $0, $1, {lanes}, 0x1f, 0xffffffff;"


@triton.jit
def _halved(values, LANES: tl.constexpr):
    """Sums of lanes LANES apart, half the values each: the second half where the lane has LANES."""
    HALF: tl.constexpr = len(values) // 2
    upper = (tl.arange(0, values[0].shape[0]) & LANES) != 0
    out = ()
    for i in tl.static_range(HALF):
        low, high = values[i], values[i + HALF]
        other = tl.inline_asm_elementwise(
            swap_asm(LANES), "=f,f", [tl.where(upper, low, high)], dtype=tl.float32, is_pure=True,
            pack=1,
        )  # fmt: skip
        out += (tl.where(upper, high, low) + other,)
    return out


@triton.jit
def summed(values, PADDED: tl.constexpr, ASM: tl.constexpr, mask=None, WHOLE: tl.constexpr = False):
    """The sum over threads, of those in the mask, of each tensor [threads]: [PADDED].

    By PTX lanes exchange half of their values with each other, then a quarter, and so on.

    Args:
        values: of threads, a tuple.
        PADDED: a power of two, at least as many.
        ASM: use PTX.
        mask: [threads] or None.
        WHOLE: the mask is the same for all threads of a warp.
    """
    # Sums of a warp that is in the mask or out of it are masked, not values.
    LATE: tl.constexpr = WHOLE and ASM and PADDED > 1 and PADDED <= 32
    if mask is not None and not LATE:
        masked = ()
        for i in tl.static_range(len(values)):
            masked += (tl.where(mask, values[i], 0.0),)
        values = masked
    parts = _filled_up(values, PADDED)
    if PADDED == 1:
        total = tl.sum(parts[0], axis=0, keep_dims=True)
    elif ASM and PADDED <= 32:
        WARPS: tl.constexpr = parts[0].shape[0] // 32
        for i in tl.static_range(5):
            if len(parts) > 1:
                parts = _halved(parts, 16 >> i)
        part = parts[0]
        if mask is not None and LATE:
            part = tl.where(mask, part, 0.0)
        each = tl.reshape(part, (WARPS, PADDED, 32 // PADDED))
        total = tl.sum(tl.sum(each, axis=2), axis=0)
    else:
        total = tl.sum(_side_by_side(parts, PADDED), axis=0)
    return total


@triton.jit
def summed_over_warps(values, COUNT: tl.constexpr):
    """The sum over warps of COUNT tensors [threads]: [32 COUNT], a lane's beside each other."""
    WARPS: tl.constexpr = values[0].shape[0] // 32
    each = tl.reshape(_side_by_side(values, COUNT), (WARPS, 32 * COUNT))
    return tl.sum(each, axis=0)
