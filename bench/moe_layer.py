"""The experts of one layer, of any of FORMATS: gate, up and SiLU, down, the weighted sum.

    python -m bench.moe_layer [--formats FORMAT ...] [--tokens N ...] [--beside grouped_mm]
                              [--json FILE]

A token's experts are drawn at random, different ones; those of a single token differ from call to
call, so that none is read twice from a cache. What is timed was held against the definition before.

A row is what a layer costs from routed ids and weights on: sorting the pairs and arranging the
activations are in it. Each call's first product stands behind the weighted sum of the call before,
so that a chain of calls is timed as a decoder would run them. ``--beside grouped_mm`` times
bfloat16 by torch's own grouped products too, of pairs sorted on the device.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import cache, partial

import torch
from torch import Tensor
from torch.nn.functional import silu

from bench.cases import code_of
from bench.launches import arch_here, meta_backend
from bench.results import Row, add_options, save_rows
from bench.timing import device_us
from ferrum_triton import get_backend
from ferrum_triton.backends.backend import Backend
from ferrum_triton.models.experts import DenseExperts, Experts, Fp8Experts, PackedExperts
from ferrum_triton.ops.fp8.codes import quantize_fp8_groups
from ferrum_triton.ops.quant import pack_sample
from ferrum_triton.quant import Fp8Blocks, QuantizedTensor
from ferrum_triton.quant.fp8 import BLOCK, num_blocks
from ferrum_triton.quant.kinds import format_of
from ferrum_triton.testing import TensorFactory, assert_close

# Packed formats by their kinds: int4g128 is what integers of four bits are laid out as.
PACKED = {"q4_K": "Q4_K:planes", "int4g128": "Q4_0:planes"}
FORMATS = (*PACKED, "bf16", "fp8_128x128")
NUM_EXPERTS, TOP_K, HIDDEN, INTERMEDIATE = 128, 8, 2048, 768
SHAPE = f"e{NUM_EXPERTS}k{TOP_K}h{HIDDEN}i{INTERMEDIATE}"
TOKENS = (1, 4, 8, 16, 64, 256, 1024, 4096)
# Calls in a replay: those of one token read all experts once.
CALLS = NUM_EXPERTS // TOP_K


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--formats", nargs="*", choices=FORMATS, default=FORMATS)
    parser.add_argument("--tokens", nargs="*", type=int, default=TOKENS, metavar="N")
    parser.add_argument("--beside", choices=("grouped_mm",), help="time it too, in bfloat16")
    add_options(parser)
    options = parser.parse_args()
    backend = get_backend("cuda")
    for form in options.formats:
        experts = experts_of(form, "cuda")
        call = partial(layer, backend, experts)
        for num_tokens in options.tokens:
            calls = tokens("cuda", num_tokens)
            want = defined(experts, **calls[0])
            assert_close(call(**calls[0]), want, scale=2)
            name, us = row_of(form, num_tokens), device_us(call, calls)
            peers = {}
            if options.beside and isinstance(experts, DenseExperts):
                assert_close(by_grouped_mm(experts, **calls[0]), want, scale=4)
                peers["grouped_mm"] = device_us(partial(by_grouped_mm, experts), calls)
            shown = "".join(f"  {peer} {value:.1f}" for peer, value in peers.items())
            print(f"{name:<48} {us:9.1f} us{shown}", flush=True)
            if options.json:
                row = Row(name, us, "us", peers=peers, code=code_of(name, arch_here()) or "")
                save_rows(options.json, [row], options.commit, options.dirty)


def row_of(form: str, num_tokens: int) -> str:
    """A row's name."""
    return f"moe_layer/{form}/{SHAPE}/t{num_tokens}"


def meta_call(row: str) -> Callable[[], Tensor] | None:
    """What is timed for a row, on meta tensors; None for a row of another bench."""
    bench, form, shape, count = (*row.split("/"), "", "", "")[:4]
    if bench != "moe_layer" or form not in FORMATS or shape != SHAPE:
        return None
    (call, *_) = tokens("meta", int(count.removeprefix("t")))
    return partial(layer, meta_backend(), _meta_experts(form), **call)


@cache  # packing 384 matrices takes 2 s even on meta tensors
def _meta_experts(form: str) -> Experts:
    return experts_of(form, "meta")


