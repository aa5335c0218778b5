"""Launch choices of products of three to 16 tokens on tensor cores, ``small_m``.

The functions are pure: they take a GPU's facts and a product's sizes, and ask no device.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ferrum_triton.kernels.gpu import Gpu
from ferrum_triton.kernels.rows import cdiv, next_power_of_2, previous_power_of_2
from ferrum_triton.quant.formats import FORMATS, BlockFormat

# Tokens of a group, all of which one product of tensor cores takes.
GROUP = 8
# Warps that run on an SM at once: of 128 registers a thread, and of formats below eight bits that
# have neither integer scales nor codebooks. Q4_0's threads have 81 registers where activations are
# loaded early, which count as 88 (``compile_launch`` of ``gemm_quant`` for sm_90, 9b9811a).
WARPS, LIGHT_WARPS = 16, 23
# Warps of a program at most.
MOST_WARPS = 8
# Blocks of 256 weights from which on a row is long.
LONG_BLOCKS = 32
# Blocks of a row of Q4_K's that 9 to 16 tokens are multiplied with, at most.
MOST_BLOCKS = 64


class SmallM(NamedTuple):
    """How a product is launched.

    Attributes:
        warps: warps of a program, a power of two.
        unrolled: two steps are one turn of the loop, so that no register is copied at its end.
        late_tokens: a step's activations are loaded in it, not in the one before.
        steps_ahead: steps by which weights are loaded ahead, 1 or 2.
    """

    warps: int
    unrolled: bool = False
    late_tokens: bool = False
    steps_ahead: int = 1


def is_light(kind: str) -> bool:
    """Whether few registers are taken by weights of ``kind``."""
    fmt = FORMATS[kind]
    return not (fmt.scale_code or fmt.values or fmt.bits == 8)


def takes_blocks(
    gpu: Gpu,
    launch: SmallM,
    kinds: Iterable[str],
    num_tokens: int,
    num_blocks: int,
    programs: int,
) -> bool:
    """Whether activations are arranged by block, so that no program looks through a whole row.

    That gains on Hopper by up to eight tokens, most likely since programs of the product start at
    the entry of the launch that arranges, and load weights meanwhile. By eight tokens 4096x14336
    takes 10.7 us for 11.5 of Q4_0, 12.5 for 12.9 of Q4_K, 11.4 for 12.5 of Q2_K and 14.3 for 15.4
    of Q5_K, 8192x8192 of Q4_K 12.8 for 13.8, 3584x18944 15.6 for 18.1, 4096x4096 5.5 for 5.9 of
    Q4_K and 6.3 for 6.9 of Q6_K, 1024x4096 of Q4_K 3.8 for 4.2. By three tokens 2048x2048 of Q4_K
    takes 2.5 us for 3.0.

    Programs of one or two warps lose, 12288x4096 of IQ4_XS 18.2 us for 15.7 and of Q4_K 12.0 for
    11.5, 17408x5120 of Q4_1 20.8 for 19.0. But where tokens come late and 14 on each SM take all
    rows they gain, 28672x4096 of Q4_K 20.5 us for 22.6 and of Q4_0 19.6 for 20.5. Long rows of Q8_0
    lose, 4096x14336 19.0 us for 18.4. Some fifty other shapes and formats were timed, of which two
    take longer, by 0.6 and 0.8 %.

    By 9 to 16 tokens long rows gain where eight warps share them. By 16 tokens 4096x14336 takes
    13.7 us for 14.6 of Q4_0, 15.6 for 16.0 of Q4_K, 17.8 for 19.4 of Q5_K and 20.2 for 21.8 of
    Q8_0, 2048x11008 of Q4_0 9.6 for 12.1 and 4096x12288 of Q5_K 17.2 for 17.1; by nine tokens
    4096x14336 of Q4_0 takes 12.8 for 13.8. Q6_K and codebooks lose, 18.8 for 18.5 and 18.9 for 18.6
    of IQ4_XS, and so do shorter rows, 4096x4096 of Q4_0 6.7 for 6.1 and 8192x8192 of Q4_K 17.0 for
    16.5.

    All were timed by ``bench.timing.Replay`` of ``gemm_quant`` with each in turns, H200, copies of
    f90d4aa that had both.
    """
    if gpu.capability[0] != 9:
        return False
    formats, is_long = [FORMATS[kind] for kind in kinds], num_blocks >= LONG_BLOCKS
    if num_tokens > GROUP:
        gains = not any(fmt.bits == 6 or fmt.values for fmt in formats)
        return gains and launch.warps == MOST_WARPS and num_blocks > LONG_BLOCKS
    if launch.warps <= 2:
        return launch.warps == 2 and launch.late_tokens and programs > 13 * gpu.num_sms
    return not (is_long and any(fmt.bits == 8 for fmt in formats))


def limits(
    gpu: Gpu,
    launch: SmallM,
    programs: int,
    formats: Sequence[BlockFormat],
    by_blocks: bool = False,
) -> dict[str, int]:
    """Limits that the compiler is given for ``programs`` programs by up to eight tokens.

    An SM holds two programs of eight warps where a thread has 128 registers at most. Without a
    limit ptxas takes 130 for rows of 20 or 68 blocks of Q4_K, and an SM holds one
    (``compile_launch`` of ``gemm_quant`` for sm_90, before 1af424a). Weights of four bits gain more
    by 120: 4096x14336 of Q4_0 takes 11.4 us for 11.9, of Q4_K 12.7 for 12.9, and Q4_K's 4096x4096
    6.0 for 6.1. Q5_K, Q6_K and codebooks lose by that, Q6_K's 4096x14336 18.3 for 15.4.

    Unrolled loops gain by a limit that they would not reach, as ptxas then takes more registers
    than without one, Q4_0's 116 for 81. 6144x4096 takes 7.0 us for 7.5 of Q4_0, 8.9 for 10.9 of
    IQ4_NL and 9.8 for 10.5 of Q8_0; 12288x4096 11.3 for 11.9, 15.2 for 18.5 and 16.4 for 16.9. Of
    28 shapes of six formats none takes 1 % longer; Q8_0's rows of 14336 spill eight bytes so, and
    take 18.5 either way. Q6_K's loops gain too where they are not unrolled: 6144x4096 takes 8.6 for
    8.8, 28672x4096 28.1 for 28.7.

    Elsewhere a limit gains nothing, or slows: Q5_1's 12288x4096 takes 14.4 for 14.2 and Q5_K's
    28672x4096 28.0 for 26.0. Where tokens come late or weights two steps ahead, Q4_0's 28672x4096
    takes 21.5 for 19.7 and Q6_K's 5120x17408 35.5 for 26.0. These two were known to lose: 21.6 for
    19.8, and 41.2 for 36.2 of 5120x25600 (timed as :func:`small_m_heuristic` says).

    All others were timed by eight tokens, by ``bench.timing.Replay`` of ``gemm_quant`` with other
    limits in turns, H200, b791dd0.

    With activations by block formats of up to five bits gain more by 120: 4096x14336 takes 13.2 us
    for 13.8 of Q5_0, 14.3 for 14.9 of Q5_K, 13.4 for 14.2 of Q3_K, 15.5 for 16.3 of IQ4_NL, but
    16.2 for 15.3 of Q6_K. Late ones gain by a limit too, as the second loop else takes registers
    that the first one does not need: programs of two warps by 72, 28672x4096 20.5 for 26.6 of Q4_K,
    19.6 for 22.1 of Q4_0 and 28.1 for 28.9 of Q5_1, of four by 96, 17408x5120 16.3 for 17.3 of Q2_K
    and 20.6 for 20.8 of Q5_K. Few programs of four gain by 128, 6144x16384 of Q3_K 24.9 for 29.4
    and 29.5 by 96. Of eight warps 5120x25600 of Q4_0 takes 24.7 by 72 and 24.3 without (timed as
    :func:`takes_blocks` says).
    """
    if by_blocks and launch.late_tokens and launch.warps <= 4:
        if launch.warps == 4:
            return {"maxnreg": 96 if programs > 4 * gpu.num_sms else 128}
        return {"maxnreg": 72}
    if launch.late_tokens or launch.steps_ahead > 1:
        return {}
    bits, is_full = {fmt.bits for fmt in formats}, launch.warps == MOST_WARPS
    if is_full and by_blocks and max(bits) < 6:
        return {"maxnreg": 120}
    if is_full and bits == {4} and not any(fmt.values for fmt in formats):
        return {"maxnreg": 120}
    if launch.unrolled or bits == {6} or (is_full and max(bits) < 8):
        return {"maxnreg": 128}
    return {}


def most_warps(num_blocks: int) -> int:
    """The most warps that share a row of ``num_blocks`` blocks of 256 weights.

    As many as there are blocks, rounded up to a power of two. 4096x4096 by eight
    tokens of Q4_K takes 6.1 us on 8 warps and 6.6 on 4, 2048x2048 3.4 on 8, 4.0 on 4 and 5.2 on 2
    (timed as :func:`small_m_heuristic` says). Warps without a block cost little: 2048 rows of six
    blocks take 3.3 us on 8 warps and 3.9 on 4. Twice as many warps as blocks gain nothing: 4096
    rows of four take 3.3 us on 8 and 3.2 on 4 (timed as :func:`of_sixteen` says, by eight tokens of
    Q4_K).
    """
    return min(MOST_WARPS, next_power_of_2(max(num_blocks, 1)))


def small_m_heuristic(gpu: Gpu, kind: str, num_rows: int, num_blocks: int) -> SmallM:
    """Warps of a program: as many as share a row's blocks, if all programs run at once.

    At 128 registers a thread, an SM holds 16 warps. 12288x4096 by eight tokens of Q4_K takes 11.5
    us on 2 warps, 12.9 on 4 and 13.2 on 8; 5120x25600 31.1 on 4 and 41.6 on 8; 4096x14336 12.9 on 8
    and 17.4 on 4. Where two warps do not run at once, :func:`_in_waves` says what gains.

    Long rows shared by 4 warps of few programs leave little in flight. Weights of Q4_K, Q5_K and
    Q6_K come two steps ahead there, which takes 129 to 156 registers, so that an SM holds 12 warps:
    5120x25600 of Q4_K takes 28.8 us so and 31.1 without, 6144x16384 20.0 and 23.4, of Q6_K
    5120x25600 36.2 and 37.1. Light formats have twice the warps instead, and late activations: of
    Q4_0 it takes 26.4 us so and 28.0 on 4, of Q4_1 28.4 and 30.7. Q2_K's weights gain nothing by
    coming two steps ahead, 35.2 for 30.0, nor do those of codebooks.

    Formats without integer scales gain by unrolled loops elsewhere, except where there are
    minimums: 4096x14336 of Q4_0 takes 13.5 us so and 17.5 without, of Q4_1 15.2 and 13.3
    (``device_us`` of ``gemm_quant`` under ``products.forced``, H200, what became a2d8e4f).

    All other figures are of ``bench.timing.Replay`` of ``gemm_quant`` by eight tokens under
    ``products.forced`` on an H200, in a copy of 37a2fb1 that had what became 1af424a.
    """
    programs = cdiv(num_rows, 16)
    warps = MOST_WARPS
    while warps > 2 and programs * warps > gpu.num_sms * WARPS:
        warps //= 2
    fmt, on_hopper, light = FORMATS[kind], gpu.capability[0] == 9, is_light(kind)
    at_once = gpu.num_sms * (LIGHT_WARPS if light and not fmt.has_minimum else WARPS)
    if programs * warps > at_once and on_hopper:
        launch = _in_waves(gpu, kind, programs, num_blocks)
        # Two blocks or more for a warp.
        most = previous_power_of_2(max(num_blocks // 2, 1))
        return launch._replace(warps=min(launch.warps, most))
    launch = SmallM(min(warps, most_warps(num_blocks)))
    if not on_hopper:
        return launch
    if launch.warps == 4 and num_blocks >= LONG_BLOCKS:
        if light and programs * MOST_WARPS <= gpu.num_sms * LIGHT_WARPS:
            return SmallM(MOST_WARPS, late_tokens=True)
        if fmt.bits == 3:
            return launch._replace(late_tokens=True)
        if fmt.scale_code and not fmt.values and fmt.bits >= 4 and programs <= gpu.num_sms * 3:
            return launch._replace(steps_ahead=2)
    gains = bool(fmt.values) if fmt.scale_code else not fmt.has_minimum
    return launch._replace(unrolled=gains)


def _in_waves(gpu: Gpu, kind: str, programs: int, num_blocks: int) -> SmallM:
    """What gains on Hopper where programs of two warps do not all run at once.

    Four warps gain over one or two. By eight tokens of Q4_K 24576x8192 takes 34.6 us for 39.6,
    17408x5120 19.9 for 22.4 and 20480x4096 17.9 for 18.7; of Q6_K they take 42.7 for 52.1, 23.9 for
    27.2 and 22.0 for 23.2. Most likely a program that follows another starts with nothing in
    flight, and shorter ones overlap more. Eight gain nothing: 38.9, 31.8 and 19.8 of Q4_K.

    Late activations leave room for more warps on an SM, where weights take few registers:
    17408x5120 of Q2_K takes 17.2 us for 18.9, of Q3_K 19.3 for 21.1, of Q5_K 21.1 for 22.4, but
    Q5_K's long rows, 24576x8192, 44.1 for 41.4. Of Q4_K all of 28672x4096's programs of two warps
    then run at once: 22.7 us for 23.4 on four, but 24576x4096 takes 21.7 for 19.9.

    Codebooks gain by unrolled loops: 17408x5120 of IQ4_NL takes 24.4 us for 25.7, 28672x4096 of
    IQ4_XS 30.0 for 30.8. Q8_0's rows of up to 16 blocks take one warp, where that runs at once:
    28672x4096 32.3 us for 33.5 on four, unrolled. Light formats have two warps, unrolled and late:
    17408x5120 of Q4_1 takes 18.9 us so and 19.2 to 21.8 on four; but Q4_0's long rows, 24576x8192,
    take 33.6 on two and 30.3 on four. All were timed as :func:`small_m_heuristic` says.
    """
    fmt = FORMATS[kind]
    if fmt.values:
        return SmallM(4, unrolled=True)
    if fmt.bits in (2, 3):
        return SmallM(4, late_tokens=True)
    if num_blocks >= LONG_BLOCKS:
        return SmallM(4)
    if fmt.bits == 8:
        is_alone = num_blocks <= 16 and programs <= gpu.num_sms * WARPS
        return SmallM(1) if is_alone else SmallM(4, unrolled=True)
    if is_light(kind):
        return SmallM(2, unrolled=True, late_tokens=True)
    if fmt.bits == 4 and 13 * gpu.num_sms < programs <= 14 * gpu.num_sms:
        return SmallM(2, late_tokens=True)
    return SmallM(4, late_tokens=fmt.bits == 5)


def of_sixteen(
    gpu: Gpu, kind: str, num_rows: int, num_blocks: int, several: bool = False
) -> SmallM | None:
    """How 9 to 16 tokens are launched, where that gains on Hopper over larger tiles; else None.

    Weights are unpacked once for two groups of eight tokens. Programs of eight warps gain most
    where two on each SM take all rows: by 16 tokens 4096x14336 takes 15.7 us of Q4_K and 17.5 by a
    tile, of Q6_K 18.0 and 26.0, of Q4_0 14.1 and 17.5; 2048x2048 of Q4_K 3.9 and 6.0. Four warps do
    where four programs on each take them: 6144x4096 of Q4_K 9.0 and 10.0, 8192x8192 of Q6_K 19.5
    and 26.5, 8192x28672 of Q4_K 50.5 and 52.4. Long rows that take four warps, of Q4_K and Q3_K,
    gain nothing where SMs have three programs or fewer: 5120x25600 of Q4_K takes 37.0 us for 35.6.
    Of Q4_K, rows of more than MOST_BLOCKS are for tiles: 3584x18944 takes 31.1 us so and 21.5 by
    Hopper's packed products, 8192x28672 50.5 and 47.6; of Q4_0 20.2 and 20.1, 44.6 and 44.9.

    Activations come late, since two groups of them take 64 registers: early ones took 32 us for
    15.7. Unrolled loops gain where weights take few registers, and of Q5_K where these are limited:
    4096x14336 of Q4_0 takes 14.2 us so and 15.3 without, of Q5_K 21.4 and 27.0, of Q4_K 18.0 and
    15.7; 16384x8192 of Q2_K 36.9 and 29.8.

    Matrices of several kinds gain up to more rows, since tiles take them in a launch each: a pair
    of 12288x4096, of Q4_K and of Q6_K, takes 27.9 us in one launch of small_m and 34.1 by tiles.

    All were timed by ``bench.timing.Replay`` of ``gemm_quant``, or of ``gemv_quant_gate_up_silu``
    for the pair, under ``products.forced`` on an H200, in a copy of f6a1526 that had two groups;
    rows of more than MOST_BLOCKS in copies of 71162e4.

    Args:
        num_rows, num_blocks: rows of all matrices, and blocks of 256 weights in one.
        several: the matrices are of kinds that tiles take in a launch each.
    """
    if gpu.capability[0] != 9:
        return None
    programs, fmt, most = cdiv(num_rows, 16), FORMATS[kind], most_warps(num_blocks)
    is_long = num_blocks >= LONG_BLOCKS
    # Bits of a code that an integer scale multiplies; 0 of codebooks and of other formats.
    bits = fmt.bits if fmt.scale_code and not fmt.values else 0
    if bits == 4 and num_blocks > MOST_BLOCKS and not several:
        return None
    if programs * most <= gpu.num_sms * WARPS:
        return SmallM(most, unrolled=not (is_long and bits in (2, 4, 6)), late_tokens=True)
    is_crowded = programs > 3 * gpu.num_sms
    if programs <= 4 * gpu.num_sms:
        gains = is_crowded or not (bits in (3, 4) and num_blocks >= 2 * LONG_BLOCKS)
    else:
        gains = _fills_waves(gpu, kind, programs, is_long)
    if not gains and not (several and programs <= 12.2 * gpu.num_sms):
        return None
    unrolled = bits == 0 or (bits < 4 and not is_long) or (bits == 5 and is_crowded)
    return SmallM(min(4, most), unrolled, late_tokens=True)


def _fills_waves(gpu: Gpu, kind: str, programs: int, is_long: bool) -> bool:
    """Whether programs that do not all run at once, four on an SM, leave few SMs idle at the end.

    By 16 tokens 16384x4096 of Q4_K, two waves, takes 18.0 us for 22.1 by a tile, but 18432x4096
    22.7 for 22.3 and 12288x4096 16.3 for 14.5. Tiles of Q5_K and Q6_K take longer, so that 12288
    rows gain too, of Q6_K 19.0 us for 21.0, and the three waves of 24576 rows, 30.7 for 34.5. Those
    gain of long rows in light formats as well: 24576x8192 of Q4_0 takes 38.7 us for 44.3. Tiles
    look up codebooks slowly: 32768x4096 of MXFP4 takes 38.6 us for 45.5, 28672x4096 of IQ4_XS 33.2
    for 40.4. All were timed as :func:`of_sixteen` says. 12288 rows are 5.8 programs for each SM,
    16384 are 7.8, 18432 8.7, 24576 11.6 and 32768 15.5.
    """
    fmt, per_sm = FORMATS[kind], programs / gpu.num_sms
    if fmt.values:
        return per_sm <= 16
    if fmt.bits < 4:
        return per_sm <= 12.2
    # Formats that take tiles longer.
    are_slow = fmt.bits in (5, 6) and bool(fmt.scale_code)
    if 11.5 < per_sm <= 12.2:
        return are_slow or (is_long and not fmt.has_minimum)
    if is_light(kind) and not fmt.has_minimum:
        return 5.8 < per_sm <= 9
    return (5.8 if are_slow else 6.5) < per_sm <= 8.3


def of_several(gpu: Gpu, launch: SmallM, kinds: Iterable[str], num_rows: int) -> SmallM:
    """How a launch of 9 to 16 tokens by several matrices differs from one of as many rows of one.

    Where ptxas has but 128 registers, loops that unpack Q6_K beside another matrix are faster
    unrolled: by 16 tokens Q and K of 5120x5120 and V of 2048x5120 take 13.5 us so and 21.0 without,
    gate and up of 4096x4096 12.5 and 13.9, of Q4_K beside Q6_K 11.1 and 13.6 (timed as
    :func:`of_sixteen` says, by ``gemv_quant_qkv`` and ``gemv_quant_gate_up_silu``).
    """
    is_crowded = cdiv(num_rows, 16) > 3 * gpu.num_sms
    has_six = any(FORMATS[kind].bits == 6 for kind in kinds)
    return launch._replace(unrolled=True) if is_crowded and has_six else launch


def limits_of_sixteen(
    gpu: Gpu,
    launch: SmallM,
    programs: int,
    formats: Sequence[BlockFormat],
    by_blocks: bool = False,
) -> dict[str, int]:
    """Limits that the compiler is given for ``programs`` programs by two groups of tokens.

    128 registers let an SM hold two programs of eight warps or four of four: ptxas takes up to 170
    otherwise (``compile_launch`` of ``gemm_quant`` for sm_90). By 16 tokens 4096x14336 of Q6_K
    takes 18.1 us so and 23.6 without, 8192x4096 of Q4_K 10.2 and 14.1, though a thread spills up to
    104 bytes, of Q5_K. Where three programs of four warps take all rows, the limit only slows:
    6144x16384 of Q5_K takes 27.8 us without it and 49.7 with (timed as :func:`of_sixteen` says).

    A program that arranges by block takes 32 registers a thread (``compile_launch`` for sm_90). Two
    of them find room on an SM beside two programs of 112 registers, so that weights are on their
    way before activations are arranged: 4096x14336 takes 13.7 us for 15.1 of Q4_0, 14.8 for 15.2 of
    Q4_1, 15.7 for 16.7 of Q3_K and 20.2 for 21.2 of Q8_0. Q2_K and Q4_K take as long by 128, and
    Q5_K 17.8 us for 18.6 (timed as :func:`takes_blocks` says).
    """
    if by_blocks:
        return {"maxnreg": 128 if any(fmt.bits == 5 for fmt in formats) else 112}
    fit = launch.warps == 4 and not launch.unrolled and programs <= 3 * gpu.num_sms
    return {} if launch.warps < 4 or fit else {"maxnreg": 128}


def of_gate_and_up(launch: SmallM, gate_kind: str, up_kind: str) -> SmallM:
    """How a pair's launch differs from one of as many rows of one matrix.

    Late activations lose where two matrices of four bits or more take registers for their weights.
    By eight tokens a pair of 14336x4096 of Q4_K takes 26.0 us with them and 24.5 without, of Q5_K
    29.0 and 27.9. They still gain for Q2_K, 20.9 for 23.3, and for Q4_K beside Q6_K, 26.2 for 30.1
    (``bench.timing.Replay`` of ``gemv_quant_gate_up_silu`` under ``products.forced``, H200,
    1af424a).
    """
    fmt = FORMATS[gate_kind]
    if gate_kind == up_kind and fmt.scale_code and fmt.bits > 3:
        return launch._replace(late_tokens=False)
    return launch


def small_m_refusal(gpu: Gpu, launch: SmallM, num_rows: int, num_blocks: int) -> str:
    """Why a launch measured at another shape is none for this one; "" if it can be.

    Programs of twice the warps would all run at once, and take less time: 14336x4096 by eight
    tokens of Q4_K 13.6 us on two warps and 17.5 on one (``bench.behind.time_call``, d6a1879).
    """
    twice = 2 * launch.warps
    if twice <= most_warps(num_blocks) and cdiv(num_rows, 16) * twice <= gpu.num_sms * WARPS:
        return f"programs of {twice} warps run at once too"
    return ""


def small_m_candidates(kind: str, num_tokens: int) -> list[SmallM]:
    """Launches worth timing."""
    if num_tokens > 2 * GROUP:
        return []
    if num_tokens > GROUP:
        return [SmallM(warps, unrolled, True) for warps in (4, 8) for unrolled in (False, True)]
    found = [SmallM(warps) for warps in (1, 2, 4, 8)]
    found += [SmallM(warps, late_tokens=True) for warps in (2, 4, 8)]
    found += [SmallM(4, steps_ahead=2), SmallM(4, unrolled=True)]
    if not FORMATS[kind].scale_code:
        found += [SmallM(warps, unrolled=True) for warps in (1, 2, 8)]
        found += [SmallM(warps, unrolled=True, late_tokens=True) for warps in (1, 2, 4, 8)]
    return found
