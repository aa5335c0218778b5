"""What latent attention does with its tiles: by pointers one by one, or a loop by descriptors."""

import triton
import triton.language as tl


@triton.jit
def widen_e4m3(code):
    """Bytes of float8_e4m3fn as float32, in integers: not every GPU converts them.

    A float32 of the same exponent bits and mantissa is 2^-120 times the value, subnormals
    included.
    """
    code = code.to(tl.int32)
    bits = ((code & 0x80) << 24) | ((code & 0x7F) << 20)
    value = bits.to(tl.float32, bitcast=True) * 1.329227995784916e36
    return tl.where((code & 0x7F) == 0x7F, float("nan"), value)


@triton.jit
def load_latents(address, mask, dtype: tl.constexpr, FP8: tl.constexpr):
    """Part of a tile's rows, in ``dtype``, 0 where masked; FP8 is "", "native" or "integer"."""
    x = tl.load(address, mask=mask, other=0)
    if FP8 == "native":
        x = x.to(tl.float8e4nv, bitcast=True)
    elif FP8 == "integer":
        x = widen_e4m3(x)
    return x.to(dtype)


@triton.jit
def exponentials(scores, m_i):
    """A tile's weights, what they shrink the weights before them by, and the new maximum."""
    m_new = tl.maximum(m_i, tl.max(scores, axis=1))
    shift = tl.where(m_new == float("-inf"), 0.0, m_new)
    return tl.exp2(scores - shift[:, None]), tl.exp2(m_i - shift), m_new


