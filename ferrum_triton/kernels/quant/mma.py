"""Activations by weights in planes, on tensor cores: one program per tile of the product.

Rows of W [n, k] are in planes (:mod:`ferrum_triton.quant.planes`), and K is taken in the steps of
:mod:`ferrum_triton.kernels.quant.mma_steps`.

Weights are the tensor cores' first operand, from registers, and tokens the second: a tile takes 64
or 128 rows of W and 8 to 256 tokens.

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

from ferrum_triton.kernels.jit import can_overlap, capability, kernel
from ferrum_triton.kernels.quant.activations import arrange
from ferrum_triton.kernels.quant.descriptors import (
    Descriptors,
    describe_activations,
    describe_planes,
    words_of,
)
from ferrum_triton.kernels.quant.fragments import CODES
from ferrum_triton.kernels.quant.mma_operands import block_scales, described_operands, operands
from ferrum_triton.kernels.quant.mma_steps import add_step
from ferrum_triton.kernels.quant.planes import row_sizes
from ferrum_triton.kernels.rows import cdiv
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
        described: tiles come through tensor descriptors, on GPUs of capability 9.0.
        look: steps from one to that whose first plane is asked for into L2 meanwhile; 0 for none.
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
    described: bool = False
    look: int = 0


@triton.jit
def _prefetch(ptr):
    """Ask for the lines at ``ptr``, int32 pointers, to be brought to L2."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [ptr.to(tl.int64)], dtype=tl.int32,
        is_pure=False, pack=1,
    )  # fmt: skip


@kernel(dynamic=("num_tokens",))
def _mma_quant_kernel(
    y_ptr,  # [m, n]; of splits float32 [splits, m, n]
    x_ptr,  # [m, padded k]
    sums_ptr,  # [m, padded k / 8]
    factor_ptr,  # [m]
    planes_ptr,  # [n, row_bytes]
    w_desc,  # of describe_planes, or None
    h_desc,
    s_desc,
    d_desc,
    x_desc,  # of describe_activations, or None
    sums_desc,
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
    LOOK: tl.constexpr,
):
    # Programs that share rows of W run side by side.
    tiles_m = tl.cdiv(num_tokens, BLOCK_M)
    m = (tl.program_id(0) % tiles_m).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = (tl.program_id(0) // tiles_m).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    # Past the end the last row and token are read again.
    row, token = tl.minimum(n, num_rows - 1), tl.minimum(m, num_tokens - 1)
    at = operands(
        planes_ptr, x_ptr, sums_ptr, q_row, h_row, s_row, t_row, d_row, stride_x_token, row,
        token, num_rows, BITS, SCALES, MINS, BLOCK_W, PARTS,
    )  # fmt: skip
    at = described_operands(
        at, w_desc, h_desc, s_desc, d_desc, None, None, None, None, x_desc, sums_desc,
        tl.program_id(0) // tiles_m * BLOCK_N, 0, 0, tl.program_id(0) % tiles_m * BLOCK_M,
    )  # fmt: skip
    steps = tl.cdiv(num_words, BLOCK_W)
    per_split = tl.cdiv(steps, SPLITS)
    begin = tl.program_id(1) * per_split
    end = tl.minimum(begin + per_split, steps)
    W_COLS: tl.constexpr = words_of(BITS, BLOCK_W)
    lines = planes_ptr.to(tl.pointer_type(tl.int32)) + row * q_row * 4
    if AHEAD > 0:
        # Weights were there before the kernel that arranges the activations was launched.
        ahead = tl.minimum(begin * W_COLS + tl.arange(0, AHEAD) * 32, steps * W_COLS - 32)
        _prefetch(lines[:, None] + ahead[None, :])
        gdc_wait()

    d, d_min = block_scales(at, d_row, 0, tl.minimum(begin, steps - 1), BLOCK_W, MINS, LATE)
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    none = tl.full((), 0, tl.int64)
    for step in range(begin, end):
        if LOOK > 0:
            _prefetch(lines + tl.minimum(step + LOOK, steps - 1) * W_COLS)
        acc, d, d_min = add_step(
            acc, d, d_min, at, q_row, h_row, s_row, t_row, d_row, none, step, 0,
            tl.minimum(step + 1, steps - 1), num_words, BITS, OFFSET, SCALES, MINS, ASM,
            CONSTRAINTS, BLOCK_W, PARTS, LATE, WHOLE,
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


def codes_meta(kind: str, device: torch.device) -> dict[str, Any]:
    """What is constant in a kernel that unpacks a kind into fragments."""
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
    }


def is_late(kind: str, config: Config) -> bool:
    """Whether d is taken after the product; powers of two are beyond float16 before it."""
    scales = CODES[file_kind(kind)].scales
    return scales == "power" or (config.late and scales != "")


def tile_meta(kind: str, config: Config, k: int, device: torch.device) -> dict[str, Any]:
    """What is constant in a kernel of :func:`add_step`, and its options."""
    return {
        **codes_meta(kind, device),
        "BLOCK_N": config.rows,
        "BLOCK_M": config.tokens,
        "BLOCK_W": config.words,
        "PARTS": max(config.parts, halves_of(kind)),
        "LATE": is_late(kind, config),
        "WHOLE": k % (8 * config.words) == 0,
        "num_warps": config.warps,
        "num_stages": config.stages,
        **({"maxnreg": config.registers} if config.registers else {}),
    }


def described_activations(x: Tensor, sums: Tensor, kind: str, config: Config) -> Descriptors:
    """Descriptors of what ``arrange`` returned, as :func:`add_step` reads it."""
    codes = CODES[file_kind(kind)]
    with_sums = is_late(kind, config) and codes.mins
    parts = max(config.parts, halves_of(kind))
    return describe_activations(x, sums, config.tokens, config.words, parts, with_sums)


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
    ahead = config.ahead if can_overlap(a.device) else 0
    x, sums, factor = arrange(a, config.words, halves_of(kind), ahead > 0)
    splits = config.splits
    partial = y
    if splits > 1:
        partial = torch.empty((splits, *y.shape), dtype=torch.float32, device=a.device)
    options = {"launch_pdl": True} if ahead else {}
    described: Descriptors = (None,) * 6
    if config.described:
        described = describe_planes(planes[None], sizes, kind, k, config.words, config.rows)
        described += described_activations(x, sums, kind, config)
    _mma_quant_kernel.launch(
        (cdiv(num_tokens, config.tokens) * cdiv(num_rows, config.rows), splits),
        partial,
        x,
        sums,
        factor,
        planes,
        *described,
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
        LOOK=config.look if capability(a.device) >= (8, 0) else 0,
        **options,
    )
    if splits > 1:
        block = 1024
        _add_splits_kernel.launch(
            (num_tokens, cdiv(num_rows, block)),
            y,
            partial,
            y.stride(0),
            num_rows,
            partial.stride(0),
            SPLITS=splits,
            BLOCK=block,
        )
    return y
