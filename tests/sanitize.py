"""Calls of every op for a memory checker to watch, on a CUDA device.

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck --error-exitcode 1 \\
        --kernel-name-exclude kns=at:: python -m tests.sanitize

and again with ``--tool racecheck``. Without torch's caching every tensor is an allocation of its
own, so that a read past its end is seen. Shapes, formats and dtypes are drawn by ``--seed``;
``--shard 1/4`` takes every fourth op. Results are checked by the other tests.
"""

from __future__ import annotations

import argparse
import random
import time

import torch

from ferrum_triton import OPS, get_backend
from ferrum_triton.registry import Op
from tests.harness import sample
from tests.test_attention_fuzz import ALIKE, decode_call, varlen_call

LONGEST, DIMS = 1500, (64, 80, 128, 256)
# Attention over pools, whose axes do not say which of their values go together.
LONG_CALLS = {"paged_decode_attention": decode_call, "paged_varlen_attention": varlen_call}


def drawn(op: Op, pick: random.Random, backend, seed: int) -> dict:
    """Arguments of a call, of any shape that the op takes."""
    dtype = pick.choice(op.dtypes)
    if op.name in LONG_CALLS and seed % 2:
        return LONG_CALLS[op.name](pick, backend, dtype, LONGEST, DIMS, ALIKE * seed)[1]
    axes = {name: pick.choice(list(values)) for name, values in op.axes.items()}
    if "max_len" in axes and seed % 2:  # long enough to be cut into parts
        axes["max_len"] = pick.randrange(1, LONGEST)
    return sample(op, dtype, backend.device, seed, **axes)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.sanitize", description=__doc__)
    parser.add_argument("ops", nargs="*", help="ops to call (default: all that have kernels)")
    parser.add_argument("--count", type=int, default=10, help="calls of each")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--shard", default="1/1", help="which part of the ops: 1/4 to 4/4")
    parser.add_argument("--backend", default="cuda", choices=("cuda", "interpret"))
    options = parser.parse_args()
    backend = get_backend(options.backend)
    part, parts = map(int, options.shard.split("/"))
    names = options.ops or [name for name, op in OPS.items() if "triton" in op.impls]
    for name in names[part - 1 :: parts]:
        start = time.monotonic()
        for seed in range(options.seed, options.seed + options.count):
            call = drawn(OPS[name], random.Random(f"{name}/{seed}"), backend, seed)
            getattr(backend, name)(**call)
            if options.backend == "cuda":
                torch.cuda.synchronize()
        print(f"{name}: {options.count} calls, {time.monotonic() - start:.1f} s", flush=True)


if __name__ == "__main__":
    main()
