"""Dense products of few tokens: as long as the weights are read, and no longer.

y[m, n] = Σₖ a[m, k] · b[n, k], float32 sums, rounded once or, for logits, not at all. cuBLAS takes
what is left: float32, more than 64 tokens, and shapes and GPUs where it was faster.

* ``"mma"``: tensor cores that are fed from memory. ``mma.m16n8k8`` sums over the four threads of a
  quad and does not care which columns of K they have, as long as a and b have the same. So a thread
  takes eight that follow each other, 16 bytes, of a row of b and of a. In the registers that they
  were loaded to, two words of b are an operand as they lie: 16 rows to the instruction, in truth
  eight and two pairs of columns of each. Of its sums the half is kept whose pair met its own of a.
  Nothing is moved, so that registers are loaded again as soon as they were multiplied. The warps of
  a program share K, and their sums are added up once, at its end.
* ``"matvec"``: multiply-adds of threads that lie along K, for any alignment.
* ``"tiles"``: tensor cores that are fed from shared memory, the only path of more than eight
  tokens: :mod:`ferrum_triton.kernels.linear_tiles`.

Here b may be what the launch before writes, unlike packed weights. So nothing is read before the
PDL wait, but the first lines of b are asked for into L2. That is safe whoever writes them: L2 is
where all SMs see the same bytes.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ferrum_triton.kernels.elementwise import activated, gated_split
from ferrum_triton.kernels.jit import can_overlap, kernel
from ferrum_triton.kernels.linear_config import MOST_IN_TILES, MOST_TOKENS, gemm_config
from ferrum_triton.kernels.linear_tiles import partial_products, product_of_tiles
from ferrum_triton.kernels.parameters import Config
from ferrum_triton.kernels.pdl import pdl_trigger, pdl_wait, prefetch_l2
from ferrum_triton.kernels.quant.planes import STREAM, is_aligned, load_one, load_words, uses_ptx
from ferrum_triton.kernels.quant.thread_sums import summed_over_warps
from ferrum_triton.kernels.rows import cdiv
from ferrum_triton.ops import linear as ops

# Columns that a quad takes at a time.
QUAD = tl.constexpr(32)
# Bytes of what L2 is asked for at a time.
LINE = 128

_CONSTRAINTS = tl.constexpr("=f,=f,=f,=f,r,r,r,f,f,f,f")


@triton.jit
def _prefetch_rows(b_ptr, row, num_cols, stride_b_row, LINES: tl.constexpr, PER_LINE: tl.constexpr):
    """Ask for the first LINES lines of rows, int64 [rows], to be brought to L2."""
    column = tl.minimum(tl.arange(0, LINES) * PER_LINE, num_cols - 1)
    prefetch_l2(b_ptr + row[:, None] * stride_b_row + column[None, :])


@kernel(dynamic=("num_rows",))
def _matvec_kernel(
    y_ptr,  # [m, n]
    a_ptr,  # [m, k]
    b_ptr,  # [n, k]
    stride_y_token,
    stride_a_token,
    stride_b_row,
    num_cols,
    num_rows,
    TOKENS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    LINES: tl.constexpr,
    PER_LINE: tl.constexpr,
    PDL: tl.constexpr,
):
    first = tl.program_id(0).to(tl.int64) * BLOCK_N
    n = first + tl.arange(0, BLOCK_N)
    row = tl.minimum(n, num_rows - 1)
    if LINES > 0:
        _prefetch_rows(b_ptr, row, num_cols, stride_b_row, LINES, PER_LINE)
    pdl_wait(PDL)
    pdl_trigger(PDL)

    k = tl.arange(0, BLOCK_K)[None, :]
    b_row = b_ptr + row[:, None] * stride_b_row
    sums = ()
    for _ in tl.static_range(TOKENS):
        sums += (tl.zeros([BLOCK_N, BLOCK_K], tl.float32),)
    b = tl.load(b_row + k, mask=k < num_cols, other=0.0, eviction_policy="evict_first")
    for begin in range(0, num_cols, BLOCK_K):
        later = begin + BLOCK_K + k
        ahead = tl.load(
            b_row + later, mask=later < num_cols, other=0.0, eviction_policy="evict_first"
        )
        b = b.to(tl.float32)
        added = ()
        for token in tl.static_range(TOKENS):
            a_row = a_ptr + tl.full((), token, tl.int64) * stride_a_token + begin
            a = tl.load(a_row + k, mask=begin + k < num_cols, other=0.0).to(tl.float32)
            added += (tl.fma(b, tl.broadcast_to(a, [BLOCK_N, BLOCK_K]), sums[token]),)
        sums = added
        b = ahead

    for token in tl.static_range(TOKENS):
        y = tl.sum(sums[token], axis=1)
        y_row = y_ptr + tl.full((), token, tl.int64) * stride_y_token
        tl.store(y_row + n, y.to(y_ptr.dtype.element_ty), mask=n < num_rows)


@triton.jit
def _eight(ptr, mask, PTX: tl.constexpr, HINT: tl.constexpr):
    """Eight values that follow each other, 0 where masked off, as four words of two.

    A word is an int32 by PTX, and elsewhere a tuple of two float32.
    """
    if PTX:
        words = load_words(ptr.to(tl.pointer_type(tl.int32)), mask, 4, PTX, HINT)
    else:
        words = ()
        for i in tl.static_range(4):
            low, high = load_one(ptr + 2 * i, mask), load_one(ptr + 2 * i + 1, mask)
            words += ((low.to(tl.float32), high.to(tl.float32)),)
    return words


@triton.constexpr_function
def _mma_asm(dtype):
    """PTX: a product of tensor cores, 16 rows by 8 tokens over 8 columns."""
    name = {"fp16": "f16", "bf16": "bf16"}[dtype.name]
    return (
        f"mma.sync.aligned.m16n8k8.row.col.f32.{name}.{name}.f32 "
        "{$0, $1, $2, $3}, {$4, $5}, {$6}, {$7, $8, $9, $10};"
    )


@triton.jit
def _mma(sums, b, b_next, a, DTYPE: tl.constexpr, PTX: tl.constexpr):
    """sums plus the products of two words of b, as rows eight apart, with one of a.

    Args:
        sums: float32 [threads], two tokens' of the first row, and of the second.
        b, b_next, a: words of :func:`_eight`.
    """
    if PTX:
        ASM: tl.constexpr = _mma_asm(DTYPE)
        sums = tl.inline_asm_elementwise(
            ASM,
            _CONSTRAINTS,
            (b, b_next, a, sums[0], sums[1], sums[2], sums[3]),
            dtype=(tl.float32, tl.float32, tl.float32, tl.float32),
            is_pure=True,
            pack=1,
        )
    else:
        first, second = _sums_of_quads(b, a), _sums_of_quads(b_next, a)
        sums = (
            sums[0] + first[0],
            sums[1] + first[1],
            sums[2] + second[0],
            sums[3] + second[1],
        )
    return sums


@triton.jit
def _sums_of_quads(b, a):
    """What an instruction gives a thread of one of its rows: two tokens' sums over the quad."""
    WARPS: tl.constexpr = b[0].shape[0] // 32
    total = tl.zeros([WARPS, 8, 8], tl.float32)  # rows by tokens
    for i in tl.static_range(2):
        product = tl.reshape(b[i], [WARPS, 8, 1, 4]) * tl.reshape(a[i], [WARPS, 1, 8, 4])
        total += tl.sum(product, axis=3)
    return tl.split(tl.reshape(total, [32 * WARPS, 2]))


