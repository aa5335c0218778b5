"""How fast packed weights reach the GPU, in planes, from a mapped file.

    python -m bench.load_speed [--json FILE] [--commit HASH]

The file has been read before, so that it lies in the host's page cache: what is timed is the copy
to the device and the laying out there, not the disk.
"""

from __future__ import annotations

import argparse
import mmap
import statistics
import tempfile
import time
from pathlib import Path

import torch

from bench.results import Row, add_options, print_rows, save_rows
from ferrum_triton.quant import FORMATS, QuantizedTensor, load_quant

KIND, NUM_ROWS, NUM_COLS = "Q4_K", 28672, 4096
COPIES = 8  # of the matrix, one below the other: half a gigabyte
TIMES = 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_options(parser)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "weights"
        write_random(path, COPIES * NUM_ROWS * FORMATS[KIND].row_bytes(NUM_COLS))
        speed = gb_per_second(path, KIND, COPIES * NUM_ROWS, NUM_COLS, "cuda")
    rows = [Row(f"load_quant/{KIND[0].lower()}{KIND[1:]}/n{NUM_ROWS}k{NUM_COLS}", speed, "gbs")]
    print_rows(rows)
    if options.json:
        save_rows(options.json, rows, options.commit, options.dirty)


def write_random(path: Path, num_bytes: int) -> None:
    """A file of random bytes, which are blocks of any format."""
    path.write_bytes(torch.randint(0, 256, (num_bytes,), dtype=torch.uint8).numpy().data)


def load(path: Path, kind: str, num_rows: int, num_cols: int, device: str) -> QuantizedTensor:
    """The matrix that the file holds, in planes on ``device``."""
    with path.open("rb") as file:
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    return load_quant(kind, data, num_rows, num_cols, device, planes=True)


def gb_per_second(
    path: Path, kind: str, num_rows: int, num_cols: int, device: str, times: int = TIMES
) -> float:
    """Median of some loads, in 1e9 bytes of the file, after one that is not timed."""
    seconds = []
    for _ in range(times + 1):
        start = time.perf_counter()
        load(path, kind, num_rows, num_cols, device)
        if device == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return path.stat().st_size / 1e9 / statistics.median(seconds[1:])


if __name__ == "__main__":
    main()
