"""Products with weights in a GGUF file's blocks as shaders, and rows of them.

Kinds without a shader, planes among them, run as their definitions.
"""

import torch
from torch import Tensor

from ferrum_triton.backends.metal.elementwise import grid
from ferrum_triton.backends.metal.shader import LANES, Shader, delivered, result
from ferrum_triton.ops import quant as ops

GEMV = Shader("quant", "gemv_quant", "y x blocks", "num_rows num_groups row_bytes tiles")
EMBEDDING = Shader(
    "quant", "embedding_quant", "y blocks ids", "count num_groups row_bytes vocab_size"
)
# Bytes of a block, and its weights.
KINDS = {
    "Q4_0": (18, 32),
    "Q4_1": (20, 32),
    "Q8_0": (34, 32),
    "Q4_K": (144, 256),
    "Q5_K": (176, 256),
    "Q6_K": (210, 256),
}
# Weights at a time; rows that a simdgroup takes; of a threadgroup.
GROUP, ROWS, SIMDGROUPS = 32, 4, 2


def _types(scalar: torch.dtype, ids: torch.dtype, kind: str) -> dict[str, torch.dtype | str]:
    block_bytes, block_weights = KINDS[kind]
    sizes = {"BLOCK_BYTES": block_bytes, "BLOCK_GROUPS": block_weights // GROUP}
    sizes |= {"GROUP": GROUP, "ROWS": ROWS, "SIMDGROUPS": SIMDGROUPS}
    return {"SCALAR": scalar, "ID": ids, "KIND": kind} | {k: str(v) for k, v in sizes.items()}


@ops.gemv_quant.impl("metal")
def gemv_quant(a: Tensor, blocks: Tensor, kind: str, *, out: Tensor | None = None) -> Tensor:
    (num_tokens, k), num_rows = a.shape, blocks.shape[0]
    y = result(a, (num_tokens, num_rows), out)
    if kind not in KINDS:
        y.copy_(ops.gemv_quant.reference(a, blocks, kind))
    elif k == 0:
        y.zero_()
    elif y.numel():
        blocks = blocks.contiguous()
        tiles = -(-num_rows // (ROWS * SIMDGROUPS))
        types = _types(a.dtype, torch.int64, kind)
        params = (num_rows, k // GROUP, blocks.shape[1], tiles)
        launch = {"groups": num_tokens * tiles, "threads": LANES * SIMDGROUPS}
        GEMV.launch(types, (y, a.contiguous(), blocks), params, **launch)
    return delivered(y, out)


@ops.embedding_lookup_quant.impl("metal")
def embedding_lookup_quant(
    blocks: Tensor, ids: Tensor, kind: str, dtype: torch.dtype, *, out: Tensor | None = None
) -> Tensor:
    if kind not in KINDS:
        y = ops.embedding_lookup_quant.reference(blocks, ids, kind, dtype).contiguous()
        return delivered(y, out)
    block_bytes, block_weights = KINDS[kind]
    k = blocks.shape[1] // block_bytes * block_weights
    y = result(blocks, (*ids.shape, k), out, dtype)
    if y.numel():
        blocks = blocks.contiguous()
        count = y.numel() // GROUP
        types = _types(dtype, ids.dtype, kind)
        params = (count, k // GROUP, blocks.shape[1], blocks.shape[0])
        EMBEDDING.launch(types, (y, blocks, ids.contiguous()), params, **grid(count))
    return delivered(y, out)
