"""Products of tokens with their experts' weights in FP8 that have a scale for every block.

``weights`` float8_e4m3fn [num_experts, n, k] and ``scales`` float32 [num_experts, ceil(n / 128),
ceil(k / 128)] stack a matrix an expert, in the format of :mod:`ferrum_triton.ops.fp8`. Activations
are a row a token or a row a pair, as in :mod:`ferrum_triton.ops.moe.dense`.
"""

import torch
from torch import Tensor

from ferrum_triton.ops.elementwise import GATES, check_gate, gated
from ferrum_triton.ops.fp8.codes import quantize_fp8_groups
from ferrum_triton.ops.moe.dense import EVERY_SIZE, PAIRS_AT_A_TIME, sum_traffic, summed
from ferrum_triton.ops.moe.experts import check_rows
from ferrum_triton.quant.fp8 import BLOCK, num_blocks
from ferrum_triton.registry import Case, Op, op

SIZES = {
    "num_tokens": (0, 1, 2, 20),
    "num_experts": (1, 3, 9),
    "top_k": (1, 2, 3),
    "n": (1, 130, 9),
    "k": (1, 160, 33, 128),
    "per_slot": (False, True),
}


def _cases(n: int, k: int, per_slot: bool, tokens: tuple[int, ...] = EVERY_SIZE) -> list[Case]:
    """Cases of a Qwen3-30B-A3B layer."""
    layer = {"num_experts": 128, "top_k": 8, "n": n, "k": k, "per_slot": per_slot}
    return [Case(f"e128k8n{n}k{k}/m{m}", torch.bfloat16, layer | {"num_tokens": m}) for m in tokens]


def _pair_products(a: Tensor, weights: Tensor, scales: Tensor, ids: Tensor) -> Tensor:
    """[num_tokens, top_k, n], in float32 or wider."""
    dtype = torch.promote_types(a.dtype, torch.float32)
    codes, steps = quantize_fp8_groups.reference(a.flatten(0, -2))
    codes, k = codes.to(dtype), a.shape[-1]
    pair = torch.arange(ids.numel(), device=ids.device)
    row = pair if a.dim() == 3 else pair // ids.shape[1]
    expert = ids.flatten()
    known = (expert >= 0) & (expert < weights.shape[0])
    expert = torch.where(known, expert, 0).long()
    found = []
    for e, r in zip(expert.split(PAIRS_AT_A_TIME), row.split(PAIRS_AT_A_TIME), strict=True):
        # torch indexes no float8.
        of_pairs = weights.view(torch.uint8)[e].view(weights.dtype).to(dtype)
        of_rows = scales[e].to(dtype).repeat_interleave(BLOCK, 1)[:, : weights.shape[1]]
        y = torch.zeros(of_pairs.shape[:2], dtype=dtype, device=a.device)
        for group in range(num_blocks(k)):
            columns = slice(group * BLOCK, (group + 1) * BLOCK)
            sums = (of_pairs[..., columns] @ codes[r][:, columns, None])[..., 0]
            y += sums * (steps[r][:, group, None] * of_rows[..., group])
        found.append(y)
    return torch.where(known[:, None], torch.cat(found), 0.0).unflatten(0, ids.shape)


def _check_stack(of_op: Op, weights: Tensor, scales: Tensor, prefix: str = "") -> None:
    if weights.shape[0] == 0:
        of_op.reject(f"{prefix}weights", "of no expert", "at least one expert")
    want = [len(weights), *(num_blocks(size) for size in weights.shape[1:])]
    if list(scales.shape) != want:
        got, allowed = f"of shape {list(scales.shape)}", f"{want}, one for each block of weights"
        of_op.reject(f"{prefix}scales", got, allowed, "A block is 128 rows by 128 columns.")


def _traffic(a: Tensor, ids: Tensor, n: int, *stacks: Tensor) -> int:
    """Every activation and result once, and as many experts as there may be of these pairs."""
    read = min(ids.numel(), len(stacks[0]))
    moved = sum(read * stack[0].numel() * stack.element_size() for stack in stacks)
    moved += (a.numel() + ids.numel() * n) * a.element_size()
    return moved + ids.numel() * ids.element_size()


def _stack(make, num_experts, n, k, prefix=""):
    weights = make.randn(num_experts, n, k).to(torch.float8_e4m3fn)
    scales = make.weight(num_experts, num_blocks(n), num_blocks(k)) * k**-0.5
    return {f"{prefix}weights": weights, f"{prefix}scales": scales}


