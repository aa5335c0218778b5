"""Products with weights in a GGUF file's blocks as shaders, those of experts too, and rows of them.

Kinds without a shader, planes among them, run as their definitions.
"""

import torch
from torch import Tensor

from ferrum_triton.backends.metal.elementwise import grid
from ferrum_triton.backends.metal.shader import LANES, Shader, delivered, result
from ferrum_triton.ops import quant as ops
from ferrum_triton.ops.moe import experts
from ferrum_triton.quant import FORMATS

GEMV = Shader("quant", "gemv_quant", "y x blocks", "num_rows num_groups row_bytes tiles")
_EXPERTS = "num_experts num_rows num_groups row_bytes up_row_bytes tiles slots"
GEMV_EXPERTS = Shader("quant", "gemv_quant_moe_id", "y x blocks ids", _EXPERTS)
GATE_UP_EXPERTS = Shader(
    "quant", "gemv_quant_moe_id_gate_up_silu", "y x gate_blocks up_blocks ids", _EXPERTS
)
DEQUANTIZE = Shader("quant", "dequantize", "y blocks", "count num_groups row_bytes")
EMBEDDING = Shader(
    "quant", "embedding_quant", "y blocks ids", "count num_groups row_bytes vocab_size"
)
# Formats with a shader.
KINDS = ("Q4_0", "Q4_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")
# Rows of activations up to which each reads the weights for itself; more have them decoded once.
FEW = 8
# Weights at a time; rows that a simdgroup takes; of a threadgroup.
GROUP, ROWS, SIMDGROUPS = 32, 4, 2


def _weights(kind: str) -> str:
    """What the source calls weights of a kind."""
    fmt = FORMATS[kind]
    high, scales = fmt.q.high, fmt.scales
    places = (
        fmt.block_bytes,
        fmt.block_size // GROUP,
        fmt.d.at,
        fmt.m.at if fmt.m else 0,
        fmt.q.low[0].at,
        high.at if high else 0,
        scales.low[0].at if scales else 0,
        fmt.offset,
    )
    return f"Group<{kind}, {', '.join(map(str, places))}>"


def _types(
    scalar: torch.dtype, *kinds: str, ids: torch.dtype = torch.int64
) -> dict[str, torch.dtype | str]:
    """What the source's names stand for."""
    sizes = {"GROUP": GROUP, "ROWS": ROWS, "SIMDGROUPS": SIMDGROUPS}
    return {
        "SCALAR": scalar,
        "ID": ids,
        "WEIGHTS": _weights(kinds[0]),
        "UP_WEIGHTS": _weights(kinds[-1]),
        **{name: str(size) for name, size in sizes.items()},
    }


def _aligned(blocks: Tensor) -> Tensor:
    """Contiguous, and at an even address: kernels read two bytes at once."""
    blocks = blocks.contiguous()
    return blocks.clone() if blocks.storage_offset() % 2 else blocks


