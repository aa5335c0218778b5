"""Products of activations of eight bits with packed weights: llama.cpp's choice of precision.

Each 32 activations have a step of their own, the largest magnitude of them over 127. That adds an
error, in exchange for integer products; the exact ones are in :mod:`quant`.
"""

import torch
from torch import Tensor

from ferrum_triton.ops.norm import rms_norm
from ferrum_triton.ops.precision import widen
from ferrum_triton.ops.quant import (
    MAX_GEMV_ROWS,
    SHAPES,
    check_dtype,
    check_kind,
    pack_sample,
    product_case,
)
from ferrum_triton.quant.kinds import dequantize_rows, format_of
from ferrum_triton.quant.planes import PLANE_FORMATS
from ferrum_triton.registry import Case, Op, op

GROUP = 32  # activations that share a step
# Groups of smaller magnitudes count as zeros: the inverse of their step would be no float32.
LEAST = 2.0**-119
NAN_BITS = 0x7FC00000

ROWS = {"num_tokens": (0, 1, 2, 5), "num_groups": (1, 2, 3, 18)}


def _check_groups(of_op: Op, name: str, x: Tensor) -> None:
    if x.shape[-1] % GROUP:
        got = f"of {x.shape[-1]} columns"
        of_op.reject(name, got, f"a multiple of {GROUP}, which share a step")


