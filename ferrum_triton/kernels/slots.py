"""The sum over a token's slots, for kernels that go on with it."""

import triton
import triton.language as tl


@triton.jit
def sum_slots(
    slots_ptr,
    weights_ptr,
    pairs_ptr,
    stride_slots_slot,
    num_rows,
    h,
    mask,
    TOP_K: tl.constexpr,
    BLOCK_H: tl.constexpr,
    OWN: tl.constexpr = False,
):
    """Σ_k weights[k] · slots[k], or · slots[pairs[k]] of pairs; [BLOCK_H] float32.

    A pair that has none of the num_rows rows adds nothing. With OWN pairs are the experts of slots,
    of which there are num_rows: they say which slots are added, and no row.
    """
    total = tl.zeros([BLOCK_H], tl.float32)
    for k in tl.static_range(TOP_K):
        if pairs_ptr is None:
            weight = tl.load(weights_ptr + k).to(tl.float32)
            x = tl.load(slots_ptr + h, mask=mask, other=0.0)
            slots_ptr += stride_slots_slot  # k * stride could pass int32
        else:
            row = tl.load(pairs_ptr + k).to(tl.int64)
            known = (row >= 0) & (row < num_rows)
            weight = tl.load(weights_ptr + k).to(tl.float32)
            if OWN:
                x = tl.load(slots_ptr + h, mask=mask & known, other=0.0)
                slots_ptr += stride_slots_slot
            else:
                x = tl.load(slots_ptr + row * stride_slots_slot + h, mask=mask & known, other=0.0)
            weight = tl.where(known, weight, 0.0)
        total += weight * x.to(tl.float32)
    return total
