"""Weights in GGUF's packed blocks: decoding them, looking rows up, multiplying by them.

``kind`` names the format (:data:`ferrum_triton.quant.FORMATS`), and packed rows are read as the
file stores them: a row of K weights has K / block_size blocks and may start at any byte. With
``":planes"`` behind the name a matrix of them is in planes (:mod:`ferrum_triton.quant.planes`),
which kernels read faster; it is contiguous and starts at a multiple of 16 bytes.
"""

from dataclasses import replace

import torch
from torch import Tensor

from ferrum_triton.ops.precision import widen
from ferrum_triton.quant import FORMATS, dequantize_rows, quantize_rows
from ferrum_triton.quant.kinds import KINDS, file_kind, format_of, is_kind, take_rows
from ferrum_triton.quant.planes import PLANE_FORMATS, ROW_ALIGN, has_part_of_rows
from ferrum_triton.registry import Case, Op, op

MAX_GEMV_ROWS = 8

SHAPES = ((4096, 4096), (28672, 4096), (4096, 14336))
OTHER_SHAPES = [(n, k) for n in (1024, 2560, 29568) for k in (3584, 5120, 8192)] + [
    (n, 4096) for n in (6144, 8192, 14336)
]
# Products of an MLP in Qwen3-8B, Qwen3-32B and Llama-3-70B, up and down, and of attention.
MODEL_SHAPES = (
    (5120, 5120),
    (12288, 4096),
    (4096, 12288),
    (25600, 5120),
    (5120, 25600),
    (8192, 28672),
)


def case_name(kind: str) -> str:
    """``kind`` in a case's id: ``q4_K`` in planes, ``file/q4_K`` as files store it."""
    name = file_kind(kind)
    family, _, rest = name.partition("_")
    name = f"{family.lower()}_{rest}" if rest in ("0", "1", "K") else name.lower()
    return name if kind in PLANE_FORMATS else f"file/{name}"