def experts_of(
    form: str,
    device: str,
    num_experts: int = NUM_EXPERTS,
    hidden: int = HIDDEN,
    intermediate: int = INTERMEDIATE,
) -> Experts:
    """Random experts of one of FORMATS, without a router."""
    make = TensorFactory(torch.bfloat16, device)
    common = {"router": torch.empty(0), "top_k": TOP_K}
    up, down = (intermediate, hidden), (hidden, intermediate)
    if form in PACKED:
        gate, up, down = (
            _packed_stack(make, PACKED[form], num_experts, *shape) for shape in (up, up, down)
        )
        return PackedExperts(**common, gate=gate, up=up, down=down)
    if form == "fp8_128x128":
        gate, up, down = (_fp8_stack(make, num_experts, *shape) for shape in (up, up, down))
        return Fp8Experts(**common, gate=gate, up=up, down=down)
    return DenseExperts(
        **common,
        gate_up=make.randn(num_experts, 2 * intermediate, hidden, scale=hidden**-0.5),
        down=make.randn(num_experts, hidden, intermediate, scale=intermediate**-0.5),
    )


def _packed_stack(
    make: TensorFactory, kind: str, num_experts: int, rows: int, k: int
) -> QuantizedTensor:
    num_blocks = k // format_of(kind).block_size
    matrices = [pack_sample(make, kind, rows, num_blocks) for _ in range(num_experts)]
    return QuantizedTensor(torch.stack(matrices), kind)


def _fp8_stack(make: TensorFactory, num_experts: int, rows: int, k: int) -> Fp8Blocks:
    codes = make.randn(num_experts, rows, k).to(torch.float8_e4m3fn)
    scales = make.weight(num_experts, num_blocks(rows), num_blocks(k))
    return Fp8Blocks(codes, scales * k**-0.5)


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


def layer(backend: Backend, experts: Experts, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """What is timed."""
    return experts.summed(backend, x, ids, weights)


def by_grouped_mm(experts: DenseExperts, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """The layer by torch's products of groups of rows."""
    expert = ids.flatten()
    order = expert.argsort(stable=True)
    token = order // ids.shape[1]
    numbers = torch.arange(len(experts.down), device=x.device)
    ends = (expert[:, None] == numbers).sum(0).cumsum(0).to(torch.int32)
    both = torch._grouped_mm(x[token], experts.gate_up.transpose(1, 2), offs=ends)
    gate, up = both.chunk(2, dim=-1)
    out = torch._grouped_mm(silu(gate) * up, experts.down.transpose(1, 2), offs=ends)
    y = torch.zeros(x.shape, device=x.device)
    return y.index_add_(0, token, out * weights.flatten()[order, None]).to(x.dtype)


def defined(experts: Experts, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """The layer in float32, an expert at a time; activations are those that its products take."""
    y = torch.zeros(x.shape, device=x.device)
    for expert in range(experts.matrices[-1].shape[0]):
        token, slot = (ids == expert).nonzero(as_tuple=True)
        if len(token):
            *gate_up, down = (_decoded(stack, expert) for stack in experts.matrices)
            both = _multiplied(experts, x[token]) @ torch.cat(gate_up).T
            gate, up = both.chunk(2, dim=-1)
            middle = _multiplied(experts, silu(gate) * up)
            y.index_add_(0, token, middle @ down.T * weights[token, slot, None])
    return y


def _multiplied(experts: Experts, a: Tensor) -> Tensor:
    """Activations as products with such weights take them."""
    if not isinstance(experts, Fp8Experts):
        return a.float()
    codes, scales = quantize_fp8_groups.reference(a.to(torch.bfloat16))
    return codes.float() * scales.repeat_interleave(BLOCK, 1)[:, : a.shape[1]]


def _decoded(stack: Tensor | QuantizedTensor | Fp8Blocks, expert: int) -> Tensor:
    """The matrix of one expert in float32."""
    if isinstance(stack, QuantizedTensor):
        return stack.expert(expert).dequantize()
    if isinstance(stack, Fp8Blocks):
        return Fp8Blocks(stack.weight[expert], stack.scales[expert]).dequantize()
    return stack[expert].float()


if __name__ == "__main__":
    main()
