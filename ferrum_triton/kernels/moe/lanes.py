"""Search for an expert's pairs: lanes read some ids each, a word says which are the expert's."""

from typing import Any, NamedTuple

import triton
import triton.language as tl


class Ids(NamedTuple):
    """The pairs' experts."""

    ids: Any  # pointer, [num_tokens, top_k]
    stride_token: Any  # None of dense ids
    num_pairs: Any
    num_experts: Any


class Found(NamedTuple):
    """What lanes have of an expert, int32 [LANES] each."""

    bits: Any  # which of a lane's pairs
    matches: Any  # how many
    lane: Any  # a lane's first pair
    place: Any  # how many the expert has before


@triton.jit
def load_experts(ids, first, TOP_K: tl.constexpr, LANES: tl.constexpr, WIDTH: tl.constexpr):
    """Experts [LANES, WIDTH] of pairs from one on: -1 of one that has none, -2 past the last.

    Args:
        ids: :class:`Ids`.
        first: the first pair.
    """
    pair = first + tl.arange(0, LANES)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    if ids.stride_token is None:
        source = ids.ids + pair
    else:
        source = ids.ids + (pair // TOP_K).to(tl.int64) * ids.stride_token + pair % TOP_K
    is_pair = pair < ids.num_pairs
    expert = tl.load(source, mask=is_pair, other=-1)
    known = (expert >= 0) & (expert < ids.num_experts)
    return tl.where(known, expert, tl.where(is_pair, -1, -2)).to(tl.int32)


@triton.jit
def bits_of(expert, wanted, WIDTH: tl.constexpr):
    """Which pairs of each lane are an expert's, a bit each."""
    return tl.sum((expert == wanted).to(tl.int32) << tl.arange(0, WIDTH)[None, :], axis=1)


@triton.jit
def count_bits(word):
    """How many bits of an int32 are set."""
    word = word.to(tl.uint32, bitcast=True)
    word -= (word >> 1) & 0x55555555
    word = (word & 0x33333333) + ((word >> 2) & 0x33333333)
    word = (word + (word >> 4)) & 0x0F0F0F0F
    return ((word * 0x01010101) >> 24).to(tl.int32)


@triton.jit
def find(ids, first, wanted, before, TOP_K: tl.constexpr, LANES: tl.constexpr, WIDTH: tl.constexpr):
    """An expert's pairs among those from one on, by lane: :class:`Found`.

    Args:
        before: how many the expert has among the pairs before.
    """
    bits = bits_of(load_experts(ids, first, TOP_K, LANES, WIDTH), wanted, WIDTH)
    matches = count_bits(bits)
    lane = first + tl.arange(0, LANES) * WIDTH
    return Found(bits, matches, lane, before + tl.cumsum(matches, axis=0) - matches)


@triton.jit
def lowest_bit(word):
    """The place of an int32's lowest 1; of 0 any."""
    lowest = (word & -word).to(tl.float32)  # a power of two, so exact, or that of the sign
    return ((lowest.to(tl.int32, bitcast=True) >> 23) & 255) - 127