def product_case(kind: str, m: int, n: int, k: int) -> Case:
    """m rows of a by W [n, k]."""
    axes = {"kind": kind, "m": m, "n": n, "num_blocks": k // format_of(kind).block_size}
    return Case(f"{case_name(kind)}/n{n}k{k}/m{m}", torch.bfloat16, axes)


def _gptq_case(m: int, n: int, k: int) -> Case:
    """A product with integers of four bits in groups of 128, as they are laid out."""
    case = product_case("Q4_0:planes", m, n, k)
    return replace(case, id=f"int4g128/n{n}k{k}/m{m}", op="gemm_gptq")


def pack_sample(make, kind: str, num_rows: int, num_blocks: int) -> Tensor:
    """Rows of random weights, packed; their products with normal activations are of order 1."""
    k = num_blocks * format_of(kind).block_size
    return quantize_rows(make.randn(num_rows, k, scale=k**-0.5), kind)


def check_kind(
    op: Op, blocks: Tensor, kind: str, blocks_name: str = "blocks", kind_name: str = "kind"
) -> None:
    if not is_kind(kind):
        op.reject(kind_name, repr(kind), ", ".join(KINDS))
    fmt = format_of(kind)
    if not fmt.is_row(blocks.shape[-1]):
        allowed = f"rows of whole {kind} blocks, {fmt.block_bytes} bytes each"
        op.reject(blocks_name, f"of shape {list(blocks.shape)}", allowed)
    if kind in PLANE_FORMATS:
        if blocks.dim() < 2:
            op.reject(blocks_name, f"of shape {list(blocks.shape)}", "a matrix in planes")
        if blocks.numel():
            _check_planes(op, blocks, blocks_name)


def _check_planes(op: Op, blocks: Tensor, name: str) -> None:
    """Reject what is not whole matrices in planes: rows of a matrix are all over its planes."""
    num_rows, row_bytes = blocks.shape[-2:]
    is_apart = num_rows > 1 and blocks.stride(-2) != row_bytes
    starts = [blocks.data_ptr(), *blocks.stride()[:-2]]
    if is_apart or any(start % ROW_ALIGN for start in starts):
        got = f"of strides {list(blocks.stride())} bytes at address {blocks.data_ptr():#x}"
        allowed = f"contiguous matrices at multiples of {ROW_ALIGN} bytes"
        op.reject(name, got, allowed, "Copy it: .clone(memory_format=torch.contiguous_format).")
    if has_part_of_rows(blocks):
        got = f"{num_rows} of the {blocks._base.shape[-2]} rows of a matrix in planes"
        advice = "Cut packed rows before to_planes; planes put into one tensor need a clone each."
        op.reject(name, got, "the whole matrix", advice)


def check_dtype(op: Op, dtype: torch.dtype) -> None:
    if dtype not in (torch.float32, torch.float16, torch.bfloat16):
        op.reject("dtype", str(dtype), "float32, float16, bfloat16")


def check_product(
    op: Op, a: Tensor, blocks: Tensor, kind: str, prefix: str = "", a_name: str = "a"
) -> None:
    """Reject blocks that are none of ``kind``, and activations of another K."""
    check_kind(op, blocks, kind, f"{prefix}blocks", f"{prefix}kind")
    k = format_of(kind).row_weights(blocks.shape[-1])
    if a.shape[-1] != k:
        allowed = f"[m, {k}], the weights in a row of {prefix}blocks"
        op.reject(a_name, f"of shape {list(a.shape)}", allowed)


def check_few(op: Op, a: Tensor, advice: str = "") -> None:
    """Reject more rows than a matrix-vector kernel takes."""
    if a.shape[0] > MAX_GEMV_ROWS:
        allowed = f"at most {MAX_GEMV_ROWS} rows"
        op.reject("a", f"of shape {list(a.shape)}", allowed, advice)


@op(
    tensors={"blocks": "uint8[..., row_bytes]"},
    axes={"kind": KINDS, "num_rows": (0, 1, 2, 5), "num_blocks": (1, 2, 3, 9)},
    bench=[
        Case(
            f"{case_name(kind)}/n4096k4096",
            torch.bfloat16,
            {"kind": kind, "num_rows": 4096, "num_blocks": 4096 // format_of(kind).block_size},
        )
        for kind in KINDS
    ],
)
def dequantize(blocks: Tensor, kind: str, dtype: torch.dtype) -> Tensor:
    """y[..., i] = the i-th weight of each packed row, decoded in float32 and rounded once.

    Args:
        blocks: uint8 [..., row_bytes].
        kind: the blocks' format, e.g. ``"Q4_K"``.
        dtype: float32, float16 or bfloat16. In float32 the result has the bits of ggml's reference.

    Returns:
        [..., K] in ``dtype``. Weights beyond float16's range become infinite there.

    Source: the decoders in :mod:`ferrum_triton.quant.formats`.
    """
    return dequantize_rows(blocks, kind).to(dtype)


@dequantize.rule
def _(blocks, kind, dtype):
    check_kind(dequantize, blocks, kind)
    check_dtype(dequantize, dtype)


@dequantize.sample
def _(make, kind, num_rows, num_blocks):
    return {
        "blocks": pack_sample(make, kind, num_rows, num_blocks),
        "kind": kind,
        "dtype": make.dtype,
    }


@op(
    tensors={"blocks": "uint8[vocab_size, row_bytes]", "ids": "int[...]"},
    axes={
        "kind": KINDS,
        "num_tokens": (0, 1, 2, 7),
        "vocab_size": (19, 1, 2),
        "num_blocks": (1, 2, 5),
    },
    bench=[
        Case(
            f"q8_0/v32000h4096/t{size}",
            torch.bfloat16,
            {"kind": "Q8_0", "num_tokens": size, "vocab_size": 32000, "num_blocks": 128},
        )
        for size in (1, 4096)
    ],
)
def embedding_lookup_quant(blocks: Tensor, ids: Tensor, kind: str, dtype: torch.dtype) -> Tensor:
    """y[i] = row ids[i] of a packed table, decoded; only those rows are read.

    Args:
        blocks: uint8 [vocab_size, row_bytes].
        ids: [...] int32 or int64 on the table's device. An id outside [0, vocab_size) gives a row
            of zeros.
        kind: the table's format.
        dtype: of the result: float32, float16 or bfloat16.

    Returns:
        [..., K] in ``dtype``.
    """
    known = (ids >= 0) & (ids < blocks.shape[0])
    stored = take_rows(blocks, torch.where(known, ids, 0).long().flatten(), kind)
    rows = dequantize_rows(stored, kind)
    rows = rows.view(*ids.shape, rows.shape[-1])
    return torch.where(known[..., None], rows, 0.0).to(dtype)


@embedding_lookup_quant.rule
def _(blocks, ids, kind, dtype):
    check_kind(embedding_lookup_quant, blocks, kind)
    check_dtype(embedding_lookup_quant, dtype)
    if blocks.shape[0] == 0:
        embedding_lookup_quant.reject("blocks", "empty", "at least one row")


@embedding_lookup_quant.sample
def _(make, kind, num_tokens, vocab_size, num_blocks):
    return {
        "blocks": pack_sample(make, kind, vocab_size, num_blocks),
        "ids": make.ints(0, vocab_size, num_tokens),
        "kind": kind,
        "dtype": make.dtype,
    }


@embedding_lookup_quant.traffic
def _(blocks, ids, kind, dtype):
    k = format_of(kind).row_weights(blocks.shape[1])
    return ids.numel() * (ids.element_size() + blocks.shape[1] + k * dtype.itemsize)


def wide_product(a: Tensor, blocks: Tensor, kind: str) -> Tensor:
    """The definition of a product before it is rounded: in float32, or float64 if a is."""
    wide = widen(a)
    return wide @ dequantize_rows(blocks, kind).to(wide.dtype).T


# Tracing decodes no weights, and what it calls instead imports no more of torch.
def _product_fake(a, blocks, kind, wide=False):
    return a.new_empty(a.shape[0], blocks.shape[0], dtype=torch.float32 if wide else a.dtype)


@op(
    tensors={"a": "T[m, k]", "blocks": "uint8[n, row_bytes]"},
    axes={
        "kind": KINDS,
        "m": (0, 1, 2, 3, 8),
        "n": (1, 2, 9),
        "num_blocks": (1, 3, 18),
    },
    bench=[product_case(kind, 1, n, k) for kind in PLANE_FORMATS for n, k in SHAPES]
    + [product_case("Q4_K:planes", 1, n, k) for n, k in OTHER_SHAPES]
    + [product_case(kind, m, 14336, 4096) for kind in FORMATS for m in (1, 4)]
    + [
        product_case(f"{kind}:planes", m, n, k)
        for n, k in MODEL_SHAPES
        for kind, m in (("Q4_K", 1), ("Q6_K", 1), ("Q4_K", 2), ("Q4_K", 5))
    ]
    + [_gptq_case(1, 28672, 4096), _gptq_case(1, 4096, 14336)],
    after_norm="a",
)
def gemv_quant(a: Tensor, blocks: Tensor, kind: str) -> Tensor:
    """y[m, n] = Σₖ a[m, k] · W[n, k] for few rows of a, where reading W takes the time.

    W is decoded exactly and the products are summed in float32, whatever a's dtype. Over planes,
    up to four rows of float16 or bfloat16 are taken as integers of 16 bits, steps of a power of two
    for each 32, or 64 of Q3_K and of Q2_K in long rows, and more rows as in :func:`gemm_quant`; a
    float32 of 2^41 or more counts as infinite. Where an activation is not finite, nor is its row
    of the result.

    Args:
        a: [m, K] with m <= 8.
        blocks: uint8 [n, row_bytes], W's packed rows.
        kind: W's format.

    Returns:
        [m, n] in a's dtype.
    """
    return wide_product(a, blocks, kind).to(a.dtype)


gemv_quant.fake = _product_fake


@gemv_quant.rule
def _(a, blocks, kind):
    check_product(gemv_quant, a, blocks, kind)
    check_few(gemv_quant, a, "gemm_quant takes any number.")


@gemv_quant.sample
def _(make, kind, m, n, num_blocks):
    blocks = pack_sample(make, kind, n, num_blocks)
    return {
        "a": make.randn(m, num_blocks * format_of(kind).block_size),
        "blocks": blocks,
        "kind": kind,
    }


@op(
    tensors={"a": "T[m, k]", "blocks": "uint8[n, row_bytes]"},
    axes={
        "kind": KINDS,
        "m": (0, 9, 1, 40),
        "n": (1, 5, 70),
        "num_blocks": (1, 2, 5),
        "wide": (False, True),
    },
    bench=[
        product_case("Q4_K:planes", m, 28672, 4096)
        for m in (2, 3, 4, 8, 16, 32, 64, 128, 256, 4096)
    ]
    + [product_case("Q4_K:planes", m, 4096, 14336) for m in (4, 8, 16, 32, 64, 128, 256)]
    + [product_case(kind, 2, 4096, 14336) for kind in PLANE_FORMATS]
    + [product_case("Q6_K:planes", m, 28672, 4096) for m in (8, 64, 4096)]
    + [product_case("Q4_K:planes", m, 4096, k) for m in (8, 32) for k in (4096, 12288)]
    + [product_case("Q4_K:planes", m, n, 4096) for m in (64, 128, 256, 512) for n in (4096, 6144)]
    + [product_case("Q6_K:planes", m, 1024, 4096) for m in (32, 64, 128, 256, 512)]
    + [product_case("Q6_K:planes", m, 4096, 14336) for m in (32, 64, 256, 1024)]
    + [product_case("Q4_K:planes", 1024, n, k) for n, k in (*SHAPES, (6144, 4096))]
    + [product_case("Q4_K:planes", 2048, n, k) for n, k in SHAPES[1:]]
    + [product_case("Q4_0:planes", 1024, n, k) for n, k in SHAPES[1:]]
    + [product_case("Q4_K:planes", m, 5120, 17408) for m in (64, 128, 256)]
    + [product_case("Q4_K:planes", m, 34816, 5120) for m in (128, 512)]
    + [
        product_case("Q4_K:planes", m, n, k)
        for m, n, k in ((16, 3584, 18944), (32, 2048, 8192), (32, 14336, 4096))
    ]
    + [
        product_case(f"{kind}:planes", m, n, k)
        for kind in ("Q8_0", "Q5_K", "Q4_Z", "Q4_1", "IQ4_NL")
        for m in (64, 128, 256, 1024)
        for n, k in SHAPES
    ]
    + [product_case(kind, m, 14336, 4096) for kind in FORMATS for m in (16, 2048)]
    + [_gptq_case(m, 28672, 4096) for m in (8, 16, 64, 256, 4096)]
    + [_gptq_case(m, 4096, 14336) for m in (16, 64, 128, 256)]
    # Tiles that tokens do not fill: a token more than whole ones.
    + [product_case("Q4_K:planes", m, 28672, 4096) for m in (9, 65, 129)]
    + [_gptq_case(m, 28672, 4096) for m in (17, 65, 129)],
    after_norm="a",
)
def gemm_quant(a: Tensor, blocks: Tensor, kind: str, wide: bool = False) -> Tensor:
    """y[m, n] = Σₖ a[m, k] · W[n, k] for any number of rows of a.

    W is decoded exactly and, where m > 8, rounded to a's dtype for the tensor cores, over planes to
    float16; sums are in float32. A weight beyond float16's 65504 may then count as infinite, and
    so may one of a group whose scale is 64 or more.

    Args:
        a: [m, K].
        blocks: uint8 [n, row_bytes], W's packed rows.
        kind: W's format.
        wide: return the float32 sums unrounded, as logits want to be.

    Returns:
        [m, n] in a's dtype, or float32 if wide.
    """
    y = wide_product(a, blocks, kind)
    return y if wide else y.to(a.dtype)


gemm_quant.fake = _product_fake


@gemm_quant.rule
def _(a, blocks, kind, wide):
    check_product(gemm_quant, a, blocks, kind)


@gemm_quant.sample
def _(make, kind, m, n, num_blocks, wide=False):
    blocks = pack_sample(make, kind, n, num_blocks)
    return {
        "a": make.randn(m, num_blocks * format_of(kind).block_size),
        "blocks": blocks,
        "kind": kind,
        "wide": wide,
    }


@gemm_quant.flops
def _(a, blocks, kind, wide):
    return 2 * a.shape[0] * a.shape[1] * blocks.shape[0]


def _ended_case(m: int, k: int) -> Case:
    """A layer's last product, which the residual stream is added to."""
    case = product_case("Q4_K:planes", m, 4096, k)
    return replace(case, axes={**case.axes, "ends": "residual"})


@op(
    tensors={
        "a": "T[m, k]",
        "blocks": "uint8[n, row_bytes]",
        "bias": "float[n]",
        "residual": "float[m, n]",
    },
    axes={
        "kind": KINDS,
        "m": (1, 0, 3, 9, 20),
        "n": (1, 5, 70),
        "num_blocks": (1, 3),
        "ends": ("both", "bias", "residual", "none"),
    },
    bench=[_ended_case(m, k) for m in (1, 4, 16) for k in (4096, 14336)],
    after_norm="a",
)
def linear_quant(
    a: Tensor,
    blocks: Tensor,
    kind: str,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """y = a · Wᵀ + bias + residual: a layer's product with what follows it.

    The product is that of :func:`gemm_quant`, and the sum with the others is rounded once. For few
    rows of a over planes it is one launch.

    Args:
        a: [m, K].
        blocks: uint8 [n, row_bytes], W's packed rows.
        kind: W's format.
        bias: [n] in any float dtype, or None.
        residual: [m, n] in any float dtype, or None.

    Returns:
        [m, n] in a's dtype.
    """
    y = wide_product(a, blocks, kind)
    if bias is not None:
        y = y + widen(bias)
    if residual is not None:
        y = y + widen(residual)
    return y.to(a.dtype)


@linear_quant.rule
def _(a, blocks, kind, bias, residual):
    check_product(linear_quant, a, blocks, kind)


@linear_quant.sample
def _(make, kind, m, n, num_blocks, ends):
    return {
        "a": make.randn(m, num_blocks * format_of(kind).block_size),
        "blocks": pack_sample(make, kind, n, num_blocks),
        "kind": kind,
        "bias": make.randn(n) if ends in ("both", "bias") else None,
        "residual": make.randn(m, n) if ends in ("both", "residual") else None,
    }


@linear_quant.flops
def _(a, blocks, kind, bias, residual):
    return 2 * a.shape[0] * a.shape[1] * blocks.shape[0]
