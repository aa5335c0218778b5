"""Times the tiles in which products with weights in planes may run.

    python -m bench.quant_tiles [--kinds Q4_K Q6_K] [--tokens 8 64] [--shapes 28672x4096]

Every tile of TILES, GEMV_TILES, WALKS and QUADS is compiled first, in as many processes as there
are processors, and those that spill are left out. The others are checked against float64 and timed
with a cold cache. What :mod:`ferrum_triton.kernels.quant.mma_config` chooses was the fastest
here.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import torch
from ferrum_triton.kernels.quant.gemv_planes import Tile, gemv_planes
from ferrum_triton.kernels.quant.gemv_quads import gemv_quads
from ferrum_triton.kernels.quant.gemv_walk import Walk, gemv_walk
from torch import Tensor

from bench.timing import copies_of, device_us
from ferrum_triton.kernels.jit import record_launches
from ferrum_triton.kernels.quant.int16 import int16_activations
from ferrum_triton.kernels.quant.mma import mma_quant
from ferrum_triton.kernels.quant.mma_config import MmaConfig, with_splits
from ferrum_triton.kernels.quant.plane_rows import product_by_torch
from ferrum_triton.kernels.resources import TARGETS, compile_launch
from ferrum_triton.quant import FORMATS, dequantize_blocks, to_planes
from ferrum_triton.quant.planes import PLANE_FORMATS

EARLY: dict[str, Any] = {"scale_after": False, "words": 16}
TMA: dict[str, Any] = {"use_tma": True}
# By the fewest tokens they are timed for.
TILES = {
    3: [
        MmaConfig(64, 8, prefetch_lines=4),
        MmaConfig(64, 8, stages=3, prefetch_lines=8),
        MmaConfig(32, 8, warps=2, stages=3, prefetch_lines=4),
        MmaConfig(64, 8, stages=3, prefetch_lines=4, **TMA),
    ],
    9: [
        MmaConfig(64, 16, parts=2, stages=3, maxnreg=128, prefetch_lines=4),
        MmaConfig(64, 16, stages=3, maxnreg=128, prefetch_lines=4),
        MmaConfig(64, 16, stages=3, prefetch_lines=4, **TMA),
    ],
    17: [
        MmaConfig(64, 32, stages=3, scale_after=False),
        MmaConfig(64, 32, stages=3, prefetch_lines=4, **TMA),
        MmaConfig(64, 32, stages=3, scale_after=False, prefetch_lines=4, **TMA),
        MmaConfig(
            64,
            32,
            stages=2,
            scale_after=False,
            maxnreg=128,
            prefetch_lines=2,
            prefetch_distance=1,
            **TMA,
        ),
        MmaConfig(128, 32, warps=8, stages=3, scale_after=False, maxnreg=128, **TMA),
    ],
    33: [
        MmaConfig(128, 64, warps=8, stages=3),
        MmaConfig(128, 64, warps=8, stages=3, maxnreg=128, **EARLY, **TMA),
        MmaConfig(128, 64, warps=8, stages=2, scale_after=False, maxnreg=128, **TMA),
        MmaConfig(
            128,
            64,
            warps=8,
            stages=2,
            scale_after=False,
            maxnreg=128,
            prefetch_lines=2,
            prefetch_distance=1,
            **TMA,
        ),
        MmaConfig(64, 64, stages=2, **TMA),
    ],
    65: [
        MmaConfig(64, 128, stages=3, **EARLY, **TMA),
        MmaConfig(128, 128, warps=8, stages=3, **EARLY, **TMA),
        MmaConfig(128, 64, warps=8, stages=2, scale_after=False, maxnreg=128, **TMA),
    ],
    129: [
        MmaConfig(128, 256, warps=8, stages=3, **EARLY),
        MmaConfig(128, 256, warps=8, stages=3, **EARLY, **TMA),
        MmaConfig(64, 128, stages=3, **EARLY, **TMA),
    ],
}


GEMV_TILES = [
    Tile(rows, warps, prefetch, late=late)
    for rows, warps in ((4, 2), (4, 4), (8, 2), (8, 4), (16, 2), (16, 4))
    for prefetch in (False, True)
    for late in (False, True)
]


WALKS = [
    *(Walk(rows, residents) for rows in (4, 8) for residents in (1, 2, 3, 4, 8, 10)),
    *(
        Walk(rows, residents, kept=True, tied=tied, registers=registers, late=late)
        for rows, residents, registers in (
            (2, 8, 0), (4, 1, 0), (4, 2, 128), (4, 4, 64), (8, 1, 0), (8, 2, 0)
        )
        for tied in (False, True)
        for late in (False, True)
    ),
]  # fmt: skip


class Quads(NamedTuple):
    """A product for the quads of so many warps."""

    warps: int


QUADS = [Quads(warps) for warps in (1, 2, 4, 8)]


class Job(NamedTuple):
    """One tile at one size."""

    kind: str
    n: int
    k: int
    m: int
    tile: MmaConfig | Tile | Walk | Quads


def jobs(options: argparse.Namespace) -> list[Job]:
    """What is asked for."""
    listed = []
    for kind in options.kinds:
        for shape in options.shapes:
            n, k = map(int, shape.split("x"))
            for m in options.tokens:
                tiles: list[MmaConfig | Tile | Walk | Quads] = []
                if m <= 4:
                    tiles += [*GEMV_TILES, *WALKS]
                if 2 <= m <= 8:
                    tiles += QUADS
                for tile in TILES[max(least for least in TILES if least <= m)] if m > 2 else []:
                    splits = with_splits(tile, m, n, k).splits
                    for each in {splits, max(splits // 2, 1)}:
                        tiles.append(tile._replace(splits=each))
                listed += [Job(kind, n, k, m, tile) for tile in tiles]
    return listed


def run(job: Job, a: Tensor, planes: Tensor) -> Tensor:
    """The product of a [m, k] and planes [n, row_bytes] in the job's tile."""
    kind = f"{job.kind}:planes"
    if isinstance(job.tile, Walk):
        return gemv_walk(a, planes, kind, job.tile)
    if isinstance(job.tile, Quads):
        return gemv_quads(a, planes, kind, warps=job.tile.warps)
    if isinstance(job.tile, Tile):
        x = a if job.m == 1 else int16_activations(a)
        return gemv_planes(x, planes, kind, tile=job.tile)
    return mma_quant(a, planes, kind, job.tile)