@triton.jit
def _add_products(sums, b, a, DTYPE: tl.constexpr, PTX: tl.constexpr):
    """sums plus the products of eight rows by eight tokens over a warp's columns.

    Args:
        sums: eight float32 [threads]: four of products with even words of a, then four with odd
            ones. The first two and the last two are kept, in which a word of a met its own of b:
            sums of the thread's row and two tokens.
        b, a: the thread's :func:`_eight` of each.
    """
    even, odd = (sums[0], sums[1], sums[2], sums[3]), (sums[4], sums[5], sums[6], sums[7])
    for i in tl.static_range(0, 4, 2):
        even = _mma(even, b[i], b[i + 1], a[i], DTYPE, PTX)
        odd = _mma(odd, b[i], b[i + 1], a[i + 1], DTYPE, PTX)
    return even + odd


@triton.jit
def _load_columns(
    a_row,
    b_row,
    column,
    num_cols,
    GROUPS: tl.constexpr,
    MASKED: tl.constexpr,
    PTX: tl.constexpr,
):
    """What a thread multiplies at a time: its :func:`_eight` of a and of each group of rows."""
    if MASKED:
        mask = column < num_cols
    else:
        mask = None
    found = ()
    for group in tl.static_range(GROUPS):
        found += (_eight(b_row[group] + column, mask, PTX, STREAM),)
    found += (_eight(a_row + column, mask, PTX, ""),)
    return found


