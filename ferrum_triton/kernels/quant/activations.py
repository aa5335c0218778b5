"""Activations in the order the products of :mod:`ferrum_triton.kernels.quant.fragments` sum in.

:func:`arrange` is the launch before a product with planes on tensor cores, where no norm before it
does that itself (:mod:`ferrum_triton.kernels.quant.add_norm`). Of each token it writes
x = a / factor in float16, factor a power of two, and sums over each word's eight or over groups.
A token has one factor, or one for each block (:mod:`ferrum_triton.kernels.quant.block_factors`).
The launch also zeroes the tickets of the product behind it. Programs that share a tile's K draw
them, so that the last one knows that it is.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ferrum_triton.kernels.gpu import gpu_of
from ferrum_triton.kernels.jit import kernel
from ferrum_triton.kernels.pdl import pdl_trigger, pdl_wait, prefetch_l2
from ferrum_triton.kernels.quant.block_factors import PART, PER_WORD, factors_of_blocks
from ferrum_triton.kernels.quant.gemv_plan import Squares
from ferrum_triton.kernels.rows import cdiv, next_power_of_2

# K is filled up with zeros to whole steps of the products' loops.
STEP = 256
# Elements that a sum is over: a word's, or those that share a scale.
WORD, GROUP = 8, 32
# Elements of a token that a program holds at a time, at most.
LONGEST_BLOCK = 16384
# Tokens of a product's tile, at most.
LARGEST_TILE = 256
# Tickets that an arrangement has: as many tiles can have their K split.
TICKETS = tl.constexpr(512)


class Arranged(NamedTuple):
    """Arranged activations: tensors of a launch, or their pointers in a kernel.

    Attributes:
        x: float16 [rows, padded k].
        sums: float16, over words [rows, padded k / 8], or over groups [rows, padded k / 16], as an
            :class:`Order` has them; None where products take none.
        factor: what x has to be multiplied by, float32 [rows]; or of an :class:`Order` by blocks
            exponent bits of a factor for each block, uint8 [rows, blocks], in whole words.
        tickets: int32 [TICKETS], zeros whenever no product is running; None where products of these
            activations never split K.
    """

    x: Any
    sums: Any
    factor: Any
    tickets: Any = None


@triton.jit
def load_block(a_row, first, num_weights, BLOCK_K: tl.constexpr):
    """Elements [first, first + BLOCK_K) of a row as float32, 0 past its end."""
    k = first + tl.arange(0, BLOCK_K)
    return tl.load(a_row + k, mask=k < num_weights, other=0.0).to(tl.float32)


@triton.jit
def first_block(a_row, num_weights, num_padded, BLOCK_K: tl.constexpr, WHOLE: tl.constexpr = False):
    """A row's first block, and the exponent bits of its factor's inverse: :func:`arrange_token`."""
    a = load_block(a_row, 0, num_weights, BLOCK_K)
    # Ordered as integers, a NaN is above infinity and so is not lost.
    largest = tl.abs(a).to(tl.int32, bitcast=True)
    if not WHOLE:
        for first in range(BLOCK_K, num_padded, BLOCK_K):
            more = load_block(a_row, first, num_weights, BLOCK_K)
            largest = tl.maximum(largest, tl.abs(more).to(tl.int32, bitcast=True))
    return a, inverse_of(largest)


@triton.jit
def inverse_of(magnitudes, AXIS: tl.constexpr = 0):
    """The exponent bits of the inverse of a row's factor, of its magnitudes as integers."""
    return tl.minimum(265 - (tl.max(magnitudes, axis=AXIS) >> 23), 253)


@triton.jit
def factor_of(inverse):
    """A row's factor, of the exponent bits of its inverse."""
    return ((254 - inverse) << 23).to(tl.float32, bitcast=True)


@triton.jit
def clear_tickets(tickets_ptr):
    """Set all tickets to zero, in a launch's first program; does nothing without tickets."""
    if tickets_ptr is not None:
        if tl.program_id(0) == 0:
            tl.store(tickets_ptr + tl.arange(0, TICKETS), 0)


@triton.jit
def group_sums(a):
    """A quarter of the sums over groups of 32: eight of each block of 256, and what they lack.

    Two float16 add up to a sum, whose product is exact then but for its other factor. A quarter of
    32 elements below 2^12 is a float16.
    """
    BLOCKS: tl.constexpr = a.shape[0] // 256
    total = tl.sum(tl.reshape(a, [BLOCKS, 8, 32]), axis=2) * 0.25
    nearest = total.to(tl.float16)
    left = (total - nearest.to(tl.float32)).to(tl.float16)
    return tl.reshape(tl.permute(tl.join(nearest, left), (0, 2, 1)), [BLOCKS * 16])


