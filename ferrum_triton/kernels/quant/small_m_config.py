"""Launch choices of products of three to eight tokens on tensor cores, ``small_m``.

The functions are pure: they take a GPU's facts and a product's sizes, and ask no device.
"""

from __future__ import annotations

from typing import NamedTuple

from ferrum_triton.kernels.gpu import Gpu
from ferrum_triton.kernels.rows import cdiv, previous_power_of_2
from ferrum_triton.quant.formats import FORMATS

# Warps for an SM from which on they are more than run at once where activations are loaded early:
# an SM holds 23 of Q4_0, whose threads have 81 registers then, which count as 88
# (``compile_launch`` of ``gemm_quant`` for sm_90, 9b9811a).
FULL_WARPS = 24


class SmallM(NamedTuple):
    """How a product is launched.

    Attributes:
        warps: warps of a program, a power of two.
        unrolled: two steps are one turn of the loop, so that no register is copied at its end.
        late_tokens: a step's activations are loaded in it, not in the one before.
    """

    warps: int
    unrolled: bool = False
    late_tokens: bool = False


def small_m_heuristic(gpu: Gpu, kind: str, num_rows: int, num_blocks: int) -> SmallM:
    """Warps of a program: as many as share a row's blocks, if all programs run at once.

    At 128 registers a thread, an SM holds 16 warps. 12288x4096 by five tokens of Q4_K takes 11.4 us
    on 2 warps, 14.1 on 4 and 19.5 on 8; 5120x25600 29.6 on 4 and 34.5 on 8; 4096x14336 14.1 on 8
    and 16.9 on 4.

    On Hopper, formats without integer scales have more choices. Where the grid has FULL_WARPS for
    an SM, unrolled loops with late tokens gain, except Q8_0's: 28672x4096 by eight tokens of Q4_0
    takes 20.1 us so and 23.8 without, of Q4_1 22.3 and 24.7. Elsewhere unrolling alone gains,
    except where there are minimums: 4096x14336 of Q4_0 takes 13.5 us so and 17.5 without, of Q4_1
    15.2 and 13.3 (``device_us`` of ``gemm_quant`` under ``products.forced``, H200, what became
    a2d8e4f).
    """
    programs = cdiv(num_rows, 16)
    warps = 8
    while warps > 2 and programs > gpu.num_sms * (16 // warps):
        warps //= 2
    launch = SmallM(min(warps, previous_power_of_2(max(num_blocks // 4, 1))))
    fmt = FORMATS[kind]
    if fmt.scale_code or gpu.capability[0] != 9:
        return launch
    if programs * launch.warps >= gpu.num_sms * FULL_WARPS:
        gains = fmt.bits < 8
        return launch._replace(unrolled=gains, late_tokens=gains)
    return launch._replace(unrolled=not fmt.has_minimum)


def small_m_candidates(kind: str) -> list[SmallM]:
    """Launches worth timing."""
    found = [SmallM(warps) for warps in (1, 2, 4, 8)]
    if not FORMATS[kind].scale_code:
        found += [SmallM(warps, unrolled=True) for warps in (1, 2, 4, 8)]
        found += [launch._replace(late_tokens=True) for launch in found[-4:]]
    return found
