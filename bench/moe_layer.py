"""The experts of one layer with weights in planes: gate, up and SiLU, down, and the weighted sum.

    python -m bench.moe_layer [--tokens N ...] [--json FILE]

A token's experts are drawn at random, different ones; those of a single token differ from call to
call, so that none is read twice from a cache. Up to FEW tokens each pair reads its expert's rows;
more are sorted by expert first. What is timed was held against the definition before.

A row is what a layer costs from routed ids and weights on: sorting the pairs and arranging the
activations are in it. Each call's first product stands behind the weighted sum of the call before,
so that a chain of calls is timed as a decoder would run them.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from bench.cases import code_of
from bench.launches import arch_here, meta_backend
from bench.results import Row, add_options, save_rows
from bench.timing import device_us
from ferrum_triton import get_backend
from ferrum_triton.backends.backend import Backend
from ferrum_triton.ops.quant import pack_sample
from ferrum_triton.quant import dequantize_rows
from ferrum_triton.quant.kinds import format_of
from ferrum_triton.testing import TensorFactory, assert_close

KIND = "Q4_K:planes"
NUM_EXPERTS, TOP_K, HIDDEN, INTERMEDIATE = 128, 8, 2048, 768
ROWS = f"moe_layer/q4_K/e{NUM_EXPERTS}k{TOP_K}h{HIDDEN}i{INTERMEDIATE}/t"
TOKENS = (1, 8, 16, 64, 256, 4096)
# Up to so many tokens a pair reads its expert's rows by itself.
FEW = 16
# Calls in a replay: those of one token read all experts once.
CALLS = NUM_EXPERTS // TOP_K


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", nargs="*", type=int, default=TOKENS, metavar="N")
    add_options(parser)
    options = parser.parse_args()
    backend = get_backend("cuda")
    gate_up, down = stacks("cuda")
    call = partial(layer, backend, gate_up=gate_up, down=down)
    for num_tokens in options.tokens:
        calls = tokens("cuda", num_tokens)
        assert_close(call(**calls[0]), defined(**calls[0], gate_up=gate_up, down=down), scale=2)
        name = f"{ROWS}{num_tokens}"
        us = device_us(call, calls)
        print(f"{name:<48} {us:9.1f} us", flush=True)
        if options.json:
            row = Row(name, us, "us", code=code_of(name, arch_here()) or "")
            save_rows(options.json, [row], options.commit, options.dirty)


def meta_call(row: str) -> Callable[[], Tensor] | None:
    """What is timed for a row, on meta tensors; None for a row of another bench."""
    if not row.startswith(ROWS):
        return None
    (call, *_) = tokens("meta", int(row.removeprefix(ROWS)))
    shapes = ((NUM_EXPERTS, 2, INTERMEDIATE, HIDDEN), (NUM_EXPERTS, HIDDEN, INTERMEDIATE))
    gate_up, down = (
        torch.empty((*rows, format_of(KIND).row_bytes(k)), dtype=torch.uint8, device="meta")
        for *rows, k in shapes
    )
    return partial(layer, meta_backend(), **call, gate_up=gate_up, down=down)


def stacks(
    device: str,
    num_experts: int = NUM_EXPERTS,
    hidden: int = HIDDEN,
    intermediate: int = INTERMEDIATE,
) -> tuple[Tensor, Tensor]:
    """The experts' gate and up [num_experts, 2, intermediate, ..], and down [.., hidden, ..]."""
    make = TensorFactory(torch.bfloat16, device)
    count = 2 * num_experts
    gate_up = [pack_sample(make, KIND, intermediate, hidden // 256) for _ in range(count)]
    down = [pack_sample(make, KIND, hidden, intermediate // 256) for _ in range(num_experts)]
    return torch.stack(gate_up).unflatten(0, (num_experts, 2)), torch.stack(down)


def tokens(
    device: str,
    num_tokens: int,
    num_experts: int = NUM_EXPERTS,
    top_k: int = TOP_K,
    hidden: int = HIDDEN,
) -> list[dict[str, Tensor]]:
    """Activations [num_tokens, hidden], ids and weights [num_tokens, top_k] of each call."""
    calls = []
    for i in range(CALLS if num_tokens < 64 else 4):
        make = TensorFactory(torch.bfloat16, device, seed=i)
        order = torch.rand(num_tokens, num_experts, generator=torch.Generator().manual_seed(i))
        if num_tokens == 1:
            order[0] = -(torch.arange(num_experts) - top_k * i).remainder(num_experts).float()
        calls.append(
            {
                "x": make.randn(num_tokens, hidden),
                "ids": order.topk(top_k).indices.to(device, torch.int32),
                "weights": make.randn(num_tokens, top_k).float().softmax(-1),
            }
        )
    return calls


def layer(
    backend: Backend, x: Tensor, ids: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor
) -> Tensor:
    num_experts, top_k, n = len(gate_up), ids.shape[1], gate_up.shape[2]
    gate, up = gate_up.unbind(1)
    if len(x) <= FEW:
        inner = backend.gemv_quant_moe_id_gate_up_silu(x, gate, up, ids, KIND, KIND)
        slots = backend.gemv_quant_moe_id(inner, down, ids, KIND)
    else:
        buckets, tpe, _ = backend.compute_ids_tpe(ids, num_experts, n, down.shape[1])
        inner = backend.gemm_quant_moe_id_gate_up_silu(x, gate, up, buckets, tpe, KIND, KIND, top_k)
        slots = backend.gemm_quant_moe_id(inner, down, buckets, tpe, KIND, top_k)
    return backend.weighted_sum(slots, weights)


def defined(x: Tensor, ids: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """The layer in float32, an expert at a time."""
    y = torch.zeros(x.shape, device=x.device)
    for expert in range(len(gate_up)):
        token, slot = (ids == expert).nonzero(as_tuple=True)
        if len(token):
            gate, up = (x[token].float() @ dequantize_rows(w, KIND).T for w in gate_up[expert])
            inner = torch.nn.functional.silu(gate) * up
            out = inner @ dequantize_rows(down[expert], KIND).T
            y.index_add_(0, token, out * weights[token, slot, None])
    return y


if __name__ == "__main__":
    main()