@triton.jit
def arranged(
    a,
    inverse,
    COLUMNS: tl.constexpr,
    HALVES: tl.constexpr,
    INTERLEAVED: tl.constexpr = False,
    SUMS: tl.constexpr = 8,
):
    """Whole steps of a row, float32, as an arranged row has them, and its sums; float16.

    Of several rows end to end each has whole steps, and ``inverse`` is of each element's row.
    """
    a = a * (inverse << 23).to(tl.float32, bitcast=True)
    BLOCK_K: tl.constexpr = a.shape[0]
    if SUMS == 32:
        sums = group_sums(a)
    else:
        sums = tl.sum(tl.reshape(a, [BLOCK_K // 8, 8]), axis=1).to(tl.float16)
    STEPS: tl.constexpr = BLOCK_K // (8 * HALVES * COLUMNS)
    # Weight 16 i + 8 h + 4 n + 2 e + o, see fragments.py; i is every HALVES-th pair of words.
    if INTERLEAVED:
        # Of 256 elements each thread of four has 64: four times those of a pair of words.
        x = tl.reshape(a.to(tl.float16), [STEPS, 4, 4, 2, 2, 2, 2])
        x = tl.permute(x, (0, 2, 3, 1, 4, 6, 5))
    else:
        x = tl.reshape(a.to(tl.float16), [STEPS, COLUMNS // 2, HALVES, 2, 2, 2, 2])
        x = tl.permute(x, (0, 2, 3, 4, 6, 1, 5))
    return tl.reshape(x, [BLOCK_K]), sums


@triton.jit
def _place(row, i, num_padded, INTERLEAVE: tl.constexpr):
    """Where element i of a row lies: rows end to end, or 32 of each of INTERLEAVE rows in turn."""
    if INTERLEAVE > 1:
        place = (i // 32 * INTERLEAVE + row) * 32 + i % 32
    else:
        place = row * num_padded + i
    return place


@triton.jit
def store_arranged(to, row, first, x, sums, num_padded, INTERLEAVE: tl.constexpr = 0):
    """Write what :func:`arranged` returned to a row of ``to``, :class:`Arranged` pointers."""
    BLOCK_K: tl.constexpr = x.shape[0]
    i = first + tl.arange(0, BLOCK_K)
    tl.store(to.x + _place(row, i, num_padded, INTERLEAVE), x, mask=i < num_padded)
    if to.sums is not None:
        NUM: tl.constexpr = sums.shape[0]
        j, num_sums = first // (BLOCK_K // NUM) + tl.arange(0, NUM), num_padded // (BLOCK_K // NUM)
        tl.store(to.sums + _place(row, j, num_sums, INTERLEAVE), sums, mask=j < num_sums)


@triton.jit
def arrange_token(
    to,
    row,
    a_row,
    num_weights,
    num_padded,
    COLUMNS: tl.constexpr,
    HALVES: tl.constexpr,
    BLOCK_K: tl.constexpr,
    INTERLEAVE: tl.constexpr = 0,
    SUMS: tl.constexpr = 8,
    WHOLE: tl.constexpr = False,
):
    """One token: x = a / factor, its largest magnitude in [2^11, 2^12), and sums over words.

    factor is a power of two, so that x is exact down to 2^-35 of its row's largest: bfloat16 has
    fewer bits than float16. Eight of them sum to a float16.

    Args:
        to: :class:`Arranged` pointers.
        row: row of ``to``.
        a_row: pointer to the token's activations.
        WHOLE: a block holds the row, and nothing is a loop.
    """
    a, inverse = first_block(a_row, num_weights, num_padded, BLOCK_K, WHOLE)
    tl.store(to.factor + row, factor_of(inverse))
    if WHOLE:
        x, sums = arranged(a, inverse, COLUMNS, HALVES, INTERLEAVE > 0, SUMS)
        store_arranged(to, row, 0, x, sums, num_padded, INTERLEAVE)
    else:
        for first in range(0, num_padded, BLOCK_K):
            x, sums = arranged(a, inverse, COLUMNS, HALVES, INTERLEAVE > 0, SUMS)
            store_arranged(to, row, first, x, sums, num_padded, INTERLEAVE)
            if first + BLOCK_K < num_padded:
                a = load_block(a_row, first + BLOCK_K, num_weights, BLOCK_K)


@kernel
def _arrange_kernel(
    x_ptr,  # [m, padded k], float16
    sums_ptr,  # [m, their number], float16; or None
    factor_ptr,  # [m], float32
    tickets_ptr,  # [TICKETS], int32, or None
    a_ptr,  # [m, k]
    stride_a_token,
    num_weights,
    num_padded,
    COLUMNS: tl.constexpr,  # words of a part of a step
    HALVES: tl.constexpr,  # parts of a step
    INTERLEAVE: tl.constexpr,  # as an Order has it
    SUMS: tl.constexpr,  # as an Order has it
    EARLY: tl.constexpr,  # as an Order has it
    BLOCK_K: tl.constexpr,
    WHOLE: tl.constexpr,
    PDL: tl.constexpr,
):
    if EARLY:
        pdl_trigger(PDL)
    token = tl.program_id(0).to(tl.int64)
    a_row = a_ptr + token * stride_a_token
    # Cold activations come sooner: Q4_K 4096x14336 by 64 tokens takes 21.7 us for 22.4, by 32 19.0
    # for 19.5 (bench.timing.Replay of gemm_quant, a copy of 9dbce6c with this and 9dbce6c, one run
    # of each on one H200). Behind a norm that has just written them it gains nothing: 13.60 us for
    # 13.63 by 8 tokens (bench.run gemm_quant, H200, ea8c95f and 449e373).
    if PDL:
        PER_LINE: tl.constexpr = 1024 // a_ptr.dtype.element_ty.primitive_bitwidth
        line = tl.arange(0, BLOCK_K // PER_LINE) * PER_LINE
        prefetch_l2(a_row + tl.minimum(line, num_weights - 1))
    pdl_wait(PDL)
    if not EARLY:
        pdl_trigger(PDL)
    clear_tickets(tickets_ptr)
    to = Arranged(x_ptr, sums_ptr, factor_ptr)
    row = to, token, a_row, num_weights, num_padded
    arrange_token(*row, COLUMNS, HALVES, BLOCK_K, INTERLEAVE, SUMS, WHOLE)


@kernel
def _arrange_blocks_kernel(
    x_ptr,  # [m, padded k], float16
    sums_ptr,  # [m, their number], float16; or None
    factor_ptr,  # [m, blocks], uint8
    a_ptr,  # [m, k]
    stride_a_token,
    num_weights,
    num_padded,
    COLUMNS: tl.constexpr,  # words of a part of a step
    HALVES: tl.constexpr,  # parts of a step
    INTERLEAVE: tl.constexpr,  # as an Order has it
    SUMS: tl.constexpr,  # as an Order has it
    EARLY: tl.constexpr,  # as an Order has it
    PDL: tl.constexpr,
):
    if EARLY:
        pdl_trigger(PDL)
    part, token = tl.program_id(0), tl.program_id(1).to(tl.int64)
    a_row, first = a_ptr + token * stride_a_token, part * PART
    # As in _arrange_kernel.
    if PDL:
        PER_LINE: tl.constexpr = 1024 // a_ptr.dtype.element_ty.primitive_bitwidth
        line = first + tl.arange(0, PART // PER_LINE) * PER_LINE
        prefetch_l2(a_row + tl.minimum(line, num_weights - 1))
    pdl_wait(PDL)
    if not EARLY:
        pdl_trigger(PDL)
    a = load_block(a_row, first, num_weights, PART)
    factor, inverse = factors_of_blocks(a)
    factor_ptr += (token * tl.num_programs(0) + part) * PER_WORD
    tl.store(factor_ptr + tl.arange(0, PER_WORD), factor.to(tl.uint8))
    x, sums = arranged(a, inverse, COLUMNS, HALVES, INTERLEAVE > 0, SUMS)
    to = Arranged(x_ptr, sums_ptr, factor_ptr)
    store_arranged(to, token, first, x, sums, num_padded, INTERLEAVE)


class Order(NamedTuple):
    """How products take activations.

    Attributes:
        words: words of a step, 16 or 32.
        halves: parts of a step. Of two, every other pair of words comes first, then the others.
        interleave: tokens at most whose elements come in turn, 32 of each. Of any but 0 a quad's
            threads have their own four words of 32 elements together. 1 and 0: rows end to end.
        sums: elements over which sums are taken too, of :data:`WORD` or of :data:`GROUP`; 0: none.
        early: whether a launch that only arranges lets the product begin at its entry. Programs
            that have an SM to themselves then load weights sooner: packed products of 28672 x 4096
            by 16 tokens take 24.8 us for 25.2, of 4096 x 14336 by 64 22.8 for 23.0. Others share
            SMs unevenly: small_m's of 4096 x 14336 by 4 tokens take 14.7 for 14.3
            (``bench.behind.time_call`` of ``gemm_quant`` of Q4_K in turns, H200, ed54015 with and
            without). By blocks they do gain (:func:`~.small_m_config.takes_blocks`).
        by_blocks: whether each block of 256 elements has a factor of its own, and a row is arranged
            by a program for each PART. Of tokens that are interleaved.
    """

    words: int
    halves: int = 1
    interleave: int = 0
    sums: int = WORD
    early: bool = False
    by_blocks: bool = False

    def num_sums(self, padded: int) -> int:
        """Sums of a row; a group's are two float16."""
        return padded // 8 if self.sums == WORD else padded // 16


def whole_tiles(num_tokens: int) -> int:
    """Rows of memory for tokens, so that they end with a whole tile of the products.

    Tiles are a power of two of tokens, LARGEST_TILE at most. What they read behind the last token
    is never stored, but has to be in memory: filled in or read again it takes longer (docs/quant.md
    has the figures).
    """
    tile = min(next_power_of_2(num_tokens), LARGEST_TILE)
    return cdiv(num_tokens, tile) * tile


def room_for(
    num_tokens: int, num_weights: int, device: torch.device, order: Order, *, splits_k: bool = False
) -> Arranged:
    """Memory for activations in an order; with tickets where products may split K."""
    interleave = order.interleave
    num_rows = max(interleave, num_tokens) if interleave else whole_tiles(num_tokens)
    padded = cdiv(num_weights, STEP) * STEP

    def empty(dtype: torch.dtype, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    if order.by_blocks:
        factor = empty(torch.uint8, num_rows, cdiv(padded, PART.value) * PER_WORD.value)
    else:
        factor = empty(torch.float32, num_rows)
    return Arranged(
        x=empty(torch.float16, num_rows, padded),
        sums=empty(torch.float16, num_rows, order.num_sums(padded)) if order.sums else None,
        factor=factor,
        # Few enough tokens to be interleaved never split K.
        tickets=empty(torch.int32, TICKETS.value) if splits_k and not order.interleave else None,
    )


def block_and_warps(padded: int) -> tuple[int, int]:
    """Elements of a token at a time, and a program's warps."""
    # Few tokens are a matter of latency: all of K at once where the registers hold it.
    block = min(next_power_of_2(max(padded, STEP)), LONGEST_BLOCK)
    return block, 16 if block > 4096 else (8 if block > 1024 else 2)


def takes_whole_rows(num_tokens: int, padded: int, order: Order, num_sms: int) -> bool:
    """Whether the kernel that arranges has no loop over the blocks of a row of more than 8,192.

    Rows of LONGEST_BLOCK then take 45 to 64 registers and not 92 (``compile_launch`` for sm_90), so
    that an SM holds two programs. That gains where there are more tokens than SMs: 4096x14336 of
    Q4_K takes 54.2 us for 56.6 by 256 tokens, 52.1 for 54.5 by 192 and 106 for 109 by 512
    (``bench.timing.Replay`` of ``gemm_quant``, both in one run on an H200, ed6a981 and a copy that
    does so from 65 tokens on); 172 for 184 by 1,024 and 343 for 376 by 2,048 (``bench.run``,
    5f7c1b1 and 15d0366). By fewer it gains nothing there, 31.5 us for 31.2 by 128 (``bench.run
    gemm_quant``, ed6a981 and that copy), and loses with small_m by 16, 16.5 for 15.6
    (docs/packed-lessons.md).

    Five to eight tokens gain too, where a norm is before the launch: 4096x14336 takes 13.1 us for
    13.8 by eight, 4096x12288 11.6 for 12.2 by eight and 11.5 for 12.1 by five. Shorter rows lose:
    28672x4096 by eight takes 22.3 us for 21.7 (the same). So do four tokens, 12.7 us for 12.4 of
    4096x14336 (``bench.run gemm_quant``, H200, cbdf1ce and a copy of it).
    """
    is_long = LONGEST_BLOCK // 2 < padded <= LONGEST_BLOCK
    return is_long and (num_tokens > num_sms or 4 < num_tokens <= order.interleave == 8)


class Programs(NamedTuple):
    """Programs of the launch that arranges, one for each token.

    Attributes:
        block: elements of the token that a program holds at a time.
        warps: warps of a program.
        is_whole: a block holds the token, and there is no loop.
    """

    block: int
    warps: int
    is_whole: bool


def programs_of(num_tokens: int, padded: int, order: Order, num_sms: int) -> Programs:
    """How a launch arranges tokens of ``padded`` elements.

    By 9 to 16 tokens small_m gains by programs of four warps without a loop, on rows of up to
    8,192, half a LONGEST_BLOCK. By 16 tokens 6144x4096 takes 8.1 us for 8.8 of Q4_0 and 9.7 for
    11.5 of IQ4_XS, 4096x4096 of Q4_K 6.7 for 6.9, 2048x2048 3.8 for 4.3, 8192x8192 of Q4_0 14.8 for
    15.0; 5120x5120 and 3072x3072 take as long as before, and by 12 tokens 6144x4096 of Q4_K 8.74
    for 8.66. Eight warps gain less, 8.2 us for 6144x4096 of Q4_0 and 11.2 of IQ4_XS, and sixteen
    lose, 15.4 for 8192x8192. Most likely less of an SM is then taken from the product: a program
    has 8,192 registers by rows of 4,096, where eight warps with the loop have 14,080
    (``compile_launch`` for sm_90). By eight tokens and fewer nothing changes by more than 1 %
    (``bench.timing.Replay`` of ``gemm_quant`` with each in turns, H200, copies of 92350cf).
    """
    block, warps = block_and_warps(padded)
    if order.interleave > 8 and padded <= LONGEST_BLOCK // 2:
        return Programs(block, min(warps, 4), True)
    return Programs(block, warps, takes_whole_rows(num_tokens, padded, order, num_sms))


def arrange(a: Tensor, order: Order) -> Arranged:
    """Activations [m, k] in an order.

    Returns:
        x, a step being [product, word]. Or of interleaved tokens x and sums as [32 elements,
        token].
    """
    num_tokens, num_weights = a.shape
    to = room_for(num_tokens, num_weights, a.device, order, splits_k=True)
    padded = to.x.shape[1]
    if order.by_blocks:
        _arrange_blocks_kernel.launch(
            (cdiv(padded, PART.value), num_tokens),
            x_ptr=to.x,
            sums_ptr=to.sums,
            factor_ptr=to.factor,
            a_ptr=a,
            stride_a_token=a.stride(0),
            num_weights=num_weights,
            num_padded=padded,
            COLUMNS=order.words // order.halves,
            HALVES=order.halves,
            INTERLEAVE=order.interleave,
            SUMS=order.sums,
            EARLY=order.early,
            num_warps=4,
        )
        return to
    programs = programs_of(num_tokens, padded, order, gpu_of(a.device).num_sms)
    _arrange_kernel.launch(
        (num_tokens,),
        x_ptr=to.x,
        sums_ptr=to.sums,
        factor_ptr=to.factor,
        tickets_ptr=to.tickets,
        a_ptr=a,
        stride_a_token=a.stride(0),
        num_weights=num_weights,
        num_padded=padded,
        COLUMNS=order.words // order.halves,
        HALVES=order.halves,
        INTERLEAVE=order.interleave,
        SUMS=order.sums,
        EARLY=order.early,
        BLOCK_K=programs.block,
        WHOLE=programs.is_whole,
        num_warps=programs.warps,
    )
    return to


class Tokens:
    """Activations [m, k] of one call's products, arranged once in each order that these take.

    Attributes:
        like: a tensor of their shape, dtype and device.
    """

    def __init__(self, like: Tensor) -> None:
        self.like = like
        self._arranged: dict[Order, Arranged] = {}

    def values(self) -> Tensor:
        """The activations themselves."""
        return self.like

    def open(self) -> tuple[Tensor, Squares | None]:
        """The activations, up to what a norm of them is yet to be divided by."""
        return self.values(), None

    def arranged(self, order: Order) -> Arranged:
        """The activations in an order."""
        if order not in self._arranged:
            self._arranged[order] = self._arrange(order)
        return self._arranged[order]

    def _arrange(self, order: Order) -> Arranged:
        return arrange(self.values(), order)