@triton.jit
def _add_columns(sums, columns, GROUPS: tl.constexpr, DTYPE: tl.constexpr, PTX: tl.constexpr):
    """sums of each group of rows plus the products of what was loaded."""
    added = ()
    for group in tl.static_range(GROUPS):
        added += (_add_products(sums[group], columns[group], columns[GROUPS], DTYPE, PTX),)
    return added


@triton.jit
def totals_of_rows(
    a_ptr,
    b_ptr,
    stride_a_token,
    stride_b_row,
    first,
    num_cols,
    num_rows,
    num_tokens,
    HALVES: tl.constexpr,
    BLOCK_N: tl.constexpr,
    DEPTH: tl.constexpr,
    LINES: tl.constexpr,
    PER_LINE: tl.constexpr,
    MASKED: tl.constexpr,
    PTX: tl.constexpr,
    WARPS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Products of a program's BLOCK_N rows of b and up to eight tokens, added up over warps.

    Of two HALVES the program has the same rows of each, ``num_rows`` apart. It waits for the launch
    before, once the first lines of b were asked for.

    Returns:
        float32 [32 · BLOCK_N / 4], the sums of a lane beside each other: of each eight rows that of
        lane // 4, tokens lane % 4 · 2 and the next.
    """
    GROUPS: tl.constexpr = BLOCK_N // 8
    ROWS: tl.constexpr = BLOCK_N // HALVES
    DTYPE: tl.constexpr = b_ptr.dtype.element_ty
    last = num_rows - 1
    if LINES > 0:
        i = tl.arange(0, BLOCK_N)
        row = tl.minimum(first + i % ROWS, last) + i // ROWS * num_rows
        _prefetch_rows(b_ptr, row, num_cols, stride_b_row, LINES, PER_LINE)
    pdl_wait(PDL)
    pdl_trigger(PDL)

    i = tl.arange(0, 32 * WARPS)
    warp, quad, thread = i // 32, i // 4 % 8, i % 4
    # Rows past the last are its again, and so are tokens: neither is stored.
    b_row = ()
    none = tl.zeros([32 * WARPS], tl.float32)
    sums = ()
    for group in tl.static_range(GROUPS):
        row = tl.minimum(first + group * 8 % ROWS + quad, last) + group * 8 // ROWS * num_rows
        b_row += (b_ptr + row * stride_b_row,)
        sums += ((none, none, none, none, none, none, none, none),)
    a_row = a_ptr + tl.minimum(quad, num_tokens - 1).to(tl.int64) * stride_a_token
    SPAN: tl.constexpr = WARPS * DEPTH * QUAD
    column = warp * (DEPTH * QUAD) + thread * 8
    window = ()
    for d in tl.static_range(DEPTH):
        at = column + d * QUAD
        window += (_load_columns(a_row, b_row, at, num_cols, GROUPS, MASKED, PTX),)
    for begin in range(SPAN, num_cols, SPAN):
        # Registers that were multiplied are loaded again at once.
        later = ()
        for d in tl.static_range(DEPTH):
            sums = _add_columns(sums, window[d], GROUPS, DTYPE, PTX)
            at = begin + column + d * QUAD
            later += (_load_columns(a_row, b_row, at, num_cols, GROUPS, MASKED, PTX),)
        window = later
    for d in tl.static_range(DEPTH):
        sums = _add_columns(sums, window[d], GROUPS, DTYPE, PTX)
    totals = ()
    for group in tl.static_range(GROUPS):
        of_row = sums[group]
        totals += (of_row[0] + of_row[6], of_row[1] + of_row[7])
    return summed_over_warps(totals, 2 * GROUPS)


@triton.jit
def activated_halves(y, ACTIVATION: tl.constexpr):
    """activation(gate) · up of :func:`totals_of_rows` of two halves: half the sums of each lane."""
    PER_LANE: tl.constexpr = y.shape[0] // 64
    halves = tl.reshape(y, [32, 2, PER_LANE])
    gate, up = tl.split(tl.permute(halves, [0, 2, 1]))
    return tl.reshape(activated(gate, ACTIVATION) * up, [32 * PER_LANE])


@triton.jit
def tokens_and_rows(first, PER_LANE: tl.constexpr):
    """What each of a lane's PER_LANE sums is of: a token, and a row of ``first`` on."""
    j = tl.arange(0, 32 * PER_LANE)
    lane, j = j // PER_LANE, j % PER_LANE
    return lane % 4 * 2 + j % 2, first + j // 2 * 8 + lane // 4


@kernel(dynamic=("num_rows", "num_tokens"))
def _mma_kernel(
    y_ptr,  # [m, n]
    a_ptr,  # [m, k]
    b_ptr,  # [n, k]
    stride_y_token,
    stride_a_token,
    stride_b_row,
    num_cols,  # a multiple of 8
    num_rows,  # of y; of b twice as many with ACTIVATION
    num_tokens,  # at most 8
    ACTIVATION: tl.constexpr,  # y = activation(gate) * up, of b's first rows and second; or ""
    BLOCK_N: tl.constexpr,  # rows of b, a multiple of 8; of 16 with ACTIVATION
    DEPTH: tl.constexpr,  # loads of each row in flight
    LINES: tl.constexpr,
    PER_LINE: tl.constexpr,
    MASKED: tl.constexpr,  # whether the last step has columns past the end
    PTX: tl.constexpr,
    WARPS: tl.constexpr,
    PDL: tl.constexpr,
):
    HALVES: tl.constexpr = 1 if ACTIVATION == "" else 2
    first = tl.program_id(0).to(tl.int64) * (BLOCK_N // HALVES)
    y = totals_of_rows(
        a_ptr,
        b_ptr,
        stride_a_token,
        stride_b_row,
        first,
        num_cols,
        num_rows,
        num_tokens,
        HALVES,
        BLOCK_N,
        DEPTH,
        LINES,
        PER_LINE,
        MASKED,
        PTX,
        WARPS,
        PDL,
    )
    if ACTIVATION != "":
        y = activated_halves(y, ACTIVATION)
    token, n = tokens_and_rows(first, BLOCK_N // HALVES // 4)
    y_at = y_ptr + token.to(tl.int64) * stride_y_token + n
    tl.store(y_at, y.to(y_ptr.dtype.element_ty), mask=(token < num_tokens) & (n < num_rows))


def is_in_units(a: Tensor, b: Tensor) -> bool:
    """Whether rows of both are whole units of 16 bytes, and lie at multiples of them."""
    return a.shape[1] * a.element_size() % 16 == 0 and is_aligned(a) and is_aligned(b)


def product(a: Tensor, b: Tensor, config: Config, y: Tensor, activation: str = "") -> None:
    """y ← a · bᵀ for up to MOST_IN_TILES tokens of 16 bits, by the kernel of a launch choice.

    With ``activation``, for "mma" alone, y ← activation(gate) · up of the product's halves.
    """
    if config["path"] == "tiles":
        product_of_tiles(a, b, config, y)
        return
    (num_tokens, num_cols), num_rows = a.shape, y.shape[1]
    grid = (cdiv(b.shape[0], config["BLOCK_N"]),)
    arguments = {
        "y_ptr": y,
        "a_ptr": a,
        "b_ptr": b,
        "stride_y_token": y.stride(0),
        "stride_a_token": a.stride(0),
        "stride_b_row": b.stride(0),
        "num_cols": num_cols,
        "num_rows": num_rows,
    }
    if config["path"] == "mma":
        _mma_kernel.launch(
            grid,
            ACTIVATION=activation,
            num_tokens=num_tokens,
            **arguments,
            **mma_options(config, a, b),
        )
    else:
        _matvec_kernel.launch(grid, **arguments, TOKENS=num_tokens, **_options(config, b))


def _options(config: Config, b: Tensor) -> Config:
    """What a launch choice says to a kernel that asks for lines of b ahead."""
    options = {name: value for name, value in config.items() if name != "path"}
    if not can_overlap(b.device):
        options["LINES"] = 0
    return options | {"PER_LINE": LINE // b.element_size()}


def mma_options(config: Config, a: Tensor, b: Tensor) -> Config:
    """What a launch choice of path ``"mma"`` says to a kernel over :func:`totals_of_rows`."""
    span = config["num_warps"] * config["DEPTH"] * QUAD.value
    return _options(config, b) | {
        "MASKED": a.shape[1] % span != 0,
        "PTX": uses_ptx(a),
        "WARPS": config["num_warps"],
    }


def mma_choice(a: Tensor, b: Tensor) -> Config | None:
    """The launch of a product of few tokens that multiplies from memory; None of another path."""
    (num_tokens, num_cols), num_rows = a.shape, b.shape[0]
    if not 0 < num_tokens <= MOST_TOKENS or a.dtype == torch.float32 or 0 in (num_cols, num_rows):
        return None
    config = gemm_config.pick(a.device, is_in_units(a, b), num_tokens, num_rows, num_cols)
    return config if config["path"] == "mma" else None


@ops.gemm.impl("triton")
def gemm(a: Tensor, b: Tensor, wide: bool = False, *, out: Tensor | None = None) -> Tensor:
    (num_tokens, num_cols), num_rows = a.shape, b.shape[0]
    few = 0 < num_tokens <= MOST_IN_TILES and a.dtype != torch.float32
    if not few or num_cols == 0 or num_rows == 0:
        return ops.gemm.impls["blas"](a, b, wide, out=out)
    config = gemm_config.pick(a.device, is_in_units(a, b), num_tokens, num_rows, num_cols)
    if config["path"] == "blas":
        return ops.gemm.impls["blas"](a, b, wide, out=out)
    dtype = torch.float32 if wide else a.dtype
    y = a.new_empty((num_tokens, num_rows), dtype=dtype) if out is None else out
    product(a, b, config, y)
    return y


def product_in_parts(a: Tensor, b: Tensor) -> Tensor:
    """a · bᵀ as float32 [splits, m, n], in as many parts as its launch leaves."""
    (num_tokens, num_cols), num_rows = a.shape, b.shape[0]
    if 0 < num_tokens <= MOST_IN_TILES and a.dtype != torch.float32 and num_cols:
        config = gemm_config.pick(a.device, is_in_units(a, b), num_tokens, num_rows, num_cols)
        if config["path"] == "tiles":
            return partial_products(a, b, config)
    return gemm(a, b, wide=True)[None]


@ops.gemm_gate_up_silu.impl("triton")
def gemm_gate_up_silu(
    a: Tensor, b: Tensor, activation: str = "silu", *, out: Tensor | None = None
) -> Tensor:
    y = a.new_empty((a.shape[0], b.shape[0] // 2)) if out is None else out
    config = mma_choice(a, b)
    if config is not None and config["BLOCK_N"] % 16 == 0:
        product(a, b, config, y, activation)
        return y
    return gated_split(gemm(a, b, wide=True), activation, y)
