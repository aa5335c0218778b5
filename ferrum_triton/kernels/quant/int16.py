"""Few activations as integers of 16 bits, made once for all programs of a product.

One token's are made by every program for itself; for more that would take longer than the product.
"""

from dataclasses import dataclass

import torch
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ferrum_triton.kernels.jit import kernel
from ferrum_triton.kernels.quant.integer_activations import integers_of, load_activations
from ferrum_triton.kernels.quant.planes import is_aligned, may_chain, uses_ptx
from ferrum_triton.kernels.rows import cdiv


@dataclass(frozen=True, eq=False)
class Int16Activations:
    """Activations of 16 bits, with a step for each 32.

    Attributes:
        codes: int32 [m, K / 2], two integers a word, the first lower.
        info: int32 [m, K / 32, 4]: a step's float32 bits, the sums of the integers of the first 16
            and of the others, and nothing.
        dtype: what they were, and what products are.
    """

    codes: Tensor
    info: Tensor
    dtype: torch.dtype

    @property
    def num_tokens(self) -> int:
        return self.codes.shape[0]

    @property
    def num_weights(self) -> int:
        return self.codes.shape[1] * 2


@kernel
def _int16_kernel(
    codes_ptr,  # int32 [m, k / 2]
    info_ptr,  # int32 [m, groups, 4]
    a_ptr,  # [m, k]
    stride_codes_token,
    stride_info_token,
    stride_a_token,
    num_groups,  # of 32 in a row
    THREADS: tl.constexpr,
    VECTOR: tl.constexpr,
    ASM: tl.constexpr,
    CHAINED: tl.constexpr,
):
    if CHAINED:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(1).to(tl.int64)
    group = tl.program_id(0) * THREADS + tl.arange(0, THREADS)
    mask = group < num_groups
    a_ptr += token * stride_a_token
    loaded = load_activations(a_ptr, None, 0, 0, group, mask, 1, 1, VECTOR, ASM)
    x, steps, lows, highs = integers_of(loaded, a_ptr, None, 1, 1, VECTOR, ASM)[0]
    codes = codes_ptr + token * stride_codes_token + group * 16
    for i in tl.static_range(16):
        tl.store(codes + i, x[0][i], mask=mask)
    info = info_ptr + token * stride_info_token + group * 4
    tl.store(info, steps[0].to(tl.int32, bitcast=True), mask=mask)
    tl.store(info + 1, lows[0], mask=mask)
    tl.store(info + 2, highs[0], mask=mask)


def int16_activations(a: Tensor, *, chained: bool = True) -> Int16Activations:
    """Activations [m, K], float16 or bfloat16, as integers of 16 bits.

    Args:
        a: [m, K].
        chained: let the launch begin while the one before ends, and the next one likewise.
    """
    (num_tokens, k), device = a.shape, a.device
    codes = torch.empty(num_tokens, k // 2, dtype=torch.int32, device=device)
    info = torch.empty(num_tokens, k // 32, 4, dtype=torch.int32, device=device)
    asm, chained = uses_ptx(a), chained and may_chain(a)
    if a.numel() == 0:
        return Int16Activations(codes, info, a.dtype)
    _int16_kernel.launch(
        (cdiv(k // 32, 32), num_tokens),
        codes,
        info,
        a,
        codes.stride(0),
        info.stride(0),
        a.stride(0),
        k // 32,
        THREADS=32,
        VECTOR=asm and is_aligned(a),
        ASM=asm,
        CHAINED=chained,
        num_warps=1,
        **({"launch_pdl": True} if chained else {}),
    )
    return Int16Activations(codes, info, a.dtype)
