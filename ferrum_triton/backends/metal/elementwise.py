"""Activations as shaders: a thread an element."""

from torch import Tensor

from ferrum_triton.backends.metal.shader import Shader, delivered, result
from ferrum_triton.ops import elementwise as ops

ACTIVATE = Shader("elementwise", "activate", "y x", "count activation")
MULTIPLY = Shader("elementwise", "activate_multiply", "y gate up", "count activation")
SPLIT = Shader("elementwise", "activate_multiply_split", "y gate_up", "count columns activation")
THREADS = 128
SILU, GELU, GELU_TANH = range(3)  # as the source numbers them


def grid(count: int) -> dict[str, int]:
    """Groups enough for ``count`` threads."""
    return {"groups": -(-count // THREADS), "threads": THREADS}


@ops.gelu.impl("metal")
def gelu(x: Tensor, *, out: Tensor | None = None) -> Tensor:
    y = result(x, x.shape, out)
    if count := y.numel():
        ACTIVATE.launch({"SCALAR": x.dtype}, (y, x.contiguous()), (count, GELU), **grid(count))
    return delivered(y, out)


@ops.silu_mul.impl("metal")
def silu_mul(gate: Tensor, up: Tensor, *, out: Tensor | None = None) -> Tensor:
    y = result(gate, gate.shape, out)
    if count := y.numel():
        buffers = (y, gate.contiguous(), up.contiguous())
        MULTIPLY.launch({"SCALAR": gate.dtype}, buffers, (count, SILU), **grid(count))
    return delivered(y, out)


def _split(gate_up: Tensor, out: Tensor | None, activation: int) -> Tensor:
    columns = gate_up.shape[-1] // 2
    y = result(gate_up, (*gate_up.shape[:-1], columns), out)
    if count := y.numel():
        params = (count, columns, activation)
        SPLIT.launch({"SCALAR": y.dtype}, (y, gate_up.contiguous()), params, **grid(count))
    return delivered(y, out)


@ops.fused_silu_mul_split.impl("metal")
def fused_silu_mul_split(gate_up: Tensor, *, out: Tensor | None = None) -> Tensor:
    return _split(gate_up, out, SILU)


@ops.fused_gelu_mul_split.impl("metal")
def fused_gelu_mul_split(gate_up: Tensor, *, out: Tensor | None = None) -> Tensor:
    return _split(gate_up, out, GELU)


@ops.fused_gelu_tanh_mul_split.impl("metal")
def fused_gelu_tanh_mul_split(gate_up: Tensor, *, out: Tensor | None = None) -> Tensor:
    return _split(gate_up, out, GELU_TANH)