@triton.jit
def attend_tile(
    acc,  # [BLOCK_M, BLOCK_L] float32
    m_i,  # [BLOCK_M], the running maximum in base 2
    l_i,  # [BLOCK_M]
    q_latent,  # [BLOCK_M, BLOCK_L]
    q_rope,  # [BLOCK_M, BLOCK_R]
    first,
    bound,  # [BLOCK_M], how many keys each row sees
    end,  # the largest bound
    scale_log2,
    cache_ptr,
    table_ptr,  # the sequence's block table, or None
    sequence,
    stride_cache_block,
    num_blocks,
    STRIDE_ROW: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    LORA: tl.constexpr,
    ROPE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_R: tl.constexpr,
    ONE_BLOCK: tl.constexpr,
    FP8: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Fold the keys [first, first + BLOCK_N) into the running softmax."""
    tile = tl.arange(0, BLOCK_N)
    n = first + tile
    within = n < end
    if table_ptr is None:
        start = sequence * stride_cache_block
        row = n
    elif ONE_BLOCK:
        block = tl.load(table_ptr + first // BLOCK_SIZE).to(tl.int64)
        known = (block >= 0) & (block < num_blocks)
        within = within & known
        start = tl.where(known, block, 0) * stride_cache_block
        start += tl.full([], first % BLOCK_SIZE, tl.int64) * STRIDE_ROW
        row = tile
    else:
        block = tl.load(table_ptr + n // BLOCK_SIZE, mask=within, other=-1).to(tl.int64)
        within = within & (block >= 0) & (block < num_blocks)
        start = block[:, None] * stride_cache_block
        row = n % BLOCK_SIZE
    address = cache_ptr + start + row.to(tl.int64)[:, None] * STRIDE_ROW
    col = tl.arange(0, BLOCK_L)[None, :]
    rope_col = tl.arange(0, BLOCK_R)[None, :]
    latent_mask = within[:, None] if LORA == BLOCK_L else within[:, None] & (col < LORA)
    rope_mask = within[:, None] if ROPE == BLOCK_R else within[:, None] & (rope_col < ROPE)
    # Values too: rows that no query sees are cleared, since 0 times what they hold may be NaN.
    latent = load_latents(address + col, latent_mask, q_latent.dtype, FP8)  # [BLOCK_N, BLOCK_L]
    rope = load_latents(address + LORA + rope_col, rope_mask, q_rope.dtype, FP8)

    scores = tl.dot(q_latent, tl.trans(latent), input_precision=PRECISION)
    scores = tl.dot(q_rope, tl.trans(rope), scores, input_precision=PRECISION) * scale_log2
    # A key on no block lies past every bound: one comparison for each score masks them all.
    n = tl.where(within, n, 0x7FFFFFFF)
    scores = tl.where(n[None, :] < bound[:, None], scores, float("-inf"))

    p, alpha, m_i = exponentials(scores, m_i)
    l_i = l_i * alpha + tl.sum(p, axis=1)
    acc = acc * alpha[:, None]
    acc = tl.dot(p.to(latent.dtype), latent, acc, input_precision=PRECISION)
    return acc, m_i, l_i


@triton.jit
def entry_at(table_ptr, sequence, n, BLOCK_SIZE: tl.constexpr):
    """What names the block that holds key n: a contiguous cache has one for each sequence."""
    if table_ptr is None:
        entry = sequence
    else:
        entry = tl.load(table_ptr + n // BLOCK_SIZE)
    return entry


@triton.jit
def attend_described(
    q_latent,  # [BLOCK_M, BLOCK_L]
    q_rope,  # [BLOCK_M, BLOCK_R]
    start,
    whole,  # keys before it are seen by every row
    bound,  # [BLOCK_M], how many keys each row sees
    end,  # the largest bound
    scale_log2,
    latent_desc,
    rope_desc,
    table_ptr,  # the sequence's block table, or None
    sequence,
    num_blocks,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_R: tl.constexpr,
    PRECISION: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    """Attend to the keys [start, end) through tensor descriptors: acc, m_i and l_i.

    The branches of the loop are there for what Triton 3.6 makes of it on sm_90:

    - All work on a tile is one branch, which Triton moves behind the next tile's loads, so that
      they run meanwhile. Otherwise it puts the loads last, and waits for them at once.
    - Each product that makes scores has a branch to itself. Where a product leads to another in
      the same block of code, Triton lets 8 warps share rows only; tensor cores take 64 at a time,
      so either half of the warps would work out all scores. Like this each takes half of the keys.
    - The rotary part's product is in both arms of its branch: with a single use of that tile
      Triton would give it a third buffer, for which shared memory has no room.
    """
    tile = tl.arange(0, BLOCK_N)
    acc = tl.zeros([BLOCK_M, BLOCK_L], tl.float32)
    m_i = tl.full([BLOCK_M], float("-inf"), tl.float32)
    # Summed over the tile's columns at the end: a sum across warps takes barriers.
    l_i = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    next_entry = entry_at(table_ptr, sequence, start, BLOCK_SIZE)
    for first in tl.range(start, end, BLOCK_N, num_stages=NUM_STAGES):
        # Looked up a tile ahead: a tile's load should not wait for its table entry.
        entry = next_entry
        following = tl.minimum(first + BLOCK_N, end - 1)
        next_entry = entry_at(table_ptr, sequence, following, BLOCK_SIZE)
        known = (entry >= 0) & (entry < num_blocks)
        block = tl.where(known, entry, num_blocks).to(tl.int32)
        # The last tile ends with the last key: no row past it, which may hold NaN, is read. In
        # front of it are keys of the tile before, which are masked, or rows before the block's
        # first, which read as zeros. So do those of no block.
        at = tl.minimum(first, end - BLOCK_N)
        row = at if table_ptr is None else at - first + first % BLOCK_SIZE
        latent = latent_desc.load([block, row, 0]).reshape(BLOCK_N, BLOCK_L)
        rope = rope_desc.load([block, row, 0]).reshape(BLOCK_N, BLOCK_R)
        if known:
            scores = tl.full([BLOCK_M, BLOCK_N], float("-inf"), tl.float32)
            if first < end:  # always
                scores = tl.dot(q_latent, tl.trans(latent), input_precision=PRECISION)
            if first + BLOCK_N <= whole:
                scores = tl.dot(q_rope, tl.trans(rope), scores, input_precision=PRECISION)
                scores *= scale_log2
            else:
                scores = tl.dot(q_rope, tl.trans(rope), scores, input_precision=PRECISION)
                n = tl.where(tile >= first - at, at + tile, 0x7FFFFFFF)
                hidden = n[None, :] >= bound[:, None]
                scores = tl.where(hidden, float("-inf"), scores * scale_log2)
            p, alpha, m_i = exponentials(scores, m_i)
            l_i = l_i * alpha[:, None] + p
            acc = acc * alpha[:, None]
            acc = tl.dot(p.to(latent.dtype), latent, acc, input_precision=PRECISION)
    return acc, m_i, tl.sum(l_i, axis=1)
