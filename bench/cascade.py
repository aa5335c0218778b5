"""Decoding of sequences that share a prefix: at once, and with the prefix attended to once for all.

    python -m bench.cascade [--json FILE]

The queries of all sequences are those of one sequence's heads that share a KV head: it sees the
prefix whole, and reads it once. What the sequences have of their own is a decode step like any
other, and the two are merged.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bench.cases import code_of
from bench.launches import arch_here, meta_backend
from bench.results import Row, add_options, save_rows
from bench.timing import device_us
from ferrum_triton import get_backend
from ferrum_triton.backends.backend import Backend
from ferrum_triton.testing import TensorFactory, assert_close

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE = 32, 8, 128, 16
ROW = re.compile(r"cascade/h32k8d128/b(\d+)/prefix(\d+)/suffix(\d+)")
CASES = ((16, 8192, 256), (64, 1024, 1024), (64, 8192, 512), (64, 32768, 512))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_options(parser)
    options = parser.parse_args()
    backend = get_backend("cuda")
    for batch, prefix, suffix in CASES:
        calls = [sample("cuda", batch, prefix, suffix, seed) for seed in range(2)]
        assert_close(cascade(backend, **calls[0]), whole(backend, **calls[0]), scale=2)
        name = f"cascade/h32k8d128/b{batch}/prefix{prefix}/suffix{suffix}"
        plain = device_us(partial(whole, backend), calls)
        merged = device_us(partial(cascade, backend), calls)
        print(f"{name:<48} {merged:9.1f} us, {plain:9.1f} us without")
        if options.json:
            code = code_of(name, arch_here()) or ""
            row = Row(name, merged, "us", peers={"without": plain}, code=code)
            save_rows(options.json, [row], options.commit, options.dirty)


def meta_call(row: str) -> Callable[[], Any] | None:
    """What is timed for a row, on meta tensors; None for a row of another bench."""
    match = ROW.fullmatch(row)
    if match is None:
        return None
    call = sample("meta", *map(int, match.groups()), seed=0)
    return partial(cascade, meta_backend(), **call)


def sample(
    device: str, batch: int, prefix: int, suffix: int, seed: int, dtype: Any = torch.bfloat16
) -> dict[str, Any]:
    """Queries [batch, num_heads, head_dim], a pool, and tables of the prefix and the suffixes."""
    make = TensorFactory(dtype, device, seed)
    shared, own = prefix // BLOCK_SIZE, -(-suffix // BLOCK_SIZE)
    num_blocks = shared + batch * own
    order = make.distinct_ints(0, num_blocks, num_blocks)
    pool = (num_blocks, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM)
    prefix_table, suffix_tables = order[None, :shared], order[shared:].view(batch, own)
    return {
        "q": make.randn(batch, NUM_HEADS, HEAD_DIM),
        "k_cache": make.randn(*pool),
        "v_cache": make.randn(*pool),
        "prefix_table": prefix_table,
        "suffix_tables": suffix_tables,
        "tables": torch.cat((prefix_table.expand(batch, -1), suffix_tables), dim=1),
        "prefix_len": make.ints(prefix, prefix + 1, 1),
        "suffix_lens": make.ints(suffix, suffix + 1, batch),
        "lens": make.ints(prefix + suffix, prefix + suffix + 1, batch),
    }


def whole(
    backend: Backend,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    tables: Tensor,
    lens: Tensor,
    **_: Any,
) -> Tensor:
    """Every sequence reads the prefix for itself."""
    return backend.paged_decode_attention(q[:, None], k_cache, v_cache, tables, lens)[:, 0]


def cascade(
    backend: Backend,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    prefix_table: Tensor,
    prefix_len: Tensor,
    suffix_tables: Tensor,
    suffix_lens: Tensor,
    **_: Any,
) -> Tensor:
    """The prefix is read once."""
    batch, group = len(q), NUM_HEADS // NUM_KV_HEADS
    # [kv_head, sequence, head of the group]: heads of one sequence.
    by_kv_head = q.view(batch, NUM_KV_HEADS, group, HEAD_DIM).transpose(0, 1)
    heads = by_kv_head.reshape(1, 1, batch * NUM_HEADS, HEAD_DIM)
    sums = q.new_empty(1, 1, batch * NUM_HEADS, dtype=torch.float32)
    out = backend.paged_decode_attention(
        heads, k_cache, v_cache, prefix_table, prefix_len, lse=sums
    )
    own_sums = q.new_empty(batch, 1, NUM_HEADS, dtype=torch.float32)
    own = backend.paged_decode_attention(
        q[:, None], k_cache, v_cache, suffix_tables, suffix_lens, lse=own_sums
    )
    out = out.view(NUM_KV_HEADS, batch, group, HEAD_DIM).transpose(0, 1).flatten(1, 2)
    sums = sums.view(NUM_KV_HEADS, batch, group).transpose(0, 1).flatten(1, 2)
    merged, _ = backend.merge_attention_states(
        torch.stack((out, own[:, 0])), torch.stack((sums, own_sums[:, 0]))
    )
    return merged


if __name__ == "__main__":
    main()
