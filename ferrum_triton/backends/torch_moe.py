"""The ``"torch"`` provider's products of experts: an expert is read once for all of its pairs."""

from torch import Tensor

from ferrum_triton.ops.moe import dense
from ferrum_triton.ops.precision import widen


@dense.gemm_moe_id.impl("torch")
def gemm_moe_id(
    a: Tensor,
    weights: Tensor,
    ids: Tensor,
    bias: Tensor | None = None,
    *,
    out: Tensor | None = None,
) -> Tensor:
    y = _products(a, weights, ids, bias)
    return y.to(a.dtype) if out is None else out.copy_(y)


@dense.gemm_moe_id_gate_up.impl("torch")
def gemm_moe_id_gate_up(
    a: Tensor,
    weights: Tensor,
    ids: Tensor,
    bias: Tensor | None = None,
    activation: str = "silu",
    alpha: float = 1.702,
    limit: float = 7.0,
    *,
    out: Tensor | None = None,
) -> Tensor:
    y = _products(a, weights, ids, bias, (activation, alpha, limit))
    return y.to(a.dtype) if out is None else out.copy_(y)


def _products(
    a: Tensor,
    weights: Tensor,
    ids: Tensor,
    bias: Tensor | None,
    gate: tuple[str, float, float] | None = None,
) -> Tensor:
    """[num_tokens, top_k, n] in float32 or wider, of gate and up after what ``gate`` says."""
    pairs = dense.rows_of_pairs(a, ids)
    n = weights.shape[1] if gate is None else weights.shape[1] // 2
    y = widen(a).new_zeros(*ids.shape, n)
    for expert in ids.unique().tolist():
        if 0 <= expert < weights.shape[0]:
            chosen = ids == expert
            products = widen(pairs[chosen]) @ widen(weights[expert]).T
            if bias is not None:
                products += widen(bias[expert])
            y[chosen] = products if gate is None else dense.activated(products, *gate)
    return y