def _tiles(num_rows: int) -> int:
    """Threadgroups that share so many rows."""
    return -(-num_rows // (ROWS * SIMDGROUPS))


@ops.dequantize.impl("metal", kinds=KINDS)
def dequantize(
    blocks: Tensor, kind: str, dtype: torch.dtype, *, out: Tensor | None = None
) -> Tensor:
    if kind not in KINDS:
        return delivered(ops.dequantize.reference(blocks, kind, dtype).contiguous(), out)
    k = FORMATS[kind].row_weights(blocks.shape[-1])
    y = result(blocks, (*blocks.shape[:-1], k), out, dtype)
    if y.numel():
        count = y.numel() // GROUP
        params = (count, k // GROUP, blocks.shape[-1])
        DEQUANTIZE.launch(_types(dtype, kind), (y, _aligned(blocks)), params, **grid(count))
    return delivered(y, out)


@ops.gemv_quant.impl("metal", kinds=KINDS)
def gemv_quant(a: Tensor, blocks: Tensor, kind: str, *, out: Tensor | None = None) -> Tensor:
    if kind not in KINDS:
        return delivered(ops.gemv_quant.reference(a, blocks, kind).contiguous(), out)
    (num_tokens, k), num_rows = a.shape, blocks.shape[0]
    y = result(a, (num_tokens, num_rows), out)
    if k == 0:
        y.zero_()
    elif y.numel():
        tiles = _tiles(num_rows)
        params = (num_rows, k // GROUP, blocks.shape[1], tiles)
        buffers = (y, a.contiguous(), _aligned(blocks))
        launch = {"groups": num_tokens * tiles, "threads": LANES * SIMDGROUPS}
        GEMV.launch(_types(a.dtype, kind), buffers, params, **launch)
    return delivered(y, out)


@ops.gemm_quant.impl("metal", kinds=KINDS)
def gemm_quant(
    a: Tensor, blocks: Tensor, kind: str, wide: bool = False, *, out: Tensor | None = None
) -> Tensor:
    a = a.float() if wide else a
    if kind in KINDS and a.shape[0] <= FEW:
        return gemv_quant(a, blocks, kind, out=out)
    return delivered(torch.nn.functional.linear(a, dequantize(blocks, kind, a.dtype)), out)


@ops.embedding_lookup_quant.impl("metal", kinds=KINDS)
def embedding_lookup_quant(
    blocks: Tensor, ids: Tensor, kind: str, dtype: torch.dtype, *, out: Tensor | None = None
) -> Tensor:
    if kind not in KINDS:
        y = ops.embedding_lookup_quant.reference(blocks, ids, kind, dtype).contiguous()
        return delivered(y, out)
    k = FORMATS[kind].row_weights(blocks.shape[1])
    y = result(blocks, (*ids.shape, k), out, dtype)
    if y.numel():
        blocks = _aligned(blocks)
        count = y.numel() // GROUP
        types = _types(dtype, kind, ids=ids.dtype)
        params = (count, k // GROUP, blocks.shape[1], blocks.shape[0])
        EMBEDDING.launch(types, (y, blocks, ids.contiguous()), params, **grid(count))
    return delivered(y, out)


def _launch_experts(
    shader: Shader, y: Tensor, a: Tensor, stacks: tuple[Tensor, ...], ids: Tensor, *kinds: str
) -> None:
    if a.shape[-1] == 0:
        y.zero_()
    elif y.numel():
        gate, up = stacks[0], stacks[-1]
        tiles = _tiles(gate.shape[1])
        params = (
            *gate.shape[:2],
            a.shape[-1] // GROUP,
            gate.shape[2],
            up.shape[2],
            tiles,
            1 if a.dim() == 3 else ids.shape[1],
        )
        buffers = (y, a.contiguous(), *map(_aligned, stacks), ids.contiguous())
        launch = {"groups": ids.numel() * tiles, "threads": LANES * SIMDGROUPS}
        shader.launch(_types(a.dtype, *kinds, ids=ids.dtype), buffers, params, **launch)


@experts.gemv_quant_moe_id.impl("metal", kinds=KINDS)
def gemv_quant_moe_id(
    a: Tensor, blocks: Tensor, ids: Tensor, kind: str, *, out: Tensor | None = None
) -> Tensor:
    if kind not in KINDS:
        return delivered(
            experts.gemv_quant_moe_id.reference(a, blocks, ids, kind).contiguous(), out
        )
    y = result(a, (*ids.shape, blocks.shape[1]), out)
    _launch_experts(GEMV_EXPERTS, y, a, (blocks,), ids, kind)
    return delivered(y, out)


@experts.gemv_quant_moe_id_gate_up_silu.impl("metal", kinds=KINDS)
def gemv_quant_moe_id_gate_up_silu(
    a: Tensor,
    gate_blocks: Tensor,
    up_blocks: Tensor,
    ids: Tensor,
    gate_kind: str,
    up_kind: str,
    *,
    out: Tensor | None = None,
) -> Tensor:
    if gate_kind not in KINDS or up_kind not in KINDS:
        reference = experts.gemv_quant_moe_id_gate_up_silu.reference
        y = reference(a, gate_blocks, up_blocks, ids, gate_kind, up_kind)
        return delivered(y.contiguous(), out)
    y = result(a, (*ids.shape, gate_blocks.shape[1]), out)
    _launch_experts(GATE_UP_EXPERTS, y, a, (gate_blocks, up_blocks), ids, gate_kind, up_kind)
    return delivered(y, out)
