"""Launch choices of products of three to eight tokens on tensor cores, ``small_m``.

The functions are pure: they take a GPU's facts and a product's sizes, and ask no device.
"""

from __future__ import annotations

from typing import NamedTuple

from ferrum_triton.kernels.gpu import Gpu
from ferrum_triton.kernels.rows import cdiv, previous_power_of_2
from ferrum_triton.quant.formats import FORMATS

# Warps that run on an SM at once: of 128 registers a thread, and of formats below eight bits that
# have no integer scales. Q4_0's threads have 81 registers where activations are loaded early, which
# count as 88 (``compile_launch`` of ``gemm_quant`` for sm_90, 9b9811a).
WARPS, LIGHT_WARPS = 16, 23
# Warps of a program at most.
MOST_WARPS = 8


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


def warps_at_once(kind: str) -> int:
    """Warps that run on an SM at once, of a product with weights of ``kind``."""
    fmt = FORMATS[kind]
    return WARPS if fmt.scale_code or fmt.bits == 8 else LIGHT_WARPS


def programs_alone(kind: str, num_blocks: int) -> int:
    """The most programs for an SM that are faster with one warp than with two, in two waves.

    By eight tokens of Q8_0 30720x4096 takes 33.4 us on 1 warp and 35.1 on 2, 24576x8192 53.9 and
    75.7. Of Q4_K 24576x4096 takes 20.5 and 21.8, 28672x4096 23.3 and 23.8, 22016x11008 48.5 and
    50.7, but 24576x8192 41.8 and 39.1, 25600x5120 27.6 and 26.6. Of Q6_K 24576x4096 takes 25.0 and
    26.4, but 28672x4096 29.0 and 28.4. Of Q4_0, which has unrolled loops and late tokens there,
    28672x4096 takes 22.3 and 19.8. Codebooks are looked up: of IQ4_NL 24576x4096 takes 28.0 and
    26.8 (``bench.behind.time_call`` of ``gemm_quant``, H200, d6a1879 and 8b1f087 with each).
    """
    fmt = FORMATS[kind]
    if fmt.bits == 8:
        return WARPS
    if num_blocks > 16 or fmt.values:
        return 11
    return 14 if fmt.bits == 4 and fmt.scale_code else 12


def most_warps(num_blocks: int) -> int:
    """The most warps that share a row of ``num_blocks`` blocks of 256 weights."""
    return min(MOST_WARPS, previous_power_of_2(max(num_blocks // 4, 1)))


def small_m_heuristic(gpu: Gpu, kind: str, num_rows: int, num_blocks: int) -> SmallM:
    """Warps of a program: as many as share a row's blocks, if all programs run at once.

    At 128 registers a thread, an SM holds 16 warps. 12288x4096 by five tokens of Q4_K takes 11.4 us
    on 2 warps, 14.1 on 4 and 19.5 on 8; 5120x25600 29.6 on 4 and 34.5 on 8; 4096x14336 14.1 on 8
    and 16.9 on 4.

    On Hopper one warp gains where two do not run at once, up to :func:`programs_alone`. Where they
    do, they gain: 16384x4096 by eight tokens of Q4_K takes 13.9 us on 2 warps and 17.7 on 1
    (``bench.behind.time_call`` of ``gemm_quant``, H200, d6a1879 with each).

    Formats without integer scales have more choices on Hopper. Where the grid has more warps than
    run at once, unrolled loops with late tokens gain, except Q8_0's: 28672x4096 by eight tokens of
    Q4_0 takes 20.1 us so and 23.8 without, of Q4_1 22.3 and 24.7. Elsewhere unrolling alone gains,
    except where there are minimums: 4096x14336 of Q4_0 takes 13.5 us so and 17.5 without, of Q4_1
    15.2 and 13.3 (``device_us`` of ``gemm_quant`` under ``products.forced``, H200, what became
    a2d8e4f). One warp of Q8_0's takes 31.1 us without unrolling and 31.7 with it, by 28672x4096
    (``bench.behind.time_call``, 8b1f087).
    """
    programs = cdiv(num_rows, 16)
    warps = MOST_WARPS
    while warps > 2 and programs * warps > gpu.num_sms * WARPS:
        warps //= 2
    fmt, on_hopper = FORMATS[kind], gpu.capability[0] == 9
    in_waves = programs * warps > gpu.num_sms * warps_at_once(kind)
    if on_hopper and in_waves and programs <= gpu.num_sms * programs_alone(kind, num_blocks):
        warps = 1
    launch = SmallM(min(warps, most_warps(num_blocks)))
    if fmt.scale_code or not on_hopper:
        return launch
    if programs * launch.warps > gpu.num_sms * LIGHT_WARPS:
        gains = fmt.bits < 8
        return launch._replace(unrolled=gains, late_tokens=gains)
    is_alone = fmt.bits == 8 and launch.warps == 1
    return launch._replace(unrolled=not fmt.has_minimum and not is_alone)


def small_m_refusal(gpu: Gpu, launch: SmallM, num_rows: int, num_blocks: int) -> str:
    """Why a launch measured at another shape is none for this one; "" if it can be.

    Programs of twice the warps would all run at once, and take less time: 14336x4096 by eight
    tokens of Q4_K 13.6 us on two warps and 17.5 on one (``bench.behind.time_call``, d6a1879).
    """
    twice = 2 * launch.warps
    if twice <= most_warps(num_blocks) and cdiv(num_rows, 16) * twice <= gpu.num_sms * WARPS:
        return f"programs of {twice} warps run at once too"
    return ""


def small_m_candidates(kind: str) -> list[SmallM]:
    """Launches worth timing."""
    found = [SmallM(warps) for warps in (1, 2, 4, 8)]
    if not FORMATS[kind].scale_code:
        found += [SmallM(warps, unrolled=True) for warps in (1, 2, 4, 8)]
        found += [launch._replace(late_tokens=True) for launch in found[-4:]]
    return found