@op(
    tensors={"a": "T[m, k]"},
    axes={"m": ROWS["num_tokens"], "num_groups": ROWS["num_groups"]},
    bench=[
        Case(f"bf16/k{k}/m{m}", torch.bfloat16, {"m": m, "num_groups": k // GROUP})
        for k in (4096, 14336)
        for m in (1, 4)
    ],
)
def quantize_q8(a: Tensor) -> tuple[Tensor, Tensor]:
    """codes = a · (127 / max|a|), rounded to the nearest, the maximum being of each 32; and steps.

    A step is max|a| / 127, and an activation its step times its code. What is in float64 is taken
    in float32.

    Args:
        a: [m, K], K a multiple of 32.

    Returns:
        codes: int8 [m, K], of two as near the even one.
        info: int32 [m, K / 32, 2]: the bits of the step as float32, and the sums of the codes of
            the first and of the last 16 in the lower and upper half. Where one of the 32 is not
            finite the step is NaN and the codes are 0; magnitudes all below 2^-119 count as zeros.

    Source: Q8_1 of ggml, with the step in float32 and a sum for each half.
    """
    num_groups = a.shape[1] // GROUP
    groups = a.float().unflatten(1, (num_groups, GROUP))
    largest = groups.abs().amax(-1)
    finite = largest.isfinite()
    counts = finite & (largest >= LEAST)
    inverse = torch.full_like(largest, 127.0) / largest  # a number / tensor would round twice
    scaled = torch.where(counts[..., None], groups * inverse[..., None], 0.0)
    codes = scaled.round().to(torch.int8)
    steps = torch.where(counts, largest / torch.full_like(largest, 127.0), 0.0).view(torch.int32)
    sums = codes.unflatten(-1, (2, GROUP // 2)).sum(-1, dtype=torch.int32)
    halves = sums[..., 0] & 0xFFFF | sums[..., 1] << 16
    return codes.flatten(1), torch.stack((torch.where(finite, steps, NAN_BITS), halves), -1)


@quantize_q8.rule
def _(a):
    _check_groups(quantize_q8, "a", a)


@quantize_q8.sample
def _(make, m, num_groups):
    return {"a": make.randn(m, num_groups * GROUP)}


@op(
    tensors={"x": "T[num_tokens, hidden_size]", "weight": "float[hidden_size]"},
    axes={**ROWS, "weight_dtype": (torch.float32, torch.bfloat16)},
    bench=[
        Case(
            f"bf16/h4096/m{m}",
            torch.bfloat16,
            {"num_tokens": m, "num_groups": 4096 // GROUP, "weight_dtype": torch.bfloat16},
        )
        for m in (1, 4)
    ],
)
def rms_norm_q8(x: Tensor, weight: Tensor, eps: float = 1e-6) -> tuple[Tensor, Tensor]:
    """``quantize_q8`` of y = x / sqrt(mean(x²) + eps) · weight, which is not rounded in between.

    Args:
        x: [num_tokens, hidden_size], hidden_size a multiple of 32; fp32, fp16 or bf16.
        weight: [hidden_size], any float dtype.
        eps: added to the mean square.

    Returns:
        codes and info, as ``quantize_q8(rms_norm_to(x, weight, torch.float32, eps))`` has them.
    """
    return quantize_q8.reference(rms_norm.reference(widen(x), weight, eps))


@rms_norm_q8.rule
def _(x, weight, eps):
    _check_groups(rms_norm_q8, "x", x)


@rms_norm_q8.sample
def _(make, num_tokens, num_groups, weight_dtype=torch.float32):
    return {
        "x": make.randn(num_tokens, num_groups * GROUP),
        "weight": make.weight(num_groups * GROUP, dtype=weight_dtype),
    }


@op(
    tensors={
        "codes": "int8[m, k]",
        "info": "int32[m, groups, 2]",
        "blocks": "uint8[n, row_bytes]",
    },
    axes={
        "kind": tuple(PLANE_FORMATS),
        "m": (0, 1, 2, 3, 8),
        "n": (1, 2, 9),
        "num_blocks": (1, 3, 18),
    },
    bench=[product_case(kind, 1, n, k) for kind in PLANE_FORMATS for n, k in SHAPES]
    + [product_case("Q4_K:planes", m, 28672, 4096) for m in (2, 4)],
    after_norm="codes",
)
def gemv_quant_q8(
    codes: Tensor, info: Tensor, blocks: Tensor, kind: str, dtype: torch.dtype
) -> Tensor:
    """y[m, n] = Σₖ step[m, k / 32] · codes[m, k] · W[n, k] for few rows, summed in float32.

    Args:
        codes: int8 [m, K] with m <= 8, of :func:`quantize_q8`.
        info: int32 [m, K / 32, 2], beside them. The sums have to be those of the codes.
        blocks: uint8 [n, row_bytes], W's rows in planes.
        kind: their kind, such as ``"Q4_K:planes"``.
        dtype: of the result: float32, float16 or bfloat16.

    Returns:
        [m, n] in ``dtype``.
    """
    steps = info[..., 0].contiguous().view(torch.float32)
    a = (steps[..., None] * codes.unflatten(1, (info.shape[1], GROUP))).flatten(1)
    return (a @ dequantize_rows(blocks, kind).T).to(dtype)


@gemv_quant_q8.rule
def _(codes, info, blocks, kind, dtype):
    if kind not in PLANE_FORMATS:
        gemv_quant_q8.reject("kind", repr(kind), ", ".join(PLANE_FORMATS))
    check_kind(gemv_quant_q8, blocks, kind)
    check_dtype(gemv_quant_q8, dtype)
    k = format_of(kind).row_weights(blocks.shape[-1])
    if codes.shape[1] != k:
        allowed = f"[m, {k}], the weights in a row of blocks"
        gemv_quant_q8.reject("codes", f"of shape {list(codes.shape)}", allowed)
    if codes.shape[0] > MAX_GEMV_ROWS:
        allowed = f"at most {MAX_GEMV_ROWS} rows"
        gemv_quant_q8.reject("codes", f"of shape {list(codes.shape)}", allowed)
    if info.shape[1] != k // GROUP:
        allowed = f"[m, {k // GROUP}, 2]"
        gemv_quant_q8.reject("info", f"of shape {list(info.shape)}", allowed)


@gemv_quant_q8.sample
def _(make, kind, m, n, num_blocks):
    codes, info = quantize_q8.reference(make.randn(m, num_blocks * format_of(kind).block_size))
    return {
        "codes": codes,
        "info": info,
        "blocks": pack_sample(make, kind, n, num_blocks),
        "kind": kind,
        "dtype": make.dtype,
    }