def _pairs(make, num_tokens, num_experts, top_k, k, per_slot):
    rows = (num_tokens, top_k) if per_slot else (num_tokens,)
    ids = make.ints(-1, num_experts + 1, num_tokens, top_k)
    return {"a": make.randn(*rows, k), "ids": ids}


@op(
    tensors={
        "a": "T[..., k]",
        "weights": "fp8[num_experts, n, k]",
        "scales": "float32[num_experts, row_blocks, column_blocks]",
        "ids": "int[num_tokens, top_k]",
    },
    axes=SIZES,
    bench=_cases(2048, 768, per_slot=True),
    dtypes=(torch.float16, torch.bfloat16),
    after_norm="a",
)
def gemm_moe_id_fp8_128x128(a: Tensor, weights: Tensor, scales: Tensor, ids: Tensor) -> Tensor:
    """y[t, s] = gemm_fp8_128x128(a[t, s], weights[e], scales[e]), with e = ids[t, s].

    Args:
        a: [num_tokens, k], a token's row for all its slots; or [num_tokens, top_k, k].
        weights: float8_e4m3fn [num_experts, n, k].
        scales: float32 [num_experts, ceil(n / 128), ceil(k / 128)].
        ids: [num_tokens, top_k] int32 or int64. An id outside [0, num_experts) gives a row of
            zeros.

    Returns:
        [num_tokens, top_k, n] in a's dtype, rounded once.
    """
    return _pair_products(a, weights, scales, ids).to(a.dtype)


gemm_moe_id_fp8_128x128.fake = lambda a, weights, scales, ids: a.new_empty(
    *ids.shape, weights.shape[1]
)


@gemm_moe_id_fp8_128x128.rule
def _(a, weights, scales, ids):
    _check_stack(gemm_moe_id_fp8_128x128, weights, scales)
    check_rows(gemm_moe_id_fp8_128x128, a, *ids.shape)


@gemm_moe_id_fp8_128x128.sample
def _(make, num_tokens, num_experts, top_k, n, k, per_slot):
    pairs = _pairs(make, num_tokens, num_experts, top_k, k, per_slot)
    return pairs | _stack(make, num_experts, n, k)


@gemm_moe_id_fp8_128x128.traffic
def _(a, weights, scales, ids):
    return _traffic(a, ids, weights.shape[1], weights, scales)


@gemm_moe_id_fp8_128x128.flops
def _(a, weights, scales, ids):
    return 2 * ids.numel() * weights.shape[1] * weights.shape[2]


@op(
    tensors={
        "a": "T[..., k]",
        "weights": "fp8[num_experts, n, k]",
        "scales": "float32[num_experts, row_blocks, column_blocks]",
        "ids": "int[num_tokens, top_k]",
        "slot_weights": "float[num_tokens, top_k]",
    },
    axes=SIZES,
    bench=_cases(2048, 768, per_slot=True, tokens=(1, 4)),
    dtypes=(torch.float16, torch.bfloat16),
    after_norm="a",
)
def gemm_moe_id_sum_fp8_128x128(
    a: Tensor, weights: Tensor, scales: Tensor, ids: Tensor, slot_weights: Tensor
) -> Tensor:
    """y[t] = Σₛ slot_weights[t, s] · gemm_fp8_128x128(a[t, s], W[e], scales[e]), e = ids[t, s].

    Of few tokens it is one launch, which rounds no product before the sum. Of more it is
    :func:`gemm_moe_id_fp8_128x128`, whose products are rounded to a's dtype, and a sum.

    Args:
        a: [num_tokens, k] or [num_tokens, top_k, k].
        weights: float8_e4m3fn [num_experts, n, k].
        scales: float32 [num_experts, ceil(n / 128), ceil(k / 128)].
        ids: [num_tokens, top_k] int32 or int64. A slot whose id is outside [0, num_experts) adds
            nothing, whatever its weight.
        slot_weights: [num_tokens, top_k], any float dtype.

    Returns:
        [num_tokens, n] in a's dtype; summed in float32, in a fixed order.
    """
    products = _pair_products(a, weights, scales, ids)
    return summed(products, ids, slot_weights, len(weights)).to(a.dtype)


gemm_moe_id_sum_fp8_128x128.fake = lambda a, weights, scales, ids, slot_weights: a.new_empty(
    ids.shape[0], weights.shape[1]
)


