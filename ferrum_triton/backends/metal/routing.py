"""Choosing experts and sorting pairs by them as shaders: a threadgroup a token, or an expert."""

import torch
from torch import Tensor

from ferrum_triton.backends.metal.shader import Shader, delivered, power_of_2_threads
from ferrum_triton.ops import linear
from ferrum_triton.ops.moe import pairs, routing

ROUTE = Shader(
    "routing", "route_topk_softmax", "ids weights counts logits", "num_experts top_k norm_topk_prob"
)
SORT = Shader(
    "routing",
    "compute_ids_tpe",
    "buckets tpe grid ids",
    "num_pairs gate_up_tiles down_tiles num_experts token_tile",
)
THREADS = 128


@routing.route_topk_softmax.impl("metal")
def route_topk_softmax(
    logits: Tensor,
    top_k: int,
    norm_topk_prob: bool = True,
    counted: bool = True,
    *,
    out: tuple[Tensor, Tensor, Tensor] | None = None,
) -> tuple[Tensor, ...]:
    num_tokens, num_experts = logits.shape
    ids = logits.new_empty(num_tokens, top_k, dtype=torch.int32)
    weights = logits.new_empty(num_tokens, top_k, dtype=torch.float32)
    counts = logits.new_zeros(num_experts, dtype=torch.int32)
    if num_tokens:
        buffers = (ids, weights, counts, logits.contiguous())
        params = (num_experts, top_k, int(norm_topk_prob))
        launch = {"groups": num_tokens, "threads": power_of_2_threads(num_experts)}
        ROUTE.launch({"SCALAR": logits.dtype, "ID": torch.int32}, buffers, params, **launch)
    results = ids, weights, counts if counted else counts[:0]
    return tuple(map(delivered, results, out or (None,) * 3))


@routing.gemm_route_topk_softmax.impl("metal")
def gemm_route_topk_softmax(
    a: Tensor,
    router: Tensor,
    top_k: int,
    norm_topk_prob: bool = True,
    *,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, ...]:
    logits = linear.gemm.impls["blas"](a, router, True)
    ids, weights, _ = route_topk_softmax(logits, top_k, norm_topk_prob, False)
    return tuple(map(delivered, (ids, weights), out or (None, None)))


@pairs.compute_ids_tpe.impl("metal")
def compute_ids_tpe(
    ids: Tensor,
    num_experts: int,
    gate_up_rows: int,
    down_rows: int,
    token_tile: int = 32,
    row_tile: int = 64,
    *,
    out: tuple[Tensor, Tensor, Tensor] | None = None,
) -> tuple[Tensor, ...]:
    num_pairs = ids.numel()
    buckets = ids.new_empty(num_experts, num_pairs, dtype=torch.int32)
    tpe = ids.new_zeros(num_experts, dtype=torch.int32)
    grid = ids.new_ones(2, 3, dtype=torch.int32)
    tiles = (-(-gate_up_rows // row_tile), -(-down_rows // row_tile))
    params = (num_pairs, *tiles, num_experts, token_tile)
    # Without pairs a buffer still has to have something.
    given = ids.contiguous() if num_pairs else ids.new_zeros(1)
    held = buckets if num_pairs else ids.new_zeros(1, dtype=torch.int32)
    types = {"SCALAR": torch.float32, "ID": ids.dtype}
    SORT.launch(types, (held, tpe, grid, given), params, groups=num_experts, threads=THREADS)
    return tuple(map(delivered, (buckets, tpe, grid), out or (None,) * 3))