def compile_job(job: Job) -> str:
    """Compile into Triton's cache; what keeps the tile from being timed."""
    row_bytes = PLANE_FORMATS[f"{job.kind}:planes"].row_bytes(job.k)
    a = torch.empty(job.m, job.k, dtype=torch.bfloat16, device="meta")
    with record_launches((9, 0)) as launches:
        run(job, a, torch.empty(job.n, row_bytes, dtype=torch.uint8, device="meta"))
    try:
        used = [compile_launch(launch, TARGETS["sm_90"]) for launch in launches]
        for launch in launches:
            launch.kernel.jit.warmup(*launch.args, grid=launch.grid, **launch.meta)
    except Exception as error:  # a tile the compiler fails at is reported as such
        return f"{type(error).__name__}: {str(error).splitlines()[0][:80]}"
    spilled = max(each.spilled for each in used)
    shared = max(each.shared for each in used)
    if spilled or shared > TARGETS["sm_90"].shared_limit:
        return f"spills {spilled} bytes, wants {shared} of shared memory"
    return ""


def error(job: Job, got: Tensor, a: Tensor, blocks: Tensor) -> float:
    """Squared error over the squares, of some rows in float64."""
    rows = torch.linspace(0, job.n - 1, 96, device=a.device).long()
    want = a.double() @ dequantize_blocks(blocks[rows], FORMATS[job.kind]).double().T
    return ((got[:, rows].double() - want).square().sum() / want.square().sum()).item()


def random_rows(kind: str, n: int, k: int) -> Tensor:
    """Random bytes whose scales keep weights near 1."""
    fmt = FORMATS[kind]
    rows = torch.randint(0, 256, (n, fmt.row_bytes(k)), dtype=torch.uint8, device="cuda")
    each = rows.unflatten(-1, (-1, fmt.block_bytes))
    for scale in (fmt.d, fmt.m):
        if scale is not None:
            scale.write(each, torch.rand(*each.shape[:2], 1, device="cuda") * 1e-3 + 1e-4)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kinds", nargs="+", default=["Q4_K", "Q6_K"])
    parser.add_argument("--shapes", nargs="+", default=["28672x4096"], metavar="NxK")
    parser.add_argument("--tokens", nargs="+", type=int, default=[1, 8, 16, 32, 64, 128, 256])
    parser.add_argument("--all", action="store_true", help="print more than the three fastest")
    options = parser.parse_args()
    listed = jobs(options)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(max((os.cpu_count() or 2) - 2, 1), mp_context=context) as pool:
        failures = dict(zip(listed, pool.map(compile_job, listed, chunksize=2), strict=True))
    sizes: dict[tuple[str, int, int, int], list[Job]] = {job[:4]: [] for job in listed}
    for job in listed:
        sizes[job[:4]].append(job)
    weights: dict[tuple[str, int, int], Tensor] = {}
    for (kind, n, k, m), some in sizes.items():
        if (kind, n, k) not in weights:
            weights = {(kind, n, k): random_rows(kind, n, k)}
        blocks = weights[kind, n, k]
        planes, a = to_planes(blocks, kind), torch.randn(m, k, device="cuda").bfloat16()
        sets = copies_of({"a": a, "planes": planes}, planes.numel())
        times = []
        for job in some:
            if failures[job]:
                print(f"  {job.tile}: {failures[job]}")
            elif not (wrong := error(job, run(job, a, planes), a, blocks)) < 6e-6:
                print(f"  {job.tile}: WRONG, error {wrong:.1e}")
            else:
                times.append((device_us(partial(run, job), sets), job.tile))
        if m > 128:
            us = device_us(partial(product_by_torch, kind=f"{kind}:planes"), sets)
            times.append((us, "product_by_torch"))
        times.sort(key=lambda entry: entry[0])
        print(f"{kind} {n}x{k} m{m}, {planes.numel() / 1e6:.1f} MB", flush=True)
        for us, tile in times[: None if options.all else 4]:
            print(f"  {us:8.2f} us {planes.numel() / us / 1e6:5.2f} TB/s {tile}", flush=True)


if __name__ == "__main__":
    main()