@gemm_moe_id_sum_fp8_128x128.rule
def _(a, weights, scales, ids, slot_weights):
    _check_stack(gemm_moe_id_sum_fp8_128x128, weights, scales)
    check_rows(gemm_moe_id_sum_fp8_128x128, a, *ids.shape)


@gemm_moe_id_sum_fp8_128x128.sample
def _(make, num_tokens, num_experts, top_k, n, k, per_slot):
    found = _pairs(make, num_tokens, num_experts, top_k, k, per_slot)
    found |= _stack(make, num_experts, n, k)
    return found | {"slot_weights": make.weight(num_tokens, top_k)}


@gemm_moe_id_sum_fp8_128x128.traffic
def _(a, weights, scales, ids, slot_weights):
    moved = _traffic(a, ids, 0, weights, scales)
    return moved + sum_traffic(a, slot_weights, weights.shape[1])


@gemm_moe_id_sum_fp8_128x128.flops
def _(a, weights, scales, ids, slot_weights):
    return 2 * ids.numel() * weights.shape[1] * (weights.shape[2] + 1)


@op(
    tensors={
        "a": "T[..., k]",
        "gate_weights": "fp8[num_experts, n, k]",
        "gate_scales": "float32[num_experts, row_blocks, column_blocks]",
        "up_weights": "fp8[num_experts, n, k]",
        "up_scales": "float32[num_experts, row_blocks, column_blocks]",
        "ids": "int[num_tokens, top_k]",
    },
    axes=SIZES | {"activation": GATES},
    bench=_cases(768, 2048, per_slot=False),
    dtypes=(torch.float16, torch.bfloat16),
    after_norm="a",
)
def gemm_moe_id_gate_up_fp8_128x128(
    a: Tensor,
    gate_weights: Tensor,
    gate_scales: Tensor,
    up_weights: Tensor,
    up_scales: Tensor,
    ids: Tensor,
    activation: str = "silu",
) -> Tensor:
    """y[t, s] = act(a[t, s] · Gᵀ) · (a[t, s] · Uᵀ), G and U of the expert ids[t, s].

    Products are those of :func:`gemm_moe_id_fp8_128x128`, in float32 until the one rounding at the
    end.

    Args:
        a: [num_tokens, k] or [num_tokens, top_k, k].
        gate_weights, up_weights: float8_e4m3fn [num_experts, n, k].
        gate_scales, up_scales: float32 [num_experts, ceil(n / 128), ceil(k / 128)].
        ids: [num_tokens, top_k] int32 or int64. An id outside [0, num_experts) gives a row of
            zeros.
        activation: ``"silu"``, or ``"gelu_tanh"`` in its place.

    Returns:
        [num_tokens, top_k, n] in a's dtype.
    """
    gate = _pair_products(a, gate_weights, gate_scales, ids)
    up = _pair_products(a, up_weights, up_scales, ids)
    return gated(gate, up, activation).to(a.dtype)


def _gate_up_fake(a, gate_weights, gate_scales, up_weights, up_scales, ids, activation="silu"):
    return a.new_empty(*ids.shape, gate_weights.shape[1])


gemm_moe_id_gate_up_fp8_128x128.fake = _gate_up_fake


@gemm_moe_id_gate_up_fp8_128x128.rule
def _(a, gate_weights, gate_scales, up_weights, up_scales, ids, activation):
    this = gemm_moe_id_gate_up_fp8_128x128
    check_gate(this, activation)
    _check_stack(this, gate_weights, gate_scales, "gate_")
    check_rows(this, a, *ids.shape)


@gemm_moe_id_gate_up_fp8_128x128.sample
def _(make, num_tokens, num_experts, top_k, n, k, per_slot, activation="silu"):
    pairs = _pairs(make, num_tokens, num_experts, top_k, k, per_slot)
    gate, up = (_stack(make, num_experts, n, k, prefix) for prefix in ("gate_", "up_"))
    return pairs | gate | up | {"activation": activation}


@gemm_moe_id_gate_up_fp8_128x128.traffic
def _(a, gate_weights, gate_scales, up_weights, up_scales, ids, activation):
    stacks = gate_weights, gate_scales, up_weights, up_scales
    return _traffic(a, ids, gate_weights.shape[1], *stacks)


@gemm_moe_id_gate_up_fp8_128x128.flops
def _(a, gate_weights, gate_scales, up_weights, up_scales, ids, activation):
    return 4 * ids.numel() * gate_weights.shape[1] * gate_weights.shape[2]
